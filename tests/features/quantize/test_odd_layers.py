"""Layers that are left alone, are in several places, or are read by others: the row is what its code gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_formats import DTYPES, example, info, rows, uncompiled  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lowprec_check import UsageError
from lowprec_check.analysis.snippet import snippet
from lowprec_check.features.quantize import layer_errors, libraries, report
from lowprec_check.features.quantize.formats import FORMATS
from lowprec_check.features.quantize.layer_errors import SquaredError
from lowprec_check.features.quantize.quantized_linear import _why_left, why_emulated
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.run_key import RunKey

pytestmark = [
    pytest.mark.skipif(libraries.fitting_torchao() != "0.18.0", reason="needs torchao 0.18"),
    pytest.mark.skipif(not libraries.torchao_fits(), reason="needs a torchao that fits this torch"),
    pytest.mark.usefixtures("uncompiled"),
]
ALL = [form.name for form in FORMATS]


class Factored(nn.Linear):
    """A linear layer with a product of two small matrices beside it."""

    def __init__(self) -> None:
        super().__init__(128, 128)
        self.a, self.b = nn.Parameter(torch.randn(128, 8) / 11), nn.Parameter(torch.randn(8, 128) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a @ self.b


class Residual(nn.Module):
    """Calls ``layer``, in the dtype of its weight, and adds the input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        return x + self.layer(x.to(weight.dtype)) / 2


class Routed(nn.Module):
    """Sends its input to one of two layers, and may return as many values as are positive."""

    def __init__(self, ragged: bool = False) -> None:
        super().__init__()
        self.used, self.idle, self.ragged = nn.Linear(128, 128), nn.Linear(128, 128), ragged

    def forward(self, x: Tensor, use_idle: bool = False) -> Tensor:
        y = self.idle(x) if use_idle else self.used(x)
        return y[y > 0] if self.ragged else y


def linear() -> nn.Linear:
    return nn.Linear(128, 128)


def pair(layer: nn.Module) -> nn.Module:
    return nn.Sequential(Residual(layer), Residual(linear())).eval()


@torch.no_grad()
def row(name: str, model: nn.Module, x: Tensor, keep: Sequence[str] = ()) -> tuple[float, Any, list[LayerError]]:
    """Its distance from the unquantized model, the quantized one, and its layers; its code gives the same bits."""
    form = next(form for form in FORMATS if form.name == name)
    precision = form.precisions[-1]
    low, low_x = copy.deepcopy(model).to(DTYPES[precision]), x.to(DTYPES[precision])
    call = example(low_x, precision, keep=tuple(keep))
    prepared = BACKENDS.get(name).prepare(low, call)
    output, unquantized = prepared(low_x), low(low_x)
    assert output.dtype == unquantized.dtype
    layers = BACKENDS.get(name).layer_errors(prepared, low, call)
    values: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    exec(snippet(RunKey(precision, name, "cpu"), info(model, x), keep), values)
    assert torch.equal(values["output"], output)
    if output.shape != unquantized.shape:
        return math.inf, prepared, layers
    return float((output - unquantized).double().norm() / unquantized.double().norm()), prepared, layers


def left(layers: list[LayerError]) -> dict[str, str]:
    return {layer.module: layer.left for layer in layers if layer.left is not None}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm, "pruned"])
def test_a_layer_whose_weight_is_computed_is_left_alone(name: str, change: Any) -> None:
    layer = linear()
    layer = prune.l1_unstructured(layer, "weight", 0.5) if change == "pruned" else change(layer)
    if change == "pruned":
        layer.weight = layer.weight.detach()  # else it cannot be copied
    error, _, layers = row(name, nn.Sequential(layer, linear()).eval(), rows())
    assert left(layers) == {"0": "its weight is not a plain parameter"}
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["subclass", "patched"])
def test_a_forward_of_its_own_is_called(name: str, kind: str) -> None:
    """Where torchao quantizes the weight alone; else the layer is left alone."""
    torch.manual_seed(0)
    layer = Factored() if kind == "subclass" else linear()
    if kind == "patched":
        layer.forward = Doubled(layer)  # type: ignore[method-assign]
    error, _, layers = row(name, pair(layer), rows())
    reasons = dict.fromkeys(("fp8-dynamic", "fp8-dynamic-tensor", "nvfp4"), "its forward is not that of nn.Linear")
    reasons["int8-smoothquant"] = "it has a class, a forward or hooks of its own"
    assert left(layers) == ({"0.layer": reasons[name]} if name in reasons else {})
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", ALL)
def test_layers_take_inputs_that_are_not_contiguous(name: str) -> None:
    """By itself, torchao refuses them in MX formats."""
    model = nn.Sequential(linear(), nn.GELU(), linear()).eval()
    error, _, layers = row(name, model, rows().t().contiguous().t())
    assert [layer.left for layer in layers] == [None, None]
    assert error == pytest.approx(row(name, model, rows())[0], rel=0.01)


class Scaled(nn.Linear):
    """Takes a number beside its input, and returns a tuple."""

    def forward(self, scale: float, input: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (scale * super().forward(input),)


class Scaling(nn.Module):
    """Calls such a layer by keyword, on an input that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Scaled(128, 128), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(0.5, input=x.t().contiguous().t())[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "int8-weight-only"])
def test_layers_take_and_return_other_things_than_a_tensor(name: str) -> None:
    torch.manual_seed(0)
    error, _, layers = row(name, Scaling().eval(), rows())
    assert 0 < error < 0.3
    assert [(layer.left, layer.local is not None) for layer in layers] == [(None, True)] * 2


def test_weights_that_torchao_takes_for_blocks_are_left_alone() -> None:
    from torchao.float8.inference import _is_128_128_scaled
    from torchao.quantization import PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    form = next(form for form in FORMATS if form.name == "fp8-dynamic-tensor")
    values = Float8Tensor.from_hp(linear().weight.detach(), torch.float8_e4m3fn, PerTensor())
    assert _is_128_128_scaled(values), "torchao is repaired: quantize these layers"
    assert _why_left(linear(), "", form, emulated=False) == "torchao fails on a weight of 128 × 128 with one scale"
    assert _why_left(nn.Linear(128, 256), "", form, emulated=False) is None
    codes = [snippet(RunKey("bfloat16", form.name, device), info(linear(), rows()), "0") for device in ("cuda", "cpu")]
    assert ["(module.weight.shape != (128, 128) or" in code for code in codes] == [True, False]
    assert all(compile(code, "code", "exec") for code in codes)


@pytest.mark.parametrize("kind", ["hook", "bias"])
def test_smoothing_drops_nothing_that_a_layer_has(kind: str) -> None:
    layer = linear()
    if kind == "hook":
        layer.register_forward_hook(lambda module, args, output: output * 3)
    else:
        parametrizations.weight_norm(layer, "bias", dim=None)
    error, _, layers = row("int8-smoothquant", pair(layer), rows())
    assert left(layers) == {"0.layer": "it has a class, a forward or hooks of its own"}
    assert 0 < error < 0.2


class Doubled:
    """A forward that a library put in the place of a layer's."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight, self.layer.bias) * 2


class Encoder(nn.TransformerEncoder):
    """Ignores the last values of its first row, which makes its fast path pass nested tensors."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        return super().forward(x, src_key_padding_mask=padding)[1]


@pytest.mark.parametrize("name", ALL)
def test_the_layers_of_an_encoder_are_called(name: str) -> None:
    """Its fast path reads their weights past them."""
    torch.manual_seed(0)
    error, _, layers = row(name, Encoder().eval(), torch.randn(2, 5, 128))
    assert [layer.module for layer in layers] == ["layers.0.linear1", "layers.0.linear2"]
    assert all((layer.local or 0.0) > 1e-3 for layer in layers)
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", ALL)
def test_a_layer_in_two_places_is_quantized_or_kept_in_both(name: str) -> None:
    shared = linear()
    model = nn.Sequential(Residual(shared), Residual(shared)).eval()
    error, _, layers = row(name, model, rows())
    assert [layer.module for layer in layers] == ["0.layer"]
    assert layers[0].alone == pytest.approx(error, rel=1e-3)
    assert row(name, model, rows(), keep=["0.layer"])[0] == 0.0


def test_smoothing_leaves_alone_what_calibration_does_not_call() -> None:
    _, prepared, layers = row("int8-smoothquant", Routed().eval(), rows())
    assert left(layers) == {"idle": "calibration does not call it"}
    model, x = prepared.model, rows().bfloat16()
    assert torch.equal(model(x, use_idle=True), nn.functional.linear(x, model.idle.weight, model.idle.bias))
    assert type(model.idle) is nn.Linear


def test_smoothing_takes_batches_of_different_lengths() -> None:
    """As if their rows were one batch."""
    model, batches = pair(linear()).bfloat16(), [torch.randn(2, length, 128).bfloat16() for length in (9, 5)]
    joined = torch.cat([batch.flatten(0, 1) for batch in batches])
    outputs = []
    for calls in (batches, [joined]):
        call = example(joined, "bfloat16")
        object.__setattr__(call, "calibration", lambda calls=calls: [((batch,), {}) for batch in calls])
        prepared = BACKENDS.get("int8-smoothquant").prepare(model, call)
        outputs.append(prepared(joined))
        assert all(layer.local for layer in BACKENDS.get("int8-smoothquant").layer_errors(prepared, model, call))
    assert torch.equal(*outputs)


def test_a_gpu_without_kernels_or_emulation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    call = example(rows())
    object.__setattr__(call, "device", "cuda")
    words = "needs a CPU, or an NVIDIA GPU of compute capability 8.0 or later; this is 7.5"
    with pytest.raises(UsageError, match=f"int8-dynamic {words}"):
        BACKENDS.get("int8-dynamic").prepare(pair(linear()), call)
    form = next(form for form in FORMATS if form.name == "fp8-dynamic")
    assert "8.9 or later; this is 7.5" in (why_emulated(form, "cuda") or "")


# -- the errors of layers


def test_outputs_of_other_shapes_have_no_error_but_layers_do() -> None:
    torch.manual_seed(3)
    _, _, layers = row("mxfp4", Routed(ragged=True).eval(), rows())
    assert [layer.module for layer in layers] == ["used"]
    assert layers[0].local is not None
    assert layers[0].alone is None


def test_an_infinite_error_is_the_largest() -> None:
    """The first layer of many; only four are quantized alone."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    with torch.no_grad():
        model[5].weight[0, 0] = math.nan
    backend, call = BACKENDS.get("int8-dynamic"), example(torch.randn(4, 16))
    layers = backend.layer_errors(backend.prepare(model, call), model, call)
    assert layers[5].local is None
    assert max(layers, key=report._layer_error) is layers[5]
    assert sum(layer.alone is not None for layer in layers) <= 3


def test_errors_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    value, reference = torch.randn(2, 5, 7).transpose(0, 2), torch.randn(7, 5, 2)
    errors = []
    for part in (7, 1 << 24):
        monkeypatch.setattr(layer_errors, "_PART", part)
        error = SquaredError()
        error.add(value, reference)
        errors.append(error.rel_l2)
    assert errors == pytest.approx([float((value - reference).norm() / reference.norm())] * 2)
