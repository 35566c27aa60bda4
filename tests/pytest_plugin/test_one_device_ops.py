"""Ops of one type of device: on another device they are not gaps, and what it dispatches instead is shown."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch

from lowprec_check.catalog.aten import (
    COUNTERPARTS,
    AtenCatalog,
    Counterpart,
    dispatched_elsewhere,
    has_other_layouts_only,
    measured_counterparts,
    only_device,
)
from lowprec_check.catalog.declared import known_release, load
from lowprec_check.catalog.measured import at_release, sweep_of
from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.catalog.records import LOW
from lowprec_check.catalog.versioned_file import data_folder, read_tables
from lowprec_check.features.prediction.kernel_support import KernelSupport
from tools.one_device_ops import only_on, only_other_layouts
from tools.xpu_declarations.registrations import parse

pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def installed() -> dict[str, list[str]]:
    """By device, the ops that the installed torch has only for it."""
    file = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    return only_on(parse(file.read_text()))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_an_op_that_only_a_cpu_has_is_not_reported_as_unregistered(
    installed: dict[str, list[str]], device: str, dtype: str
) -> None:
    catalog = AtenCatalog(device, dtype, "2.13.0")  # type: ignore[arg-type]
    found = {op: catalog.of(op) for op in installed["cpu"] if only_device(op) and not dispatched_elsewhere(op)}
    assert len(found) > 50
    assert {op for op, support in found.items() if support.kind == "no-backend-kernel"} == set()
    unknown = [support for support in found.values() if support.state is None]
    assert all(device in (support.message or "") for support in unknown), unknown
    assert len(unknown) > 50


def test_real_gaps_stay_gaps() -> None:
    half = AtenCatalog("xpu", "float16", "2.13.0")
    assert half.of("linalg_inv_ex").state == half.of("_linalg_svd").state == "none"
    assert half.of("_histogramdd_bin_edges").message == "not registered for xpu"  # a CPU and Metal have it
    assert half.of("_sparse_mm_reduce_impl").message == "not registered for xpu"  # a function calls it on any device
    assert AtenCatalog("cuda", "float16", "2.13.0").of("_sparse_mm_reduce_impl").kind == "no-backend-kernel"


@pytest.mark.parametrize("dtype", LOW)
def test_an_op_without_dense_kernels_is_not_known_on_xpu(dtype: str) -> None:
    """The declarations cover dense tensors; XPU has kernels of some of these for others."""
    file = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    ops = [op for op in only_other_layouts(parse(file.read_text())) if has_other_layouts_only(op)]
    assert {"_to_dense", "to_padded_tensor", "sparse_mask"} <= {*ops}
    assert not {"mm", "linalg_inv_ex", "_cdist_forward"} & {*ops}
    catalog = AtenCatalog("xpu", dtype, "2.13.0")  # type: ignore[arg-type]
    unregistered = {op for op in ops if catalog.of(op).kind == "no-backend-kernel"}
    assert all(dispatched_elsewhere(op) for op in unregistered)
    assert "those of xpu are not declared" in (catalog.of("_to_dense").message or "")


def test_what_cuda_dispatches_instead_is_measured() -> None:
    sweep = sweep_of("cuda")
    for op, other in (("", ""), ("_backward", "_backward")):
        name = f"_scaled_dot_product_flash_attention_for_cpu{op}"
        assert measured_counterparts(name, sweep) == [f"_scaled_dot_product_efficient_attention{other}"]
    assert measured_counterparts("addmm", sweep) == []
    cpu = at_release("cpu", sweep.release)
    assert cpu is not None
    assert measured_counterparts("_scaled_dot_product_efficient_attention", cpu) == [
        "_scaled_dot_product_flash_attention_for_cpu"
    ]


def test_the_support_is_that_of_what_the_device_dispatches() -> None:
    xpu, cuda = AtenCatalog("xpu", "float16", "2.13.0"), AtenCatalog("cuda", "float16", "2.13.0")
    attention = xpu.of("aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert attention.state == "all"
    assert attention.message == "on xpu: _scaled_dot_product_fused_attention_overrideable"
    assert xpu.of("mkldnn_rnn_layer").message == "on xpu: _thnn_fused_lstm_cell"
    assert cuda.of("mkldnn_rnn_layer").message == "on cuda: _cudnn_rnn"
    bfloat16 = AtenCatalog("cuda", "bfloat16", "2.13.0").of("mkldnn_rnn_layer")
    assert (bfloat16.state, bfloat16.message) == (None, "on cuda: _cudnn_rnn: not known to the catalog")
    unknown = xpu.of("cudnn_batch_norm")
    assert unknown.message == "only cuda has this op; what xpu dispatches instead is not known"


def test_counterparts_are_ops_of_the_device() -> None:
    stated = read_tables(data_folder() / COUNTERPARTS, "counterpart", Counterpart)
    assert {only_device(entry.op) for entry in stated} == {"cpu"}
    declared = load("xpu", known_release("xpu"))
    for entry in stated:
        for op in entry.dispatches:
            assert only_device(op) in (entry.device, None, "cuda")
            row = declared.row(op)
            assert row is not None
            assert entry.device != "xpu" or row.registration in ("native", "composite")


def test_the_file_has_what_the_installed_torch_has(installed: dict[str, list[str]]) -> None:
    new = {op for ops in installed.values() for op in ops if only_device(op) is None}
    assert len(new) < 20, "run python -m tools.one_device_ops"
    assert only_device("aten.mkldnn_rnn_layer.default") == "cpu"
    assert (
        only_device("add.Tensor")
        is only_device("native_channel_shuffle")
        is only_device("_upsample_bicubic2d_aa")
        is None
    )


def test_a_suite_run_on_a_cpu_shows_what_xpu_runs(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch
        def test_lstm(): torch.nn.LSTM(4, 4)(torch.randn(5, 3, 4))[0].sum().backward()
        def test_attention():
            q = torch.randn(1, 2, 8, 8, requires_grad=True)
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        def test_inverse(): torch.linalg.inv(torch.eye(3))
        """
    )
    options = ("--lowprec-coverage", "half,bfloat16", "--lowprec-device", "xpu", "--lowprec-report", "out.json")
    text = project.runpytest(*options, "-v").stdout.str()
    found = {use["op"]: use["support"] for use in json.loads(Path("out.json").read_text())["ops"]}
    gaps = {op for op, support in found.items() if any(each["state"] in ("some", "none") for each in support.values())}
    assert "aten.linalg_inv_ex.default" in gaps
    assert not {op for op in gaps if "mkldnn" in op or "scaled_dot" in op}
    assert "not registered" not in text


def test_predictions_run_what_the_device_dispatches() -> None:
    support = KernelSupport(predicted_device("xpu", "2.13", "2.13"))
    aten = torch.ops.aten
    assert support.name_of(aten.mkldnn_rnn_layer_backward.default) == "_thnn_fused_lstm_cell_backward_impl"
    assert support.registration(aten.mkldnn_rnn_layer_backward.default) == "native"
    assert support.registration(aten._weight_int4pack_mm_for_cpu.default) is None
    assert support.registration(aten._histogramdd_bin_edges.default) == "none"
