"""Which runs are explained with errors: those that fail or are near the tolerance, and the recommended one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import runs_here, scan_here
from torch import Tensor, nn

import lowprec_check
from lowprec_check import Run, ScanResult
from lowprec_check.analysis.run_summary import passes_clearly, plan_starts
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.verdict import ErrorStats

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def run_of(status: Any, error: float, **fields: Any) -> Run:
    stats = ErrorStats(rel_l2=error, max_abs=error, cosine=None, sqnr_db=None)
    return Run(precision="half", device="cpu", status=status, tolerance=1e-2, output_error=stats, **fields)


def has_errors(run: Run) -> bool:
    return any(error is not None for error in run.op_calls.accumulated_error)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_a_run_passes_clearly_below_half_of_the_tolerance_on_all_inputs() -> None:
    assert passes_clearly(run_of("ok", 4e-3))
    assert not passes_clearly(run_of("ok", 6e-3))
    assert not passes_clearly(run_of("inaccurate", 2e-2))
    near, failed = (InputsTried(kind="drawn", tried=4, failed=count, worst=6e-3) for count in (0, 1))
    assert not passes_clearly(run_of("ok", 1e-3, further_inputs=near))
    assert not passes_clearly(run_of("ok", 1e-3, further_inputs=msgspec.structs.replace(failed, worst=1e-3)))


@pytest.mark.parametrize(
    "asked", [{"explain": "all"}, {"thorough": True}, {"batches": 2}, {"budget_error": "on"}, {"reference": "fp64"}]
)
def test_an_option_about_errors_asks_for_those_of_all_runs(asked: dict[str, Any]) -> None:
    assert ScanOptions(**asked).explains_all
    assert not ScanOptions(explain="recommended").explains_all
    assert not ScanOptions(errors="none").explains_all


def test_a_run_that_passes_clearly_has_ranges_alone_until_its_errors_are_asked_for() -> None:
    model, seen = mlp(), list[Tensor]()
    with runs_here(model, X, explain="failing") as runs:
        runs.reference()
        run = runs.run("half")
        explained = runs.explained(run)
        assert runs.explained(explained) is explained
    assert not has_errors(run)
    assert run.budget is None
    assert explained.budget is not None
    for layer in model:
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model.half()(X.half())
    largest = [row.absmax for row in run.op_calls.rows() if row.op in ("aten.addmm.default", "aten.relu.default")]
    assert largest == [float(output.abs().max()) for output in seen]
    whole = scan_here(mlp(), X, precisions=["half"], plan=False, further_inputs=0).run("half")
    assert explained.op_calls.local_error == whole.op_calls.local_error
    assert explained.op_calls.accumulated_error == whole.op_calls.accumulated_error
    assert (explained.status, explained.output_error, explained.perturbed) == (run.status, run.output_error, False)


def test_a_scan_without_errors_does_not_explain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with runs_here(mlp(), X, explain="recommended", errors="none") as runs:
        runs.reference()
        run = runs.run("half")
        monkeypatch.setattr(runs.launcher, "do", None)
        assert runs.explained(run) is run


def test_a_scan_explains_the_recommended_run_and_those_near_the_tolerance() -> None:
    options: Any = {"precisions": ["bfloat16", "autocast-bf16"], "plan": False, "further_inputs": 0}
    result = scan_here(mlp(), X, **options, explain="recommended")
    best = result.recommendation
    assert best is not None
    assert {run.precision for run in result.runs if has_errors(run)} == {best.precision}
    near = max(run.rel_l2 or 0.0 for run in result.runs) * 1.5
    result = scan_here(mlp(), X, **options, explain="failing", tolerance=near)
    assert all(run.status == "ok" for run in result.runs)
    assert any(has_errors(run) for run in result.runs)


def test_what_is_written_decides_what_is_explained(tmp_path: Path, call: Any) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\nmodel = torch.nn.Linear(8, 8).eval()\ninputs = torch.ones(2, 8)\n", encoding="utf-8")
    saved = tmp_path / "s.json"
    common = ("scan", file, "-p", "bf16,autocast-bf16", "--times", "off", "--no-plan", "--further-inputs", "0")
    for more, explained in (((), 1), (("--fail-on", "error"), 2), (("--explain", "failing"), 0)):
        call(*common, *more, "--json", saved)
        result = ScanResult.load(saved)
        assert [run.status for run in result.runs] == ["ok"] * 3
        assert sum(map(has_errors, result.runs)) == explained


def test_trials_go_on_with_a_run_whose_only_call_was_a_few_times_slower_than_fp32() -> None:
    fails = run_of("inaccurate", 2e-2, judged_by_one_call=True, one_call_ratio=3.0)
    assert plan_starts([fails], wanted=None) == [fails]
    for ratio in (30.0, None):  # older files save no ratio
        assert plan_starts([msgspec.structs.replace(fails, one_call_ratio=ratio)], wanted=None) == []


def test_gaps_and_statuses_do_not_depend_on_what_is_explained() -> None:
    class Norms(nn.Module):
        """Falls back to fp32 itself where a kernel is missing."""

        def forward(self, x: Tensor) -> Tensor:
            try:
                return torch.cdist(x, x) + x.sum()
            except RuntimeError:
                return torch.cdist(x.float(), x.float()).to(x.dtype) + x.sum()

    options: Any = {"precisions": ["half", "bfloat16"], "isolation": "none", "times": "off", "further_inputs": 0}
    some, every = (
        lowprec_check.scan(Norms(), X, **options, plan=False, explain=explain) for explain in ("failing", "all")
    )
    for run in some.runs:
        other = every.run(run.precision)
        assert (run.status, run.gaps, run.output_error) == (other.status, other.gaps, other.output_error)
        assert run.op_calls.dtypes == other.op_calls.dtypes
