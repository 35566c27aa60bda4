"""Error budgets: shares, predictions and reasons, compared with measured errors and ablations of the plain model."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from budget_models import MODELS
from generated import STEPS, InPlace, Norm, Select, Step, build, inputs
from helpers import LOW, run, runs_here
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowprec_check
from lowprec_check.analysis.error_shares import TRUSTED
from lowprec_check.core.trace.instrument import Options
from lowprec_check.schema.measures import ErrorBudget, Share
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.torchkit.devices import MemoryLimit

KINDS = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "checkpoint" else [])  # which imports torch's compiler
    for name in MODELS
]
NONLINEAR = {("spectral and weight norm", "bfloat16"): 0.07}
"""What the first order does not explain, if over 0.02: each step of a power iteration divides by a norm."""


def budget_of(model: nn.Module, x: Any, precision: str, **more: Any) -> ErrorBudget:
    """The budget of one run."""
    budget = run(model, (x,), precision, budget=True, **more)[1].budget
    assert budget is not None
    return budget


def explained(budget: ErrorBudget) -> float:
    """The sum of all shares."""
    return math.fsum(share.share for share in budget.shares) + budget.others


def of_calls(calls: OpCalls) -> float:
    """The sum of the shares of op calls."""
    return math.fsum(share for share in calls.share if share is not None)


# -- models of many kinds


@pytest.mark.parametrize("name", KINDS)
def test_shares_explain_the_error_of_every_kind_of_model(name: str) -> None:
    for precision in LOW:
        torch.manual_seed(1)  # that of no value so close to 0 that rounding moves it across the kink of relu
        model, x = MODELS[name]()
        plain, found = run(model, (x,), precision, budget=True)
        budget = found.budget
        assert budget is not None
        assert budget.reason is None
        assert not budget.blocked
        assert found.perturbed is not True
        if plain.output_error is not None:
            assert budget.measured == pytest.approx(plain.output_error.rel_l2, rel=1e-6)
        assert budget.measured is not None
        assert 0 < budget.measured < 0.06
        assert budget.predicted == pytest.approx(budget.measured, rel=0.05)
        assert budget.unexplained == pytest.approx(0, abs=NONLINEAR.get((name, precision), 0.02))
        assert explained(budget) + (budget.unexplained or 0.0) == pytest.approx(1.0, abs=1e-9)
        of_inputs = math.fsum(share.share for share in budget.shares if share.op == "cast input")
        assert of_calls(found.op_calls) + of_inputs == pytest.approx(explained(budget), abs=1e-6)
        assert [share.share for share in budget.shares] == sorted((s.share for s in budget.shares), reverse=True)


@pytest.mark.parametrize("name", ["fft", "attention with a mask", "batch norm in training", "slice writes"])
def test_shares_are_the_same_with_a_reference_in_fp64(name: str) -> None:
    model, x = MODELS[name]()
    in_fp32 = budget_of(model, x, "bfloat16")
    in_fp64 = budget_of(model, x, "bfloat16", options=Options(wide=torch.float64))
    places = {(s.module, s.op, s.source, s.rounding): s.share for s in in_fp64.shares}
    for share in in_fp32.shares[:5]:
        assert places[share.module, share.op, share.source, share.rounding] == pytest.approx(share.share, abs=0.01)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without bf16 kernels of oneDNN, the layer is no op of oneDNN",
)
def test_an_op_that_the_reference_cannot_run_is_named() -> None:
    """oneDNN's recurrent layers have no fp64."""
    model, x = MODELS["lstm"]()
    budget = budget_of(model, x, "bfloat16", options=Options(wide=torch.float64))
    assert budget.blocked == ["aten.mkldnn_rnn_layer.default"]
    assert (budget.unexplained or 0.0) > 0.02


@settings(max_examples=25)
@given(kinds=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5), precision=st.sampled_from(LOW))
def test_predictions_are_close_where_no_decision_differs(kinds: list[type[Step]], precision: str) -> None:
    found = run(build(kinds), (inputs(),), precision, budget=True)[1]
    budget = found.budget
    assert budget is not None
    assert budget.reason is None
    if not budget.measured:
        assert budget.predicted == budget.unexplained == 0.0
        return
    assume(abs(budget.decisions) < 0.01 and budget.measured < 0.02)
    assert budget.predicted == pytest.approx(budget.measured, rel=0.1)
    assert explained(budget) + (budget.unexplained or 0.0) == pytest.approx(1.0, abs=1e-9)


def without_budget(calls: OpCalls) -> list[tuple[Any, ...]]:
    """What the op calls say apart from shares and times."""
    columns = (calls.op, calls.module, calls.outcome, calls.flips, calls.local_error, calls.accumulated_error)
    return list(zip(*columns, strict=True))


def assert_same_calls(some: OpCalls, other: OpCalls) -> None:
    for mine, its in zip(without_budget(some), without_budget(other), strict=True):
        assert mine[:-2] == its[:-2]
        for error, expected in zip(mine[-2:], its[-2:], strict=True):
            assert error == (expected if expected is None else pytest.approx(expected, rel=0.02, abs=1e-6))


@pytest.mark.parametrize("name", KINDS)
def test_a_budget_changes_nothing_else(name: str) -> None:
    """Neither the errors of ops, nor the model, its inputs and gradients, nor random numbers and modes."""
    torch.manual_seed(1)
    model, x = MODELS[name]()
    state, kept = copy.deepcopy(model.state_dict()), x.clone()
    generator, training = torch.get_rng_state(), [module.training for module in model.modules()]
    for precision in ("half", "autocast-bf16"):
        (_, off), (plain, on) = (run(model, (x,), precision, budget=budget) for budget in (False, True))
        assert off.budget is None
        assert_same_calls(on.op_calls, off.op_calls)
        assert on.gaps == off.gaps
        assert (on.lockstep_error is None) == (off.lockstep_error is None)
        assert plain.exception is None or on.gaps
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert [module.training for module in model.modules()] == training


@torch.library.custom_op("budget_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def no_derivative(*_: Any, **__: Any) -> None:
    raise RuntimeError("twice has no derivative")


twice.register_autograd(no_derivative, setup_context=no_derivative)


@torch.library.custom_op("budget_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.parametrize("op", [twice, thrice])
def test_an_op_without_derivative_is_named_and_leaves_the_reference_as_it_is(op: Callable[[Tensor], Tensor]) -> None:
    class WithoutDerivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(op(self.first(x)))

    model, x = WithoutDerivative(), inputs()
    off, on = (run(model, (x,), "bfloat16", budget=budget)[1] for budget in (False, True))
    assert on.budget is not None
    assert on.budget.blocked == [f"budget_tests.{op._name.rpartition(':')[2]}.default"]  # type: ignore[attr-defined]
    assert_same_calls(on.op_calls, off.op_calls)
    shares = {share.module for share in on.budget.shares if abs(share.share) > 1e-6}
    assert "second" in shares
    assert "first" not in shares
    assert (on.budget.unexplained or 0.0) > 0.1


# -- the largest share, compared with what the plain model does with a module in fp32


class Cancelling(nn.Module):
    """A linear layer that loses most digits of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 20 - 20


class BadWeights(nn.Linear):
    """The difference of two weights counts, which is much smaller than they are."""

    def __init__(self) -> None:
        super().__init__(16, 8, bias=False)
        with torch.no_grad():
            self.weight[:, :8] *= 16
            self.weight[:, 8:] = self.weight[:, :8] - torch.randn(8, 8) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, -x], 1))


def plain_error(model: nn.Module, x: Tensor, precision: str, keep_fp32: tuple[str, ...] = ()) -> float:
    """rel_l2 of a plain run."""
    error = run(model, (x,), precision, keep_fp32=keep_fp32)[0].output_error
    assert error is not None
    return error.rel_l2 or 0.0


def by_module(budget: ErrorBudget) -> dict[str, float]:
    """Shares, rounding between modules apart."""
    found: dict[str, float] = defaultdict(float)
    for share in budget.shares:
        found["between" if share.rounding and not share.module else share.module] += share.share
    return found


def inside(budget: ErrorBudget, module: str) -> float:
    """The share that goes if a module is kept in fp32, with all below it."""
    return sum(share for name, share in by_module(budget).items() if name == module or name.startswith(f"{module}."))


@pytest.mark.parametrize("bad", [Cancelling, BadWeights])
@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_a_bad_module_has_the_largest_share_and_without_it_the_error_is_as_predicted(
    bad: type[nn.Module], precision: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), bad(), nn.Tanh(), nn.Linear(8, 8)).eval()
    x = torch.randn(64, 8)
    budget = budget_of(model, x, precision)
    shares = by_module(budget)
    assert max(shares, key=lambda name: shares[name]) == "2"
    share = inside(budget, "2")
    assert share > 0.5
    before, after = (plain_error(model, x, precision, keep) for keep in ((), ("2",)))
    reduction, predicted = before - after, before * (1 - math.sqrt(1 - min(share, 1.0)))
    assert 1 / 1.5 < reduction / predicted < 1.5


class BetweenLayers(nn.Module):
    """What it computes between its layers is narrow under autocast only because the first layer is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.first(x) * 5 + 30))


@pytest.mark.parametrize("precision", ["autocast-fp16", "autocast-bf16"])
def test_under_autocast_an_op_between_layers_is_as_narrow_as_the_layer_before_it(precision: str) -> None:
    torch.manual_seed(0)
    model, x = BetweenLayers().eval(), torch.randn(16, 32)
    share = inside(budget_of(model, x, precision), "first")
    before, after = (plain_error(model, x, precision, keep) for keep in ((), ("first",)))
    assert 1 - (after / before) ** 2 == pytest.approx(share, abs=0.03)
    assert share > 0.9


def test_the_same_with_the_runs_of_a_scan() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Cancelling(), nn.Tanh(), nn.Linear(8, 8)).eval(), inputs()
    with runs_here(model, x) as runs:
        runs.reference()
        explained_run = runs.run("bfloat16", measured=False)
        kept = runs.run("bfloat16", keep_fp32=("2",), measured=False, instrumented=False)
    assert explained_run.budget is not None
    share = inside(explained_run.budget, "2")
    assert explained_run.output_error is not None
    assert kept.output_error is not None
    before, after = explained_run.output_error.rel_l2 or 0.0, kept.output_error.rel_l2 or 0.0
    assert share > 0.5
    assert 1 / 1.5 < (before - after) / (before * (1 - math.sqrt(1 - min(share, 1.0)))) < 1.5


# -- planted faults


class LossOfDigits(Step):
    """Adds and subtracts a number that is much larger."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + 30 - 30


class BadRounding(Step):
    """Rounds to 8 bits where fp32 does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.tanh() + 5) * 8 - (x.tanh() + 5) * 8


class Squares(Step):
    """The difference of two squares, computed badly."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return (y + 9).square() * 0.05 - (y - 9).square() * 0.05


class Normalized(Step):
    """A variance computed as the difference of two means."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh() + 6
        variance = (y * y).mean(1, keepdim=True) - y.mean(1, keepdim=True).square()
        return (y - 6) * (variance + 1).rsqrt()


PLANTED = [LossOfDigits, BadRounding, Squares, Normalized]
WITHOUT_CHOICES = [kind for kind in STEPS if kind is not Select]
"""An error that changes the order of values reaches the output through this choice, which no derivative shows."""


@settings(max_examples=25)
@given(
    before=st.lists(st.sampled_from(STEPS), max_size=3),
    after=st.lists(st.sampled_from(WITHOUT_CHOICES), max_size=3),
    fault=st.sampled_from(PLANTED),
    precision=st.sampled_from(["half", "bfloat16"]),
)
def test_a_planted_fault_that_causes_the_error_has_the_largest_share(
    before: list[type[Step]], after: list[type[Step]], fault: type[Step], precision: str
) -> None:
    """It causes the error if keeping its module in fp32, in a plain run, removes at least half of the squared error."""
    model, x, name = build([*before, fault, *after]), inputs(), f"steps.{len(before)}"
    plain, found = run(model, (x,), precision, budget=True)
    budget, error = found.budget, plain.output_error
    assume(plain.status in ("ok", "inaccurate") and error is not None and error.rel_l2)
    without = plain_error(model, x, precision, (name,))
    assume(error is not None and without**2 <= 0.5 * (error.rel_l2 or 0.0) ** 2)
    assert budget is not None
    shares = by_module(budget)
    assert max(shares, key=lambda module: shares[module]) == name


def test_a_fault_that_changes_the_order_of_values_is_said_to_change_choices() -> None:
    budget = budget_of(build([Squares, InPlace, Select, Norm]), inputs(), "bfloat16")
    assert budget.decisions > 0.5
    assert abs(budget.unexplained or 0.0) > TRUSTED


def test_no_cause_is_named_where_the_error_is_not_linear() -> None:
    """All of y is lost: the error of y² is y², but its derivative times the error of y is 2y²."""

    class SquaresErrors(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.tanh() * 0.5 + 300 - 300).square()

    budget = budget_of(nn.Sequential(nn.Linear(8, 8), SquaresErrors()), inputs(), "bfloat16")
    assert budget.measured == pytest.approx(1.0)
    assert budget.predicted == pytest.approx(2.0, rel=0.02)
    assert abs(budget.unexplained or 0.0) > TRUSTED


def test_weights_in_fp64_and_inputs_in_fp32_have_shares() -> None:
    """The run casts both to one dtype, so its reference does too."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.to(self.layers[0].weight.dtype))

    for x in (inputs(), inputs().double()):
        budget = budget_of(Casts(), x, "half")
        assert explained(budget) == pytest.approx(1.0, abs=0.02)
        assert not budget.blocked
        assert {share.module for share in budget.shares} >= {"layers.0", "layers.1"}


def test_shares_add_up_where_errors_cancel_and_the_first_order_predicts_too_much() -> None:
    class SharpAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) * 40 @ (self.key(x) * 40).T).softmax(-1) @ x

    for seed in range(8):
        torch.manual_seed(seed)
        budget = budget_of(SharpAttention(), torch.randn(8, 16), "half")
        assert explained(budget) + (budget.unexplained or 0.0) == pytest.approx(1.0, abs=1e-6)


# -- choices, and outputs without a budget


class Picks(nn.Module):
    """The output is what an index chose; many values are nearly equal, so the indices differ from those of fp32."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scores, self.values, self.pick = nn.Linear(8, 64), nn.Embedding(64, 8), pick
        with torch.no_grad():
            self.scores.weight *= 1e-3
            self.scores.bias.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.pick(self.scores(x)))


@pytest.mark.parametrize("pick", [lambda y: y.argmax(-1), lambda y: y.topk(4, -1)[1]], ids=["argmax", "topk"])
def test_choices_that_differ_are_no_op_s_error(pick: Callable[[Tensor], Tensor]) -> None:
    _, found = run(Picks(pick), (torch.randn(32, 8),), "bfloat16", budget=True)
    budget = found.budget
    assert budget is not None
    assert sum(found.op_calls.flips) > 0
    assert (budget.measured or 0.0) > 0.5
    assert budget.decisions > 0.9
    assert (budget.unexplained or 0.0) > 0.9
    assert all(abs(share.share) < 0.1 for share in budget.shares)


class Returns(nn.Module):
    """A linear layer, and a function of its result."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(8, 8), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


def raise_in_low_precision(y: Tensor) -> Tensor:
    if y.dtype != torch.float32:
        raise ValueError("not in 16 bits")
    return y


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda y: (y.abs() + 1) * 1e5 * 1e-5, "the output has NaN or Inf"),
        (lambda y: y * 0, "the output of fp32 is all zeros"),
        (lambda y: y.argmax(-1), "the output has no floating-point values"),
        (lambda y: y[:0], "the output has no floating-point values"),
        (raise_in_low_precision, "the model raised an exception before its end"),
        (lambda y: y if y.dtype == torch.float32 else y[:2], "the output differs in structure from that of fp32"),
    ],
)
def test_an_output_without_a_budget_has_a_reason(result: Callable[[Tensor], Any], reason: str) -> None:
    budget = budget_of(Returns(result), inputs(), "half")
    assert budget.reason == reason
    assert not budget.known
    assert budget.shares == []
    assert (budget.output_rms == 0.0) == ("zeros" in reason)


@dataclass
class Boxes:
    scores: Any
    boxes: list[Any]


AS_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "array": lambda y: y,
    "tuple": lambda y: (y, 3),
    "dict": lambda y: {"logits": y, "name": "text"},
    "dataclass": lambda y: Boxes(y, [y[:1]]),
    "slice": lambda y: y[:, 1:7:2],
}


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-bf16"])
@pytest.mark.parametrize("pack", AS_ARRAYS)
def test_the_error_of_an_array_is_that_of_its_tensor(pack: str, precision: str) -> None:
    torch.manual_seed(0)
    as_tensors, as_arrays = (
        Returns(lambda y, f=f: AS_ARRAYS[pack](f(y.float()))) for f in (Tensor.detach, Tensor.numpy)
    )
    as_arrays.load_state_dict(as_tensors.state_dict())
    expected, found = (budget_of(model, inputs(), precision) for model in (as_tensors, as_arrays))
    assert found.known
    assert found.measured == expected.measured > 0
    assert found.predicted == pytest.approx(expected.predicted)
    assert {share.op for share in found.shares} == {share.op for share in expected.shares}
    assert abs(found.unexplained or 0.0) < 0.02


@pytest.mark.parametrize(
    "result",
    [lambda y: np.exp(y.float().numpy()), lambda y: y.float().tolist(), lambda y: (np.tanh(y.float().numpy()),)],
)
def test_the_error_of_what_numpy_or_python_computes_cannot_be_followed(result: Callable[[Tensor], Any]) -> None:
    budget = budget_of(Returns(result), inputs(), "bfloat16")
    assert budget.reason == "errors cannot be followed to the NumPy array or Python number that the model returns"
    assert not budget.known
    assert budget.output_rms is not None


def test_the_error_of_a_sparse_tensor_cannot_be_followed() -> None:
    budget = budget_of(Returns(lambda y: y.float().to_sparse()), inputs(), "bfloat16")
    assert budget.reason == "errors cannot be followed to the sparse or nested tensor that the model returns"


def test_a_number_beside_the_tensor_with_the_largest_error_takes_nothing_from_it() -> None:
    budget = budget_of(Returns(lambda y: (y, float(y.shape[0]))), inputs(), "bfloat16")
    assert budget.known
    assert budget.next_error == 0.0


def test_an_exact_output_has_no_error_to_share() -> None:
    exact = nn.Linear(8, 8)
    with torch.no_grad():
        exact.weight.copy_(torch.eye(8))
        exact.bias.zero_()
    budget = budget_of(exact, torch.ones(2, 8), "half")
    assert (budget.predicted, budget.measured, budget.unexplained, budget.shares) == (0.0, 0.0, 0.0, [])
    assert budget.known


def test_the_budget_is_about_the_output_with_the_largest_error() -> None:
    model = Returns(lambda y: {"exact": torch.ones(3), "flags": y > 0, "good": y, "bad": y + 50 - 50})
    worst = Returns(lambda y: y + 50 - 50)
    worst.load_state_dict(model.state_dict())
    several, one = (budget_of(each, inputs(), "bfloat16") for each in (model, worst))
    assert several.measured == pytest.approx(one.measured)
    assert several.predicted == pytest.approx(one.predicted)


def test_a_budget_that_does_not_fit_into_memory_is_left_out() -> None:
    model, x = build(STEPS), inputs()
    _, off = run(model, (x,), "bfloat16")
    for bytes_free in (0, 2_000):
        limit = MemoryLimit.half_of(bytes_free)
        plain, found = run(model, (x,), "bfloat16", budget=True, budget_limit=limit)
        assert found.budget is not None
        assert found.budget.reason is not None
        assert "memory" in found.budget.reason
        assert not found.budget.known
        assert_same_calls(found.op_calls, off.op_calls)
        assert found.lockstep_error is not None
        assert off.lockstep_error is not None
        assert found.lockstep_error.rel_l2 == pytest.approx(off.lockstep_error.rel_l2, rel=1e-3)
        assert found.perturbed is False
        assert plain.output_error is not None


def test_random_numbers_of_the_run_are_those_of_its_reference() -> None:
    """A model that draws differs from fp32 by its draws, so its budget compares with a reference of the same draws."""
    model = Returns(lambda y: y + torch.randn_like(y))
    for precision in LOW:
        budget = budget_of(model, inputs(), precision)
        assert budget.measured is not None
        assert budget.measured < 0.02
        assert budget.predicted == pytest.approx(budget.measured, rel=0.05)


# -- scans


class WithGap(nn.Module):
    """Its 16-bit kernel is missing on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y - torch.quantile(y, 0.5))


def scanned(**options: Any) -> ScanResult:
    torch.manual_seed(0)
    return lowprec_check.scan(WithGap().eval(), inputs(), plan=False, isolation="none", explain="all", **options)


def test_a_run_without_a_kernel_has_a_budget_with_the_kernel_replaced() -> None:
    result = scanned(precisions=["bfloat16", "autocast-bf16"])
    for run_ in result.runs[1:]:
        assert run_.budget is not None
        assert run_.budget.measured is not None
        assert run_.budget.predicted == pytest.approx(run_.budget.measured, rel=0.05)
    assert result.run("bfloat16").status == "error"
    assert result.runs[0].budget is None
    assert ScanResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("options", [{"budget_error": "off"}, {"errors": "accumulated"}])
def test_a_budget_can_be_left_out(options: dict[str, Any]) -> None:
    result = scanned(precisions=["bfloat16", "autocast-bf16"], **options)
    assert all(run_.budget is None for run_ in result.runs)
    assert all(share is None for run_ in result.runs for share in run_.op_calls.share)
    for key, value in options.items():
        assert result.options[key] == value


def test_a_weight_that_the_reference_does_not_follow_is_no_choice() -> None:
    class SparseWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", (torch.eye(8) * (1 + 2**-12)).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.weight.to(x.dtype), x.T)

    options: dict[str, Any] = {"plan": False, "isolation": "none", "tolerance": 1e-5}
    result = lowprec_check.scan(SparseWeight(), lambda: torch.ones(2, 8), precisions=["half"], **options)
    budget = result.runs[1].budget
    assert budget is not None
    assert (budget.unexplained or 0.0) > 0.9
    assert budget.decisions == 0.0
    assert not [finding for finding in result.diagnostics if finding.code == "LP304"]


def test_without_errors_of_ops_nothing_is_said_about_choices() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Returns(lambda y: y * 100 + 2e4 - 2e4))
    result = lowprec_check.scan(model, inputs(), precisions=["bfloat16"], plan=False, isolation="none", errors="none")
    assert result.runs[1].status == "inaccurate"
    assert result.runs[1].lockstep_error is None
    assert not [finding for finding in result.diagnostics if finding.code == "LP304"]


# -- what is saved


def test_a_budget_survives_saving() -> None:
    share = Share(module="a.b", op="aten.mm.default", source="m.py:1", share=0.25, calls=3, rounding=True)
    budget = ErrorBudget(
        predicted=0.1,
        measured=0.2,
        unexplained=-0.5,
        decisions=0.1,
        shares=[share],
        others=1.25,
        blocked=["aten.sign.default"],
        output_rms=1.0,
    )
    for one in (budget, ErrorBudget(reason="the output has NaN or Inf")):
        assert msgspec.json.decode(msgspec.json.encode(one), type=ErrorBudget) == one
    assert budget.known
    assert not ErrorBudget().known


# -- what goes with a module in fp32, compared with the plain model


class Branch(nn.Module):
    """A linear layer and an exact op at its end, or one that leaves large values as they are."""

    def __init__(self, end: Callable[[Tensor], Tensor], width: int = 32, bias: float = 0.0) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(width, width), end
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.linear(x))


class Stream(nn.Module):
    """Two blocks add to a stream with large values: under autocast, sums are wide if any of their parts is."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.a, self.b, self.head = (nn.Linear(32, 32) for _ in range(4))
        nn.init.constant_(self.inp.bias, 40.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.a(x - 40)
        x = x + self.b(x - 40)
        return self.head(x - 40)


class JoinedBranches(nn.Module):
    """Several branches are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(nn.Tanh(), bias=bias) for bias in (0.0, 2.0))
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([branch(x) for branch in self.branches], -1))


def ended(end: Callable[[Tensor], Tensor], bias: float = 100.0) -> nn.Module:
    """A layer whose result is much larger than what the next one sees of it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Branch(end, bias=bias), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x) - bias)

    return Shifted()


KEPT: dict[str, Callable[[], nn.Module]] = {
    "relu at the end": lambda: ended(nn.ReLU()),
    "gelu of large values at the end": lambda: ended(nn.GELU()),
    "cat at the end": lambda: ended(lambda y: torch.cat([y[:, 16:], y[:, :16]], -1)),
    "contiguous at the end": lambda: ended(lambda y: y.t().contiguous().t()),
    "max pooling at the end": lambda: ended(lambda y: nn.functional.max_pool1d(y, 3, 1, 1)),
    "an exact difference at the end": lambda: ended(lambda y: y + 900 - 900),
    "without bias": lambda: nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)),
    "a stream": Stream,
    "concatenated branches": JoinedBranches,
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", KEPT)
def test_the_share_of_a_module_is_what_goes_if_it_is_kept_in_fp32(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model, x = KEPT[name]().eval(), torch.randn(64, 4, 32) if name == "without bias" else torch.randn(256, 32)
    plain, found = run(model, (x,), precision, budget=True)
    assert plain.output_error is not None
    assert found.budget is not None
    before, shares = plain.output_error.rel_l2, {its.module: its.share for its in found.budget.modules}
    assert found.called_modules
    for module in found.called_modules:
        true = 1 - (plain_error(model, x, precision, (module,)) / before) ** 2
        assert shares.get(module, 0.0) == pytest.approx(true, abs=0.1), module
    assert explained(found.budget) + (found.budget.unexplained or 0.0) == pytest.approx(1.0, abs=1e-6)


def test_what_goes_with_any_of_several_modules_counts_once() -> None:
    """Each sum of the stream is wide if the input layer is, or a block before it."""
    torch.manual_seed(0)
    budget = budget_of(Stream().eval(), torch.randn(256, 32), "autocast-bf16")
    alone = {its.module: its.share for its in budget.modules}
    assert alone["inp"] > 0.95
    assert alone["a"] > 0.4
    assert inside(budget, "inp") == pytest.approx(alone["inp"], abs=0.01)
    assert inside(budget, "a") < 0.05
    assert all(share.share > -0.05 for share in budget.shares)
    names = [its.module for its in budget.modules]
    assert names == sorted(names, key=lambda name: -alone[name])


def overlapping(x: Tensor) -> Tensor:
    y = x.flatten().clone()
    y.as_strided((6, 4), (2, 1)).mul_(1.1)
    return y.exp()


def bits(x: Tensor) -> Tensor:
    y = x * 1.1
    integers = y.view(torch.int16 if y.element_size() == 2 else torch.int32)
    return (integers & -16).view(y.dtype) * 2.7


def bits_in_place(x: Tensor) -> Tensor:
    y = x * 1.1
    y.view(torch.int16 if y.element_size() == 2 else torch.int32).bitwise_and_(-16)
    return y * 2.7


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (overlapping, "aten.mul_.Tensor writes several times to the same memory"),
        (bits, "aten.bitwise_and.Scalar takes floating-point values as integers"),
        (bits_in_place, "aten.bitwise_and_.Scalar takes floating-point values as integers"),
    ],
)
@pytest.mark.parametrize("budget", [True, False])
def test_an_op_that_the_reference_cannot_follow_is_a_note(
    function: Callable[[Tensor], Tensor], why: str, budget: bool
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    result = lowprec_check.scan(
        Model(),
        torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.5,
        precisions=["half"],
        times="off",
        budget_error="on" if budget else "off",
        plan=False,
        isolation="none",
        tolerance=1e-9,
    )
    run = result.run("half")
    assert [note for note in run.notes if note.startswith(why)]
    [row] = [row for row in run.op_calls.rows() if why.startswith(row.op)]
    assert (row.local_error, row.accumulated_error, row.share) == (None, None, None)
    assert run.lockstep_error is None  # it would be smaller than the error of the output
    if budget:
        assert run.budget is not None
        assert run.budget.blocked == [row.op]


def test_views_of_one_storage_that_do_not_overlap_are_followed() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, ::2].mul_(1.1)
            y.as_strided((2, 8), (16, 1)).add_(0.3)
            return y.t().mul_(1.3)

    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    result = lowprec_check.scan(Model(), x, precisions=["half"], times="off", plan=False, isolation="none")
    run = result.run("half")
    assert run.notes == []
    assert run.lockstep_error is not None
    assert run.lockstep_error.rel_l2 == pytest.approx(run.rel_l2)


def test_an_op_that_the_fp32_reference_cannot_run_is_a_note() -> None:
    class TakesHalfOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(half_only(y) if y.dtype == torch.half else y.sigmoid())

    result = lowprec_check.scan(
        TakesHalfOnly(), inputs(), precisions=["half"], times="off", plan=False, isolation="none"
    )
    run = result.run("half")
    [note] = [note for note in run.notes if "half_only" in note]
    assert note.startswith("budget_tests.half_only.default fails in the fp32 reference (RuntimeError: only 16 bits")
    [row] = [row for row in run.op_calls.rows() if "half_only" in row.op]
    assert (row.local_error, row.accumulated_error, row.share) == (None, None, None)


@torch.library.custom_op("budget_tests::half_only", mutates_args=())
def half_only(x: Tensor) -> Tensor:
    if x.dtype != torch.half:
        raise RuntimeError("only 16 bits")
    return x.sigmoid()
