"""The lockstep reference: each op runs again on the twins (reference values) of its inputs; its results become twins.

The reference follows the decisions of the low-precision run: it uses the same random values, and for an op that selects
(topk, sort, max) it uses its own values at the indices that the low-precision run chose.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float, widened_dtype
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.draws import GeneratorState, followed, rerun
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, map_args
from lowprec_check.engine.trace.twins import Twins, storage_key
from lowprec_check.engine.trace.wide_run import run_wide


class Lockstep:
    """The reference run; ``wide`` is its dtype, fp32 or fp64."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.twins = Twins(wide)
        self.parameters: set[int] = set()
        """Storages of the model's parameters and buffers."""

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the reference."""
        return self.twins.wide

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a parameter or buffer of the model."""
        return storage_key(tensor) in self.parameters

    def arguments(self, call: DispatchedCall) -> tuple[Args, Kwargs]:
        """The arguments of ``call`` in the reference: twins of the tensors, and widened dtypes.

        Integer and boolean tensors that it writes to are copies: the model's own follow the low-precision run.
        """
        wide, reference_of, before = self.twins.wide, self.twins.reference_of, call.before

        def reference(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return widened_dtype(value, wide)
            return before[id(value)] if before and id(value) in before else reference_of(value)

        return map_args(call.args, call.kwargs, reference)

    def prepare_writes(self, call: DispatchedCall) -> None:
        """Before the op runs: make a separate twin, or a copy, of each tensor that it writes to."""
        for tensor in call.written() if call.traits.mutable else ():
            if not is_float(tensor):
                call.before[id(tensor)] = tensor.clone()
                self.twins.forget(tensor)  # floating values that are written as integers
            elif tensor.numel() == 0:  # an ``out`` that the op resizes
                call.before[id(tensor)] = tensor.new_empty(0, dtype=widened_dtype(tensor.dtype, self.wide))
            else:
                self.twins.prepare_write(tensor)

    def advance(self, call: DispatchedCall, outputs: list[Tensor]) -> tuple[list[Tensor], float] | None:
        """Run the op on the reference's tensors; the results, paired with ``outputs``, become their twins.

        Returns the results and the seconds that the op took. Returns ``None`` if the op fails on the reference, which
        then restarts from ``outputs``, or if it returns a different number of tensors.
        """
        started = time.perf_counter()
        try:
            args, kwargs = self.arguments(call)
            references = run_wide(call, args, kwargs)
        except Exception:
            for tensor in outputs:
                self.twins.restart(tensor)
            return None
        seconds = time.perf_counter() - started
        references += [self.twins.reference_of(out) for out in outputs[max(1, len(references)) :]]
        if len(references) != len(outputs):
            return None
        if call.traits.selects:
            references[0] = _selected(call, args, kwargs, outputs, references)
        source = call.inputs[0] if call.inputs else None
        from_parameter = call.traits.casts and source is not None and is_float(source) and self.is_parameter(source)
        if from_parameter and not call.traits.mutable and call.kwargs.get("device") is None:
            references[0] = args[0]
        self._set_references(call, outputs, references, shared=from_parameter)
        return references, seconds

    def _set_references(
        self, call: DispatchedCall, outputs: list[Tensor], references: list[Tensor], *, shared: bool
    ) -> None:
        """Make ``references`` the twins of ``outputs``; tensors that the op wrote to already have one."""
        written = {id(tensor) for tensor in call.written()} - call.before.keys() if call.traits.mutable else ()
        for out, reference in zip(outputs, references, strict=True):
            if is_float(out) and id(out) not in written and out.shape == reference.shape:
                self.twins.set_reference(out, reference, shared=shared)

    def follow_random(
        self, call: DispatchedCall, outputs: list[Tensor], state: GeneratorState, own: tuple[Args, Kwargs]
    ) -> None:
        """Give the reference the random numbers of the run; ``own`` are the call's arguments, widened before it ran."""
        if call.traits.packet == "aten::native_dropout" and len(outputs) == 2:
            scale = 1.0 / max(1.0 - call.args[1], 1e-12)
            kept = self.twins.reference_of(call.inputs[0]) * outputs[1]
            self.twins.set_reference(outputs[0], kept * scale)
            return
        references = rerun(call, state, *self.arguments(call))
        widened = rerun(call, state, *own)
        written = {id(tensor) for tensor in call.written()}
        for out, reference, mine in zip(outputs, references, widened, strict=False):
            if is_float(out) and out.shape == reference.shape:
                values = followed(out, reference.clone(), mine)
                if id(out) in written:
                    self.twins.reference_of(out).copy_(values)
                else:
                    self.twins.set_reference(out, values)


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
