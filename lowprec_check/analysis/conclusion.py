"""What follows from the runs of a scan: recommendation, diagnostics, and whether it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import msgspec

from lowprec_check.analysis.findings import SEVERITIES
from lowprec_check.analysis.recommend import Advisor, recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.statements.advice import basis
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.schema.findings import Severity
from lowprec_check.schema.options import FAIL_BY_DEFAULT, FailOn
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult, skipped


def advised(result: ScanResult) -> ScanResult:
    """The result with its recommendation, without the reason."""
    about = {**result.environment, "torch": result.torch}
    prefer = result.options.get("prefer", "speed")
    advisors = [advisor for advisor in objects_of_features("advice", Advisor) if advisor.advises(result)]
    if advisors:
        advice = advisors[0].recommend(result, about, prefer)
    else:
        advice = recommend(result.runs, result.model, about, prefer)
    return msgspec.structs.replace(result, recommendation=advice)


def conclude(result: ScanResult) -> ScanResult:
    """The result with its recommendation and diagnostics, as its options select them."""
    # rules look at the recommendation, statements at both
    options, result = result.options, advised(result)
    advice = result.recommendation
    diagnostics = diagnose(result, options.get("select", ()), options.get("ignore", ()))
    result = msgspec.structs.replace(result, diagnostics=diagnostics)
    said = statements(result)
    if advice is not None and not advice.reason:
        advice = msgspec.structs.replace(advice, reason=basis(said))
    return msgspec.structs.replace(result, recommendation=advice, statements=said)


RAISED = ("LP1", "LP204", "LP305")
"""Codes, or their beginnings, of what an op raises; an error is one by which the run fails."""


def causes_so_far(result: ScanResult) -> list[Diagnostic]:
    """Why runs of an unfinished ``result`` fail, where an experiment has shown it.

    What to do about it is left out: it rests on runs that may be missing.
    """
    if all(run.status in ("ok", "skipped") for run in result.runs):
        return []
    options, causes = result.options, list[Diagnostic]()
    for finding in diagnose(result, options.get("select", ()), options.get("ignore", ())):
        if finding.severity == "error" and (finding.matters or finding.code.startswith(RAISED)):
            causes.append(msgspec.structs.replace(finding, help=None, help_template="", help_figures={}))
    return causes


def as_wanted(runs: Sequence[Run], keys: Sequence[RunKey]) -> list[Run]:
    """``runs`` in the order of ``keys``, whatever ran first; a plan is last."""
    order = {key: place for place, key in enumerate(keys)}
    return sorted(runs, key=lambda run: order.get(run.key, len(order)))


def conclude_early(
    result: ScanResult, keys: Sequence[RunKey], reason: str = "the scan ended early"
) -> ScanResult | None:
    """Like :func:`conclude` for a scan that ended early, which is not ``complete``: the missing
    ones of its runs, ``keys``, are ``skipped`` for ``reason``.

    ``None`` if no run but the reference has finished.
    """
    done = {run.key for run in result.runs}
    if len(done) < 2:
        return None
    result = without_early_times(result)
    missing = [skipped(key, reason, result.evidence) for key in keys if key not in done]
    runs = as_wanted([*result.runs, *missing], keys)
    return conclude(msgspec.structs.replace(result, runs=runs, complete=False))


def without_early_times(result: ScanResult) -> ScanResult:
    """``result`` without times not yet taken in rounds, which a busy machine may have raised."""
    if result.timing_conditions is not None:
        return result
    return msgspec.structs.replace(result, runs=[msgspec.structs.replace(run, latency_ms=None) for run in result.runs])


# -- Whether a scan fails, by ``--fail-on``: what its exit code says, and its JUnit report

OPTION, WITH_BASELINE = "fail_on", "baseline"
"""The keys of a result's options."""


class ScanFailure(NamedTuple):
    """Why a scan fails, if any of these is true or not empty."""

    fail_on: FailOn
    no_pass: bool
    """Whether it fails because no precision passes."""
    findings: list[Diagnostic]
    """Those that it fails for."""
    ended_early: bool = False
    """Whether the scan did not reach its end."""

    @property
    def fails(self) -> bool:
        """Whether the exit code is 1."""
        return self.no_pass or bool(self.findings) or self.ended_early


def asked_to_fail_on(result: ScanResult, fail_on: FailOn, *, with_baseline: bool = False) -> ScanResult:
    """``result`` with what decides whether it fails in its options."""
    options = result.options | {OPTION: fail_on}
    if with_baseline:
        options[WITH_BASELINE] = True
    return msgspec.structs.replace(result, options=options)


def failure(result: ScanResult) -> ScanFailure:
    """Why ``result`` fails, by the ``--fail-on`` in its options.

    :data:`FAIL_BY_DEFAULT` counts if that is not saved, or by a version that knows more. With a
    baseline, which asks for what is new, accepted findings do not count, nor do those that rest on
    times.
    """
    asked = result.options.get(OPTION)
    fail_on = next((level for level in get_args(FailOn) if level == asked), FAIL_BY_DEFAULT)
    if fail_on == "never":
        return ScanFailure(fail_on, no_pass=False, findings=[])
    has_baseline = bool(result.options.get(WITH_BASELINE))
    counting = [d for d in result.diagnostics if not d.accepted and not (has_baseline and d.timed)]
    severe: tuple[Severity, ...] = ()
    if fail_on != "no-pass":
        severe = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    findings = [d for d in counting if d.severity in severe]
    return ScanFailure(fail_on, result.recommendation is None, findings, ended_early=not result.complete)
