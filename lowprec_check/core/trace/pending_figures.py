"""Figures that an accelerator still computes: they are read in batches, and used then, in order.

Waiting for each figure would leave the accelerator idle while the host prepares the next op, and
the host idle while it computes. Special cases (NaN, Inf) need the compared tensors again, so these
are held until their batch is read: at most :data:`HELD` bytes, or a part of the free memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lowprec_check.torchkit.tensor_comparison import Figure, Norm, TensorComparison, UnreadComparison, compare_tensor

HELD, PART_HELD = 256 << 20, 1 / 16
"""Bytes of tensors that unread comparisons hold before the oldest batch is waited for; or this part
of the free memory, if that is more.
"""

BATCH = 96  # actions in a batch: about three for each op

BATCH_PART = 1 / 4  # the part of these bytes that the comparisons of a batch hold before it is closed

T = TypeVar("T")


class Pending(Generic[T]):
    """A value that is known when the actions that were added after it are done."""

    __slots__ = ("_value",)

    def __init__(self, value: T | None = None) -> None:
        self._value = value

    @property
    def value(self) -> T:
        """The value; raises ``RuntimeError`` if it is not known yet."""
        if self._value is None:
            raise RuntimeError("this figure was not read from the device yet")
        return self._value

    def set(self, value: T) -> None:
        """Make the value known."""
        self._value = value


class PendingFigures:
    """The figures of one run, in order; unless ``deferred``, all computed and used at once."""

    def __init__(self, *, deferred: bool = False, everywhere: bool = False, free_memory: int = 0) -> None:
        self.deferred = deferred
        self._held = max(HELD, int(free_memory * PART_HELD))
        # Whether figures on a CPU are deferred too: for tests.
        self._everywhere = everywhere
        self._open = _Batch()
        self._closed: deque[_Batch] = deque()

    def compare(self, out: Tensor, references: Sequence[Tensor], *, count_flushed: bool) -> Pending[TensorComparison]:
        """Compare as :func:`compare_tensor` does."""
        if not self._defers(out) or not out.numel():
            return Pending(compare_tensor(out, references, count_flushed=count_flushed))
        comparison = UnreadComparison(out, references, count_flushed=count_flushed)
        pending = Pending[TensorComparison]()
        self.read(comparison.figures, lambda values: pending.set(comparison.read(values)), comparison)
        return pending

    def number(self, figure: Tensor) -> Pending[float]:
        """The value of a tensor of one number."""
        if not self._defers(figure):
            return Pending(float(figure))
        pending = Pending[float]()
        self.read([figure], lambda values: pending.set(values[0]))
        return pending

    def then(self, action: Callable[[], None]) -> None:
        """Do ``action`` when all figures that were asked for before it are known."""
        if not self.deferred:
            action()
            return
        self.read([], lambda _: action())

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Before an op writes to ``tensors``: copy what unread comparisons still need of them."""
        written = {_storage(tensor) for tensor in tensors}
        for batch in (*self._closed, self._open):
            for held in batch.held:
                if not written.isdisjoint(held.storages):
                    held.copy(written)

    def _defers(self, tensor: Tensor) -> bool:
        return self.deferred and (self._everywhere or tensor.device.type != "cpu")

    def read(
        self, figures: Sequence[Figure], action: Callable[[list[float]], None], compared: UnreadComparison | None = None
    ) -> None:
        """Do ``action`` with the values of figures, those of a comparison, when they are known."""
        if figures and self._open.stream_differs(figures[0].device):
            self.settle()
            self._open.stream_differs(figures[0].device)
        self._open.add(figures, action, compared)
        if len(self._open) >= BATCH or self._open.nbytes >= self._held * BATCH_PART:
            self.settle(wait=False)

    def settle(self, *, wait: bool = True) -> None:
        """Read all figures, and do all actions; then raise the first exception of an action.

        Unless ``wait``, only the batches that are ready or too large to hold.
        """
        if len(self._open):
            self._open.close()
            self._closed.append(self._open)
            self._open = _Batch()
        failures: list[Exception] = []
        most_bytes = self._held * (1 - BATCH_PART)
        while self._closed:
            if not (wait or self._closed[0].is_ready() or sum(batch.nbytes for batch in self._closed) > most_bytes):
                break
            failures += self._closed.popleft().finish()
        if failures:
            raise failures[0]


class _Held:
    """A comparison that still needs its tensors, and their storages."""

    __slots__ = ("comparison", "storages")

    def __init__(self, comparison: UnreadComparison) -> None:
        self.comparison = comparison
        self.storages = [_storage(norm.tensor) for norm in comparison.norms]

    def copy(self, storages: set[int]) -> None:
        for index, norm in enumerate(self.comparison.norms):
            if self.storages[index] in storages:
                norm.tensor = norm.tensor.clone()
                self.storages[index] = _storage(norm.tensor)


Column = tuple[torch.device, torch.dtype, float | None]  # where figures are, and the order of those that are norms


class _Batch:
    """Figures copied to the host together; norms of a column are computed by one op at the end."""

    def __init__(self) -> None:
        self.nbytes = 0  # memory that its comparisons hold
        self.held: list[_Held] = []
        self._figures: dict[Column, list[Figure]] = defaultdict(list)
        # Each with where its figures are: column, start, end.
        self._actions: list[tuple[Callable[[list[float]], None], list[tuple[Column, int, int]]]] = []
        self._copies: dict[Column, Tensor] = {}
        self._events: list[Any] = []
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._actions)

    def stream_differs(self, device: torch.device) -> bool:
        """Whether a figure there is computed on another stream than those before it."""
        stream = _stream(device)
        if self._stream is None:
            self._stream = stream
        return bool(self._stream != stream)

    def add(
        self, figures: Sequence[Figure], action: Callable[[list[float]], None], compared: UnreadComparison | None
    ) -> None:
        """Add figures, what is done with their values, and the comparison that they belong to."""
        slots = []
        for column, group in itertools.groupby(figures, lambda f: (f.device, f.dtype, getattr(f, "order", None))):
            in_column = self._figures[column]
            start = len(in_column)
            in_column.extend(group)
            slots.append((column, start, len(in_column)))
        self._actions.append((action, slots))
        if compared is not None:
            self.held.append(_Held(compared))
            self.nbytes += compared.nbytes

    def close(self) -> None:
        """Start to copy the figures to the host."""
        # The copy runs on the current stream, the figures may be computed on another.
        if self._stream is not None and _stream(self._stream[0]) != self._stream:
            torch.get_device_module(self._stream[0]).synchronize(self._stream[0])
        for column, figures in self._figures.items():
            order = column[2]
            tensors = [figure.tensor if isinstance(figure, Norm) else figure for figure in figures]
            if order is not None:
                tensors = list(torch._foreach_norm(tensors, order))
            self._copies[column] = self._to_host(torch.stack(tensors))
        self._figures.clear()

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, NotImplementedError):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            module = torch.get_device_module(tensor.device)
            event = module.Event()
            copy.copy_(tensor, non_blocking=True)
            event.record(module.current_stream(tensor.device))
            self._events.append(event)
            return copy
        return tensor.cpu()

    def is_ready(self) -> bool:
        """Whether the values have arrived."""
        return all(event.query() for event in self._events)

    def finish(self) -> list[Exception]:
        """Wait for the values, and do the actions; the exceptions that these raised."""
        for event in self._events:
            event.synchronize()
        values = {key: copy.tolist() for key, copy in self._copies.items()}
        failures: list[Exception] = []
        for action, slots in self._actions:
            try:
                action([float(value) for key, start, end in slots for value in values[key][start:end]])
            except Exception as failure:
                failures.append(failure)
        return failures


def _stream(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    current = getattr(torch.get_device_module(device), "current_stream", None)
    if current is None:
        return None
    return (device, current(device))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
