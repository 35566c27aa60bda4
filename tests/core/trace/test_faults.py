"""A planted fault is attributed to the module and op that contains it."""

from __future__ import annotations

import re

import pytest
import torch
from generated import FAULTS, STEPS, Cholesky, Fault, InPlace, Norm, Project, Step, Underflow, build, inputs
from helpers import CPU, DEFAULT, begun, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.instrument import fp32_state, run_instrumented
from lowprec_check.core.trace.observers import OpObserver
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.precisions import PRECISIONS
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


@settings(max_examples=25, deadline=None)
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
    [error] = [d for d in findings(Constant(), "half", inputs()) if d.severity == "error"]
    assert error.code == "LP204"
    assert "finfo" in (error.help or "")


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
    found = re.match(r"argmax picked a different element than fp32 (\d+) of 64 times \((\S+) %\)", flips[0].message)
    assert found is not None
    assert float(found[2]) == pytest.approx(100 * int(found[1]) / 64, abs=0.05)


def of_rows(*rows: OpCall, status: str = "inaccurate") -> list[Diagnostic]:
    """The findings about choices in a run with these calls."""
    run = Run(precision="half", device="cpu", status=status, op_calls=to_columns(rows))  # type: ignore[arg-type]
    info = ModelInfo(name="Chain", parameters=1, inputs=[], modules=1, training=False)
    return diagnose(ScanResult(tool="t", target="t", model=info, environment={}, runs=[run]), select=["LP304"])


@pytest.mark.parametrize(
    ("op", "choices", "flips", "message"),
    [
        ("aten.sort.default", 200_704, 400, "picked a different element than fp32 400 of 200,704 times (0.2 %)"),
        ("aten.argmax.default", 0, 1, "picked a different element than fp32 1 time"),  # of an older file
        ("aten.lt.Tensor", 20_000, 1, "differs from fp32 in 1 of 20,000 elements (< 0.1 %)"),
        ("aten.nonzero.default", 40, 4, "differs from fp32 in 4 of 40 elements (10 %)"),
    ],
)
def test_a_decision_flip_names_op_count_and_share(op: str, choices: int, flips: int, message: str) -> None:
    [found] = of_rows(OpCall(op, flips=flips, compared_choices=choices))
    assert found.message == f"{op.split('.')[1]} {message}"
    assert found.help == "compute its inputs in fp32"
    [found] = of_rows(OpCall(op, flips=flips, compared_choices=choices), status="ok")
    assert (found.message, found.help) == (f"{op.split('.')[1]} {message}; the output passes", None)


def test_pooling_indices_and_pivots_are_one_note_for_the_model() -> None:
    ops = [
        "aten.max_pool2d_with_indices.default",
        "aten.adaptive_max_pool3d.default",
        "aten.linalg_lu_factor_ex.default",
    ]
    ops += ["aten._linalg_solve_ex.default", "aten._linalg_det.default", "aten.fractional_max_pool2d.default"]
    rows = [OpCall(op, op, f"net.py:{n}", flips=n, compared_choices=100) for n, op in enumerate(ops)]
    [found] = of_rows(*rows)
    assert (found.severity, found.calls, found.help) == ("note", 5, None)
    assert (found.module, found.op, found.source) == ("", ops[0], "net.py:0")
    assert found.message == "pooling indices or pivots differ from fp32 in 15 of 600 elements (2.5 %)"
    others = of_rows(*rows, OpCall("aten.argmax.default", flips=1, compared_choices=2))
    assert {d.op for d in others} == {"aten.argmax.default", ops[0]}


@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_pooling_indices_and_pivots_of_a_model(precision: str) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale * 1e-3 + 1  # so close to each other that many values become equal
            pooled = nn.functional.max_pool2d(y, 2) + nn.functional.adaptive_max_pool2d(y, 16)
            return pooled + torch.linalg.lu_factor(y[0, 0].float())[1].sum()

    found = [d for d in findings(Pools(), precision, torch.randn(1, 2, 32, 32)) if d.code == "LP304"]
    assert [d.severity for d in found] == ["note"]
    counts = re.search(r"in ([\d,]+) of ([\d,]+) elements", found[0].message)
    assert counts is not None
    assert int(counts[2].replace(",", "")) == 2 * 2 * 16 * 16 + 32 + 1  # the pivots and whether the factors exist
    assert 0 < int(counts[1].replace(",", "")) < 2 * 2 * 16 * 16 + 32


class Breaks(OpObserver):
    """Raises at each call."""

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        raise ValueError("the observer is broken")


def test_a_fault_of_an_observer_costs_no_row_and_no_other_observer() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    with prepared(model, PRECISIONS.get("bfloat16"), CPU) as ready:
        options = DEFAULT._replace(observers=(lambda _: Breaks(), *DEFAULT.observers))
        broken = run_instrumented(begun("bfloat16"), ready, (x,), {}, fp32_state(model), options)
        sound = run_instrumented(begun("bfloat16"), ready, (x,), {}, fp32_state(model), DEFAULT)
    assert all(fault.endswith("the observer is broken") for fault in broken.faults)
    assert broken.faults
    assert broken.run.op_calls.op == sound.run.op_calls.op
    assert broken.run.magnitudes == sound.run.magnitudes
