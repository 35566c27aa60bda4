"""One op call: what the recorder knows of it, and reruns on wide (fp32 or fp64) arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from lowprec_check.core.trace.ops import (
    COMPARISONS,
    TRAINING,
    Args,
    Kwargs,
    OpTraits,
    dtype_flow,
    outputs_of,
    shape_text,
    tensors_in,
    traits,
)
from lowprec_check.core.trace.pending_figures import Pending
from lowprec_check.core.trace.places import CallSite
from lowprec_check.errors import encodable
from lowprec_check.process import system
from lowprec_check.schema.op_calls import CallOutcome, OpCall
from lowprec_check.schema.run_key import Phase
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, run_op
from lowprec_check.torchkit.floating_dtypes import NARROW, is_narrow
from lowprec_check.torchkit.source_location import SourceLines
from lowprec_check.torchkit.tensor_comparison import TensorComparison


class DispatchedCall:
    """The op, its arguments, where it was called, and its outcome."""

    __slots__ = (
        *("args", "autocast_keys", "before", "drew", "func", "input_errors", "inputs", "instruction"),
        *("involved", "kwargs", "lines", "module", "outcome", "phase", "seconds", "traits"),
        *("unrounded_outputs", "wide_seconds", "widened_arguments", "widened_outputs"),
    )

    def __init__(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], autocast_keys: AutocastKeys = ()
    ) -> None:
        self.func, self.args, self.kwargs, self.autocast_keys = func, args, kwargs, autocast_keys
        self.traits: OpTraits = traits(func)
        self.inputs = [tensor for tensor in tensors_in(args, kwargs) if tensor.layout == torch.strided]
        self.before: dict[int, Tensor] = {}
        """By ``id``, what the reference writes to for integers, booleans or a resized ``out``."""
        self.input_errors: Sequence[Pending[TensorComparison]] = ()
        """Its inputs before it ran, compared with the reference; without those that equal it."""
        self.involved = False  # whether low-precision values reach this op; if not, it is its own reference
        self.module = ""
        self.lines = SourceLines(None)
        self.instruction = -1  # in the code of its line, see :func:`instruction_of`
        self.phase: Phase | None = None
        self.outcome: CallOutcome = "ok"
        self.drew = False  # whether it drew random numbers
        self.seconds = 0.0
        self.wide_seconds: float | None = None
        """Of the op alone, last run on wide arguments; ``None`` if another function ran instead."""
        self.widened_arguments: tuple[Args, Kwargs] | None = None
        """Its arguments in widened dtypes, before it ran, if they are needed."""
        self.widened_outputs: list[Tensor] | None = None
        """The outputs on its own widened inputs, of a cast the values before it, if computed."""
        self.unrounded_outputs: Sequence[Tensor | None] | None = None
        """The same, of an op that draws as well: what each output would be without rounding."""

    @property
    def site(self) -> CallSite:
        """The op and where it was called."""
        return self.traits.name, encodable(self.module), self.lines.source

    @property
    def narrows_inside(self) -> bool:
        """Whether autocast applies to ops inside its kernel."""
        return self.traits.calls_ops and bool(self.autocast_keys)

    @property
    def draws(self) -> bool:
        """Whether it uses random numbers, as torch declares: not attention with a dropout of 0."""
        if not self.traits.random:
            return False
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name in ("dropout_p", "dropout", "train", "training"):
                return bool(self.args[index] if index < len(self.args) else self.kwargs.get(argument.name, False))
        return True

    @property
    def reports_failure(self) -> bool:
        """Whether it is a factorization whose output ``info`` reports failure."""
        return self.traits.packet.startswith("aten::linalg_") and self.traits.packet.endswith("_ex")

    @property
    def named(self) -> dict[str, Any]:
        """Its arguments by name; without those that have their default."""
        return named_arguments(self.func, self.args, self.kwargs)

    def run(self) -> Any:
        """Run the op as given."""
        return run_op(self.func, self.args, self.kwargs, self.autocast_keys)

    def results(self, out: Any, args: Args | None = None, kwargs: Kwargs | None = None) -> list[Tensor]:
        """The tensors returned as ``out``, then those written to; ``args``: if not its own."""
        outputs = outputs_of(out)
        if not self.traits.mutable:
            return outputs
        returned = {id(tensor) for tensor in outputs}
        written = self.written(args, kwargs)
        return outputs + [t for t in written if id(t) not in returned and t.layout == torch.strided]

    def written_ids(self) -> set[int]:
        """The ``id`` of each tensor that the op writes to."""
        return {id(tensor) for tensor in self.written()} if self.traits.mutable else set()

    def written(self, args: Args | None = None, kwargs: Kwargs | None = None) -> Iterator[Tensor]:
        """The tensors that the op writes to, among its own arguments or those given."""
        if args is None or kwargs is None:
            args, kwargs = self.args, self.kwargs
        if self.traits.in_training and not args[TRAINING]:
            return
        for key in self.traits.written:
            value = None
            if isinstance(key, str):
                value = kwargs.get(key)
            elif key < len(args):
                value = args[key]
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, Tensor))

    def nth_on_line(self, instructions_by_site: dict[CallSite, dict[int, int]]) -> int:
        """Which op of its name on its line it is, from 0, in order of the first calls."""
        instructions = instructions_by_site.setdefault(self.site, {})
        return instructions.setdefault(self.instruction, len(instructions))

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
            span=self.lines.span,
        )

    def largest_number(self) -> float | None:
        """The number of the largest magnitude among the arguments."""
        numbers = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, (int, float))]
        return max(map(float, numbers), key=abs, default=None)

    @property
    def makes_narrow_constant(self) -> bool:
        """Whether it is the end of ``torch.tensor(1e-10, dtype=torch.half)``."""
        return self.traits.packet == "aten::lift_fresh" and self.inputs[0].dtype in NARROW

    def vanished_constant(self, outputs: list[Tensor], low: torch.dtype | None = None) -> float | None:
        """The first non-zero number given to the op that rounds to zero in the op's dtype.

        With ``low``, that rounds to zero in this one, of an op on wide tensors too. Of a cast, the
        only value of what it casts.
        """
        if self.traits.casts and self.inputs:
            source = self.inputs[0]
            is_rounded = bool(outputs) and outputs[0].dtype in NARROW and _is_number(source)
            if is_rounded and bool(vanishes_in(outputs[0].dtype, source)):
                return float(source)
            return None
        largest = self._largest_vanishing(outputs, low)
        if largest is None:
            return None
        for value in self._numbers():
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if _vanishes(number, largest):
                    return float(number)
        return None

    def with_number(self, outputs: list[Tensor], number: float, low: torch.dtype) -> tuple[Args, Kwargs]:
        """Its arguments, with ``number`` for such numbers, in their sign."""
        largest = self._largest_vanishing(outputs, low)
        if largest is None:
            return self.args, self.kwargs

        def replaced(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(replaced, value))
            if not _vanishes(value, largest):
                return value
            signed = math.copysign(number, value)
            if isinstance(value, Tensor):
                return torch.tensor(signed, dtype=value.dtype)
            return signed

        args, kwargs = list(self.args), dict(self.kwargs)
        for index, name in self.traits.number_slots:
            if index < len(args):
                args[index] = replaced(args[index])
            elif name in kwargs:
                kwargs[name] = replaced(kwargs[name])
        return tuple(args), kwargs

    def _numbers(self) -> Iterator[Any]:
        """What is given for the numbers that it takes in the dtype of its tensors."""
        for index, name in self.traits.number_slots:
            if index < len(self.args):
                yield self.args[index]
            elif name in self.kwargs:
                yield self.kwargs[name]

    def _largest_vanishing(self, outputs: list[Tensor], low: torch.dtype | None) -> float | None:
        """The largest number that rounds to zero in its dtype, or in ``low``; ``None`` if none."""
        if not self.traits.number_slots or self.kwargs.get("alpha", 1) != 1:
            return None
        tensors = self.inputs if self.traits.packet in COMPARISONS else outputs
        if not tensors or (low is None and tensors[0].dtype not in NARROW):
            return None
        # CUDA takes the number of ``logit`` in fp32.
        if self.traits.packet.startswith("aten::logit") and tensors[0].device.type != "cpu":
            return None
        return _largest_zero(low or tensors[0].dtype)


def vanishes_in(dtype: torch.dtype, values: Tensor) -> Tensor:
    """Which values are zero in ``dtype``, and not themselves."""
    return (values != 0) & (values.abs() <= _largest_zero(dtype))


@functools.cache
def _largest_zero(dtype: torch.dtype) -> float:
    """Half the smallest subnormal number rounds to zero, too: a tie goes to even."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps / 2


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor of one value; accelerators would have to wait for it."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1 and value.dtype in (torch.float32, torch.float64)
    return isinstance(value, (int, float))


def _vanishes(value: Any, largest: float) -> bool:
    # As ``cosine_similarity`` makes it: others are not taken in the dtype of the op.
    if isinstance(value, Tensor) and value.ndim:
        return False
    return _is_number(value) and 0 < abs(float(value)) <= largest


def named_arguments(func: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of a call of ``func`` by name; without those that have their default."""
    return dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs


# Kernels for 16 bits only: in fp32 the first raises, the second is wrong (torch 2.11, H200).
ATTENTION_IN_16_BITS = ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention")


def run_wide(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The results of the op on other arguments, in the order of :meth:`DispatchedCall.results`.

    An attention kernel for 16 bits is replaced by the function that chooses a kernel, which returns
    its output alone. Raises ``RuntimeError`` for a derivative that reads a workspace in 16 bits.
    """
    if call.traits.workspaces and any(map(is_narrow, call.inputs)):
        for value in (call.args[index] for index in call.traits.workspaces if index < len(call.args)):
            if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.numel():
                raise RuntimeError("its workspace has the layout of the low precision")
    call.wide_seconds = None
    if call.traits.packet not in ATTENTION_IN_16_BITS:
        started = system.perf_counter()
        out = call.func(*args, **kwargs)
        call.wide_seconds = system.perf_counter() - started
        return call.results(out, args, kwargs)
    named = named_arguments(call.func, args, kwargs)
    shared_heads = named["query"].shape[1] != named["key"].shape[1]
    return attention_by_any_kernel(named, named.get("attn_bias"), enable_gqa=shared_heads)


def attention_by_any_kernel(named: dict[str, Any], mask: Tensor | None, **options: bool) -> list[Tensor]:
    """Attention by the function that chooses a kernel, for the arguments of one kernel."""
    q, k, v = named["query"], named["key"], named["value"]
    dropout, causal = named.get("dropout_p", 0.0), named.get("is_causal", False)
    attend = functional.scaled_dot_product_attention
    return [attend(q, k, v, mask, dropout, causal, scale=named.get("scale"), **options)]
