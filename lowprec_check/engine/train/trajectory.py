"""Runs steps of training without instruments, and keeps the loss and samples of the weights after each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowprec_check.engine.core import devices
from lowprec_check.engine.core.floating_dtypes import is_float, real
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import call_model
from lowprec_check.engine.model.plain_run import reraise_interrupt
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.train.step import StepResult, TrainingStep
from lowprec_check.engine.train.ways import trained_weights
from lowprec_check.errors import UsageError, first_line, message_of, type_name

SAMPLED = 1024
"""Elements of each tensor that are kept of every step, chosen at random; all, if it has no more."""

MAX_SKIPPED = 24
"""Steps that a ``GradScaler`` may skip: from 2¹⁶, it is then below 2⁻⁸."""


class Samples:
    """Random elements of named tensors, the same ones in every run; ``sizes`` are the numbers of elements by name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sizes = dict(sizes)
        self._picked: dict[str, Tensor | None] = {}
        self.slices: dict[str, slice] = {}
        """By name, where its elements are in what :meth:`take` returns."""
        weights, end = [torch.zeros(0)], 0
        for name, size in self.sizes.items():
            picked = torch.randint(size, (SAMPLED,), generator=generator) if size > SAMPLED else None
            count = min(size, SAMPLED)
            self._picked[name], self.slices[name] = picked, slice(end, end + count)
            end += count
            weights.append(torch.full((count,), size / max(count, 1)))
        self.weights = torch.cat(weights)
        """How many elements each sample stands for."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Samples:
        """Those of ``tensors``."""
        return cls({name: real(tensor).numel() for name, tensor in tensors.items()})

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The elements of all tensors, as one fp32 vector on the CPU."""
        found = [torch.zeros(0)]
        for name, picked in self._picked.items():
            flat = real(tensors[name].detach()).reshape(-1)
            found.append((flat if picked is None else flat[picked.to(flat.device)]).float().cpu())
        return torch.cat(found)


@dataclasses.dataclass
class Trajectory:
    """What a run of steps did; it is saved for the runs that are compared with it."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """Before each step, and after the last."""
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    """:class:`Samples` of the weights that are trained, before the first step and after each."""
    buffers: list[Tensor] = dataclasses.field(default_factory=list)
    """The same of the floating buffers."""
    skipped: int = 0
    """Steps that a ``GradScaler`` skipped; they were repeated with the same batch."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of each step."""

    @property
    def steps(self) -> int:
        """Steps that were done."""
        return max(0, len(self.weights) - 1)


class Watcher(Protocol):
    """Observes the steps of a run from outside."""

    def before(self, step: TrainingStep) -> None:
        """Called before a step."""

    def after(self, step: TrainingStep) -> None:
        """Called after it."""


class Loop:
    """Trains the model of ``ready`` by ``step`` on ``batches`` in turn.

    ``on_step`` is called before each step with its number, counted from 1; ``on_first`` with what the first one computed.
    """

    def __init__(
        self,
        ready: Prepared,
        step: TrainingStep,
        batches: Sequence[Target],
        seed: int,
        *,
        on_step: Callable[[int], None] | None = None,
        on_first: Callable[[StepResult], None] | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._ready, self._step, self._batches, self._seed = ready, step, batches, seed
        self._on_step, self._on_first, self._watchers = on_step, on_first, list(watchers)
        self.faults: list[str] = []
        """Failures of watchers."""
        self.trajectory = Trajectory()
        self.parameters = {n: p for n, p in ready.model.named_parameters() if p.requires_grad}
        self.buffers = {n: b for n, b in ready.model.named_buffers() if is_float(b) and b.layout == torch.strided}
        self.samples, self.buffer_samples = Samples.of(self.parameters), Samples.of(self.buffers)

    def run(self, steps: int, *, may_continue: Callable[[float], bool] = lambda _seconds: True) -> Trajectory:
        """Do ``steps`` updates, fewer if ``may_continue``, which gets the seconds so far, says no; then compute the loss once more.

        It ends early after a loss that is not finite, and if a ``GradScaler`` skips every step. Raises :class:`StepFailedError`.
        """
        found = self.trajectory
        self._keep()
        with self._step.around():
            while found.steps < steps and (not found.steps or may_continue(sum(found.seconds))):
                self._do(found.steps)
                if found.skipped > MAX_SKIPPED or not all(map(math.isfinite, found.losses[-1:])):
                    return found
            found.losses.append(self._last_loss(found.steps))
        return found

    def _do(self, number: int) -> None:
        """One step; if a ``GradScaler`` skips it, nothing but that is noted."""
        found, step = self.trajectory, self._step
        scale = _scale(step)
        self._observe(lambda watcher: watcher.before(step))
        if self._on_step is not None:
            self._on_step(number + 1)
        inputs, named = self._inputs(number)
        with _failures():
            result, seconds = devices.timed(self._ready.device, lambda: call_model(step, inputs, named))
        if self._on_first is not None:
            self._on_first(result)
            self._on_first = None
        self._observe(lambda watcher: watcher.after(step))
        if scale is not None and (_scale(step) or 0.0) < scale:
            found.skipped += 1
            if found.skipped > MAX_SKIPPED and not math.isfinite(float(result.loss)):
                found.losses.append(float(result.loss))  # no scale helps: the forward pass is not finite
            return  # the same step again, with a smaller scale
        found.losses.append(float(result.loss))
        found.seconds.append(seconds)
        self._keep()

    def _observe(self, call: Callable[[Watcher], None]) -> None:
        """Let the watchers look; one that fails is left out from then on, and the failure is noted."""
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                self._watchers.remove(watcher)
                self.faults.append(f"{type_name(watcher)} failed: {type_name(error)}: {first_line(message_of(error))}")

    def _inputs(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a step, with the seeds and the targets set."""
        batch = self._batches[number % len(self._batches)]
        self._step.targets = batch.targets
        seed_everything(step_seed(self._seed, number))
        return self._ready.inputs(batch.args, batch.kwargs)

    def _keep(self) -> None:
        weights = dict(zip(self.parameters, trained_weights(self._step.updates), strict=True))
        self.trajectory.weights.append(self.samples.take(weights))
        self.trajectory.buffers.append(self.buffer_samples.take(self.buffers))

    def _last_loss(self, number: int) -> float:
        """The loss after the last step: with gradients, which a model or a loss may compute itself, as in a gradient penalty."""
        inputs, named = self._inputs(number)
        with _failures():
            _, loss = call_model(self._step.forward, (inputs, named), {})
            return float(loss.detach())


class StepFailedError(Exception):
    """A step raised an exception, which is the model's, the loss's or the optimizer's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise :class:`StepFailedError` for what the user's code raises."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        reraise_interrupt(error)
        raise StepFailedError(error) from error


def step_seed(seed: int, number: int) -> int:
    """The seed of a step, the same in every precision, whatever the steps before it drew."""
    return seed + 1_000_003 * number


def _scale(step: TrainingStep) -> float | None:
    scaler: Any = getattr(step.updates, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())
