"""Times as a model is served: instances, batches, medians and percentiles."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call
from torch import Tensor, nn

from lowprec_check import UsageError, scan
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.features.times.timed_runs import batch_of, cores_of_instances, percentile


@pytest.fixture(autouse=True)
def short_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_check.features.times.timed_runs.INSTANCE_SECONDS", 0.1)


BFLOAT16: dict[str, Any] = {"precisions": "bfloat16", "times": "off", "plan": False, "errors": "none"}
"""Times of a scenario only, each scan's subject here."""


class Rows(nn.Module):
    """Fails for other batches than those it expects."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.linear = rows, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in (self.rows, 6):
            raise ValueError(f"{x.shape[0]} rows")
        return self.linear(x)


def test_offline_times_the_inputs_on_all_cores() -> None:
    result = scan(Rows(6), torch.ones(6, 8), scenario="offline", **BFLOAT16)
    assert [its.text for its in statements(result) if its.kind == "rounds"] == [
        "times were taken in the offline scenario only"
    ]
    for run in result.runs:
        timing = run.timing
        assert timing is not None
        assert (timing.scenario, timing.batch, timing.instances) == ("offline", 6, 1)
        assert timing.cores == len(os.sched_getaffinity(0))
        assert timing.calls >= 5
        assert 0 < timing.median_ms <= timing.p99_ms
        assert timing.throughput == pytest.approx(6e3 / timing.median_ms)
    assert result.options["scenario"] == "offline"


def test_realtime_times_several_instances_with_batches_of_one() -> None:
    result = scan(Rows(1), torch.ones(6, 8), scenario="realtime", **BFLOAT16)
    cores = len(os.sched_getaffinity(0))
    timing = result.run("bfloat16").timing
    assert timing is not None
    assert (timing.batch, timing.instances) == (1, max(1, cores // min(4, max(1, cores // 2))))
    assert timing.instances * timing.cores <= cores


def test_a_model_that_cannot_take_one_item_is_not_timed() -> None:
    result = scan(Rows(2), torch.ones(6, 8), scenario="realtime", **BFLOAT16)
    assert [run.status for run in result.runs] == ["ok", "ok"]
    assert result.run("bfloat16").timing is None
    assert "not timed realtime: ValueError: 1 rows" in result.run("bfloat16").notes


class OneItem(nn.Module):
    """Does ``act`` for a batch of one."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act, self.linear = act, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            self.act()
        return self.linear(x)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_a_model_that_exits_in_an_instance_is_not_timed(isolation: Any) -> None:
    model = OneItem(lambda: sys.exit(3))
    run = scan(model, torch.ones(6, 8), scenario="realtime", isolation=isolation, **BFLOAT16).run("bfloat16")
    assert (run.status, run.timing) == ("ok", None)
    assert run.notes[-1] == "not timed realtime: SystemExit: 3"


def test_an_instance_in_this_process_uses_the_threads_that_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    monkeypatch.setattr("lowprec_check.features.times.timed_runs.cores_of_instances", lambda *_: [(0, 1, 2)])

    def check() -> None:
        if torch.get_num_threads() != 3:
            raise ValueError(f"{torch.get_num_threads()} threads")

    run = scan(OneItem(check), torch.ones(6, 8), scenario="realtime", isolation="none", **BFLOAT16).run("bfloat16")
    assert run.timing is not None, run.notes
    assert run.timing.cores == 3
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_instances_may_finish_at_different_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lowprec_check.features.times.timed_runs.cores_of_instances", lambda *_: [(), ()])
    slow = tmp_path / "slow"

    def wait() -> None:
        with contextlib.suppress(FileExistsError), slow.open("x") as file:
            file.write(str(os.getpid()))
        time.sleep(0.2 if slow.read_text() == str(os.getpid()) else 0.0)

    run = scan(OneItem(wait), torch.ones(6, 8), scenario="realtime", **BFLOAT16).runs[0]
    assert run.timing is not None, run.notes
    assert run.timing.instances == 2


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x).sum(0) + y.sum(0)


def test_inputs_without_a_common_batch_are_timed_offline_only() -> None:
    inputs = (torch.ones(6, 8), torch.ones(3, 8))
    assert batch_of((inputs, {})) is None
    assert batch_of(((torch.ones(6, 8), torch.tensor(1.0)), {"y": torch.ones(6)})) == 6
    offline = scan(Two(), inputs, scenario="offline", **BFLOAT16).run("bfloat16").timing
    assert offline is not None
    assert (offline.batch, offline.throughput) == (None, None)
    realtime = scan(Two(), inputs, scenario="realtime", **BFLOAT16).run("bfloat16")
    assert "no common first dimension" in realtime.notes[-1]


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, [1]), (2, [1, 1]), (6, [3, 3]), (8, [4, 4]), (16, [4] * 4), (18, [4] * 4)]
)
def test_instances_share_the_cores(cores: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    found = cores_of_instances("realtime", "cpu")
    assert [len(instance) for instance in found] == expected
    assert len({core for instance in found for core in instance}) == sum(expected)
    assert [len(instance) for instance in cores_of_instances("realtime", "cuda")] == [cores]


def test_percentiles_are_samples() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0


def test_the_screen_shows_the_scenario(call: Call, tmp_path: object) -> None:
    options = ("-p", "bf16", "--scenario", "realtime", "--no-plan", "--times", "off", "-q", "-v", "--fail-on", "never")
    text = " ".join(call("scan", "examples/whitening.py", "--backend", "jit", *options).stdout.split())
    assert "p99 throughput" in text
    assert "realtime, batch 1: " in text


def test_an_unknown_scenario_is_an_error() -> None:
    with pytest.raises(UsageError, match="Unknown scenario"):
        scan(Two(), (torch.ones(1, 8), torch.ones(1, 8)), precisions="half", scenario="batch")  # type: ignore[arg-type]
