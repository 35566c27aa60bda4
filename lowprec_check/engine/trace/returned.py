"""What a model returned, as tensors to which errors can be followed: NumPy arrays that share memory with one included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.model.plain_run import OutputPart
from lowprec_check.engine.trace.twins import Twins

OUTSIDE = "errors cannot be followed to the NumPy array or Python number that the model returns"
NOT_DENSE = "errors cannot be followed to the sparse or nested tensor that the model returns"


class Returned(NamedTuple):
    """One tensor of an output."""

    tensor: Tensor
    """On the storage that the ops of the model wrote, if ``lost`` is ``None``."""
    compared: Tensor
    """As it is compared with that of fp32: one of ``output_tensors``. The same object, unless its dtype is converted."""
    lost: str | None = None
    """Why no error can be followed to it, in words."""


def returned(parts: Iterable[OutputPart], twins: Twins) -> list[Returned]:
    """The tensors of an output, in the order of ``output_tensors``."""
    return [_returned(part, twins) for part in parts]


def _returned(part: OutputPart, twins: Twins) -> Returned:
    if part.leaf.is_nested or part.leaf.layout != torch.strided:
        return Returned(part.tensor, part.tensor, NOT_DENSE)
    if part.is_own:
        return Returned(part.tensor if part.tensor.dtype == part.leaf.dtype else part.leaf, part.tensor)
    found = twins.on_storage(part.leaf)
    return Returned(part.tensor, part.tensor, OUTSIDE) if found is None else Returned(found, found)
