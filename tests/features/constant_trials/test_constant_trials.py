"""A constant that is zero in fp16 is the first error if it makes the run fail: against the plain model without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import scan_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lowprec_check.analysis.findings import groups
from lowprec_check.schema.scan_result import Diagnostic, ScanResult

TINY = torch.finfo(torch.half).tiny
Guard = Callable[[Tensor, float], Tensor]

# Each on a line of its own: a quotient that is 0 / 0 for a row of zeros if the constant is zero.
GUARDS: dict[str, Guard] = {
    "sum": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + eps),
    "difference": lambda x, eps: x / (-eps - x.norm(dim=-1, keepdim=True)),
    "clamp": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp(min=eps),
    "clamp_min": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp_min(eps),
    "normalize": lambda x, eps: functional.normalize(x, dim=-1, eps=eps),
    "maximum": lambda x, eps: x / torch.maximum(x.norm(dim=-1, keepdim=True), torch.tensor(eps)),
    "in place": lambda x, eps: x / x.norm(dim=-1, keepdim=True).add_(eps),
    "full": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + torch.full_like(x, eps)),
    "made": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + torch.tensor(eps, dtype=x.dtype)),
    "new": lambda x, eps: x / torch.maximum(x.norm(dim=-1, keepdim=True), x.new_tensor([eps])),
    "array": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + torch.as_tensor(np.float32([eps]), dtype=x.dtype)),
    "list": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + x.new_tensor([eps] * 8 + [0.0])[:8]),
    "cast": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + torch.tensor(eps).to(x)),
    "root": lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps),
}


class Guarded(nn.Module):
    """A linear layer, after which a row of zeros meets the guard, or nothing does."""

    def __init__(self, guard: str, eps: float, *, zero_row: bool) -> None:
        super().__init__()
        self.linear, self.guard, self.eps, self.zero_row = nn.Linear(8, 8, bias=False), guard, eps, zero_row

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.zero_row:
            y = y * torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=y.dtype)[:, None]
        return GUARDS[self.guard](y, self.eps) + 0.5


def chain(parts: list[tuple[str, float, bool]]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Guarded(guard, eps, zero_row=zero_row) for guard, eps, zero_row in parts)).eval()


def inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def scanned(model: nn.Module, precision: str = "half") -> ScanResult:
    return scan_here(model, inputs(), precisions=[precision], plan=False, further_inputs=0)


def errors(result: ScanResult) -> list[Diagnostic]:
    """The errors, in the order in which reports show them."""
    ordered = [d for group in groups(result.diagnostics) for message in group.messages for d in message.found]
    return [diagnostic for diagnostic in ordered if diagnostic.severity == "error"]


def fails(model: nn.Module) -> bool:
    """Whether the plain model in half is not finite, or over the tolerance."""
    with torch.no_grad():
        exact = model(inputs())
        low = model.half()(inputs().half()).float()
    model.float()
    return not bool((low - exact).norm() <= 1e-2 * exact.norm())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(list(GUARDS)), min_size=2, max_size=5), st.data())
def test_of_several_constants_the_one_that_matters_is_named(guards: list[str], data: st.DataObject) -> None:
    matters = data.draw(st.integers(0, len(guards) - 1))
    parts = [(guard, 1e-9, index == matters) for index, guard in enumerate(guards)]
    model = chain(parts)
    result = scanned(model)
    trial = result.runs[1].constant_trial
    assert trial is not None
    assert [constant.module for constant in trial.constants] == [str(matters)]
    assert abs(trial.constants[0].constant) == pytest.approx(1e-9)
    assert trial.status == "ok"

    # The plain model: with the number that works in this place alone it passes, in the others alone it fails.
    for index in range(len(parts)):
        changed = [(guard, TINY if index == at else eps, zero) for at, (guard, eps, zero) in enumerate(parts)]
        assert fails(chain(changed)) == (index != matters)

    first, *others = errors(result)
    assert (first.code, first.module) == ("LP206", str(matters))
    assert "output passes" in first.message
    assert ").tiny" in (first.help or "")
    assert [other.code for other in others] == ["LP301"]
    assert "metric" not in (others[0].help or "")
    assert not any("scale" in (diagnostic.help or "") for diagnostic in result.diagnostics)


@pytest.mark.parametrize(
    ("guard", "code"),
    [
        ("made", "torch.tensor(max(1e-09, torch.finfo(x.dtype).tiny), dtype=x.dtype)"),
        ("new", "x.new_tensor(max(1e-09, torch.finfo(x.dtype).tiny))"),
        ("cast", "torch.tensor(1e-9).clamp(min=torch.finfo(torch.float16).tiny).to(x)"),
    ],
)
def test_the_code_of_the_advice_works(guard: str, code: str) -> None:
    model = chain([(guard, 1e-9, True)])
    [advice] = {error.help for error in errors(scanned(model)) if error.code == "LP206"}
    # As the advice says, with its own words for the tensor and its dtype.
    said = (advice or "").replace("(dtype)", "(x.dtype)").removeprefix("write ").removeprefix("cast t").split(")")[0]
    assert said in code
    assert fails(model)
    GUARDS["advised"] = lambda x, _: x / (x.norm(dim=-1, keepdim=True) + eval(code, {"torch": torch, "x": x}))
    try:
        assert not fails(chain([("advised", 0.0, True)]))
    finally:
        del GUARDS["advised"]


def test_the_reference_has_the_number_that_a_tensor_in_16_bits_loses() -> None:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1000.3, 0.1003], dtype=x.dtype).sum()

    model = Made()
    [run] = [run for run in scanned(model).runs if run.precision == "half"]
    with torch.no_grad():
        low, exact = model(inputs().half()).float(), model(inputs())
    assert run.lockstep_error is not None
    assert run.lockstep_error.rel_l2 == pytest.approx(float((low - exact).norm() / exact.norm()), rel=1e-3)


def test_a_value_that_was_computed_is_no_constant() -> None:
    class Computed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            small = (x.float().mean() * 1e-10).to(x.dtype)
            return x / (x * small)

    assert not [diagnostic for diagnostic in scanned(Computed()).diagnostics if diagnostic.code == "LP206"]


def test_two_that_matter_are_both_named() -> None:
    result = scanned(chain([("sum", 1e-9, True), ("clamp", 1e-9, False), ("clamp", 1e-10, True)]))
    assert [(error.code, error.module) for error in errors(result)] == [("LP206", "0"), ("LP206", "2"), ("LP301", None)]
    assert "in the place of all 2 such constants" in errors(result)[0].message


@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_weight_that_is_zero_is_named(is_parameter: bool) -> None:
    class Weighted(Guarded):
        def __init__(self) -> None:
            super().__init__("sum", 0.0, zero_row=True)
            eps, other = torch.tensor(1e-10), torch.tensor([1e-11])
            if is_parameter:
                self.small, self.other = nn.Parameter(eps), nn.Parameter(other)
            else:
                self.register_buffer("small", eps)
                self.register_buffer("other", other)

        def forward(self, x: Tensor) -> Tensor:
            return (
                GUARDS["sum"](self.linear(x) * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None].to(x), self.small)
                + self.other
            )

    torch.manual_seed(0)
    result = scanned(Weighted().eval())
    first, *others = errors(result)
    assert (first.code, first.op) == ("LP206", "cast small")
    assert first.message.startswith("small is 0 in fp16; with 6.1e-05 in its place the output passes")
    assert (first.help or "").startswith("give small a value of at least 6.1e-05")
    assert [other.code for other in others] == ["LP301"]


@pytest.mark.parametrize("guard", GUARDS)
def test_a_cause_beside_another_one_is_named_too(guard: str) -> None:
    """The run still fails with another constant; what the constant does alone shows in fp32."""

    class Overflows(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            large = x * 3e5
            return torch.cat([super().forward(x), large * (large.square() + 1).rsqrt()])

    torch.manual_seed(0)
    result = scanned(Overflows(guard, 1e-9, zero_row=True).eval())
    found = {error.code: error for error in errors(result)}
    assert "fp32 with 0 in its place fails, and with 6.1e-05 in its place the output passes" in found["LP206"].message
    assert ").tiny" in (found["LP206"].help or "")
    assert "LP201" in found
    assert "LP206" not in (found["LP301"].help or "")


@pytest.mark.parametrize("precision", ["half", "autocast-fp16"])
def test_one_beside_another_cause_is_no_error(precision: str) -> None:
    """Another number for it was tried: that advice does not help, and is not given."""

    class Overflows(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 3e5).square()

    torch.manual_seed(0)
    result = scanned(Overflows("sum", 1e-9, zero_row=False).eval(), precision)
    [constant] = [diagnostic for diagnostic in result.diagnostics if diagnostic.code == "LP206"]
    assert constant.severity == "note"
    assert "with 6.1e-05 in its place the output still has NaN or Inf" in constant.message
    assert constant.help is None
    assert "LP201" in {error.code for error in errors(result)}


def test_a_constant_that_cannot_be_held_makes_the_output_finite_only() -> None:
    torch.manual_seed(0)

    class Logarithm(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * torch.tensor([1, 1, 0, 1], dtype=x.dtype)[:, None]).abs().add(1e-10).log()

    first, *_ = errors(scanned(Logarithm("sum", 0.0, zero_row=False).eval()))
    assert first.code == "LP206"
    assert "the output is finite, error" in first.message
    assert first.help is None


def test_nothing_is_tried_in_a_run_that_passes() -> None:
    assert scanned(chain([("sum", 1e-9, False)])).runs[1].constant_trial is None
