"""Micro-batches to accumulate gradients over: further batches, rows of one batch, or one batch in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.pytree import leaves, map_tensors
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.train.batches import batches_of


class MicroBatches(NamedTuple):
    """The micro-batches of one sum of gradients."""

    batches: Sequence[Target]
    """The model with the inputs and targets of each micro-batch."""
    made: str
    """How they were made, in words."""


def ways_to_make(target: Target, count: int, seed: int) -> Iterator[MicroBatches]:
    """Yield ``count`` micro-batches, made in each possible way, the most realistic first.

    A small change of the inputs would not do. Micro-batches that resemble each other have similar gradients, and rounding a sum of
    those goes in the same direction each time: over 128 equal micro-batches, a sum in bf16 has about five times the error that it has
    over different ones. The elements of a tensor in another order keep its range, and give gradients as different as other inputs.
    """
    seed_everything(seed)
    several = batches_of(target, count)
    if len(several) == count:
        yield MicroBatches(several, f"batches 0 to {count - 1} of `inputs`" if count > 1 else "the inputs")
    elif len(several) > 1:
        in_turn = [several[index % len(several)] for index in range(count)]
        yield MicroBatches(in_turn, f"the {len(several)} batches of `inputs`, in turn")
    tensors = [tensor for _, tensor in leaves((target.inputs, target.targets)) if tensor.ndim]
    sizes = {tensor.shape[0] for tensor in tensors}
    rows = max(sizes) // count if len(sizes) == 1 else 0
    if rows:
        what = "one row" if rows == 1 else f"{rows} rows"
        slices = [_rows(target, slice(index * rows, (index + 1) * rows)) for index in range(count)]
        yield MicroBatches(slices, f"{what} of the inputs each")
    for chosen, what in ((is_float, "floating-point"), (_is_integer, "integer")):
        if any(chosen(tensor) and tensor.numel() > 1 for _, tensor in leaves(target.inputs)):
            others = [_shuffled(target, seed + index, chosen) for index in range(1, count)]
            made = f"the elements of each {what} tensor of the inputs, in another random order each time"
            yield MicroBatches([target, *others], made)
    yield MicroBatches([target] * count, "the same inputs each time, so that rounding errors add up")


def _rows(target: Target, rows: slice) -> Target:
    """Some rows of each tensor of the batch."""
    return _mapped(target, lambda tensor: tensor[rows] if tensor.ndim else tensor)


def _shuffled(target: Target, seed: int, chosen: Callable[[Tensor], bool]) -> Target:
    """The batch with the elements of each tensor of the inputs that is ``chosen`` in another order."""
    generator = torch.Generator().manual_seed(seed)

    def part(tensor: Tensor) -> Tensor:
        if not chosen(tensor):
            return tensor
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.detach().reshape(-1)[order.to(tensor.device)].view(tensor.shape)

    return _mapped(target, part)._replace(targets=target.targets)


def _mapped(target: Target, part: Callable[[Tensor], Tensor]) -> Target:
    changed: Any = map_tensors((target.args, target.kwargs, target.targets), part)
    args, kwargs, targets = changed
    return target._replace(args=args, kwargs=kwargs, targets=targets)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)
