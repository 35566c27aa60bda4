"""``--lowprec-fail-on`` and ``--lowprec-baseline``: whether gaps fail a run that passes otherwise."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lowprec_check.analysis.coverage_changes import CoverageDiff, diff_coverages
from lowprec_check.analysis.suite_coverage import Coverage, coverage_of, precision_of
from lowprec_check.errors import UsageError
from lowprec_check.schema.statements import counted

NEVER = "never"
FAIL_ON = (NEVER, "gaps", "new")
"""The values of ``--lowprec-fail-on``."""


def load_baseline(path: Path, device: str, keys: Sequence[str]) -> Coverage:
    """Read the coverage that gaps are compared with; raises :class:`UsageError` if it is not one of this device and precisions."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"The baseline {path} does not exist.", f"Save one with: {_command(path, keys)}") from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    found = coverage_of(data, path)
    if found.device != device:
        raise UsageError(
            f"The baseline {path} is for {found.device}, and this run for {device}.",
            f"Add --lowprec-device {found.device}, or give a baseline for {device}.",
        )
    missing = [precision_of(key) for key in keys if key not in found.dtypes]
    if missing:
        has = ", ".join(map(precision_of, found.dtypes))
        raise UsageError(
            f"The baseline {path} lacks {', '.join(missing)}: it has {has or 'no precision'}.",
            f"Save it again with: {_command(path, keys)}",
        )
    return msgspec.structs.replace(found, dtypes=[*keys])  # what else it has is not compared


def _command(path: Path, keys: Sequence[str]) -> str:
    """The command that saves a baseline."""
    return f"pytest --lowprec-coverage {','.join(map(precision_of, keys))} --lowprec-report {shlex.quote(str(path))}"


class CoverageGate:
    """Compares the coverage of a run with the baseline and decides whether it fails."""

    def __init__(
        self, fail_on: str, baseline: Coverage | None = None, shown: str = "", *, replaces: bool = False
    ) -> None:
        """``shown`` names the baseline in messages; ``replaces``: the report of the run is written to the same file."""
        self.fail_on, self.baseline, self.shown, self.replaces = fail_on, baseline, shown, replaces
        self.changes: CoverageDiff | None = None
        self.gaps = 0
        self.tests = 0

    def judge(self, found: Coverage) -> None:
        """Compare the coverage of the run."""
        self.gaps, self.tests = len(found.gaps), len(found.tests)
        if self.baseline is not None:
            self.changes = diff_coverages(self.baseline, found)

    @property
    def fails(self) -> bool:
        """Whether the run fails."""
        if self.fail_on == "new":
            return self.changes is not None and self.changes.regressions > 0
        return self.fail_on == "gaps" and self.gaps > 0

    @property
    def new(self) -> list[str] | None:
        """The ops that are new gaps; ``None`` without a baseline."""
        return None if self.changes is None else [change.op for change in self.changes.new_gaps]

    @property
    def verdict(self) -> str | None:
        """One sentence on what was found and whether the run fails for it; ``None`` without a gate and a baseline."""
        fails = f": the run fails (--lowprec-fail-on {self.fail_on})" if self.fails else ""
        if self.fail_on == "gaps":
            every = f"{counted(self.gaps, 'gap')}{fails}" if self.gaps else "No gap"
            return f"{every}. {self._compared}." if self.changes else f"{every}."
        return f"{self._compared}{fails}." if self.changes else None

    @property
    def _compared(self) -> str:
        number = len(self.new or ())
        return f"{counted(number, 'new gap') if number else 'No new gap'}, compared with {self.shown}"

    def notes(self) -> list[str]:
        """What the comparison leaves out, and the conditions that differ."""
        if self.changes is None:
            return []
        notes, gone = [], self.changes.gone_tests
        if gone:
            ran = f"{counted(self.tests, 'test')} ran, and {len(gone):,} of {self.shown} did not"
            notes.append(f"{ran}: only operators of tests that ran are compared.")
        elif self.changes.gone_gaps:
            number = len(self.changes.gone_gaps)
            notes.append(f"{counted(number, 'gap')} of {self.shown} {'is' if number == 1 else 'are'} gone.")
        if self.changes.warnings:
            notes.append(f"{self.shown} was recorded under other conditions: {'; '.join(self.changes.warnings)}.")
        return notes

    def why_kept(self) -> str | None:
        """Why the report must not replace the baseline, if it is the same file; ``None`` if it may.

        A new gap that it accepted would pass the next run, and what tests that did not run use would be new in the next.
        """
        if not self.replaces or self.changes is None:
            return None
        if self.changes.new_gaps:
            what = "it would accept the new gaps. To accept them"
        elif self.changes.gone_tests:
            what = f"{counted(len(self.changes.gone_tests), 'test')} of it did not run. If they no longer exist"
        else:
            return None
        return f"{self.shown} was not replaced, since {what}, run without --lowprec-baseline."
