"""Formats of linear layers: the row, its code and plain torchao agree bit for bit; errors and outliers of layers."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lowprec_check import UsageError, scan
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.model.model_info import describe_target
from lowprec_check.engine.model.target import make_target
from lowprec_check.features.quantize import libraries
from lowprec_check.features.quantize.formats import FORMATS, Format
from lowprec_check.features.quantize.layer_errors import OutlierCounter, weight_bytes
from lowprec_check.report.registry import render
from lowprec_check.schema.axes import BACKENDS, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

pytestmark = pytest.mark.skipif(not libraries.torchao_fits(), reason="needs a torchao that fits this torch")
DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16}
EACH = [(form, precision) for form in FORMATS for precision in form.precisions]


class Mlp(nn.Module):
    """Layers of shapes that all formats take, and one that few do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(128, 256), nn.Linear(256, 128, bias=False), nn.Linear(128, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def example(x: Tensor, precision: str = "fp32", **options: Any) -> Example:
    named: dict[str, Any] = {"args": (x,), "kwargs": {}, "device": "cpu", "calibration": lambda: [((x,), {})]}
    return Example(precision=PRECISIONS.get(precision), **named, **options)


def rows(seed: int = 1) -> Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))


def info(model: nn.Module, x: Any) -> Any:
    return describe_target(make_target(model, x), Run(precision="fp32", device="cpu", status="ok"))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code rounds elsewhere, and takes seconds; what a backend sets for its process stays in the test."""
    import torch._inductor.config as inductor

    matmul, fast = torch.get_float32_matmul_precision(), torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(torch, "compile", lambda model: model)
    with inductor.patch(freezing=False), warnings.catch_warnings(action="ignore"):
        yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.mha.set_fastpath_enabled(fast)


def skip_unless_it_runs(form: Format, precision: str) -> None:
    reason = BACKENDS.get(form.name).skip_reason(PRECISIONS.get(precision), "cpu", "contiguous")
    if reason is not None:
        pytest.skip(reason)


# -- the values


@pytest.mark.parametrize(("form", "precision"), EACH, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("keep", [(), ("first",)], ids=["all", "kept"])
@torch.no_grad()
def test_the_row_and_its_code_give_the_same_bits(form: Format, precision: str, keep: tuple[str, ...]) -> None:
    skip_unless_it_runs(form, precision)
    model, x = Mlp().eval(), rows()
    fp32, low, low_x = model(x), copy.deepcopy(model).to(DTYPES[precision]), x.to(DTYPES[precision])
    unquantized, before = low(low_x), copy.deepcopy(low.state_dict())
    prepared = BACKENDS.get(form.name).prepare(low, example(low_x, precision, keep=keep))
    values: dict[str, Any] = {"model": model, "inputs": x}
    exec(snippet(RunKey(precision, form.name, "cpu"), info(model, x), keep), values)
    found = prepared(low_x)
    assert torch.equal(values["output"], found)
    assert not torch.equal(found, unquantized)
    assert 1e-4 < float((found.float() - fp32).norm() / fp32.norm()) < 0.5
    assert all(torch.equal(value, before[name]) for name, value in low.state_dict().items())
    first = prepared.model.first
    assert (type(first.weight) is nn.Parameter and "forward" not in vars(first)) == bool(keep)
    assert (prepared.emulated is not None) == ("cpu" not in form.devices)


@pytest.mark.parametrize("name", ["int8-dynamic", "fp8-weight-only", "mxfp8", "int4-weight-only"])
@torch.no_grad()
def test_a_row_is_plain_torchao(name: str) -> None:
    """Written as torchao's own documentation does, without our table."""
    import torchao.quantization as torchao
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quantize_.common import KernelPreference

    configs = {
        "int8-dynamic": torchao.Int8DynamicActivationInt8WeightConfig(),
        "fp8-weight-only": torchao.Float8WeightOnlyConfig(),
        "mxfp8": MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED),
        "int4-weight-only": PrototypeInt4WeightOnlyConfig(),
    }
    model, x = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128), nn.Linear(128, 32)).bfloat16(), rows()
    if name == "int4-weight-only":
        model[2] = nn.Identity()  # its kernels take groups of 128 inputs
        model[3] = nn.Identity()
    plain = copy.deepcopy(model)
    torchao.quantize_(plain, configs[name])
    x = x.bfloat16()
    assert torch.equal(BACKENDS.get(name).prepare(model, example(x, "bfloat16"))(x), plain(x))


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-dynamic-tensor", "nvfp4"])
@torch.no_grad()
def test_emulated_values_are_those_that_the_format_has(name: str) -> None:
    """Against a rounding of our own: a scale to the largest number, then the nearest of all numbers of the format."""
    model, x = nn.Linear(128, 16, bias=False).bfloat16(), rows().bfloat16()
    model.weight[:16, :16] = torch.eye(16)
    prepared = BACKENDS.get(name).prepare(nn.Sequential(model), example(x, "bfloat16"))
    weight = inspect.signature(prepared.model[0].forward).parameters["weight"].default
    original = model.weight.float()
    if name == "nvfp4":
        blocks, scaled = original.reshape(-1, 16), weight.reshape(-1, 16)
        scale = blocks.abs().amax(1, keepdim=True) / 6
        assert ((blocks - scaled).abs() <= scale * 1.1 + 1e-6).all()  # the largest step is 2 of 6
        assert all(len(block.abs().unique()) <= 8 for block in scaled)
    else:
        largest = original.abs().max()
        if name == "fp8-dynamic":
            largest = original.abs().amax(1, keepdim=True)
        scale = (largest / 448).bfloat16().float()  # as torchao computes it
        rounded = (original / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.allclose(weight, rounded, rtol=1e-6)
    row = prepared(x)
    assert float((row - model(x)).float().norm() / model(x).float().norm()) > 1e-3


@torch.no_grad()
def test_weights_alone_stay_in_int8_when_the_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import run_and_get_code

    monkeypatch.undo()
    x = rows()
    _, codes = run_and_get_code(BACKENDS.get("int8-weight-only").prepare(Mlp().eval(), example(x)), x)
    assert any("int8" in code for code in codes)


def test_the_printed_code_calibrates_on_batches_like_the_inputs() -> None:
    smooth = next(form for form in FORMATS if form.smooths)
    skip_unless_it_runs(smooth, "bfloat16")
    about = msgspec.structs.replace(
        info(Mlp().eval(), rows()), setup=["inputs = inputs()"], calibration="calibration()"
    )
    code = snippet(RunKey("bfloat16", smooth.name, "cpu"), about)
    file = "def inputs(): return torch.randn(4, 128)\ndef calibration(): yield inputs(); yield torch.randn(2, 9, 128)\n"
    values: dict[str, Any] = {"model": Mlp().eval(), "torch": torch}
    exec(file + code, values)  # below the user's own definitions
    assert values["output"].dtype == torch.bfloat16


def test_code_for_a_gpu_chooses_by_its_kernels() -> None:
    code = snippet(RunKey("bfloat16", "fp8-dynamic", "cuda"), info(Mlp().eval(), rows()), ["first"])
    assert "if torch.cuda.get_device_capability() >= (8, 9):\n    quantize_(model, Float8Dynamic" in code
    assert "else:  # emulated\n    emulate(model, fp8_by_row, is_quantized)" in code
    assert '    "first",\n' in code
    compile(code, "code", "exec")


# -- what is skipped


@pytest.mark.parametrize(
    ("name", "precision", "device", "words"),
    [
        ("int8-dynamic", "half", "cpu", "use fp32 or bfloat16"),
        ("mxfp4", "fp32", "cpu", "computes the rest of the model in bf16: use bfloat16"),
        ("int4-weight-only", "bfloat16", "xpu", "has kernels for cpu and cuda only"),
        ("fp8-dynamic", "bfloat16", "xpu", None),
    ],
)
def test_what_cannot_run_is_skipped_with_the_reason(name: str, precision: str, device: str, words: str | None) -> None:
    reason = BACKENDS.get(name).skip_reason(PRECISIONS.get(precision), device, "contiguous")
    assert (reason is None) == (words is None)
    assert (words or "") in (reason or "")


def test_without_a_fitting_torchao_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = []
    for torch_version in ("2.13.0", "2.9.0"):
        monkeypatch.setattr(libraries, "installed_version", {"torch": torch_version}.get)
        reasons.append(BACKENDS.get("mxfp8").skip_reason(PRECISIONS.get("bfloat16"), "cpu", "contiguous") or "")
    assert "not installed: pip install torchao==0.18.0" in reasons[0]
    assert "needs torchao 0.18.0, and with it torch 2.11 or later" in reasons[1]


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("int8-dynamic", nn.Conv2d(3, 3, 3), "linear layers, and found none in Conv2d"),
        ("int8-dynamic", nn.MultiheadAttention(64, 4), "linear layers, and found none in MultiheadAttention"),
        ("mxfp8", nn.Linear(8, 8), "no layer of Linear: 8 → 8 features are not multiples of 32 and 32"),
        ("int8-smoothquant", nn.Linear(128, 8), "no layer of Linear: it is the model itself, and SmoothQuant replaces"),
        ("fp8-weight-only", weight_norm(nn.Linear(8, 8)), "no layer of ParametrizedLinear: its weight is not a plain"),
    ],
)
def test_a_model_without_a_linear_layer_to_quantize_is_an_error(name: str, model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=f"{name} quantizes {words}"):
        BACKENDS.get(name).prepare(model.eval(), example(rows()))


# -- each layer


class WithoutWeight(nn.Linear):
    """Makes its weight when it is called, as factored layers do."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        del self.weight


class OddCalls(nn.Module):
    """Passes arguments of layers by name, computes gradients, draws random numbers, and has layers that torchao leaves
    alone or that are not called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.without_weight = WithoutWeight(8, 8)
        self.first, self.last, self.idle = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = nn.functional.dropout(self.first(input=x.requires_grad_()), 0.3, training=True)
            return self.last(input=x + self.attention(x, x, x)[0])


@torch.no_grad()
def test_errors_of_layers_are_those_of_the_same_call_and_of_layers_alone() -> None:
    torch.manual_seed(0)
    model, backend = OddCalls().eval(), BACKENDS.get("int8-dynamic")
    call = example(torch.randn(2, 4, 64))
    layers = backend.layer_errors(backend.prepare(model, call), model, call)
    assert [layer.module for layer in layers] == ["first", "last"]
    assert all(layer.accumulated is not None and layer.accumulated < 0.05 for layer in layers)  # of other numbers: 0.7


@torch.no_grad()
def test_errors_of_each_layer() -> None:
    model, x, backend = Mlp().eval().bfloat16(), rows().bfloat16(), BACKENDS.get("mxfp4")
    model.middle.weight[:, 5] *= 100
    call = example(x, "bfloat16")
    prepared = backend.prepare(model, call)
    first, middle, last = backend.layer_errors(prepared, model, call)

    def error(found: Tensor, expected: Tensor) -> Any:
        return pytest.approx(float((found.float() - expected.float()).norm() / expected.float().norm()), rel=1e-5)

    hidden = model.first(x)
    assert first.local == first.accumulated == error(prepared.model.first(x), hidden)
    assert middle.local == error(prepared.model.middle(hidden.relu()), model.middle(hidden.relu()))
    changed = copy.deepcopy(model)
    changed.middle = prepared.model.middle
    assert middle.alone == error(changed(x), model(x))
    assert last.left == "128 → 7 features are not multiples of 32 and 32"
    assert last.local is None
    weights = middle.weights
    assert weights is not None
    assert weights.channel == 5
    assert weights.times == pytest.approx(100, rel=0.2)
    assert 1 / 256 * 0.5 < weights.share <= 1 / 256
    assert first.weights is not None
    assert first.weights.share == 0.0


def test_outliers_are_counted_over_all_tensors() -> None:
    counter = OutlierCounter()
    assert counter.outliers() is None
    values = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    counter.add(values)
    values[3, 6] = 1e3
    counter.add(values.bfloat16())
    found = counter.outliers()
    assert found is not None
    assert (found.channel, found.share) == (6, 1 / 1600)


@torch.no_grad()
def test_the_bytes_of_weights_are_those_of_the_parts() -> None:
    model = Mlp().eval()
    assert weight_bytes(model) == sum(tensor.numel() * 4 for tensor in model.parameters())
    prepared = BACKENDS.get("int8-weight-only").prepare(model, example(rows()))
    values = sum(layer.weight.numel() + layer.out_features * 4 for layer in (model.first, model.middle, model.last))
    offsets = 256 + 128 + 7
    assert weight_bytes(prepared.model) == values + (256 + 7) * 4 + offsets


# -- a scan


def test_a_scan_has_emulated_rows_beside_others() -> None:
    result = scan(
        Mlp().eval(), rows(), precisions="bf16", backends="eager,fp8-dynamic,int8-weight-only", further_inputs=0
    )
    eager, fp8, int8 = result.runs[1:]
    assert (fp8.status, int8.status) == ("ok", "ok")
    assert fp8.without_kernels == "fp8-dynamic needs an NVIDIA GPU of compute capability 8.9 or later"
    assert (fp8.latency_ms, fp8.peak_memory_bytes, fp8.setup_seconds, fp8.weight_bytes) == (None,) * 4
    assert int8.without_kernels is None
    assert int8.latency_ms is not None
    assert int8.weight_bytes is not None
    assert int8.weight_bytes < 0.6 * (int8.unquantized_bytes or 0)
    assert eager.rel_l2 is not None
    assert (fp8.unquantized_error or 0.0) > 3 * eager.rel_l2
    texts = [sentence.text for said in result.statements for sentence in [said] if "from bfloat16" in said.text]
    assert any(text.startswith("bfloat16 ") and ", fp8-dynamic " in text for text in texts)


def test_a_quantized_row_is_compared_with_the_best_in_16_bits() -> None:
    def run(precision: str, error: float | None, **more: Any) -> Run:
        stats = error and ErrorStats(rel_l2=error, max_abs=0.1, cosine=None, sqnr_db=None)
        return Run(precision=precision, device="cpu", status="ok", tolerance=0.1, output_error=stats or None, **more)

    def said(*others: Run) -> list[str]:
        quantized = run("bfloat16", 0.039, backend="fp8-dynamic", quantized=True, unquantized_error=0.037)
        about = info(Mlp().eval(), rows())
        result = ScanResult(
            tool="", target="t", model=about, environment={}, runs=[run("fp32", None), *others, quantized]
        )
        return [said.text for said in conclude(result).statements if ", fp8-dynamic " in said.text]

    half, bfloat16 = run("half", 0.0003), run("bfloat16", 0.012)
    assert said(bfloat16) == ["bfloat16 1.2e-02, fp8-dynamic 3.9e-02; 3.7e-02 from bfloat16"]
    assert said(half, bfloat16) == ["best in 16 bits: half 3.0e-04, fp8-dynamic 3.9e-02; 3.7e-02 from bfloat16"]
    assert not said()


def test_an_emulated_row_is_not_recommended_even_if_no_other_passes() -> None:
    """It has no kernels here; nor is it said not to pass."""
    error = ErrorStats(rel_l2=0.07, max_abs=0.1, cosine=None, sqnr_db=None)
    fp32, low = Run(precision="fp32", device="cpu", status="ok"), {"precision": "bfloat16", "device": "cpu"}
    eager = Run(status="inaccurate", tolerance=0.05, output_error=error, **low)
    fp8 = Run(
        backend="fp8-dynamic", status="ok", tolerance=0.1, output_error=error, without_kernels="no kernels", **low
    )
    about = info(Mlp().eval(), rows())
    result = conclude(ScanResult(tool="", target="t", model=about, environment={}, runs=[fp32, eager, fp8]))
    assert result.recommendation is None
    screen = render(result, "text")
    assert "Stay in fp32: bfloat16 did not pass here" in screen
    assert "bfloat16 · fp8-dynamic · emulated" in screen
