"""The line of the user's own code that leads to a line in an installed package."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.schema.scan_result import Run, ScanResult

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
            for place, caller in _recorded(run):
                self._of_place[place] = self._of_place.get(place) or caller
                self._of_source[place[2]] = self._of_source.get(place[2]) or caller

    def of(self, module: str | None, op: str | None, source: str | None) -> str | None:
        """The user's line for what was found at ``source``: the call of the package, else the line that makes the model.

        ``None`` if ``source`` is the user's own, or nothing is known of it; empty if there is no line of the user's.
        """
        found = self._of_place.get((module, op, source), self._of_source.get(source))
        return found if found is None else found or self._model


def _recorded(run: Run) -> Iterator[tuple[Place, str]]:
    """Every place in an installed package, with the user's line, which may be empty."""
    calls = run.op_calls
    for module, op, source, caller in dict.fromkeys(
        zip(calls.module, calls.op, calls.source, calls.caller, strict=True)
    ):
        if caller is not None:
            yield (module, op, source), caller
    for gap in run.gaps:
        if gap.caller is not None:
            yield (gap.module, gap.op, gap.source), gap.caller
    for error in (run.exception, run.stopped_by):
        if error is not None and error.caller is not None:
            yield (error.module, None, error.source), error.caller
