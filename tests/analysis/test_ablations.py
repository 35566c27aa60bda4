"""Ablations of failing runs: which modules are blamed, and whether a plain model with these in fp32 agrees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowprec_check
from lowprec_check.analysis.error_shares import blamed_modules, is_confirmed, is_disproved
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.schema.measures import Ablation
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

LAYERS = 4


class CancellingNorm(nn.Module):
    """The variance as a difference of two large numbers, which 16 bits lose."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.abs() + 1e-5)


class OverflowingNorm(nn.Module):
    """The square of large numbers exceeds fp16's range; its root does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * ((x * 3000).square().mean(-1, keepdim=True).sqrt() / 3000)


def quick_scan(model: nn.Module, x: Tensor, **options: Any) -> ScanResult:
    return lowprec_check.scan(model, x, times="off", plan=False, explain="all", **options)


def chain(bad: nn.Module, at: int, shift: float) -> nn.Module:
    """Linear layers, with ``bad`` after layer ``at``, whose bias is raised by ``shift``."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        linear = nn.Linear(32, 32)
        layers.append(linear)
        if index == at:
            linear.bias.data += shift
            layers.append(bad)
    return nn.Sequential(*layers).eval()


def in_fp32(module: nn.Module) -> nn.Module:
    """``module`` on fp32 inputs, with its output in half: by hand."""

    class Widened(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return module(x.float()).half()

    return Widened()


def error_by_hand(model: Any, keep: int, x: Tensor) -> float:
    """rel_l2 of the half model whose layer ``keep`` is in fp32."""
    with torch.no_grad():
        expected = model(x)
        low = copy.deepcopy(model).half()
        low[keep] = in_fp32(copy.deepcopy(model[keep]))
        found = low(x.half()).float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("at", [0, 2])
def test_the_module_that_is_first_over_the_tolerance_is_kept_in_fp32(at: int) -> None:
    model, x = chain(CancellingNorm(), at, 30.0), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    run = quick_scan(model, x, precisions=["half"]).run("half")
    assert run.status == "inaccurate"
    assert run.ablation.keep_fp32 == [str(at + 1)]
    assert run.ablation.rel_l2 == pytest.approx(error_by_hand(model, at + 1, x), rel=1e-3)
    assert run.ablation.rel_l2 < run.output_error.rel_l2 / 2
    assert is_confirmed(run)


@pytest.mark.parametrize("at", [0, 3])
def test_the_module_that_overflows_is_kept_in_fp32(at: int) -> None:
    model, x = chain(OverflowingNorm(), at, 1.0), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    run = quick_scan(model, x, precisions=["half"]).run("half")
    assert run.ablation.keep_fp32 == [str(at + 1)]
    assert (run.ablation.blamed_for, run.ablation.status) == ("nonfinite", "ok")
    assert run.ablation.rel_l2 == pytest.approx(error_by_hand(model, at + 1, x), rel=1e-3)
    assert ablation_text(run).endswith("and it passes")


class NearlyEqual(nn.Module):
    """The difference of two layers that are nearly the same, and round alike."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight.data.copy_(self.one.weight + 1e-5 * torch.randn(64, 64))
        self.other.bias.data.copy_(self.one.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.other(x)


def test_two_modules_whose_errors_cancel_are_kept_in_fp32_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), NearlyEqual(), nn.Linear(64, 64, bias=False)).eval()
    run = quick_scan(model, torch.randn(32, 64), precisions=["autocast-bf16"]).run("autocast-bf16")
    kept = set(run.ablation.keep_fp32)
    assert kept in ({"2"}, {"2.one", "2.other"})
    assert (run.status, run.ablation.status) == ("inaccurate", "ok")


@pytest.mark.parametrize("tolerance", [None, 1e-9])
def test_the_share_of_each_module_is_measured(tolerance: float | None) -> None:
    model, x = chain(nn.Tanh(), 1, 1.0), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    run = quick_scan(model, x, precisions=["half"], tolerance=tolerance).run("half")
    assert run.status == ("ok" if tolerance is None else "inaccurate")
    measured = {int(its.module): its.measured for its in run.budget.modules if its.measured is not None}
    assert len(measured) >= 3
    for layer, share in measured.items():
        left = error_by_hand(model, layer, x) / run.output_error.rel_l2
        assert share == pytest.approx(1.0 - left**2, abs=1e-3)


def test_a_module_that_two_others_contain_is_measured_once_for_all_three() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(32, 32))), nn.Linear(32, 32)).eval()
    found = quick_scan(model, torch.randn(16, 32), precisions=["half"]).run("half").budget.modules
    measured = {its.module: its.measured for its in found}
    assert measured["0"] is not None
    assert measured["0"] == measured["0.0"] == measured["0.0.0"] != measured["1"]


def test_no_share_of_a_model_that_draws_random_numbers_is_measured() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32)).train()
    run = quick_scan(model, torch.randn(16, 32), precisions=["autocast-bf16"]).run("autocast-bf16")
    assert run.random
    assert [its.measured for its in run.budget.modules] == [None] * len(run.budget.modules) != []


def test_what_did_not_help_is_not_advised() -> None:
    class Late(nn.Module):
        """The result of ``large`` does not fit fp16, so that it is Inf also if only ``large`` is in fp32."""

        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(32, 32), nn.Linear(32, 32)
            nn.init.constant_(self.large.bias, 1e5)

        def forward(self, x: Tensor) -> Tensor:
            return self.small(self.large(x) * 1e-5)

    result = quick_scan(Late().eval(), torch.randn(16, 32), precisions=["half"])
    run = result.run("half")
    assert (run.status, run.ablation.status, run.ablation.keep_fp32) == ("nonfinite", "nonfinite", ["large"])
    found = [each for each in result.diagnostics if each.code.startswith("LP20") and each.module == "large"]
    assert any("with large in fp32 the output still has NaN or Inf" in each.message for each in found)
    assert [each.help for each in found if each.help] == []


def test_a_run_that_passes_or_lacks_a_kernel_has_no_ablation() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x @ x.T + 8 * torch.eye(8, dtype=x.dtype))

    result = quick_scan(Inverse(), torch.randn(8, 8), precisions=["bfloat16", "autocast-bf16"])
    assert result.run("bfloat16").status == "error"
    assert [run.ablation for run in result.runs] == [None] * 3


def test_the_largest_shares_are_blamed_and_predict_what_is_left() -> None:
    class Scaled(nn.Module):
        """Most of the error is that of one layer: the others hardly reach the output."""

        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) + 1e-3 * self.small(x)

    torch.manual_seed(0)
    run = quick_scan(Scaled().eval(), torch.randn(8, 64), precisions=["autocast-bf16"], tolerance=1e-6).run(
        "autocast-bf16"
    )
    assert run.status == "inaccurate"
    assert run.ablation.blamed_for == "share"
    assert run.ablation.keep_fp32 == ["large"]
    assert run.ablation.predicted < run.output_error.rel_l2 / 2
    assert run.ablation.rel_l2 < run.output_error.rel_l2 / 2


def ablation_text(run: Run) -> str:
    """What is said of the ablation of ``run``."""
    reference = Run(precision="fp32", device="cpu", status="ok")
    model = ModelInfo(name="Net", parameters=1, inputs=[], modules=1, training=False)
    result = ScanResult(tool="t", target="t", model=model, environment={}, runs=[reference, run])
    return next(found.text for found in statements(result) if found.kind == "ablation")


def test_what_an_ablation_showed_is_told_whether_it_helped_or_not() -> None:
    def run(before: float | None, status: Any, after: float | None) -> Run:
        error = ErrorStats(rel_l2=before, max_abs=1.0, cosine=None, sqnr_db=None)
        ablation = Ablation(keep_fp32=["a", "b"], blamed_for="share", status=status, rel_l2=after)
        kind: Any = "nonfinite" if before is None else "inaccurate"
        return Run(precision="half", device="cpu", status=kind, output_error=error, ablation=ablation)

    helped = run(0.5, "ok", 1e-3)
    assert ablation_text(helped) == "with a, b in fp32 the error is 1.0e-03 instead of 5.0e-01 and it passes"
    assert is_confirmed(helped)
    assert not is_confirmed(run(0.5, "inaccurate", 0.4))
    assert not is_disproved(run(0.5, "inaccurate", 0.4))
    assert is_disproved(run(0.5, "inaccurate", 0.49))
    assert "does not help: the error is 4.9e-01 instead of 5.0e-01" in ablation_text(run(0.5, "inaccurate", 0.49))
    assert is_confirmed(run(None, "inaccurate", 0.4))
    assert ablation_text(run(None, "nonfinite", None)).endswith("the output has NaN or Inf")
    assert ablation_text(run(0.5, "crashed", None)) == "with a, b in fp32 the run ends as crashed"
    assert blamed_modules(run(0.5, "ok", 1e-3)) is None  # nothing is known of its ops


class HiddenInf(nn.Module):
    """A sum of squares that becomes Inf in fp16: its ``rsqrt`` is 0, so that no Inf reaches the output."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * 300).square().mean(-1, keepdim=True) + 1e-6)


def test_values_that_spoil_fp32_alone_are_blamed_before_the_first_op_over_the_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), CancellingNorm(), nn.Linear(32, 32), HiddenInf()).eval()
    x = torch.randn(4, 32)
    run = quick_scan(model, x, precisions=["half"]).run("half")
    assert run.status == "inaccurate"
    assert [trial.module for trial in run.range_trials if trial.status != "ok"] == ["3"]
    assert run.ablation is not None
    assert (run.ablation.keep_fp32, run.ablation.blamed_for) == (["3"], "range")
    by_hand = copy.deepcopy(model).half()
    by_hand[3] = in_fp32(copy.deepcopy(model[3]))
    with torch.no_grad():
        error = (by_hand(x.half()).float() - model(x)).norm() / model(x).norm()
    assert run.ablation.rel_l2 == pytest.approx(float(error), rel=0.05)
    assert is_confirmed(run)
