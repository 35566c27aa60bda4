"""One op call, as the recorder handles it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.trace.op_arguments import dtype_flow, shape_text, tensors_in
from lowprec_check.engine.trace.op_traits import OpTraits, traits
from lowprec_check.schema.op_calls import CallOutcome, OpCall


class DispatchedCall:
    """The op, its arguments, where it was called, and its outcome."""

    __slots__ = ("args", "func", "inputs", "involved", "kwargs", "module", "outcome", "seconds", "source", "traits")

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.traits: OpTraits = traits(func)
        self.inputs = [tensor for tensor in tensors_in(args, kwargs) if tensor.layout == torch.strided]
        self.involved = False
        """Whether low-precision values reach this op; if not, it is its own reference."""
        self.module = ""
        self.source: str | None = None
        self.outcome: CallOutcome = "ok"
        self.seconds = 0.0

    def run(self) -> Any:
        """Run the op as given."""
        return self.func(*self.args, **self.kwargs)

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

    def row(self, outputs: list[Tensor]) -> OpCall:
        """The row of this call, without measurements."""
        return OpCall(
            self.traits.name,
            self.module,
            self.source,
            dtype_flow(self.inputs, outputs),
            shape_text(outputs),
            self.outcome,
        )
