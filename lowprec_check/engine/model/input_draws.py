"""Further inputs like those of a target: drawn anew, the next batches, or resampled values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lowprec_check.engine.model.inputs import BatchMaker, NoBatchError
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import Call
from lowprec_check.schema.backend_checks import InputChange
from lowprec_check.schema.measures import InputKind
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import leaves, map_tensors

LEAST_VALUES = 8
"""A feature with at least this many values is resampled by itself, else with all other features."""

Draw = tuple[int, list[Tensor] | None]
"""The number of a batch (of resampled values: what is added to the seed), and the tensors in the
inputs in the order of :func:`leaves`; ``None`` if they do not have the form of the target's.
"""


def further_draws(target: Target, first: int, seed: int) -> tuple[InputKind, Iterator[Draw]]:
    """Further inputs of ``target``, as many as there are, from the batch with the number ``first``.

    Values are resampled if nothing makes batches, or they are all the same or of other shapes.
    """

    def made_batches() -> Iterator[Draw]:
        expected = _form(target.inputs)
        for number in itertools.count(first):
            seed_everything(seed + number)
            batch = None
            try:
                batch = target.batch(number)
            except NoBatchError:  # there are no more, or all are the same
                return
            except UsageError:
                pass
            if batch is None or _form(batch.inputs) != expected:
                yield number, None
                continue
            values = []
            for tensor, new in zip(_tensors(target.inputs), _tensors(batch.inputs), strict=False):
                value = new.detach()
                # The same strides, for which code may be compiled
                if tensor.layout == torch.strided and tensor.shape == new.shape:
                    value = torch.empty_like(tensor, requires_grad=False).copy_(value)
                values.append(value)
            yield number, values

    if target.make_batch is not None:
        batches = made_batches()
        # The first two show whether there are batches at all; they are not made a second time
        tried = list(itertools.islice(batches, 2))
        if any(values is not None for _, values in tried):
            in_order = isinstance(target.make_batch, BatchMaker) and not target.make_batch.draws
            return "batches" if in_order else "drawn", itertools.chain(tried, batches)
    return "resampled", _resampled(target.inputs, first, seed)


def with_values(call: Call, values: Sequence[Tensor]) -> Call:
    """``call`` with ``values`` in place of the tensors in it, in the order of :func:`leaves`."""
    new_values = {id(tensor): value for (_, tensor), value in zip(leaves(call), values, strict=True)}

    def replaced(tensor: Tensor) -> Tensor:
        value = new_values.get(id(tensor), tensor)
        if tensor.requires_grad:
            return value.requires_grad_()
        return value

    args, kwargs = map_tensors(call, replaced)
    return args, kwargs


def _tensors(call: Call) -> list[Tensor]:
    return [tensor for _, tensor in leaves(call)]


def _form(call: Call) -> list[object]:
    """What inputs have in common: places, shapes and dtypes of tensors, values of numbers."""
    tensors = {path: (value.shape, value.dtype, value.layout) for path, value in leaves(call) if not value.is_nested}
    return [tensors, {path: leaf.tolist() for path, leaf in leaves(call, numbers=True) if path not in tensors}]


# -- Inputs that a compiler may not expect: those of the target with one change


def changed_inputs(target: Target, seed: int) -> Iterator[tuple[InputChange, Call]]:
    """The inputs of ``target``, each changed in one way; values are resampled with ``seed``."""
    call, tensors = target.inputs, [tensor.detach() for tensor in _tensors(target.inputs)]
    if not all(map(_is_plain, tensors)):
        return
    free = [not _is_fixed(tensor) for tensor in tensors]
    size = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
    items = [tensor.ndim > 0 and len(tensor) == size for tensor in tensors]
    numbers = [(tensor.is_floating_point() or tensor.is_complex()) and not _is_fixed(tensor) for tensor in tensors]

    def changed(change: Callable[[Tensor], Tensor], which: Sequence[bool]) -> Call:
        pairs = zip(tensors, which, strict=True)
        return with_values(call, [change(tensor) if applies else tensor for tensor, applies in pairs])

    # Each change keeps shapes and dtypes, except the last: a larger batch
    if any(numbers):
        yield "negated", changed(torch.neg, numbers)
        yield "scaled", changed(lambda tensor: 4 * tensor, numbers)
    if size > 1:
        yield "reversed", changed(lambda tensor: tensor.flip(0), items)
    elif any(free):
        yield "reversed", changed(lambda tensor: tensor.flip(-1), free)
    _, draws = further_draws(target._replace(make_batch=None), 1, seed)
    values = next((values for _, values in draws), None)
    if values is not None:
        yield "resampled", with_values(call, values)
    if size:
        yield "larger-batch", changed(lambda tensor: torch.cat([tensor, tensor[:1]]), items)


# -- Inputs that nothing draws anew: values are drawn, with replacement, from those of each tensor
#
# Each feature (the second dimension of images, else the last one) keeps its own values.
# What gives other values a meaning stays as it is: masks, and integers in order, such as positions,
# lengths and offsets.


def _resampled(call: Call, first: int, seed: int) -> Iterator[Draw]:
    tensors = _tensors(call)
    if all(_is_fixed(tensor) for tensor in tensors):
        return
    masks = [tensor.detach() for tensor in tensors if _is_mask(tensor)]
    for number in itertools.count(first):
        generator = torch.Generator().manual_seed(seed + number)
        new: dict[int, Tensor] = {}
        for tensor in tensors:
            if id(tensor) in new:  # a tensor that is given twice stays so
                continue
            new[id(tensor)] = tensor.detach()
            if not _is_fixed(tensor):
                mask = next((mask for mask in masks if mask.shape == tensor.shape), None)
                new[id(tensor)] = _resample(tensor.detach(), mask, generator)
        yield number, [new[id(tensor)] for tensor in tensors]


def _is_fixed(tensor: Tensor) -> bool:
    """Whether ``tensor`` keeps its values: it has one, is a mask, or has integers in order."""
    if not _is_plain(tensor) or tensor.numel() < 2 or _is_mask(tensor):
        return True
    if tensor.is_floating_point() or tensor.is_complex() or tensor.ndim == 0:
        return False
    steps = tensor.diff(dim=-1)
    return bool(steps.numel()) and bool((steps >= 0).all() or (steps <= 0).all())


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values are dense, and of a dtype that has kernels for what is done here."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.is_complex() or tensor.dtype in _PLAIN


_PLAIN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _is_mask(tensor: Tensor) -> bool:
    """Whether it has at most two different values."""
    if not _is_plain(tensor) or tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def _resample(tensor: Tensor, mask: Tensor | None, generator: torch.Generator) -> Tensor:
    values = tensor.cpu()
    if mask is not None and not tensor.is_floating_point():
        # Values that the mask excludes are drawn from such values only: padding stays where it is
        resampled = values.clone()
        for part in mask.unique():
            chosen = mask.cpu() == part.cpu()
            pool = values[chosen]
            resampled[chosen] = pool[torch.randint(len(pool), (len(pool),), generator=generator)]
    else:
        # One row for each feature, or one for all if features have few values
        axis = 1 if values.ndim >= 4 else -1
        moved = values.movedim(axis, 0)
        rows = moved.reshape(len(moved), -1)
        if rows.shape[1] < LEAST_VALUES:
            rows = rows.reshape(1, -1)
        index = torch.randint(rows.shape[1], rows.shape, generator=generator)
        resampled = rows.gather(1, index).reshape(moved.shape).movedim(0, axis)
    return torch.empty_like(tensor, requires_grad=False).copy_(resampled)
