"""The lockstep reference: starts from weights, buffers and inputs in fp32, and runs each op again.

Each op runs on the twins (reference values) of its inputs; its results become twins. The reference
follows the decisions of the low-precision run: it uses the same random values, and for an op that
selects (topk, sort, max) it uses its own values at the indices that the low-precision run chose.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall, named_arguments, run_wide
from lowprec_check.core.trace.ops import COPIES, Args, Kwargs, map_args
from lowprec_check.core.trace.pending_figures import PendingFigures
from lowprec_check.core.trace.twins import Twins, may_overlap, storage_key
from lowprec_check.errors import one_line
from lowprec_check.torchkit.devices import default_generator
from lowprec_check.torchkit.floating_dtypes import is_float, widened_dtype

Leaf = Callable[[Tensor, Tensor], Tensor]
"""Maps a tensor of the run and its reference values to the argument that the op gets."""


class ReferenceOps:
    """How the reference runs ops; an observer may run them so that it can follow them back."""

    @property
    def keeps_values(self) -> bool:
        """Whether no op may write to values of the reference: a write then makes new ones."""
        return False

    def run(
        self,
        call: DispatchedCall,
        arguments: Callable[[Leaf | None], tuple[Args, Kwargs]],
        results: Callable[..., list[Tensor]],
    ) -> tuple[Args, list[Tensor]]:
        """The ``arguments`` of ``call`` in the reference, and the ``results`` on them."""
        args, kwargs = arguments(None)
        return args, results(call, args, kwargs)

    def results(self, call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """What the op returns on these arguments."""
        return run_wide(call, args, kwargs)

    def cannot_follow(self, op: str) -> None:
        """The reference has lost the values that an op gives."""

    saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """How tensors are saved that derivatives need."""


class Lockstep:
    """The reference run in ``wide`` (fp32 or fp64)."""

    def __init__(self, wide: torch.dtype = torch.float32, figures: PendingFigures | None = None) -> None:
        self.twins = Twins(wide)
        self.figures = figures or PendingFigures()
        self.ops = ReferenceOps()
        self._parameters: dict[int, weakref.ref[Any]] = {}
        self.is_partial = False
        """Whether it has low-precision values: of sparse weights or inputs, or after a failure."""
        self.failures: dict[str, str] = {}  # ops that it cannot follow, and why: words after the name of the op

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the reference."""
        return self.twins.wide

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a parameter or buffer of the model."""
        return storage_key(tensor) in self._parameters

    def add_parameter(self, tensor: Tensor) -> None:
        """Note that ``tensor`` is a parameter or buffer of the model, while its storage lives."""
        key, parameters = storage_key(tensor), self._parameters
        parameters[key] = weakref.ref(tensor.untyped_storage(), lambda _: parameters.pop(key, None))

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether the values are those of a parameter or buffer, or an unchanged cast or copy."""
        twin = self.twins.find(tensor)
        if twin is not None:
            return twin.constant
        return self.is_parameter(tensor)

    def gives_constant(self, call: DispatchedCall) -> bool:
        """Whether the op copies or casts constants: the loss counts where the result is used."""
        if call.traits.mutable or not (call.traits.casts or call.traits.packet in COPIES):
            return False
        return bool(call.inputs) and all(map(self.is_constant, call.inputs))

    def arguments(self, call: DispatchedCall, leaf: Leaf | None = None) -> tuple[Args, Kwargs]:
        """The reference's arguments: twins and widened dtypes; ``leaf`` may replace each tensor."""
        wide, reference_of, before = self.twins.wide, self.twins.reference_of, call.before

        def reference(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return widened_dtype(value, wide)
            # What the op writes to as integers is a copy: the model's own follow the run.
            if before and id(value) in before:
                values = before[id(value)]
            else:
                values = reference_of(value)
            return values if leaf is None else leaf(value, values)

        return map_args(call.args, call.kwargs, reference)

    def prepare_writes(self, call: DispatchedCall) -> None:
        """Before the op runs: make a separate twin, or a copy, of each tensor that it writes to."""
        for tensor in call.inputs:
            if is_float(tensor):
                continue
            twin = self.twins.find(tensor)
            if twin is not None and twin.tensor is not None:
                self._cannot_follow(call, "takes floating-point values as integers")
        written = list(call.written()) if call.traits.mutable else []
        if written and self.figures.deferred:
            twins = [twin.tensor for twin in map(self.twins.find, written) if twin is not None]
            self.figures.before_write([*written, *(tensor for tensor in twins if tensor is not None)])
        for tensor in written:
            if not is_float(tensor):
                # Its storage may hold floating values, which are now written as integers.
                call.before[id(tensor)] = tensor.clone()
                self.twins.by_storage.pop(storage_key(tensor), None)
            elif tensor.numel() == 0:
                # An ``out`` that the op resizes.
                call.before[id(tensor)] = tensor.new_empty(0, dtype=widened_dtype(tensor.dtype, self.wide))
            elif not self.ops.keeps_values or self.twins.find(tensor) is None:
                self.twins.prepare_write(tensor)  # else see :meth:`Twins.write`

    def advance(self, call: DispatchedCall, outputs: list[Tensor]) -> list[Tensor] | None:
        """Run the op on the reference's tensors; the results become the twins of ``outputs``.

        Returns the results; ``None`` if it cannot follow the op: it fails on the reference, returns
        another number of tensors, or writes to one place several times, in an order that depends on
        the dtype. The reference then restarts from ``outputs``, and :attr:`failures` has the op.
        """
        call.wide_seconds, why = None, None
        try:
            args, references = self._run(call, functools.partial(self._results, outputs=outputs))
            if len(references) != len(outputs):
                raise RuntimeError(f"it returns {len(references)} tensors, not {len(outputs)}")
        except Exception as error:
            why = f"fails in the fp32 reference ({one_line(error)})"
        if call.traits.mutable and any(may_overlap(t.shape, t.stride()) for t in call.written() if is_float(t)):
            why = "writes several times to the same memory"
        if why is not None:
            self._cannot_follow(call, why)
            for tensor in outputs:
                self.twins.restart(tensor)
            return None
        source = call.inputs[:1]
        from_parameter = bool(call.traits.casts and source) and is_float(source[0]) and self.is_parameter(source[0])
        if from_parameter and not call.traits.mutable and call.kwargs.get("device") is None:
            references[0] = args[0]
        written = call.written_ids() - call.before.keys()
        constant = self.gives_constant(call)
        for out, reference in zip(outputs, references, strict=True):
            if not is_float(out) or out.shape != reference.shape:
                continue
            if id(out) not in written:
                self.twins.set_reference(out, reference, shared=from_parameter).constant = constant
            elif self.ops.keeps_values:
                self.twins.write(out, reference)
        return references

    def _cannot_follow(self, call: DispatchedCall, why: str) -> None:
        self.failures.setdefault(call.traits.name, why)
        self.is_partial = True
        self.ops.cannot_follow(call.traits.name)

    def _run(self, call: DispatchedCall, results: Callable[..., list[Tensor]]) -> tuple[Args, list[Tensor]]:
        return self.ops.run(call, functools.partial(self.arguments, call), results)

    def _results(self, call: DispatchedCall, args: Args, kwargs: Kwargs, outputs: list[Tensor]) -> list[Tensor]:
        """The results of the op on the reference; a selection takes the run's indices."""
        references = self.ops.results(call, args, kwargs)[: len(outputs)]  # it may return more
        references += [self.twins.reference_of(out) for out in outputs[max(1, len(references)) :]]
        if call.traits.selects and len(references) == len(outputs) and outputs[0].shape == references[0].shape:
            source, index = args[0], outputs[1]
            defaults = {argument.name: argument.default_value for argument in call.func._schema.arguments}
            dim = (defaults | named_arguments(call.func, args, kwargs)).get("dim")
            if dim is not None and isinstance(source, Tensor) and source.ndim:
                if index.ndim == source.ndim:
                    references[0] = torch.gather(source, dim, index)
                else:
                    references[0] = torch.gather(source, dim, index.unsqueeze(dim)).squeeze(dim)
        return references

    def follow_random(
        self, call: DispatchedCall, outputs: list[Tensor], state: GeneratorState, own: tuple[Args, Kwargs]
    ) -> list[Tensor | None]:
        """Give the reference the run's random numbers; ``own``: arguments widened before the run.

        Returns what each of ``outputs`` would be without rounding; ``None`` for those not known.
        """
        if call.traits.packet == "aten::native_dropout" and len(outputs) == 2:
            mask, scale = outputs[1], 1.0 / max(1.0 - call.args[1], 1e-12)
            _, references = self._run(call, lambda _call, args, _kwargs: [args[0] * mask * scale])
            self.twins.set_reference(outputs[0], references[0])
            return [own[0][0] * mask * scale, None]
        _, references = self._run(call, lambda call, args, kwargs: rerun(call, state, args, kwargs))
        widened = rerun(call, state, *own)
        written = call.written_ids()
        exact: list[Tensor | None] = [None] * len(outputs)
        for index, (out, reference, own_result) in enumerate(zip(outputs, references, widened, strict=False)):
            if is_float(out) and out.shape == reference.shape:
                values = followed(out, reference.clone(), own_result)
                exact[index] = followed(out, own_result, own_result)
                if id(out) not in written:
                    self.twins.set_reference(out, values)
                elif self.ops.keeps_values:
                    self.twins.write(out, values)
                else:
                    self.twins.reference_of(out).copy_(values)
        return exact


# -- random numbers
#
# The same seed gives different values in different dtypes, so a random op cannot be compared with a
# rerun of itself. To measure what wrong parameters (mean, probability) change, the op is rerun in
# fp32 twice from the same generator state: with the parameters of the reference and of the run.


class GeneratorState:
    """The state of the generator that a call uses, before the call."""

    def __init__(self, call: DispatchedCall) -> None:
        device = next((tensor.device for tensor in call.inputs), call.kwargs.get("device"))
        self.generator: torch.Generator = call.kwargs.get("generator") or default_generator(device)
        self.state = self.generator.get_state()

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same numbers again; afterwards the generator is where it was."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)


def state_before(call: DispatchedCall) -> GeneratorState | None:
    """The state of the generator if ``call`` may draw; only torch's ops declare whether they do."""
    if not call.traits.may_draw or (call.traits.random and not call.draws):
        return None
    return GeneratorState(call)


def has_drawn(call: DispatchedCall, state: GeneratorState | None) -> bool:
    """After the call: whether it used random numbers."""
    if state is None:
        return False
    return call.traits.random or not torch.equal(state.state, state.generator.get_state())


def followed(low: Tensor, reference: Tensor, widened: Tensor) -> Tensor:
    """The reference of one output ``low`` of a random call; indices and booleans are the run's.

    ``reference`` and ``widened`` are the outputs of the op in fp32 from the same generator state:
    on the inputs of the reference, and on the call's own inputs, widened.
    """
    if not is_float(low):
        return low
    wide = low.to(reference.dtype)
    # Within a few roundoffs, fp32 draws the same numbers.
    if torch.allclose(wide, widened, rtol=8 * torch.finfo(low.dtype).eps, atol=0.0, equal_nan=True):
        return reference
    moved = wide + (reference - widened)
    return torch.where(moved.isfinite(), moved, reference)


def rerun(call: DispatchedCall, state: GeneratorState, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The results of ``call`` on other arguments, from the same state of the generator."""
    with state.rewound(), torch._C._DisableAutocast():
        return run_wide(call, args, kwargs)
