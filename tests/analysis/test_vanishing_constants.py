"""LP206: constants that are zero in fp16, found without an input that shows it, and what each op does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.ops import outputs_of
from lowprec_check.schema.scan_result import Diagnostic
from lowprec_check.torchkit.dispatch_mode import DispatchMode

TINY = 1e-8


class Watcher(DispatchMode):
    """Collects what vanishes in the ops inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keys: Any) -> Any:
        call = DispatchedCall(func, args, kwargs, keys)
        out = call.run()
        constant = call.vanished_constant(outputs_of(out))
        self.found += [constant] if constant is not None else []
        return out


def watched(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, list[float]]:
    with Watcher() as watcher:
        out = function(x)
    return out, watcher.found


ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + TINY,
    "added": lambda x: TINY + x,
    "sub": lambda x: x - TINY,
    "rsub": lambda x: TINY - x,
    "in place": lambda x: x.clone().add_(TINY),
    "clamp": lambda x: x.clamp(min=TINY),
    "clamp max": lambda x: (x + 1).clamp(max=TINY),
    "clamp_min": lambda x: x.clamp_min(TINY),
    "clamp_max": lambda x: (x + 1).clamp_max(TINY),
    "clamp tensor": lambda x: x.clamp(min=torch.tensor(TINY)),
    "hardtanh": lambda x: F.hardtanh(x, TINY, 1.0),
    "threshold": lambda x: F.threshold(x, 1.0, TINY),
    "masked_fill": lambda x: (x + 1).masked_fill(x == 0, TINY),
    "where": lambda x: torch.where(x > 0, x, TINY),
    "full_like": lambda x: torch.full_like(x, TINY),
    "full": lambda x: torch.full((2,), TINY, dtype=x.dtype),
    "new_full": lambda x: x.new_full((2,), TINY),
    "fill_": lambda x: x.clone().fill_(TINY),
    "nan_to_num": lambda x: (x / x).nan_to_num(TINY),
    "foreach add": lambda x: torch._foreach_add([x], TINY)[0],
    "foreach list": lambda x: torch._foreach_add([x], [TINY])[0],
    "foreach sub": lambda x: torch._foreach_sub([x], TINY)[0],
    "foreach maximum": lambda x: torch._foreach_maximum([x], TINY)[0],
    "foreach clamp_min": lambda x: torch._foreach_clamp_min([x], TINY)[0],
}
"""Functions of zeros whose result is not zero in fp32, and zero in fp16."""


@pytest.mark.parametrize("name", ZERO)
def test_the_constant_gives_zero_and_is_found(name: str) -> None:
    x = torch.zeros(2)
    exact, nothing = watched(ZERO[name], x)
    assert exact.abs().max() == pytest.approx(TINY)
    assert not nothing
    out, found = watched(ZERO[name], x.half())
    assert out.dtype == torch.half
    assert not out.any()
    assert found == [pytest.approx(TINY)]
    assert not watched(ZERO[name], x.bfloat16())[1]


@pytest.mark.parametrize(
    ("compare", "exact"),
    [
        (lambda x: x < TINY, True),
        (lambda x: x >= TINY, False),
        (lambda x: x > -TINY, True),
        (lambda x: x <= -TINY, False),
        (lambda x: x == TINY, False),
        (lambda x: x != TINY, True),
    ],
)
def test_comparisons_are_with_zero(compare: Callable[[Tensor], Tensor], exact: bool) -> None:
    assert bool(watched(compare, torch.zeros(2))[0].all()) == exact
    out, found = watched(compare, torch.zeros(2).half())
    assert bool(out.all()) != exact
    assert len(found) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 6e4) * TINY,
        lambda x: (x + 1e-5) / TINY,
        lambda x: F.leaky_relu(x - 6e4, TINY),
        lambda x: torch.lerp(x, x + 6e4, TINY),
        lambda x: x.addcmul(x + 6e4, x + 1, value=TINY),
        lambda x: torch._foreach_mul([x + 6e4], TINY)[0],
    ],
)
def test_kernels_that_take_the_constant_in_fp32_do_not_count(function: Callable[[Tensor], Tensor]) -> None:
    out, found = watched(function, torch.zeros(2).half())
    assert bool((out != 0).all())
    assert not found


@pytest.mark.parametrize("value", [3e-8, -6e-8, 1e-7, 0.0, math.nan, math.inf])
def test_constants_that_the_dtype_holds(value: float) -> None:
    assert not watched(lambda x: x + value, torch.zeros(2).half())[1]
    assert bool(watched(lambda x: x + value, torch.zeros(2).half())[0].any()) == (value != 0)


def test_the_epsilon_of_logit_on_a_cpu() -> None:
    out, found = watched(lambda x: torch.logit(x, TINY), torch.zeros(2).half())
    assert bool(out.isneginf().all())
    assert found == [TINY]
    assert bool(torch.logit(torch.zeros(2), TINY).isfinite().all())


def test_the_largest_number_that_vanishes() -> None:
    tie = 2.0**-25
    out, found = watched(lambda x: x + tie, torch.zeros(2).half())
    assert not out.any()
    assert found == [tie]


# -- in a scan


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def findings(function: Callable[[Tensor], Tensor]) -> list[Diagnostic]:
    result = scan(Applied(function), torch.randn(4, 8), precisions=["half", "bfloat16"], plan=False)
    return [diagnostic for diagnostic in result.diagnostics if diagnostic.code == "LP206"]


@pytest.mark.parametrize(
    ("function", "constant", "severity"),
    [
        (F.normalize, "1e-12", "note"),
        (lambda x: F.normalize(x * 0), "1e-12", "warning"),
        (lambda x: F.cosine_similarity(x, x + 1), "1e-08", "note"),
        (lambda x: x.clamp(min=1e-9), "1e-09", "note"),
        (lambda x: x.abs().add(1e-8).log(), "1e-08", "note"),
    ],
)
def test_models_with_such_a_constant(function: Callable[[Tensor], Tensor], constant: str, severity: str) -> None:
    [finding] = findings(function)
    assert finding.precision == "half"
    assert f"the constant {constant} is 0 in fp16" in finding.message
    assert finding.severity == severity
    assert ("div, which reads its result, gives NaN" in finding.message) == (severity == "warning")
    assert "6e-05" in (finding.help or "")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (8,), eps=1e-8),
        lambda x: x + 1e-6,
        lambda x: F.normalize(x, eps=1e-4),
        lambda x: F.normalize(x.float()).to(x.dtype),
    ],
)
def test_models_without(function: Callable[[Tensor], Tensor]) -> None:
    assert not findings(function)


def test_only_an_op_that_reads_the_result_is_named() -> None:
    def both(x: Tensor) -> Tensor:
        return (F.normalize(x + 4) * 0).add(1e-8).log()

    found = {finding.op: finding for finding in findings(both)}
    assert found["aten.clamp_min.default"].severity == "note"
    assert "log, which reads its result, gives Inf" in found["aten.add.Tensor"].message
