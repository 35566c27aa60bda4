"""Every diagnostic's manual page ends with what to do and an example; it runs with the finding, then without it."""

from __future__ import annotations

import re
import textwrap
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Call
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.schema.scan_result import ScanResult

RULES = rules()


class Example(NamedTuple):
    before: str
    after: str


def example_of(code: str) -> Example:
    """The last block of the page, as code."""
    what, _, block = RULES[code].manual.rpartition("\n\n")
    lines = textwrap.dedent(block).splitlines()
    assert block.startswith("    "), "the page ends with the example"
    assert "What to do" in what
    [first, second] = [index for index, line in enumerate(lines) if re.match("# (before|after)", line)]
    assert (first, lines[second]) == (0, "# after")
    return Example("\n".join(lines[first:second]), "\n".join(lines[second:]))


@pytest.mark.parametrize("code", RULES)
def test_every_page_ends_with_what_to_do_and_an_example(code: str) -> None:
    before, after = example_of(code)
    body = [re.sub(r"#.*", "", text).strip() for text in (before, after)]
    assert all(body)
    assert body[0] != body[1]
    if not body[0].startswith("lowprec-check"):
        for text in (before, after):
            compile(text, code, "exec")
    assert max(map(len, RULES[code].manual.splitlines())) <= 118
    assert max(map(len, f"{before}\n{after}".splitlines())) <= 86


def test_commands_in_examples_exist(call: Call) -> None:
    commands = [
        line for code in RULES for line in "\n".join(example_of(code)).splitlines() if line.startswith("lowprec")
    ]
    assert commands
    for command in commands:
        _, name, _target, *options = command.split()
        shown = call(name, "--help").stdout + call(name, "--help-all").stdout
        assert all(option in shown for option in options if option.startswith("--")), command


FAST: Any = {"plan": False, "isolation": "none", "further_inputs": 0}


class Step(NamedTuple):
    """How the example of a page runs: as the ``forward`` of a model, whose ``x`` and other names are prepared here."""

    prepare: str = "x = x * self.scale"
    """Code before the example."""
    precision: str = "half"
    inputs: Any = None
    returns: str = "y"
    without_kernel: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Other precisions that the finding needs."""
    times: str = "off"
    is_quiet_before: bool = False
    """Whether the finding depends on the machine, so that only the absence after the change is checked."""


def draw(*shape: int, offset: float = 0.0, factor: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * factor + offset


SPD = "x = x * self.scale * 0.1 + torch.eye(8, dtype=x.dtype)"
NEARLY_SINGULAR = "x = x @ x.mT * 0.1 + 1e-4 * torch.eye(8, dtype=x.dtype)"
STEPS = {
    "LP101": Step(SPD, without_kernel=("aten.linalg_cholesky_ex:half",)),
    "LP102": Step(),
    "LP103": Step(),
    "LP108": Step(),
    "LP201": Step("q, k, d = x * 60, x * 60, 64", inputs=draw(8, 64)),
    "LP202": Step("x = x * self.scale * 1e-4"),
    "LP203": Step("x = x * self.scale * 0"),
    "LP204": Step("mask, x = x > 0, x * self.scale"),
    "LP205": Step("x = x * self.scale * 60"),
    "LP206": Step("x = x * self.scale"),
    "LP207": Step("x = x.square() * 1e-9"),
    "LP303": Step(precision="bfloat16", inputs=draw(64, 64, offset=10.0)),
    "LP304": Step("pass", precision="autocast-bf16", inputs=draw(4096, 8)),
    "LP305": Step(NEARLY_SINGULAR, precision="bfloat16", inputs=draw(8, 4)),
    "LP401": Step("pass", precision="autocast-bf16", times="on"),
    "LP402": Step("x = x.reshape(1, 1, 8, 8)", precision="autocast-fp16", others=("half",), times="on"),
    "LP902": Step(),
    "LP904": Step(is_quiet_before=True, times="on"),
    "LP905": Step(),
}
MACHINE = {
    "LP104": "an accelerator",
    "LP105": "an accelerator",
    "LP106": "times; executed below",
    "LP107": "a kernel that crashes; executed below",
    "LP301": "another precision, tested below",
    "LP306": "a fault of a compiler; tests/features/backend_checks",
    "LP307": "inputs like others; tests/features/inputs/test_margin.py",
    **dict.fromkeys(["LP308", "LP309", "LP310"], "another backend; tests/features/backend_checks"),
    "LP302": "a kernel that adds up in 16 bits, tested below",
    **dict.fromkeys(
        [f"LP50{number}" for number in range(1, 10)], "training; tests/features/training/test_training_advice.py"
    ),
    **dict.fromkeys([f"LP51{number}" for number in range(5)], "a script; tests/features/amp_use"),
    "LP901": "other inputs, tested below",
    "LP903": "a slow kernel or one that crashes",
}
"""Pages whose example is not a step of a model, or whose finding needs more than any CPU has."""

FORWARD = """
import math, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8, 8))

    def forward(self, x):
{body}
        return {returns}
"""


def model_of(step: Step, code: str) -> nn.Module:
    """The model whose ``forward`` has ``code``."""
    space: dict[str, Any] = {}
    body = textwrap.indent(f"{step.prepare}\n{code}", " " * 8)
    exec(compile(FORWARD.format(body=body, returns=step.returns), "example", "exec"), space)
    torch.manual_seed(0)
    model: nn.Module = space["Net"]().eval()
    return model


def codes_of(step: Step, code: str) -> set[str]:
    """The codes of the findings about the model in its precision, or about the whole scan."""
    inputs = draw(8, 8) if step.inputs is None else step.inputs
    options: Any = FAST | {"precisions": [step.precision, *step.others], "times": step.times}
    result: ScanResult = scan(model_of(step, code), inputs, without_kernel=step.without_kernel, **options)
    return {d.code for d in result.diagnostics}


def test_every_page_is_tested_or_needs_a_machine() -> None:
    assert STEPS.keys() | MACHINE.keys() == RULES.keys()
    assert not STEPS.keys() & MACHINE.keys()


@pytest.mark.parametrize("code", list(STEPS))
def test_the_example_gives_the_finding_and_its_fix_does_not(code: str) -> None:
    step, (before, after) = STEPS[code], example_of(code)
    assert step.is_quiet_before or code in codes_of(step, before)
    assert code not in codes_of(step, after)


# -- examples that are not a step of a model


def executed(text: str, **names: Any) -> dict[str, Any]:
    """The names after the code was executed."""
    space = {"torch": torch, **names}
    exec(text, space)
    return space


@pytest.mark.parametrize("code", ["LP104", "LP105", "LP107"])
def test_both_versions_compute_the_same(code: str) -> None:
    x = draw(8, 8)
    before, after = (executed(text, x=x)["y"] for text in example_of(code))
    torch.testing.assert_close(after, before)


class Large(nn.Linear):
    """Its output overflows in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e5


def test_another_precision_passes() -> None:
    x = draw(8, 8)
    wanted = Large(8, 8).requires_grad_(False)
    result = scan(wanted, x, precisions=["half", "autocast-bf16"], times="off", **FAST)
    assert [d.precision for d in result.diagnostics if d.code == "LP301"] == ["half"]
    for code in ("LP301", "LP106"):
        outputs = []
        for text in example_of(code):
            model = Large(8, 8).requires_grad_(False)
            model.load_state_dict(wanted.state_dict())
            outputs.append(executed(text, x=x, model=model)["y"].float())
        assert not outputs[0].isfinite().all()
        torch.testing.assert_close(outputs[1], wanted(x), rtol=0.05, atol=0.05 * float(wanted(x).abs().max()))


@pytest.mark.slow
def test_an_op_that_adds_up_in_16_bits() -> None:
    x = draw(4096, 8, offset=1.0, factor=1e-3)
    for precision in ("half", "bfloat16"):
        assert "LP302" not in codes_of(Step(precision=precision, inputs=x), example_of("LP302").after)
    low, high = (executed(text, x=x.half())["y"] for text in example_of("LP302"))
    exact = x.half().double().prod(0)
    is_outlier = float((low - exact).norm() / exact.norm()) > 8 * 2**-11
    assert float((high - exact).norm() / exact.norm()) < 8 * 2**-11
    assert ("LP302" in codes_of(Step(inputs=x), example_of("LP302").before)) == is_outlier


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.long = nn.Parameter(torch.ones(1)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.long(x * self.scale) if x.shape[-1] > 16 else x * self.scale


def test_inputs_that_reach_a_module() -> None:
    before, after = (executed(text)["inputs"] for text in example_of("LP901"))
    for inputs, modules in ((before, ["long"]), (after, [])):
        result = scan(Branch(), inputs, precisions=["bfloat16"], times="off", **FAST)
        assert [d.module for d in result.diagnostics if d.code == "LP901"] == modules
