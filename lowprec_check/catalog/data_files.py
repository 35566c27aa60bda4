"""The location of the catalog's data: inside the installed package, or at the root of a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lowprec_check.errors import UsageError


@cache
def data_folder() -> Path:
    """The folder with the catalog's files: `lowprec_check/data` of a wheel, `catalog` of a checkout.

    Raises `UsageError` if neither exists (a broken installation).
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data", package.parent / "catalog"):
        if folder.is_dir():
            return folder
    raise UsageError(f"The catalog's data files are missing: no folder {package / 'data'}.", "Reinstall lowprec-check.")
