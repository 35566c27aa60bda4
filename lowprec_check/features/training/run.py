"""The mode of a scan of training: a run is some steps, judged against fp32 from other seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from torch import Tensor

from lowprec_check.analysis.training_status import keeps_weights
from lowprec_check.core.explanation import explain
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.machine import Machine
from lowprec_check.core.messages import Receive, Reporter, Send, Started, faults_sent
from lowprec_check.core.mode import Mode
from lowprec_check.core.preparation import kernels_of
from lowprec_check.core.reference_errors import OTHER_DTYPE
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.core.trace.instrument import Options
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.errors import UsageError
from lowprec_check.features.training.steps import TrainingStep, batches_of, ways_for, with_step
from lowprec_check.features.training.training_part import TrainingPart, explained_way, with_draws_of
from lowprec_check.features.training.training_reference import ReferenceTraining, TrainingReference, in_training
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import all_told
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.schema.ways_to_train import WAYS, WayToTrain
from lowprec_check.torchkit.compiled import compiled_frames
from lowprec_check.torchkit.installation import extension_problem


class _FirstWay(NamedTuple):
    """What is explained of the first way to train."""

    way: WayToTrain
    outputs: list[Tensor] | None
    """What its first step computed."""
    passes_clearly: bool


@dataclasses.dataclass(frozen=True)
class Training(Mode):
    """A run is some steps of training."""

    steps: int
    way: WayToTrain | None = None
    """The way whose step is explained op by op; ``None``: the first of the precision."""
    name = "trained"
    doing = "training"
    ignored = MappingProxyType({"further_inputs": "steps take new batches by themselves"})
    is_forward = False
    limits_calls = False
    runs_side_by_side = False
    changes_parameters = True
    has_backends = False

    def load(self) -> None:
        """Optimizers import it, which takes a second in each fork."""
        importlib.import_module("torch._dynamo")

    def check_reference(self, so_far: RunSoFar) -> None:
        """A loss or weights that are not finite."""
        if so_far.run.status == "nonfinite":
            raise UsageError(
                f"Training in fp32 gives NaN or Inf in step {so_far.run.calls}, in the loss or the weights.",
                "Fix it in fp32 first: check the loss, or lower the learning rate in `optimizer`.",
            )

    def may_repeat(self, task: ModelTask) -> bool:
        """Not a step that may be slow."""
        return task.accelerated

    def is_hopeless(self, task: ModelTask, so_far: RunSoFar) -> bool:
        """Whether a step was so long."""
        return so_far.seconds > task.hopeless_seconds

    def between(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Those that keep the weights in fp32, if any do: no other is recommended beside them."""
        return [run for run in runs if keeps_weights(run)] or runs

    def failure_hint(self, error: ExceptionInfo, device: str, target: Target) -> str | None:
        """What to repair in the script first."""
        if target.observed is None:
            return None
        hint, cast = all_told(target.observed.amp), target.observed.cast
        if cast is not None and OTHER_DTYPE.search(error.message):
            why = f"The script trains weights in {cast.dtype}, and fp32 has all in fp32"
            hint = f"{why}: cast the inputs of layers with x.to(layer.weight.dtype). {hint}".strip()
        return hint or None

    @contextlib.contextmanager
    def ready(self, task: ModelTask, target: Target, snapshot: Snapshot | None = None) -> Iterator[Prepared]:
        """A training step of the first way."""
        with in_training(task, target, snapshot) as ready:
            yield with_step(ready, TrainingStep(target, ready, ways_for(target, ready, self.steps)[0]))

    def run(self, task: RunTask, target: Target, report: Reporter) -> None:
        """Train in each way; a step of the first is explained op by op."""
        first = self._trained(task, target, report)
        if first.passes_clearly and task.measured and not task.explains_all:
            task = dataclasses.replace(task, errors="none")
        if task.instrumented:
            mode = dataclasses.replace(self, way=first.way)
            explain(dataclasses.replace(task, mode=mode), target, report, first.outputs)

    def _trained(self, task: RunTask, target: Target, report: Reporter) -> _FirstWay:
        """Train in each way; the first gives the status."""
        reference = None
        if not task.saves_reference:
            reference = TrainingReference.load(task.files)
        if reference is not None and reference.draws:
            with report.faults_of("comparing with the same random numbers"), kernels_of(task):
                reference = with_draws_of(task, target, reference, report.send)
        frames, batches = compiled_frames(), batches_of(target, self.steps)
        with in_training(task, target) as ready, kernels_of(task):
            part: ReferenceTraining | TrainingPart
            if reference is None:
                part = ReferenceTraining(task, target, ready, report, batches, self.steps)
            else:
                part = TrainingPart(task, target, ready, report, batches, self.steps, reference)
            part.run()
            report.send(Started(seconds=task.measure_budget))
            with report.faults_of("measuring"):
                part.measure(memory=task.measured)
            with report.faults_of("comparing the ways to train"):
                part.compare_ways()
        outputs = part.outputs if compiled_frames() == frames else None  # compiled code rounds differently
        return _FirstWay(part.explained, outputs, part.passes_clearly)

    @contextlib.contextmanager
    def explained(self, task: ModelTask, target: Target, options: Options) -> Iterator[tuple[Prepared, Options]]:
        """A training step."""
        with in_training(task, target) as ready:
            way = self.way or ways_for(target, ready, self.steps)[0]
            # An explanation that is tried again explains the same step
            so_far = task.so_far if isinstance(task, RunTask) else None
            if self.way is None and so_far is not None and so_far.run.training is not None:
                way = explained_way(way, so_far.run.training.ways[0])
            step = TrainingStep(target, ready, way, target.model)
            yield with_step(ready, step), options._replace(step=step)


EXTENSION_SECONDS = 120.0
"""Time to import Intel's extension, and for each step with it, if the budget is less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtensionTask(ModelTask):
    """Train in the ways of Intel's extension, which changes the process for good."""

    changes_process = True
    mode: Training
    so_far: RunSoFar
    """The run, to which they are added."""

    @property
    def part_budget(self) -> float:
        """Importing the extension takes long."""
        return max(self.call_budget, EXTENSION_SECONDS)

    @property
    def progress(self) -> tuple[str, str]:
        """The run, and what is tried."""
        return self.key.label, "training with Intel's extension"

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Send how the model trains in each of these ways."""
        with faults_sent("training with Intel's extension", send), in_training(self, target) as ready:
            reference, report = TrainingReference.load(self.files), Reporter(self.so_far, send)
            batches = batches_of(target, self.mode.steps)
            TrainingPart(self, target, ready, report, batches, self.mode.steps, reference).compare_extension()


class TrainingFeature(Feature):
    """Scans of training."""

    def mode(self, source: TargetSource, options: ScanOptions, machine: Machine) -> Mode | None:
        """If it is asked for."""
        return Training(options.training_steps) if options.train else None

    def beside(self, runs: TargetRuns, task: RunTask, run: Run) -> Run:
        """``run`` with the ways of Intel's extension, if it fits; notes say what failed."""
        # They are tried for autocast to bf16 on the CPU, in a worker: the extension changes its
        # process for good. ``ipex.optimize`` takes weights in fp32 only, and would cast those of
        # modules that are kept in fp32.
        if not isinstance(task.mode, Training) or run.training is None:
            return run
        precision = PRECISIONS.get(task.precision)
        fits = any(way.trial == "own process" and way.suits(precision) for way in WAYS)
        here = task.device == "cpu" and runs.isolation != "none" and not task.is_reference
        plain = not task.keep_fp32 and task.memory_format == CONTIGUOUS
        trained = run.status in ("ok", "inaccurate", "nonfinite")
        if not (fits and here and plain and trained) or extension_problem() is not None:
            return run
        extension = task.as_task(ExtensionTask, so_far=task.begun())
        outcome = runs.launcher.do(extension)
        ways = [*run.training.ways]
        if outcome.so_far is not None and outcome.so_far.run.training is not None:
            ways += outcome.so_far.run.training.ways
        notes = [*run.notes, *outcome.faults]
        why = outcome.why_incomplete(extension.part_budget)
        if why:
            notes.append(f"not all ways of Intel's extension were tried: {why}")
        return msgspec.structs.replace(run, training=msgspec.structs.replace(run.training, ways=ways), notes=notes)


TRAINING = TrainingFeature()
