"""The stand-in for a missing device: what it computes, refuses and casts, and that its process does nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fft import rfft
from torch.nn import functional

from lowprec_check import Run, ScanResult, UsageError, scan
from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.core.machine import machine_for
from lowprec_check.core.scan import scan_target
from lowprec_check.engine.model.target_source import load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.features.prediction import stand_in_process
from lowprec_check.features.prediction.kernel_support import KernelSupport
from lowprec_check.features.prediction.stand_in_process import StandInKernels
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.options import ScanOptions
from lowprec_check.torchkit.dispatch_mode import DispatchMode
from lowprec_check.torchkit.isolation import isolated

LOW = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")
DTYPES = (torch.float16, torch.bfloat16)


def device(name: str, release: str = "2.13") -> PredictedDevice:
    return predicted_device(name, release, release)


def predicted(model: nn.Module, inputs: Any, name: str = "cuda", **options: Any) -> ScanResult:
    chosen: dict[str, Any] = {"predict": True, "plan": False, "budget_error": "off", "further_inputs": 0, **options}
    result = scan(model.eval(), inputs, device=name, **chosen)
    assert not any("instrumenting failed" in note for run in result.runs for note in run.notes)
    return result


def status(run: Run) -> tuple[str, str | None]:
    return run.status, run.exception and run.exception.message


class Calls(nn.Module):
    """Calls a function on its input, which has passed a layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


X = torch.randn(8, 16)


# -- predictions against an H200


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_predicted_as_an_h200_ran_them(path: Path) -> None:
    rows = json.loads((ROOT / "tests/goldens/examples-h200.json").read_text())
    measured = {
        row["precision"]: row for row in rows if row["model"] == f"examples/{path.name}" and row["precision"] in LOW
    }
    if not measured:
        pytest.skip("not measured on a GPU")
    options = ScanOptions(
        device="cuda", torch_version="2.11", predict=True, plan=False, errors="none", further_inputs=0
    )
    result = scan_target(load_here(TargetSpec(str(path)), 0), "fork", options)
    for precision, row in measured.items():
        run = result.run(precision)
        assert run.status == row["by_hand"]
        assert sorted({gap.op for gap in run.gaps}) == row["gaps"]
        if row["rel_l2"] is not None:
            assert run.output_error is not None
            assert run.output_error.rel_l2 is not None
            assert row["rel_l2"] / 3 <= run.output_error.rel_l2 <= 3 * row["rel_l2"]


# -- autocast


class Flow(nn.Module):
    """Layers whose dtypes differ between the policies of a CPU and a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch_norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.linear, self.layer_norm = nn.Linear(36, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(self.linear(self.batch_norm(self.conv(x)).flatten(2)))
        return x.softmax(-1).sum(-1).exp()


def flows(run: Run) -> dict[str, str]:
    return {row.op.split(".")[1]: row.dtypes for row in run.op_calls.rows() if "_to_copy" not in row.op}


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_dtypes_under_autocast_are_those_of_the_device(name: str) -> None:
    result = predicted(Flow(), torch.randn(2, 3, 8, 8), name, precisions="autocast-fp16")
    found = flows(result.run("autocast-fp16"))
    assert found["convolution"] == "f16→f16"
    assert found["addmm"] == "f16→f16"
    for in_fp32 in ("native_layer_norm", "_softmax", "sum", "exp"):
        assert found[in_fp32] == "f32→f32", in_fp32
    on_cpu = scan(
        Flow().eval(),
        torch.randn(2, 3, 8, 8),
        device="cpu",
        precisions="autocast-fp16",
        plan=False,
        times="off",
        further_inputs=0,
        isolation="none",
    )
    assert flows(on_cpu.run("autocast-fp16"))["exp"] == "f16→f16"


@pytest.mark.parametrize(
    ("name", "precision", "dtype"), [("cuda", "autocast-bf16", "f16"), ("xpu", "autocast-bf16", "bf16")]
)
def test_a_recurrent_layer_is_cast_whole_and_to_half_on_cuda(name: str, precision: str, dtype: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0] * 1  # type: ignore[no-any-return]

    run = predicted(Recurrent(), torch.randn(4, 2, 16), name, precisions=precision).run(precision)
    assert run.status == "ok"
    assert list(run.op_calls.rows())[-1].dtypes == f"{dtype}→{dtype}"


def test_weights_under_autocast_require_gradients_as_those_that_torch_caches() -> None:
    """Of a weight that requires them, ``matmul`` makes one product of two dimensions, under ``torch.no_grad()`` too."""
    run = predicted(Calls(lambda x: x), torch.randn(2, 16, 8).mT, precisions="autocast-fp16").run("autocast-fp16")
    assert run.status == "ok"
    ops = {row.op for row in run.op_calls.rows()}
    assert "aten.mm.default" in ops
    assert "aten.bmm.default" not in ops


def test_autocast_of_the_device_named_in_the_model_applies() -> None:
    def named(x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            inner = x.float() @ x.float().T
        return inner.float().softmax(-1)

    run = predicted(Calls(named), X, precisions="half").run("half")
    assert run.status == "ok"
    assert any(row.op.startswith("aten.mm") and row.dtypes == "f16→f16" for row in run.op_calls.rows())


REGIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda layer, x: layer(x),
    "index_put": lambda _, x: torch.zeros(4, 8).index_put((torch.arange(4),), x.half()),
    "dot": lambda _, x: torch.dot(x[0].half(), x[0]),
    "softmax": lambda _, x: x.half().softmax(-1),
    "mm": lambda _, x: x.half() @ x.half().T,
}
REFUSED = "promote type is double in at::autocast::prioritize"
ON_H200 = {"float32": ["float32"] * 5, "float64": ["float64", REFUSED, REFUSED, "float32", "float64"]}
"""What regions of autocast in other dtypes gave there on fp32 and fp16, with torch 2.11."""


@pytest.mark.parametrize("dtype", ON_H200)
def test_cuda_runs_autocast_in_any_dtype(dtype: str) -> None:
    def on_cuda() -> list[str]:
        stand_in_process.become_stand_in(device("cuda"))
        x, layer, given = torch.ones(4, 8), nn.Linear(8, 8).half(), list[str]()
        for region in REGIONS.values():
            try:
                with torch.no_grad(), torch.autocast("cuda", dtype=getattr(torch, dtype)):
                    given.append(str(region(layer, x).dtype).removeprefix("torch."))
            except RuntimeError as error:
                given.append(str(error))
        return given

    assert isolated(on_cuda, "fork", list[str]) == ON_H200[dtype]


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.parametrize(("name", "status_there"), [("cuda", "ok"), ("xpu", "error")])
def test_a_region_in_fp32_is_predicted_by_the_rules_of_the_device(name: str, status_there: str) -> None:
    def within(x: Tensor) -> Tensor:
        with torch.autocast(name, dtype=torch.float32):
            return layer(x * torch.ones(16))

    model = Calls(within)
    layer = model.layer = nn.Linear(16, 16)
    result = predicted(model, X, name, precisions="half")
    assert result.run("half").status == status_there
    found = [diagnostic for diagnostic in result.diagnostics if diagnostic.code == "LP103"]
    assert len(found) == (status_there == "error")
    for finding in found:
        assert f'inside torch.autocast("{name}", dtype=torch.float32)' in finding.message
        assert "In XPU autocast, but the target dtype is not supported. Disabling autocast" in finding.message
        assert finding.rests_on == "it fails on this CPU; whether the device's own kernel fails too is not known"


def test_a_function_that_autocast_forbids_raises() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return functional.binary_cross_entropy(self.linear(x).float().sigmoid(), torch.ones(8, 1))

    result = predicted(Loss(), X, precisions=["half", "autocast-fp16"])
    assert "unsafe to autocast" in str(status(result.run("autocast-fp16"))[1])


# -- kernels


def emulated(name: str, function: Callable[[], Any]) -> Any:
    with StandInKernels(KernelSupport(device(name))):
        return function()


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (16,)),
    "sum": lambda x: x.sum(0),
    "exp": lambda x: x.exp(),
    "gelu": functional.gelu,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "mean": lambda x: x.mean(-1),
    "conv1d": lambda x: functional.conv1d(
        x[None], x[:, :, None].expand(8, 8, 3) if x.shape[1] == 8 else x[:, :8, None]
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_computes_in_fp32_and_rounds_once(op: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    assert torch.equal(emulated("cuda", lambda: OPS[op](x)), OPS[op](x.float()).to(dtype))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from(["add_", "mul_", "view", "slice", "clone", "out", "index_put_", "relu_"]),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(DTYPES),
)
def test_writes_and_views_end_up_where_the_cpu_writes_them(steps: list[str], dtype: torch.dtype) -> None:
    """Exact ops only (integers), so that the CPU's own kernels give the same bits."""

    def play() -> list[Tensor]:
        base = torch.arange(16, dtype=torch.float32).to(dtype).reshape(4, 4)
        tensor = base
        for number, step in enumerate(steps):
            if step == "view":
                tensor = tensor.t()
            elif step == "slice":
                tensor = tensor[1:] if tensor.shape[0] > 1 else tensor
            elif step == "clone":
                tensor = tensor.clone()
            elif step == "out":
                target = torch.empty(0, dtype=dtype) if number % 2 else torch.empty_like(tensor)
                torch.add(tensor, 1, out=target)
                tensor = target
            elif step == "index_put_":
                tensor[0, 0] = 3.0
            elif step == "relu_":
                tensor.relu_()
            else:
                getattr(tensor, step)(2)
        return [base, tensor]

    for mine, expected in zip(emulated("cuda", play), play(), strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "cat": lambda one, other: torch.cat([one, other]),
    "where": lambda one, other: torch.where(one > 0, one, other),
}


@pytest.mark.parametrize("op", MIXED)
def test_half_and_bfloat16_together_give_fp32(op: str) -> None:
    """Seen on an H200 in a recurrent layer under autocast-bf16, run by CUDA in half: the sum with its input is fp32."""
    one, other = X.half(), X.bfloat16()
    assert torch.equal(emulated("cuda", lambda: MIXED[op](one, other)), MIXED[op](one.float(), other.float()))


STATISTICS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "layer norm": (lambda x: torch.native_layer_norm(x, [16], None, None, 1e-5), 2),
    "batch norm": (lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5), 2),
    "weight norm": (lambda x: torch._weight_norm_interface(x, x[:, :1], 0), 1),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_stay_in_fp32_on_a_gpu(name: str) -> None:
    """Seen on an H200."""
    function, count = STATISTICS[name]
    out, *others = emulated("cuda", lambda: function(X.half()))
    assert out.dtype == torch.float16
    assert [tensor.dtype for tensor in others] == [torch.float32] * count


OTHER = {torch.float16: torch.bfloat16}
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a number out of range": (lambda x: x.masked_fill(x > 0, -1e9), "without overflow"),
    "mixed dtypes": (lambda x: x @ torch.ones(16, 4), "dtype"),
    "half and bfloat16": (lambda x: x @ torch.ones(16, 4, dtype=OTHER.get(x.dtype, x.dtype)), "dtype"),
    "weights of a norm in fp32": (
        lambda x: functional.layer_norm(x, (16,), torch.ones(16)),
        "expected scalar type Half",
    ),
    "no kernel": (lambda x: torch.linalg.inv(x @ x.T), "Low precision dtypes not supported"),
    "refused above dispatch": (lambda x: x.quantile(0.5), "either float or double"),
    "a transform of another size": (lambda x: torch.fft.rfft(x[:, :12]), "powers of two"),
    "a product of complex numbers in half": (lambda x: rfft(x) @ rfft(x).mT, "ComplexHalf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_in_half_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    run = predicted(Calls(function), X, precisions="half").run("half")
    assert run.status == "error"
    assert message in str(status(run)[1])


@pytest.mark.parametrize("inference", [False, True])
def test_a_transform_in_half_runs_where_cuda_runs_it(inference: bool) -> None:
    def transform(x: Tensor) -> Tensor:
        with torch.inference_mode(inference):
            several = torch.fft.ihfft2(x).abs().sum() + torch.fft.hfft2(torch.fft.fft2(x), (8, 16)).sum()
            return torch.fft.irfft(rfft(x, dim=-1) * 2, dim=-1).abs() + torch.fft.fft2(x).real + several

    with DispatchMode(), torch.inference_mode():  # looks kernels up in the process that is forked
        transform(X)
    run = predicted(Calls(transform), X, precisions="half").run("half")
    assert status(run) == ("ok", None)
    assert run.gaps == []


@pytest.mark.parametrize("training", [False, True])
def test_a_condition_holds_for_arguments_that_a_call_leaves_out(training: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.rrelu(x, training=True) if training else torch.rrelu(x)

    run = predicted(Calls(function), X, "cpu", precisions="half").run("half")
    assert (run.status, len(run.gaps)) == (("error", 1) if training else ("ok", 0))


def test_a_gap_says_what_it_rests_on() -> None:
    run = predicted(
        Calls(lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")), X, precisions="half"
    ).run("half")
    (gap,) = run.gaps
    assert gap.op.startswith("aten._cdist_forward")
    assert gap.predicted_by is not None
    assert "measured on cuda" in gap.predicted_by
    assert "cdist" in gap.predicted_by


def test_an_op_without_any_kernel_fails_in_fp32_too() -> None:
    with pytest.raises(UsageError, match=r"predicted to fail in fp32 on cuda.*histogram"):
        predicted(Calls(lambda x: torch.histogram(x.float(), 4).hist), X)


def test_an_op_that_an_xpu_runs_on_the_cpu_is_reported() -> None:
    run = predicted(Calls(lambda x: torch.linalg.matrix_exp(x[:, :8].float())), X, "xpu", precisions="half").run("half")
    assert run.status == "ok"
    assert any("linalg_matrix_exp falls back to the CPU" in message for message in run.fallbacks)


def test_an_op_of_this_cpu_is_known_by_that_which_the_device_runs_instead() -> None:
    x = torch.randn(1, 2, 8, 4)
    model = Calls(lambda _: functional.scaled_dot_product_attention(x.bfloat16(), x.bfloat16(), x.bfloat16()))
    run = predicted(model, X, "xpu", precisions="bfloat16").run("bfloat16")
    assert run.status in ("ok", "unjudged")
    assert run.assumed_ops == []


def test_ops_that_the_catalog_lacks_are_listed() -> None:
    with torch.library._scoped_library("predicted_here", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        run = predicted(Calls(torch.ops.predicted_here.double), X, precisions="half").run("half")
    assert run.status == "ok"
    assert run.assumed_ops == ["predicted_here.double.default"]
    assert run.known_ops == ["aten.addmm.default"]


def test_a_model_that_moves_its_inputs_to_the_device_itself_gets_a_hint() -> None:
    if torch.cuda.is_available():
        pytest.skip("the device is here")
    with pytest.raises(UsageError, match="is predicted to fail in fp32 on cuda") as raised:
        predicted(Calls(lambda x: x.cuda()), X)
    assert "device of its inputs" in str(raised.value.hint)


def test_a_plan_is_predicted_without_times() -> None:
    class Overflows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.abs() + 1) * 1e-6

    large = Overflows(16, 16)
    nn.init.constant_(large.weight, 3e4)
    result = predicted(nn.Sequential(nn.Linear(16, 16), large), X, precisions="half", plan=True)
    assert result.run("half").status == "nonfinite"
    plan = result.run("plan")
    assert (plan.status, plan.evidence, plan.latency_ms) == ("ok", "predicted", None)
    assert result.recommendation is not None
    assert result.recommendation.evidence == "predicted"


def test_a_limit_beyond_the_range_of_half_is_no_error_on_a_gpu() -> None:
    run = predicted(Calls(lambda x: x.clamp(-1e6, 1e6).clamp_(max=1e9)), X, precisions="half").run("half")
    assert status(run) == ("ok", None)


def test_the_message_about_a_transform_has_its_sizes() -> None:
    run = predicted(Calls(lambda x: rfft(x[:, :11]).abs()), X, precisions="half").run("half")
    assert "[11]" in str(status(run)[1])
    assert run.exception is not None
    assert run.exception.type == "RuntimeError"


def test_torchvision_finds_overlapping_boxes_as_on_a_gpu() -> None:
    """For many boxes: class by class on a CPU, all at once on a GPU. RetinaNet's output in half depends on it."""
    try:
        boxes = import_torchvision().ops.boxes
    except UsageError:
        pytest.skip("torchvision is not installed")

    def detect(x: Tensor) -> Tensor:
        corners = x.float().abs()[:, :1].repeat(200, 4) + torch.tensor([0.0, 0.0, 1.0, 1.0])
        kept = boxes.batched_nms(corners, corners[:, 0], torch.arange(len(corners)) % 5, 0.5)
        return x.sum() + kept.sum()

    def calls(result: ScanResult) -> int:
        return sum(row.op.startswith("torchvision.nms") for row in result.run("half").op_calls.rows())

    here = scan(Calls(detect).eval(), X, device="cpu", precisions="half", plan=False, times="off", budget_error="off")
    assert calls(here) == 5
    assert calls(predicted(Calls(detect), X, precisions="half")) == 1


def test_a_sparse_product_is_not_looked_up_as_a_dense_one() -> None:
    sparse = torch.eye(8).to_sparse()
    run = predicted(Calls(lambda x: torch.sparse.mm(sparse.to(x.dtype), x)), X, precisions="half").run("half")
    assert any("mm" in op for op in run.assumed_ops)
    assert not any("mm.default" in op and "addmm" not in op for op in run.known_ops)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_kernel_for_sparse_matrices_that_only_a_cpu_lacks_is_assumed_to_run() -> None:
    """Some CPU libraries have none for CSR in 16 bits; CUDA's has (SparseBlasImpl dispatches half and bfloat16)."""
    sparse = torch.eye(8).to_sparse_csr()
    found = predicted(Calls(lambda x: sparse.to(x.dtype) @ x), X, precisions="half").run("half")
    assert (found.status, found.gaps) == ("ok", [])
    assert any("mm" in op for op in found.assumed_ops)


def test_a_compiled_part_runs_in_eager_mode() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.part = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.linear(x))  # type: ignore[no-any-return]

    result = predicted(Compiled(), X, precisions=["half", "autocast-bf16"])
    assert [run.status for run in result.runs] == ["ok"] * 3


def test_autocast_of_a_custom_op_for_the_device_applies() -> None:
    @torch.library.custom_op("predicted_here::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("fp32 only")
        return x * 2

    scaled.register_autocast("cuda", torch.float32)
    run = predicted(Calls(scaled), X, precisions="autocast-fp16").run("autocast-fp16")
    assert status(run) == ("ok", None)


def test_a_backward_pass_in_the_forward_is_predicted_on_xpu() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.conv(x).square().sum(), x)[0]

    run = predicted(Inner(), torch.randn(2, 4, 8), "xpu", precisions="half").run("half")
    assert status(run) == ("ok", None)


# -- the process


def softmax_under_autocast() -> str:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return str((X.bfloat16()).softmax(-1).exp().dtype)


def test_a_prediction_leaves_this_process_as_it_was() -> None:
    before = softmax_under_autocast(), torch.get_autocast_dtype("cpu"), os.getpid()
    assert before[0] == "torch.bfloat16"
    predicted(Flow(), torch.randn(2, 3, 8, 8), precisions=["half", "autocast-fp16"])
    assert (softmax_under_autocast(), torch.get_autocast_dtype("cpu"), os.getpid()) == before
    stand_in_process.check_process(None)


def test_a_process_that_became_a_stand_in_does_nothing_else() -> None:
    def other_work() -> list[str]:
        stand_in_process.become_stand_in(device("cuda"))
        stand_in_process.become_stand_in(device("cuda"))
        raised = []
        for wanted in (None, device("xpu"), device("cuda", "2.11")):
            try:
                stand_in_process.check_process(wanted)
            except RuntimeError as error:
                raised.append(str(error))
        return raised

    assert len(isolated(other_work, "fork", list[str])) == 3


@pytest.mark.parametrize("isolation", ["shared", "none"])
def test_runs_are_never_predicted_in_a_process_that_goes_on(isolation: Any) -> None:
    with pytest.raises(UsageError, match="new process for each run"):
        predicted(Flow(), torch.randn(2, 3, 8, 8), isolation=isolation)


def test_each_run_is_predicted_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "pids"

    def noted(x: Tensor) -> Tensor:
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return x * 1

    result = predicted(Calls(noted), X)
    pids = path.read_text().split()
    assert len(set(pids)) >= len(result.runs)
    assert str(os.getpid()) not in pids


# -- what can be predicted


def test_a_device_that_is_here_is_measured_unless_a_prediction_is_asked_for() -> None:
    assert machine_for("cpu", None, predict=False).predicted is None
    assert machine_for("cpu", str(torch.__version__), predict=False).predicted is None
    with pytest.raises(UsageError, match="would measure"):
        machine_for("cpu", "2.6", predict=False)
    found = machine_for("cpu", "2.6", predict=True).predicted
    assert found is not None
    assert (found.name, found.torch) == ("cpu", "2.6")
    with pytest.raises(UsageError, match="No device is named"):
        ScanOptions(predict=True)
    with pytest.raises(UsageError, match="not a version"):
        machine_for("xpu", "newest", predict=True)
    for release in ("1.0", "99.0"):
        with pytest.raises(UsageError, match="Nothing is known"):
            machine_for("cuda", release, predict=True)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_a_device_without_a_catalog_cannot_be_predicted() -> None:
    with pytest.raises(UsageError, match="nothing can be predicted for it"):
        machine_for("mps", None, predict=False)


def test_old_spectral_norm_on_an_xpu_of_its_time() -> None:
    """intel/intel-extension-for-pytorch issue 673."""
    layer = nn.utils.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(layer, nn.ReLU()).train()
    result = scan(
        model, X, device="xpu", torch_version="2.3", predict=True, plan=False, precisions=["half", "autocast-fp16"]
    )
    half = result.run("half")
    assert half.status == "error"
    assert [gap.op for gap in half.gaps] == ["aten.dot.default"]
    assert "673" in str(half.gaps[0].predicted_by)
    assert result.run("autocast-fp16").status == "ok"
    assert result.recommendation is not None
    assert result.recommendation.precision == "autocast-fp16"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_skipped_run_is_predicted_too() -> None:
    result = predicted(Flow(), torch.randn(2, 3, 8, 8), precisions="half", backends=["eager", "jit"])
    assert {run.evidence for run in result.runs} == {"predicted"}
    assert result.run("half", "jit").status == "skipped"


def test_the_instruments_need_no_kernel_that_an_old_release_lacks() -> None:
    """torch 2.1 has no `aminmax` in half on a CPU, which the comparison uses: the analysis ended at the first op."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.dot(torch.mv(self.weight, x), x) + self.linear(x).sum()

    result = predicted(Products(), torch.randn(16), "cpu", torch_version="2.1", precisions=["half"])
    found = result.run("half")
    assert {gap.op for gap in found.gaps} == {"aten.mv.default", "aten.dot.default", "aten.addmm.default"}
    assert found.complete
    assert not [d for d in result.diagnostics if d.code == "LP905"]
