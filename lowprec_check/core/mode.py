"""What a run calls, how that is judged, whether it is timed, what is skipped and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from lowprec_check.core.explanation import explain
from lowprec_check.core.feature_hooks import features, measurements
from lowprec_check.core.messages import Reporter, Send, Started
from lowprec_check.core.plain_part import PlainPart, judge_with_same_draws
from lowprec_check.core.preparation import in_eager_mode, in_fp32, kernels_of, on_backend, prepared_for
from lowprec_check.core.process_memory import ProcessMemory
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.core.trace.instrument import Options
from lowprec_check.engine.model.prepared import Prepared, autocast_problem
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import Precision
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import EAGER, RunKey
from lowprec_check.schema.scan_result import Evidence, Run, ScanResult
from lowprec_check.schema.verdict import ExceptionInfo

if TYPE_CHECKING:
    from lowprec_check.core.machine import Machine
    from lowprec_check.core.target_runs import TargetRuns
    from lowprec_check.engine.model.target_source import TargetSource


class Mode:
    """What a run calls, how that is judged, whether it is timed, what is skipped and why.

    This one is inference: the model is called, and its output compared with that of fp32. Features
    have others. Tasks carry their mode to their workers, so that it is picklable.
    """

    name: ClassVar[str] = "run"
    """What is done with a model, a participle: "only eager runs are trained"."""
    fails: ClassVar[str] = "fails"
    """What is said of a model that raises an exception in fp32."""
    doing: ClassVar[str] = "plain run"
    """What is shown as progress until there is a verdict."""
    evidence: ClassVar[Evidence] = "measured"
    """``predicted`` if its kernels are not those of the device, and their times mean nothing."""
    is_forward: ClassVar[bool] = True
    """Whether a run is a forward pass, whose output is judged."""
    has_times: ClassVar[bool] = True
    """Whether the times of its calls can be compared."""
    repeats_fp32: ClassVar[bool] = True
    """Whether fp32 is called again, to compare two of its calls, and explained op by op."""
    runs_side_by_side: ClassVar[bool] = True
    """Whether slow runs may be made at the same time, on cores that others leave."""
    changes_parameters: ClassVar[bool] = False
    """Whether every run writes to parameters."""
    ignored: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options without effect, and why: settings of a project may ask for them in every scan."""
    limits_calls: ClassVar[bool] = True
    """Whether a model with long calls is called less often."""
    has_backends: ClassVar[bool] = True
    """Whether other backends than eager mode run."""

    def refuses_backend(self, backend: str) -> str | None:
        """Why a backend is not run in this mode; ``None`` if it is."""
        if backend == EAGER or self.has_backends:
            return None
        return f"only eager runs are {self.name}"

    # -- In the parent, in the order of a scan

    def refuse(self, options: ScanOptions) -> None:
        """Raise :class:`UsageError` for options that do not fit."""

    def load(self) -> None:
        """Import what each worker would import otherwise."""

    def announce(self, source: TargetSource, options: ScanOptions, device: str) -> None:
        """Show what is worth knowing before a scan starts."""

    def check_reference(self, so_far: RunSoFar) -> None:
        """Raise :class:`UsageError` if the fp32 run is no reference."""

    def failure_hint(self, error: ExceptionInfo, device: str, target: Target) -> str | None:
        """What to do about an exception in fp32 that only this mode has; or ``None``."""
        return None

    def digest(self, source: TargetSource, batches: Sequence[TargetRuns]) -> str | None:
        """Of all that a scan depends on and of fp32's outputs on all ``batches``, or ``None``."""
        return None

    def resumed(self, source: TargetSource, result: ScanResult, earlier: ScanResult | None) -> dict[RunKey, Run]:
        """The runs of an ``earlier`` scan that need not be made again."""
        return {}

    def why_skipped(self, precision: Precision, device: str) -> str | None:
        """Why a precision is not run on a device; ``None`` if it is."""
        return autocast_problem(precision, device_type(device))

    def may_repeat(self, task: ModelTask) -> bool:
        """Whether a run that was judged may be made again, to explain it."""
        return True

    def is_hopeless(self, task: ModelTask, so_far: RunSoFar) -> bool:
        """Whether one call was long enough to decide about the run of ``task``."""
        return so_far.run.judged_by_one_call

    def shown_device(self, device: str) -> str:
        """The device that a run is about, which happens on ``device``."""
        return device

    def adjusted(self, task: RunTask) -> RunTask:
        """``task`` as it is done in this mode."""
        return task

    def simpler(self, task: RunTask) -> RunTask | None:
        """What to do instead of ``task`` if its worker ended without a verdict; or ``None``."""
        return None

    def between(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Those of ``runs``, all of which pass, between which speed decides."""
        return runs

    # -- In a worker

    def begin(self, target: Target, send: Send) -> None:
        """Make the process ready for a task."""

    def kernels(self) -> contextlib.AbstractContextManager[object]:
        """The kernels that the model runs with; by default those of torch."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def ready(self, task: ModelTask, target: Target, snapshot: Snapshot | None = None) -> Iterator[Prepared]:
        """What a run calls; restored afterwards, to ``snapshot`` if given."""
        with prepared_for(task, target, snapshot) as in_precision:
            yield on_backend(task, target, in_precision)

    def run(self, task: RunTask, target: Target, report: Reporter) -> None:
        """The plain part of a run, and the instrumented part."""
        outputs = self.plain(task, target, report)
        # Of a model with long calls, fp32 is not worth another one.
        if task.is_reference and report.so_far.seconds > task.slow_seconds:
            report.add(complete=True)
        elif task.instrumented:
            explain(task, target, report, outputs)

    def plain(self, task: RunTask, target: Target, report: Reporter) -> list[Tensor] | None:
        """Call the model as its user does, judge that, and measure it.

        Returns the first output, if the instrumented part runs the same code.
        """
        memory = ProcessMemory.of(task, target.model)
        with prepared_for(task, target) as in_precision, kernels_of(task), contextlib.ExitStack() as settings:
            part = PlainPart(task, target, on_backend(task, target, in_precision), report, memory)
            part.run()
            part.draw_as_eager(settings)
            report.send(Started(seconds=task.measure_budget))
            with report.faults_of("measuring"):
                part.measure()
            for measurement in measurements():
                report.send(Started(seconds=task.measure_budget, doing=measurement.what))
                with report.faults_of(measurement.what):
                    measurement.measure(part)
        if part.draws:
            with report.faults_of("comparing with the same draws"), prepared_for(in_fp32(task), target) as in_precision:
                judge_with_same_draws(in_eager_mode(in_precision, target), part)
        if part.is_compiled or not part.outputs:
            return None
        return part.outputs[0]

    @contextlib.contextmanager
    def explained(self, task: ModelTask, target: Target, options: Options) -> Iterator[tuple[Prepared, Options]]:
        """What is called to explain a run op by op, and with which options."""
        with prepared_for(task, target) as in_precision:
            yield in_eager_mode(in_precision, target), options

    def finish(self, report: Reporter) -> None:
        """Add to a run what is known at its end."""


def mode_of(source: TargetSource, options: ScanOptions, machine: Machine) -> Mode:
    """The mode of a scan; :class:`UsageError` for options that do not fit, or two modes at once."""
    modes = (feature.mode(source, options, machine) for feature in features())
    return only_mode([mode for mode in modes if mode is not None], options)


def only_mode(modes: Sequence[Mode], options: ScanOptions) -> Mode:
    """The one of ``modes``, or inference; raises :class:`UsageError` like :func:`mode_of`."""
    for mode in modes:
        mode.refuse(options)
    if len(modes) > 1:
        names = choices([mode.name for mode in modes], "and")
        raise UsageError(f"A model is not {names} at once.", "Leave out one of them.")
    return modes[0] if modes else Mode()
