"""The folder that ``compat`` writes: an index and one page per model, in Markdown and optionally in HTML."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from lowprec_check.compat.folder_lock import FolderLock
from lowprec_check.compat.saved_files import missing_pages, page_path, saved_scan
from lowprec_check.report.matrix import matrix_document, matrix_page
from lowprec_check.report.registry import FORMATS, write
from lowprec_check.schema.base import make_folder, write_file
from lowprec_check.schema.matrix import Matrix, MatrixRow
from lowprec_check.schema.scan_result import ScanResult


class ReportFolder:
    """Context manager that makes ``folder``, locks it, and writes the report into it.

    Entering it and its methods raise :class:`UsageError` if the folder cannot be written or another run writes to it.
    """

    def __init__(self, folder: Path, title: str, *, html: bool) -> None:
        self.folder, self.title = folder, title
        self.suffixes = [".md", *([".html"] if html else [])]
        self._lock = FolderLock(folder)
        if html:
            FORMATS.get("html").check_available()

    def __enter__(self) -> ReportFolder:
        self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def model(self, row: MatrixRow, result: ScanResult | None) -> None:
        """Write the pages of one model; a model that failed has none."""
        self._prepare()
        if result is not None:
            for suffix in self.suffixes:
                write(result, page_path(self.folder, row, suffix))

    def index(self, found: Matrix) -> list[MatrixRow]:
        """Write the index, and the pages missing because an earlier call was interrupted.

        Returns the rows whose pages cannot be made, because their saved scans are missing too.
        """
        self._prepare()
        without = [row for row in found.rows if not self._complete(row)]
        for suffix in self.suffixes:
            document = matrix_document(found, self.title, pages=suffix)
            write_file(self.folder / f"index{suffix}", matrix_page(document, suffix))
        return without

    def _complete(self, row: MatrixRow) -> bool:
        """Make the missing pages of a row; returns whether it has all."""
        missing = missing_pages(self.folder, row, self.suffixes)
        if not missing:
            return True
        result = saved_scan(self.folder, row)
        if result is None:
            return False
        for page in missing:
            write(result, page)
        return True

    def _prepare(self) -> None:
        """Make and lock the folder, also if it was removed while the scans ran."""
        make_folder(self.folder / "models")
        self._lock.acquire()
