"""Registry of rules: each turns a scan's result into diagnostics.

The docstring of a rule is its manual page, which ``lowprec-check explain LP101`` prints: a summary in the first line, then
what was observed, usual causes and what to do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lowprec_check.analysis.callers import Callers
from lowprec_check.analysis.rules.catalogued import known_issue
from lowprec_check.errors import UsageError
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult, Severity
from lowprec_check.schema.statements import Sentence, chained, plain, say

RAN_HERE = "code of torch that is the same on all devices, and ran here"
"""What a gap of a predicted run rests on, if not on the catalog."""


class Finding(NamedTuple):
    """What a rule finds at one place; the registry adds code, name, default severity and the reported issue."""

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
    """Whether it affects the output of its run; ``None`` if that is not known, or it is not about the error."""
    rests_on: str | None = None
    """Of a predicted run: what this is known from, in words."""

    def adding(self, *sentences: Sentence | None) -> Finding:
        """The same, which says more."""
        return self._replace(message=chained(self.message, *sentences))


Check = Callable[[ScanResult], Iterator[Finding]]


class Rule(NamedTuple):
    """One rule."""

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
            text = finding.message.text
            raised = text if finding.rests_on in (None, RAN_HERE) else None
            issue = known_issue(result, self.code, finding.op, finding.run, raised)
            advice = plain(finding.help) if isinstance(finding.help, str) else finding.help
            if issue:
                advice = chained(advice, say("reported in {issue:text}", issue=issue.link))
            is_own = advice is not None and not isinstance(finding.help, str)
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
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_RULES.items()))


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


def uses_autocast(run: Run) -> bool:
    """Whether the run, or the base of its plan, is under autocast."""
    return run.basis is not None and run.basis.kind == "autocast"


def is_selected(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Whether ``code`` starts with a prefix in ``select`` (if there is any) and with none in ``ignore``."""
    selected, ignored = tuple(select), tuple(ignore)
    return (not selected or code.startswith(selected)) and not code.startswith(ignored)


def check_codes(prefixes: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a prefix with which no code starts."""
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in rules()):
            raise UsageError(f"No diagnostic code starts with {prefix!r}.", "List them with: lowprec-check explain")


def diagnose(result: ScanResult, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Diagnostic]:
    """The diagnostics of ``result`` whose code starts with a prefix in ``select`` (default: all) and none in ``ignore``."""
    selected, ignored = tuple(select), tuple(ignore)
    chosen_rules = [rule for code, rule in rules().items() if is_selected(code, selected, ignored)]
    callers = Callers(result)
    return [diagnostic for rule in chosen_rules for diagnostic in rule.diagnose(result, callers)]
