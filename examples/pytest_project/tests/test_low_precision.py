"""Tests of this project in low precision."""

import pytest
import torch
from whitening import Head, Whitening

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def test_head_runs_in_bfloat16(lowprec):
    torch.manual_seed(0)
    lowprec.check(Head().eval(), X, precision="bfloat16")


def test_whitening_runs_in_half(lowprec):
    lowprec.assert_no_gaps(Whitening(), X, dtype=torch.half)


def test_dot_runs_in_half_and_trains(lowprec):
    lowprec.assert_supported("aten::dot", dtype=torch.half, device="cpu", backward=True)


@pytest.mark.lowprec("autocast-fp16", "autocast-bf16", tolerance=0.02)
def test_whitening_is_accurate_under_autocast(lowprec):
    model = Whitening()
    with lowprec.autocast():
        y = lowprec.cast(model)(lowprec.cast(X))
    assert lowprec.allclose(y, model(X))
