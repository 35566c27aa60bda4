"""Other seeds of a training: other initial weights where possible, other batches, other draws."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.kept_files import replaced
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import required_arguments
from lowprec_check.errors import Terminated, UsageError
from lowprec_check.schema.training import NOISE_ALONE
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import leaves, map_tensors

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
        is_new = self._target.observed is not None and _reset(self._model, self._seed + number)
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
