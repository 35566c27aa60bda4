"""Where a script casts its model to 16 bits, which a scan of training takes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowprec_check.schema.training import WeightCast
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.source_location import own_line


class WeightCasts:
    """The calls that cast parameters to 16 bits, by the id of the parameter."""

    def __init__(self) -> None:
        self._casts: dict[int, WeightCast] = {}

    @property
    def functions(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """What to replace: the owner, the name, and a function that gets the original first."""
        return [(nn.Module, name, self._cast) for name in ("to", "half", "bfloat16")]

    def _cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wide = [parameter for parameter in module.parameters() if parameter.dtype not in NARROW]
        result = original(module, *args, **kwargs)
        for parameter in wide:
            if parameter.dtype in NARROW:
                line = own_line(sys._getframe(2)) or ""
                dtype = str(parameter.dtype).removeprefix("torch.")
                self._casts[id(parameter)] = WeightCast(line=line, call=original.__name__, dtype=dtype)
        return result

    def of(self, root: nn.Module) -> WeightCast | None:
        """The cast of trained weights, perhaps without a line; ``None`` if all are in fp32."""
        narrow = [p for p in root.parameters() if p.requires_grad and p.dtype in NARROW]
        if not narrow:
            return None
        casts = (self._casts[id(parameter)] for parameter in narrow if id(parameter) in self._casts)
        dtype = str(narrow[0].dtype).removeprefix("torch.")
        return next(casts, WeightCast(line="", call="", dtype=dtype))


def widen(root: nn.Module) -> None:
    """Take all weights and buffers from 16 bits to fp32, in place."""
    for tensor in (*root.parameters(), *root.buffers()):
        if tensor.dtype in NARROW:
            tensor.grad = None
            tensor.data = widened(tensor.data)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in fp32 if it has 16 bits, else itself."""
    return tensor.float() if tensor.dtype in NARROW else tensor
