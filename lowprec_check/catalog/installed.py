"""The installed torch, as a release of the catalog, without importing it."""

from __future__ import annotations

import importlib.metadata

from lowprec_check.catalog.declared import release_of


def installed_release() -> str:
    """``2.13`` for torch 2.13.0+cpu; empty if torch is not installed."""
    try:
        return release_of(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return ""
