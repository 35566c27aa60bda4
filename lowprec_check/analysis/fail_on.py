"""Whether a scan fails, by ``--fail-on``: what its exit code says, and its JUnit report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import Diagnostic, ScanResult

FailOn = Literal["no-pass", "error", "warning", "note", "never"]
DEFAULT: FailOn = "no-pass"

OPTION, WITH_BASELINE = "fail_on", "baseline"
"""The keys of a result's options."""

_COUNTING: dict[FailOn, tuple[str, ...]] = {
    "error": ("error",),
    "warning": ("error", "warning"),
    "note": ("error", "warning", "note"),
}
"""The severities of the findings that count."""


class ScanFailure(NamedTuple):
    """Why a scan fails; it does not if ``no_pass`` is false and there are no ``findings``."""

    fail_on: FailOn
    no_pass: bool
    """Whether it fails because no precision passes."""
    findings: list[Diagnostic]
    """Those that it fails for."""

    @property
    def fails(self) -> bool:
        """Whether the exit code is 1."""
        return self.no_pass or bool(self.findings)


def asked_to_fail_on(result: ScanResult, fail_on: FailOn, *, with_baseline: bool = False) -> ScanResult:
    """``result`` with what decides whether it fails in its options."""
    options = result.options | {OPTION: fail_on}
    if with_baseline:
        options[WITH_BASELINE] = True
    return msgspec.structs.replace(result, options=options)


def failure(result: ScanResult) -> ScanFailure:
    """Why ``result`` fails, by the ``--fail-on`` in its options.

    With a baseline, which asks for what is new, accepted findings do not count, nor do those that rest on times.
    """
    fail_on = _fail_on(result)
    if fail_on == "never":
        return ScanFailure(fail_on, no_pass=False, findings=[])
    has_baseline = bool(result.options.get(WITH_BASELINE))
    counting = [d for d in result.diagnostics if not d.accepted and not (has_baseline and d.timed)]
    found = [d for d in counting if d.severity in _COUNTING.get(fail_on, ())]
    return ScanFailure(fail_on, no_pass=result.recommendation is None, findings=found)


def _fail_on(result: ScanResult) -> FailOn:
    """What the scan was asked for; :data:`DEFAULT` if that is not saved, or by a version that knows more."""
    saved = result.options.get(OPTION)
    return next((known for known in get_args(FailOn) if known == saved), DEFAULT)
