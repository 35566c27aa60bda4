"""Judges a run of training: a difference must exceed the spread of fp32 runs from other seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import random
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn

from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import required_arguments
from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.errors import Terminated, UsageError
from lowprec_check.schema.training import BEYOND, NOISE_ALONE, Divergence
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.floating_dtypes import as_real
from lowprec_check.torchkit.pytree import leaves, map_tensors

SAMPLED, TOGETHER = 1024, 2**17
"""Random elements kept of each tensor; more if all have at most ``TOGETHER`` together."""


# -- What a run of steps did


class Samples:
    """The same random elements of named tensors in every run; ``sizes`` are numbers of elements."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sizes = dict(sizes)
        most = max(SAMPLED, TOGETHER // max(1, len(self.sizes)))
        self._picked: dict[str, Tensor | None] = {}
        self.slices: dict[str, slice] = {}  # by name, where its elements are in what :meth:`take` returns
        # A small tensor is kept whole; of a large one, each sample stands for several elements.
        weights, end = [torch.zeros(0)], 0
        for name, size in self.sizes.items():
            count, self._picked[name] = min(size, most), None
            if size > most:
                self._picked[name] = torch.randint(size, (most,), generator=generator)
            self.slices[name] = slice(end, end + count)
            end += count
            weights.append(torch.full((count,), size / max(count, 1)))
        self.weights = torch.cat(weights)  # how many elements each sample stands for

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Samples:
        """Those of ``tensors``."""
        return cls({name: as_real(tensor).numel() for name, tensor in tensors.items()})

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The elements of all tensors, as one fp32 vector on the CPU."""
        samples = [torch.zeros(0)]
        for name, picked in self._picked.items():
            flat = as_real(tensors[name].detach()).reshape(-1)
            samples.append((flat if picked is None else flat[picked.to(flat.device)]).float().cpu())
        return torch.cat(samples)


@dataclasses.dataclass
class Trajectory:
    """What a run of steps did; it is saved for the runs that are compared with it."""

    losses: list[float] = dataclasses.field(default_factory=list)  # before each step, and after the last
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    """:class:`Samples` of the weights that are trained, before the first step and after each."""
    buffers: list[Tensor] = dataclasses.field(default_factory=list)  # the same of the floating buffers
    skipped: int = 0  # steps that a ``GradScaler`` skipped; they were repeated with the same batch
    scales: list[float] = dataclasses.field(default_factory=list)
    """The loss scale of each step that was not skipped; empty without a ``GradScaler``."""
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step

    @property
    def steps(self) -> int:
        """Steps that were done."""
        return max(0, len(self.weights) - 1)


# -- How far runs in fp32 are apart

NOTABLE = 0.1  # the share of the squared distance to fp32 from which on a parameter is named

_STUDENT = {1: 127.3, 2: 14.09, 3: 7.45, 4: 5.60, 5: 4.77, 6: 4.32, 7: 4.03}
"""By degrees of freedom, the 99.75 % quantile of Student's t."""


STILL = 0.1  # weights, or a parameter, that move less than this part of the way of fp32 stand still


class Interval(NamedTuple):
    """An interval of allowed values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], margin: float) -> Interval:
        """A 99.5 % prediction interval for one more value (Student's t), widened by ``margin``."""
        count = len(values)
        if count < 2:
            return cls(-math.inf, math.inf)
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        half = _STUDENT[min(count - 1, max(_STUDENT))] * deviation * math.sqrt(1 + 1 / count) + margin
        return cls(mean - half, mean + half)

    def narrowed(self, part: float) -> Interval:
        """This part of it, around its middle; itself if it is open."""
        middle, half = (self.low + self.high) / 2, part * (self.high - self.low) / 2
        if not math.isfinite(half):
            return self
        return Interval(middle - half, middle + half)


class Spread:
    """The limits that fp32 sets for low precision: by ``base``, and ``others`` from other seeds.

    ``tolerance`` is that of the precision: a smaller relative distance passes in any case.
    """

    def __init__(self, base: Trajectory, others: Sequence[Trajectory], samples: Samples, tolerance: float) -> None:
        self._base, self._others, self._samples, self._tolerance = base, others, samples, tolerance
        runs = [run.losses for run in (base, *others)]
        # Each way of a run is judged by the same figures of fp32.
        self._squares_of_fp32 = functools.cache(lambda step: self._squares(base, step))
        self._moves_of_fp32 = functools.cache(lambda step: [self._moved(run, step) for run in (base, *others)])
        self._known = [
            min([loss - run[0] for run, loss in found], [loss - base.losses[0] for _, loss in found], key=_deviation)
            for found in (list(zip(runs, losses, strict=True)) for losses in zip(*runs, strict=False))
        ]
        """By step, the change of the loss in each fp32 run: since its own first loss, or since that
        of ``base``, whichever differs less among them. Other initial weights may start from other
        losses and end at the same one, or the other way round.
        """

    def distances(self, run: Trajectory) -> list[float]:
        """After each step: ‖Δw − Δw₃₂‖ / ‖Δw₃₂‖, where Δw is the movement of the weights so far."""
        return [self._distance(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    def progress(self, run: Trajectory) -> list[float]:
        """After each step: Δw · Δw₃₂ / ‖Δw₃₂‖², the movement along that of fp32."""
        found = []
        for step in range(1, min(run.steps, self._base.steps) + 1):
            reference = _moved(self._base, step).double()
            product = float((_moved(run, step).double() * reference * self._samples.weights).sum())
            square = float((reference.square() * self._samples.weights).sum())
            found.append(_ratio(product, square, both_zero=1.0))
        return found

    def moved(self, run: Trajectory) -> list[float]:
        """After each step: ‖Δw‖ / ‖Δw₃₂‖, how far the weights moved, in any direction.

        It is that of one parameter, if that moves notably in fp32 and hardly here.
        """
        return [self._moved(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    @functools.cached_property
    def distance_limits(self) -> list[float]:
        """The largest distance of another seed, after each step."""
        return [
            max((self._distance(other, step) for other in self._others if step <= other.steps), default=0.0)
            for step in range(1, self._base.steps + 1)
        ]

    def loss_band(self) -> tuple[list[float], list[float]]:
        """The smallest and the largest change of the loss since the first step, in fp32."""
        return [min(values) for values in self._known], [max(values) for values in self._known]

    def loss_limits(self) -> tuple[list[float], list[float]]:
        """The limits of the change of the loss, for a run that starts with the loss of fp32."""
        if not self._others:
            return [], []
        intervals = [Interval.of(changes, 0.0) for changes in self._known]
        return [interval.low for interval in intervals], [interval.high for interval in intervals]

    def divergence(self, run: Trajectory, roundoff: float, *, noisy: bool, part: float = 1.0) -> Divergence | None:
        """Where ``run`` leaves the limits for good, or a ``part`` of them; ``None`` if it is within
        them at the end.

        The distance of weights is not judged if rounding is ``noisy``: right on average only.
        """
        forward = abs(run.losses[0] - self._base.losses[0])

        def of_loss(step: int) -> Interval:
            margin = 2 * (forward + roundoff * abs(self._base.losses[step]))
            return Interval.of(self._known[step], margin).narrowed(part)

        def of_moved(step: int) -> Interval:
            # Weights may move less, or further, than those of any fp32 run, within the tolerance,
            # but not stand still; noise only makes them move further.
            fp32_moves = self._moves_of_fp32(step)
            low, high = Interval.of(fp32_moves, self._tolerance)
            low = max(low, STILL * min(fp32_moves))
            if noisy:
                high = math.inf
            else:
                high = max(high, 1.0 + self._tolerance)
            return Interval(min(low, 1.0 - self._tolerance), high).narrowed(part)

        allowed = self.distance_limits

        def of_distance(step: int) -> Interval:
            return Interval(-math.inf, part * max(BEYOND * allowed[step - 1], self._tolerance))

        losses = [loss - run.losses[0] for loss in run.losses[: len(self._base.losses)]]
        # Whichever leaves its limits first is reported.
        divergences = [
            self._left(run, "loss", losses, 0, of_loss),
            self._left(run, "progress", self.moved(run), 1, of_moved),
            None if noisy else self._left(run, "weights", self.distances(run), 1, of_distance),
        ]
        return min(filter(None, divergences), key=lambda divergence: divergence.step, default=None)

    def _left(
        self,
        run: Trajectory,
        what: Literal["loss", "weights", "progress"],
        values: Sequence[float],
        first: int,
        limits: Callable[[int], Interval],
    ) -> Divergence | None:
        """The step from which ``values`` are outside of their limits for good, if any."""
        # From the end: a run that comes back inside its limits has not left them for good.
        crossed = None
        for step, value in reversed(list(enumerate(values, first))):
            low, high = limits(step)
            if low <= value <= high:
                break
            crossed = Divergence(step=step, what=what, value=value, limit=low if value < low else high)
        if crossed is None:
            return None
        step = min(max(crossed.step, 1), run.steps)
        still = None
        if what == "progress":
            still = self._least_moved(run, step)[0]
        if still is not None:
            return structs.replace(crossed, parameter=still, stands_still=True)
        # Named is the parameter that adds most to the distance to fp32, if that is notable.
        apart = {name: self._apart(run, step, part) for name, part in self._samples.slices.items()}
        furthest = max(apart, key=lambda name: apart[name], default=None)
        if furthest is not None and apart[furthest] ** 2 > NOTABLE * self._apart(run, step) ** 2:
            return structs.replace(crossed, parameter=furthest)
        return crossed

    def _distance(self, run: Trajectory, step: int) -> float:
        return _ratio(self._apart(run, step), self._norm(_moved(self._base, step)))

    def _moved(self, run: Trajectory, step: int) -> float:
        """How far all weights moved, relative to fp32; or one that moves in fp32 and not here."""
        return self._least_moved(run, step)[1]

    def _least_moved(self, run: Trajectory, step: int) -> tuple[str | None, float]:
        """The parameter that moves least of those that move notably in fp32, and how far, relative
        to fp32, if it hardly moves while others do; else ``None``, and how far all weights moved.
        """
        low, fp32 = self._squares(run, step), self._squares_of_fp32(step)
        total = _ratio(float(low.sum()) ** 0.5, float(fp32.sum()) ** 0.5, both_zero=1.0)
        # One that hardly moves in fp32 either says nothing.
        notable = fp32 > NOTABLE * fp32.sum()
        if total < STILL or not notable.any():
            return None, total
        ratios = torch.where(notable, low / fp32, math.inf).sqrt()
        least = int(ratios.argmin())
        if ratios[least] >= STILL:
            return None, total
        return list(self._samples.slices)[least], float(ratios[least])

    def _squares(self, run: Trajectory, step: int) -> Tensor:
        """By parameter, the square of its way."""
        # The difference of sums up to its end and its start
        ends = torch.tensor([0, *(part.stop for part in self._samples.slices.values())])
        moved = _moved(run, step).double().square() * self._samples.weights
        return torch.cat([torch.zeros(1).double(), moved.cumsum(0)])[ends].diff()

    def stuck(self, run: Trajectory, names: Collection[str]) -> Divergence | None:
        """The parameter of ``names`` that stands still most, however small its part of all is."""
        low, fp32 = self._squares(run, run.steps), self._squares_of_fp32(run.steps)
        ratios = [
            (math.sqrt(a / b), name)
            for name, a, b in zip(self._samples.slices, low.tolist(), fp32.tolist(), strict=True)
            if name in names and b
        ]
        least, name = min(ratios, default=(math.inf, ""))
        if least >= STILL:
            return None
        step = run.steps
        return Divergence(step=step, what="progress", value=least, limit=STILL, parameter=name, stands_still=True)

    def _apart(self, run: Trajectory, step: int, part: slice = slice(None)) -> float:
        return self._norm((_moved(run, step) - _moved(self._base, step))[part], part)

    def _norm(self, values: Tensor, part: slice = slice(None)) -> float:
        return float((values.double().square() * self._samples.weights[part]).sum().sqrt())


def _moved(run: Trajectory, step: int) -> Tensor:
    return run.weights[step] - run.weights[0]


def _deviation(values: Sequence[float]) -> float:
    if len(values) > 1:
        return statistics.stdev(values)
    return 0.0


def _ratio(value: float, reference: float, *, both_zero: float = 0.0) -> float:
    if reference == 0.0:
        return both_zero if value == 0.0 else math.inf
    return value / reference


# -- Runs from other seeds

SEEDS = 4  # fp32 runs from other seeds

NOISE = 0.01  # relative noise on each initial weight, where two runs would not differ otherwise

STRIDE = 7919  # what each further seed adds to those that the user's file sets

_FRESH_STD, _FRESH_MAX, _LEAST = 1.25, 1.5, 64
"""Weights with at least so many elements are as a module initializes them if their standard
deviation and maximum differ by no more than these factors from new ones.
"""


class OtherSeeds:
    """Starts runs from other seeds: with other weights in ``model``, and other ``batches``.

    ``draws``: whether steps draw random numbers. ``keep_alive``: called before slow user code.
    """

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        batches: Sequence[Target],
        seed: int,
        *,
        draws: bool,
        keep_alive: Callable[[], None],
    ) -> None:
        self._target, self._model, self._batches, self._seed = target, model, list(batches), seed
        self._keep_alive, self._runs_again = keep_alive, True
        self._ended, self._last = target.make_batch is None, list[Target]()
        """Whether there are no further batches, and the last ones."""
        self.varied = list[str]()  # what differs between the runs, in words
        if draws:
            self.varied.append("random draws")

    def start(self, number: int) -> list[Target]:
        """Give the model the initial weights of run ``number`` (from 1), and return its batches."""
        generator = torch.Generator().manual_seed(self._seed + number)
        # A script runs again only if its modules cannot initialize their weights.
        is_new = self._target.observed is not None and _reset(self._model, self._seed + STRIDE * number)
        words = "initial weights"
        if not is_new:
            made = self._made_again(number)
            if made is None:
                is_new = _reset(self._model, self._seed + number)
            else:
                is_new = _copy(made, self._model)
                if self._target.observed is not None:
                    words = "initial weights of the script run again"
                    # Weights that it loads are the same each time.
                    self._runs_again = is_new
        if is_new:
            self._add(words, 0)
        batches = self._new_batches(number, generator)
        if self.varied not in ([], [NOISE_ALONE]):
            return batches

        # Noise relative to each weight; on a tensor of zeros, to the root mean square of all.
        self.varied = [NOISE_ALONE]
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        total = sum(float(parameter.detach().abs().square().sum()) for parameter in trained)
        size = (total / max(1, sum(parameter.numel() for parameter in trained))) ** 0.5 or 1.0
        with torch.no_grad():
            for parameter in trained:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
                parameter.add_(NOISE * noise * (parameter.clone() if parameter.any() else size))
        return batches

    def _add(self, what: str, place: int) -> None:
        if what not in self.varied:
            self.varied.insert(place, what)

    def _made_again(self, number: int) -> nn.Module | None:
        """The model that the file makes from other seeds; ``None`` if it cannot be loaded again."""
        if self._target.remake is None or not self._runs_again:
            return None
        self._keep_alive()
        # The file is run again: modules that it imports anew must not replace those in use.
        modules = dict(sys.modules)
        try:
            with _other_seeds(number), contextlib.redirect_stderr(io.StringIO()):
                made = self._target.remake(self._seed + STRIDE * number)
        except Terminated:
            raise
        except Exception:
            return None
        finally:
            sys.modules.update(modules)
        return None if made is self._target.model else made

    def _new_batches(self, number: int, generator: torch.Generator) -> list[Target]:
        """The next batches, else the same in another order, or rows of the only one."""
        count, further = len(self._batches), list[Target]()
        while len(further) < count and not self._ended:
            index = number * count + len(further)
            seed_everything(self._seed + index)
            try:
                further.append(self._target.batch(index))
            except UsageError:  # there are no more, or the last one has another form
                break
        place = int(bool(self.varied) and self.varied[0].startswith("initial weights"))
        if len(further) == count:
            self._add("batches", place)
            self._last = further
            return further
        # The loader has ended: draw from the batches that are known, and from its last ones.
        self._ended, self._last = True, [*self._last, *further]
        pool = [*self._batches, *self._last]
        if len(pool) > 1:
            self._add("batches" if len(pool) > count else "order of the batches", place)
            return [pool[index] for index in torch.randperm(len(pool), generator=generator).tolist()[:count]]
        drawn = _with_other_rows(self._batches[0], generator)
        if drawn is not None:
            self._add("rows of the batch", place)
        return [drawn or self._batches[0]]


@contextlib.contextmanager
def _other_seeds(number: int) -> Iterator[None]:
    """Inside, seeds that the user's code sets are others."""

    def shifted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            other = seed
            if isinstance(seed, (int, Tensor)):
                other = (int(seed) + STRIDE * number) % 2**32
            return function(other, *args, **kwargs)

        return call

    numpy = sys.modules.get("numpy")
    places: list[tuple[Any, str]] = [(torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed")]
    places += [(numpy.random, "seed")] if numpy is not None else []
    with contextlib.ExitStack() as stack:
        for place, name in places:
            stack.enter_context(replaced(place, name, shifted(getattr(place, name))))
        yield


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copy(made: nn.Module, model: nn.Module) -> bool:
    """Copy parameters and buffers of ``made``, if ``model`` has the same; whether any differed."""
    new, old = _state(made), _state(model)
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (new, old)]
    if shapes[0] != shapes[1]:
        return False
    differs = False
    with torch.no_grad():
        for name, tensor in old.items():
            values = new[name].detach().to(tensor.device, tensor.dtype)
            differs = differs or not torch.equal(values, tensor)
            tensor.copy_(values)
    return differs


def _reset(model: nn.Module, seed: int) -> bool:
    """Initialize all parameters again, if they are as their modules initialize them: untrained."""
    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    # Only if every module with parameters can: old and new weights together are no start.
    functions = [getattr(owner, "reset_parameters", getattr(owner, "_reset_parameters", None)) for owner in owners]
    if not owners or not all(map(callable, functions)):
        return False
    kept = {name: tensor.detach().clone() for name, tensor in _state(model).items()}
    seed_everything(seed)
    with torch.no_grad():
        for function in filter(callable, functions):
            function()
        # Trained weights do not look like new ones: they are put back.
        fresh = all(_alike(kept[name], tensor) for name, tensor in model.named_parameters())
        if not fresh:
            for name, tensor in _state(model).items():
                tensor.copy_(kept[name])
    return fresh and any(not torch.equal(kept[name], tensor) for name, tensor in _state(model).items())


def _alike(known: Tensor, new: Tensor) -> bool:
    """Whether both may be drawn from one distribution."""
    if known.numel() < 2 or float(known.std()) == 0.0 or float(new.std()) == 0.0:
        return torch.equal(known, new) or (known.numel() < 2 and bool(new.any()) == bool(known.any()))
    if known.numel() < _LEAST:
        return True
    of_std, of_max = float(known.std() / new.std()), float(known.abs().max() / new.abs().max())
    return 1 / _FRESH_STD <= of_std <= _FRESH_STD and 1 / _FRESH_MAX <= of_max <= _FRESH_MAX


def _with_other_rows(target: Target, generator: torch.Generator) -> Target | None:
    """The batch with its rows drawn with replacement; ``None`` if that is not possible."""
    if target.loss is not None and required_arguments(target.loss) <= 1:
        return None  # labels in the file belong to the rows as they are
    # Rows exist if all tensors have the same first size; a sparse one is a graph of the rows.
    batch = (target.args, target.kwargs, target.targets)
    tensors = [tensor for _, tensor in leaves(batch) if tensor.ndim]
    if any(tensor.layout != torch.strided for tensor in tensors):
        return None
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1 or (rows := sizes.pop()) < 2:
        return None
    index = torch.randint(rows, (rows,), generator=generator)

    def picked(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return tensor.detach()[index.to(tensor.device)].requires_grad_(tensor.requires_grad)

    args, kwargs, targets = map_tensors(batch, picked)
    return target._replace(args=args, kwargs=kwargs, targets=targets)
