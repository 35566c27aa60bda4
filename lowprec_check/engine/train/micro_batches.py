"""Micro-batches to accumulate gradients over: further batches, rows of one batch, or one batch in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.pytree import leaves, map_tensors
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError
from lowprec_check.schema.backends import Call


class MicroBatches(NamedTuple):
    """The inputs of each micro-batch, and how they were made."""

    calls: Sequence[Call]
    """One for each micro-batch."""
    made: str
    """In words."""


def ways_to_make(target: Target, count: int, seed: int) -> Iterator[MicroBatches]:
    """Yield ``count`` micro-batches, made in each possible way, the most realistic first.

    Micro-batches that resemble each other have gradients that do: a sum in bf16 of 128 equal gradients has five times the error of
    a sum of different ones, because each rounding goes in the same direction. So noise of a few percent would not do; the elements of
    the inputs in another order have the same values, and gradients as different as those of other inputs.
    """
    calls = _batches(target, count, seed)
    if len(calls) == count:
        yield MicroBatches(calls, f"batches 0 to {count - 1} of `inputs`")
    elif len(calls) > 1:
        in_turn = [calls[index % len(calls)] for index in range(count)]
        yield MicroBatches(in_turn, f"the {len(calls)} batches of `inputs`, in turn")
    tensors = [tensor for _, tensor in leaves(target.inputs) if tensor.ndim]
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) == 1 and (rows := max(sizes) // count):
        what = "one row" if rows == 1 else f"{rows} rows"
        yield MicroBatches([_rows(target.inputs, index, rows) for index in range(count)], f"{what} of the inputs each")
    for chosen, what in ((is_float, "floating-point "), (_is_integer, "integer ")):
        if any(chosen(tensor) and tensor.numel() > 1 for tensor in tensors):
            shuffled = [_shuffled(target.inputs, seed + index, chosen) for index in range(1, count)]
            made = f"the elements of each {what}tensor of the inputs, in another random order each time"
            yield MicroBatches([target.inputs, *shuffled], made)
    yield MicroBatches([target.inputs] * count, "the same inputs each time, so that rounding errors add up")


def _batches(target: Target, count: int, seed: int) -> list[Call]:
    """The inputs of batches 0, 1, 2, …, at most ``count`` of them."""
    found = [target.inputs]
    while len(found) < count and target.make_batch is not None:
        seed_everything(seed + len(found))
        try:
            found.append(target.batch(len(found)).inputs)
        except UsageError:  # there are fewer, or all are the same
            break
    return found


def _rows(inputs: Call, index: int, rows: int) -> Call:
    """Rows of each tensor of ``inputs``."""

    def part(tensor: Tensor) -> Tensor:
        return tensor[index * rows : (index + 1) * rows] if tensor.ndim else tensor

    return map_tensors(inputs, part)  # type: ignore[no-any-return]


def _shuffled(inputs: Call, seed: int, chosen: Callable[[Tensor], bool]) -> Call:
    """``inputs`` with the elements of each tensor that is ``chosen`` in another order."""
    generator = torch.Generator().manual_seed(seed)

    def part(tensor: Tensor) -> Tensor:
        if not chosen(tensor):
            return tensor
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.detach().reshape(-1)[order.to(tensor.device)].view(tensor.shape)

    return map_tensors(inputs, part)  # type: ignore[no-any-return]


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)
