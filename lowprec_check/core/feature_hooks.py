"""What a feature may add to a scan. The core calls each hook at one place, and imports no feature.

A feature is a folder in :mod:`lowprec_check.features`, whose module ``run`` has an instance of
:class:`Feature`. Every hook does nothing by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from lowprec_check.schema.measures import TimingConditions
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.scan_result import Run, ScanResult

if TYPE_CHECKING:
    from torch import Tensor

    from lowprec_check.core.machine import Machine
    from lowprec_check.core.memory_limits import Allowance
    from lowprec_check.core.messages import Reporter
    from lowprec_check.core.mode import Mode
    from lowprec_check.core.plain_part import PlainPart
    from lowprec_check.core.target_runs import TargetRuns
    from lowprec_check.core.tasks import RunTask
    from lowprec_check.core.trace.observers import MakeObserver
    from lowprec_check.engine.model.target import Target
    from lowprec_check.engine.model.target_source import TargetSource


class Measurement(NamedTuple):
    """Something measured in the worker of a run, after the calls that give its status."""

    place: int
    """Where it comes among those of all features, the first lowest."""
    what: str
    """What failed, if it raises an exception: ``the metric``."""
    measure: Callable[[PlainPart], None]
    """Adds fields to the run of ``part.report``, if there is anything to measure."""


class Explained(NamedTuple):
    """A run in its worker after it was explained op by op, for experiments that need that."""

    task: RunTask
    target: Target
    report: Reporter
    outputs: Sequence[Tensor] | None
    """What its first plain call returned; ``None`` if the instrumented part ran other code."""
    started: float
    """When the instrumented part began, in seconds of this thread's processor time."""


class TimedRuns(NamedTuple):
    """Runs with times that can be compared, or without any."""

    runs: list[Run]
    conditions: TimingConditions | None
    """``None`` if nothing was timed in rounds."""


class Feature:
    """What a scan does besides running a model in each precision."""

    place: ClassVar[int] = 0
    """Where it comes among the others, the first lowest."""
    measurements: ClassVar[Sequence[Measurement]] = ()
    """What it measures in the worker of each run."""
    keeps: ClassVar[Sequence[str]] = ()
    """Names of what it keeps of the fp32 run for later workers, by :meth:`TaskFiles.keep`."""

    def before_loading(self) -> None:
        """In the process of a scan, which has imported torch, before it loads the user's file."""

    def mode(self, source: TargetSource, options: ScanOptions, machine: Machine) -> Mode | None:
        """The mode of a scan, if this feature has one that is asked for."""
        return None

    def after_reference(self, batches: Sequence[TargetRuns], fp32: Run) -> None:
        """fp32 ran on the first of ``batches``, as ``fp32`` says."""

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """What looks at each op call of the instrumented part, within what memory allows."""
        return None

    def after_explanation(self, explained: Explained) -> None:
        """In the worker, after the instrumented part: try what it showed, and add that."""

    def beside(self, runs: TargetRuns, task: RunTask, run: Run) -> Run:
        """``run`` of ``task`` on one batch, with what other processes show of it."""
        return run

    def after_run(self, batches: Sequence[TargetRuns], run: Run) -> Run:
        """``run`` on the first of ``batches``, with what further runs show of it."""
        return run

    def timed(self, runs: TargetRuns, others: Sequence[Run]) -> TimedRuns | None:
        """fp32 and ``others`` with times that can be compared; ``None`` if there are none."""
        return None

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """``result`` of all runs with what it adds; ``None`` if that is nothing."""
        return None


@functools.cache
def features() -> tuple[Feature, ...]:
    """All features, in their order."""
    return tuple(sorted(objects_of_features("run", Feature), key=lambda feature: feature.place))


def observers(task: RunTask, allowed: Allowance) -> list[MakeObserver]:
    """What all features look at each op call with, in their order."""
    made = [feature.observer(task, allowed) for feature in features()]
    return [observer for observer in made if observer is not None]


def measurements() -> list[Measurement]:
    """What all features measure in the worker of a run, in order."""
    return sorted(measurement for feature in features() for measurement in feature.measurements)
