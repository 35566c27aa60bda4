"""One op call on its way through the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.compare import is_float
from lowprec_check.engine.trace.op_traits import OpTraits, traits
from lowprec_check.engine.trace.rescue import tensors_in
from lowprec_check.schema.scan_result import Outcome


class Call:
    """The op, its arguments, where it was called, and how it went."""

    __slots__ = ("args", "func", "inputs", "involved", "kwargs", "module", "outcome", "seconds", "source", "traits")

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.traits: OpTraits = traits(func)
        self.inputs = [tensor for tensor in tensors_in(args, kwargs) if tensor.layout == torch.strided]
        self.involved = False
        self.module = ""
        self.source: str | None = None
        self.outcome: Outcome = "ok"
        self.seconds = 0.0

    def written(self) -> Iterator[Tensor]:
        """The tensors that the op writes to."""
        for key in self.traits.written:
            value = self.kwargs.get(key) if isinstance(key, str) else self.args[key] if key < len(self.args) else None
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, Tensor))

    def largest_number(self) -> float | None:
        """The number of the largest magnitude among the arguments."""
        numbers = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, (int, float))]
        return max(map(float, numbers), key=abs, default=None)


def outputs_of(out: Any) -> list[Tensor]:
    """The strided tensors that an op returned, in order."""
    if isinstance(out, Tensor):
        return [out] if out.layout == torch.strided else []
    if isinstance(out, (list, tuple)):
        return [tensor for item in out for tensor in outputs_of(item)]
    return []


def dtypes_in(inputs: list[Tensor]) -> list[str]:
    """Names of the floating dtypes, sorted."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in inputs if is_float(tensor)})
