"""One op call, as the recorder handles it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, run_op
from lowprec_check.engine.core.source_location import SourceLines
from lowprec_check.engine.trace.emulation import Place
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, dtype_flow, outputs_of, shape_text, tensors_in
from lowprec_check.engine.trace.op_traits import TRAINING, OpTraits, traits
from lowprec_check.engine.trace.twins import KnownFacts
from lowprec_check.errors import encodable
from lowprec_check.schema.op_calls import CallOutcome, OpCall
from lowprec_check.schema.run_key import Phase


class DispatchedCall:
    """The op, its arguments, where it was called, and its outcome."""

    __slots__ = (
        *("args", "autocast_keys", "before", "exact_arguments", "func", "input_facts", "inputs", "involved", "kwargs"),
        *("lines", "module", "outcome", "phase", "seconds", "traits", "wide_seconds", "widened_outputs"),
    )

    def __init__(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], autocast_keys: AutocastKeys = ()
    ) -> None:
        self.func, self.args, self.kwargs, self.autocast_keys = func, args, kwargs, autocast_keys
        self.traits: OpTraits = traits(func)
        self.inputs = [tensor for tensor in tensors_in(args, kwargs) if tensor.layout == torch.strided]
        self.before: dict[int, Tensor] = {}
        """By ``id``, what the reference writes to in place of an integer or boolean tensor, or of one that the op resizes."""
        self.input_facts: Sequence[KnownFacts] = ()
        """The facts of its inputs, before it ran; those that equal the reference are left out."""
        self.involved = False
        """Whether low-precision values reach this op; if not, it is its own reference."""
        self.module = ""
        self.lines = SourceLines(None)
        self.phase: Phase | None = None
        self.outcome: CallOutcome = "ok"
        self.seconds = 0.0
        self.wide_seconds: float | None = None
        """What the op alone took when it last ran on wide arguments; ``None`` if another function was called in its place."""
        self.exact_arguments: tuple[Args, Kwargs] | None = None
        """Its arguments, widened, with the fp32 values of parameters; ``None`` if it reads no rounded ones."""
        self.widened_outputs: list[Tensor] | None = None
        """The outputs of the op on its own inputs, widened; for a cast, the values before it. ``None`` if not computed."""

    @property
    def place(self) -> Place:
        """The op and where it was called."""
        return self.traits.name, encodable(self.module), self.lines.source

    @property
    def narrows_inside(self) -> bool:
        """Whether autocast applies to ops inside its kernel."""
        return self.traits.calls_ops and bool(self.autocast_keys)

    def run(self) -> Any:
        """Run the op as given."""
        return run_op(self.func, self.args, self.kwargs, self.autocast_keys)

    def results(self, out: Any, args: Args | None = None, kwargs: Kwargs | None = None) -> list[Tensor]:
        """The tensors that the op returned as ``out``, then those that it wrote to without returning them.

        ``args`` and ``kwargs`` are what it was called with, if those were not the call's own.
        """
        outputs = outputs_of(out)
        if not self.traits.mutable:
            return outputs
        returned = {id(tensor) for tensor in outputs}
        written = self._written_among(self.args if args is None else args, self.kwargs if kwargs is None else kwargs)
        return outputs + [t for t in written if id(t) not in returned and t.layout == torch.strided]

    def written(self) -> Iterator[Tensor]:
        """The tensors that the op writes to."""
        return self._written_among(self.args, self.kwargs)

    def _written_among(self, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
        if self.traits.in_training and not args[TRAINING]:
            return
        for key in self.traits.written:
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
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
            self.lines.source,
            dtype_flow(self.inputs, outputs),
            shape_text(outputs),
            self.outcome,
            phase=self.phase,
            caller=self.lines.caller,
        )
