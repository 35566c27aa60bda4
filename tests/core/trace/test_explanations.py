"""Explanations that version 0.1.0 got wrong: errors of op calls, twins, comparisons of single tensors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from helpers import DEFAULT, run
from torch import Tensor, nn

from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.output_comparison import compare_outputs, same_bits
from lowprec_check.torchkit.tensor_comparison import compare_tensor

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def rows(found: Run, op: str) -> list[OpCall]:
    return [row for row in found.op_calls.rows() if row.op.startswith(f"aten.{op}")]


class Linear(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, size)


# -- twins


class Correlation(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(self.linear(x).float())
        return torch.fft.irfft(y * y.flip(0).conj())


@pytest.mark.parametrize("reference", [torch.float32, torch.float64])
def test_a_lazy_conjugate_of_the_reference_is_conjugated(reference: torch.dtype) -> None:
    plain, found = run(Correlation(), (X,), "half", options=DEFAULT._replace(wide=reference))
    assert found.lockstep_error is not None
    assert plain.output_error is not None
    assert found.lockstep_error.rel_l2 == pytest.approx(plain.output_error.rel_l2, rel=0.2)


@torch.library.custom_op("lowprec_explanations::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """Writes in place and returns nothing."""
    x.mul_(2)


class InPlace(Linear):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.linear(x), self.linear(x + 1)
        if self.how == "foreach":
            torch._foreach_add_([y, z], [z.clone(), y.clone()])
            torch._foreach_mul_([y, z], 2.0)
        else:
            double_(y)
        return y + z


@pytest.mark.parametrize("how", ["foreach", "custom"])
@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_ops_that_write_and_return_nothing_advance_the_reference(how: str, precision: str) -> None:
    plain, found = run(InPlace(how), (X,), precision)
    assert found.lockstep_error is not None
    assert plain.output_error is not None
    assert found.lockstep_error.rel_l2 == pytest.approx(plain.output_error.rel_l2, rel=0.2)
    written = [row for row in found.op_calls.rows() if "foreach" in row.op or "double_" in row.op]
    assert all(row.accumulated_error for row in written)


class IntegerBuffers(Linear):
    """Integers that are cast to the dtype of the run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("weights", torch.randint(-100, 100, (8, 8), dtype=torch.int8))
        self.register_buffer("positions", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "mask":
            return y * self.mask.to(y.dtype)
        if self.how == "weights":
            return nn.functional.linear(y, self.weights.to(y.dtype) * 1e-2)
        positions = self.positions.to(y.dtype)[None].clone()
        positions[:, :4] = y[:1, :4]
        return y * positions


class Resizes(Linear):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y, out = self.linear(x), torch.empty(0, dtype=x.dtype)
        if self.how == "mul":
            torch.mul(y, 2, out=out)
        else:
            torch.cat([y, y], out=out)
        return out + 1


@pytest.mark.parametrize(
    "model",
    [*map(IntegerBuffers, ["mask", "weights", "positions"]), *map(Resizes, ["mul", "cat"])],
    ids=lambda m: m.how,
)
def test_the_reference_follows_integers_and_outputs_that_are_resized(model: Any) -> None:
    plain, found = run(model, (X,), "half")
    assert found.lockstep_error is not None
    assert plain.output_error is not None
    assert found.lockstep_error.rel_l2 == pytest.approx(plain.output_error.rel_l2, rel=0.2)


# -- outputs that are used


class TwoNorms(Linear):
    """The mean of a normalized input is zero up to rounding, so its relative error means nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.linear(x)))


@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_the_error_of_a_norm_is_that_of_its_output(precision: str) -> None:
    plain, found = run(TwoNorms(), (X,), precision)
    assert plain.output_error is not None
    norms = rows(found, "native_layer_norm")
    assert norms[-1].accumulated_error == pytest.approx(plain.output_error.rel_l2, rel=0.01)
    assert all((row.accumulated_error or 0) < 5e-2 for row in norms)


class Variance(Linear):
    """Only the second output is used."""

    def forward(self, x: Tensor) -> Tensor:
        _, mean = torch.var_mean(self.linear(x) + 100.0, -1)
        return mean


def test_the_error_of_an_op_is_that_of_the_output_that_is_used() -> None:
    plain, found = run(Variance(), (X,), "half")
    assert plain.output_error is not None
    assert rows(found, "var_mean")[0].accumulated_error == pytest.approx(plain.output_error.rel_l2, rel=0.01)


# -- parts of a storage


class LastSliceIsZero(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 1000.0
        y = y - 1000.0  # nearly all digits are lost here
        y[:, 0] = 0
        return self.linear(y)


def test_an_op_after_a_slice_was_overwritten_knows_the_error_of_the_rest() -> None:
    _, found = run(LastSliceIsZero(), (X,), "half")
    head = rows(found, "addmm")[-1]
    subtraction = rows(found, "sub")[0]
    assert (subtraction.accumulated_error or 0) > 0.1
    assert (head.input_error or 0) > 0.1  # not an amplifier: the error comes in


class Chunks(Linear):
    def __init__(self) -> None:
        super().__init__(24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.linear(x) * torch.tensor([6e4] * 8 + [1.0] * 16, dtype=x.dtype)).chunk(3, -1)
        return torch.cat([q.sign(), k, (v.abs() + 1.0) * 6e4])


def test_infinity_in_one_chunk_does_not_hide_an_overflow_in_another() -> None:
    model = Chunks()
    with torch.no_grad():
        model.linear.weight[:8] *= 10
    _, found = run(model, (X,), "half")
    multiplied = rows(found, "mul.Tensor")
    assert multiplied[0].introduced_inf
    assert multiplied[-1].introduced_inf


# -- comparing tensors


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e-22, 1e-30, 1e-37])
@pytest.mark.parametrize("wrong", [0.0, 1e-3, 0.5, 1.0])
def test_the_error_of_tiny_values(scale: float, wrong: float) -> None:
    reference = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * scale
    found = compare_tensor(reference * (1 - wrong), [reference]).errors[0]
    assert found == pytest.approx(wrong, rel=2e-2, abs=2e-6)
    output = compare_outputs([reference * (1 - wrong)], [reference])
    assert output.distance == pytest.approx(wrong, rel=2e-2, abs=2e-6)


@pytest.mark.parametrize(
    ("value", "reference", "new"),
    [
        (math.nan, math.inf, "nan"),
        (math.nan, -math.inf, "nan"),
        (math.inf, -math.inf, "inf"),
        (math.inf, math.inf, ""),
        (math.nan, math.nan, ""),
        (math.inf, math.nan, ""),
        (math.inf, 1.0, "inf"),
    ],
)
def test_what_counts_as_a_new_nan_or_infinity(value: float, reference: float, new: str) -> None:
    out, expected = torch.tensor([1.0, value]), torch.tensor([1.0, reference])
    found = compare_tensor(out, [expected])
    assert (found.introduced_nan, found.introduced_inf) == (int(new == "nan"), int(new == "inf"))
    assert (found.errors[0] == math.inf) == bool(new)
    assert compare_outputs([out], [expected]).nonfinite == bool(new)


def test_infinity_is_not_the_largest_number() -> None:
    largest = torch.finfo(torch.float32).max
    assert not same_bits([torch.tensor([math.nan, math.inf])], [torch.tensor([math.nan, largest])])
    assert same_bits([torch.tensor([math.nan, math.inf])], [torch.tensor([math.nan, math.inf])])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_compared_by_what_they_store(layout: torch.layout) -> None:
    sparse, other = (torch.tensor([[0.0, value], [2.0, 0.0]]).to_sparse(layout=layout) for value in (1.0, 3.0))
    assert same_bits([sparse], [sparse.clone()])
    assert not same_bits([sparse], [other])
    assert not same_bits([sparse], [sparse.to_dense()])


def test_a_finite_value_in_place_of_an_infinity_is_an_infinite_error() -> None:
    found = compare_outputs([torch.tensor([1.0, 65504.0])], [torch.tensor([1.0, math.inf])])
    assert (found.nonfinite, found.distance) == (False, math.inf)


@pytest.mark.parametrize(
    ("outputs", "references", "share"),
    [
        ([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 9, 4])], 0.25),
        ([torch.tensor([True, False])], [torch.tensor([False, True])], 1.0),
        ([torch.tensor([7]), torch.arange(4)], [torch.tensor([7]), torch.arange(4) + 1], 1.0),
    ],
)
def test_integers_are_counted(outputs: list[Tensor], references: list[Tensor], share: float) -> None:
    found = compare_outputs(outputs, references)
    assert (found.error.rel_l2, found.error.mismatched, found.distance) == (None, share, share)


def test_integers_beside_floating_leaves_are_counted_but_not_judged() -> None:
    ids = [torch.tensor([1, 2]), torch.tensor([1, 3])]
    found = compare_outputs([torch.ones(2), ids[0]], [torch.ones(2), ids[1]])
    assert (found.distance, found.error.mismatched) == (0.0, 0.5)


# -- warnings


class Warns(Linear):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("of the model", UserWarning, stacklevel=1)
        return self.linear(x)


def test_a_warning_is_no_failure_where_warnings_are_errors() -> None:
    plain, found = run(Warns(), (X,), "bfloat16")
    assert (plain.status, found.exception, found.gaps) == ("ok", None, [])
    assert [note for note in found.notes if "of the model" in note] == []
    assert rows(found, "addmm")


# -- one op that takes all the time


class Slow(nn.Module):
    """An op whose reruns take several times as long as the forward, then a second gap."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        wide = torch.randn(self.size, self.size, generator=torch.Generator().manual_seed(0)).to(y.dtype)
        return torch.linalg.svdvals(wide)[:4], torch.cdist(y, y)


@pytest.mark.slow
def test_gaps_behind_an_op_that_dominates_the_forward_are_found() -> None:
    from lowprec_check import scan

    found = scan(Slow(1500), X, precisions=["half"]).run("half")
    assert {"aten._linalg_svd.default", "aten._cdist_forward.default"} <= {gap.op for gap in found.gaps}
    assert not found.emulated
