"""Ways in that people try: a function with model and inputs, a plain function, a ScriptModule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_printed, scan_here

import lowprec_check
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.core.session import scan_file
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult

Write = Callable[..., Path]

RETURNS_BOTH = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval(), torch.ones(4, 3)
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "ways_in.py"
        path.write_text(text)
        return path

    return write


def pasted(code: str, text: str) -> Any:
    """The output of the printed code, run after the user's file."""
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    return run_printed(code, namespace)["output"]


@pytest.mark.parametrize(
    ("more", "shapes", "rows", "code"),
    [
        ("", (), 4, ["model, inputs = build()"]),
        ("inputs = torch.ones(5, 3)", (), 5, ["model, _ = build()"]),
        ("", ("6x3",), 6, ["model, _ = build()", "inputs = torch.randn(6, 3)"]),
    ],
)
def test_a_function_may_return_model_and_inputs(
    write: Write, more: str, shapes: tuple[str, ...], rows: int, code: list[str]
) -> None:
    target = load_target(f"{write(RETURNS_BOTH + more)}:build", shapes)
    assert target.args[0].shape == (rows, 3)
    assert list(target.setup[1:]) == code
    namespace: dict[str, Any] = {}
    exec("\n".join([RETURNS_BOTH, more, *code]), namespace)
    assert namespace["inputs"].shape == (rows, 3)


PLAIN_FUNCTION = """
import torch
def model(x, y):
    return torch.linalg.inv(x @ x.T + torch.eye(4, dtype=x.dtype)) @ y
def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
"""


def scanned(path: Path, **options: Any) -> ScanResult:
    *_, result = scan_file(TargetSpec(str(path)), ScanOptions(times="off", further_inputs=0, **options))
    return conclude(result)


def test_a_plain_function_is_a_model_without_parameters(write: Write) -> None:
    result = scanned(write(PLAIN_FUNCTION))
    assert (result.model.name, result.model.parameters, result.model.kind) == ("model", 0, "function")
    assert [gap.op for gap in result.run("half").gaps] == ["aten.linalg_inv_ex.default"]
    assert result.run("autocast-bf16").status == "ok"
    assert result.recommendation is not None
    assert pasted(result.recommendation.code, PLAIN_FUNCTION).shape == (4, 8)


def test_a_function_has_nothing_to_cast_or_move(write: Write) -> None:
    text = "import torch\ndef model(x):\n    return x.softmax(-1)\ninputs = torch.arange(8.0)"
    result = scanned(write(text), precisions=["half"])
    assert result.recommendation is not None
    assert "model.half" not in result.recommendation.code
    assert torch.equal(pasted(result.recommendation.code, text), torch.arange(8.0).half().softmax(-1))


PARTIAL = """
import functools, torch
def scaled(x, y, *, scale):
    return torch.linalg.inv(x @ x.T * scale + torch.eye(4, dtype=x.dtype)) @ y
model = functools.partial(scaled, scale=2.0)
inputs = torch.eye(4), torch.ones(4, 2)
"""
CALLABLE = """
import torch
class Pipeline:
    def __init__(self):
        self.scale = 2.0
    def __call__(self, x):
        return torch.linalg.inv(x * self.scale)
model = Pipeline()
inputs = torch.eye(4)
"""


@pytest.mark.parametrize(("text", "name"), [(PARTIAL, "scaled"), (CALLABLE, "Pipeline")])
def test_what_can_be_called_is_scanned_as_a_function(write: Write, text: str, name: str) -> None:
    result = scanned(write(text), precisions=["half", "autocast-bf16"])
    assert (result.model.name, result.model.kind) == (name, "function")
    assert [gap.op for gap in result.run("half").gaps] == ["aten.linalg_inv_ex.default"]
    assert result.recommendation is not None
    inputs = "*inputs" if name == "scaled" else "inputs"
    expected = pasted(f"output = model({inputs})", text)
    torch.testing.assert_close(pasted(result.recommendation.code, text).float(), expected, rtol=0.05, atol=0)


def test_a_partial_of_a_class_makes_a_model(write: Write) -> None:
    text = "import functools, torch\nmodel = functools.partial(torch.nn.Linear, 3, 2)\ninputs = torch.ones(1, 3)"
    assert isinstance(load_target(str(write(text))).model, torch.nn.Linear)


@pytest.mark.parametrize("held", ["net", "[net]"])
def test_a_callable_that_holds_a_module_is_an_error(write: Write, held: str) -> None:
    made = f"net = torch.nn.Linear(3, 2)\nclass Pipe:\n    def __init__(self):\n        self.held = {held}"
    called = "    def __call__(self, x):\n        return x\nmodel = Pipe()\ninputs = torch.ones(1, 3)"
    path = write(f"import torch\n{made}\n{called}")
    with pytest.raises(UsageError, match="uses the module `held`"):
        load_target(str(path))


@pytest.mark.parametrize("helper", ["net(x)", "helper(x)"])
def test_a_function_that_uses_a_module_is_an_error(write: Write, helper: str) -> None:
    text = "import torch\nnet = torch.nn.Linear(3, 2)\ndef helper(x):\n    return net(x)\n"
    path = write(f"{text}def model(x):\n    return {helper}\ninputs = torch.ones(1, 3)")
    with pytest.raises(UsageError, match="uses the module `net`"):
        load_target(str(path))


def test_a_function_that_makes_a_model_of_its_argument_is_an_error(write: Write) -> None:
    path = write("import torch\ndef model(width):\n    return torch.nn.Linear(3, 2)\ninputs = torch.ones(1, 3)")
    with pytest.raises(UsageError, match="a function that makes a model must need no arguments"):
        scanned(path)


class Inverse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.linear(x) + 4 * torch.eye(4, dtype=x.dtype))


X = torch.eye(4)


def test_a_script_module_is_scanned_without_its_modules() -> None:
    torch.manual_seed(0)
    result = scan_here(torch.jit.script(Inverse().eval()), X)
    assert result.model.kind == "script"
    for precision in ("half", "bfloat16"):
        run = result.run(precision)
        assert (run.status, [gap.op for gap in run.gaps]) == ("error", ["aten.linalg_inv_ex.default"])
    assert result.run("autocast-bf16").status == "ok"
    assert any("ScriptModule" in note for note in result.model.notes)


def test_the_cast_of_a_script_module_runs_as_printed(tmp_path: Path, write: Write) -> None:
    torch.manual_seed(0)
    saved = tmp_path / "module.pt"
    torch.jit.script(torch.nn.Linear(4, 4).eval()).save(str(saved))
    text = f"import torch\nmodel = torch.jit.load({str(saved)!r})\ninputs = torch.eye(4)"
    result = scanned(write(text), precisions=["bfloat16"])
    assert result.run("bfloat16").status == "ok"
    assert result.recommendation is not None
    # torch's `bfloat16()` raises for a ScriptModule
    assert pasted(result.recommendation.code, text).dtype == torch.bfloat16


def test_a_frozen_script_module_is_an_error() -> None:
    frozen = torch.jit.freeze(torch.jit.script(Inverse().eval()))
    with pytest.raises(UsageError, match=r"frozen ScriptModule(?s:.)*before torch\.jit\.freeze"):
        lowprec_check.scan(frozen, X)


@pytest.mark.parametrize("isolation", ["fork", "shared"])
def test_a_run_is_shown_as_soon_as_it_is_judged(isolation: Isolation, write: Write) -> None:
    path = write(f"{RETURNS_BOTH}model, inputs = build()\n")
    shown: list[ScanResult] = []
    numbers: list[int] = []
    options = ScanOptions(precisions=["bfloat16", "half"], times="off", further_inputs=0)
    for result in scan_file(TargetSpec(str(path)), options, isolation, show=shown.append):
        finished = {run.precision for run in result.runs if run.op_calls}
        assert finished == {run.precision for run in result.runs}
        numbers.append(len(shown))
    assert numbers[0] == 0, "fp32 is no row of its own"
    assert numbers[1] > 0
    assert [run.precision for run in shown[0].runs] == ["fp32", "bfloat16"]
    judged = shown[0].runs[1]
    assert (judged.status, judged.op_calls.op) == ("ok", [])
    assert [run.precision for run in shown[-1].runs] == ["fp32", "bfloat16", "half"]
