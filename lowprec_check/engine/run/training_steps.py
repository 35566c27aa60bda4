"""What the two plain parts that train have in common: steps of a prepared model from its initial state, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lowprec_check.engine.model.memory import measure_memory
from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import CallStarted
from lowprec_check.engine.train.steps import Loop, StepResult, TrainingStep, Watcher, with_step
from lowprec_check.schema.ways_to_train import WayToTrain


class TrainingSteps:
    """Steps of the model ``ready`` on ``batches`` in turn, for ``job``."""

    def __init__(self, job: Job, target: Target, ready: Prepared, send: Send, batches: Sequence[Target]) -> None:
        self.job, self.target, self.ready, self._send, self._batches = job, target, ready, send, batches
        self._snapshot = Snapshot(ready.model, target.inputs, parameters=True)
        self.result = PlainResult(status="error")
        self.outputs: list[Tensor] | None = None
        """What the first step computed: its output, loss, gradients and weights, in this order."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.ready.model.named_parameters() if p.requires_grad}

    def _step(self, way: WayToTrain) -> TrainingStep:
        return TrainingStep(self.target, self.ready, way)

    def _loop(
        self,
        step: TrainingStep,
        seed: int,
        watchers: Sequence[Watcher] = (),
        on_first: Callable[[StepResult], None] | None = None,
    ) -> Loop:
        return Loop(
            self.ready,
            step,
            self._batches,
            seed,
            on_step=lambda number: self._send(CallStarted(number)),
            on_first=on_first,
            watchers=watchers,
        )

    def _peak_of_step(self, way: WayToTrain) -> int:
        """Peak bytes of one more step, from the initial state."""
        self._snapshot.rewind()
        ready = with_step(self.ready, self._step(way))
        return measure_memory(ready, self.target.args, self.target.kwargs, seed=self.job.seed).peak
