"""One op call: what the recorder knows of it, whether its kernel is emulated, and running it again on wide arguments."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import scaled_dot_product_attention

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, run_op
from lowprec_check.engine.core.floating_dtypes import is_narrow
from lowprec_check.engine.core.source_location import SourceLines
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, dtype_flow, outputs_of, shape_text, tensors_in
from lowprec_check.engine.trace.op_traits import TRAINING, OpTraits, traits
from lowprec_check.engine.trace.twins import KnownFacts
from lowprec_check.errors import encodable
from lowprec_check.schema.op_calls import CallOutcome, OpCall
from lowprec_check.schema.run_key import Phase

# -- Which ops are emulated, that is computed in fp32 and rounded, because their kernel is too slow or crashes

SLOW_RATIO = 8.0
"""A kernel is slow if it takes more than this many times as long as fp32."""

SLOW_SECONDS = 0.01
"""A call up to this long is never slow: emulation would save nothing."""


Place = tuple[str, str, str | None]
"""Op, module and source line of an op call."""


class Emulation:
    """``slow`` maps op names to the reason, ``crashed`` places; ``measure_once`` adds slow kernels when they are found."""

    def __init__(
        self,
        slow: dict[str, str] | None = None,
        crashed: dict[Place, str] | None = None,
        *,
        measure_once: bool = False,
    ) -> None:
        self.slow = dict(slow or {})
        self.crashed = dict(crashed or {})
        self.measure_once = measure_once

    def includes(self, place: Place) -> bool:
        """Whether the op at ``place`` is emulated."""
        return place[0] in self.slow or place in self.crashed

    def add_timing(self, op: str, seconds: float, reference_seconds: float) -> None:
        """Record the times of one call; with ``measure_once``, a slow kernel is emulated from then on."""
        if self.measure_once and seconds > SLOW_SECONDS and seconds > SLOW_RATIO * reference_seconds:
            ratio = seconds / max(reference_seconds, 1e-9)
            self.slow[op] = (
                f"{ratio:.0f} times slower than fp32 in one call ({seconds * 1e3:.0f} ms), too slow for the budget"
            )

    def reasons(self) -> dict[str, str]:
        """The reason for each emulated op."""
        return self.slow | {op: reason for (op, _, _), reason in self.crashed.items()}


# -- One op call, as the recorder handles it


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


# -- Runs an op call again on wide (fp32 or fp64) arguments

_ATTENTION_IN_16_BITS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
"""Kernels for 16 bits only. In fp32 the first raises, and the second returns wrong values (torch 2.11, H200)."""


_WORKSPACES = ("workspace", "reserve", "reserveSpace")
"""Arguments that the forward op leaves for its derivative. With inputs in fp32, oneDNN's LSTM reads and writes past the end of it."""


def _reads_narrow_workspace(call: DispatchedCall) -> bool:
    given = zip(call.func._schema.arguments, call.args, strict=False)
    return any(
        argument.name in _WORKSPACES and isinstance(value, Tensor) and value.dtype == torch.uint8 and value.numel() > 0
        for argument, value in given
    ) and any(map(is_narrow, call.inputs))


def run_wide(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The results of the op on other arguments, in the order of :meth:`DispatchedCall.results`.

    An attention kernel for 16 bits is replaced by the function that chooses a kernel: its output alone is returned. Raises
    ``RuntimeError`` for a derivative that reads bytes which the forward op left in the layout of the low precision.
    """
    if _reads_narrow_workspace(call):
        raise RuntimeError("its workspace has the layout of the low precision")
    call.wide_seconds = None
    if call.traits.packet not in _ATTENTION_IN_16_BITS:
        started = time.perf_counter()
        out = call.func(*args, **kwargs)
        call.wide_seconds = time.perf_counter() - started
        return call.results(out, args, kwargs)
    names = [argument.name for argument in call.func._schema.arguments]
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        given.get("attn_bias"),
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        scale=given.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return [attended]
