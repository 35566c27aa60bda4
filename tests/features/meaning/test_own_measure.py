"""A file's own ``judge(output, reference)`` decides; its limits are set in the file or by option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowprec_check import scan
from lowprec_check.engine.model.output_measures import parse_limits, structured
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.target import WithLoss, loss_kind
from lowprec_check.errors import UsageError
from tests.conftest import SharedScan


def compared(function: Any, *limits: str, factor: float = 1.02) -> tuple[str, Any]:
    fp32 = torch.linspace(1.0, 2.0, 10)
    form = OutputForm("dict", ("loud.0", "loud.1"), "judge", parse_limits(limits), function=function)
    reference = OutputTensors([fp32, fp32 * 2], form)
    status, outcome = judge(reference.mapped(lambda tensor: tensor * factor), reference, 1e-2)
    return status, outcome.error


def apart(output: Any, reference: Any) -> dict[str, float]:
    """How far the first is, and a share that is best at 1."""
    change = float((output.loud[0] - reference["loud"][0]).abs().max())
    return {"apart": change, "kept": 1 - change}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("apart=0.05", "ok"), ("apart=0.03", "inaccurate"), ("kept=0.95", "ok"), ("judge.kept=0.97", "inaccurate")],
)
def test_which_side_of_a_limit_passes_is_told_by_the_reference(limit: str, expected: str) -> None:
    status, error = compared(apart, limit)
    assert status == expected
    assert error.by_meaning.figures == pytest.approx({"apart": 0.04, "kept": 0.96}, abs=1e-6)
    if expected == "inaccurate":
        assert f"at {'most 0.03' if 'apart' in limit else 'least 0.97'} would pass" in error.by_meaning.text


def test_a_function_may_return_limits_and_ratios_that_are_infinite_for_fp32() -> None:
    def ratio(output: Any, reference: Any) -> dict[str, Any]:
        noise = float((output.loud[0] - reference.loud[0]).norm())
        return {"ratio": (1 / noise if noise else float("inf"), 5.0)}

    assert compared(ratio)[0] == "ok"  # 10
    assert compared(ratio, factor=1.1)[0] == "inaccurate"  # 2


def test_without_a_limit_or_with_an_exception_the_error_decides() -> None:
    status, error = compared(apart)
    assert (status, error.by_meaning) == ("inaccurate", None)
    assert "no limit is set" in error.meaning.cannot_tell
    status, error = compared(lambda output, reference: {"x": output.quiet})
    assert (status, error.meaning.cannot_tell) == ("inaccurate", "the measure fails: KeyError: 'quiet'")
    with pytest.raises(UsageError, match="returns no number 'loudness'"):
        compared(apart, "loudness=1")
    # As of a function of another script that is called so
    _, error = compared(lambda *_: 1.0)
    assert error.meaning.cannot_tell == "it returns float, not a dict of numbers"
    _, error = compared(lambda *_: {"x": (float("nan"), 1.0)})
    assert error.meaning.cannot_tell == "it returns NaN or no x for fp32 itself"


def test_tensors_are_given_as_the_output_has_them() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert structured({"": a}) is a
    assert structured({"0": a, "2": b}) == (a, None, b)
    nested = structured({"0.boxes": a, "1.boxes": b})
    assert nested[1].boxes is b
    assert nested[0]["boxes"] is a


def test_a_loss_beside_the_output_leaves_it_as_it_is() -> None:
    values, loss = torch.ones(2, 3), torch.tensor(0.5)
    assert output_tensors(WithLoss(values, loss)).form == OutputForm("Tensor", ("", "loss"))
    outputs = output_tensors(WithLoss({"logits": values}, loss))
    assert outputs.form == OutputForm("dict", ("logits", "loss"))
    form = OutputForm(
        judge="judge", function=lambda output, reference: {"kept": (float((output == reference).all()), 1)}
    )
    status, compared_ = judge(
        output_tensors(WithLoss(values, loss)), output_tensors(WithLoss(values, loss)).as_asked(form), 0.01
    )
    assert status == "ok"
    assert compared_.error.by_meaning is not None


FILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
def inputs(batch=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
def judge(output, reference):
    return {"apart": float((output.float() - reference).abs().max())}
limits = {"apart": LIMIT}
"""


@pytest.mark.parametrize(("limit", "status"), [(0.5, "ok"), (1e-6, "inaccurate")])
def test_a_scan_judges_by_the_function_of_a_file(
    tmp_path: Path, shared_scan: SharedScan, limit: float, status: str
) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("LIMIT", str(limit)))
    scanned = shared_scan(path, "--precision", "bfloat16", "--further-inputs", "2", "--times", "off")
    run = scanned.result.runs[1]
    assert run.by_meaning is not None
    assert (run.status, run.by_meaning.measure, run.tolerance) == (status, "judge", pytest.approx(limit))
    assert run.distance == pytest.approx(run.by_meaning.figures["apart"])
    trial = scanned.result.code_trial
    if status == "ok":
        assert run.further_inputs is not None
        assert run.further_inputs.statuses == {"ok": 2}
        assert (trial.status, trial.reason) == ("ran", "")


def test_scan_takes_the_function() -> None:
    model, inputs = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    quick = {"precisions": "bfloat16", "times": "off", "isolation": "none", "further_inputs": 0}

    def judge(output: Tensor, reference: Tensor) -> dict[str, float]:
        return {"apart": float((output.float() - reference).abs().max())}

    run = scan(model, inputs, judge_function=judge, limit=["apart=0.5"], **quick).runs[1]
    assert run.by_meaning is not None
    assert (run.status, run.by_meaning.measure, run.tolerance) == ("ok", "judge", 0.5)
    with pytest.raises(UsageError, match="There is no function `judge`"):
        scan(model, inputs, limit=["apart=0.5"], **quick)


def test_what_a_loss_is_for() -> None:
    criterion = nn.CrossEntropyLoss()

    def by_function(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def by_module(output: Tensor, target: Tensor) -> Tensor:
        return criterion(output, target)

    def other(output: Tensor) -> Tensor:
        return output.square().mean()

    assert [loss_kind(each) for each in (criterion, by_function, by_module, other, None)] == ["classes"] * 3 + [
        "other",
        "",
    ]
    assert loss_kind(nn.BCEWithLogitsLoss()) == "binary"
