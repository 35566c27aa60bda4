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

from lowprec_check.analysis.error_shares import main_causes, trusted_budget
from lowprec_check.analysis.run_summary import status_in_eager_mode
from lowprec_check.catalog.answers import find_fix
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.known_issues import (
    KnownIssue,
    KnownPattern,
    OpsAround,
    Way,
    best_fit,
    known_issues,
    known_patterns,
    matching,
)
from lowprec_check.catalog.names import dtype_of, function_name
from lowprec_check.catalog.records import LOW, SHORT
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.findings import ReportedCase
from lowprec_check.schema.op_calls import FROM_INPUT, OpCall, OpCalls
from lowprec_check.schema.registry import modules_in, modules_of_features
from lowprec_check.schema.run_key import EAGER, RunKey
from lowprec_check.schema.scan_result import Diagnostic, Gap, Run, ScanResult, Severity
from lowprec_check.schema.statements import Sentence, chained, plain

NEAR = 12
"""Calls between two ops that belong together: a norm has seven, an attention ten."""

_CALLS = 4  # of a place that are looked at: a module in a loop is the same each time


class ReportedFaults:
    """Finds it for the findings of one result."""

    def __init__(self) -> None:
        self._graphs: dict[RunKey, CallsAround] = {}

    def find(self, code: str, run: Run, place: Place, dtype: str | None, way: Way | None) -> KnownPattern | None:
        """The reported fault that fits best; ``place`` has no op if all of the output is meant."""
        low = SHORT[dtype_of(dtype)] if dtype else None
        candidates = [pattern for pattern in known_patterns() if pattern.may_fit(code, low, way)]
        op = place[1]
        if op is not None:
            candidates = [pattern for pattern in candidates if function_name(op) in pattern.ops]
        # Which call reads which takes a while to collect in a large model.
        if not candidates:
            return None
        if run.key not in self._graphs:
            self._graphs[run.key] = CallsAround(run)
        around = self._graphs[run.key].around(place)
        if around is None:
            return None
        return best_fit(candidates, around)


class CallsAround:
    """Which call of a run reads the result of which."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows = list(run.op_calls.rows())
        self._places: dict[Place, list[int]] = {}
        self._lines: dict[tuple[str | None, str | None], list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for index, row in enumerate(self._rows):
            self._places.setdefault(row.place, []).append(index)
            self._lines.setdefault((row.module, row.source), []).append(index)
            for writer in self._writers(index):
                self._readers.setdefault(writer, []).append(index)

    def around(self, place: Place) -> OpsAround | None:
        """What is around an op; of all of the output, around the main cause of its error."""
        if place[1] is None:
            causes = main_causes(self._run, 1) if trusted_budget(self._run) is not None else []
            if not causes:
                return None
            cause = causes[0].largest
            place = cause.module, cause.op, cause.source
        op = place[1]
        if op is None:
            return None
        # A function that fails above dispatch has no call of its own, but those of its rescue.
        calls = self._places.get(place) or self._lines.get((place[0], place[2]), [])
        calls = calls[:_CALLS]
        rows = [self._rows[index] for index in calls]
        before = [self._rows[index] for index in self._near(calls, self._writers)]
        after = [self._rows[index] for index in self._near(calls, lambda call: self._readers.get(call, []))]
        return OpsAround(
            op=function_name(op),
            reads=_functions(before),
            feeds=_functions(after),
            largest=max((row.absmax for row in rows if row.absmax is not None), default=None),
            in_fp32=bool(rows) and all(set(row.dtypes.partition("→")[0].split("+")) == {"f32"} for row in rows),
            directly=_functions(self._rows[index] for call in calls for index in self._writers(call)),
            from_input=any(FROM_INPUT in row.reads for row in (*rows, *before)),
            vanished=any(row.vanished is not None for row in (*rows, *before)),
        )

    def _writers(self, call: int) -> list[int]:
        return [call - back for back in self._rows[call].reads if back]

    def _near(self, calls: Iterable[int], following: Callable[[int], list[int]]) -> set[int]:
        """The calls that ``following`` reaches in at most :data:`NEAR` steps."""
        near: set[int] = set()
        reached, last = set(calls), set(calls)
        for _ in range(NEAR):
            last = {index for call in last for index in following(call)} - reached
            reached |= last
            near |= last
        return near


def _functions(rows: Iterable[OpCall]) -> frozenset[str]:
    return frozenset(function_name(row.op) for row in rows)


# What a gap of a predicted run rests on, if not on the catalog: checks that torch makes before it
# chooses a kernel, or a kernel of the CPU, which is not that of the device.
RAN_HERE = "code of torch that is the same on all devices, and ran here"
FAILED_HERE = "it fails on this CPU; whether the device's own kernel fails too is not known"


class Finding(NamedTuple):
    """What a rule finds at one place; the registry adds the rest of a diagnostic."""

    message: Sentence
    run: Run | None = None  # the run that it is about; `None` for the whole scan
    module: str | None = None
    op: str | None = None
    source: str | None = None
    help: Sentence | str | None = None  # a sentence if figures or names in it are those of the run
    calls: int = 1
    severity: Severity | None = None
    timed: bool = False  # whether this finding rests on measured times, if not all of its rule do
    share: float | None = None
    """Share of the squared output error that its place causes, if that is known."""
    matters: bool | None = None
    """Whether it affects the output of its run; ``None`` if unknown, or not about the error."""
    rests_on: str | None = None  # of a predicted run: what this is known from, in words

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

    def diagnose(self, result: ScanResult, callers: Callers, reported: ReportedFaults) -> Iterator[Diagnostic]:
        """Yield the diagnostics of this rule; the others are those of ``result``."""
        for finding in self.check(result):
            text, key, advice, own_advice = finding.message.text, None, None, Sentence(template="")
            if finding.run is not None:
                key = finding.run.key
            if isinstance(finding.help, str):
                advice = plain(finding.help)
            elif finding.help is not None:
                advice = finding.help
            # A known issue may name what an op raised, but not what the catalog says of it.
            raised = text if finding.rests_on in (None, RAN_HERE, FAILED_HERE) else None
            known = reported_case(result, self.code, finding, finding.severity or self.severity, raised, reported)
            # Runs whose advice has other figures share one finding, so the template is saved too.
            if advice is not None and not isinstance(finding.help, str):
                own_advice = advice
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
                help_template=own_advice.template,
                help_figures=own_advice.figures,
                url=known.link if known else None,
                known=known,
                calls=finding.calls,
                timed=self.timed or finding.timed,
                share=finding.share,
                matters=finding.matters,
                rests_on=finding.rests_on,
            )


_RULES: dict[str, Rule] = {}


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Every rule by code, sorted; all modules of this package are loaded first, and features'."""
    modules_in(__name__.rpartition(".")[0])
    modules_of_features("rules")
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
    """All runs but the reference; op calls, which are of eager mode, if they explain the run."""
    for run in low_runs(result):
        is_explained = run.backend == EAGER or run.status == status_in_eager_mode(run) != "ok"
        yield run if is_explained else msgspec.structs.replace(run, op_calls=OpCalls())


def line_of(at: Gap | OpCall, result: ScanResult) -> str | None:
    """Its line; without one, the model's, unless it is in a loss or an optimizer."""
    # A module in angle brackets is none of the model, such as a loss.
    is_outside = (at.module or "").startswith("<") or at.phase == "optimizer"
    return at.source or (None if is_outside else result.model.source)


def is_selected(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Whether ``code`` starts with a prefix in ``select`` (if any) and with none in ``ignore``."""
    selected = tuple(select)
    return (not selected or code.startswith(selected)) and not code.startswith(tuple(ignore))


def check_codes(prefixes: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a prefix with which no code starts."""
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in rules()):
            raise UsageError(f"No diagnostic code starts with {prefix!r}.", "List them with: lowprec-check explain")


def diagnose(result: ScanResult, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Diagnostic]:
    """The diagnostics of ``result`` whose codes :func:`is_selected` (default: all)."""
    selected, ignored, callers, reported = tuple(select), tuple(ignore), Callers(result), ReportedFaults()
    chosen = [rule for code, rule in rules().items() if is_selected(code, selected, ignored)]
    return [diagnostic for rule in chosen for diagnostic in rule.diagnose(result, callers, reported)]


# -- The line of the user's own code that leads to a line in an installed package

# Module, op and line.
Place = tuple[str | None, str | None, str | None]
"""Module, op and line."""


class Callers:
    """Finds it for the findings of one result."""

    def __init__(self, result: ScanResult) -> None:
        model = result.model
        self._model = (model.source if model.caller is None else model.caller) or ""
        self._of_place: dict[Place, str] = {}
        self._of_source: dict[str | None, str] = {}
        if model.caller is not None and model.source is not None:
            self._of_source[model.source] = model.caller
        for run in result.runs:
            calls = run.op_calls
            for place in dict.fromkeys(zip(calls.module, calls.op, calls.source, calls.caller, strict=True)):
                self._add(*place)
            for gap in run.gaps:
                self._add(gap.module, gap.op, gap.source, gap.caller)
            for error in filter(None, (run.exception, run.stopped_by)):
                self._add(error.module, None, error.source, error.caller)

    def _add(self, module: str | None, op: str | None, source: str | None, caller: str | None) -> None:
        if caller is None:  # not in an installed package
            return
        place = module, op, source
        # Empty if there is no line of the user's, which another run may know.
        self._of_place[place] = self._of_place.get(place) or caller
        self._of_source[source] = self._of_source.get(source) or caller

    def of(self, module: str | None, op: str | None, source: str | None) -> str | None:
        """The user's line for ``source``: the call of the package, else where the model is made.

        ``None`` if ``source`` is the user's own or unknown; empty if no line is the user's.
        """
        caller = self._of_place.get((module, op, source), self._of_source.get(source))
        if caller is None:
            return None
        return caller or self._model


# -- What the catalog adds to a finding: the torch release that fixes it, and a known issue about it


def catalog_fix(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """``supported since torch 2.14`` or ``no torch release up to 2.15 supports it``, if known."""
    dtype = _catalog_dtype(run)
    if dtype is None or gap.phase == "optimizer" or gap.kind in ("numeric-failure", "dtype-mismatch"):
        return None
    op, phase = gap.op, gap.phase
    with contextlib.suppress(UsageError):  # an unreadable catalog must not fail the scan
        fix = find_fix(op, device=run.device, dtype=dtype, torch=result.torch, phase=phase, autocast=run.is_autocast)
        if fix:
            return str(fix)
    return None


def runs_under_autocast(gap: Gap, run: Run, result: ScanResult) -> bool:
    """Whether the catalog has measured that autocast runs the op of ``gap`` on 16-bit inputs."""
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
    """The known issue that fits best: same code, same op or model, not fixed in the runs' torch.

    ``message`` is what the op raised or warned; ``None`` if only the catalog says that it fails.
    """
    device, dtype, way = str(result.environment.get("device", "")), None, None
    if run:
        device, dtype, way = run.device, _catalog_dtype(run), _way_of(run)
    try:
        if not any(code in issue.codes for issue in known_issues()):
            return None
        issues = matching(
            code=code,
            op=op,
            model=result.model.name,
            device=device or None,
            dtype=dtype,
            way=way,
            torch=result.torch or None,
            message=message,
        )
    except UsageError:
        return None
    # An issue of some dtypes is not one of a run whose dtype the catalog does not know.
    is_other = run is not None and not run.is_reference and dtype is None
    fitting = (issue for issue in issues if (issue.ops or issue.models) and not (is_other and issue.dtypes))
    return next(fitting, None)


def reported_case(
    result: ScanResult, code: str, finding: Finding, severity: Severity, raised: str | None, faults: ReportedFaults
) -> ReportedCase | None:
    """The known issue about the op of ``finding``, else the reported fault that it is like."""
    issue = known_issue(result, code, finding.op, finding.run, raised)
    if issue is not None:
        return ReportedCase(title=issue.title, link=issue.link, repair=issue.workaround or issue.fix or "")
    run = finding.run
    if run is None or severity == "note":
        return None
    place = finding.module, finding.op, finding.source
    with contextlib.suppress(UsageError):  # an unreadable catalog must not fail the scan
        pattern = faults.find(code, run, place, _catalog_dtype(run), _way_of(run))
        if pattern is not None:
            return ReportedCase(title=pattern.title, link=pattern.link, repair=pattern.repair)
    return None


def _way_of(run: Run) -> Way | None:
    if run.basis is not None and run.basis.kind in ("cast", "autocast"):
        return run.basis.kind
    return None


def _catalog_dtype(run: Run) -> str | None:
    """The dtype to look up; ``None`` for one without 16 bits, which is not in the catalog."""
    if run.format is not None and run.format.name in LOW:
        return run.format.name
    return None
