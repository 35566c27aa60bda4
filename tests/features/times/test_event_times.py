"""Times on accelerators: by events between calls that are launched ahead, and the part of a call that its host takes.

Stands in for a device: a call costs the host some time, and the device some, which it works off in order.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from helpers import CPU
from shared_result import shared_result
from torch import Tensor, nn

from lowprec_check.analysis.speed import launch_bound
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.times import event_times
from lowprec_check.features.times.event_times import EventCalls
from lowprec_check.features.times.speedups import Turn, latency_of_rounds
from lowprec_check.schema.precisions import PRECISIONS

RESULT = shared_result()


class Device:
    """An accelerator without kernels, and its clock: ``free_at`` is when it has done all that was launched."""

    now = free_at = 0.0

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(device.free_at, device.now)

            def elapsed_time(self, other: Any) -> float:
                return float((other.at - self.at) * 1e3)

        self.Event = Event

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def _sleep(self, cycles: int) -> None:
        self.launch(cycles / event_times.CYCLES)

    def synchronize(self, *_: Any) -> None:
        self.now = max(self.now, self.free_at)


class Launches(nn.Module):
    """Five kernels, each launched in ``host`` seconds and computed in ``seconds``; it counts its calls."""

    def __init__(self, device: Device, host: float, seconds: float) -> None:
        super().__init__()
        self.device, self.host, self.seconds = device, host, seconds
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(5):
            self.device.now += self.host
            self.device.launch(self.seconds)
        return x


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(event_times, "module_of", lambda _: device)
    monkeypatch.setattr(event_times, "synchronize", device.synchronize)
    monkeypatch.setattr(event_times.system, "perf_counter", lambda: device.now)
    return device


@pytest.mark.parametrize(
    ("host", "seconds", "call", "bound"),
    [(2e-4, 2e-3, 1e-2, False), (1e-3, 1e-4, 5e-3, True), (1e-3, 1e-3, 5e-3, False)],
)
def test_calls_are_timed_as_the_device_sees_them(
    device: Device, host: float, seconds: float, call: float, bound: bool
) -> None:
    model, rewound = Launches(device, host, seconds), []
    with prepared(model, PRECISIONS.get("fp32"), CPU) as ready:
        calls = EventCalls(ready, ((torch.zeros(1),), {}), 0, lambda: rewound.append(model.calls))
        found, launched = calls.seconds(3, 0.0), calls.launched()
    assert len(found) >= event_times.LEAST_CALLS
    assert min(found) == pytest.approx(call, rel=0.01)
    assert all(later - earlier == 3 for earlier, later in itertools.pairwise(rewound))
    assert launched is not None
    assert launched == pytest.approx((5 * host, 5 * seconds))
    latency = latency_of_rounds({0: Turn([min(found)], launched=launched)})
    run = msgspec.structs.replace(RESULT.runs[0], latency=latency, timing=None)
    assert launch_bound(run) == bound
    texts = [its.text for its in statements(msgspec.structs.replace(RESULT, runs=[run])) if its.kind == "launch-bound"]
    assert len(texts) == bound
    assert all(text.startswith("launch-bound: 5.0 ms of 5.0 ms on the host, 0.5 ms on the device") for text in texts)


def test_a_device_that_cannot_be_kept_busy_tells_no_part_of_the_host(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Device, "_sleep")
    with prepared(Launches(device, 0.0, 0.0), PRECISIONS.get("fp32"), CPU) as ready:
        assert EventCalls(ready, ((torch.zeros(1),), {}), 0, lambda: None).launched() is None


def test_a_cpu_has_no_events() -> None:
    assert not event_times.has_events(CPU)
