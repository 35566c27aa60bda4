"""Verdicts that version 0.1.0 got wrong, each against what the plain model does when it is called."""

from __future__ import annotations

import collections
import copy
import ctypes
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import runs_here, scan_here, screen_of
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_check import render, scan
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.status import why
from lowprec_check.features.plan.apply import apply
from lowprec_check.features.plan.planner import find_plan
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
UNEVEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
"""40 elements: normal random numbers of this shape differ between fp32 and 16 bits on any CPU."""


class Wrapped(nn.Module):
    """A linear layer before what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


ONE_RUN: dict[str, Any] = {"plan": False, "further_inputs": 0, "explain": "all"}


def run_of(model: nn.Module, precision: str, inputs: Any = X, **options: Any) -> Run:
    result = scan_here(model, inputs, precisions=[precision], **ONE_RUN | options)
    found = result.run(precision)
    assert not [note for note in found.notes if "failed" in note], found.notes
    return found


def findings(result: ScanResult, code: str) -> list[Diagnostic]:
    return [found for found in result.diagnostics if found.code == code]


# -- 1: models that draw random numbers


class Overflows(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(())
        return self.linear(x).exp() * 6e4 * 50


@pytest.mark.parametrize("errors", ["none", "both"])
def test_infinity_in_the_output_of_a_random_model_is_nonfinite(errors: Any) -> None:
    found = run_of(Overflows(), "half", UNEVEN, errors=errors)
    assert found.status == "nonfinite"


class WrongMean(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        mean = (self.linear(x) + 3000.0) - 3000.0  # loses nearly all digits in half
        return torch.normal(mean, torch.full_like(mean, 1e-3))


def test_a_random_op_with_wrong_parameters_is_inaccurate() -> None:
    found = run_of(WrongMean(), "half", UNEVEN)
    assert found.status == "inaccurate"
    assert found.output_error is not None
    assert (found.output_error.rel_l2 or 0) > 0.1


class NanMean(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        big = self.linear(x).abs() * 6e4 + 6e4
        return torch.normal(big * 2 - big * 2, torch.ones_like(x))


def test_a_random_op_with_nan_parameters_is_nonfinite() -> None:
    assert run_of(NanMean(), "half", UNEVEN).status == "nonfinite"


class Ids(nn.Module):
    """Ids up to 4000 that pass through the low dtype."""

    def __init__(self, *, draw: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5000, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw:
            torch.rand(())
        return self.table((x * 1.0).long())


IDS = torch.arange(3001, 4001, 7).float()


def test_an_unused_draw_does_not_change_the_verdict() -> None:
    without, with_draw = (run_of(Ids(draw=draw), "half", IDS) for draw in (False, True))
    assert without.status == with_draw.status == "inaccurate"
    assert without.output_error == with_draw.output_error


class Noise(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.randn_like(y)


@pytest.mark.parametrize("precision", ["half", "autocast-bf16"])
@pytest.mark.parametrize("errors", ["none", "both"])
def test_noise_in_another_dtype_is_compared_with_fp32_on_the_same_noise(precision: str, errors: Any) -> None:
    found = run_of(Noise(), precision, UNEVEN, errors=errors)
    assert found.status == "ok"
    assert found.output_error is not None
    assert 0 < (found.output_error.rel_l2 or 0) < 2e-2


class Noisy(torch.nn.Dropout):
    def __init__(self) -> None:
        super().__init__(0.5)


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-fp16"])
def test_dropout_is_ok(precision: str) -> None:
    model = nn.Sequential(Wrapped(), Noisy(), nn.Linear(8, 8)).train()
    assert run_of(model, precision, UNEVEN).status == "ok"


@torch.library.custom_op("lowprec_verdicts::untagged", mutates_args=())
def untagged(x: Tensor) -> Tensor:
    """Draws without the tag that torch's own ops have."""
    return x + torch.randn_like(x)


class Untagged(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return untagged(self.linear(x))


def test_a_custom_op_that_draws_without_a_tag_is_compared_on_the_same_numbers() -> None:
    found = run_of(Untagged(), "half", UNEVEN)
    assert found.status == "ok"
    assert found.output_error is not None
    assert (found.output_error.rel_l2 or 0) < 1e-2


class Fails(Wrapped):
    """The op-by-op analysis ends early; the plain run does not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch.rand(())
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not under a mode")
        return y * 1e4 * 1e4


def test_a_run_whose_analysis_ended_early_is_judged_by_its_output() -> None:
    found = scan_here(Fails(), X, **ONE_RUN, precisions=["half"]).run("half")
    assert found.status == "nonfinite"
    assert not found.complete


def noise_like(y: Tensor) -> Tensor:
    """Other numbers in fp16 than in fp32."""
    return torch.normal(torch.zeros_like(y), torch.ones_like(y))


class DriftsWithNoise(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("time", torch.tensor(2047.0))

    def forward(self, x: Tensor) -> Tensor:
        self.time += 1.0
        y = self.linear(x)
        return y + noise_like(y) + (self.time - 2047)


def test_each_call_of_a_random_model_is_judged_on_its_own_draws() -> None:
    found = run_of(DriftsWithNoise(), "half", UNEVEN)
    assert (found.status, found.failed_call) == ("inaccurate", 3)  # 2048 + 1 is 2048 in half


class DrawsLater(Wrapped):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        return y if self.calls == 1 else y + noise_like(y)


class MasksAtRandom(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.masked_fill(noise_like(y) < 0, float("-inf"))


class NoiseBeforeZeros(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.linear(y + noise_like(y)) * 0.0


@pytest.mark.parametrize("make", [DrawsLater, MasksAtRandom, NoiseBeforeZeros])
def test_more_random_models_that_are_ok(make: Any) -> None:
    assert run_of(make(), "half", UNEVEN).status == "ok"


# -- 2: failures after the first call


class KeepsFp32(Wrapped):
    previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) if self.previous is None else self.linear(x) @ self.previous.T @ x
        self.previous = y.float()
        return y


def test_an_exception_in_the_second_call_is_an_error() -> None:
    result = scan_here(KeepsFp32(), X[:, :8], precisions=["half"])
    found = result.run("half")
    assert (found.status, found.failed_call) == ("error", 2)
    assert result.recommendation is None or result.recommendation.precision != "half"


class Exits(Wrapped):
    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.number, self.how, self.calls = number, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.number and self.linear.weight.dtype == torch.half:
            if self.how == "exit":
                os._exit(3)
            ctypes.string_at(0)
        return self.linear(x)


@pytest.mark.parametrize(("number", "how"), [(2, "exit"), (3, "signal")])
def test_a_death_in_a_later_call_is_a_crash_on_that_call(number: int, how: str) -> None:
    found = scan(Exits(number, how), X, precisions=["half"], times="off", **ONE_RUN).run("half")
    assert found.status == "crashed"
    assert (found.reason or "").endswith(f"on call {number}")
    assert why(found).text.count("on call") == 1


class Drifts(Wrapped):
    """Its state overflows in half in the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 200.0
        return self.linear(x) * self.scale


def test_an_overflow_in_a_later_call_is_nonfinite() -> None:
    found = run_of(Drifts(), "half")
    assert (found.status, found.failed_call) == ("nonfinite", 3)


class Fills(Wrapped):
    """Four calls fit."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0
        self.register_buffer("cache", torch.zeros(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[self.used : self.used + 4] = self.linear(x)
        self.used += 4
        return self.cache[: self.used] @ self.linear(x).T


def test_calls_that_measure_time_are_rewound() -> None:
    found = run_of(Fills(), "half", times="on")
    assert (found.status, found.calls) == ("ok", 3)
    assert found.latency_ms


# -- 3: nothing to compare


class Returns(Wrapped):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"none": None, "text": f"{y.shape}", "object": object()}[self.what]


@pytest.mark.parametrize("what", ["none", "text", "object"])
def test_an_output_without_numbers_is_judged_by_the_last_module(what: str) -> None:
    found = run_of(Returns(what), "half")
    assert (found.status, found.compared_module) == ("ok", "linear")
    assert found.output_error is not None
    assert found.output_error.rel_l2


class NothingAtAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> None:
        x * self.weight


def test_without_anything_to_compare_a_recommendation_says_so() -> None:
    result = scan_here(NothingAtAll(), X, precisions=["half", "bfloat16"])
    assert {run.status for run in result.runs[1:]} == {"unjudged"}
    assert result.run("half").output_error is None
    assert result.recommendation is not None
    assert "holds nothing to compare" in result.recommendation.reason
    assert verdict(result) == f"{result.recommendation.label} could not be judged"
    assert "passes" not in result.recommendation.reason
    assert render(result, "md").startswith("### ➖")
    assert "Use " not in render(result, "md")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * 6e4 * 6e4)


def test_before_a_head_of_zeros_what_feeds_it_is_compared() -> None:
    model = Head()
    found = run_of(model, "bfloat16")
    assert (found.status, found.compared_module) == ("ok", "body")
    assert run_of(model, "half").status == "nonfinite"  # infinity times zero


class Yields(Wrapped):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        yield self.linear(x)
        yield self.linear(x) * 1e5


def test_a_generator_is_run_and_its_values_are_compared() -> None:
    assert run_of(Yields(), "half").status == "nonfinite"
    assert run_of(Yields(), "bfloat16").status == "ok"


class Slots:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Packs(Wrapped):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(((self.linear(x) + 3000) - 3000).float())


class ArrayLike:
    """An array of another library."""

    __slots__ = ("_values",)

    def __init__(self, values: Any) -> None:
        self._values = values.tobytes(), values.dtype, values.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        data, kind, shape = self._values
        return np.frombuffer(data, kind).reshape(shape)


PACKS = {
    "array": lambda y: y.numpy(),
    "reversed array": lambda y: y.numpy()[::-1],
    "array of another byte order": lambda y: y.numpy().astype(">f4"),
    "array of long doubles": lambda y: y.numpy().astype(np.longdouble),
    "array of objects": lambda y: np.array([y.numpy(), None, "text"], dtype=object),
    "records": lambda y: np.rec.fromarrays([y.numpy()[:, 0], y.numpy()[:, 1]], names="a,b"),
    "masked array": lambda y: np.ma.masked_array(y.numpy()),
    "array-like": lambda y: ArrayLike(y.numpy()),
    "number": lambda y: y.sum().numpy()[()],
    "slots": Slots,
    "deque": lambda y: collections.deque([y]),
    "map": lambda y: map(torch.neg, [y]),
    "zeros and ids": lambda y: {"loss": torch.zeros(()), "ids": (y * 1000).long()},
    "sparse": lambda y: y.to_sparse(),
    "sparse rows": lambda y: y.to_sparse_csr(),
    "nested": lambda y: torch.nested.nested_tensor([y[:2], y], layout=torch.jagged),
}


WITHOUT_REFERENCE = {
    "reversed array", "array of another byte order", "array of long doubles", "records", "array-like", "number",
    "sparse", "sparse rows", "nested",
}  # fmt: skip


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_outputs_of_many_kinds_are_compared(pack: str) -> None:
    found = scan_here(Packs(PACKS[pack]), X, **ONE_RUN, precisions=["half"]).run("half")
    assert (found.status, found.compared_module) == ("inaccurate", None)
    assert (found.lockstep_error is None) == (pack in WITHOUT_REFERENCE)


class Tiny(Wrapped):
    """Its output is zero in fp16 alone, and its errors cannot be followed."""

    def forward(self, x: Tensor) -> Any:
        return (self.linear(x) * 1e-9).float().numpy() * 1.0


def test_zeros_of_a_run_are_not_those_of_fp32() -> None:
    shown = " ".join(screen_of(scan_here(Tiny(), X, **ONE_RUN, precisions=["half"]), verbose=True).split())
    assert "all zeros" not in shown
    assert "the output is tiny" in shown


class Gradient(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(self.linear(x).tanh().sum(), x)[0]


def test_inputs_keep_their_gradient_flag() -> None:
    assert run_of(Gradient(), "half", X.clone().requires_grad_()).status == "ok"


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


def test_class_ids_are_counted_not_subtracted() -> None:
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
    model = Classes()
    with torch.no_grad():
        flips = (model(x) != model.bfloat16()(x.bfloat16())).float().mean()
    found = run_of(Classes(), "bfloat16", x)
    assert found.output_error is not None
    assert found.output_error.rel_l2 is None
    assert found.output_error.mismatched == pytest.approx(float(flips), abs=0.005)
    assert found.status == ("ok" if flips <= 5e-2 else "inaccurate")


# -- 4: compiled by the user


def _nan_when_compiled(x: Tensor) -> Tensor:
    return x * float("nan") if torch.compiler.is_compiling() and x.dtype != torch.float32 else x


class CompiledDiffers(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return _nan_when_compiled(self.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model_is_run_compiled(inside: bool) -> None:
    model = CompiledDiffers()
    compiled: Any = torch.compile(model, backend="eager")
    whole = nn.Sequential(compiled) if inside else compiled
    result = scan_here(whole, X, **ONE_RUN, precisions=["bfloat16"])
    found = result.run("bfloat16")
    assert found.status == "nonfinite"
    assert found.complete
    assert not inside or len(found.op_calls)
    if not inside:
        assert any("compiled" in note for note in result.model.notes)


# -- 5: infinities and models without parameters


class Masked(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.masked_fill(torch.eye(4, 8, dtype=torch.bool), float("-inf"))


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-bf16"])
def test_equal_infinities_match(precision: str) -> None:
    found = run_of(Masked(), precision)
    assert found.status == "ok"
    assert found.output_error is not None
    assert found.output_error.rel_l2


class OtherInfinity(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        sign = 1.0 if x.dtype == torch.half else -1.0
        return torch.cat([self.linear(x), torch.full((4, 1), sign * float("inf"), dtype=x.dtype)], 1)


def test_another_infinity_is_nonfinite() -> None:
    assert run_of(OtherInfinity(), "half").status == "nonfinite"
    assert run_of(OtherInfinity(), "bfloat16").status == "ok"


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-fp16"])
def test_a_model_without_parameters_is_scanned(precision: str) -> None:
    assert run_of(nn.Softmax(-1), precision).status == "ok"


def test_a_loss_is_scanned() -> None:
    assert run_of(nn.MSELoss(), "half", (X, X + 1)).status == "ok"


# -- 6: mixed dtypes


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("precision", ["autocast-bf16", "autocast-fp16", "half", "bfloat16"])
def test_a_model_with_mixed_dtypes_runs_as_its_user_has_it(precision: str) -> None:
    model, dtype = Mixed(), torch.bfloat16 if "bf" in precision else torch.half
    found = scan_here(model, X, precisions=[precision], **ONE_RUN).run(precision)
    assert found.status == "ok"
    assert found.output_error is not None
    with torch.no_grad():
        reference = Mixed().float()(X)
        with torch.autocast("cpu", dtype=dtype, enabled=precision.startswith("autocast")):
            mine = Mixed()(X) if precision.startswith("autocast") else Mixed().to(dtype)(X.to(dtype))
    error = float((mine.float() - reference).norm() / reference.norm())
    assert found.output_error.rel_l2 == pytest.approx(error, rel=1e-3)


# -- 7: hooks and closures that hold the model's objects


class Keeper:
    """A hook object that is also an attribute."""

    def __init__(self) -> None:
        self.features: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features = output


class WithHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.keeper = Keeper()
        self.body.register_forward_hook(self.keeper)

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        assert self.keeper.features is not None, "the hook filled another object"
        return self.head(self.keeper.features)


FEATURES: dict[str, Tensor] = {}


class WithDict(WithHook):
    def __init__(self) -> None:
        super().__init__()
        store: dict[str, Tensor] = {}
        self.store = store
        self.body.register_forward_hook(lambda module, args, output: store.update(y=output))

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        FEATURES["y"] = self.store.pop("y")
        return self.head(FEATURES["y"])


class Patched(WithHook):
    def __init__(self) -> None:
        super().__init__()
        original, seen = self.body.forward, []

        def forward(x: Tensor) -> Tensor:
            seen.append(original(x))
            return seen[-1]

        self.seen = seen
        self.body.forward = forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.seen[-1])


@pytest.mark.parametrize("isolation", ["fork", "none"])
@pytest.mark.parametrize("make", [WithHook, WithDict, Patched])
def test_objects_that_hooks_and_closures_hold_stay_the_models_own(make: Any, isolation: Any) -> None:
    model = make()
    FEATURES.clear()
    for precision in ("half", "autocast-bf16"):
        found = run_of(model, precision, isolation=isolation, times="on")
        assert found.status == "ok"
        assert found.perturbed is False
    assert model.keeper.features is None
    assert not FEATURES
    assert not getattr(model, "store", None)
    assert not getattr(model, "seen", None)


STEP = 0


class InGlobal(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        global STEP  # noqa: PLW0603 - what the test is about
        STEP += 1
        return self.linear(x) * STEP


class InClass(Wrapped):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        InClass.calls = min(InClass.calls + 1, 2)
        return (self.linear(x) * (1 + 0.03 * InClass.calls) + 60) - 60


class InTeacher(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9)
        return self.linear(x) + self.teacher[0].to(x.dtype)(x)


class Recent(collections.OrderedDict[str, int]):
    def __getitem__(self, key: str) -> int:
        self.move_to_end(key)
        return super().__getitem__(key)

    def clear(self) -> None:
        raise RuntimeError("not here")


class InSubclass(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.recent = Recent(a=1, b=2)

    def forward(self, x: Tensor) -> Tensor:
        self.recent["new"] = self.recent["a"] + len(self.recent)
        return self.linear(x)


class InBuffer(Wrapped):
    """The class of a module is exchanged in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.nn.utils.parametrize.is_parametrized(self.linear):
            torch.nn.utils.parametrize.register_parametrization(self.linear, "weight", nn.Identity())
        return self.linear(x)


@pytest.mark.parametrize("isolation", ["fork", "none"])
@pytest.mark.parametrize("make", [InGlobal, InClass, InTeacher, InSubclass, InBuffer])
def test_state_in_many_places_is_rewound_and_restored(make: Any, isolation: Any) -> None:
    model = make()
    before = copy.deepcopy(model)
    for precision in ("half", "autocast-bf16"):
        found = run_of(model, precision, isolation=isolation, times="on")
        assert found.perturbed is False
        assert not found.nondeterministic
        assert (found.status == "inaccurate") == (make is InClass)
    assert (STEP, InClass.calls) == (0, 0)
    assert type(model.linear) is nn.Linear
    assert torch.equal(model.linear.weight, before.linear.weight)
    if make is InTeacher:
        assert torch.equal(model.teacher[0].weight, before.teacher[0].weight)
    if make is InSubclass:
        assert list(model.recent) == ["a", "b"]


def test_scripted_modules_are_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.BatchNorm1d(8))).eval()
    for precision in ("half", "autocast-bf16"):
        assert run_of(model, precision, isolation="none").status == "ok"
    model(X)
    assert model[1].running_mean.dtype == torch.float32


class UsesGenerator(Wrapped):
    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.linear(x) + torch.randn(x.shape, generator=generator).to(x.dtype)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_mutable_inputs_are_rewound_and_restored(isolation: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    found = run_of(UsesGenerator(), "half", {"x": X, "generator": generator}, isolation=isolation, times="on")
    assert (found.status, found.perturbed) == ("ok", False)
    assert torch.equal(state, generator.get_state())


class Counts(Wrapped):
    """State that nothing can rewind."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + 0.01 * next(self.numbers))


def test_state_that_cannot_be_rewound_is_not_called_nondeterministic() -> None:
    result = scan(Counts(), X, **ONE_RUN, precisions=["half"], times="off")
    found = result.run("half")
    assert (found.status, found.perturbed, result.runs[0].nondeterministic) == ("ok", None, False)
    assert found.complete
    assert any("cannot rewind" in note for note in result.model.notes)
    assert found.tolerance == 1e-2


# -- 8: what the reference may not write to


class WritesIntegers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear, self.how = nn.Linear(8, 64), how
        self.register_buffer("index", torch.zeros(4, 3, dtype=torch.long))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1e-4 + 1.0  # nearly equal values: other choices in half
        if self.how == "topk":
            torch.topk(y, 3, out=(torch.empty(4, 3, dtype=y.dtype), self.index))
        elif self.how == "copy":
            self.index.copy_((y * 2047).round()[:, :3])
        elif self.how == "bucketize":
            edges = torch.linspace(0.999, 1.001, 500, dtype=y.dtype)
            torch.bucketize(y[:, :3], edges, out=self.index)
        else:
            self.position += 7
            return y + self.position
        return self.index.to(y.dtype) / 100 + y[:, :3]


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
@pytest.mark.parametrize("how", ["topk", "copy", "bucketize", "position"])
def test_the_reference_does_not_write_into_the_models_integers(how: str, reference: Any) -> None:
    found = run_of(WritesIntegers(how), "half", reference=reference)
    assert found.perturbed is False


class MovesWeights(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.data.mul_(1.5)
        return self.linear(x)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_parameters_that_a_call_changes_are_rewound(isolation: Any) -> None:
    model = MovesWeights()
    before = model.linear.weight.detach().clone()
    for precision in ("half", "autocast-bf16"):
        found = run_of(model, precision, isolation=isolation, times="on")
        assert found.status == "ok"
        assert found.perturbed is False
    assert torch.equal(model.linear.weight, before)


# -- 10: autocast inside kernels


@torch.library.custom_op("lowprec_verdicts::projected", mutates_args=())
def projected(x: Tensor, weight: Tensor) -> Tensor:
    """Autocast reaches the product inside."""
    return (x @ weight).float() * 2


class Inside(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.how, self.linear, self.bilinear = how, nn.Linear(8, 8), nn.Bilinear(8, 8, 6)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.how == "affine_grid":
            return F.affine_grid(x[:2, :6].reshape(2, 2, 3), [2, 1, 5, 5], align_corners=False)
        if self.how == "bilinear":
            return self.bilinear(x, x)
        if self.how == "pinv":
            return torch.linalg.pinv(x @ x.T + torch.eye(4))
        if self.how == "custom":
            return projected(y, self.linear.weight)
        if self.how == "product":  # of Python: autocast has a kernel for torch.prod
            grid = F.affine_grid(x[:2, :6].reshape(2, 2, 3), [2, 1, 5, 5], align_corners=False)
            return math.prod([grid, grid])
        if self.how == "cdist":
            return torch.cdist(x.repeat(10, 1), x.repeat(10, 1) + 1)
        with torch.inference_mode():
            z = torch.einsum("ij,kj->ik", x, y) if self.how == "inference" else self.lstm(x[:, None])[0]
            return F.interpolate(z.reshape(1, 1, 4, -1), scale_factor=2, mode="bilinear")


@pytest.mark.parametrize("precision", ["autocast-bf16", "autocast-fp16"])
@pytest.mark.parametrize("how", ["affine_grid", "bilinear", "pinv", "custom", "cdist", "product", "inference", "lstm"])
def test_autocast_reaches_inside_kernels_as_in_the_plain_run(how: str, precision: str) -> None:
    if how == "lstm" and (precision == "autocast-fp16" or not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("CPUs without arithmetic in the dtype have no such kernel")
    result = scan(Inside(how), X, precisions=[precision], isolation="none", **ONE_RUN)
    found = result.run(precision)
    assert found.perturbed is False, found.notes
    assert not found.gaps
    assert found.latency_ms
    assert found.peak_memory_bytes


# -- 11: higher-order ops


class Branches(Wrapped):
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (y,))


@pytest.mark.slow
def test_ops_inside_a_higher_order_op_are_recorded() -> None:
    found = run_of(Branches(), "bfloat16", times="on")
    assert found.status == "ok"
    assert found.latency_ms
    assert {"aten.sin.default", "aten.cos.default"} & set(found.op_calls.op)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_recorded() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(Wrapped):
        def forward(self, x: Tensor) -> Any:
            y = self.linear(x).reshape(1, 2, 16, 1).expand(1, 2, 16, 16)
            return flex_attention(y, y, y)

    found = run_of(Flex(), "bfloat16", times="on")
    assert found.status == "ok"
    assert found.latency_ms
    assert any("softmax" in op or "exp" in op for op in found.op_calls.op), set(found.op_calls.op)


# -- 15: choices


def test_choices_behind_wrong_ids_are_a_warning() -> None:
    class WrongIds(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * 1000).round().long()

    result = scan_here(WrongIds(), X, **ONE_RUN, precisions=["half"])
    assert result.run("half").status == "inaccurate"
    assert {d.severity for d in findings(result, "LP304")} == {"warning"}
    assert "of the values differ, over the tolerance" in findings(result, "LP301")[0].message


def test_choices_that_cause_the_error_are_a_warning() -> None:
    result = scan_here(Ids(), IDS, **ONE_RUN, precisions=["half"])
    assert result.run("half").status == "inaccurate"
    found = findings(result, "LP304")
    assert [(d.severity, d.op) for d in found] == [("warning", "aten._to_copy.default")]
    assert "with the same choices in fp32" in found[0].message


# -- 16: severity


class Saturates(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.eye(4, 8, dtype=x.dtype)
        return (self.linear(x) + mask * 6e4 * -10.0).softmax(-1)


def test_a_saturated_mask_of_a_passing_run_is_a_note() -> None:
    result = scan_here(Saturates(), X, **ONE_RUN, precisions=["half"])
    assert result.run("half").status == "ok"
    assert {d.severity for d in findings(result, "LP201")} == {"note"}


class Cancels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = 1.0 + x * 1e-5
        return torch.cat([(y - 1.0) * self.weight, x])


def test_cancellation_is_not_called_underflow() -> None:
    result = scan_here(Cancels(), X.abs() + 0.5, **ONE_RUN, precisions=["half"])
    assert not findings(result, "LP202")


# -- 17: plans


class DemandsFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.dtype != torch.float32:
            raise TypeError("expected fp32")
        return x * 2


class Strict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = DemandsFp32.apply(x)
        return result


class StrictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.strict, self.head = nn.Linear(8, 8), Strict(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.strict(self.linear(x)))


def test_a_plan_blames_what_raises() -> None:
    plan = find_plan(StrictBlock(), X, dtype="half", base="cast").plan
    assert plan is not None
    assert plan.keep_fp32 == ["strict"]
    assert "expected fp32" in plan.blame[0].why
    assert plan.blame[0].op is None


class RootHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.Linear(8, 8)
        self.project = nn.Linear(8, 8)
        self.register_forward_pre_hook(lambda module, args: (module.project(args[0]),))
        self.register_forward_hook(lambda module, args, output: output @ output.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x) * 300.0)


def test_a_plan_applies_to_a_model_with_hooks_of_its_own() -> None:
    model = RootHook()
    plan = find_plan(model, X, dtype="bf16", base="autocast").plan
    assert plan is not None
    space: dict[str, Any] = {"model": model, "inputs": X}
    exec(plan.code, space)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(apply(model, plan)(X), space["output"])


# -- 18: values that leave the tensors


class Item(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * y.abs().max().item()


def test_a_value_read_into_python_is_marked_in_its_row() -> None:
    found = run_of(Item(), "half")
    marked = [row.op for row in found.op_calls.rows() if row.to_python]
    assert marked == ["aten._local_scalar_dense.default"]


class StoredIn8Bits(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 8).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)).square() * 1e5


def test_a_model_with_fp8_weights_is_analyzed() -> None:
    result = scan_here(StoredIn8Bits().eval(), X, precisions="half", plan=False)
    run = result.run("half")
    assert (run.status, run.complete, run.notes) == ("nonfinite", True, [])
    assert [row.op for row in run.op_calls.rows() if row.spoils_output] == ["aten.mul.Tensor"]


# -- how often a run calls the model


class CountsCalls(Wrapped):
    """Its output is far from fp32's in 16 bits; from a generator of its own it may draw what fp32 draws otherwise."""

    def __init__(self, calls: Path, *, draws: bool) -> None:
        super().__init__()
        self.draws, self.path = draws, str(calls)

    def forward(self, x: Tensor) -> Tensor:
        with open(self.path, "a") as calls:  # what is in memory is rewound
            calls.write("x")
        if self.draws:
            generator = torch.Generator().manual_seed(3)
            return self.linear(x[:1, :5]) + torch.randn(5, 8, dtype=x.dtype, generator=generator)
        return self.linear(x) * (1.0 if x.dtype == torch.float32 else 2.0)


def runs_of_trials(model: nn.Module, calls: Path, precision: str, *, after_base: bool) -> tuple[Run, int]:
    """The run of a trial that keeps the first layer in fp32, and how many calls it made."""
    with runs_here(model, X) as runs:
        runs.reference()
        if after_base:
            runs.run(precision)
        calls.unlink()
        how: Any = {"measured": False, "instrumented": False, "status_only": True}
        return runs.run(precision, keep_fp32=("linear",), **how), len(calls.read_text())


@pytest.mark.parametrize(("after_base", "expected"), [(True, 1), (False, 4)])
def test_a_trial_that_fails_is_not_repeated_where_nothing_is_random(
    after_base: bool, expected: int, tmp_path: Path
) -> None:
    """Without the run of its base, one call more looks for random numbers."""
    calls = tmp_path / "calls"
    model = CountsCalls(calls, draws=False)
    found, made = runs_of_trials(model, calls, "half", after_base=after_base)
    assert (found.status, made) == ("inaccurate", expected)


def test_a_trial_of_a_model_with_a_generator_is_compared_with_the_same_numbers(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    model = CountsCalls(calls, draws=True)
    model.linear = nn.Linear(5, 8)
    found, made = runs_of_trials(model, calls, "bfloat16", after_base=True)
    assert (found.status, made) == ("ok", 9), "three calls, three that record draws, three of fp32 with the same ones"


def test_an_ablation_is_not_made_again_as_a_trial(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with runs_here(CountsCalls(calls, draws=False), X) as runs:
        runs.reference()
        how: Any = {"keep_fp32": ("linear",), "measured": False, "instrumented": False}
        ablation = runs.run("half", **how)
        calls.unlink()
        assert runs.run("half", **how, status_only=True) is ablation
    assert not calls.exists()


class SetsUp(Wrapped):
    """Half has no kernel for it; its first fp32 call takes ``seconds`` more. Each fp32 call is written to ``calls``."""

    def __init__(self, calls: Path, seconds: float) -> None:
        super().__init__()
        self.path, self.seconds, self.is_set_up = str(calls), seconds, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if x.dtype == torch.float32:
            time.sleep(0.0 if self.is_set_up else self.seconds)
            self.is_set_up = True
            with open(self.path, "a") as calls:
                calls.write("x")
        return y @ torch.linalg.inv(self.linear.weight)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.5, 1)])
def test_fp32_is_called_before_ops_have_a_limit_only_if_that_sets_something_up(
    seconds: float, expected: int, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    model = SetsUp(calls, seconds)
    model.linear = nn.Linear(8, 8)
    with runs_here(model, X) as runs:
        runs.reference()
        calls.write_text("")
        run = runs.run("half")
    assert (run.status, [gap.op for gap in run.gaps]) == ("error", ["aten.linalg_inv_ex.default"])
    assert len(calls.read_text()) == expected


class DrawsInSixteenBits(Wrapped):
    """Adds noise of a generator of its own, which fp32 does not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.dtype == torch.float32:
            return y
        return y + torch.rand(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))


class DrawsLater(Wrapped):
    """Draws from its second call on, from a generator of its own, what differs between fp32 and 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(5, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x[:1, :5])
        if self.calls == 1:
            return y
        return y + torch.randn(5, 8, dtype=y.dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("model", "status"), [(DrawsInSixteenBits(), "unjudged"), (DrawsLater(), "ok")])
def test_draws_that_a_call_of_fp32_does_not_show(model: nn.Module, status: str) -> None:
    assert run_of(model, "bfloat16").status == status


# -- choices, and code that depends on the dtype


class ClampsHalf(nn.Module):
    """One of many comparisons differs in half, which hardly matters; if ``by_dtype``, half is clamped too."""

    def __init__(self, *, by_dtype: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.by_dtype = nn.Linear(8, 64), nn.Linear(64, 8), by_dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        chosen = y > 0.1
        if self.by_dtype and x.dtype == torch.float16:
            y = y.clamp(-0.2, 0.2)
        return self.second(torch.where(chosen, y, y * 0.99))


def test_a_branch_on_the_dtype_is_not_called_a_choice() -> None:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    result = scan_here(ClampsHalf(by_dtype=True).eval(), x, precisions="half", plan=False)
    run = result.run("half")
    assert sum(run.op_calls.flips) > 0
    assert run.budget is not None
    assert run.budget.decisions == 0.0
    warning, *others = sorted(findings(result, "LP304"), key=lambda its: its.severity != "warning")
    assert "it calls clamp where fp32 does not" in warning.message
    assert warning.help == "look for code that depends on the dtype"
    assert all("output error" not in its.message for its in others)
    plain = ClampsHalf(by_dtype=False).eval()
    same = scan_here(plain, x, precisions="half", plan=False).run("half")
    assert same.status == "ok", "the comparison alone does not make it fail"
