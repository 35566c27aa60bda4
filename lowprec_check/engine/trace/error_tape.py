"""Records the ops on the reference's tensors, with the error that each adds, so that errors can be followed to the output."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.devices import MemoryLimit
from lowprec_check.engine.core.floating_dtypes import is_float, is_narrow
from lowprec_check.engine.core.tensor_comparison import CHUNK, is_dense
from lowprec_check.engine.trace.differentiable import GradientBuffers, Part, pulled_back
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import Args, Kwargs
from lowprec_check.engine.trace.pending_figures import Pending, PendingFigures
from lowprec_check.engine.trace.twins import Twin, Twins
from lowprec_check.schema.module_paths import common_module
from lowprec_check.schema.op_calls import PRODUCTS, OpCall

# -- The errors that an op on a CPU adds, for the tape, in chunks that stay in cache: a tensor is read once and
# written in 16 bits

COMPACT = torch.bfloat16
"""The dtype in which the tape stores errors."""

Compact = tuple[Tensor | None, Tensor | None]
"""What an op adds before rounding, and by rounding, in :data:`COMPACT` and without NaN and Inf; ``None`` for zeros."""


def compact_errors(out: Tensor, widened: Tensor, exact: Tensor) -> Compact | None:
    """What the op adds to ``out`` before and by rounding; ``None`` if these tensors are not for this way.

    ``widened`` and ``exact`` are the results on rounded and on exact parameters, without rounding. Rounding is that of the
    former, unless it needs almost no rounding: a bias that is rounded already. Then the latter is as large as the error.
    """
    tensors = (out, widened, exact)
    if not all(tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg() for tensor in tensors):
        return None
    same = all(tensor.stride() == exact.stride() and tensor.shape == exact.shape for tensor in tensors)
    if not same or not is_dense(exact) or not exact.dtype == widened.dtype == torch.float32 or not exact.numel():
        return None
    low, wide, known = (
        tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in tensors
    )
    wide = known if widened is exact else wide
    results = [torch.empty_strided(exact.shape, exact.stride(), dtype=COMPACT) for _ in range(2)]
    into = [result.as_strided((result.numel(),), (1,)) for result in results]
    mine, its, zeros = _fill(low, wide, known, into)
    if mine < its / 4:
        _, _, zeros = _fill(low, known, known, into)
    added, rounding = (None if zero else result for zero, result in zip(zeros, results, strict=True))
    return added, rounding


def _fill(out: Tensor, widened: Tensor, exact: Tensor, results: list[Tensor]) -> tuple[float, float, list[bool]]:
    """Write the two errors, with the rounding of ``widened``. The squared norms of its rounding and of that of ``exact``, and
    whether each result is zero.
    """
    mine = its = 0.0
    zeros = [True, True]
    for start in range(0, len(out), CHUNK):
        low, wide, known = (tensor[start : start + CHUNK] for tensor in (out, widened, exact))
        error, rounding, narrow = (buffer[: len(low)] for buffer in _buffers(out.dtype))
        if widened is not exact:
            torch.sub(rounding.copy_(narrow.copy_(known)), known, out=rounding)
            its += rounding.dot(rounding).item()
        torch.sub(rounding.copy_(narrow.copy_(wide)), wide, out=rounding)
        square = rounding.dot(rounding).item()
        mine += square
        error.copy_(low).sub_(known).sub_(rounding)
        for index, values in enumerate((error, rounding)):
            smallest, largest = (number.item() for number in values.aminmax())
            if not math.isfinite(largest - smallest):
                smallest, largest = (number.item() for number in values.nan_to_num_(0.0, 0.0, 0.0).aminmax())
            results[index][start : start + CHUNK].copy_(values)
            zeros[index] = zeros[index] and smallest == largest == 0
    return mine, its if widened is not exact else mine, zeros


@functools.cache
def _buffers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for one chunk: two times in fp32, and in ``dtype``."""
    return torch.empty(CHUNK), torch.empty(CHUNK), torch.empty(CHUNK, dtype=dtype)


# -- Records the ops on the reference's tensors, with the error that each adds, so that errors can be followed to
# the output
#
# The tape works below autograd, on storages: it does not matter whether the model disables gradients, writes in place or returns
# views. Each op gets a graph of its own, from detached inputs to its outputs; :meth:`ErrorTape.backward` connects them through
# one gradient per live storage, as :mod:`twins` connects reference values.

Errors = tuple[Tensor | None, ...]
"""What an op adds to the error of one of its results, its own inputs being given: each part, or for each format; ``None``: nothing.

All ops of a tape have the same errors in the same order; empty: none at all.
"""

_NOT_ENOUGH_MEMORY = "the activations of the model and their errors need more than {:.1f} GiB, {}"


class _Input(NamedTuple):
    """A floating tensor that an op read."""

    part: Part
    leaf: Tensor
    """Its reference values, where the graph of the op starts."""
    narrow: bool
    """Whether its dtype in the run is narrower than fp32."""


class _Output(NamedTuple):
    """A floating tensor that an op wrote."""

    part: Part
    values: Tensor | None
    """The reference values with the graph of the op; ``None`` if no derivative leads there."""
    errors: list[Tensor | None]
    """In the order of :data:`Errors`; those that turn out to be zero become ``None``."""


class _Node:
    """One op call."""

    __slots__ = ("inputs", "narrowed_in", "outputs", "readers", "row")

    def __init__(self, row: OpCall, inputs: list[_Input], outputs: list[_Output]) -> None:
        self.row, self.inputs, self.outputs = row, inputs, outputs
        self.narrowed_in = row.module
        """The innermost module that holds the casts and products that made its inputs narrow; else its own."""
        self.readers: set[tuple[str, str]] = set()
        """Module and op of the calls that read its results; those that the model returns: ``("", "")``."""


class OutputChange(NamedTuple):
    """What an op changes in each direction of the output, to first order; tensors of shape (directions,)."""

    row: OpCall
    readers: frozenset[tuple[str, str]]
    """Module and op of the calls that read its results; those that the model returns: ``("", "")``."""
    narrowed_in: str
    """The innermost module that holds the casts and products that made its inputs narrow; else its own."""
    by: tuple[Tensor | None, ...]
    """By each of its errors, in the order in which they were recorded."""


class ErrorTape:
    """The ops of one run on its reference; ``limit`` is the memory that the tape may hold."""

    def __init__(self, twins: Twins, limit: MemoryLimit, figures: PendingFigures) -> None:
        self._twins, self._limit, self._figures = twins, limit, figures
        self._nodes: list[_Node] = []
        self._bytes = 0
        self._serials = itertools.count()
        self._writers: dict[int, _Node] = {}
        """The last node that wrote to each storage."""
        self._dispatch_keys = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        self.stopped: str | None = None
        """Why the tape stopped early, in words."""
        self.blocked: dict[str, None] = {}
        """Ops with inputs that have errors, through which no derivative leads."""
        self._call: _TapedCall | None = None

    # -- recording

    def run(
        self,
        call: DispatchedCall,
        arguments: Callable[[Leaf], tuple[Args, Kwargs]],
        results: Callable[..., list[Tensor]],
    ) -> tuple[Args, list[Tensor]]:
        """The ``arguments`` of ``call`` and its ``results`` on them, without graph; :meth:`add` records them with it.

        An op that fails because it has no derivative runs without a graph.
        """
        self._call = _TapedCall(call, self._twins)
        try:
            with self._gradients():
                args, kwargs = arguments(self._call.leaf)
                self._call.results = results(call, args, kwargs)
        except Exception:
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = arguments(_TapedCall(call, self._twins).leaf)
                self._call.results = results(call, args, kwargs)
        return args, [result.detach() for result in self._call.results]

    def add(self, call: DispatchedCall, row: OpCall, outputs: Sequence[Tensor], errors: Sequence[Errors]) -> None:
        """Record the results of the last :meth:`run`: each of ``outputs`` has its ``errors``."""
        taped, self._call = self._call, None
        if self.stopped is not None:
            return
        values = taped.results if taped is not None and taped.call is call else []
        found = []
        for index, out in enumerate(outputs):
            twin = self._twins.find(out) if is_float(out) else None
            if twin is None or twin.constant:
                continue
            graph = values[index] if index < len(values) and values[index].shape == out.shape else None
            if graph is not None and not graph.requires_grad:
                graph = None
            its = errors[index] if index < len(errors) else ()
            found.append(_Output(self._part(twin, out), graph, self._compact(its)))
        inputs = taped.inputs if taped is not None else []
        reads_values = not call.traits.packet.endswith("_like")
        if inputs and reads_values and any(map(is_float, outputs)) and all(out.values is None for out in found):
            self.blocked[call.traits.name] = None
        self._append(_Node(row, inputs, found))

    def add_source(self, row: OpCall, low: Tensor, errors: Errors) -> None:
        """Record errors that no op adds: those of a rounded input."""
        twin = self._twins.find(low) if low.layout == torch.strided else None
        if twin is not None and self.stopped is None:
            self._append(_Node(row, [], [_Output(self._part(twin, low), None, self._compact(errors))]))

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Record graphs, in spite of the handler of a dispatch mode, ``no_grad`` and ``inference_mode``."""
        with (
            torch._C._ForceDispatchKeyGuard(*self._dispatch_keys),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def _part(self, twin: Twin, tensor: Tensor) -> Part:
        if twin.serial is None:
            twin.serial = next(self._serials)
        return Part.of(twin.serial, tensor)

    def _append(self, node: _Node) -> None:
        self._nodes.append(node)
        node.narrowed_in = self._narrowed_in(node)
        for given in node.inputs:
            self._read(given.part.storage, node.row)
        for out in node.outputs:
            self._writers[out.part.storage] = node
            self._bytes += sum(its.nbytes for its in (out.values, *out.errors) if its is not None)
            self._drop_zeros(out.errors)
        if self._bytes > self._limit.size:
            self.stopped = _NOT_ENOUGH_MEMORY.format(self._limit.size / 2**30, self._limit.why)
            self._nodes.clear()
            self._writers.clear()

    def _compact(self, errors: Errors) -> list[Tensor | None]:
        return [_compact(error, waits=not self._figures.deferred) for error in errors]

    def _drop_zeros(self, errors: list[Tensor | None]) -> None:
        """Leave out the errors that are zero everywhere, once that is known."""
        if not self._figures.deferred:
            return

        def drop(index: int, error: Tensor, some: Pending[float]) -> None:
            if not some.value:
                self._bytes -= error.nbytes
                errors[index] = None

        for index, error in enumerate(errors):
            if error is not None:
                self._figures.then(functools.partial(drop, index, error, self._figures.number(error.any())))

    def _narrowed_in(self, node: _Node) -> str:
        writers = [self._writers.get(given.part.storage) for given in node.inputs if given.narrow]
        sources = [writer.narrowed_in for writer in writers if writer is not None]
        itself = not sources or PRODUCTS.search(node.row.op) or "_to_copy" in node.row.op
        return node.row.module if itself else common_module(sources)

    def _read(self, storage: int, row: OpCall | None) -> None:
        writer = self._writers.get(storage)
        if writer is not None:
            writer.readers.add((row.module, row.op) if row is not None else ("", ""))

    # -- following errors to the output

    def backward(self, seeds: Sequence[tuple[Tensor, Tensor]]) -> list[OutputChange]:
        """For each op that adds an error, what this changes in each direction of the output.

        ``seeds`` pairs tensors of the output (of the run) with directions, of shape (directions, *shape of the tensor): a
        change is the scalar product of the first-order change of the output with the direction. The tape is empty afterwards.
        """
        self._figures.settle()
        buffers = GradientBuffers(len(seeds[0][1]) if seeds else 0)
        found: list[OutputChange] = []
        for tensor, directions in seeds:
            twin = self._twins.find(tensor)
            if twin is not None:
                part = self._part(twin, tensor)
                buffers.add(part, directions)
                self._read(part.storage, None)
        with self._gradients():
            while self._nodes:
                node = self._nodes.pop()
                gradients = [buffers.take(out.part) for out in node.outputs]
                pairs = list(zip(gradients, node.outputs, strict=True))
                by = _changes(pairs)
                if any(change is not None for change in by):
                    found.append(OutputChange(node.row, frozenset(node.readers), node.narrowed_in, by))
                self._pass_on(node, gradients, buffers)
        return found[::-1]

    def _pass_on(self, node: _Node, gradients: list[Tensor | None], buffers: GradientBuffers) -> None:
        """Add the gradients of the inputs of ``node``, given those of its outputs."""
        reached = [
            (out.values, gradient)
            for out, gradient in zip(node.outputs, gradients, strict=True)
            if out.values is not None and gradient is not None
        ]
        if not reached or not node.inputs:
            return
        leaves = [given.leaf for given in node.inputs]
        values = [value for value, _ in reached]
        for direction in range(buffers.directions):
            try:
                back = pulled_back(
                    values,
                    leaves,
                    [gradient[direction] for _, gradient in reached],
                    retain_graph=direction + 1 < buffers.directions,
                )
            except RuntimeError:  # it has no derivative
                self.blocked[node.row.op] = None
                return
            for given, gradient in zip(node.inputs, back, strict=True):
                if gradient is not None:
                    buffers.add(given.part, gradient, direction)


class _TapedCall:
    """The inputs of one call, as leaves of its graph."""

    def __init__(self, call: DispatchedCall, twins: Twins) -> None:
        self.call, self._twins = call, twins
        self.inputs: list[_Input] = []
        self.results: list[Tensor] = []
        self._written = {id(tensor) for tensor in call.written()} if call.traits.mutable else set()

    def leaf(self, low: Tensor, reference: Tensor) -> Tensor:
        """The argument in place of ``reference``, the reference values of ``low``; what the op writes to is a copy."""
        if reference.is_inference():
            reference = reference.clone()
        twin = self._twins.find(low) if is_float(low) and low.layout == torch.strided else None
        if twin is not None and not twin.constant and twin.serial is not None:
            reference = reference.detach().requires_grad_()
            self.inputs.append(_Input(Part.of(twin.serial, low), reference, is_narrow(low)))
        return reference.clone() if id(low) in self._written else reference


Leaf = Callable[[Tensor, Tensor], Tensor]
"""Maps a tensor of the run and its reference values to the argument that the op gets."""


def _compact(error: Tensor | None, *, waits: bool) -> Tensor | None:
    """An error in fewer bits (if it is not so already), without NaN and Inf; ``None`` if it is zero, unless this would wait for an accelerator."""
    if error is None or not error.numel():
        return None
    if error.dtype == COMPACT:
        return error
    values = torch.view_as_real(error.resolve_conj()) if error.is_complex() else error
    values = values.detach().nan_to_num(0.0, 0.0, 0.0)
    return values.to(COMPACT) if not waits or bool(values.any()) else None


def _products(gradient: Tensor | None, error: Tensor | None) -> Tensor | None:
    """The scalar products of an error with the gradients, one per direction."""
    if gradient is None or error is None:
        return None
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    flat = error.reshape(-1).to(gradient.dtype)
    return gradient.reshape(len(gradient), -1) @ flat


def _changes(pairs: Sequence[tuple[Tensor | None, _Output]]) -> tuple[Tensor | None, ...]:
    """What each error of the outputs changes, given the gradients of the outputs."""
    count = max((len(out.errors) for _, out in pairs), default=0)
    found: list[Tensor | None] = []
    for index in range(count):
        products = [_products(gradient, out.errors[index]) for gradient, out in pairs if out.errors]
        known = [product for product in products if product is not None]
        found.append(torch.stack(known).sum(0) if known else None)
    return tuple(found)
