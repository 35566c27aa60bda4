"""Manual corrections of the sources for XPU: `catalog/declared-xpu-corrections.toml`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from lowprec_check.catalog.declared import Source
from lowprec_check.catalog.records import Registration
from lowprec_check.catalog.versioned_file import read_tables
from lowprec_check.catalog.versions import version_key
from lowprec_check.errors import UsageError
from tools.xpu_declarations.dtypes import DTYPES, DtypeAnswer
from tools.xpu_declarations.registrations import OpRegistration


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One correction for some ops in some releases."""

    id: str
    ops: list[str]
    """Overload names or shell patterns (`fft_*`)."""
    since: str
    until: str
    """The first and the last release that it applies to."""
    registration: Registration | None = None
    half: bool | None = None
    bfloat16: bool | None = None
    why: str
    link: str

    def __post_init__(self) -> None:
        if (self.registration, self.half, self.bfloat16) == (None, None, None):
            raise ValueError("has no effect: set registration, half or bfloat16")
        if version_key(self.since) > version_key(self.until):
            raise ValueError(f"since {self.since} is after until {self.until}")
        if not self.link.startswith("https://"):
            raise ValueError(f"{self.link!r} is not an https link")

    @property
    def source(self) -> str:
        """Its key in the sources of a release."""
        return f"correction/{self.id}"

    def applies_to(self, release: str) -> bool:
        """Whether it applies to a release."""
        return version_key(self.since) <= version_key(release) <= version_key(self.until)


class Corrections:
    """The corrections for one release."""

    def __init__(self, path: Path, release: str) -> None:
        self.path = path
        self.entries = [entry for entry in read_tables(path, "correction", Correction) if entry.applies_to(release)]

    def sources(self) -> dict[str, Source]:
        """The sources of the corrections, by key."""
        return {entry.source: Source(entry.why, entry.link) for entry in self.entries}

    def registrations(self, ops: set[str]) -> dict[str, OpRegistration]:
        """Corrected registrations by op."""
        corrected = {}
        for entry in self.entries:
            if entry.registration is not None:
                found = OpRegistration(entry.registration, entry.source)
                corrected.update(dict.fromkeys(self._ops(entry, ops), found))
        return corrected

    def dtypes(self, ops: set[str]) -> dict[tuple[str, str], DtypeAnswer]:
        """Corrected answers by op and dtype."""
        corrected = {}
        for entry in self.entries:
            for dtype in DTYPES:
                supported: bool | None = getattr(entry, dtype)
                if supported is not None:
                    answer = DtypeAnswer(supported, entry.source)
                    corrected.update({(op, dtype): answer for op in self._ops(entry, ops)})
        return corrected

    def _ops(self, entry: Correction, ops: set[str]) -> list[str]:
        found = [op for op in ops if any(fnmatchcase(op, pattern) for pattern in entry.ops)]
        if not found:
            raise UsageError(
                f"{self.path}: entry {entry.id!r}: this release has no op {', '.join(entry.ops)}.",
                "Correct `ops` or `until`.",
            )
        return found
