"""The files of a row in the output folder, as far as they are complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lowprec_check.schema.matrix import MatrixRow
from lowprec_check.schema.scan_result import ResultError, ScanResult

_ENDS = {".md": b"</details>", ".html": b"</html>"}
"""How a complete page ends."""

_LONGEST_END = 20
"""Bytes at the end of a page that are read: pages with charts have megabytes."""


def scan_path(folder: Path, row: MatrixRow) -> Path:
    """The file with the result of a row's scan."""
    return folder / "scans" / f"{row.slug}.json"


def page_path(folder: Path, row: MatrixRow, suffix: str) -> Path:
    """The page of a row."""
    return folder / "models" / f"{row.slug}{suffix}"


def saved_scan(folder: Path, row: MatrixRow) -> ScanResult | None:
    """The result of a row's scan; ``None`` if it is missing or incomplete."""
    try:
        return ScanResult.load(scan_path(folder, row))
    except (OSError, ResultError):
        return None


def missing_pages(folder: Path, row: MatrixRow, suffixes: Iterable[str]) -> list[Path]:
    """The pages of a row that are missing or incomplete; a row without a scan has none."""
    pages = [page_path(folder, row, suffix) for suffix in suffixes] if row.state == "scanned" else []
    return [page for page in pages if not _is_complete(page)]


def _is_complete(page: Path) -> bool:
    try:
        with page.open("rb") as file:
            file.seek(max(0, page.stat().st_size - _LONGEST_END))
            return file.read().rstrip().endswith(_ENDS[page.suffix])
    except OSError:
        return False


def needs_scan(folder: Path, row: MatrixRow, suffixes: Iterable[str]) -> bool:
    """Whether a scanned row must be scanned again: its scan is incomplete, or missing together with a page."""
    if saved_scan(folder, row) is not None:
        return False
    return scan_path(folder, row).exists() or bool(missing_pages(folder, row, suffixes))
