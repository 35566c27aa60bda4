"""Where the dtypes come from that meet in an op, and the cast that is advised: against the plain model with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import scan_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lowprec_check.schema.findings import MixedCall
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.torchkit.autocast_rules import noting_autocasts

Cast = Callable[[Tensor, Tensor], Tensor]
Body = Callable[["Mixing", Tensor, Tensor, Tensor, Cast], Tensor]


def as_given(value: Tensor, _like: Tensor) -> Tensor:
    return value


def as_advised(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype)


def put(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
    out[i] = cast(y, out)
    return out


def put_masked(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
    out[i > 2] = cast(y[i > 2], out)
    return out


def rows_of(i: Tensor) -> Tensor:
    return i[:, None].expand(6, 8)


# What is written to a tensor of another dtype.
WRITES: dict[str, Body] = {
    "index_put": put,
    "masked index_put": put_masked,
    "index_add_": lambda m, out, y, i, cast: out.index_add_(0, i, cast(y, out)),
    "index_add": lambda m, out, y, i, cast: torch.index_add(out, 0, i, cast(y, out)),
    "index_copy_": lambda m, out, y, i, cast: out.index_copy_(0, i, cast(y, out)),
    "scatter": lambda m, out, y, i, cast: out.scatter(0, rows_of(i), cast(y, out)),
    "scatter_": lambda m, out, y, i, cast: out.scatter_(0, rows_of(i), cast(y, out)),
    "scatter_add_": lambda m, out, y, i, cast: out.scatter_add_(0, rows_of(i), cast(y, out)),
    "scatter_reduce": lambda m, out, y, i, cast: out.scatter_reduce(0, rows_of(i), cast(y, out), "sum"),
    "masked_scatter": lambda m, out, y, i, cast: out.masked_scatter(rows_of(i) > 2, cast(y, out)),
}

# What meets 16 bits in a cast model: the origin of the one in fp32.
MEETS: dict[str, tuple[Body, str, str]] = {
    "made": (lambda m, out, y, i, cast: y @ cast(torch.ones(8, 8) / 8, y), "made", "ones"),
    "bmm": (lambda m, out, y, i, cast: torch.bmm(y[None], cast(torch.eye(8)[None], y)), "made", "eye"),
    "where": (lambda m, out, y, i, cast: m.out(cast(torch.where(y > 0, y, out), y)), "made", "zeros"),
    "cat": (lambda m, out, y, i, cast: m.out(cast(torch.cat([y, out]), y)), "made", "zeros"),
    "stack": (lambda m, out, y, i, cast: m.out(cast(torch.stack([y, out]), y)), "made", "zeros"),
    "attribute": (lambda m, out, y, i, cast: y @ cast(m.table, y), "attribute", "table"),
    "cast": (lambda m, out, y, i, cast: m.out(cast(y.float().tanh(), y)), "cast", "to_copy"),
    "of integers": (lambda m, out, y, i, cast: m.out(cast(y * (i[:, None] / 2), y)), "made", "div"),
    "above dispatch": (
        lambda m, out, y, i, cast: functional.scaled_dot_product_attention(y[None], cast(out[None], y), y[None]),
        "made",
        "zeros",
    ),
}


class Mixing(nn.Module):
    """Layers, and then what a body does with their result and with zeros in fp32."""

    def __init__(self, body: Body, depth: int = 1, cast: Cast = as_given) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
        self.out, self.body, self.cast = nn.Linear(8, 4), body, cast
        self.table = torch.linspace(0, 1, 64).view(8, 8)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.body(self, torch.zeros(6, 8), self.layers(x), i, self.cast) + 1


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 1, 0, 2, 5, 4])


def scanned(model: nn.Module, precision: str) -> tuple[ScanResult, Run]:
    result = scan_here(model.eval(), inputs(), precisions=[precision], plan=False, further_inputs=0)
    return result, result.runs[1]


def plain_error(body: Body, depth: int, precision: str) -> float:
    """Of the plain model in a precision, with the cast that is advised."""
    model, (x, i) = Mixing(body, depth, as_advised).eval(), inputs()
    with torch.no_grad():
        exact = model(x, i)
        if precision == "half":
            low = model.half()(x.half(), i)
        else:
            with torch.autocast("cpu", dtype=torch.float16):
                low = model(x, i)
    return float((low.float() - exact).norm() / exact.norm())


def advice(result: ScanResult) -> tuple[str, str]:
    """The message and the advice of the one mismatch."""
    [finding] = [diagnostic for diagnostic in result.diagnostics if diagnostic.code == "LP103"]
    return finding.message, finding.help or ""


def only_call(run: Run) -> MixedCall:
    assert run.status == "error"
    assert run.mixed_dtypes is not None
    [call] = run.mixed_dtypes.calls
    return call


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(WRITES)), st.integers(1, 3), st.sampled_from(["half", "autocast-fp16"]))
def test_what_is_written_gets_the_dtype_of_the_tensor(name: str, depth: int, precision: str) -> None:
    result, run = scanned(Mixing(WRITES[name], depth), precision)
    written, value = only_call(run).inputs
    assert (written.dtype, written.origin.kind, written.origin.name) == ("float32", "made", "zeros")
    assert (value.dtype, value.is_cast, written.is_cast) == ("float16", True, False)
    kind = "autocast" if precision == "autocast-fp16" else "parameter"
    assert value.origin.kind == kind

    # The plain model with this cast has the error that is named.
    message, to_do = advice(result)
    assert run.mixed_dtypes is not None
    assert run.mixed_dtypes.rel_l2 == pytest.approx(plain_error(WRITES[name], depth, precision), rel=1e-3)
    assert ".to(out.dtype)" in to_do
    assert "dtype=x.dtype" not in to_do
    assert ("autocast computed it in addmm" in message) == (kind == "autocast")


@pytest.mark.parametrize("name", MEETS)
def test_the_side_in_fp32_is_named(name: str) -> None:
    body, kind, origin = MEETS[name]
    result, run = scanned(Mixing(body), "half")
    wide = [tensor for tensor in only_call(run).inputs if tensor.dtype == "float32"]
    assert {(tensor.origin.kind, tensor.origin.name) for tensor in wide} == {(kind, origin)}
    assert all(tensor.is_cast for tensor in wide)
    assert run.mixed_dtypes is not None
    assert run.mixed_dtypes.status == "ok"
    assert plain_error(body, 1, "half") < 1e-2
    message, to_do = advice(result)
    assert f"cast {wide[0].argument}" in to_do
    assert "the output passes" in message


def outside_of_autocast(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.out(cast(y, m.out.weight))


def test_what_meets_a_weight_gets_its_dtype() -> None:
    result, run = scanned(Mixing(outside_of_autocast), "autocast-fp16")
    by_argument = {tensor.argument: tensor for tensor in only_call(run).inputs}
    assert by_argument["mat1"].origin.kind == "autocast"
    assert [name for name, tensor in by_argument.items() if tensor.is_cast] == ["mat1"]
    assert run.mixed_dtypes is not None
    assert run.mixed_dtypes.rel_l2 == pytest.approx(plain_error(outside_of_autocast, 1, "autocast-fp16"), rel=1e-3)
    assert advice(result)[1] == "cast mat1 here with .float()"


def test_a_cast_to_16_bits_that_loses_too_much_is_not_advised() -> None:
    def differences(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
        large = torch.linspace(3000, 3001, 48).view(6, 8)
        return torch.lerp(y, large, 0.5) - large / 2

    result, run = scanned(Mixing(differences), "half")
    assert run.mixed_dtypes is not None
    assert run.mixed_dtypes.status == "ok"
    assert advice(result)[1] == "cast self here with .float()"


def test_without_a_cast_that_helps_there_is_no_advice() -> None:
    """Another op has no kernel in half: no run was made that shows what the cast gives."""

    def two_faults(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
        return torch.linalg.inv(torch.eye(8, dtype=y.dtype)) @ (y @ torch.ones(8, 8)).T

    result, run = scanned(Mixing(two_faults), "half")
    assert run.mixed_dtypes is not None
    assert run.mixed_dtypes.status is None
    message, to_do = advice(result)
    assert "made by ones" in message
    assert "passes" not in message
    assert not to_do


class Region(nn.Module):
    """A layer inside a region of autocast that torch disables on this machine."""

    def __init__(self, device: str, *, decorated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out, self.decorated = nn.Linear(8, 8), nn.Linear(8, 4), decorated
        self.table, self.region = torch.linspace(0, 1, 8), torch.autocast(device, dtype=torch.float32)
        self.device = device

    def inside(self, x: Tensor) -> Tensor:
        return self.layer(x * self.table)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        if self.decorated:
            return self.out(self.region(self.inside)(x).to(x.dtype))
        with torch.autocast(self.device, dtype=torch.float32):
            y = self.inside(x)
        return self.out(y.to(x.dtype))


@pytest.mark.filterwarnings("ignore:.*[Dd]isabling")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA runs autocast in fp32")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decorated", [False, True])
def test_a_region_that_torch_disables_is_named(device: str, decorated: bool) -> None:
    with noting_autocasts():  # as when a file is loaded
        model = Region(device, decorated=decorated)
    result, run = scanned(model, "half")
    region = only_call(run).disabled_autocast
    assert region is not None
    assert (region.device, region.dtype) == (device, "torch.float32")
    assert "isabling" in region.warning
    message, to_do = advice(result)
    assert f'it is inside torch.autocast("{device}", dtype=torch.float32) at ' in message
    assert region.warning.removesuffix(".") in message
    assert to_do.startswith(("cast input here", "cast mat1 here"))


def test_a_region_that_is_disabled_on_purpose_is_not_named() -> None:
    def outside(m: Mixing, out: Tensor, y: Tensor, i: Tensor, cast: Cast) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return y @ torch.ones(8, 8)

    assert only_call(scanned(Mixing(outside), "half")[1]).disabled_autocast is None


@pytest.mark.filterwarnings("ignore:.*[Dd]isabling")
def test_warnings_are_given_as_torch_gives_them() -> None:
    with pytest.warns(UserWarning, match="Disabling autocast") as plain:
        torch.autocast("cpu", dtype=torch.float32)
    with pytest.warns(UserWarning, match="Disabling autocast") as observed, noting_autocasts():
        torch.autocast("cpu", dtype=torch.float32)
    assert [w.filename for w in observed] == [w.filename for w in plain]
    assert [str(w.message) for w in observed] == [str(w.message) for w in plain]
