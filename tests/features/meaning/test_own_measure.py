"""A file's own ``judge(output, reference)`` decides; its limits are set in the file or by option."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowprec_check import scan
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.output_measures import parse_limits, structured
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.target import WithLoss, loss_kind
from lowprec_check.errors import UsageError
from lowprec_check.schema.verdict import ErrorStats
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
    status, error = compared(lambda output, reference: {"x": output["quiet"]})
    assert (status, error.meaning.cannot_tell) == ("inaccurate", "the measure fails: KeyError: 'quiet'")
    with pytest.raises(UsageError, match="returns no number 'loudness'"):
        compared(apart, "loudness=1")
    _, error = compared(lambda *_: {"x": (1.0, float("nan"))})
    assert error.meaning.cannot_tell == "its limit of x is not finite"
    # As of a function of another script that is called so
    _, error = compared(lambda *_: 1.0)
    assert error.meaning.cannot_tell == "it returns float, not a dict of numbers"
    _, error = compared(lambda *_: {"x": (float("nan"), 1.0)})
    assert error.meaning.cannot_tell == "it returns NaN or no x for fp32 itself"


def by_noise(value: Callable[[float], float], limit: float) -> Callable[..., Any]:
    """A judge of the largest difference from fp32's."""
    return lambda output, reference: {"x": (value(float((output.loud[0] - reference.loud[0]).abs().max())), limit)}


@pytest.mark.parametrize(
    ("value", "limit", "factor", "expected"),
    [
        # Best at −∞ or ∞
        (lambda noise: 20 * math.log10(noise) if noise else -math.inf, -20.0, 1.02, "ok"),  # −28 dB
        (lambda noise: 20 * math.log10(noise) if noise else -math.inf, -30.0, 1.02, "inaccurate"),
        (lambda noise: -20 * math.log10(noise) if noise else math.inf, -8.0, 2.0, "ok"),  # −6 dB
        (lambda noise: -20 * math.log10(noise) if noise else math.inf, -5.0, 2.0, "inaccurate"),
        (lambda noise: 4e5 / noise if noise else math.inf, 1e6, 1.02, "ok"),
        (lambda noise: 4e3 / noise if noise else math.inf, 1e6, 1.02, "inaccurate"),
        (lambda noise: -math.inf if noise else math.inf, -5.0, 1.02, "inaccurate"),
        # Further from fp32 than figures are saved
        (lambda noise: 1e12 * noise, 3e10, 1.02, "inaccurate"),
        (lambda noise: 1e12 * noise, 5e10, 1.02, "ok"),
        # At fp32's own
        (lambda noise: noise, 0.0, 1.02, "inaccurate"),
        (lambda noise: -noise, 0.0, 1.02, "inaccurate"),
        (lambda noise: noise, 0.0, 1.0, "ok"),
        (lambda noise: noise, -1.0, 1.02, "ok"),
        (lambda noise: math.nan if noise else 0.0, 1.0, 1.02, "inaccurate"),
    ],
)
def test_a_value_passes_up_to_its_limit(value: Any, limit: float, factor: float, expected: str) -> None:
    status, error = compared(by_noise(value, limit), factor=factor)
    assert status == expected
    assert (error.by_meaning.used <= 1) == (expected == "ok")
    assert msgspec.json.decode(msgspec.json.encode(error), type=ErrorStats) == error


def test_what_passes_is_said() -> None:
    assert compared(apart, "apart=0.05")[1].by_meaning.text == "apart 0.04 (at most 0.05 passes), kept 0.96"
    assert compared(apart, "apart=0")[1].by_meaning.text == "apart 0.04; only 0 would pass"
    assert compared(apart, "apart=0.05")[1].by_meaning.why == "your function"


@pytest.mark.parametrize("number", [1.0, (1.0, 0.5)])
def test_a_number_that_an_output_lacks_fails(number: Any) -> None:
    def judge(output: Any, reference: Any) -> dict[str, Any]:
        return {"x": number} if bool((output.loud[0] == reference.loud[0]).all()) else {}

    status, error = compared(judge, *["x=0.5"] * isinstance(number, float))
    assert (status, error.by_meaning.used) == ("inaccurate", 1e9)


def test_a_function_may_work_in_place_and_call_its_numbers_as_it_likes() -> None:
    def judge(output: Any, reference: Any) -> dict[str, Any]:
        output.loud[0].sub_(reference.loud[0])
        reference.loud[0].zero_()
        return {"a{b}": (float(output.loud[0].abs().max()), 0.05)}

    status, error = compared(judge)
    assert (status, error.rel_l2) == ("ok", pytest.approx(0.02))
    assert error.by_meaning.text == "a{b} 0.04 (at most 0.05 passes)"


def test_tensors_are_given_as_the_output_has_them() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert structured({"": a}) is a
    assert structured({"0": a, "2": b}) == (a, None, b)
    nested = structured({"0.boxes": a, "1.boxes": b})
    assert nested[1].boxes is b
    assert nested[0]["boxes"] is a
    named = structured({"items": a, "get": b})
    assert (named.items, named.get, hasattr(named, "other")) == (a, b, False)
    copied = copy.deepcopy(structured({"a.x": a}))
    copied.a.y = b
    assert (copied["a"]["y"], float(copied.a.x)) == (b, 1.0)


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


def test_numbers_of_a_file_may_be_called_as_measures_and_with_dots(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    limits = {"apart": 0.5, "boxes": 1, "apart.max": 2.0, "judge.least": -1}
    path.write_text(FILE.replace('{"apart": LIMIT}', str(limits)))
    expected = (("judge.apart", 0.5), ("judge.boxes", 1.0), ("judge.apart.max", 2.0), ("judge.least", -1.0))
    assert load_target(str(path)).limits == expected
    path.write_text(FILE.replace("LIMIT", "float('nan')"))
    with pytest.raises(UsageError, match="is no limit of a figure"):
        load_target(str(path))


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

    class Focal:
        def __init__(self, criterion: Any = None) -> None:
            self.criterion = criterion

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return self.criterion(output, target)

        def by_method(self, output: Tensor, target: Tensor) -> Tensor:
            return functional.binary_cross_entropy_with_logits(output, target)

    class Smoothed(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(output, target, label_smoothing=0.1)

    def unset(output: Tensor, target: Tensor) -> Tensor:
        return later(output, target)

    expected = {
        Focal(): "other",
        functools.partial(Focal(), target=1): "other",
        Focal(criterion): "classes",
        functools.partial(Focal(criterion), target=1): "classes",
        Focal().by_method: "binary",
        Smoothed(): "classes",
        torch.no_grad()(by_module): "classes",
        unset: "other",
        nn.L1Loss(): "other",
        torch.binary_cross_entropy_with_logits: "binary",
    }
    assert {loss: loss_kind(loss) for loss in expected} == expected
    later = functional.l1_loss
    assert loss_kind(unset) == "other"
