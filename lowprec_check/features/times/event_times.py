"""Times calls on an accelerator by its own events, and how much of a call its host takes.

Waiting for each call would add the time until the first op reaches the device. Events are recorded
between calls, and read when a few have been launched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.process import system
from lowprec_check.schema.axes import Call
from lowprec_check.torchkit.devices import module_of, seed_everything, synchronize
from lowprec_check.torchkit.pytree import map_tensors
from lowprec_check.torchkit.source_location import call_model

WARM_UP_SECONDS = 0.05
"""Before the first turn: an idle device has lowered its clocks. Later ones follow a call or two."""
LEAST_CALLS, MOST_CALLS = 4, 50
"""Calls of a turn."""
TURN_SECONDS = 0.02
"""Shorter calls are repeated until they have taken so long together."""
ENOUGH_SECONDS = 0.05
"""After so long, fewer calls than the least will do."""
MOST_SECONDS = 0.3
"""How long a turn may go on for that, with all that is done between calls."""
MOST_AHEAD = 0.3
"""The longest time that a device is kept busy while a call is launched."""
CYCLES = 2e9
"""Cycles in a second, about."""


class Launched(NamedTuple):
    """One call, in seconds."""

    host: float
    """Until it was launched on an idle device."""
    device: float
    """At most what it takes without waiting for the host: a queue holds about 1,000 launches."""


class EventCalls:
    """Calls of a prepared model whose inputs are on the device."""

    def __init__(self, ready: Prepared, inputs: Call, seed: int, rewind: Callable[[], None]) -> None:
        self._ready, self._seed, self._rewind = ready, seed, rewind
        self._module = module_of(ready.device)

        def resident(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(ready.device)
            if tensor.requires_grad:
                return moved.requires_grad_()
            return moved

        self._inputs: Call = map_tensors(inputs, resident)

    def seconds(self, in_a_row: int, least: float, *, again: bool = False) -> list[float]:
        """Seconds of calls, ``least`` together or enough of them; ``again``: a turn came before."""
        started = system.perf_counter()
        while not again and system.perf_counter() - started < WARM_UP_SECONDS:
            self._times(1)
        seconds: list[float] = []
        end = system.perf_counter() + max(MOST_SECONDS, least)
        while not enough_calls(seconds, LEAST_CALLS, least) and system.perf_counter() < end:
            # The device was idle before the first call in a row.
            seconds += self._times(in_a_row)[1:]
        return seconds

    def launched(self) -> Launched | None:
        """What a call takes its host and the device; ``None`` if that cannot be told here."""
        keep_busy = getattr(self._module, "_sleep", None)
        if keep_busy is None:
            return None
        self._rewind()
        inputs = self._seeded_inputs()
        synchronize(self._ready.device)
        host = self._call(inputs).host

        def ahead() -> float:
            """Seconds of a call on a device that is kept busy until the call is launched."""
            inputs = self._seeded_inputs()
            synchronize(self._ready.device)
            keep_busy(int(min(MOST_AHEAD, 2 * host + 1e-3) * CYCLES))
            call = self._call(inputs)
            synchronize(self._ready.device)
            return call.elapsed

        device = ahead()
        # Only this tells the speed of such a model, and a short time is easily disturbed.
        if device < host:
            self._rewind()
            device = min(device, ahead())
        return Launched(host, device)

    def _times(self, calls: int) -> list[float]:
        """The seconds of calls launched one after another, from the same state of the model."""
        self._rewind()
        timed = [self._call(self._seeded_inputs()) for _ in range(calls)]
        synchronize(self._ready.device)
        return [call.elapsed for call in timed]

    def _seeded_inputs(self) -> Call:
        seed_everything(self._seed)
        return self._ready.inputs(*self._inputs)

    def _call(self, inputs: Call) -> _Call:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        with warnings.catch_warnings(), self._ready.context():
            warnings.simplefilter("ignore")  # the plain run has shown them
            start.record()
            started = system.perf_counter()
            call_model(self._ready.call, *inputs)
            host = system.perf_counter() - started
            end.record()
        return _Call(start, end, host)


def enough_calls(seconds: Sequence[float], least_calls: int, least: float) -> bool:
    """Whether calls that took ``seconds`` are enough for a turn of at least ``least`` s."""
    count, total = len(seconds), sum(seconds)
    enough = total >= ENOUGH_SECONDS or (count >= least_calls and total >= TURN_SECONDS)
    return count >= MOST_CALLS or (enough and total >= least)


class _Call(NamedTuple):
    start: Any
    end: Any
    host: float

    @property
    def elapsed(self) -> float:
        """Seconds on the device, once it is done."""
        return float(self.start.elapsed_time(self.end)) / 1e3


def has_events(device: torch.device) -> bool:
    """Whether ``device`` is an accelerator whose events have times."""
    if device.type == "cpu":
        return False
    try:
        module = module_of(device)
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        synchronize(device)
        return bool(start.elapsed_time(end) >= 0)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
