"""Registry of rules: each turns a scan's result into diagnostics, to which the catalog and the
user's line are added.

The docstring of a rule is its manual page, which ``lowprec-check explain LP101`` prints: a summary
in the first line, then what was observed, usual causes and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from lowprec_check.analysis.run_summary import status_in_eager_mode
from lowprec_check.catalog.answers import find_fix
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.known_issues import KnownIssue, Way, known_issues, matching
from lowprec_check.catalog.names import dtype_of
from lowprec_check.catalog.records import LOW
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.op_calls import OpCall, OpCalls
from lowprec_check.schema.registry import modules_in
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Diagnostic, Gap, Run, ScanResult, Severity
from lowprec_check.schema.statements import Sentence, chained, plain, say

RAN_HERE = "code of torch that is the same on all devices, and ran here"
"""What a gap of a predicted run rests on, if not on the catalog."""


class Finding(NamedTuple):
    """What a rule finds at one place; the registry adds code, name, default severity and the
    reported issue.
    """

    message: Sentence
    run: Run | None = None
    """The run that it is about; ``None`` for the whole scan."""
    module: str | None = None
    op: str | None = None
    source: str | None = None
    help: Sentence | str | None = None
    """A sentence if figures or names in it are those of the run."""
    calls: int = 1
    severity: Severity | None = None
    timed: bool = False
    """Whether this finding rests on measured times, if not all of its rule do."""
    share: float | None = None
    """Share of the squared output error that its place causes, if that is known."""
    matters: bool | None = None
    """Whether it affects the output of its run; ``None`` if that is not known, or it is not about
    the error.
    """
    rests_on: str | None = None
    """Of a predicted run: what this is known from, in words."""

    def adding(self, *sentences: Sentence | None) -> Finding:
        """The same, which says more."""
        return self._replace(message=chained(self.message, *sentences))


Check = Callable[[ScanResult], Iterator[Finding]]


class Rule(NamedTuple):
    """A check with its code."""

    code: str
    name: str
    severity: Severity
    check: Check
    timed: bool = False
    """Whether all of its findings rest on measured times: they are left out of baselines."""

    @property
    def summary(self) -> str:
        """The first line of the manual."""
        return self.manual.partition("\n")[0]

    @property
    def manual(self) -> str:
        """What ``explain`` prints."""
        return inspect.cleandoc(self.check.__doc__ or "")

    def diagnose(self, result: ScanResult, callers: Callers) -> Iterator[Diagnostic]:
        """Yield the diagnostics of this rule; ``callers`` are those of ``result``."""
        for finding in self.check(result):
            text, key = finding.message.text, finding.run.key if finding.run else None
            raised = text if finding.rests_on in (None, RAN_HERE) else None
            issue = known_issue(result, self.code, finding.op, finding.run, raised)
            advice = plain(finding.help) if isinstance(finding.help, str) else finding.help
            if issue:
                advice = chained(advice, say("reported in {issue:text}", issue=issue.link))
            is_own = advice is not None and not isinstance(finding.help, str)
            yield Diagnostic(
                code=self.code,
                name=self.name,
                severity=finding.severity or self.severity,
                precision=key.precision if key else None,
                backend=key.backend if key else EAGER,
                memory_format=key.memory_format if key else "contiguous",
                module=finding.module,
                op=finding.op,
                source=finding.source,
                caller=callers.of(finding.module, finding.op, finding.source),
                message=text,
                template=finding.message.template,
                figures=finding.message.figures,
                help=advice.text if advice else None,
                help_template=advice.template if advice and is_own else "",
                help_figures=advice.figures if advice and is_own else {},
                url=issue.link if issue else None,
                calls=finding.calls,
                timed=self.timed or finding.timed,
                share=finding.share,
                matters=finding.matters,
                rests_on=finding.rests_on,
            )


_RULES: dict[str, Rule] = {}


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Every rule by code, sorted. Each module in this package that registers one is loaded first."""
    modules_in(__name__.rpartition(".")[0])
    return dict(sorted(_RULES.items()))


def wide_dtype(result: ScanResult) -> str:
    """The dtype of the values that each op is compared with."""
    return str(result.options.get("reference") or "fp32")


def rule(code: str, name: str, severity: Severity, *, timed: bool = False) -> Callable[[Check], Check]:
    """Register a check under ``code``; raises ``ValueError`` if the code is taken."""

    def register(check: Check) -> Check:
        if code in _RULES:
            raise ValueError(f"{code} is registered twice")
        _RULES[code] = Rule(code, name, severity, check, timed)
        return check

    return register


def low_runs(result: ScanResult) -> Iterator[Run]:
    """All runs but the reference."""
    return (run for run in result.runs if not run.is_reference)


def runs_with_ops(result: ScanResult) -> Iterator[Run]:
    """All runs but the reference. A run on another backend has no op calls, since these are of
    eager mode, unless eager mode fails in the same way.
    """
    for run in low_runs(result):
        is_explained = run.backend == EAGER or run.status == status_in_eager_mode(run) != "ok"
        yield run if is_explained else msgspec.structs.replace(run, op_calls=OpCalls())


def line_of(at: Gap | OpCall, result: ScanResult) -> str | None:
    """Its line; where none of the user's calls it, that of the model, unless it is in a loss or in
    an optimizer.
    """
    is_outside = (at.module or "").startswith("<") or at.phase == "optimizer"
    return at.source or (None if is_outside else result.model.source)


def is_selected(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Whether ``code`` starts with a prefix in ``select`` (if there is any) and with none in
    ``ignore``.
    """
    selected, ignored = tuple(select), tuple(ignore)
    return (not selected or code.startswith(selected)) and not code.startswith(ignored)


def check_codes(prefixes: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a prefix with which no code starts."""
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in rules()):
            raise UsageError(f"No diagnostic code starts with {prefix!r}.", "List them with: lowprec-check explain")


def diagnose(result: ScanResult, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Diagnostic]:
    """The diagnostics of ``result`` whose code starts with a prefix in ``select`` (default: all)
    and none in ``ignore``.
    """
    selected, ignored, callers = tuple(select), tuple(ignore), Callers(result)
    chosen = [rule for code, rule in rules().items() if is_selected(code, selected, ignored)]
    return [diagnostic for rule in chosen for diagnostic in rule.diagnose(result, callers)]


# -- The line of the user's own code that leads to a line in an installed package

Place = tuple[str | None, str | None, str | None]
"""Module, op and line."""


class Callers:
    """Finds it for the findings of one result."""

    def __init__(self, result: ScanResult) -> None:
        """Collect the lines that were recorded."""
        model = result.model
        self._model = (model.source if model.caller is None else model.caller) or ""
        self._of_place: dict[Place, str] = {}
        self._of_source: dict[str | None, str] = {}
        if model.caller is not None and model.source is not None:
            self._of_source[model.source] = model.caller
        for run in result.runs:
            calls = run.op_calls
            found: list[tuple[str | None, str | None, str | None, str | None]] = [
                *dict.fromkeys(zip(calls.module, calls.op, calls.source, calls.caller, strict=True)),
                *((gap.module, gap.op, gap.source, gap.caller) for gap in run.gaps),
                *((its.module, None, its.source, its.caller) for its in (run.exception, run.stopped_by) if its),
            ]
            for module, op, source, caller in found:
                if caller is not None:  # in an installed package; empty if there is no line of the user's
                    place = module, op, source
                    self._of_place[place] = self._of_place.get(place) or caller
                    self._of_source[source] = self._of_source.get(source) or caller

    def of(self, module: str | None, op: str | None, source: str | None) -> str | None:
        """The user's line for what was found at ``source``: the call of the package, else the line
        that makes the model.

        ``None`` if ``source`` is the user's own, or nothing is known of it; empty if there is no
        line of the user's.
        """
        found = self._of_place.get((module, op, source), self._of_source.get(source))
        if found is None:
            return found
        return found or self._model


# -- What the catalog adds to a finding: the torch release that fixes it, and a known issue about it


def catalog_fix(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """``supported since torch 2.14`` or ``no torch release up to 2.15 supports it``; ``None`` if
    the catalog has not measured it, or the dtype is not the reason.
    """
    dtype = _catalog_dtype(run)
    if dtype is None or gap.phase == "optimizer" or gap.kind in ("numeric-failure", "dtype-mismatch"):
        return None
    try:
        found = find_fix(
            gap.op,
            device=run.device,
            dtype=dtype,
            torch=result.torch,
            phase=gap.phase,
            autocast=run.is_autocast,
        )
    except UsageError:  # an unreadable catalog must not fail the scan
        return None
    if found:
        return str(found)
    return None


def runs_under_autocast(gap: Gap, run: Run, result: ScanResult) -> bool:
    """Whether the catalog has measured that autocast runs the op of ``gap`` on 16-bit inputs, on
    the device of ``run``.
    """
    dtype = _catalog_dtype(run)
    if dtype is None:
        return False
    with contextlib.suppress(UsageError):
        return _measured_under_autocast(device_type(run.device), dtype, result.torch).of(gap.op).state == "all"
    return False


@functools.cache
def _measured_under_autocast(device: str, dtype: str, torch: str) -> AtenCatalog:
    return AtenCatalog(device, dtype_of(dtype), torch, autocast=True)


def known_issue(
    result: ScanResult, code: str, op: str | None, run: Run | None, message: str | None
) -> KnownIssue | None:
    """The known issue that fits a finding best: same code, same op or model, not fixed in the torch
    of the runs.

    ``message`` is what the op raised or warned; ``None`` if it did not run, but the catalog says
    that it fails.
    """
    kind = run.basis.kind if run and run.basis else None
    way: Way | None = "cast" if kind == "cast" else "autocast" if kind == "autocast" else None
    if run:
        device = run.device
    else:
        device = str(result.environment.get("device", ""))
    try:
        if not any(code in issue.codes for issue in known_issues()):
            return None
        found = matching(
            code=code,
            op=op,
            model=result.model.name,
            device=device or None,
            dtype=_catalog_dtype(run) if run else None,
            way=way,
            torch=result.torch or None,
            message=message,
        )
    except UsageError:
        return None
    is_other = run is not None and kind != "reference" and _catalog_dtype(run) is None
    return next((issue for issue in found if (issue.ops or issue.models) and not (is_other and issue.dtypes)), None)


def _catalog_dtype(run: Run) -> str | None:
    """The dtype to look up; ``None`` for one that the catalog does not cover: it has the 16-bit
    ones.
    """
    return run.format.name if run.format is not None and run.format.name in LOW else None
