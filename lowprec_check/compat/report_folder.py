"""The folder that ``compat`` writes: its lock, its files, and what an earlier run left in it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from lowprec_check.errors import UsageError
from lowprec_check.report.matrix import matrix_document
from lowprec_check.report.registry import format_of, write
from lowprec_check.schema.base import make_folder, write_file
from lowprec_check.schema.matrix import Matrix, MatrixRow
from lowprec_check.schema.scan_result import ResultError, ScanResult

# -- The files of a row in the output folder, as far as they are complete

# The suffixes of the pages, and how a complete page ends.
_ENDS = {".md": b"</details>", ".html": b"</html>"}

# Bytes at the end of a page that are read: pages with charts have megabytes.
_LONGEST_END = 20


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


def missing_pages(folder: Path, row: MatrixRow) -> list[Path]:
    """The pages of a row that are missing or incomplete; a row without a scan has none."""
    missing = []
    for suffix, end in _ENDS.items() if row.state == "scanned" else ():
        page, last = page_path(folder, row, suffix), b""
        with contextlib.suppress(OSError), page.open("rb") as file:
            file.seek(max(0, page.stat().st_size - _LONGEST_END))
            last = file.read()
        if not last.rstrip().endswith(end):
            missing.append(page)
    return missing


def is_done(folder: Path, row: MatrixRow) -> bool:
    """Whether a row need not be scanned again: it failed, or its scan or its pages are saved."""
    if row.state == "failed" or saved_scan(folder, row) is not None:
        return True
    return not scan_path(folder, row).exists() and not missing_pages(folder, row)


# -- The folder: an index and one page per model, in Markdown and HTML


class ReportFolder:
    """Makes ``folder``, locks it against other runs, and writes the report into it.

    The lock is on the folder itself and leaves no file; it ends with the process. What cannot be
    written is a :class:`UsageError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        """The descriptor of the folder that is locked."""

    def __enter__(self) -> ReportFolder:
        self._prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self._unlock()

    def _prepare(self) -> None:
        """Make and lock the folder, also if it was removed while the scans ran."""
        make_folder(self.folder / "models")
        with contextlib.suppress(OSError):
            if self._lock is not None and os.path.samestat(os.fstat(self._lock), self.folder.stat()):
                return
        if sys.platform == "win32":  # which cannot lock a folder
            return
        self._unlock()
        import fcntl

        with contextlib.suppress(OSError):  # some network file systems have no locks
            self._lock = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._unlock()
                hint = "Wait until it has ended, or choose another folder with -o."
                raise UsageError(f"Another compat run is writing to {self.folder}.", hint) from None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def model(self, row: MatrixRow, result: ScanResult | None) -> None:
        """Write the pages of one model; a model that failed has none."""
        self._prepare()
        if result is not None:
            for suffix in _ENDS:
                write(result, page_path(self.folder, row, suffix))

    def index(self, matrix: Matrix) -> list[MatrixRow]:
        """Write the index and missing pages; return rows without page and saved scan."""
        self._prepare()
        without = []
        for row in matrix.rows:
            missing = missing_pages(self.folder, row)
            if not missing:
                continue
            result = saved_scan(self.folder, row)
            if result is None:
                without.append(row)
                continue
            for page in missing:
                write(result, page)
        for suffix in _ENDS:
            index = self.folder / f"index{suffix}"
            write_file(index, format_of(index).lay_out(matrix_document(matrix, pages=suffix)))
        return without
