"""A planted fault is attributed to the module and op that contains it."""

from __future__ import annotations

import re

import pytest
import torch
from generated import FAULTS, STEPS, Cholesky, Fault, InPlace, Norm, Project, Step, Underflow, build, inputs
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import Diagnostic, ModelInfo, Run, ScanResult

SAFE = [kind for kind in STEPS if kind.__name__ in ("Project", "Norm", "Residual", "SplitCat", "InPlace")]


def findings(model: nn.Module, precision: str, x: Tensor, without_kernel: tuple[str, ...] = ()) -> list[Diagnostic]:
    """The diagnostics of one run."""
    plain, found = run(model, (x,), precision, without_kernel=without_kernel)
    one = Run(
        precision=precision,
        device="cpu",
        status=plain.status,
        output_error=plain.output_error,
        gaps=found.gaps,
        op_calls=found.op_calls,
        tolerance=1e-2,
        complete=found.complete,
    )
    info = ModelInfo(name="Chain", parameters=1, inputs=[], modules=1, training=False)
    return diagnose(ScanResult(tool="t", target="t", model=info, environment={}, runs=[one]))


@settings(max_examples=40, deadline=None)
@given(
    before=st.lists(st.sampled_from(SAFE), min_size=1, max_size=3),
    after=st.lists(st.sampled_from(SAFE), max_size=3),
    fault=st.sampled_from(FAULTS),
    data=st.data(),
)
def test_planted_faults_are_found_in_their_module(
    before: list[type[Step]], after: list[type[Step]], fault: Fault, data: st.DataObject
) -> None:
    precision = data.draw(st.sampled_from(fault.precisions))
    model = build([*before, fault.make, *after])
    named = [d for d in findings(model, precision, inputs()) if d.code == fault.code]
    assert {d.module for d in named} == {f"steps.{len(before)}"}, named
    assert all(d.source and "generated.py:" in d.source for d in named)


@pytest.mark.parametrize("kinds", [[Project], [Project, Project], [*SAFE]])
def test_correct_models_have_no_errors(kinds: list[type[Step]]) -> None:
    for precision in ("half", "bfloat16"):
        errors = [d for d in findings(build(kinds), precision, inputs()) if d.severity == "error"]
        assert not errors


def test_a_withheld_kernel_is_reported_as_missing() -> None:
    found = findings(build([Project, Cholesky]), "half", inputs(), ("aten.addmm:half",))
    assert [(d.code, d.op, d.module) for d in found if d.severity == "error"] == [
        ("LP101", "aten.addmm.default", "steps.0.linear"),
        ("LP101", "aten.linalg_cholesky_ex.default", "steps.1"),
    ]


class SpectralNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(8, 8))
        self.second = spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_spectral_norm_without_a_dot_kernel() -> None:
    torch.manual_seed(0)
    found = findings(SpectralNet().eval(), "half", inputs(), ("aten.dot:half",))
    missing = [d for d in found if d.code == "LP101"]
    assert {(d.op, d.module) for d in missing} == {("aten.dot.default", "first"), ("aten.dot.default", "second")}
    assert all(d.source and "test_faults.py:" in d.source for d in missing)
    assert not [
        d for d in findings(SpectralNet().eval(), "autocast-fp16", inputs(), ("aten.dot:half",)) if d.code == "LP101"
    ]


def test_weights_that_do_not_fit_are_reported_as_cast_weight() -> None:
    model = build([Project, Project])
    with torch.no_grad():
        model.steps[1].linear.weight[0, 0] = 1e6
    found = [d for d in findings(model, "half", inputs()) if d.code == "LP201"]
    assert [(d.module, d.op) for d in found] == [("steps.1.linear", "cast weight")]


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(x > 0, -1e9).softmax(-1)


def test_a_constant_that_does_not_fit() -> None:
    found = findings(Constant(), "half", inputs())
    assert [d.code for d in found if d.severity == "error"] == ["LP204"]
    assert "finfo" in (found[0].help or "")


class Cancels(nn.Module):
    """A difference of nearly equal numbers: exact itself, it magnifies earlier rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        big = 1000 + x * self.scale
        return big - 1000


def test_an_error_amplifier_is_not_reported_as_a_bad_kernel() -> None:
    found = findings(Cancels(), "bfloat16", inputs())
    assert [(d.code, d.op) for d in found if d.code.startswith("LP30") and d.op] == [("LP303", "aten.sub.Tensor")]


def test_zeros_after_an_underflow_are_not_another_underflow() -> None:
    """After an underflow all values are equal, and a normalization turns them into zeros."""
    for kinds in ([InPlace, Norm, Norm], [Norm, Norm]):
        found = findings(build([Project, Underflow, *kinds]), "half", inputs())
        assert {d.module for d in found if d.code == "LP202"} == {"steps.1"}


def test_decisions_that_flip() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale * 1e-3 + 1).argmax(-1).float() * self.scale[0]

    flips = [d for d in findings(Decides(), "bfloat16", torch.randn(64, 8)) if d.code == "LP304"]
    assert [d.op for d in flips] == ["aten.argmax.default"]
    found = re.fullmatch(r"argmax picked a different element than fp32 (\d+) times \((\S+) %\)", flips[0].message)
    assert found is not None
    assert float(found[2]) == pytest.approx(100 * int(found[1]) / 64, abs=0.05)


@pytest.mark.parametrize(
    ("op", "shape", "flips", "message"),
    [
        (
            "aten.max_pool2d_with_indices.default",
            "2×1000×100",
            400,
            "picked a different element than fp32 400 times (0.2 %)",
        ),
        ("aten.argmax.default", "", 1, "picked a different element than fp32 1 time"),
        ("aten.lt.Tensor", "4×5000", 1, "differs from fp32 in 1 element (< 0.1 %)"),
        ("aten.nonzero.default", "20×2", 4, "differs from fp32 in 4 elements"),
    ],
)
def test_a_decision_flip_names_op_count_and_share(op: str, shape: str, flips: int, message: str) -> None:
    run = Run(precision="half", device="cpu", status="ok", op_calls=to_columns([OpCall(op, shape=shape, flips=flips)]))
    info = ModelInfo(name="Chain", parameters=1, inputs=[], modules=1, training=False)
    [found] = diagnose(ScanResult(tool="t", target="t", model=info, environment={}, runs=[run]), select=["LP304"])
    assert found.message == f"{op.split('.')[1]} {message}"
