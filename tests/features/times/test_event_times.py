"""Times on accelerators: by events between calls that are launched ahead, and the part of a call that its host takes.

Stands in for a device: a call costs the host some time, and the device some, which it works off in order.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
import torch
from helpers import CPU
from shared_result import shared_result
from torch import Tensor, nn

from lowprec_check.analysis.speed import launch_bound, speed, told_on_device
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.times import event_times
from lowprec_check.features.times.event_times import EventCalls
from lowprec_check.features.times.speedups import Turn, latency_of_rounds
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ScanResult

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

    def launch_seconds(self) -> float:
        return self.host

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(5):
            self.device.now += self.launch_seconds()
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
    assert all(0 < later - earlier <= 3 for earlier, later in itertools.pairwise(rewound))
    assert launched is not None
    assert launched == pytest.approx((5 * host, 5 * seconds))
    latency = latency_of_rounds({0: Turn([min(found)], launched=launched)})
    run = msgspec.structs.replace(RESULT.runs[0], latency=latency, timing=None)
    assert launch_bound(run) == bound
    texts = [its.text for its in statements(msgspec.structs.replace(RESULT, runs=[run])) if its.kind == "launch-bound"]
    assert len(texts) == bound
    assert all(text.startswith("the GPU needs 0.5 ms of a call of 5.0 ms, your Python limits it") for text in texts)


def in_turns(
    device: Device, monkeypatch: pytest.MonkeyPatch, bf16: float, jitter: float, rounds: int = 5
) -> ScanResult:
    """fp32 and bf16, whose kernels take ``bf16`` of the time, where the time of a launch varies by ``jitter``."""
    draw, runs, turns = random.Random(0), RESULT.runs[:2], list[dict[int, Turn]]()
    monkeypatch.setattr(Launches, "launch_seconds", lambda self: self.host * math.exp(draw.gauss(0, jitter)))
    for part in (1.0, bf16):
        model, turns_of_one = Launches(device, 1e-3, 5e-4 * part), dict[int, Turn]()
        with prepared(model, PRECISIONS.get("fp32"), CPU) as ready:
            calls = EventCalls(ready, ((torch.zeros(1),), {}), 0, lambda: None)
            for number in range(rounds):
                turns_of_one[number] = Turn(calls.seconds(3, 0.0), launched=calls.launched())
        turns.append(turns_of_one)
    reference, low = latency_of_rounds(turns[0]), latency_of_rounds(turns[1], turns[0])
    runs = [msgspec.structs.replace(run, latency=found) for run, found in zip(runs, (reference, low), strict=True)]
    return msgspec.structs.replace(RESULT, runs=runs)


@pytest.mark.parametrize("jitter", [0.0, 0.2, 0.6])
def test_what_the_gpu_needs_is_told_however_the_time_of_its_host_varies(
    device: Device, monkeypatch: pytest.MonkeyPatch, jitter: float
) -> None:
    result = in_turns(device, monkeypatch, 0.46, jitter)
    latency = result.runs[1].latency
    assert latency is not None
    assert latency.device_speedup is not None
    assert 1 / latency.device_speedup.median == pytest.approx(0.46, rel=0.01)
    texts = [found.text for found in statements(result) if found.about == "times" and found.runs]
    assert not any("cannot be told" in text for text in texts)
    assert any(text.startswith("the GPU needs 0.46 of fp32's time") for text in texts)
    told = speed(result.runs[1], result.runs)
    assert told.told == "same" or told.text() == "2.2 times as fast as fp32 on the GPU"


def test_no_host_time_makes_a_gpu_faster(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU alone does is no gain of a call: the advice may not depend on the noise of the host."""
    for jitter in (0.0, 0.6):
        result = in_turns(device, monkeypatch, 0.2, jitter)
        assert speed(result.runs[1], result.runs).told in ("same", "noisy")


def test_a_gpu_that_is_measured_once_or_varies_tells_nothing() -> None:
    ratios = {"one": [2.0], "varies": [1.0, 2.0, 4.0, 2.0, 1.0, 3.0], "well": [2.0, 2.02, 1.98]}
    found = {}
    for name, values in ratios.items():
        fp32 = {number: Turn([1.0], launched=(1.0, ratio)) for number, ratio in enumerate(values)}
        found[name] = told_on_device(
            latency_of_rounds({number: Turn([1.0], launched=(1.0, 1.0)) for number in fp32}, fp32)
        )
    assert found == {"one": None, "varies": None, "well": 2.0}


def test_a_device_that_cannot_be_kept_busy_tells_no_part_of_the_host(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Device, "_sleep")
    with prepared(Launches(device, 0.0, 0.0), PRECISIONS.get("fp32"), CPU) as ready:
        assert EventCalls(ready, ((torch.zeros(1),), {}), 0, lambda: None).launched() is None


def test_a_cpu_has_no_events() -> None:
    assert not event_times.has_events(CPU)
