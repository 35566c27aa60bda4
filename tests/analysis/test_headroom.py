"""LP205: how close a passing run comes to the limits of its dtype, on one batch and as values grow on further ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowprec_check import UsageError, scan
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.engine.model.target import make_target
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.precisions import BF16, FP16, FloatFormat
from lowprec_check.schema.scan_result import Diagnostic, ModelInfo, Run, ScanResult

MODEL = ModelInfo(name="Net", parameters=1, inputs=["x (1)"], modules=1, training=False)
PRECISION = {FP16: "half", BF16: "bfloat16"}


def found_in(*rows: OpCall, format: FloatFormat = FP16, status: Any = "ok") -> list[Diagnostic]:
    run = Run(precision=PRECISION[format], device="cpu", status=status, op_calls=to_columns(rows))
    fp32 = Run(precision="fp32", device="cpu", status="ok")
    result = ScanResult(tool="", target="", model=MODEL, environment={}, runs=[fp32, run])
    return diagnose(result, ["LP205"])


@given(
    share=st.floats(1e-4, 0.999),
    subnormal=st.floats(0, 1),
    format=st.sampled_from((FP16, BF16)),
    wide=st.booleans(),
)
def test_a_note_from_a_quarter_of_the_limit_or_a_tenth_of_small_values(
    share: float, subnormal: float, format: FloatFormat, wide: bool
) -> None:
    out = "f32" if wide else format.mark
    row = OpCall("aten.mul.Tensor", "layer", dtypes=f"f32→{out}", absmax=share * format.largest, subnormal=subnormal)
    found = found_in(row, format=format)
    near, small = share > 0.25 and not wide, subnormal >= 0.1 and not wide
    assert [d.severity for d in found] == ["note"] * (near or small)
    assert all(("room for a factor of" in d.message) == near for d in found)
    assert all(("smallest normal number" in d.message) == small for d in found)
    assert not found_in(row, format=format, status="inaccurate")


def test_one_note_names_the_tightest_op_at_the_top_and_at_the_bottom() -> None:
    rows = [
        OpCall(
            f"aten.op{index}.default", f"layer{index}", dtypes="f16→f16", absmax=top, subnormal=small, flushed=small / 2
        )
        for index, (top, small) in enumerate([(2e4, 0.1), (1.0, 0.54), (3.1e4, 0.0), (65504.0, 0.0)])
    ]
    [note] = found_in(*rows)
    assert note.module == "layer2"
    assert note.message == (
        "largest value 3.1e+04, room for a factor of 2.1 in fp16 (and 1 more place); "
        "54 % of the non-zeros in fp32 of op1 in layer1 are below 6.1e-05, the smallest normal number of fp16, "
        "27 % become zero (and 1 more place)"
    )


def test_weights_masks_and_other_outputs_do_not_count() -> None:
    assert not found_in(
        OpCall("cast bias", "layer", dtypes="f32→f16", absmax=6e4, subnormal=1.0),
        OpCall("aten.full.default", dtypes="→f16", absmax=FP16.largest),
        OpCall("aten.native_layer_norm.default", dtypes="f16→f16+f32", absmax=1e6),
    )


class Scaled(nn.Module):
    """Its middle is ``factor`` times as large as its input, and its output is not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.head = factor, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.factor / self.factor)


def growing(batch: int = 0) -> Tensor:
    """Largest value: batch + 1."""
    return torch.linspace(-1, 1, 32).reshape(4, 8) * (batch + 1)


ONLY_HALF = ("-p", "half", "--no-plan", "-q")


def half_of(model: nn.Module, inputs: Any, **options: Any) -> tuple[Run, list[Diagnostic]]:
    fast = {"times": "off", "further_inputs": 0, "isolation": "none"}
    result = scan(model.eval(), inputs, precisions="half", plan=False, select="LP205", **fast | options)
    return result.run("half"), result.diagnostics


@settings(max_examples=8, deadline=None)
@given(exponent=st.floats(-7, 4.7))
def test_the_measured_range_is_that_of_the_op(exponent: float) -> None:
    factor, x = 10.0**exponent, growing()
    low = (x.half() * factor).float()
    small = float(((x * factor).abs() < FP16.smallest_normal).float().mean())
    run, found = half_of(Scaled(factor), x, isolation="none")
    row = next(row for row in run.op_calls.rows() if row.op == "aten.mul.Tensor")
    assert row.absmax == float(low.abs().max())
    assert row.subnormal == pytest.approx(small, abs=0.04)
    near = FP16.largest / float(low.abs().max()) < 4 if low.any() else False
    if run.status == "ok":
        assert bool(found) == (near or (row.subnormal or 0.0) >= 0.1)


def test_values_that_grow_from_batch_to_batch_are_a_warning() -> None:
    run, [warning] = half_of(Scaled(1.5e4), growing, batches=3)
    assert (warning.severity, warning.op) == ("warning", "aten.mul.Tensor")
    assert warning.message.startswith(
        "the largest value grows from 1.5e+04 to 4.5e+04 on batch 2: room for a factor of 1.5"
    )
    assert run.batches is not None
    assert run.batches.statuses == ["ok", "ok", "ok"]
    place = next(place for place in run.batches.places if place.op == "aten.mul.Tensor")
    assert place.largest == [15000.0, 30000.0, 44992.0]
    assert place.overflows == [0, 0, 0]


def test_values_that_do_not_grow_are_no_warning() -> None:
    run, found = half_of(Scaled(1.0), growing, batches=3)
    assert (run.status, found) == ("ok", [])
    run, [note] = half_of(Scaled(3e4), lambda batch=0: growing().roll(batch), batches=3)
    assert note.severity == "note"
    assert note.message.endswith("; the worst of 3 batches")


def test_values_that_vanish_from_batch_to_batch_are_a_warning() -> None:
    class Vanishing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.sign() * torch.exp(x.abs().amax() * -6 - x.abs())

    _, [warning] = half_of(Vanishing(), growing, batches=4)
    assert warning.severity == "warning"
    assert "the share of non-zeros that become zero grows from 0 % to" in warning.message.replace("< 0.1 %", "0 %")


def test_a_run_that_fails_on_a_further_batch_is_not_ok(call: Call, tmp_path: Path) -> None:
    run, _ = half_of(Scaled(3e4), growing, batches=4)
    assert (run.status, run.failed_batch) == ("nonfinite", 2)
    assert run.batches is not None
    assert run.batches.statuses == ["ok", "ok", "nonfinite"]
    assert any(run.op_calls.introduced_inf)
    assert any(error is not None for error in run.op_calls.local_error)
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return x * 3e4 / 3e4\n"
        "model = Net()\n"
        "def inputs():\n    for batch in range(3):\n        yield torch.linspace(-1, 1, 8) * (batch + 1)\n"
    )
    assert "on batch 2: NaN or Inf in the output" in call("scan", file, *ONLY_HALF, "--batches", "3").stdout
    assert "`inputs` has no batch 3" in call("scan", file, *ONLY_HALF, "--batches", "4").stderr


def test_a_plan_must_pass_on_all_batches() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(3e4), nn.Linear(8, 8)).eval()
    result = scan(model, lambda batch=0: growing(batch) * 4, precisions="half", plan=True, batches=3)
    assert result.run("half").status != "ok"
    assert result.plan is not None
    assert result.plan.batches == 3


@pytest.mark.parametrize("isolation", ["fork", "spawn", "none"])
def test_batches_in_every_isolation(isolation: Any) -> None:
    generator = (growing(number) for number in range(5))
    count = 2 if isolation == "spawn" else 3  # each takes a fresh interpreter
    run, _ = half_of(nn.Linear(8, 8), generator, batches=count, isolation=isolation)
    assert run.batches is not None
    first = next(place for place in run.batches.places if "addmm" in place.op)
    assert len(first.largest) == count
    assert all(one < other for one, other in itertools.pairwise(first.largest))


DATA = torch.arange(1.0, 13.0).reshape(12, 1)


def generated() -> Iterator[Tensor]:
    yield from DATA.split(2)


def numbered(batch: int = 0) -> Tensor:
    return DATA.split(2)[batch]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(DATA, DATA), batch_size=2)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(generated, id="generator function"),
        pytest.param(loader, id="function of a loader"),
        pytest.param(numbered, id="function of the number"),
        pytest.param(generated(), id="generator"),
        pytest.param(loader(), id="loader"),
        pytest.param(iter(loader()), id="iterator"),
    ],
)
def test_each_batch_is_the_item_with_its_number(inputs: Any) -> None:
    target = make_target(nn.Linear(1, 1), inputs)
    for number in (1, 3):
        assert torch.equal(target.batch(number).args[0], DATA.split(2)[number])
    assert torch.equal(target.args[0], DATA[:2])


def test_a_dataset_gives_one_item_per_batch() -> None:
    target = make_target(nn.Linear(1, 1), TensorDataset(DATA, DATA))
    assert target.batch(4).args[0].tolist() == [[5.0]]
    with pytest.raises(UsageError, match="no batch 12"):
        target.batch(12)


def test_fixed_inputs_have_no_further_batch() -> None:
    with pytest.raises(UsageError, match="only one batch"):
        scan(nn.Linear(8, 8), growing(), batches=2)
    with pytest.raises(UsageError, match="batches is 0"):
        scan(nn.Linear(8, 8), growing(), batches=0)
    with pytest.raises(UsageError, match="On batch 1 of `inputs`: "):
        scan(nn.Linear(8, 8), lambda batch=0: torch.ones(4, 8 + batch), batches=2)
