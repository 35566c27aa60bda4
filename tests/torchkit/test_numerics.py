"""Error measures compared with their definitions in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_check.torchkit.floating_dtypes import underflows, widen
from lowprec_check.torchkit.output_comparison import compare_outputs
from lowprec_check.torchkit.tensor_comparison import CHUNK, compare_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def defined(out: torch.Tensor, reference: torch.Tensor) -> float:
    y, r = out.double().numpy(), reference.double().numpy()
    difference, size = np.linalg.norm((y - r).ravel()), np.linalg.norm(r.ravel())
    return 0.0 if difference == 0 else float(difference / size) if size else math.inf


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from((0, 1, 7, 1000, CHUNK, CHUNK + 1, 3 * CHUNK + 5)),
    dtype=st.sampled_from(DTYPES),
    wide=st.sampled_from((torch.float32, torch.float64)),
    scale=st.sampled_from((1e-7, 1e-4, 1.0, 1e3)),
    zeros=st.booleans(),
)
def test_compare_tensor_matches_the_definition(
    size: int, dtype: torch.dtype, wide: torch.dtype, scale: float, zeros: bool
) -> None:
    reference = torch.randn(size, dtype=wide) * scale
    reference = reference.relu() if zeros else reference
    other = reference + torch.randn(size, dtype=wide) * scale * 0.1
    out = reference.to(dtype)
    found = compare_tensor(out, [reference, other], count_flushed=True)
    assert found.errors[0] == pytest.approx(defined(out, reference), rel=1e-3, abs=1e-12)
    assert found.errors[1] == pytest.approx(defined(out, other), rel=1e-3, abs=1e-12)
    assert found.absmax == (float(out.abs().max()) if size else 0.0)
    lost = ((out == 0) & (reference != 0) & (reference.abs() < torch.finfo(dtype).tiny)).sum().item()
    assert found.flushed == pytest.approx(lost / max(1, int((reference != 0).sum())))
    small = ((reference != 0) & (reference.abs() < torch.finfo(dtype).tiny)).sum().item()
    assert found.subnormal == pytest.approx(small / max(1, int((reference != 0).sum())))


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided"])
def test_layouts_do_not_matter(layout: str) -> None:
    reference = torch.randn(4, 6, 8, 10)
    out = reference.bfloat16()
    if layout == "channels_last":
        out = out.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        out, reference = out.transpose(1, 3), reference.transpose(1, 3)
    else:
        out, reference = out[:, ::2], reference[:, ::2]
    assert compare_tensor(out, [reference]).errors[0] == pytest.approx(defined(out, reference), rel=1e-3)


def test_nonfinite_values() -> None:
    reference = torch.tensor([1.0, -math.inf, 3.0, 4.0])
    same = compare_tensor(torch.tensor([1.0, -math.inf, 3.0, 4.0]).half(), [reference])
    assert (same.errors, same.introduced_inf, same.introduced_nan, same.absmax) == ([0.0], 0, 0, 4.0)
    worse = compare_tensor(torch.tensor([math.inf, -math.inf, math.nan, 4.0]).half(), [reference])
    assert (worse.errors, worse.introduced_inf, worse.introduced_nan) == ([math.inf], 1, 1)


def test_squares_that_overflow() -> None:
    reference = torch.full((10,), 1e30)
    assert compare_tensor((reference * 1.01).bfloat16(), [reference]).errors[0] == pytest.approx(0.01, rel=0.5)


def test_complex_values() -> None:
    reference = torch.randn(50, dtype=torch.complex64)
    out = reference + 0.01
    assert compare_tensor(out, [reference]).errors[0] == pytest.approx(
        float((out - reference).norm() / reference.norm()), rel=1e-4
    )


def test_output_error_with_a_zero_reference() -> None:
    zeros = [torch.zeros(3)]
    assert compare_outputs(zeros, zeros).distance == 0.0
    assert not compare_outputs(zeros, zeros).compared  # zeros tell nothing
    assert compare_outputs([torch.ones(3)], zeros).distance == math.inf
    assert compare_outputs([torch.ones(3)], zeros).error.rel_l2 is None


def test_output_error_is_that_of_the_worst_leaf() -> None:
    reference = [torch.ones(4), torch.ones(4), torch.tensor([1, 2])]
    found = compare_outputs([torch.ones(4), torch.ones(4) * 1.5, torch.tensor([9, 9])], reference)
    assert found.distance == pytest.approx(0.5)
    assert found.error.sqnr_db == pytest.approx(-20 * math.log10(0.5))


def test_output_error_is_infinite_for_other_shapes() -> None:
    assert compare_outputs([torch.ones(3)], [torch.ones(4)]).distance == math.inf
    assert compare_outputs([], [torch.ones(4)]).distance == math.inf


def test_top1_agreement() -> None:
    reference = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
    assert compare_outputs([reference.flip(1)], [reference]).error.top1 == 0.0
    assert compare_outputs([reference.half()], [reference]).error.top1 == 1.0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, True),
        (torch.float8_e4m3fn, True),
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.float64, False),
        (torch.complex64, False),
    ],
)
def test_dtypes_with_a_smaller_range_than_fp32_underflow(dtype: torch.dtype, expected: bool) -> None:
    assert underflows(dtype) is expected


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_widening() -> None:
    assert widen(torch.ones(1, dtype=torch.half)).dtype == torch.float32
    assert widen(torch.ones(1, dtype=torch.complex32)).dtype == torch.complex64
    assert widen(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
