"""Where the catalog's data lie: inside the installed package, or at the root of a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lowprec_check.errors import UsageError


@cache
def data_folder() -> Path:
    """The folder with the catalog's files: `lowprec_check/data` of a wheel, `catalog` of a checkout.

    Raises `UsageError` where neither is there (an installation that lost its data).
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data", package.parent / "catalog"):
        if folder.is_dir():
            return folder
    raise UsageError(f"the catalog's data are missing beside {package}", hint="reinstall lowprec-check")
