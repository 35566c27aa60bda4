"""Progress of a scan or search on standard error."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from lowprec_check.cli.app import print_status
from lowprec_check.process import system

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult

LINE_SECONDS = 30.0
"""Without a terminal, a line is printed this often."""


# -- What goes on, as one line


class Progress:
    """What goes on, as one line: which run of how many, its step, the time so far."""

    def __init__(
        self,
        show: Callable[[str], None] = lambda _: None,
        show_rows: Callable[[ScanResult], None] = lambda _: None,
        keep: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``show`` prints a line, ``show_rows`` the rows so far, ``keep`` a line that stays;
        without them, nothing is shown.
        """
        self._show, self._show_rows, self._keep = show, show_rows, keep
        self._started = system.monotonic()
        self._done, self._total = 0, 0

    def step(self, run: str, doing: str) -> None:
        """A run has reached a step."""
        from lowprec_check.engine.model.target_spec import NOTICE

        if run == NOTICE:
            self._keep(doing)
        else:
            self._show(self.line(run, doing, system.monotonic() - self._started))

    def done(self, result: ScanResult, total: int) -> None:
        """A run of ``total`` has finished; ``result`` has those so far."""
        self._done, self._total = len(result.runs), total
        self._show_rows(result)

    def judged(self, result: ScanResult) -> None:
        """``result`` has a run that is judged, or explained, but has not finished."""
        self._show_rows(result)

    def line(self, run: str, doing: str, elapsed: float) -> str:
        """``run 3 of 5 · half · plain run · 0:14``; seconds ``elapsed``."""
        minutes, seconds = divmod(int(elapsed), 60)
        now = f"{run} · {doing} · {minutes}:{seconds:02}"
        if self._done >= self._total:
            return now
        return f"run {self._done + 1} of {self._total} · {now}"


# -- Where it is shown


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """On a terminal, the rows so far, why they fail, and a line on standard error that are updated;
    otherwise why they fail, as soon as that is known, and a line every :data:`LINE_SECONDS`.
    """
    if quiet:
        yield Progress()
    elif sys.stderr.isatty():
        with contextlib.ExitStack() as stack:
            # Imported with the first step, while the process of the scan imports torch.
            shown = functools.cache(functools.partial(_live_display, stack))
            yield Progress(
                lambda line: shown().line(line), lambda result: shown().rows(result), lambda line: shown().kept(line)
            )
    else:
        last, shown_causes = system.monotonic(), set[tuple[str, str | None]]()

        def show_causes(result: ScanResult) -> None:
            for lead, text in _causes(result, shown_causes):
                print_status(f"{lead}: {text}")

        def show_sometimes(line: str) -> None:
            nonlocal last
            if system.monotonic() - last >= LINE_SECONDS:
                last = system.monotonic()
                print_status(line)

        yield Progress(show_sometimes, show_causes, print_status)


def _causes(result: ScanResult, shown: set[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """Why runs fail, as lead and text. Those ``shown``, each a code and a run, are left out, and
    others added: what a code says of further ops of a run is in the report.
    """
    from lowprec_check.analysis.conclusion import causes_so_far
    from lowprec_check.analysis.findings import MOST, groups, headlines

    causes = [cause for cause in causes_so_far(result) if (cause.code, cause.run_label) not in shown]
    shown.update((cause.code, cause.run_label) for cause in causes)
    predicted = "predicted: " if result.prediction is not None else ""
    return [(f"{predicted}{line.lead}", line.text) for line in headlines(groups(causes), None)[:MOST]]


class _Display(NamedTuple):
    """What shows something on a terminal, in place of what it showed before if it is not kept."""

    line: Callable[[str], None]
    rows: Callable[[ScanResult], None]
    kept: Callable[[str], None]


def _live_display(stack: contextlib.ExitStack) -> _Display:
    """A display until ``stack`` is closed."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    from lowprec_check.analysis.conclusion import without_early_times
    from lowprec_check.report.blocks import Document, Say
    from lowprec_check.report.foreign_text import visible
    from lowprec_check.report.layout.text import NARROWEST, text
    from lowprec_check.report.runs_table import runs_table

    console, spinner = Console(stderr=True), Spinner("dots")
    live = stack.enter_context(Live(spinner, console=console, transient=True))  # the report has the rows too

    def show_line(line: str) -> None:  # not a string: rich would take brackets for its markup
        spinner.update(text=Text(visible(line)[: console.width - 4]))

    def show_rows(result: ScanResult) -> None:
        # Times so far were taken one after another, not in rounds: they would mislead.
        table, width = runs_table(without_early_times(result)), max(NARROWEST, console.width)
        causes = [Say(cause, role="item", lead=lead) for lead, cause in _causes(result, set())]
        rows = text(Document(title="", blocks=[table, *causes]), width=width, color=True)
        # the line below them must not leave the screen
        while causes and rows.count("\n") >= console.height - 1:
            causes.pop()
            rows = text(Document(title="", blocks=[table, *causes]), width=width, color=True)
        live.update(Group(Text.from_ansi(rows), spinner))

    return _Display(show_line, show_rows, lambda line: console.print(Text(visible(line))))
