"""Which library quantizes here, and what to install if there is none.

Versions are read from the packages' metadata: with another torch than its own, importing Intel's extension ends the process.
"""

from __future__ import annotations

from typing import Literal

from lowprec_check.engine.core.package_versions import MinorVersion, installed_version, minor_version
from lowprec_check.engine.stack.intel_extension import extension_problem

Library = Literal["ipex", "torchao"]

FITTING = {(2, 6): "0.12.0", (2, 7): "0.12.0", (2, 8): "0.13.0", (2, 9): "0.15.0", (2, 10): "0.16.0"}
"""The torchao for a minor version of torch, by torchao's own table of the torch that each release was built with."""

NEWEST = "0.18.0"
"""The torchao for torch 2.11 and later. 0.16 and 0.17 fail in ``convert_pt2e`` on torch 2.13."""


def library() -> Library | None:
    """What quantizes on the installed torch: Intel's extension if it fits, else torchao if it does; ``None`` if neither."""
    if extension_problem() is None:
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


def version_of(package: str) -> MinorVersion | None:
    """Major and minor version of an installed package; ``None`` if it is not installed."""
    return minor_version(installed_version(package))


def _torchao_fits() -> bool:
    """Whether torchao is installed, is not older than what fits, and is not so new that this torch lacks what it imports."""
    installed, torch, oldest = version_of("torchao"), version_of("torch"), minor_version(fitting_torchao())
    if installed is None or torch is None or oldest is None:
        return False
    newest_torch_of_table = max(FITTING)
    return installed >= oldest if torch > newest_torch_of_table else installed == oldest
