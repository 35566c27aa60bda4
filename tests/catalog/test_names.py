"""Spellings of operators, modules, dtypes, devices and versions, in Python and on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call
from torch import nn

from lowprec_check import catalog
from lowprec_check.catalog import measured
from lowprec_check.catalog.names import find, function_name, why_unmeasured
from lowprec_check.errors import UsageError
from lowprec_check.report.answers import answers_document
from lowprec_check.report.layout.text import text

RECORDS = measured.sweep_of("cpu").records
HALF = ["half", "fp16", "f16", "float16", "torch.float16", "torch.fp16", "HALF", torch.float16, torch.half]


def ops(query: str) -> list[str]:
    return [found.op for found in find(query, RECORDS)]


# -- in Python


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_all_spellings_of_a_dtype(dtype: Any) -> None:
    assert catalog.gaps("cpu", dtype) == catalog.gaps("cpu", "float16")
    assert catalog.gaps("cpu", dtype).missing
    assert catalog.difference("2.1", "2.13", dtype=dtype).gained
    assert {cell.dtype for cell in catalog.lookup("dot", dtype=dtype)[0].cells} == {"float16"}
    assert catalog.find_fix("aten.dot.default", device="cpu", dtype=dtype, torch="2.1.2")
    assert catalog.matching(op="dot", device="xpu", dtype=dtype)[0].id == "ipex-673"


def test_a_device_may_be_a_torch_device() -> None:
    cpu = torch.device("cpu")
    assert catalog.gaps(cpu) == catalog.gaps("cpu")
    assert catalog.gaps(torch.device("cuda:0")) == catalog.gaps("cuda")
    assert catalog.difference("2.8", "2.13", cpu) == catalog.difference("2.8", "2.13")
    assert catalog.lookup("dot", device=cpu) == catalog.lookup("dot", device="cpu")
    assert catalog.find_fix("aten.dot.default", device=cpu, dtype="half", torch="2.1.2")
    assert catalog.matching(op="dot", device=torch.device("xpu:0")) == catalog.matching(op="dot", device="xpu")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: catalog.gaps("cpu", "int8"),
        lambda: catalog.gaps("cpu", torch.float32),
        lambda: catalog.gaps(torch.device("meta")),
        lambda: catalog.difference("2.8", "2.13", dtype=torch.int8),
        lambda: catalog.difference("2.8", "2.13", dtype="fp32"),
        lambda: catalog.lookup("dot", dtype=""),
        lambda: catalog.lookup("dot", device="npu"),
        lambda: catalog.find_fix("aten.dot.default", device="cpu", dtype="int8", torch="2.1.2"),
        lambda: catalog.find_fix("aten.dot.default", device="cpu", dtype="half", torch="new"),
        lambda: catalog.find_fix("aten.dot.default", device="npu", dtype="half", torch="2.1.2"),
        lambda: catalog.matching(torch="new"),
        lambda: catalog.matching(dtype="int8"),
        lambda: catalog.matching(device="npu"),
    ],
)
def test_unknown_names_are_an_error(ask: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        ask()


def test_a_version_may_start_with_v() -> None:
    assert catalog.gaps("cpu", "half", "v2.14") == catalog.gaps("cpu", "half", "2.14")
    assert catalog.difference("v2.8", "v2.15", "xpu").after == "2.15"
    assert catalog.matching(op="dot", torch="v2.1") == catalog.matching(op="dot", torch="2.1.0+cpu")


# -- operators


@pytest.mark.parametrize(
    ("query", "op"),
    [
        ("masked_fill_", "masked_fill"),
        ("Tensor.masked_fill_", "masked_fill"),
        ("add_", "add"),
        ("mul_", "mul"),
        ("clamp_min_", "clamp_min"),
        ("Tensor.index_add_", "index_add"),
        ("relu_", "nn.functional.relu"),
        ("F.relu_", "nn.functional.relu"),
        ("index_put_", "index_put"),
        ("clip_", "clamp"),
        ("zero_", "zero_"),
        ("resize_", "resize_"),
        ("__radd__", "__radd__"),
        ("aten::mm.out", "mm"),
        ("aten::add_.Tensor", "add"),
        ("aten.add.Tensor", "add"),
        ("aten::linalg_qr.out", "linalg.qr"),
        ("fft_rfft", "fft.rfft"),
        ("special.expit", "sigmoid"),
        ("special_i0", "i0"),
        ("inverse", "linalg.inv"),
        ("sparse.mm.reduce", "sparse.mm.reduce"),
        ("F.unfold", "nn.functional.unfold"),
        ("sdpa", "nn.functional.scaled_dot_product_attention"),
    ],
)
def test_a_name_finds_its_operator(query: str, op: str) -> None:
    assert ops(query) == [op]
    assert catalog.lookup(query, device="cpu")[0].dispatching is None


@pytest.mark.parametrize(
    ("query", "among"),
    [
        ("gelu_backward", "nn.functional.gelu"),
        ("aten::gelu_backward.grad_input", "nn.functional.gelu"),
        ("_log_softmax_backward_data", "log_softmax"),
        ("_fft_r2c", "fft.rfft"),
        ("copy_", "fft.rfft"),
    ],
)
def test_an_aten_op_finds_the_operators_that_dispatch_it(query: str, among: str) -> None:
    answers = catalog.lookup(query, device="cpu")
    name = query.removeprefix("aten::").partition(".")[0]
    assert among in {answer.op for answer in answers}
    assert {answer.dispatching for answer in answers} == {name}
    assert text(answers_document(answers)).startswith(
        f"{name} is not an operator in the catalog; these operators dispatch it:"
    )


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("max.dim", {"max.reduction_with_dim"}),
        ("torch.ops.aten.std.correction", {"std", "std.unbiased"}),
        ("max", {"max.binary", "max.reduction_no_dim", "max.reduction_with_dim"}),
        ("max.dim_max", {"max.binary", "max.reduction_no_dim", "max.reduction_with_dim"}),
    ],
)
def test_an_overload_finds_those_that_dispatch_it(query: str, named: set[str]) -> None:
    assert set(ops(query)) == named


def test_every_alias_in_torch_is_found() -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # imports for seconds

    for info in op_db:
        for alias in info.aliases:
            found = ops(alias.name)
            assert any(function_name(op) in (function_name(info.name), function_name(alias.name)) for op in found), (
                alias
            )


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("torch.fft.rfft", "fft_rfft"),
        ("fft.fft", "fft_fft"),
        ("linalg.pinv.hermitian", "linalg_pinv"),
        ("std.unbiased", "std"),
        ("aten.add_.Tensor", "add"),
        ("aten.__and__.Tensor", "__and__"),
        ("nn.functional.pad.constant", "pad"),
        ("signal.windows.hann", "signal_windows_hann"),
        ("torch.ops.aten._safe_softmax.default", "_safe_softmax"),
    ],
)
def test_aten_names_of_functions(op: str, name: str) -> None:
    assert function_name(op) == name


# -- modules

NOT_IN_OPINFO = {
    *("LSTM", "LSTMCell", "GRU", "GRUCell", "RNN", "RNNBase", "RNNCell", "RNNCellBase"),
    *("Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer"),
    *("AdaptiveLogSoftmaxWithLoss", "CrossMapLRN2d", "Fold", "LPPool1d", "LPPool2d", "LPPool3d"),
}
WITHOUT_AN_OPERATOR = {
    *("Container", "DataParallel", "Identity", "Module", "ModuleDict", "ModuleList"),
    *("ParameterDict", "ParameterList", "Sequential"),
}


def test_every_module_of_torch_is_found_or_has_a_reason() -> None:
    classes = inspect.getmembers(nn, lambda found: inspect.isclass(found) and issubclass(found, nn.Module))
    unknown = {name for name, _ in classes if why_unmeasured(name)}
    assert unknown == NOT_IN_OPINFO | WITHOUT_AN_OPERATOR
    assert all(ops(f"nn.{name}") for name, _ in classes if name not in unknown)
    for names, message in (
        (NOT_IN_OPINFO, "is not measured.*lowprec-check scan"),
        (WITHOUT_AN_OPERATOR, "has no operator of its own.*lowprec-check scan"),
    ):
        for name in names:
            with pytest.raises(UsageError, match=f"(?s)nn.{name} {message}"):
                find(f"nn.{name}", RECORDS)


@pytest.mark.parametrize(
    ("module", "op"),
    [
        ("nn.CrossEntropyLoss", "nn.functional.cross_entropy"),
        ("BCELoss", "nn.functional.binary_cross_entropy"),
        ("BCEWithLogitsLoss", "nn.functional.binary_cross_entropy_with_logits"),
        ("KLDivLoss", "nn.functional.kl_div"),
        ("LogSoftmax", "log_softmax"),
        ("MultiheadAttention", "nn.functional.multi_head_attention_forward"),
        ("Upsample", "nn.functional.interpolate.area"),
        ("ZeroPad2d", "nn.functional.pad.constant"),
        ("nn.Linear", "nn.functional.linear"),
        ("nn.Unfold", "nn.functional.unfold"),
        ("nn.LazyConv2d", "nn.functional.conv2d"),
        ("SyncBatchNorm", "nn.functional.batch_norm"),
        ("L1Loss", "nn.functional.l1_loss"),
    ],
)
def test_a_module_finds_the_function_that_it_calls(module: str, op: str) -> None:
    found = ops(module)
    assert found[0] == op
    assert len({function_name(op) for op in found}) == 1


# -- on the command line


def test_lookups_without_an_answer_give_the_reason(call: Call) -> None:
    for arguments, message in [
        (["op", "nn.LSTM"], "does not include recurrent or fused transformer layers"),
        (["op", "nn.LSTM"], "lowprec-check scan"),
        (["catalog", "diff", "2.13", "2.14", "--dtype", "fp32"], "fp32 is the baseline"),
    ]:
        done = call(*arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Did you mean" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op", "dot", "--dtype", "haf"], "Did you mean half?"),
        (["catalog", "gaps", "--dtype", "bloat16"], "Did you mean bfloat16?"),
        (["catalog", "gaps", "--dtype", "bfloat"], "Did you mean bfloat16?"),
        (["catalog", "diff", "2.13", "2.14", "--dtype", "fp61"], "Did you mean half?"),
        (["catalog", "gaps", "--dtype", "amp-bf16"], "autocast-bf16 is not a dtype"),
    ],
)
def test_a_wrong_dtype_gets_a_suggestion(arguments: list[str], message: str, call: Call) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("spelling", ["fp16", "half", "torch.float16", "F16"])
def test_the_commands_show_one_name(spelling: str, call: Call) -> None:
    assert "· half ·" in call("catalog", "gaps", "--dtype", spelling).stdout
    assert call("op", "dot", "--dtype", spelling).stdout == call("op", "dot", "--dtype", "half").stdout


def test_devices_without_the_version_are_named() -> None:
    [answer] = catalog.lookup("dot", torch="2.13")
    assert answer.elsewhere == {"cuda": ["2.11"]}
    assert "cuda: measured only for torch 2.11" in text(answers_document([answer]))
    [older] = catalog.lookup("dot", torch="2.1")
    assert "xpu: declared only for torch 2.8 to 2.15" in text(answers_document([older]))
    assert catalog.lookup("dot")[0].elsewhere == {}
    assert catalog.lookup("dot", torch="2.13", device="cpu")[0].elsewhere == {}


def test_the_help_of_diff_mentions_older_versions(call: Call) -> None:
    assert "it may be an older one" in " ".join(call("catalog", "diff", "--help").stdout.split())
