"""Versions of packages, and of torch: ``2.13.0+cpu``, whose release is ``2.13``."""

from __future__ import annotations

import os
import re

from lowprec_check.errors import UsageError
from lowprec_check.schema.registry import metadata_folders


def version_key(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version, for comparing: (2, 13, 0) for `2.13.0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return tuple(map(int, found[0].split(".")))


def release_of(version: str) -> str:
    """`2.13` for `2.13.0+cpu` and `v2.13`; raises :class:`UsageError` if it is not a version."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)([.+a-z-][\w.+-]*)?", version)
    if found is None:
        raise UsageError(f"{version!r} is not a version of torch.", "Give one version: 2.13 or 2.13.0.")
    return f"{found[1]}.{found[2]}"


def has_extension(version: str) -> bool:
    """Whether a version includes Intel's extension: `2.8+ipex`."""
    return version.partition("+")[2].startswith("ipex")


def installed_version(package: str) -> str | None:
    """The version of an installed package, from its metadata; ``None`` if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """The version of this package, which may run from a checkout that is not installed."""
    return installed_version("lowprec-check") or "0+unknown"


def installed_release() -> str:
    """`2.13` for torch 2.13.0+cpu; empty if torch is not installed. Does not import torch."""
    pattern = r"torch(?:-([^-]+)(?:-py.+)?)?\.(?:dist|egg)-info"
    names = (re.fullmatch(pattern, os.path.basename(folder), re.IGNORECASE) for folder in metadata_folders())
    name = next(filter(None, names), None)
    version = (name and name[1]) or installed_version("torch")
    return release_of(version) if version else ""
