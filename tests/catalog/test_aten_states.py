"""The support of aten ops that the catalog derives from operators, against bare calls of the ops."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest
import torch
from conftest import ROOT

from lowprec_check.catalog.aten import AtenCatalog, corrected_state
from lowprec_check.catalog.measured import at_release, history
from lowprec_check.catalog.versions import release_of
from lowprec_check.pytest_plugin.fixture.cast_replay import copied, try_call

sys.path.append(str(ROOT / "benchmarks"))  # behind the tests, which have a module of the same name
import catalog_replay

OPERATORS = ["cdist", "nn.functional.rrelu", "histogram", "fft.rfft", "stft", "istft", "linalg.inv", "addmm"]


@pytest.mark.slow
def test_bare_calls_agree_with_the_catalog() -> None:
    if at_release("cpu", release_of(torch.__version__)) is None:
        pytest.skip("the catalog does not have the installed torch")
    outcomes: catalog_replay.Outcomes = defaultdict(list)
    for name in OPERATORS:
        for op, dtype, error in catalog_replay.replay(name, 8):
            outcomes[op, dtype].append(error)
    rows = {(row["op"], row["dtype"]): row for row in catalog_replay.compare(outcomes)}
    assert [row for row in rows.values() if row["catalog"] not in (row["calls"], None)] == []
    assert rows["rrelu_with_noise", "half"]["calls"] == "some"
    assert rows["_fft_r2c", "bfloat16"]["calls"] == rows["_cdist_forward", "half"]["calls"] == "none"


def test_no_release_has_a_fourier_transform_in_bfloat16_on_a_cpu() -> None:
    for sweep in history("cpu"):
        found = {op: AtenCatalog("cpu", "bfloat16", sweep.release).of(op).state for op in ("_fft_r2c", "_fft_c2r")}
        assert set(found.values()) == {"none"}, (sweep.release, found)


def test_a_correction_applies_to_what_runs_in_part() -> None:
    assert corrected_state("cpu", "_cdist_forward", "some") == "none"
    assert corrected_state("cpu", "_cdist_forward", "all") == "all"  # a kernel of a later release
    assert corrected_state("cuda", "_cdist_forward", "some") == "some"


def test_copies_have_the_strides_and_share_the_memory_of_the_originals() -> None:
    add = torch.ops.aten.add_.Tensor
    base = torch.arange(12.0).reshape(3, 4)
    left, right = base.t()[1], base[:, 1:2].expand(3, 4)
    (one, other), _ = copied(add, (left, right), {}, torch.half)
    assert (one.dtype, one.stride(), other.stride()) == (torch.half, left.stride(), right.stride())
    one.zero_()
    assert not other.any()  # the column that both show
    assert base.any()


def test_a_cast_call_shows_what_is_raised() -> None:
    inverse, layer_norm = torch.ops.aten.linalg_inv_ex.default, torch.ops.aten.native_layer_norm_backward.default
    raised = try_call(inverse, (torch.eye(3),), {}, torch.half)
    assert raised is not None
    assert "Low precision dtypes not supported" in raised.message
    assert try_call(inverse, (torch.eye(3),), {}) is None
    x, mean = torch.randn(2, 3), torch.zeros(2, 1)
    args = (x, x, [3], mean, mean + 1, torch.ones(3), torch.zeros(3), [True, True, True])
    assert try_call(layer_norm, args, {}, torch.bfloat16) is None
