"""Installed packages and the CPU, read without importing the packages. Never imports torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lowprec_check.catalog.versions import installed_version

IPEX = "intel-extension-for-pytorch"

LAST_FIT = (2, 8)  # the torch of the last release of Intel's extension, 2.8.0: it is archived

ARCHIVED = "Intel's extension is archived and its last release fits torch 2.8 only"

MinorVersion = tuple[int, int]
"""Major and minor number: releases of torch and of what is built for it fit if both agree."""


def minor_version(version: str | None) -> MinorVersion | None:
    """``(2, 8)`` of ``2.8.0+cpu``; ``None`` if it does not start with two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None:
        return None
    return int(numbers[1]), int(numbers[2])


def extension_problem() -> str | None:
    """Why Intel's extension cannot be imported here; ``None`` if it is installed with its torch."""
    # Compared without importing it: beside another torch than its own, it calls ``os._exit(127)``.
    torch, extension = installed_version("torch") or "of an unknown version", installed_version(IPEX)
    install = f"run pip install torch==2.8.0 {IPEX}==2.8.0"
    if extension is None and (minor_version(torch) or LAST_FIT) > LAST_FIT:
        return f"{ARCHIVED}, but torch {torch} is installed; use torch.compile instead"
    if extension is None:
        return f"{IPEX} is not installed; {install}"
    if minor_version(extension) != minor_version(torch):
        needed = ".".join(map(str, minor_version(extension) or ()))
        return (
            f"{IPEX} {extension} needs torch {needed}, but torch {torch} is installed, and importing it would end "
            f"the process; {install}"
        )
    return None


# By dtype, the instructions with which ``ipex.optimize`` prepacks weights, and their flags in
# ``/proc/cpuinfo``. Source: ``frontend.optimize`` of the extension 2.8. ``AVX-NE-CONVERT`` would
# do too, but Linux does not list it.
_PREPACKS = {
    "bfloat16": ("AVX-512", ("avx512bw", "avx512vl", "avx512dq")),
    "float16": ("AVX512-FP16", ("avx512_fp16",)),
}


def prepack_problem(dtype: str) -> str | None:
    """Why ``ipex.optimize`` cannot prepack weights in ``dtype`` on this CPU; ``None`` if it can."""
    # Variables of the environment limit which instructions oneDNN and torch use.
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    is_old = limit.startswith(("SSE", "AVX2")) or limit == "AVX"
    has_no_fp16 = limit in ("AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    flags = []
    if not (is_old or (dtype == "float16" and has_no_fp16) or capability in ("default", "avx2")):
        flags = cpu_info("flags").split()
    instructions, needed = _PREPACKS.get(dtype, ("", ()))
    if all(flag in flags for flag in needed):
        return None
    return f"without {instructions}, ipex.optimize cannot prepack weights in {dtype} and needs weights_prepack=False"


def missing_packages(*packages: str) -> str | None:
    """``onnx, which is not installed: pip install onnx``; ``None`` if no package is missing."""
    missing = [package for package in packages if installed_version(package) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)}, which {are} not installed: pip install {' '.join(missing)}"


def cpu_info(field: str) -> str:
    """A field (``model name``, ``flags``) of the first core in ``/proc/cpuinfo``, or ``""``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
