"""Figures that an accelerator still computes: they are read in batches, and what depends on them is done then, in order.

Waiting for each figure would leave the accelerator idle while the host prepares the next op, and the host idle while it computes.
Special cases (NaN, Inf) need the compared tensors again, so these are held until their batch is read: at most :data:`HELD` bytes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lowprec_check.engine.core.tensor_comparison import TensorComparison, UnreadComparison, compare_tensor

HELD = 256 << 20
"""Bytes of tensors that unread comparisons hold before the oldest batch is waited for."""

BATCH = 96
"""Actions in a batch: about three for each op."""

BATCH_BYTES = HELD // 4
"""Bytes that the comparisons of a batch hold before it is closed."""

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
    """The figures of one run, in order. Unless ``deferred``, all are computed at once, and all actions done at once."""

    def __init__(self, *, deferred: bool = False, everywhere: bool = False) -> None:
        self.deferred = deferred
        self._everywhere = everywhere
        """Whether figures on a CPU are deferred too: for tests."""
        self._open = _Batch()
        self._closed: deque[_Batch] = deque()

    def compare(self, out: Tensor, references: Sequence[Tensor], *, count_flushed: bool) -> Pending[TensorComparison]:
        """Compare as :func:`compare_tensor` does."""
        if not self._defers(out) or not out.numel():
            return Pending(compare_tensor(out, references, count_flushed=count_flushed))
        comparison = UnreadComparison(out, references, count_flushed=count_flushed)
        pending = Pending[TensorComparison]()
        self._add(comparison.figures, lambda values: pending.set(comparison.read(values)), comparison)
        return pending

    def number(self, figure: Tensor) -> Pending[float]:
        """The value of a tensor of one number."""
        if not self._defers(figure):
            return Pending(float(figure))
        pending = Pending[float]()
        self._add([figure], lambda values: pending.set(values[0]))
        return pending

    def then(self, action: Callable[[], None]) -> None:
        """Do ``action`` when all figures that were asked for before it are known."""
        if not self.deferred:
            action()
            return
        self._add([], lambda _: action())

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Before an op writes to ``tensors``: copy what unread comparisons still need of them."""
        keys = {_storage(tensor) for tensor in tensors}
        for batch in (*self._closed, self._open):
            for held in batch.held:
                if not keys.isdisjoint(held.storages):
                    held.copy(keys)

    def settle(self) -> None:
        """Read all figures, and do all actions. Raises the first exception of an action, after all of them."""
        self._close()
        self._read(lambda: True)

    def _defers(self, tensor: Tensor) -> bool:
        return self.deferred and (self._everywhere or tensor.device.type != "cpu")

    def _add(
        self, figures: list[Tensor], action: Callable[[list[float]], None], compared: UnreadComparison | None = None
    ) -> None:
        if figures and self._open.stream_differs(figures[0]):
            self.settle()
            self._open.stream_differs(figures[0])
        self._open.add(figures, action, compared)
        if len(self._open) >= BATCH or self._open.nbytes >= BATCH_BYTES:
            self._close()
            self._read(lambda: self._closed[0].is_ready() or self._closed_bytes() > HELD - BATCH_BYTES)

    def _closed_bytes(self) -> int:
        return sum(batch.nbytes for batch in self._closed)

    def _read(self, goes_on: Callable[[], bool]) -> None:
        """Read the oldest batches, as long as ``goes_on``."""
        failures: list[Exception] = []
        while self._closed and goes_on():
            failures += self._closed.popleft().finish()
        if failures:
            raise failures[0]

    def _close(self) -> None:
        if len(self._open):
            self._open.close()
            self._closed.append(self._open)
            self._open = _Batch()


Column = tuple[torch.device, torch.dtype]


class _Held:
    """A comparison that still needs its tensors, and their storages."""

    __slots__ = ("comparison", "storages")

    def __init__(self, comparison: UnreadComparison) -> None:
        self.comparison = comparison
        self.storages = [_storage(tensor) for tensor in comparison.tensors]

    def copy(self, storages: set[int]) -> None:
        """Copy the tensors in these storages."""
        tensors = self.comparison.tensors
        self.comparison.tensors = [
            tensor.clone() if key in storages else tensor for key, tensor in zip(self.storages, tensors, strict=True)
        ]
        self.storages = [_storage(tensor) for tensor in self.comparison.tensors]


class _Batch:
    """Figures that are copied to the host together."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Memory that its comparisons hold."""
        self.held: list[_Held] = []
        self._figures: dict[Column, list[Tensor]] = defaultdict(list)
        self._actions: list[tuple[Callable[[list[float]], None], list[tuple[Column, int, int]]]] = []
        """Each with the places of its figures: column, start, end."""
        self._copies: dict[Column, Tensor] = {}
        self._events: list[Any] = []
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._actions)

    def stream_differs(self, figure: Tensor) -> bool:
        """Whether the figure is computed on another stream than those before it."""
        stream = _stream(figure.device)
        if self._stream is None:
            self._stream = stream
        return bool(self._stream != stream)

    def add(
        self, figures: list[Tensor], action: Callable[[list[float]], None], compared: UnreadComparison | None
    ) -> None:
        """Add figures, what is done with their values, and the comparison that they belong to."""
        places = []
        for column, its in itertools.groupby(figures, _column):
            known = self._figures[column]
            start = len(known)
            known.extend(its)
            places.append((column, start, len(known)))
        self._actions.append((action, places))
        if compared is not None:
            self.held.append(_Held(compared))
            self.nbytes += compared.nbytes

    def close(self) -> None:
        """Start to copy the figures to the host."""
        if self._stream is not None and _stream(self._stream[0]) != self._stream:
            torch.get_device_module(self._stream[0]).synchronize(self._stream[0])
        for key, column in self._figures.items():
            stacked = torch.stack(column)
            self._copies[key], event = _to_host(stacked)
            if event is not None:
                self._events.append(event)
        self._figures.clear()

    def is_ready(self) -> bool:
        """Whether the values have arrived."""
        return all(event.query() for event in self._events)

    def finish(self) -> list[Exception]:
        """Wait for the values, and do the actions; the exceptions that these raised."""
        for event in self._events:
            event.synchronize()
        values = {key: copy.tolist() for key, copy in self._copies.items()}
        failures: list[Exception] = []
        for action, places in self._actions:
            try:
                action([float(value) for key, start, end in places for value in values[key][start:end]])
            except Exception as failure:
                failures.append(failure)
        return failures


def _to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """``tensor`` on the host, and the event after which it holds the values; ``None``: it holds them already."""
    if tensor.device.type == "cpu":
        return tensor, None
    with contextlib.suppress(AttributeError, RuntimeError, TypeError, NotImplementedError):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        event = torch.get_device_module(tensor.device).Event()
        copy.copy_(tensor, non_blocking=True)
        event.record(torch.get_device_module(tensor.device).current_stream(tensor.device))
        return copy, event
    return tensor.cpu(), None


def _stream(device: torch.device) -> Any:
    """The stream that kernels are added to; ``None`` where devices have none."""
    if device.type == "cpu":
        return None
    current = getattr(torch.get_device_module(device), "current_stream", None)
    return None if current is None else (device, current(device))


def _column(figure: Tensor) -> Column:
    return figure.device, figure.dtype


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
