"""The margin of a run that passes: how many further inputs pass, how near the tolerance it comes, what follows."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Call
from shared_result import latency, run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowprec_check import Run, ScanResult, scan
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import recommend
from lowprec_check.engine.model.input_draws import further_draws
from lowprec_check.engine.model.target import make_target
from lowprec_check.features.inputs import further_calls
from lowprec_check.features.inputs.further_calls import failing_share
from lowprec_check.report.registry import render
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.torchkit.devices import seed_everything

LARGEST = 65504.0


class Scale(nn.Module):
    """In fp16, overflows for values above 0.9: the output is Inf where that of fp32 is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(60000.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (LARGEST / 60000 / 0.9) / LARGEST


def batches(batch: int = 0) -> Tensor:
    """Batch 0 passes in fp16; of the others about half do."""
    x = torch.rand(2, 4, generator=torch.Generator().manual_seed(batch))
    return x if batch else 0.5 * x


def fails(x: Tensor, model: nn.Module | None = None) -> bool:
    """What plain torch says: whether ``half`` gives Inf where fp32 does not."""
    model = model or Scale()
    with torch.no_grad():
        return bool(model.half()(x.half()).isinf().any())


def half(model: nn.Module, inputs: Any, number: int | None = 16, **more: Any) -> Run:
    options: dict[str, Any] = {"precisions": ["half"], "times": "off", "plan": False, "errors": "none"}
    return scan(model, inputs, further_inputs=number, **options | more).run("half")


def further(model: nn.Module, inputs: Any, number: int | None = 16, **more: Any) -> InputsTried:
    found = half(model, inputs, number, **more).further_inputs
    assert found is not None
    return found


# -- the interval


@pytest.mark.parametrize(
    ("failed", "tried", "low", "high"),
    [(0, 16, 0.0, 0.2059), (16, 16, 0.7941, 1.0), (3, 16, 0.0405, 0.4565), (1, 64, 0.0004, 0.0840), (0, 0, 0.0, 1.0)],
)
def test_the_interval_is_that_of_clopper_and_pearson(failed: int, tried: int, low: float, high: float) -> None:
    assert failing_share(failed, tried) == pytest.approx((low, high), abs=1e-4)


def binomial(number: int, of: int, share: float) -> float:
    return math.comb(of, number) * share**number * (1 - share) ** (of - number)


@pytest.mark.parametrize(("first", "most"), [(further_calls.MOST, further_calls.MOST_NEAR), (16, 20), (3, 5)])
@pytest.mark.parametrize("calm", [0.0, 0.5, 0.9, 1.0])
def test_the_interval_holds_the_share_although_more_are_tried_only_if_needed(
    first: int, most: int, calm: float
) -> None:
    """A share ``calm`` of passing inputs is not near the tolerance: if all of the first are, no more are tried."""
    early, late = failing_share(0, first), [failing_share(k, most, looks=2) for k in range(most + 1)]
    for percent in range(1, 1000, 7):
        share = percent / 1000
        stops = (calm * (1 - share)) ** first
        held = stops * (early[0] <= share <= early[1])
        for failed, (low, high) in enumerate(late):
            ends = binomial(failed, most, share)
            ends -= stops * binomial(failed, most - first, share) if failed <= most - first else 0.0
            held += ends * (low <= share <= high)
        assert held >= 0.95


# -- which inputs are tried


def test_further_inputs_are_those_of_the_function_and_each_is_judged_as_plain_torch_does() -> None:
    found = further(Scale(), batches, 20)
    expected = [fails(batches(number)) for number in range(1, 21)]
    assert (found.kind, found.tried, found.failed) == ("drawn", 20, sum(expected))
    assert found.first_failed == 1 + expected.index(True)
    assert found.statuses == {"ok": 20 - sum(expected), "nonfinite": sum(expected)}
    assert found.worst is None
    assert found.low < sum(expected) / 20 < found.high


def test_a_function_without_a_number_draws_anew_from_the_seed() -> None:
    seed_everything(7 + 3)
    third = torch.rand(2, 4)
    kind, draws = further_draws(make_target(nn.Linear(4, 2), lambda: torch.rand(2, 4)), 1, 7)
    values = [its for _, its in islice(draws, 3)]
    assert kind == "drawn"
    assert values[2] is not None
    assert torch.equal(values[2][0], third)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.stack([0.5 * batches(), *map(batches, range(1, 9))]).flatten(0, 1)), 2)


def test_of_a_loader_the_next_batches_are_tried_until_there_are_no_more() -> None:
    found = further(Scale(), loader())
    assert (found.kind, found.tried) == ("batches", 8)
    assert found.failed == sum(fails(batches(number)) for number in range(1, 9))


def test_batches_with_runs_of_their_own_are_not_tried_again() -> None:
    safe = next(number for number in range(1, 40) if not fails(batches(number)))
    given = lambda batch=0: batches(0 if batch == 0 else safe if batch == 1 else batch)  # noqa: E731
    found = half(Scale(), given, 4, batches=2)
    assert found.batches is not None
    assert found.batches.statuses == ["ok", "ok"]
    assert found.further_inputs is not None
    assert found.further_inputs.failed == sum(fails(batches(number)) for number in range(2, 6))


def test_values_of_fixed_inputs_are_resampled_within_each_feature() -> None:
    x = torch.arange(40.0).reshape(10, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0])
    kind, draws = further_draws(make_target(nn.Linear(4, 2), x), 1, 0)
    values = [its[0] for _, its in islice(draws, 5) if its is not None]
    assert kind == "resampled"
    assert len({value.numpy().tobytes() for value in values}) == 5
    for value in values:
        assert all(set(column.tolist()) <= set(given.tolist()) for column, given in zip(value.T, x.T, strict=True))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        return (self.embedding(ids) * mask[..., None]).sum(1) + positions.sum() + lengths.sum()


def test_masks_and_integers_in_order_stay_and_tokens_stay_where_the_mask_has_some() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    given = {
        "ids": torch.tensor([[7, 3, 9, 2, 0, 0], [7, 5, 11, 4, 2, 0]]),
        "mask": mask,
        "positions": torch.arange(6).expand(2, 6),
        "lengths": torch.tensor([4, 2]),
    }
    kind, draws = further_draws(make_target(Tokens(), given), 1, 0)
    assert kind == "resampled"
    for _, values in islice(draws, 5):
        assert values is not None
        ids, same_mask, positions, lengths = values
        assert not torch.equal(ids, given["ids"])
        assert torch.equal(same_mask, mask)
        assert torch.equal(positions, given["positions"])
        assert torch.equal(lengths, given["lengths"])
        assert (ids[mask == 0] == 0).all()
        assert set(ids[mask == 1].tolist()) <= {7, 3, 9, 2, 5, 11, 4}


def test_a_tensor_that_is_given_twice_is_resampled_once() -> None:
    x = torch.randn(3, 4)
    _, draws = further_draws(make_target(nn.Bilinear(4, 4, 2), (x, x)), 1, 0)
    _, values = next(draws)
    assert values is not None
    assert values[0] is values[1]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, parts: Tensor, x: Tensor, scale: float) -> Tensor:
        whole = parts.to_dense() if parts.is_sparse else torch.stack([part.sum(0) for part in parts.unbind()])
        return self.linear(x) * scale + whole.sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_of_inputs_with_other_kinds_of_tensors_the_dense_ones_are_resampled(kind: str) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    parts = nested if kind == "nested" else torch.eye(4).to_sparse()
    result = scan(Mean(), (parts, torch.randn(3, 4), 0.5), precisions=["autocast-fp16"], times="off", further_inputs=4)
    found = result.run("autocast-fp16").further_inputs
    assert found is not None
    assert (found.kind, found.tried, found.failed) == ("resampled", 4, 0)
    assert not any("further inputs" in note for run in result.runs for note in run.notes)


def test_inputs_of_other_shapes_and_those_that_fp32_fails_on_are_left_out_and_counted() -> None:
    def inputs(batch: int = 0) -> Tensor:
        x = 0.5 * torch.rand(2, 4, generator=torch.Generator().manual_seed(batch))
        return x[:1] if batch % 4 == 1 else x / 0 if batch % 4 == 2 else x

    found = further(Scale(), inputs, 6)
    assert (found.tried, found.failed, found.left_out) == (6, 0, 6)  # batches 3, 4, 7, 8, 11 and 12 are tried


@pytest.mark.parametrize("inputs", [torch.ones(2, 4), torch.zeros(1, 1)])
def test_inputs_without_other_values_are_the_only_ones_and_a_sentence_says_so(inputs: Tensor) -> None:
    model = nn.Sequential(nn.Linear(inputs.shape[1], 4), nn.Tanh())
    result = scan(model, inputs, precisions=["half"], times="off")
    found = result.run("half").further_inputs
    assert found is not None
    assert found.tried == 0
    assert found.reason == "the inputs have no other values"
    assert result.recommendation is not None
    assert "no further ones were tried: the inputs have no other values" in result.recommendation.reason


def test_the_user_s_function_and_iterator_stay_as_they_are_without_a_worker() -> None:
    called: list[int] = []

    def inputs() -> Tensor:
        called.append(1)
        return 0.5 * torch.rand(2, 4)

    def generated() -> Iterator[Tensor]:
        for batch in range(40):
            called.append(batch)
            yield 0.5 * batches(batch)

    assert further(Scale(), inputs, isolation="none").kind == "resampled"
    assert called == [1]
    iterator = generated()
    assert further(Scale(), iterator, isolation="none").kind == "resampled"
    assert called == [1, 0]
    assert further(Scale(), iterator, isolation="fork").kind == "batches"
    assert len(called) == 3


# -- how many


def test_none_are_tried_if_none_are_asked_for_or_the_run_does_not_pass_or_trains() -> None:
    assert half(Scale(), batches, 0).further_inputs is None
    failing = half(Scale(), lambda: torch.ones(2, 4), 8)
    assert failing.status == "nonfinite"
    assert failing.further_inputs is None
    assert half(nn.Linear(4, 2), batches, 8, train=True).further_inputs is None


class Off(nn.Module):
    """In 16 bits, 1 % too large on every input, whatever kernels the CPU has."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.float32 else x * 1.01


@pytest.mark.parametrize(("part", "tried"), [(0.2, further_calls.MOST), (0.9, further_calls.MOST_NEAR)])
def test_more_are_tried_if_the_error_is_near_the_tolerance(
    part: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(further_calls, "SECONDS", 1000.0)
    assert further(Off(), batches, None, tolerance=0.01 / part).tried == tried


def test_a_slow_model_is_tried_on_as_many_as_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further_calls, "SECONDS", 0.0)
    monkeypatch.setattr(further_calls, "SHARE", 0.0)
    found = further(Scale(), batches, None)
    assert (found.tried, found.reason, found.low, found.high) == (0, further_calls.SLOW, 0.0, 1.0)
    assert further(Scale(), batches, 2).tried == 2  # as asked for


def test_a_run_at_most_twice_as_slow_as_fp32_is_tried_on_as_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 20 ms of its thread in fp32, 35 ms in 16 bits, by a clock of its own."""
    clock, run_once = [0.0], further_calls.run_once

    def timed(ready: Any, *call: Any) -> Any:
        clock[0] += 0.02 if next(ready.model.parameters()).dtype == torch.float32 else 0.035
        return run_once(ready, *call)

    monkeypatch.setattr(further_calls, "run_once", timed)
    monkeypatch.setattr(further_calls.system, "thread_time", lambda: clock[0])
    monkeypatch.setattr(further_calls, "WAITING", 1000.0)
    monkeypatch.setattr(further_calls, "SHARE", 0.0)
    assert further(Scale(), torch.rand(2, 4) / 2, None).tried in (5, 6)
    monkeypatch.setattr(further_calls, "SLOWER", 0.0)
    assert further(Scale(), torch.rand(2, 4) / 2, None).tried == 3


def test_a_model_that_draws_random_numbers_is_not_tried() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    found = further(model.train(), batches)
    assert (found.tried, found.reason) == (0, further_calls.RANDOM)


class Drifts(nn.Module):
    """Its state is in an iterator, which cannot be rewound."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(4, 4), count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + next(self.numbers) / 200)


def test_a_model_with_state_that_cannot_be_rewound_is_not_tried() -> None:
    found = further(Drifts(), batches)
    assert (found.tried, found.reason) == (0, further_calls.STATEFUL)


# -- what else runs


class Dies(Scale):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.half and x.max() > 0.9:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)


class Raises(Scale):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.half and x.max() > 0.9:
            raise ValueError("too large")
        return super().forward(x)


def test_an_input_on_which_the_process_dies_fails_and_the_status_stays() -> None:
    found = half(Dies(), batches, 20)
    first = next(number for number in range(1, 21) if batches(number).half().max() > 0.9)
    assert found.status == "ok"
    assert found.complete
    assert found.further_inputs is not None
    assert (found.further_inputs.tried, found.further_inputs.failed) == (first, 1)
    assert found.further_inputs.statuses.get("crashed") == 1
    assert found.further_inputs.first_failed == first


def test_an_exception_on_a_further_input_fails() -> None:
    found = further(Raises(), batches, 20)
    failed = sum(bool(batches(number).half().max() > 0.9) for number in range(1, 21))
    assert found.statuses == {"ok": 20 - failed, "error": failed}


class Counts(nn.Module):
    """Its second call is another one, unless its state is rewound."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return self.linear(x) * (1.0 if self.calls.item() < 4 else math.nan)  # type: ignore[operator]


def test_the_state_of_the_model_is_rewound_before_each_input() -> None:
    found = further(Counts(), batches)
    assert (found.tried, found.failed) == (16, 0)


class Empty(nn.Module):
    """Its output holds nothing to compare; that of ``scaled`` is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) * 0


def test_the_output_of_a_module_is_compared_where_that_of_the_model_is_all_zeros() -> None:
    found = half(Empty(), batches, 20)
    assert found.compared_module == "scaled"
    assert found.further_inputs is not None
    assert found.further_inputs.failed == sum(fails(batches(number)) for number in range(1, 21))


@pytest.mark.parametrize("options", [{"isolation": "shared"}, {"backends": "jit"}, {"memory_formats": "channels_last"}])
def test_every_way_to_run_is_tried(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()).eval()
    given = {"precisions": ["half"], "times": "off", "plan": False} | options
    result = scan(model, lambda: torch.randn(1, 2, 4, 4), further_inputs=5, **given)
    found = next(run for run in result.runs if not run.is_reference).further_inputs
    assert found is not None
    assert (found.tried, found.failed) == (5, 0)


def test_a_prediction_and_a_plan_are_tried() -> None:
    predicted = further(nn.Linear(4, 4), batches, 5, device="cuda", predict=True)
    assert predicted.tried == 5
    model = nn.Sequential(nn.Linear(4, 4), Always())
    result = scan(model, batches, precisions=["half"], further_inputs=5, times="off")
    plan = result.run("plan")
    assert plan.status == "ok"
    assert plan.further_inputs is not None
    assert plan.further_inputs.tried == 5


class Always(nn.Module):
    """Overflows in fp16 for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 1) * self.weight * 1e5 * 1e-5


# -- what follows from it


def a_scan(*runs: Run) -> ScanResult:
    fp32 = run("fp32", latency_ms=10.0, latency=latency(10.0), peak_memory_bytes=8 << 20, tolerance=None)
    model = ModelInfo(name="Net", parameters=1, inputs=["x (1)"], modules=1, training=False)
    return conclude(ScanResult(tool="", target="net.py", model=model, environment={}, runs=[fp32, *runs]))


def tried(name: str, error: float, *, failed: int = 0, worst: float | None = None, memory: int = 8) -> Run:
    found = InputsTried(kind="drawn", tried=16, failed=failed, worst=worst, low=0.0, high=0.21)
    return run(name, "ok", error, tolerance=1e-2, peak_memory_bytes=memory << 20, further_inputs=found)


def test_a_run_that_fails_on_a_further_input_is_not_recommended() -> None:
    result = a_scan(tried("half", 1e-3, failed=3), tried("autocast-fp16", 6e-3, worst=6.1e-3))
    assert result.recommendation is not None
    assert result.recommendation.precision == "autocast-fp16"
    assert "asses on 17 of 17 inputs, worst 61 % of the tolerance" in result.recommendation.reason
    assert "also on 16 of 16 further inputs (drawn anew)" in result.recommendation.reason
    assert "at most 21 % of such inputs fail (95 % confidence)" in result.recommendation.reason
    found = [d for d in result.diagnostics if d.code == "LP307"]
    assert [(d.precision, d.severity) for d in found] == [("half", "warning")]
    assert "fails on 3 of 16 further inputs (drawn anew)" in found[0].message
    assert found[0].help is not None
    assert "use autocast-fp16" in found[0].help
    assert found[0].help.endswith("lowprec-check plan net.py -p half --base cast --batches 2")
    quantized = msgspec.structs.replace(tried("bfloat16", 1e-3, failed=3), backend="int8")
    [of_int8] = [d.help for d in a_scan(quantized).diagnostics if d.code == "LP307"]
    assert of_int8 == "calibrate on data like that of use"
    text = render(result, "text")
    assert "passes here, fails on 3 of 16 further inputs" in " ".join(text.split())


def test_nothing_is_recommended_if_every_run_fails_on_a_further_input() -> None:
    result = a_scan(tried("half", 1e-3, failed=3))
    assert result.recommendation is None
    text = render(result, "text")
    assert "half did not pass on every input here" in text
    assert "fails on 3 of 16 further inputs" in " ".join(text.split())
    assert 'failures="2"' in render(result, "junit")


@pytest.mark.parametrize(("worst", "best"), [(7e-3, "half"), (9e-3, "autocast-fp16")])
def test_a_safe_margin_is_preferred_to_a_small_gain(worst: float, best: str) -> None:
    runs = [tried("half", 5e-3, worst=worst, memory=5), tried("autocast-fp16", 6e-3, worst=6e-3)]
    found = recommend(a_scan(*runs).runs, ModelInfo(name="", parameters=1, inputs=[], modules=1, training=False))
    assert found is not None
    assert found.precision == best


def test_a_result_without_further_inputs_says_what_it_said() -> None:
    old = msgspec.structs.replace(tried("half", 6e-3), further_inputs=None)
    reason = a_scan(old).recommendation.reason  # type: ignore[union-attr]
    assert "on 1 of 1 input, at 60 % of the tolerance; other inputs can exceed it: try --batches 8" in reason


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(60000.0))
    def forward(self, x):
        return x * self.scale * (65504 / 60000 / 0.9) / 65504

model = Net()

def inputs(batch=0):
    x = torch.rand(2, 4, generator=torch.Generator().manual_seed(batch))
    return x if batch else 0.5 * x
"""


def test_the_command_fails_if_no_precision_passes_on_every_input(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE)
    arguments = ("scan", file, "-p", "half", "--times", "off", "--no-plan")
    found = call(*arguments, "--further-inputs", "8")
    assert found.returncode == 1
    assert "half did not pass on every input here" in found.stdout
    assert "LP307" in found.stdout
    assert call(*arguments, "--further-inputs", "0").returncode == 0
