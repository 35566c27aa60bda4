"""What a model returned, on the storages that its ops wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.trace.twins import Twins
from lowprec_check.engine.model.plain_run import OutputPart

OUTSIDE = "errors cannot be followed to the NumPy array or Python number that the model returns"
NOT_DENSE = "errors cannot be followed to the sparse or nested tensor that the model returns"


class Returned(NamedTuple):
    """One tensor of an output."""

    tensor: Tensor  # on the storage that the ops of the model wrote, if ``lost`` is ``None``
    compared: Tensor  # as it is compared with fp32's; the same object, unless its dtype is converted
    lost: str | None = None  # why no error can be followed to it, in words


def returned(parts: Iterable[OutputPart], twins: Twins) -> list[Returned]:
    """The tensors of an output, in the order of ``output_tensors``; an array's is on its memory."""
    tensors = []
    for leaf, tensor, is_own in ((part.leaf, part.tensor, part.is_own) for part in parts):
        result = Returned(tensor, tensor)
        if leaf.is_nested or leaf.layout != torch.strided:
            result = Returned(tensor, tensor, NOT_DENSE)
        elif not is_own:
            written = twins.on_storage(leaf)
            result = Returned(tensor, tensor, OUTSIDE) if written is None else Returned(written, written)
        elif tensor.dtype != leaf.dtype:
            result = Returned(leaf, tensor)
        tensors.append(result)
    return tensors
