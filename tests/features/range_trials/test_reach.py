"""Inf, NaN and zeros are blamed if they reach the output: their origin and their effect alone, against plain torch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEFAULT, run
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.core.judged_trials import JudgedTrials
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.range_trials.run import OutOfRange, try_places
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Diagnostic, ScanResult

Function = Callable[..., Tensor]


class Fn(nn.Module):
    """A function of its inputs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))


def nonfinite(function: Function, *inputs: Tensor, deferred: bool | None = None) -> list[OpCall]:
    """The calls that give Inf or NaN in half."""
    _, found = run(Fn(function), inputs or (x(),), "half", options=DEFAULT._replace(deferred=deferred))
    return [row for row in found.op_calls.rows() if row.gives_nonfinite]


def scanned(model: nn.Module, *inputs: Tensor) -> ScanResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scan(model, inputs, precisions=["half"], times="off", plan=False, isolation="none")


def blamed(result: ScanResult) -> list[Diagnostic]:
    """The findings about values, but notes."""
    return [d for d in result.diagnostics if d.code.startswith("LP2") and d.severity != "note"]


HARMLESS: dict[str, Function] = {
    "quotient": lambda v: 1 / (1 + torch.exp(v * -20)),
    "clamped": lambda v: (v * 1e6).clamp(-1, 1),
    "smaller one": lambda v: torch.minimum(v.square() * 1e8, v.abs()),
    "masked": lambda v: (v * 1e6).masked_fill(v.abs() > 1e-3, 1.0),
    "half of it": lambda v: torch.cat([v * 1e6, v], -1).chunk(2, -1)[1] + 1,
    "overwritten": lambda v: (v * 1e6).copy_(v) + 1,
    "mask of softmax": lambda v: (v + (v > 0).to(v.dtype) * -1e9).softmax(-1),
}


@pytest.mark.parametrize("deferred", [None, True])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_absorbed_does_not_reach_the_output(name: str, deferred: bool | None) -> None:
    spoils = {row.op: row.reaches_output for row in nonfinite(HARMLESS[name], deferred=deferred)}
    assert set(spoils.values()) == {False}, spoils

    def both(v: Tensor) -> Tensor:
        return HARMLESS[name](v).sum(-1, keepdim=True) + (v - 1).expm1().mul(1e6).mul(1e-6)

    reached = [row.op for row in nonfinite(both, deferred=deferred) if row.reaches_output]
    assert reached == ["aten.mul.Tensor"]


def test_each_element_has_its_own_origin() -> None:
    """Both are in one tensor, of which the second half is used."""

    def halves(v: Tensor) -> Tensor:
        first, second = v.mul(1e6), torch.exp(v.abs() * 30)
        return torch.cat([first, second]).div(2)[len(v) :]

    assert {row.op: row.reaches_output for row in nonfinite(halves)} == {
        "aten.mul.Tensor": False,
        "aten.exp.default": True,
    }


def test_an_overflow_beside_an_earlier_one_is_found() -> None:
    """Before, nothing counted in an op whose inputs have an Inf already."""

    def masked(v: Tensor) -> Tensor:
        scores = v.masked_fill(v < 0, 1.0).mul(1).add(torch.where(v < 0, -7e4, 0.0).to(v.dtype))
        return (scores * 1e6).softmax(-1)

    assert [row.op for row in nonfinite(masked) if row.reaches_output] == ["aten.mul.Tensor"]


def test_what_a_sum_gets_reaches_the_output_though_the_sum_overflows_without_it() -> None:
    def squares(v: Tensor) -> Tensor:
        return torch.linspace(100, 400, v.numel()).to(v.dtype).square().sum()  # the last ones are beyond 65504

    assert {row.op: row.reaches_output for row in nonfinite(squares)} == {
        "aten.pow.Tensor_Scalar": True,
        "aten.sum.default": True,
    }


def test_ops_that_write_in_place_keep_the_origin() -> None:
    def in_place(v: Tensor) -> Tensor:
        kept = v.clone().mul_(1e6)
        kept[0] = 0.0
        return kept.mul_(1e-6).add_(1)

    assert {row.op: row.reaches_output for row in nonfinite(in_place)} == {"aten.mul_.Tensor": True}


def test_the_true_one_is_the_error_and_the_harmless_one_a_note() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Fn(lambda v: 1 / (1 + torch.exp(v * -20)))
            self.bad = Fn(lambda v: v * 1e6 * 1e-6)

        def forward(self, v: Tensor) -> Any:
            return self.bad(self.gate(v) + v)

    result = scanned(Two().eval(), x())
    assert [(d.code, d.module) for d in blamed(result)] == [("LP201", "bad")]
    [note] = [d for d in result.diagnostics if d.code == "LP201" and d.severity == "note"]
    assert (note.module, note.matters) == ("gate", False)
    assert note.message.endswith("fp32 with Inf in only these places gives an output that passes, error 8.7e-07")
    assert "first in mul of bad" in " ".join(statement.text for statement in result.statements)


def test_an_op_that_gives_inf_and_nan_is_said_to_give_both() -> None:
    def normalized(v: Tensor) -> Tensor:
        small = v * 1e-5
        return small / (small.square().sum(-1, keepdim=True) + 1e-12).sqrt()

    values = x()
    values[0, 0] = 1e-4  # zero in half after the multiplication: 0 / 0
    at = {d.code: d for d in blamed(scanned(Fn(normalized), values)) if d.op == "aten.div.Tensor"}
    assert "became Inf" in at["LP201"].message
    assert "became NaN" in at["LP203"].message
    assert all("this Inf or NaN reaches the output" in its.message for its in at.values())


def test_two_ops_on_one_line_are_two_places() -> None:
    def line(v: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(v * -20)) + torch.exp(v.abs() * 9 + 8) * 1e-6

    found = {row.reaches_output: row for row in nonfinite(line)}
    assert set(found) == {True, False}
    assert found[True].place == found[False].place
    assert (found[False].nth, found[True].nth) == (0, 1)
    severities = [d.severity for d in scanned(Fn(line), x()).diagnostics if d.code == "LP201"]
    assert sorted(severities) == ["error", "note"]


@pytest.mark.parametrize("several", [False, True])
def test_an_input_that_overflows_is_named(several: bool) -> None:
    inputs = (x().abs() * 1e6 + 1e5, x())[: 1 + several]
    result = scanned(Fn(lambda v, *more: torch.log1p(v.float()).to(v.dtype) + sum(more)), *inputs)
    [finding] = blamed(result)
    assert (finding.code, finding.op) == ("LP201", "cast input 0" if several else "cast input")
    # The other input alone can stay in fp32: its sum with a 16-bit one is in fp32.
    kept = r"keep inputs\[0\] in fp32, with which it passes, error \S+ \(measured\), or scale it before the cast"
    assert re.fullmatch(kept if several else "scale this input before the cast", finding.help or "")
    assert "log1p" not in finding.message


def test_an_input_that_becomes_zero_is_named() -> None:
    harmful = scanned(Fn(lambda v: v * 1e4 * 1e5 + 1), x() * 1e-9)
    assert [(d.code, d.op, d.severity) for d in blamed(harmful)] == [("LP202", "cast input", "error")]
    assert not blamed(scanned(Fn(lambda v: v + 1), x() * 1e-9))


ZEROS: dict[str, tuple[Function, list[str]]] = {
    "added": (lambda v: v + v * 1e-9, []),
    "scaled back": (lambda v: v.mul(1e-9).div(1e-4) * 1e5 + 0.1, ["aten.mul.Tensor"]),
    "divisor": (lambda v: v / (v.square() + 1).mul(1e-9) * 1e-9, ["aten.mul.Tensor"]),
    "compared": (lambda v: torch.where(v * 1e-9 > 0, v, -v), ["aten.mul.Tensor"]),
    "tails of softmax": (lambda v: (v * 30).softmax(-1) @ v.T, []),
    "sigmoid": (lambda v: torch.sigmoid(v * 20 - 20) * v + v, []),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_an_error_if_they_alone_make_the_run_fail(name: str) -> None:
    function, expected = ZEROS[name]
    found = [d for d in scanned(Fn(function), x()).diagnostics if d.code == "LP202"]
    assert [d.op for d in found if d.severity == "error"] == expected
    assert not [d for d in found if d.severity == "warning"]


def test_a_trial_is_that_of_plain_torch() -> None:
    result = scanned(Fn(lambda v: v.mul(1e-7).mul(1e4).mul(1e3)), x())
    [trial] = [its for its in result.runs[-1].range_trials if its.nth == 0]
    small = x().mul(1e-7)
    flushed = torch.where(small.half() == 0, 0.0, small)
    assert trial.values == int((flushed != small).sum()) > 0
    assert trial.rel_l2 == pytest.approx(float((flushed - small).norm() / small.norm()), rel=1e-4)
    assert trial.status == "inaccurate"


def test_ops_that_fp32_does_not_call_are_not_tried(tmp_path: Path) -> None:
    """Such as casts under autocast; the first trial tells which it calls."""

    def logged(v: Tensor) -> Tensor:
        with (tmp_path / "calls").open("a") as file:
            file.write("1")
        return v * 1e-9

    model = Fn(logged)
    cast = OutOfRange("zero", 1.0, ("layer", "aten._to_copy.default", None, 0))
    product = OutOfRange("zero", 0.5, ("", "aten.mul.Tensor", None, 0))
    output = x() * 1e-9
    with prepared(model, PRECISIONS.get("fp32"), torch.device("cpu")) as ready:
        trials = JudgedTrials(ready, (x(),), {}, [output], tolerance=0.1, seed=0)
        try_places(trials, [cast, cast, cast, product], torch.half, seconds=60)
    assert (tmp_path / "calls").read_text() == "11"


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(16), Fn(lambda v: v * 1e6 * 1e-6), nn.Linear(16, 4)).train()
    model[2].weight.data[0, 0] = 1e-9
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = scanned(model, x())
    assert result.runs[-1].range_trials
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Draws(nn.Module):
    """Draws ``more`` times in 16 bits than in fp32, before or after what it uses."""

    def __init__(self, more: int, *, before: bool) -> None:
        super().__init__()
        self.linear, self.more, self.before = nn.Linear(16, 16), more, before

    def forward(self, v: Tensor) -> Tensor:
        y = self.linear(v)
        extra = range(self.more if y.dtype != torch.float32 else 0)
        if self.before:
            [torch.rand(y.shape) for _ in extra]
        y = y + torch.rand(y.shape).to(y.dtype)
        if not self.before:
            [torch.rand(y.shape) for _ in extra]
        return y


@pytest.mark.parametrize(("more", "before", "status"), [(2, True, "unjudged"), (2, False, "ok"), (0, True, "ok")])
def test_numbers_that_only_16_bits_draw_are_unjudged_if_they_matter(more: int, before: bool, status: str) -> None:
    half = scanned(Draws(more, before=before).eval(), x()).run("half")
    assert half.status == status
    assert any("is called more often here" in note for note in half.notes) == (status == "unjudged")


@pytest.mark.parametrize("precision", ["half", "autocast-fp16"])
def test_the_range_of_weights_is_no_headroom(precision: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    model[2].weight.data *= 1e-4
    model[0].weight.data[0, 0] = 3e4

    def findings(factor: float) -> list[Diagnostic]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = scan(
                model, x() * factor, precisions=[precision], times="off", plan=False, isolation="none", tolerance=1.0
            )
        return [d for d in result.diagnostics if d.code == "LP205"]

    assert not findings(1e-2)
    assert findings(1.0), "of activations it is"


@pytest.mark.parametrize("seen", [False, True])
def test_a_model_that_replaces_functions_of_torch_is_judged_as_before(seen: bool) -> None:
    names = ("isfinite", "isnan", "isinf", "equal", "any")
    kept = {(owner, name): vars(owner).get(name) for owner in (torch, Tensor) for name in names}

    class Patches(nn.Module):
        """Has Inf in its output, and functions that see none; or none, and functions that see it everywhere."""

        def forward(self, v: Tensor) -> Tensor:
            torch.isfinite = Tensor.isfinite = lambda t: torch.full_like(t, not seen, dtype=torch.bool)
            torch.isnan = Tensor.isnan = Tensor.isinf = lambda t: torch.full_like(t, seen, dtype=torch.bool)
            torch.equal = lambda a, b: not seen
            return v * 1e3 * 1e-3 if seen else v * 1e6 * 1e-6

    try:
        result = scanned(Patches().eval(), x())
    finally:
        for (owner, name), value in kept.items():
            if value is not None:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
    assert result.run("half").status == ("ok" if seen else "nonfinite")
    assert result.run("fp32").status == "ok"
