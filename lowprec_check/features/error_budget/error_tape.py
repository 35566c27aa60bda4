"""Records the ops on the reference with the error that each adds, and follows it to the output.

The tape works below autograd, on storages, whether the model disables gradients, writes in place or
returns views. Each op has a graph of its own, from detached inputs to outputs. One gradient per
live storage connects them in :meth:`ErrorTape.backward`, as :mod:`twins` connects values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.lockstep import Leaf, Lockstep, ReferenceOps
from lowprec_check.core.trace.ops import Args, Kwargs
from lowprec_check.core.trace.twins import Twin, Twins
from lowprec_check.features.error_budget.differentiable import run_differentiable
from lowprec_check.features.error_budget.gradient_buffers import GradientBuffers, Part, pulled_back
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.devices import MemoryLimit
from lowprec_check.torchkit.floating_dtypes import is_float, is_narrow, rounding_of
from lowprec_check.torchkit.tensor_comparison import CHUNK, Norm

COMPACT = torch.bfloat16  # the dtype in which the tape stores errors

AddedErrors = tuple[Tensor | None, ...]
"""What an op adds to the error of a result, given its inputs: by part, or by format; ``None``:
nothing. All ops of a tape have the same errors in the same order; empty: none at all.
"""

_NOT_ENOUGH_MEMORY = "the activations of the model and their errors need more than {:.1f} GiB, {}"


class Read(NamedTuple):
    """A narrow tensor that an op reads, or the model returns."""

    writer: int  # the op that wrote it, by its position on the tape
    energy: Tensor | None
    """What rounding the reference's values here to the tensor's dtype changes in each direction, if
    each value rounds independently: the root of the expected square. ``None``: nothing.
    """
    widens: bool  # whether the op gives wide results if this tensor is wide


class TapedOp(NamedTuple):
    """An op and, to first order, what it changes; tensors of shape (directions,)."""

    row: OpCall
    reads: tuple[Read, ...]
    returned: tuple[Read, ...]  # where the model returns its results
    narrow: bool  # whether its results are narrower than fp32
    by: tuple[Tensor | None, ...]  # by each of its errors, in the order in which they were recorded
    energies: tuple[Tensor, Tensor] | None
    """As :attr:`Read.energy`, of rounding its results in the run, and the reference's; ``None``: no
    rounding. The first is smaller if the op hardly changes values that are rounded already.
    """


class ErrorTape(ReferenceOps):
    """The ops of one run on its reference; ``limit`` is the memory that the tape may hold."""

    def __init__(self, lockstep: Lockstep, limit: MemoryLimit) -> None:
        self._twins, self._figures, self._limit = lockstep.twins, lockstep.figures, limit
        lockstep.ops = self
        self._nodes: list[_Node] = []
        self._bytes = 0
        self._serials = itertools.count()
        # By storage, the position of the last node that wrote to it.
        self._writers: dict[int, int] = {}
        self._dispatch_keys = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        self.stopped: str | None = None  # why the tape stopped early, in words
        self.blocked: dict[str, None] = {}  # ops with inputs that have errors, through which no derivative leads
        self._call: _TapedCall | None = None

    # -- recording

    @property
    def keeps_values(self) -> bool:
        """Graphs need the values that they were made with."""
        return self.stopped is None

    def run(
        self,
        call: DispatchedCall,
        arguments: Callable[[Leaf | None], tuple[Args, Kwargs]],
        results: Callable[..., list[Tensor]],
    ) -> tuple[Args, list[Tensor]]:
        """The ``arguments`` and ``results`` of ``call``, without graph, for :meth:`add`."""
        if self.stopped is not None:
            return super().run(call, arguments, results)
        self._call = _TapedCall(call, self._twins)
        try:
            with self._gradients(), self.saving():
                args, kwargs = arguments(self._call.leaf)
                self._call.results = results(call, args, kwargs)
        except Exception:
            # It may have failed because it has no derivative.
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = arguments(_TapedCall(call, self._twins).leaf)
                self._call.results = results(call, args, kwargs)
        return args, [result.detach() for result in self._call.results]

    def results(self, call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Results with a graph; some ops return more then: what only their derivative needs."""
        if self.stopped is not None:
            return super().results(call, args, kwargs)
        return run_differentiable(call, args, kwargs)

    def cannot_follow(self, op: str) -> None:
        """No derivative leads through it."""
        self.blocked[op] = None

    def add(self, call: DispatchedCall, row: OpCall, outputs: Sequence[Tensor], errors: Sequence[AddedErrors]) -> None:
        """Record the results of the last :meth:`run`: each of ``outputs`` has its ``errors``."""
        taped, self._call = self._call, None
        if self.stopped is not None:
            return
        values = taped.results if taped is not None and taped.call is call else []
        written = []
        for index, out in enumerate(outputs):
            if not is_float(out):
                continue
            twin = self._twins.find(out)
            if twin is None or twin.constant:
                continue
            graph = None
            if index < len(values) and values[index].shape == out.shape and values[index].requires_grad:
                graph = values[index]
            compact = self._compact(*errors[index : index + 1])
            written.append(_Output(self._part(twin, out), graph, compact, _narrow_dtype(out)))
        inputs = taped.inputs if taped is not None else []
        # Errors that reach this op end here if no graph leads to any of its results.
        reads_values = not call.traits.packet.endswith("_like")
        if inputs and reads_values and any(map(is_float, outputs)) and all(out.values is None for out in written):
            self.blocked[call.traits.name] = None
        self._append(_Node(row, inputs, written))

    def add_source(self, row: OpCall, low: Tensor, errors: AddedErrors) -> None:
        """Record errors that no op adds: those of a rounded input."""
        twin = self._twins.find_strided(low)
        if twin is not None and self.stopped is None:
            out = _Output(self._part(twin, low), None, self._compact(errors), _narrow_dtype(low))
            self._append(_Node(row, [], [out]))

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Record graphs despite a mode's handler, ``no_grad`` and ``inference_mode``."""
        with torch._C._ForceDispatchKeyGuard(*self._dispatch_keys), torch.inference_mode(False), torch.enable_grad():
            yield

    def _part(self, twin: Twin, tensor: Tensor) -> Part:
        if twin.serial is None:
            twin.serial = next(self._serials)
        return Part.of(twin.serial, tensor)

    def _append(self, node: _Node) -> None:
        node.writers = [self._writers.get(read.part.storage) for read in node.inputs]
        for out in node.outputs:
            self._writers[out.part.storage] = len(self._nodes)
            self._bytes += sum(tensor.nbytes for tensor in (out.values, *out.errors) if tensor is not None)
            nonzero = [index for index, error in enumerate(out.errors) if error is not None]
            if nonzero and self._figures.deferred:
                norms = [Norm(error, math.inf) for error in out.errors if error is not None]
                self._figures.read(norms, functools.partial(self._drop_zeros, out.errors, nonzero))
        self._nodes.append(node)
        # A full tape gives no budget: free its memory for the run.
        if self._bytes > self._limit.size:
            self.stopped = _NOT_ENOUGH_MEMORY.format(self._limit.size / 2**30, self._limit.why)
            self._nodes.clear()
            self._writers.clear()

    def _drop_zeros(self, errors: list[Tensor | None], indices: Sequence[int], norms: Sequence[float]) -> None:
        """Drop the errors that are zero everywhere, once that is known."""
        for index, norm in zip(indices, norms, strict=True):
            error = errors[index]
            if error is not None and not norm:
                self._bytes -= error.nbytes
                errors[index] = None

    def _compact(self, errors: AddedErrors = ()) -> list[Tensor | None]:
        """Errors in fewer bits, without NaN and Inf; ``None`` for zeros seen without a wait."""
        compact: list[Tensor | None] = []
        for error in errors:
            values = error
            if values is not None and not values.numel():
                values = None
            elif values is not None and values.dtype != COMPACT:
                if values.is_complex():
                    values = torch.view_as_real(values.resolve_conj())
                values = values.detach().to(COMPACT).nan_to_num_(0.0, 0.0, 0.0)
                if not self._figures.deferred and not bool(values.any()):
                    values = None
            compact.append(values)
        return compact

    # -- following errors to the output

    def backward(self, seeds: Sequence[tuple[Tensor, Tensor]]) -> list[TapedOp]:
        """The ops in order, with what their errors change in each direction; empties the tape.

        ``seeds`` pairs output tensors with directions, of shape (directions, *shape of the tensor):
        a change is the scalar product of the output's first-order change with the direction.
        """
        self._figures.settle()
        buffers = GradientBuffers(max((len(directions) for _, directions in seeds), default=0))
        returned: dict[int, list[Read]] = {}
        for tensor, directions in seeds:
            twin = self._twins.find(tensor)
            if twin is not None:
                part = self._part(twin, tensor)
                buffers.add(part, directions.clone())
                writer = self._writers.get(part.storage)
                if is_narrow(tensor) and writer is not None:
                    energy = _energy(directions, self._twins.reference_of(tensor), tensor.dtype, part)
                    returned.setdefault(writer, []).append(Read(writer, energy, widens=False))
        ops: list[TapedOp] = []
        with self._gradients(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of missing derivatives
            while self._nodes:
                node = self._nodes.pop()
                gradients = [buffers.take(out.part) for out in node.outputs]
                by = _changes(list(zip(gradients, node.outputs, strict=True)))
                reads = self._pass_on(node, gradients, buffers)
                narrow = any(out.narrow is not None for out in node.outputs)
                energies = _energies(gradients, node.outputs)
                ops.append(TapedOp(node.row, reads, tuple(returned.get(len(self._nodes), ())), narrow, by, energies))
        return ops[::-1]

    def _pass_on(self, node: _Node, gradients: list[Tensor | None], buffers: GradientBuffers) -> tuple[Read, ...]:
        """Add the gradients of a node's inputs, given those of its outputs; return its reads."""
        energies: list[Tensor | None] = [None] * len(node.inputs)
        pairs = zip(node.outputs, gradients, strict=True)
        reached = [(out.values, gradient) for out, gradient in pairs if out.values is not None and gradient is not None]
        leaves = [read.leaf for read in node.inputs]
        try:
            back = pulled_back([value for value, _ in reached], leaves, [gradient for _, gradient in reached])
        except RuntimeError:
            self.blocked[node.row.op] = None  # it has no derivative
            back = []
        for index, (read, gradient) in enumerate(zip(node.inputs, back, strict=False)):
            if gradient is not None:
                if read.narrow is not None:
                    energies[index] = _energy(gradient, read.leaf, read.narrow, read.part)
                buffers.add(read.part, gradient)
        # An op in place keeps the dtype of what it writes to; scalars do not widen a result.
        in_place = any(read.written for read in node.inputs)
        largest = max((read.leaf.ndim for read in node.inputs), default=0)
        return tuple(
            Read(writer, energy, widens=read.written if in_place else bool(read.leaf.ndim) or not largest)
            for read, writer, energy in zip(node.inputs, node.writers, energies, strict=True)
            if read.narrow is not None and writer is not None
        )


def _energies(gradients: Sequence[Tensor | None], outputs: Sequence[_Output]) -> tuple[Tensor, Tensor] | None:
    # :attr:`TapedOp.energies`.
    for gradient, out in zip(gradients, outputs, strict=True):
        # The second error is the rounding, see :func:`op_errors.added_errors`.
        rounding = out.errors[1] if len(out.errors) > 1 else None
        if gradient is not None and rounding is not None and out.narrow is not None and out.values is not None:
            return _size(gradient, rounding), _energy(gradient, out.values, out.narrow, out.part)
    return None


def _energy(gradients: Tensor, reference: Tensor, low: torch.dtype, part: Part) -> Tensor:
    """:attr:`Read.energy`, given gradients of shape (directions, *shape of the reference)."""
    with torch.no_grad():
        rounding = rounding_of(reference, low).nan_to_num_(0.0, 0.0, 0.0)
        for dim, step in enumerate(part.stride):  # what is shown several times is rounded once
            if not step and reference.shape[dim] > 1:
                gradients, rounding = gradients.sum(dim + 1, keepdim=True), rounding.narrow(dim, 0, 1)
        return _size(gradients, rounding)


def _size(gradients: Tensor, errors: Tensor) -> Tensor:
    """By direction, the 2-norm of the products of ``errors`` with their gradients."""
    if gradients.is_complex() and not errors.is_complex():
        gradients = torch.view_as_real(gradients.resolve_conj())
    if gradients.device.type != "cpu" or errors.numel() <= CHUNK:
        return _norms((gradients * errors).reshape(len(gradients), -1), 1)
    # In chunks, so that the product stays in the caches.
    flat, values = gradients.reshape(len(gradients), -1), errors.reshape(-1)
    starts = range(0, len(values), CHUNK)
    return _norms(torch.stack([_norms(flat[:, at : at + CHUNK] * values[at : at + CHUNK], 1) for at in starts]), 0)


def _norms(tensor: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim)
    return norms


def squares(sizes: Tensor) -> Tensor:
    """The squares of roots such as :attr:`Read.energy`, in fp64; NaN and Inf count as 0."""
    return sizes.double().square().nan_to_num(0.0, 0.0, 0.0)


def _changes(pairs: Sequence[tuple[Tensor | None, _Output]]) -> tuple[Tensor | None, ...]:
    """What each error changes, by direction: its scalar products with the gradients, summed."""
    changes: list[Tensor | None] = []
    for index in range(max((len(out.errors) for _, out in pairs), default=0)):
        products = []
        for gradient, out in pairs:
            if not out.errors:
                continue
            error = out.errors[index]
            if gradient is not None and error is not None:
                real = gradient
                if gradient.is_complex():
                    real = torch.view_as_real(gradient.resolve_conj())
                products.append(real.reshape(len(real), -1) @ error.reshape(-1).to(real.dtype))
        changes.append(functools.reduce(torch.add, products) if products else None)
    return tuple(changes)


class _TapedCall:
    """The inputs of one call, as leaves of its graph."""

    def __init__(self, call: DispatchedCall, twins: Twins) -> None:
        self.call, self._twins = call, twins
        self.inputs: list[_Input] = []
        self.results: list[Tensor] = []
        self._written = call.written_ids()

    def leaf(self, low: Tensor, reference: Tensor) -> Tensor:
        """The op's argument: the reference values of ``low``; a copy if the op writes to it."""
        if reference.is_inference():
            reference = reference.clone()
        twin = self._twins.find_strided(low) if is_float(low) else None
        # Only what an op on the tape has written can have errors.
        if twin is not None and not twin.constant and twin.serial is not None:
            reference = reference.detach().requires_grad_()
            part = Part.of(twin.serial, low)
            self.inputs.append(_Input(part, reference, _narrow_dtype(low), id(low) in self._written))
        if id(low) in self._written:
            return reference.clone()
        return reference


def _narrow_dtype(low: Tensor) -> torch.dtype | None:
    return low.dtype if is_narrow(low) else None


class _Input(NamedTuple):
    """A floating tensor that an op read."""

    part: Part
    leaf: Tensor  # its reference values, where the graph of the op starts
    narrow: torch.dtype | None  # its dtype in the run, if that is narrower than fp32
    written: bool  # whether the op writes to it too


class _Output(NamedTuple):
    """A floating tensor that an op wrote."""

    part: Part
    values: Tensor | None  # the reference values with the graph of the op; ``None`` if no derivative leads there
    errors: list[Tensor | None]
    """In the order of :data:`AddedErrors`; those that turn out to be zero become ``None``."""
    narrow: torch.dtype | None  # its dtype in the run, if that is narrower than fp32


class _Node:
    """One op call."""

    __slots__ = ("inputs", "outputs", "row", "writers")

    def __init__(self, row: OpCall, inputs: list[_Input], outputs: list[_Output]) -> None:
        self.row, self.inputs, self.outputs = row, inputs, outputs
        # Of each input, the position of the node that wrote it.
        self.writers: list[int | None] = []
