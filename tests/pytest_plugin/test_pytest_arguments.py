"""The fixture's methods: what they take, and the sentence for each wrong argument."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.fixture import lowprec as fixture
from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
NET = nn.Linear(8, 8)
POSITIVE = "is not a positive number"


class Loss(nn.Module):
    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return ((y - target) ** 2).mean()


class Masked(nn.Module):
    """Has nothing but integer and boolean buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(3))
        self.register_buffer("mask", torch.eye(3, 8) > 0)

    def forward(self, x: Tensor) -> Tensor:
        return x[self.rows].masked_fill(self.mask, 1.0)


# -- modules without parameters


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.ReLU(), X),
        (nn.Softmax(-1), X),
        (nn.BatchNorm1d(8, affine=False).eval(), X),
        (Loss(), (X, X + 1)),
        (Masked(), X),
        (torch.relu, X),
        (lambda x, y: x @ y, (X, X.T)),
        (functools.partial(torch.softmax, dim=-1), X),
    ],
    ids=["relu", "softmax", "buffers", "loss", "integer-buffers", "builtin", "lambda", "partial"],
)
def test_modules_without_parameters_and_functions(model: Any, inputs: Any) -> None:
    result = Lowprec().check(model, inputs, ["half", "autocast-bf16"])
    assert [run.status for run in result.runs] == ["ok"] * 3
    Lowprec().assert_no_gaps(model, *(inputs if isinstance(inputs, tuple) else (inputs,)))


def test_a_function_runs_on_other_backends_and_in_other_processes() -> None:
    assert Lowprec().check(torch.relu, X, backend="jit").run("half", "jit").status == "ok"
    assert Lowprec().check(lambda x: x.exp(), X, isolation="none").run("half").status == "ok"


def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv(x)


def test_a_function_that_fails_is_shown_by_its_name_and_line() -> None:
    line = inverse.__code__.co_firstlineno + 1
    with pytest.raises(AssertionError, match="inverse does not pass in half on cpu") as caught:
        Lowprec().check(inverse, torch.eye(4))
    assert f"test_pytest_arguments.py:{line}" in str(caught.value)
    with pytest.raises(AssertionError, match="linalg_inv does not pass") as caught:
        Lowprec().check(torch.linalg.inv, torch.eye(4))
    assert "function_module.py" not in str(caught.value)


def test_the_tolerance_is_held_for_a_module_without_parameters() -> None:
    with pytest.raises(AssertionError, match="LP301 output-mismatch"):
        Lowprec().check(nn.Softmax(-1), X, tolerance=1e-9)


# -- wrong arguments

WRONG: list[tuple[Callable[[Lowprec], Any], str]] = [
    (lambda f: f.check(NET, X, precision="half", precisions="half"), "Both precision and precisions are given"),
    (lambda f: f.check(NET, X, dtype=torch.half), r"check\(\) has no argument 'dtype'.\nDid you mean precision\?"),
    (lambda f: f.check(NET, X, tol=1), "no argument 'tol'.\nDid you mean tolerance\\?"),
    (lambda f: f.check(NET, X, atol=1), "Did you mean tolerance.* there is no absolute one"),
    (lambda f: f.check(NET, X, tolerence=1), "Did you mean tolerance"),
    (lambda f: f.check(NET, X, backends="eager"), r"Did you mean backend\? check\(\) takes one backend"),
    (lambda f: f.check(NET, X, whatever=1), "Its arguments are model, inputs, precision"),
    (lambda f: f.check(NET), r"missing a required argument: 'inputs'.\nCall it as lowprec.check\(model, inputs, …\)"),
    (lambda f: f.check(NET, X, X), r"precision is of type Tensor.\n.* Several inputs are one argument"),
    (lambda f: f.check(NET, X, []), "No precision is given"),
    (lambda f: f.check(NET, X, backend="inductr"), "Did you mean inductor"),
    (lambda f: f.check(NET, X, device="tpu"), "Unknown device 'tpu'.\nChoose from cpu, cuda, xpu, mps"),
    (lambda f: f.check(NET, X, device=0), "Unknown device 0"),
    (lambda f: f.check(NET, X, device=["cpu"]), "one device, not several"),
    (lambda f: f.check(NET, X, ""), "No precision is given"),
    (lambda f: f.check(NET, X, "int4"), "Unknown precision 'int4'.\nChoose from bfloat16, autocast-bf16, half"),
    (lambda f: f.check(NET, X, plan="yes"), "plan 'yes' is not a boolean.\nWrite plan=True or plan=False"),
    (lambda f: f.check(NET, X, plan=1), "plan 1 is not a boolean"),
    (
        lambda f: f.check(NET, X, without_kernel="dot"),
        "^'dot' names no kernel to run without.\nWrite an op and a dtype",
    ),
    (lambda f: f.check(NET, X, without_kernel=["dot.nope:half"]), "no op aten.dot.nope.\naten.dot has default, out"),
    (lambda f: f.check(NET, X, device="cpu:x"), "Unknown device 'cpu:x'.\nWrite cpu, or cpu:0"),
    (lambda f: f.assert_supported("dot", backward="yes"), "backward 'yes' is not a boolean"),
    (lambda f: f.assert_supported("dot", backward=None), "backward None is not a boolean"),
    (lambda f: f.assert_supported("dot", device="cuda:x"), "Unknown device 'cuda:x'.\nWrite cuda, or cuda:0"),
    (lambda f: f.assert_no_gaps(NET, X, dtype="int8"), "'int8' is not a dtype.\nChoose torch.half or torch.bfloat16.$"),
    (lambda f: f.record("bfloat"), "Did you mean bfloat16\\? Choose torch.half or torch.bfloat16.$"),
    (lambda f: f.cast(NET, "int4"), "Unknown precision 'int4'.\nChoose from bfloat16, autocast-bf16, half"),
    (lambda f: f.autocast(), r'name a precision: lowprec.autocast\("half"\)'),
    (lambda f: f.check(NET, X, budget=-1), "budget -1 is not a positive number"),
    (lambda f: f.check(NET, X, loss=3), "loss is of type int"),
    (lambda f: f.check(nn.Linear, X), "Linear is a class"),
    (lambda f: f.check(X, X), "of type Tensor, not torch.nn.Module"),
    (lambda f: f.check(lambda x: NET(x) + 1, X), "calls the module Linear, whose parameters would not be cast"),
    (lambda f: f.check(NET.forward, X), "forward calls the module Linear"),
    (lambda f: f.check(nn.Flatten(), X.long()), "no floating-point parameters or inputs to cast"),
    (lambda f: f.assert_supported("dot", precision=torch.half), "Did you mean dtype"),
    (lambda f: f.assert_supported("dot", dtype=[torch.half]), "one dtype, not several"),
    (lambda f: f.assert_supported("dot", dtype=None), "of type NoneType, not a dtype"),
    (lambda f: f.assert_supported("dot", device="mps"), "Unknown device 'mps'.\nChoose from cpu, cuda, xpu"),
    (lambda f: f.assert_supported(torch.dot), 'Give the name, such as "dot"'),
    (lambda f: f.assert_supported("dot", torch.half), "too many positional arguments"),
    (lambda f: f.assert_no_gaps(NET, X, precision=torch.half), "Did you mean dtype"),
    (lambda f: f.assert_no_gaps(torch.mm, X, X.T, precision=torch.half), "Did you mean dtype"),
    (lambda f: f.assert_no_gaps(NET, X, tolerance=1), "Its arguments are dtype and device"),
    (lambda f: f.assert_no_gaps(NET(X)), "The function is a Tensor"),
    (lambda f: f.assert_no_gaps(nn.Linear, 8, 8), "The function is the class Linear"),
    (lambda f: f.assert_no_gaps(NET, X, dtype=["half"]), "one dtype, not several"),
    (lambda f: f.record(precision=torch.half), "Did you mean dtype"),
    (lambda f: f.record(NET), "of type Linear, not a dtype"),
    (lambda f: f.cast(X, dtype=torch.half), "Did you mean precision"),
    (lambda f: f.cast(X, ["half"]), "one precision, not several"),
    (lambda f: f.cast(), "missing a required argument: 'value'"),
    (lambda f: f.autocast(dtype=torch.half), "Did you mean precision"),
    (lambda f: f.autocast("half", tolerance=1), "Its argument is precision"),
    (lambda f: f.allclose(X, X, rtol=1e-3), "Did you mean tolerance"),
    (lambda f: f.allclose(X, X, 1e-3), "a precision, not a float.\nWrite tolerance=0.001"),
    (lambda f: f.allclose(X, X, precisions=["half"]), r"allclose\(\) takes one precision"),
    (lambda f: f.allclose(X, precision="half"), "missing a required argument: 'reference'"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_argument_gets_a_sentence(number: int) -> None:
    call, message = WRONG[number]
    with pytest.raises(UsageError) as caught:
        call(Lowprec())
    assert re.search(message, str(caught.value))
    assert caught.value.hint is not None


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), True, "1e-3", numpy.float32(-1), X[0, 0], [0.1]])
def test_a_tolerance_is_a_positive_number(value: Any) -> None:
    for call in (lambda f: f.check(NET, X, tolerance=value), lambda f: f.allclose(X, X, "half", tolerance=value)):
        with pytest.raises(UsageError, match=POSITIVE):
            call(Lowprec())


def test_what_looks_like_an_argument_is_passed_on_to_a_function_that_takes_it() -> None:
    taken: list[Any] = []

    def function(x: Tensor, *, precision: Any = None, **others: Any) -> Tensor:
        taken.extend([precision, others])
        return x

    Lowprec().assert_no_gaps(function, X, precision=3, tolerance=4)
    assert taken == [3, {"tolerance": 4}]
    Lowprec().assert_no_gaps(torch.allclose, X, X, rtol=1.0)  # written in C++: its arguments are unknown


def test_an_exception_of_the_function_is_not_taken_for_a_wrong_call() -> None:
    def broken(x: Tensor) -> Tensor:
        raise TypeError("missing a required argument")

    with pytest.raises(AssertionError, match="TypeError: missing a required argument"):
        Lowprec().assert_no_gaps(broken, X)


def test_arguments_in_other_forms() -> None:
    lowprec = Lowprec()
    assert lowprec.check(NET, X, precisions=["half"], device=torch.device("cpu")).run("half").status == "ok"
    assert lowprec.check(NET, X, tolerance=numpy.float32(0.5)).options["tolerance"] == 0.5
    assert lowprec.assert_supported("dot", device="xpu:0").device == "xpu"
    assert lowprec.allclose(X * 1.01, X, tolerance=0.02)
    assert not lowprec.allclose(X * 1.01, X, "half", tolerance=0.005)


# -- nothing to cast, scripted modules


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.sum, (torch.arange(3),)),
        (nn.Flatten(), (torch.ones(1, 3, dtype=torch.long),)),
        (lambda: torch.linalg.inv(torch.eye(3)), ()),
    ],
    ids=["function", "module", "no-arguments"],
)
def test_assert_no_gaps_of_a_call_in_which_nothing_is_cast(function: Any, args: Any) -> None:
    with pytest.raises(UsageError, match="no floating-point parameters or inputs to cast"):
        Lowprec().assert_no_gaps(function, *args)


def test_a_function_may_cast_by_itself() -> None:
    half = X.half()
    Lowprec().assert_no_gaps(lambda: half @ half.T)
    with pytest.raises(AssertionError, match="linalg_inv_ex"):
        Lowprec().assert_no_gaps(lambda: torch.linalg.inv(torch.eye(3).half()))
    with pytest.raises(UsageError, match="to cast"):
        Lowprec().assert_no_gaps(lambda: half @ half.T, dtype="bfloat16")


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_scripted_modules_are_cast(dtype: torch.dtype) -> None:
    scripted = torch.jit.script(nn.Linear(8, 8))
    Lowprec().assert_no_gaps(scripted, X, dtype=dtype)
    assert Lowprec().cast(scripted, dtype)(X.to(dtype)).dtype == dtype
    assert scripted.weight.dtype == torch.float32
    with pytest.raises(AssertionError, match=r"linalg_inv_ex"):
        Lowprec().assert_no_gaps(torch.jit.script(Inverse()), X.T @ X, dtype=dtype)


def test_arguments_of_another_kind() -> None:
    with pytest.raises(UsageError, match=r'such as "aten::dot"'):
        Lowprec().assert_supported(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="The model is of type int"):
        Lowprec().record("half", model=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Linear is a class"):
        Lowprec().cast(nn.Linear, "half")


def test_arguments_are_named_in_place_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a scan are written for the command line, where it is started most often."""

    def fails(*_: Any, **__: Any) -> None:
        raise UsageError("It took too long (--budget-error off).", "Increase --budget, or use --device cpu.")

    monkeypatch.setattr(fixture, "scan", fails)
    with pytest.raises(UsageError) as caught:
        Lowprec().check(NET, X)
    assert str(caught.value) == (
        'It took too long (--budget-error off).\nIncrease budget, or use device="cpu".'
    )  # the fixture has no argument of the first name
    monkeypatch.setattr(fixture, "scan", lambda *_, **__: (_ for _ in ()).throw(UsageError("No.", RUN)))
    with pytest.raises(UsageError, match=RUN):
        Lowprec().check(NET, X)


RUN = "Predict it with: lowprec-check scan TARGET --device xpu"
