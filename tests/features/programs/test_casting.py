"""The calls of a program with its models in 16 bits: what they are given, return, and leave out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_kept_calls import a_program
from torch import Tensor, nn

from lowprec_check.features.programs.casting import ProgramCaster
from lowprec_check.features.programs.program_code import _at_borders
from lowprec_check.features.programs.program_document import program_document, where_it_parts
from lowprec_check.features.programs.program_scan import (
    AGAIN,
    NO_SUCH_CALL,
    NOTHING,
    RECOMMENDED,
    Assignment,
    CallError,
    ProgramRun,
    ScannedModel,
    VariableError,
)
from lowprec_check.features.programs.variables import VariableComparison, check_variables
from lowprec_check.features.programs.watching import place_of
from lowprec_check.report.layout.text import text
from lowprec_check.torchkit.pytree import texts_in


def caster(folder: Path, precision: str = "", kind: str = "Step") -> ProgramCaster:
    assigned = {f"{kind}#0": Assignment(precision)} if precision else {}
    return ProgramCaster(assigned, [], folder, calls=9, most=None)


def a_run(*errors: CallError, calls: int, **more: Any) -> ProgramRun:
    return ProgramRun("half", ["half", "half"], list(errors), calls_of_fp32=calls, **more)


def test_a_run_that_makes_fewer_calls_than_fp32_does_not_pass() -> None:
    first, second = CallError("Net#0", 1, 1e-3), CallError("Net#0", 2, 1e-3)
    assert a_run(first, second, calls=2).passes
    few = a_run(first, calls=2, weight_bytes=1)
    assert not few.passes
    assert where_it_parts(few, []) == "makes 1 of fp32's 2 calls"
    # One more call of a model does not stand for one of another
    assert not a_run(CallError("Text#0", 2, None, note=NO_SUCH_CALL), first, calls=2).passes
    # What is asked for decides: a loop may end sooner
    right = VariableError("image", 1e-3)
    assert a_run(first, calls=2, variables=[right]).passes
    program = a_program(first)
    again = ProgramRun(AGAIN, ["fp32"] * 2, [first, second], weight_bytes=2)
    for run in (few, msgspec.structs.replace(few, variables=[right])):
        runs = [again, msgspec.structs.replace(run, name=RECOMMENDED)]
        shown = text(program_document(msgspec.structs.replace(program, runs=runs)))
        assert "of the memory" not in shown
        assert "makes 1 of fp32's 2 calls" in shown


class Step(nn.Module):
    """Adds to a cache in place, and returns ``kind``."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.last, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, cache: Tensor) -> Any:
        """The cache, or what has no tensor."""
        cache.mul_(0.5).add_(self.last(x))
        if self.kind in ("cat", "dog"):
            return [{"label": self.kind}]
        return {"": cache * 2, "none": None, "number": float(self.last.weight[0, 0])}[self.kind]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_model_writes_to_an_input_is_given_to_the_program(tmp_path: Path, mode: Any, dtype: torch.dtype) -> None:
    def caches(code: str = "") -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        step, x = Step().to(dtype), torch.ones(1, 4, dtype=dtype)
        exec(code, {"step": step})
        cache = torch.zeros(1, 4, dtype=dtype)
        for _ in range(3):
            output = step(x, cache)
        return output, cache

    with mode():
        expected = caches()
        with caster(tmp_path, "bfloat16").watching():
            found = caches()
        step = Step().to(dtype)
        place = place_of(step, sys._getframe())
        model = ScannedModel(name="step", kind="Step", calls=3, kept=[1], key="Step#0", place=place, writes=True)
        (code,) = _at_borders([model], {"Step#0": Assignment("bfloat16")})
        pasted = caches(code.text)
    for outputs in (found, pasted):
        for low, fp32 in zip(outputs, expected, strict=True):
            assert low.dtype == dtype
            assert not torch.equal(low, fp32)
            assert torch.allclose(low, fp32, rtol=5e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_model_only_reads_keeps_all_digits(tmp_path: Path, mode: Any) -> None:
    with mode(), caster(tmp_path, "bfloat16", "Linear").watching():
        x = torch.full((1, 4), 1.001)
        nn.Linear(4, 4)(x)
        assert x[0, 0] == torch.tensor(1.001)


@torch.no_grad()
def test_outputs_without_tensors_are_compared_by_their_text_and_numbers(tmp_path: Path) -> None:
    def errors_of(kinds: tuple[str, str]) -> CallError:
        for precision, kind in zip(("", "fp32"), kinds, strict=True):
            torch.manual_seed(0)
            run = caster(tmp_path, precision)
            with run.watching():
                Step(kind)(torch.ones(1, 4), torch.zeros(1, 4))
        return run.errors[0]

    same, other = errors_of(("cat", "cat")), errors_of(("cat", "dog"))
    assert (same.meaning, same.exceeds(0.0)) == ("the same text", False)
    assert (other.meaning, other.exceeds(1.0)) == ("another text", True)
    assert where_it_parts(a_run(other, calls=1), []) == "Step#0, call 1: another text"
    assert errors_of(("number", "number")).note == ""
    nothing = errors_of(("none", "none"))
    assert (nothing.note, nothing.exceeds(0.0)) == (NOTHING, False)
    # The call before decides; without any, nothing is known
    assert a_run(CallError("Net#0", 1, 1e-3), nothing, calls=2).passes
    assert not a_run(CallError("Net#0", 1, 1.0), nothing, calls=2).passes
    assert not a_run(nothing, calls=1).passes
    assert a_run(nothing, calls=1, variables=[VariableError("image", 0.0)]).passes


def test_text_in_containers_is_compared(tmp_path: Path) -> None:
    def compared(value: Any) -> VariableError:
        for saves in (True, False):
            run = VariableComparison(["label"], tmp_path, saves=saves)
            run.read(lambda saves=saves: {"label": [{"label": "cat", "score": 0.5}] if saves else value})
        return run.errors[0]

    assert compared([{"label": "cat", "score": 0.5}]).error == 0
    assert compared([{"label": "dog", "score": 0.5}]).note == "another text"
    assert compared([{"kind": "cat", "score": 0.5}]).note == "another text"
    check_variables(["label"], {"label": ["cat"]}, was_stopped=False)
    cycle: list[Any] = ["cat"]
    cycle.append(cycle)
    assert texts_in(cycle) == ["cat"]


@torch.no_grad()
def test_a_call_that_fails_is_none_of_fp32s_calls(tmp_path: Path) -> None:
    for precision in ("", "half"):
        run = caster(tmp_path, precision, "Linear")
        net = nn.Linear(4, 4)
        with run.watching():
            for size in (5, 4, 4):
                try:
                    net(torch.ones(1, size))
                except RuntimeError:
                    continue
        assert [error.call for error in run.errors] == [1, 2]
    assert len(list(tmp_path.glob("*#*.pt"))) == 2
