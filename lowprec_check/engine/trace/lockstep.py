"""The lockstep reference: it starts from the weights, buffers and inputs in fp32, and each op runs again on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.devices import MemoryLimit
from lowprec_check.engine.core.floating_dtypes import is_float, underflows, widened_dtype
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.trace.differentiable import run_differentiable
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.engine.trace.draws import GeneratorState, followed, rerun
from lowprec_check.engine.trace.error_tape import ErrorTape, Leaf
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, dtype_flow, map_args, shape_text
from lowprec_check.engine.trace.pending_figures import Pending, PendingFigures
from lowprec_check.engine.trace.twins import Facts, Twins, region_of, storage_key
from lowprec_check.schema.op_calls import OpCall

# -- The lockstep reference: each op runs again on the twins (reference values) of its inputs; its results become
# twins
#
# The reference follows the decisions of the low-precision run: it uses the same random values, and for an op that selects
# (topk, sort, max) it uses its own values at the indices that the low-precision run chose.

_COPIES = frozenset({"aten::clone", "aten::contiguous", "aten::permute_copy", "aten::view_copy"})


class Lockstep:
    """The reference run; ``wide`` is its dtype, fp32 or fp64. ``tape_limit``: memory that an error tape may hold, if one is wanted.

    ``figures`` are those of the run that it is compared with; by default they are computed at once.
    """

    def __init__(
        self,
        wide: torch.dtype = torch.float32,
        tape_limit: MemoryLimit | None = None,
        figures: PendingFigures | None = None,
    ) -> None:
        self.twins = Twins(wide)
        self.figures = figures or PendingFigures()
        self._tape = None if tape_limit is None else ErrorTape(self.twins, tape_limit, self.figures)
        self.parameters: set[int] = set()
        """Storages of the model's parameters and buffers."""
        self.is_partial = False
        """Whether it has low-precision values of a weight or an input: sparse tensors have no twins."""

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the reference."""
        return self.twins.wide

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a parameter or buffer of the model."""
        return storage_key(tensor) in self.parameters

    @property
    def tape(self) -> ErrorTape | None:
        """The tape that records this run; ``None`` if there is none, or it is full."""
        return self._tape if self._tape is not None and self._tape.stopped is None else None

    @property
    def full_tape(self) -> ErrorTape | None:
        """The tape, also if it is full."""
        return self._tape

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether the values are those of a parameter or buffer, or of a cast or copy of one, which no op has changed."""
        twin = self.twins.find(tensor)
        return twin.constant if twin is not None else self.is_parameter(tensor)

    def has_rounded_constants(self, call: DispatchedCall) -> bool:
        """Whether the op reads parameters, or casts of them, whose values are not those of fp32."""
        twins = map(self.twins.find, filter(is_float, call.inputs))
        return any(twin is not None and twin.constant and twin.tensor is not None for twin in twins)

    def gives_constant(self, call: DispatchedCall) -> bool:
        """Whether the op copies or casts constants: what this loses counts where the result is used."""
        if call.traits.mutable or not (call.traits.casts or call.traits.packet in _COPIES):
            return False
        return bool(call.inputs) and all(map(self.is_constant, call.inputs))

    def arguments(self, call: DispatchedCall, leaf: Leaf | None = None) -> tuple[Args, Kwargs]:
        """The arguments of ``call`` in the reference: twins of the tensors, and widened dtypes.

        Integer and boolean tensors that it writes to are copies: the model's own follow the low-precision run. ``leaf`` may
        replace each tensor, given that of the run and its twin.
        """
        wide, reference_of, before = self.twins.wide, self.twins.reference_of, call.before

        def reference(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return widened_dtype(value, wide)
            found = before[id(value)] if before and id(value) in before else reference_of(value)
            return found if leaf is None else leaf(value, found)

        return map_args(call.args, call.kwargs, reference)

    def prepare_writes(self, call: DispatchedCall) -> None:
        """Before the op runs: make a separate twin, or a copy, of each tensor that it writes to."""
        written = list(call.written()) if call.traits.mutable else []
        if written and self.figures.deferred:
            twins = [twin.tensor for twin in map(self.twins.find, written) if twin is not None]
            self.figures.before_write([*written, *(tensor for tensor in twins if tensor is not None)])
        for tensor in written:
            if not is_float(tensor):
                call.before[id(tensor)] = tensor.clone()
                self.twins.forget(tensor)  # floating values that are written as integers
            elif tensor.numel() == 0:  # an ``out`` that the op resizes
                call.before[id(tensor)] = tensor.new_empty(0, dtype=widened_dtype(tensor.dtype, self.wide))
            elif self.tape is None or self.twins.find(tensor) is None:  # else see Twins.write
                self.twins.prepare_write(tensor)

    def advance(self, call: DispatchedCall, outputs: list[Tensor]) -> list[Tensor] | None:
        """Run the op on the reference's tensors; the results, paired with ``outputs``, become their twins.

        Returns the results; ``None`` if the op fails on the reference, which then restarts from ``outputs``, or if it returns a
        different number of tensors.
        """
        call.wide_seconds = None
        try:
            args, references = self._run(call, functools.partial(self._results, outputs=outputs))
        except Exception:
            for tensor in outputs:
                self.twins.restart(tensor)
            return None
        if len(references) != len(outputs):
            return None
        source = call.inputs[0] if call.inputs else None
        from_parameter = call.traits.casts and source is not None and is_float(source) and self.is_parameter(source)
        if from_parameter and not call.traits.mutable and call.kwargs.get("device") is None:
            references[0] = args[0]
        self._set_references(call, outputs, references, shared=from_parameter)
        return references

    def _run(self, call: DispatchedCall, results: Callable[..., list[Tensor]]) -> tuple[Args, list[Tensor]]:
        """The arguments in the reference, and the ``results`` of the call on them; the tape records it."""
        if self.tape is None:
            args, kwargs = self.arguments(call)
            return args, results(call, args, kwargs)
        return self.tape.run(call, functools.partial(self.arguments, call), results)

    def _results(self, call: DispatchedCall, args: Args, kwargs: Kwargs, outputs: list[Tensor]) -> list[Tensor]:
        """The results of the op on the reference's ``args``; if it selects, at the indices chosen in low precision."""
        references = (run_wide if self.tape is None else run_differentiable)(call, args, kwargs)
        references = references[: len(outputs)]  # with gradients, some ops return what only their derivative needs
        references += [self.twins.reference_of(out) for out in outputs[max(1, len(references)) :]]
        if call.traits.selects and len(references) == len(outputs):
            references[0] = _selected(call, args, kwargs, outputs, references)
        return references

    def _set_references(
        self, call: DispatchedCall, outputs: list[Tensor], references: list[Tensor], *, shared: bool
    ) -> None:
        """Make ``references`` the twins of ``outputs``; tensors that the op wrote to already have one."""
        written = {id(tensor) for tensor in call.written()} - call.before.keys() if call.traits.mutable else ()
        constant = self.gives_constant(call)
        for out, reference in zip(outputs, references, strict=True):
            if not is_float(out) or out.shape != reference.shape:
                continue
            if id(out) not in written:
                self.twins.set_reference(out, reference, shared=shared).constant = constant
            elif self.tape is not None:
                self.twins.write(out, reference)

    def follow_random(
        self, call: DispatchedCall, outputs: list[Tensor], state: GeneratorState, own: tuple[Args, Kwargs]
    ) -> list[Tensor | None]:
        """Give the reference the random numbers of the run; ``own`` are the call's arguments, widened before it ran.

        Returns what each of ``outputs`` would be without rounding; ``None`` for those that are not known.
        """
        if call.traits.packet == "aten::native_dropout" and len(outputs) == 2:
            mask, scale = outputs[1], 1.0 / max(1.0 - call.args[1], 1e-12)
            _, references = self._run(call, lambda _call, args, _kwargs: [args[0] * mask * scale])
            self.twins.set_reference(outputs[0], references[0])
            return [own[0][0] * mask * scale, None]
        _, references = self._run(call, lambda call, args, kwargs: rerun(call, state, args, kwargs))
        widened = rerun(call, state, *own)
        written = {id(tensor) for tensor in call.written()}
        exact: list[Tensor | None] = [None] * len(outputs)
        for index, (out, reference, mine) in enumerate(zip(outputs, references, widened, strict=False)):
            if is_float(out) and out.shape == reference.shape:
                values = followed(out, reference.clone(), mine)
                exact[index] = followed(out, mine, mine)
                if id(out) not in written:
                    self.twins.set_reference(out, values)
                elif self.tape is not None:
                    self.twins.write(out, values)
                else:
                    self.twins.reference_of(out).copy_(values)
        return exact


def _selected(
    call: DispatchedCall, args: Args, kwargs: Kwargs, outputs: list[Tensor], references: list[Tensor]
) -> Tensor:
    """The reference's values at the indices chosen in low precision, in the shape of ``outputs[0]``.

    ``args`` are the reference's. If the op has no ``dim``, the reference's own selection is returned.
    """
    arguments = call.func._schema.arguments
    names = [argument.name for argument in arguments]
    if "dim" not in names or outputs[0].shape != references[0].shape:
        return references[0]
    position = names.index("dim")
    dim = args[position] if position < len(args) else kwargs.get("dim", arguments[position].default_value)
    source, index = args[0], outputs[1]
    if dim is None or not isinstance(source, Tensor) or source.ndim == 0:
        return references[0]
    if index.ndim == source.ndim:
        return torch.gather(source, dim, index)
    return torch.gather(source, dim, index.unsqueeze(dim)).squeeze(dim)


# -- Initializes the lockstep reference: the fp32 values of weights, buffers and inputs become the twins of their
# casts

_NOTABLE_FLUSHED = 0.01
"""A cast of a weight gets a row if it flushes more than this share of the non-zeros to zero."""


def seed_state(lockstep: Lockstep, model: nn.Module, fp32: dict[str, Tensor]) -> list[OpCall]:
    """Set the twins of parameters and buffers from ``fp32``, by name.

    Returns a row ``cast weight`` for each that overflows or underflows in its cast, which no op of the run shows.
    """
    rows: list[OpCall] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            lockstep.is_partial |= name in fp32 and fp32[name].dtype != tensor.dtype
            continue
        lockstep.parameters.add(storage_key(tensor))
        if name not in fp32 or not is_float(tensor):
            continue
        low, wide = tensor.detach(), fp32[name]
        lockstep.twins.seed(low, wide)
        twin = lockstep.twins.find(low)
        if twin is not None:
            twin.constant = True
        if wide.dtype != low.dtype and underflows(low.dtype):
            compared = lockstep.figures.compare(low, [wide], count_flushed=True)
            lockstep.figures.then(functools.partial(_add_cast, rows, lockstep, name, wide, low, compared))
    lockstep.figures.settle()
    return rows


def _add_cast(
    rows: list[OpCall], lockstep: Lockstep, name: str, wide: Tensor, low: Tensor, pending: Pending[TensorComparison]
) -> None:
    """Add the row of a weight's cast, unless it loses nothing notable to overflow or underflow."""
    compared = pending.value
    lost = bool(compared.introduced_inf or compared.introduced_nan)
    if not lost and (compared.flushed or 0.0) <= _NOTABLE_FLUSHED:
        return
    lockstep.twins.find_or_add(low).facts = {region_of(low): Facts(nonfinite=lost)}
    module, _, attribute = name.rpartition(".")
    row = OpCall(
        f"cast {attribute}",
        module,
        dtypes=dtype_flow([wide], [low]),
        shape=shape_text([low]),
        accumulated_error=compared.errors[0],
        absmax=compared.absmax,
        introduced_inf=compared.introduced_inf,
        introduced_nan=compared.introduced_nan,
        flushed=compared.flushed,
        subnormal=compared.subnormal,
        compared_values=compared.elements if lost else 0,
    )
    rows.append(row)


def seed_inputs(lockstep: Lockstep, cast: Any, original: Any, device: torch.device) -> None:
    """Set the twins of the tensors in ``cast`` from those at the same positions in ``original``."""
    for (_, low), (_, wide) in zip(leaves(cast), leaves(original), strict=True):
        if is_float(low) and low.dtype != wide.dtype:
            lockstep.is_partial |= low.layout != torch.strided
            exact = wide.detach().to(device)
            lockstep.twins.seed(low, exact)
            if lockstep.tape is not None:
                lockstep.tape.add_source(OpCall("cast input"), low, (None, low.to(exact.dtype) - exact))
