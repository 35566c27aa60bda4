"""Which outputs a run cannot be judged by: of saved results, and of scans of models whose output vanishes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from shared_result import shared_result
from torch import nn

from lowprec_check.analysis.run_summary import degenerate_output
from lowprec_check.analysis.statements.status import why
from lowprec_check.core.scan import scan
from lowprec_check.schema.measures import ErrorBudget
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(16, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.factor


def scanned(factor: float) -> ScanResult:
    torch.manual_seed(0)
    options: dict[str, Any] = {"errors": "none", "plan": False, "times": "off", "isolation": "none"}
    return scan(Scaled(factor).eval(), torch.randn(4, 16), precisions=["half", "bfloat16"], **options)


def test_fp16_flushes_what_bf16_holds() -> None:
    result = scanned(1e-10)
    half, bf16 = result.run("half"), result.run("bfloat16")
    assert (half.status, bf16.status) == ("inaccurate", "ok")
    assert half.output_rms == pytest.approx(result.run("fp32").output_rms)
    assert 1e-12 < (half.output_rms or 0) < 1e-9
    assert "fp16 flushes it to zero" in (degenerate_output(half, result.runs) or "")
    assert degenerate_output(bf16, result.runs) is None


def test_a_usual_output_is_judged() -> None:
    result = scanned(1.0)
    assert 0.1 < (result.run("half").output_rms or 0) < 10
    assert [degenerate_output(run, result.runs) for run in result.runs] == [None] * 3


def test_an_output_of_zeros_is_no_success() -> None:
    result = scanned(0.0)
    for name in ("half", "bfloat16"):
        assert (degenerate_output(result.run(name), result.runs) or "").startswith("the fp32 output is all zeros")


def test_the_tensor_with_the_error_counts() -> None:
    class Two(Scaled):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
            return {"mean": self.fc(x), "more": [self.fc(x) * 1e-10, torch.arange(3)]}

    torch.manual_seed(0)
    result = scan(
        Two(1.0).eval(),
        torch.randn(4, 16),
        precisions=["half", "bfloat16"],
        errors="none",
        plan=False,
        times="off",
        isolation="none",
        tolerance=1e-9,
    )
    assert (result.run("half").output_rms or 1) < 1e-9 < 0.1 < (result.run("fp32").output_rms or 0)
    half, bf16 = result.run("half"), result.run("bfloat16")
    assert (degenerate_output(half, result.runs) or "").startswith("output more.0 is tiny (rms ")
    assert half.compared_output == "more.0"
    assert "flushes" in (degenerate_output(half, result.runs) or "")
    assert f"of output {bf16.compared_output}, over the tolerance" in why(bf16).text
    messages = [finding.message for finding in result.diagnostics if finding.code == "LP301"]
    assert any(f"of output {bf16.compared_output} exceeds the tolerance" in message for message in messages)


def half_run(**changes: Any) -> tuple[Run, ScanResult]:
    result = shared_result()
    run = msgspec.structs.replace(result.run("half"), **{"budget": None, "status": "inaccurate"} | changes)
    return run, result


def error(rel_l2: float) -> ErrorStats:
    return ErrorStats(rel_l2=rel_l2, max_abs=None, cosine=None, sqnr_db=None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"output_rms": 1e-9}, "the output is tiny (rms 1e-09): fp16 flushes it to zero"),
        ({"output_rms": 1e-6}, "the output is tiny (rms 1e-06): fp16 has few digits for it"),
        ({"budget": ErrorBudget(output_rms=1e-9)}, "the output is tiny (rms 1e-09): fp16 flushes it to zero"),
        ({"output_rms": 1e-9, "output_error": error(1.0)}, "the output is tiny (rms 1e-09): fp16 flushes it to zero"),
        (
            {"output_rms": 5e-8, "output_error": error(0.3)},
            "the output is tiny (rms 5e-08): fp16 has few digits for it",
        ),
        ({"output_rms": 0.0}, "a tensor of the fp32 output is all zeros"),
        ({"output_rms": 1e-4}, None),
        ({"output_rms": None}, None),
        ({"output_rms": 1e-9, "status": "ok"}, None),  # its error was within the tolerance all the same
        ({"output_rms": 1e-9, "status": "nonfinite"}, None),
        ({"output_rms": 1e-9, "status": "error"}, None),
        ({"output_rms": 1e-9, "precision": "bfloat16"}, None),
    ],
)
def test_saved_runs(changes: dict[str, Any], why: str | None) -> None:
    run, result = half_run(**changes)
    assert degenerate_output(run, result.runs) == why


@pytest.mark.parametrize("status", ["ok", "unjudged", "inaccurate"])
def test_zeros_in_fp32_leave_nothing_to_judge(status: str) -> None:
    run, result = half_run(status=status)
    zero = [msgspec.structs.replace(each, output_is_zero=each.is_reference) for each in result.runs]
    result = msgspec.structs.replace(result, runs=zero)
    assert degenerate_output(run, result.runs) == "the fp32 output is all zeros"
    by_module = msgspec.structs.replace(run, compared_module="encoder")
    assert degenerate_output(by_module, result.runs) == "the fp32 output is all zeros; the error is that of encoder"
    assert degenerate_output(msgspec.structs.replace(run, status="nonfinite"), result.runs) is None
