"""Plans of quantized rows: the layers that must stay in 16 bits, and no other."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from test_formats import example, info, uncompiled  # noqa: F401 - a fixture
from torch import Tensor, nn

from lowprec_check import UsageError, apply, scan
from lowprec_check.analysis.snippet import snippet
from lowprec_check.core.feature_hooks import TimedRuns
from lowprec_check.features.plan.trials import Limits, Objective, Proposal, Proposer
from lowprec_check.features.quantize import libraries
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.verdict import ErrorStats

pytestmark = pytest.mark.skipif(not libraries.torchao_fits(), reason="needs a torchao that fits this torch")


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks with a head, in one of which a channel is ``times`` larger: fp32 gives what it gave without it."""

    def __init__(self, seed: int, *planted: int, blocks: int = 3, size: int = 64, times: float = 300.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks, self.head = nn.ModuleList(Block(size) for _ in range(blocks)), nn.Linear(size, 32)
        with torch.no_grad():
            for number in planted:
                block, channel = self.blocks[number], seed % size
                block.norm.weight[channel] /= times  # type: ignore[union-attr, operator]
                block.up.weight[:, channel] *= times  # type: ignore[union-attr, index]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Runs:
    """In place of the runs of a scan: quantizes in this process, and judges against fp32."""

    def __init__(self, model: nn.Module, x: Tensor, tolerance: float) -> None:
        self.target, self.x, self.tolerance = SimpleNamespace(model=model), x, tolerance
        self.fp32 = Run(precision="fp32", device="cpu", status="ok")
        self.tried: list[tuple[str, ...]] = []

    def run(
        self, precision: str, backend: str, *, keep_fp32: tuple[str, ...] = (), measured: bool = False, **_: Any
    ) -> Run:
        low, x = copy.deepcopy(self.target.model), self.x
        if precision == "bfloat16":
            low, x = low.bfloat16(), x.bfloat16()
        call = example(x, precision, keep=keep_fp32, is_trial=not measured)
        self.tried.append(keep_fp32)
        with torch.no_grad():
            prepared = BACKENDS.get(backend).prepare(low, call)
            expected, found = self.target.model(self.x), prepared(x).float()
            layers = [] if keep_fp32 else BACKENDS.get(backend).layer_errors(prepared, low, call)
        error = float((found - expected).norm() / expected.norm())
        stats = ErrorStats(rel_l2=error, max_abs=error, cosine=None, sqnr_db=None)
        status = "ok" if error <= self.tolerance else "inaccurate"
        about: dict[str, Any] = {"precision": precision, "backend": backend, "device": "cpu", "status": status}
        return Run(
            output_error=stats, tolerance=self.tolerance, layer_errors=layers, keep_fp32=list(keep_fp32), **about
        )

    def time(self, runs: list[Run]) -> TimedRuns:
        return TimedRuns([self.fp32, *runs], None)

    def show_step(self, *_: Any) -> None:
        """Nothing is shown."""


def plan(runs: Any, backend: str, precision: str = "bfloat16") -> Proposal:
    of_row = runs.run(precision, backend, measured=True)
    return Proposer([runs], Objective(runs.fp32), Limits(), explains=True).propose([of_row])


@pytest.mark.parametrize("backend", ["int8-weight-only", "int8-dynamic"])
@pytest.mark.parametrize("seed", range(6))
def test_planted_outliers_are_the_layers_that_stay(seed: int, backend: str) -> None:
    blocks = 2 + seed % 3
    planted = sorted({seed % blocks, (seed // 2) % blocks})
    runs = Runs(Net(seed, *planted, blocks=blocks), torch.randn(16, 64), tolerance=0.03)
    found = plan(runs, backend)
    assert found.run is not None
    assert found.run.keep_fp32 == [f"blocks.{number}.up" for number in planted]
    assert found.minimal
    assert found.run.output_error is not None
    assert found.run.output_error.rel_l2 is not None
    assert found.run.output_error.rel_l2 <= 0.03
    for name in found.run.keep_fp32:  # each was tried without it
        assert tuple(other for other in found.run.keep_fp32 if other != name) in runs.tried


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("uncompiled")
def test_plans_of_static_int8_keep_the_planted_layer_in_fp32(seed: int) -> None:
    runs = Runs(Net(seed, 1, blocks=2), torch.randn(16, 64), tolerance=0.03)
    found = plan(runs, "int8", "fp32")
    assert found.run is not None
    assert found.run.keep_fp32 == ["blocks.1.up"]
    assert found.minimal


@pytest.mark.usefixtures("uncompiled")
def test_the_code_of_a_plan_of_static_int8_gives_the_row() -> None:
    model, x = Net(0, 1, blocks=2), torch.randn(16, 64)
    about, key = info(model, x), RunKey("fp32", "int8", "cpu")
    values: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    exec(snippet(key, about, ["blocks.1.up"]), values)
    with torch.no_grad():
        prepared = BACKENDS.get("int8").prepare(model, example(x, "fp32", keep=("blocks.1.up",), is_trial=True))
        assert torch.equal(values["output"], prepared(x))
    assert not torch.equal(values["output"], BACKENDS.get("int8").prepare(model, example(x, "fp32"))(x))


def test_a_plan_is_as_small_as_any_single_layer_shows() -> None:
    """No layer stands out: the tolerance alone decides how many stay, and none of them can return."""
    runs = Runs(Net(5, blocks=3), torch.randn(16, 64), tolerance=0.11)
    found = plan(runs, "mxfp4")
    assert found.run is not None
    assert 0 < len(found.run.keep_fp32) < 7
    assert found.minimal
    for name in found.run.keep_fp32:
        others = tuple(other for other in found.run.keep_fp32 if other != name)
        assert runs.run("bfloat16", "mxfp4", keep_fp32=others).status == "inaccurate"


def test_there_is_no_plan_if_16_bits_are_not_enough() -> None:
    found = plan(Runs(Net(1), torch.randn(16, 64), tolerance=1e-6), "int8-dynamic")
    assert found.run is None
    assert found.attempt.outcome.startswith("no plan: fails even with every submodule in bf16")


@pytest.mark.usefixtures("uncompiled")
def test_a_scan_finds_the_plan_and_its_code_gives_the_row() -> None:
    model, x = Net(0, 1), torch.randn(16, 64)
    options: dict[str, Any] = {"precisions": "bf16", "times": "off", "further_inputs": 0, "plan": True}
    options |= {"budget_error": "off", "errors": "accumulated"}
    result = scan(model, x, backends="eager,int8-dynamic", tolerance=0.03, **options)
    row = result.runs[-1]
    assert (row.base, row.backend, row.status, row.keep_fp32) == ("bfloat16", "int8-dynamic", "ok", ["blocks.1.up"])
    assert result.plan is not None
    assert result.plan.blame[0].why.startswith("has an error of ")
    values: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    exec(result.plan.code, values)
    with torch.no_grad():
        expected = model(x)
    error = float((values["output"].float() - expected).norm() / expected.norm())
    assert error == pytest.approx(row.rel_l2, rel=1e-4)
    texts = [said.text for said in result.statements]
    assert any("with blocks.1.up in bf16 (the plan) it passes" in text for text in texts)
    with pytest.raises(UsageError, match="int8-dynamic, which quantizes the model"):
        apply(copy.deepcopy(model), result.plan)


class Cosine(nn.Linear):
    """Reads the norm of its weight, which torchao's tensors do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) / self.weight.norm()


def test_a_layer_that_fails_if_it_is_quantized_is_named_and_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Cosine(64, 64)).eval()
    options: dict[str, Any] = {"precisions": "bf16", "times": "off", "further_inputs": 0, "plan": True}
    options |= {"budget_error": "off", "errors": "accumulated"}
    result = scan(model, torch.randn(8, 64), backends="eager,mxfp8", **options)
    row, planned = result.runs[-2:]
    assert row.status == "error"
    assert row.exception is not None
    assert row.exception.module == "1"
    assert [layer.local is None for layer in row.layer_errors] == [False, True]
    assert (planned.status, planned.keep_fp32) == ("ok", ["1"])


def test_a_plan_that_fails_when_it_is_compiled_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(Net(0, 1), torch.randn(16, 64), tolerance=0.03)
    tried = runs.run

    def run(*key: str, **options: Any) -> Run:
        done = tried(*key, **options)
        if options.get("measured"):
            return msgspec.structs.replace(done, status="inaccurate")
        return done

    monkeypatch.setattr(runs, "run", run)
    found = plan(runs, "int8-dynamic")
    assert found.run is None
    assert found.attempt.outcome.startswith(
        "no plan: passes with blocks.1.up in bf16 if it is not compiled; compiled it"
    )
