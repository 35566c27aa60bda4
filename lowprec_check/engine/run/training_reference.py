"""Training in fp32: the run that all others are compared with, and runs from other seeds, whose spread is the limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from lowprec_check.engine.core.output_comparison import same_bits
from lowprec_check.engine.model.plain_run import PlainResult, describe_error, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import (
    DescribedLoss,
    check_optimizer,
    describe_loss,
    describe_optimizer,
    optimizer_code,
)
from lowprec_check.engine.model.user_code import call_user_code
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import Measures, MeasuresDone, PlainDone, TrainingDone
from lowprec_check.engine.run.reference_errors import unchanged_reference
from lowprec_check.engine.run.reference_file import read_reference, write_reference
from lowprec_check.engine.run.training_steps import TrainingSteps
from lowprec_check.engine.train.first_step import FirstGradients
from lowprec_check.engine.train.spread import SEEDS, Spread, add_noise
from lowprec_check.engine.train.steps import Samples, StepFailedError, StepResult, TrainingStep, Trajectory, state_bytes
from lowprec_check.engine.train.ways.usual import PLAIN
from lowprec_check.errors import UsageError
from lowprec_check.schema.training import TrainingRun, TrainingSetup, TrainingWay


@dataclasses.dataclass
class TrainingReference:
    """What the fp32 run keeps for the runs that are compared with it."""

    base: Trajectory
    others: list[Trajectory]
    """From other seeds."""
    samples: Samples
    outputs: list[Tensor]
    """The output and the loss of the first step."""
    gradients: dict[str, Tensor]
    """Of the first step, by parameter."""

    def save(self, job: Job) -> None:
        """Write the file that :meth:`load` reads."""
        content: dict[str, Any] = {
            "runs": [dataclasses.asdict(run) for run in (self.base, *self.others)],
            "sizes": self.samples.sizes,
            "outputs": self.outputs,
            "gradients": self.gradients,
        }
        write_reference(job, content)

    @classmethod
    def load(cls, job: Job) -> TrainingReference:
        """Read what the fp32 run saved."""
        saved = read_reference(job)
        base, *others = (Trajectory(**run) for run in saved["runs"])
        return cls(base, others, Samples(saved["sizes"]), saved["outputs"], saved["gradients"])


class ReferenceTraining(TrainingSteps):
    """Trains the model ``ready`` in fp32 on ``batches`` in turn, then from other seeds; sends what it finds."""

    def __init__(self, job: Job, target: Target, ready: Prepared, send: Send, batches: Sequence[Target]) -> None:
        super().__init__(job, target, ready, send, batches)
        self._count = 0
        """How many of the outputs are the output and the loss."""
        self._loss: DescribedLoss | None = None

    @property
    def too_slow(self) -> bool:
        """Whether a step failed."""
        return self.result.status == "error"

    def run(self) -> None:
        """Train, and send the verdict: an exception, or a loss that is not finite, is for the user to fix."""
        check_optimizer(self.target.optimizer, list(self.trained.values()))
        gradients = FirstGradients(self.trained)
        step = call_user_code("Calling average(model)", lambda: self._step(PLAIN))
        loop = self._loop(step, self.job.seed, (gradients,), self._keep_outputs)
        try:
            base = loop.run(self.job.steps)
        except StepFailedError as failure:
            exception = msgspec.structs.replace(describe_error(failure.error, self.ready.model), phase=step.phase)
            self.result = PlainResult(status="error", exception=exception, calls=loop.trajectory.steps + 1)
            self._send(PlainDone(self.result))
            return
        if _stands_still(base, gradients.found, step):
            raise UsageError(*unchanged_reference(base.steps))
        finite = all(map(math.isfinite, base.losses)) and bool(base.weights[-1].isfinite().all())
        self.result = PlainResult(
            status="ok" if finite else "nonfinite",
            seconds=min(base.seconds, default=0.0),
            first_seconds=base.seconds[0] if base.seconds else 0.0,
            calls=max(1, base.steps),
            loss=base.losses[-1] if finite else None,
        )
        if finite:
            self._add_seeds(base, loop.samples, gradients.found, step)
        self._send(PlainDone(self.result))

    def measure(self) -> None:
        """Send the time of the fastest step, and the peak memory of one more."""
        if self.result.status != "ok":
            return
        peak = self._peak_of_step(PLAIN)
        self._send(MeasuresDone(Measures(latency_ms=self.result.seconds * 1e3, peak_memory_bytes=peak)))

    def compare_ways(self) -> None:
        """There is only one way in fp32."""

    def _add_seeds(
        self, base: Trajectory, samples: Samples, gradients: dict[str, Tensor], trained: TrainingStep
    ) -> None:
        """Train from other seeds; save all for the other runs, and send how the model was trained."""
        optimizer, state = describe_optimizer(trained.updates.optimizer), state_bytes(trained.updates)
        others = [self._other_seed(number) for number in range(1, SEEDS + 1)]
        assert self.outputs is not None
        assert self._loss is not None
        reference = TrainingReference(
            base=base,
            others=[other for other in others if other is not None and all(map(math.isfinite, other.losses))],
            samples=samples,
            outputs=[tensor.cpu() for tensor in self.outputs[: self._count]],
            gradients=gradients,
        )
        reference.save(self.job)
        lines, made = optimizer_code(self.target.optimizer)
        spread = Spread(base, reference.others, samples, 0.0)
        low, high = spread.loss_band()
        limits = spread.loss_limits()
        setup = TrainingSetup(
            steps=self.job.steps,
            loss=self._loss.words,
            loss_code=self._loss.code,
            loss_setup=[*self._loss.setup, *lines],
            optimizer=optimizer,
            optimizer_code=made,
            average_code="" if self.target.average is None else "average(model)",
            repeatable=self._repeats(),
            default_loss=self.target.loss is None,
            default_optimizer=self.target.optimizer is None,
            new_batches=len(self._batches) > 1,
            seeds=len(reference.others),
            losses=base.losses,
            loss_low=low,
            loss_high=high,
            limit_low=limits[0],
            limit_high=limits[1],
            distances=spread.distance_limits(),
        )
        way = TrainingWay(name=PLAIN.name, status="ok", losses=list(base.losses), state_bytes=state)
        self._send(TrainingDone(run=TrainingRun(ways=[way]), setup=setup))

    def _repeats(self) -> bool:
        """Whether the first step gives the same bits again."""
        self._snapshot.rewind()
        again: list[Tensor] = []

        def keep(result: StepResult) -> None:
            again.extend(tensor.clone() for tensor in output_tensors(result))  # the last loss changes buffers

        try:
            self._loop(self._step(PLAIN), self.job.seed, on_first=keep).run(1)
        except StepFailedError:
            return False
        return self.outputs is not None and same_bits(again, self.outputs)

    def _other_seed(self, number: int) -> Trajectory | None:
        """A run on the same batches with other random draws, and noise on the initial weights; ``None`` if it fails."""
        self._snapshot.rewind()
        add_noise(list(self.trained.values()), number)
        try:
            return self._loop(self._step(PLAIN), self.job.seed + number).run(self.job.steps)
        except StepFailedError:  # of a decomposition, for example, that the noise makes impossible
            return None

    def _keep_outputs(self, result: StepResult) -> None:
        self.outputs = [tensor.clone() for tensor in output_tensors(result)]
        self._count = len(output_tensors((result.output, result.loss)))
        target = self.target
        self._loss = describe_loss(target.loss, result.output, target.form, target.targets_code)


def _stands_still(run: Trajectory, gradients: dict[str, Tensor], step: TrainingStep) -> bool:
    """Whether no weight changes, because every learning rate or every gradient is 0."""
    if any(not weights.equal(run.weights[0]) for weights in run.weights):
        return False
    rates = [float(group.get("lr", 1.0)) for group in step.updates.optimizer.param_groups]
    return not any(rates) or (bool(gradients) and not any(bool(gradient.any()) for gradient in gradients.values()))
