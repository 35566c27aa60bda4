"""Which library quantizes here, and what to install if there is none. Never imports torch.

Versions are read from the packages' metadata: with another torch than its own, importing Intel's extension ends the process.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Literal

Library = Literal["ipex", "torchao"]

IPEX = "intel-extension-for-pytorch"

FITTING = {(2, 6): "0.12.0", (2, 7): "0.12.0", (2, 8): "0.13.0", (2, 9): "0.15.0", (2, 10): "0.16.0"}
"""The torchao for a minor version of torch, by torchao's own table of the torch that each release was built with."""

NEWEST = "0.18.0"
"""The torchao for torch 2.11 and later. 0.16 and 0.17 fail in ``convert_pt2e`` on torch 2.13."""

Version = tuple[int, int]


def library() -> Library | None:
    """What quantizes on the installed torch: Intel's extension if it fits, else torchao if it does; ``None`` if neither."""
    ipex = version_of(IPEX)
    if ipex is not None and ipex == version_of("torch"):
        return "ipex"
    return "torchao" if _torchao_fits() else None


def missing() -> str:
    """What to install, if :func:`library` is ``None``."""
    installed, needed = version_of("torchao"), f"pip install torchao=={fitting_torchao()}"
    torch = ".".join(map(str, version_of("torch") or ()))
    if installed is None:
        return f"it needs torchao, which is not installed: {needed}"
    return f"torchao {'.'.join(map(str, installed))} does not fit torch {torch}: {needed}"


def fitting_torchao() -> str:
    """The version of torchao for the installed torch."""
    torch = version_of("torch")
    return FITTING.get(torch, NEWEST) if torch is not None else NEWEST


def version_of(package: str) -> Version | None:
    """Major and minor version of an installed package; ``None`` if it is not installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def _torchao_fits() -> bool:
    """Whether torchao is installed, is not older than what fits, and is not so new that this torch lacks what it imports."""
    installed, torch = version_of("torchao"), version_of("torch")
    if installed is None or torch is None:
        return False
    newest_torch_of_table = max(FITTING)
    oldest = version_text(fitting_torchao())
    return installed >= oldest if torch > newest_torch_of_table else installed == oldest


def version_text(text: str) -> Version:
    """``0.18.0`` as ``(0, 18)``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
