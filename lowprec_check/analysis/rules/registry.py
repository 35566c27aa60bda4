"""Registry of rules: a scan's result goes in, diagnostics come out. Never imports torch.

The docstring of a rule is its manual page (``lowprec-check explain LP101``): its first line is the summary.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lowprec_check.analysis.rules.catalogued import known_issue, since_when
from lowprec_check.schema.backends import EAGER
from lowprec_check.schema.scan_result import Diagnostic, GapKind, Run, ScanResult, Severity, is_selected

SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
"""From the least to the gravest."""


class Finding(NamedTuple):
    """What a rule finds at one place; the registry adds the code, the name, the severity and the reported issue."""

    message: str
    run: Run | None = None
    """The run that it is about; ``None`` for the whole scan."""
    module: str | None = None
    op: str | None = None
    source: str | None = None
    help: str | None = None
    calls: int = 1
    severity: Severity | None = None


Check = Callable[[ScanResult], Iterator[Finding]]


class Rule(NamedTuple):
    """One rule."""

    code: str
    name: str
    severity: Severity
    check: Check

    @property
    def summary(self) -> str:
        """The first line of the manual."""
        return self.manual.partition("\n")[0]

    @property
    def manual(self) -> str:
        """What ``explain`` prints."""
        return inspect.cleandoc(self.check.__doc__ or "")

    def diagnose(self, result: ScanResult) -> Iterator[Diagnostic]:
        """Yield the diagnostics of this rule."""
        for finding in self.check(result):
            issue = known_issue(result, self.code, finding.op, finding.run, finding.message)
            reported = f"reported in {issue.link}" if issue else None
            key = finding.run.key if finding.run else None
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
                message=finding.message,
                help="; ".join(filter(None, (finding.help, reported))) or None,
                url=issue.link if issue else None,
                calls=finding.calls,
            )


_RULES: dict[str, Rule] = {}


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Every rule by code, sorted. Each module in this package that registers one is loaded first."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_RULES.items()))


def rule(code: str, name: str, severity: Severity) -> Callable[[Check], Check]:
    """Register a check under ``code``; a code given twice is a mistake in this package."""

    def register(check: Check) -> Check:
        if code in _RULES:
            raise ValueError(f"{code} is registered twice")
        _RULES[code] = Rule(code, name, severity, check)
        return check

    return register


def low_runs(result: ScanResult) -> Iterator[Run]:
    """All runs but the reference."""
    return (run for run in result.runs if not run.is_reference)


def uses_autocast(run: Run) -> bool:
    """Whether the run, or the base of its plan, is under autocast."""
    return run.basis is not None and run.basis.kind == "autocast"


def from_gaps(result: ScanResult, kind: GapKind, help: str) -> Iterator[Finding]:
    """A finding for each gap of that kind."""
    for run in low_runs(result):
        for gap in run.gaps:
            if gap.kind == kind:
                caught = run.status in ("ok", "inaccurate", "nonfinite")
                after = "; the model gets past it by itself" if caught else ""
                advice = help.replace(", or use autocast", "") if uses_autocast(run) else help
                yield Finding(
                    f"{gap.message}{after}",
                    run=run,
                    module=gap.module,
                    op=gap.op,
                    source=gap.source or result.model.source,
                    help="; ".join(filter(None, (advice, since_when(gap, run, result)))),
                    calls=gap.calls,
                    severity="note" if caught else None,
                )


def diagnose(result: ScanResult, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Diagnostic]:
    """All diagnostics of ``result`` by code prefix: those selected (all, if none are), less those ignored."""
    chosen, left_out = tuple(select), tuple(ignore)
    chosen_rules = [rule for code, rule in rules().items() if is_selected(code, chosen, left_out)]
    return [diagnostic for rule in chosen_rules for diagnostic in rule.diagnose(result)]
