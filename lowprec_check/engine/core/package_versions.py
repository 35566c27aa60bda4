"""The versions of installed packages, from their metadata. Never imports torch or the packages."""

from __future__ import annotations

import importlib.metadata
import re

IPEX = "intel-extension-for-pytorch"

MinorVersion = tuple[int, int]
"""Major and minor number: releases of torch and of what is built for it fit if both agree."""


def installed_version(package: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_version(version: str | None) -> MinorVersion | None:
    """``(2, 8)`` of ``2.8.0+cpu``; ``None`` if it does not start with two numbers, or there is none."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None
