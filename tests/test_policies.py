"""``scan --train --policies``: the gradients of FSDP2 and DDP are those of the same sums written by hand."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, distributed, nn

from lowprec_check import ScanResult, UsageError, render, scan
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.run.isolation import isolated
from lowprec_check.engine.train import one_rank
from lowprec_check.engine.train.micro_batches import ways_to_make
from lowprec_check.engine.train.policies import measure_policies, unmeasured
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.training_policies import PolicyGradient
from lowprec_check.schema.verdict import ExceptionInfo

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="this build of torch has no gloo"
)
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 does not run on a CPU in this torch"
)

Sum = Callable[[list[Tensor]], Tensor]
"""The gradient of a parameter from those of its micro-batches."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
PARAM = "FSDP2 MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype={})"
REDUCE = "FSDP2 MixedPrecisionPolicy(reduce_dtype=bf16)"


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What each process would import for a second."""
    for name in one_rank._IMPORTED:
        importlib.import_module(name)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))


def inputs(batch: int = 0) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(batch))


def loss(output: Tensor, x: Tensor) -> Tensor:
    labels = (3 * x.sum(1)).long() % output.shape[1]
    return nn.functional.cross_entropy(output, labels)


def measure_here(target: Target, count: int) -> list[PolicyGradient]:
    found: list[PolicyGradient] = []
    with prepared(target.model, PRECISIONS.get("fp32"), torch.device("cpu")) as ready, torch.enable_grad():
        measure_policies(target, ready, count, 0, found.append)
    return found


def measure(model: nn.Module, given: Any, count: int, **functions: Any) -> list[PolicyGradient]:
    """In a fork, as in a scan."""
    target = make_target(model.train(), given, **functions)
    return isolated(lambda: measure_here(target, count), "fork", list[PolicyGradient])


def entry(found: list[PolicyGradient], policy: str, reduced: str = "once") -> PolicyGradient:
    (only,) = (one for one in found if (one.policy, one.reduced) == (policy, reduced))
    return only


def error_of(found: list[PolicyGradient], policy: str, reduced: str = "once") -> float:
    only = entry(found, policy, reduced)
    assert only.status == "ok", only
    assert only.gradient_error is not None
    return only.gradient_error


# -- the same sums by hand


def each_gradient(model: nn.Module, count: int, *, dtype: torch.dtype, autocast: bool) -> list[list[Tensor]]:
    """For each parameter, the gradients of the micro-batches."""
    low = copy.deepcopy(model).to(dtype)
    found: list[list[Tensor]] = [[] for _ in low.parameters()]
    for index in range(count):
        x = inputs(index)
        with torch.autocast("cpu", BF16, enabled=autocast):
            value = loss(low(x.to(dtype)), x) / count
        for listed, gradient in zip(found, torch.autograd.grad(value, list(low.parameters())), strict=True):
            listed.append(gradient)
    return found


def exact_sum(gradients: list[Tensor]) -> Tensor:
    """In fp32."""
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    return total


def rounding_sum(dtype: torch.dtype, *, addends: bool = False) -> Sum:
    """Rounded to ``dtype`` after each addition; with ``addends``, these are rounded before it too."""

    def total(gradients: list[Tensor]) -> Tensor:
        found = gradients[0].to(dtype)
        for gradient in gradients[1:]:
            added = gradient.to(dtype) if addends else gradient
            found = (found.float() + added.float()).to(dtype)
        return found.float()

    return total


def rounded_sum(dtype: torch.dtype) -> Sum:
    """Rounded to ``dtype`` once, at the end."""
    return lambda gradients: exact_sum(gradients).to(dtype).float()


BY_HAND: list[tuple[str, str, torch.dtype, bool, Sum]] = [
    (PARAM.format("fp32"), "once", BF16, False, exact_sum),
    (PARAM.format("bf16"), "once", BF16, False, rounding_sum(BF16)),
    (PARAM.format("bf16"), "each time", BF16, False, exact_sum),
    (REDUCE, "once", FP32, False, rounding_sum(BF16, addends=TORCH >= (2, 15))),
    ("DDP without a hook", "once", FP32, True, exact_sum),
    ("DDP bf16_compress_hook", "once", FP32, False, rounded_sum(BF16)),
    ("DDP bf16_compress_hook", "each time", FP32, False, rounding_sum(BF16)),
    ("DDP fp16_compress_hook", "once", FP32, False, rounded_sum(FP16)),
    ("DDP fp16_compress_hook", "each time", FP32, False, rounding_sum(FP16)),
]


@pytest.mark.parametrize("count", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_each_policy_has_the_error_of_the_sum_by_hand(count: int) -> None:
    model = net()
    found = measure(model, inputs, count, loss=loss)
    exact = [exact_sum(listed) for listed in each_gradient(model, count, dtype=FP32, autocast=False)]
    norm = torch.cat([gradient.flatten() for gradient in exact]).double().norm()
    assert len(found) == len(BY_HAND)
    for policy, reduced, dtype, autocast, total in BY_HAND:
        measured = entry(found, policy, reduced)
        assert (measured.micro_batches, measured.exception) == (count, None)
        if measured.status == "skipped":
            assert policy.startswith("FSDP2")
            continue
        by_hand = [total(listed) for listed in each_gradient(model, count, dtype=dtype, autocast=autocast)]
        errors = [(a.double() - b.double()).norm() for a, b in zip(by_hand, exact, strict=True)]
        assert measured.gradient_error == pytest.approx(float(torch.stack(errors).norm() / norm), rel=1e-6)
        norms = [gradient.double().norm() for gradient in exact]
        names = [name for name, _ in model.named_parameters()]
        relative = {name: errors[index] / norms[index] for index, name in enumerate(names)}
        assert measured.worst_parameter == max(relative, key=lambda name: relative[name])
        assert measured.worst_error == pytest.approx(float(max(relative.values())), rel=1e-6)


@needs_fsdp2
@pytest.mark.slow
def test_reducing_in_bf16_adds_error_only_where_gradients_accumulate_in_it() -> None:
    found = measure(net(), inputs, 64, loss=loss)
    in_fp32, in_bf16 = error_of(found, PARAM.format("fp32")), error_of(found, PARAM.format("bf16"))
    assert in_bf16 > 1.5 * in_fp32
    assert error_of(found, PARAM.format("bf16"), "each time") == in_fp32
    hook = "DDP bf16_compress_hook"
    assert error_of(found, hook, "each time") > 3 * error_of(found, hook)
    assert error_of(found, hook) < 2**-8


# -- fp16


class Weights(nn.Module):
    """The gradient of each weight is its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize(("planted", "status", "error"), [(1e-9, "ok", 0.0), (1e6, "nonfinite", None)])
def test_the_share_of_gradients_that_fp16_loses(planted: float, status: str, error: float | None) -> None:
    x = torch.ones(1000)
    x[:130] = planted
    found = measure(Weights(1000), lambda batch=0: x * (1 + batch / 4), 4, loss=lambda output: output)
    lost = entry(found, "DDP fp16_compress_hook")
    assert lost.status == status
    assert (lost.underflow, lost.overflow) == ((0.13, 0.0) if status == "ok" else (0.0, 0.13))
    assert lost.gradient_error == (error if error is None else pytest.approx(error, abs=1e-3))
    assert entry(found, "DDP bf16_compress_hook").underflow is None


# -- models that a policy cannot run


class Scalar(nn.Module):
    """FSDP2 supports no parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(24, 10), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


def test_a_model_that_cannot_be_sharded_does_not_lose_the_other_policies() -> None:
    found = measure(Scalar(), inputs, 4)
    for one in found:
        if one.policy.startswith("FSDP2") and one.status != "skipped":
            assert one.status == "error"
            assert one.exception is not None
            assert "scalar" in one.exception.message
        elif one.policy.startswith("DDP"):
            assert one.status == "ok"
            assert one.gradient_error


class Experts(nn.Module):
    """Which parameters get a gradient depends on the batch."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 10), nn.Linear(24, 10)
        self.never = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


def test_a_gradient_that_was_not_reduced_is_no_success() -> None:
    count = 4
    assert {bool(inputs(batch).sum() > 0) for batch in range(count)} == {True, False}
    hook = "DDP bf16_compress_hook"
    unnoticed = entry(measure(Experts(unused=False), inputs, count), hook)
    assert unnoticed.status == "error"
    assert unnoticed.exception is not None
    assert "find_unused_parameters" in unnoticed.exception.message
    found = measure(Experts(unused=True), inputs, count)
    assert 2**-11 < error_of(found, hook) < 2**-8


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (net().requires_grad_(False), "does not require grad"),
        (nn.Sequential(nn.Linear(24, 10), nn.Hardtanh(1e3, 1e4)), "zero"),
    ],
)
def test_a_model_without_a_gradient_is_skipped(model: nn.Module, why: str) -> None:
    for one in measure(model, inputs, 2):
        assert one.status == "skipped"
        assert why in str(one.reason)


def test_a_process_that_is_a_rank_already_keeps_its_group() -> None:
    def in_a_group() -> list[PolicyGradient]:
        with one_rank.one_rank():
            found = measure_here(make_target(net(), inputs), 2)
            assert distributed.is_initialized()
        return found

    found = isolated(in_a_group, "fork", list[PolicyGradient])
    assert {one.status for one in found} == {"skipped"}
    assert "process group" in str(found[0].reason)


def test_torch_without_gloo_or_fsdp2_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert {one.reason for one in measure(net(), inputs, 2)} == {"this build of torch has no gloo"}
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, "Stream", object)
    found = measure(net(), inputs, 2)
    assert {one.status for one in found if one.policy.startswith("FSDP2")} == {"skipped"}
    assert {one.status for one in found if one.policy.startswith("DDP")} == {"ok"}


# -- everything is as before


class Stateful(nn.Module):
    """With a non-leaf attribute, which cannot be copied, random draws and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.utils.spectral_norm(nn.Linear(24, 24)), nn.BatchNorm1d(24), nn.Dropout(0.5))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layers(x)
        return self.last


def state(model: nn.Module) -> dict[str, Any]:
    hooks = [{key: list(value) for key, value in vars(m).items() if key.endswith("_hooks")} for m in model.modules()]
    return {
        "classes": [type(module) for module in model.modules()],
        "hooks": hooks,
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "places": [tensor.data_ptr() for tensor in model.parameters()],
        "values": {name: value.tolist() for name, value in model.state_dict().items()},
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "environment": dict(os.environ),
        "handlers": (sys.excepthook, signal.getsignal(signal.SIGINT)),
        "group": distributed.is_initialized(),
        "draws": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
    }


def test_the_model_and_the_process_are_as_before() -> None:
    def work() -> list[str]:
        model = Stateful()
        with contextlib.suppress(RuntimeError):
            copy.deepcopy(model(inputs()))
        target = make_target(model, inputs)
        before = state(model)
        first = measure_here(target, 4)
        after = state(model)
        assert error_of(first, "DDP bf16_compress_hook") < 2**-8  # the same draws as fp32
        assert first == measure_here(target, 4)
        model(inputs()).sum().backward()
        return [name for name, value in before.items() if after[name] != value]

    assert isolated(work, "fork", list[str]) == []


# -- micro-batches


def made(given: Any, count: int, model: nn.Module | None = None) -> list[tuple[str, list[Target]]]:
    found = ways_to_make(make_target(model or nn.Identity(), given), count, 0)
    return [(way.made, list(way.batches)) for way in found]


def test_micro_batches_are_those_of_the_user_first() -> None:
    what, batches = made(inputs, 3)[0]
    assert what == "batches 0 to 2 of `inputs`"
    assert all(torch.equal(batch.args[0], inputs(index)) for index, batch in enumerate(batches))
    pairs = torch.utils.data.DataLoader([(inputs(index)[0], index) for index in range(8)], batch_size=4)
    what, batches = made(pairs, 5)[0]
    assert what == "the 2 batches of `inputs`, in turn"
    assert [batch.targets[0].tolist() for batch in batches[:3]] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_micro_batches_are_rows_of_inputs_that_are_fixed() -> None:
    x, ids = torch.randn(9, 5), torch.arange(9)
    (what, batches), *_ = made({"x": x, "ids": ids}, 4, Named())
    assert what == "2 rows of the inputs each"
    assert torch.equal(torch.cat([batch.kwargs["x"] for batch in batches]), x[:8])
    assert torch.equal(torch.cat([batch.kwargs["ids"] for batch in batches]), ids[:8])


class Named(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * ids[:, None]


def test_micro_batches_keep_the_values_of_inputs_with_too_few_rows() -> None:
    x, ids = torch.randn(2, 5), torch.tensor([7, 8])
    ways = made({"x": x, "ids": ids}, 4, Named())
    assert ["floating" in ways[0][0], "integer" in ways[1][0], "same" in ways[2][0]] == [True] * 3
    orders = [batch.kwargs["x"] for batch in ways[0][1]]
    assert torch.equal(orders[0], x)
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 4
    assert all(torch.equal(order.flatten().sort()[0], x.flatten().sort()[0]) for order in orders)
    assert all(batch.kwargs["ids"] is ids for batch in ways[0][1])
    assert all(batch.kwargs["x"] is x for batch in ways[1][1])


def test_rows_that_the_model_rejects_are_not_used() -> None:
    one_row_fails = nn.Sequential(nn.Linear(24, 10), nn.BatchNorm1d(10))
    found = measure(one_row_fails, inputs(), 8)
    assert entry(found, "DDP bf16_compress_hook").status == "ok"
    assert "another random order" in found[0].batches


# -- a scan


class KilledInAGroup(nn.Module):
    """Dies in the first policy, not in plain training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGSEGV)
        output: Tensor = self.inner(x)
        return output


def scanned(model: nn.Module) -> ScanResult:
    return scan(model, inputs, precision="bfloat16", train=True, policies=4, times="off", loss=loss)


@pytest.mark.slow
def test_a_scan_saves_the_policies() -> None:
    result = scanned(net())
    assert len(result.policies) == len(BY_HAND)
    assert result.options["policies"] == 4
    assert ScanResult.from_json(result.to_json()) == result
    hook = entry(result.policies, "DDP bf16_compress_hook", "each time")
    assert hook.gradient_error == measure(net(), inputs, 4, loss=loss)[6].gradient_error
    for name in ("text", "markdown", "html"):
        shown = " ".join(render(result, name).replace("\\", "").split())
        for text in ("over 4 micro-batches", "bf16_compress_hook", f"{hook.gradient_error:.1e}", "batches 0 to 3"):
            assert text in shown, (name, text)


@pytest.mark.slow
@needs_fsdp2
def test_a_process_that_dies_in_a_policy_loses_no_other_result() -> None:
    result = scanned(KilledInAGroup())
    assert "crashed" not in {run.status for run in result.runs}
    first, *others = result.policies
    assert (first.status, first.policy) == ("crashed", PARAM.format("fp32"))
    assert "SIGSEGV" in str(first.reason)
    assert {other.status for other in others} == {"skipped"}
    assert len(result.policies) == len(BY_HAND)


def test_what_was_measured_before_the_end_is_kept() -> None:
    found = measure(net(), inputs, 2)[:4]
    rest = unmeasured(found, 2, "the budget of 20 s ended", "timeout")
    assert [(one.policy, one.reduced) for one in (*found, *rest)] == [row[:2] for row in BY_HAND]
    assert [one.status for one in rest] == ["timeout", *["skipped"] * 4]


def test_policies_are_an_option_of_training() -> None:
    with pytest.raises(UsageError, match="Add --train"):
        scan(net(), inputs, policies=4)
    with pytest.raises(UsageError, match="policies is 0"):
        scan(net(), inputs, train=True, policies=0)


def test_a_failed_policy_is_shown_with_its_reason() -> None:
    result = ScanResult.from_json(scan(net(), inputs(), precision="bfloat16", times="off").to_json())
    raised = ExceptionInfo(type="ValueError", message="<b>no</b> [scalar] | parameters", module="l.0", source="a.py:3")
    common: dict[str, Any] = {"computes_in": "bf16", "reduced": "once", "micro_batches": 1}
    rows = [
        PolicyGradient(policy="DDP <i>", status="error", exception=raised, **common),
        PolicyGradient(policy="FSDP2", status="skipped", reason="no gloo", **common),
        PolicyGradient(policy="DDP", status="nonfinite", underflow=0.25, overflow=0.125, **common),
    ]
    result = msgspec.structs.replace(result, policies=rows)
    assert ScanResult.from_json(result.to_json()) == result
    text = " ".join(render(result, "text").split())
    for part in (
        "over 1 micro-batch policy",
        "ValueError: <b>no</b> [scalar] | parameters (l.0 a.py:3)",
        "skipped; no gloo",
    ):
        assert part in text
    assert "25 % of the elements underflow; 12 % of the elements overflow" in text
    html = render(result, "html")
    assert "<b>no</b>" not in html
    assert "&lt;b&gt;no&lt;/b&gt;" in html
