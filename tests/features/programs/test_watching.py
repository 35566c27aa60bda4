"""That a program does what it did before while it is watched, and what is seen of it."""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec_check import UsageError, watch
from lowprec_check.features.programs.calls_of_model import CallsOfModel, Room
from lowprec_check.features.programs.program_code import why_no_code
from lowprec_check.features.programs.program_scan import Assignment, FirstCall, ProgramScan, ScannedModel
from lowprec_check.torchkit.dispatch_mode import is_without_values


class Net(nn.Module):
    """Has a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(x)
        return output

    def decode(self, x: Tensor) -> Tensor:
        """By the part."""
        output: Tensor = self.last(x)
        return output


def in_fake_mode(net: nn.Module, x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        output: Tensor = net(torch.ones_like(x))
        return output


def with_fake_weights(_net: nn.Module, _x: Tensor) -> Tensor:
    with FakeTensorMode():
        net, x = Net(), torch.ones(2, 4)
    output: Tensor = net(x)
    return output


TRANSFORMED: dict[str, Callable[[Any, Tensor], Any]] = {
    "trace": lambda net, x: torch.jit.trace(net, x)(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "vmap of a method": lambda net, x: torch.func.vmap(net.decode)(x),
    "fx": lambda net, x: torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(net)))(x),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x[0]),
    "fake": in_fake_mode,
    "fake weights": with_fake_weights,
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_calls_without_values_are_left_alone(transformed: Callable[[Any, Tensor], Any]) -> None:
    net, x = Net().eval(), torch.ones(2, 4)
    expected = transformed(net, x)
    with watch() as program:
        found = transformed(net, x)
        net(x)
    assert found.shape == expected.shape
    assert {type(model.module).__name__: model.calls for model in program.models}["Net"] == 1


def test_a_traced_model_is_one_itself() -> None:
    net, x = Net().eval(), torch.ones(2, 4)
    with watch() as program:
        traced = torch.jit.trace(net, x)
        traced(x)
    assert [(model.name, model.calls) for model in program.models] == [("traced", 1)]


def test_whether_there_are_values_is_asked_quickly() -> None:
    assert not is_without_values()
    # 0.3 µs, and the least of many, as others may have the core
    assert min(timeit.repeat(is_without_values, number=1000, repeat=50)) < 3e-3


def test_calls_are_left_alone_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    capturing = iter([True, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    net = nn.Linear(4, 4)
    with watch() as program:
        net(torch.ones(1, 4))
        net(torch.ones(1, 4))
    assert [model.calls for model in program.models] == [1]


def test_a_call_that_fails_is_as_if_it_were_not_made() -> None:
    net = nn.Linear(4, 4)
    with watch() as program:
        for size in (5, 4, 4, 6):
            try:
                net(torch.full((1, size), float(size)))
            except RuntimeError:
                continue
    (model,) = program.models
    assert model.calls == 2
    assert [call.args[0].shape[1] for call in model.kept] == [4]
    with watch() as program, pytest.raises(RuntimeError):
        net(torch.ones(1, 5))
    assert program.models == ()


def test_a_call_that_fails_gives_its_memory_back() -> None:
    room = Room()
    calls = CallsOfModel(nn.Linear(4, 4), "", room)
    calls.failed(calls.note((torch.full((1, 4), 9.0),), {}, None))
    left = dict(room._left)
    for value in (1.0, 2.0):
        calls.note((torch.full((1, 4), value),), {}, None)
    assert [call.number for call in calls.kept()] == [1, 2]
    calls.forget()
    assert room._left == left


def test_a_method_that_failed_first_is_seen_when_it_works() -> None:
    net = Net()
    with watch() as program:
        for size in (5, 4):
            try:
                net.decode(torch.ones(1, size))
            except RuntimeError:
                continue
    assert [(model.name, model.calls) for model in program.models] == [("net.decode", 1)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whether_a_model_writes_to_its_inputs_is_seen(mode: Any) -> None:
    class Writer(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.last(x))

    with mode(), watch() as program:
        for net in (Net(), Writer()):
            net(torch.ones(1, 4))
    assert [model.writes for model in program.models] == [False, True]


def test_a_method_that_was_kept_counts_no_more_afterwards() -> None:
    net = Net()
    with watch() as program:
        decode, call = net.decode, functools.partial(nn.Module.__call__, net)
        decode(torch.ones(1, 4))
        call(torch.ones(1, 4))
    for _ in range(3):
        decode(torch.ones(1, 4))
        call(torch.ones(1, 4))
    assert [model.calls for model in program.models] == [1, 1]


def test_models_that_one_variable_stood_for_have_names_of_their_own() -> None:
    x = torch.ones(1, 4)
    with watch() as program:
        for _ in range(3):
            net = Net()
            x = net(x)
            del net
    names = [model.name for model in program.models]
    assert len(set(names)) == 3
    models = [
        ScannedModel(name=name, kind="Net", calls=1, kept=[1], key=f"Net#{number}", place=FirstCall("infer.py:11"))
        for number, name in enumerate(names)
    ]
    why = "There is no code to paste: several models are called at infer.py:11, not each by a variable of its own."
    assigned = {model.key: Assignment("half") for model in models}
    assert why_no_code(ProgramScan(tool="", target="infer.py", models=models), assigned) == why
    assert "no variable" in why_no_code(ProgramScan(tool="", target="infer.py", models=models[:1]), assigned)


class Own(nn.Linear):
    """Is called by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """Without torch."""
        return x @ self.weight


def test_a_model_with_a_call_of_its_own_is_named() -> None:
    with watch() as program:
        own = Own(4, 4)
        own(torch.ones(1, 4))
    with pytest.raises(UsageError, match="own has a `__call__` of its own"):
        program.scan()
