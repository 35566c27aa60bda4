"""Inputs are kept in fp32 where their cast makes a model fail: compared with plain calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import scan_here, screen_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check import Plan, ScanResult, apply, find_plan
from lowprec_check.analysis.error_shares import best_input_trial
from lowprec_check.engine.model.inputs import named_tensors, tensors_named
from lowprec_check.torchkit.pytree import map_tensors

WIDTH = 8


class Embeds(nn.Module):
    """Adds layers of some inputs to an embedding of others that needs all of their digits."""

    def __init__(self, number: int, sensitive: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))
        self.sensitive = sensitive

    def add(self, tensors: list[Tensor]) -> Tensor:
        total = torch.zeros(1)
        for index, (layer, tensor) in enumerate(zip(self.layers, tensors, strict=True)):
            x = (tensor.float() * 300).cos() if index in self.sensitive else tensor
            total = total + layer(x.to(layer.weight.dtype))
        return total


class ByName(Embeds):
    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None) -> Tensor:
        return self.add([a, b, c] if d is None else [a, b, c, d])


class Nested(Embeds):
    def forward(self, first: Tensor, rest: dict[str, Any]) -> Tensor:
        return self.add([first, rest["b"], *rest["more"]])


def tensors(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [1 + torch.rand(4, WIDTH, generator=generator) for _ in range(number)]


def plain_error(model: nn.Module, inputs: Any, dtype: torch.dtype, in_fp32: tuple[int, ...]) -> float:
    """The error of the cast model, all tensors of ``inputs`` but these cast, without the tool."""
    cast, number = copy.deepcopy(model).to(dtype), iter(range(100))
    low = map_tensors(inputs, lambda t: t if next(number) in in_fp32 else t.to(dtype))

    def called(model: nn.Module, inputs: Any) -> Tensor:
        with torch.no_grad():
            return (model(**inputs) if isinstance(inputs, dict) else model(*inputs)).double()

    expected = called(model, inputs)
    return float((called(cast, low) - expected).norm() / expected.norm())


def pasted_output(code: str, model: nn.Module, inputs: Any) -> Tensor:
    namespace: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": copy.copy(inputs)}
    exec(code, namespace)
    return namespace["output"]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([3, 4]), st.data(), st.sampled_from(["keywords", "positions", "nested"]))
def test_the_sensitive_input_of_several_is_found(number: int, data: st.DataObject, form: str) -> None:
    index = data.draw(st.integers(0, number - 1))
    torch.manual_seed(number)
    given_tensors = tensors(number)
    inputs: Any
    if form == "nested":
        model: Embeds = Nested(number, {index})
        inputs = {"first": given_tensors[0], "rest": {"b": given_tensors[1], "more": given_tensors[2:]}}
        names = ["first", 'rest["b"]', 'rest["more"][0]', 'rest["more"][1]']
    else:
        model = ByName(number, {index})
        names = ["a", "b", "c", "d"]
        inputs = dict(zip(names, given_tensors, strict=False))
        if form == "positions":
            inputs, names = tuple(given_tensors), [f"inputs[{place}]" for place in range(number)]
    model.eval()
    result = scan_here(model, inputs, precisions=["half", "bfloat16"], times="off", further_inputs=0)

    repaired = [run for run in result.runs if run.input_trials]
    assert repaired, "the rounding of one input fails both"
    for run in repaired:
        trial = best_input_trial(run)
        assert trial is not None
        assert trial.inputs == [names[index]]
        assert trial.status == "ok"
        dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}[run.precision]
        assert trial.rel_l2 == pytest.approx(plain_error(model, inputs, dtype, (index,)), rel=0.05)
        assert run.rel_l2 == pytest.approx(plain_error(model, inputs, dtype, ()), rel=0.05)

    # What is recommended is that, and the code runs it.
    best = result.recommendation
    assert best is not None
    assert (best.keep_fp32_inputs, best.keep_fp32) == ([names[index]], [])
    plan = result.plan
    assert plan is not None
    output = pasted_output(best.code, model, inputs)
    applied = apply(copy.deepcopy(model), plan)
    with torch.no_grad():
        same = applied(**inputs) if isinstance(inputs, dict) else applied(*inputs)
        assert torch.equal(output, same)
        if form == "keywords":
            assert torch.equal(output, applied(*inputs.values())), "given by position, too"
    expected = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    error = float((output.double() - expected.double()).detach().norm() / expected.detach().double().norm())
    assert error == pytest.approx(best.rel_l2, rel=0.05)


def test_two_inputs_are_kept_together() -> None:
    torch.manual_seed(0)
    model, inputs = ByName(4, {1, 3}).eval(), tuple(tensors(4))
    run = scan_here(model, inputs, precisions=["bfloat16"], times="off", further_inputs=0, plan=False).runs[1]
    trial = best_input_trial(run)
    assert trial is not None
    assert (trial.status, sorted(trial.inputs)) == ("ok", ["inputs[1]", "inputs[3]"])
    single = {tuple(other.inputs): other for other in run.input_trials}[("inputs[1]",)]
    assert single.status == "inaccurate"
    assert trial.rel_l2 == pytest.approx(plain_error(model, inputs, torch.bfloat16, (1, 3)), rel=0.05)


class Distances(nn.Module):
    """Needs both inputs in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        near = (a.mm(b.T.contiguous()) * 300).cos()
        return self.head(near.to(self.head.weight.dtype))


def test_inputs_that_need_one_dtype_are_tried_in_pairs() -> None:
    torch.manual_seed(0)
    model, inputs = Distances().eval(), tuple(tensors(2))
    run = scan_here(model, inputs, precisions=["bfloat16"], times="off", further_inputs=0, plan=False).runs[1]
    assert {tuple(trial.inputs): trial.status for trial in run.input_trials} == {
        ("inputs[0]",): "error",
        ("inputs[1]",): "error",
        ("inputs[0]", "inputs[1]"): "ok",
    }


class OneTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.float() * 300).cos().to(self.head.weight.dtype))


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 300).cos()


def test_a_single_input_is_named_inputs_and_not_kept_if_nothing_is_left_low() -> None:
    torch.manual_seed(0)
    x, model = tensors(1)[0], OneTensor().eval()
    result = scan_here(model, x, precisions=["half"], times="off", further_inputs=0)
    assert result.plan is not None
    assert result.plan.keep_fp32_inputs == ["inputs"]
    assert torch.equal(pasted_output(result.plan.code, model, x), apply(model, result.plan)(x))
    # A function of inputs alone is then in fp32 altogether: that is no way to run it in half.
    result = scan_here(Function(), x, precisions=["half"], times="off", further_inputs=0)
    assert (result.plan, result.recommendation, best_input_trial(result.runs[1])) == (None, None, None)


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1000).square() / 1e6


class Both(OneTensor):
    """Its input must not be rounded, and values of one module overflow in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.power = Power()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.power(super().forward(x)))


def test_an_input_and_modules_are_kept_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Both().eval(), tensors(1)[0]
    plan = find_plan(model, x, dtype="fp16", base="cast", isolation="none").plan
    assert plan is not None
    assert (plan.keep_fp32_inputs, plan.keep_fp32) == (["inputs"], ["power"])
    plan.save(tmp_path / "plan.json")
    with torch.no_grad():
        output = apply(copy.deepcopy(model), tmp_path / "plan.json")(x)
        expected = model(x)
    assert torch.equal(output, pasted_output(plan.code, model, x))
    assert float((output - expected).norm() / expected.norm()) == pytest.approx(plan.rel_l2, rel=0.05)
    assert plan.rel_l2 is not None
    assert plan.rel_l2 < 1e-2


def test_what_older_versions_saved_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ByName(3, {1}).eval()
    result = scan_here(model, tuple(tensors(3)), precisions=["half"], times="off", further_inputs=0)
    saved = msgspec.json.decode(result.to_json())
    for part in (*saved["runs"], saved["plan"], saved["recommendation"]):
        part.pop("keep_fp32_inputs", None)
        part.pop("input_trials", None)
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(saved))
    assert ScanResult.load(tmp_path / "old.json").runs[1].input_trials == []
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(saved["plan"]))
    assert Plan.load(tmp_path / "plan.json").keep_fp32_inputs == []


def test_scaling_is_advised_only_where_the_cast_is_out_of_range() -> None:
    torch.manual_seed(0)
    result = scan_here(ByName(3, {1}).eval(), tuple(tensors(3)), precisions=["half"], times="off")
    advice = next(found.help for found in result.diagnostics if found.code == "LP301")
    assert "inputs[1] in fp32, with which it passes" in advice
    assert not any("scale" in found.help for found in result.diagnostics)
    said = screen_of(result)
    assert "half with inputs[1] in fp32" in said

    large = tensors(3)
    large[1] = large[1] * 1e5
    result = scan_here(ByName(3, {1}).eval(), tuple(large), precisions=["half"], times="off")
    advice = next(found.help for found in result.diagnostics if found.code == "LP301")
    assert "inputs[1] in fp32, with which it passes" in advice
    assert "scale it before the cast" in advice


def test_names_of_inputs_are_those_of_their_user() -> None:
    a, b, c = tensors(3)
    assert list(named_tensors((a,), {}, "model(inputs)")) == ["inputs"]
    assert list(named_tensors(([a, b],), {}, "model(inputs)")) == ["inputs[0]", "inputs[1]"]
    assert list(named_tensors((a, {"x": b}), {}, "model(*inputs)")) == ["inputs[0]", 'inputs[1]["x"]']
    assert list(named_tensors((), {"inputs": a, "t": (b, c)}, "model(**inputs)")) == ["inputs", "t[0]", "t[1]"]
    assert tensors_named(["inputs"], (a,), {}) == [a]
    assert tensors_named(["inputs[0]"], ([a, b],), {}) == [a]
    assert tensors_named(["t"], (a, b), {}, ["x", "t"]) == [b]
    assert tensors_named(["inputs[1]"], (a,), {"t": b}, ["x", "t"]) == [b]


def test_three_that_help_only_together_are_named() -> None:
    class Progress(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, start: Tensor, stop: Tensor, origin: Tensor) -> Tensor:
            done = (start - origin) / (stop - origin + 1e-3)
            return self.linear(x) * done[:, None].to(x.dtype)

    torch.manual_seed(0)
    given = torch.randn(2, 8), torch.rand(2) + 4000, torch.rand(2) + 4002, torch.full((2,), 3999.3)
    result = scan_here(Progress().eval(), given, precisions=["bfloat16"], further_inputs=0)
    assert result.recommendation is not None
    assert result.recommendation.keep_fp32_inputs == ["inputs[1]", "inputs[2]", "inputs[3]"]
