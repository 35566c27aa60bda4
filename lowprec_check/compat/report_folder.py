"""The folder that ``compat`` writes: an index and one page per model, in Markdown and optionally in HTML."""

from __future__ import annotations

from pathlib import Path

from lowprec_check.errors import UsageError
from lowprec_check.report import matrix
from lowprec_check.report.registry import FORMATS, save_text, write
from lowprec_check.schema.matrix import Matrix, MatrixRow
from lowprec_check.schema.scan_result import ResultError, ScanResult


class ReportFolder:
    """Writes the report into ``folder``; the constructor raises :class:`UsageError` if it cannot be written."""

    def __init__(self, folder: Path, title: str, *, html: bool) -> None:
        self.folder, self.title = folder, title
        self.suffixes = [".md", *([".html"] if html else [])]
        if html:
            FORMATS.get("html").check_available()
        try:
            (folder / "models").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"Cannot create {folder / 'models'}: {error.strerror}.", "Choose another folder with -o."
            ) from None

    def model(self, row: MatrixRow, result: ScanResult | None) -> None:
        """Write the pages of one model; a model that failed has none."""
        if result is not None:
            for suffix in self.suffixes:
                write(result, self.folder / "models" / f"{row.slug}{suffix}")

    def index(self, found: Matrix) -> None:
        """Write the index, and the pages missing because an earlier call was interrupted."""
        for row in found.rows:
            missing = [s for s in self.suffixes if not (self.folder / "models" / f"{row.slug}{s}").exists()]
            if row.state == "scanned" and missing:
                self._from_saved(row)
        for suffix in self.suffixes:
            text = matrix.markdown(found, self.title) if suffix == ".md" else matrix.page(found, self.title)
            save_text(text, self.folder / f"index{suffix}")

    def _from_saved(self, row: MatrixRow) -> None:
        try:
            self.model(row, ScanResult.load(self.folder / "scans" / f"{row.slug}.json"))
        except (OSError, ResultError) as error:
            raise UsageError(
                f"Cannot read the saved scan of {row.target}: {error}.", "Choose a new folder with -o."
            ) from None
