"""Static quantization to int8 by Intel's extension; run with the Python of an environment that has it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowprec_check.features.quantize.libraries import library

pytestmark = pytest.mark.skipif(library() != "ipex", reason="needs Intel's extension and the torch that fits it")


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


def conv_net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return ConvNet().eval(), torch.randn(2, 3, 12, 12)


def encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Encoder().eval(), torch.randn(2, 8, 32)


def rel_l2(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
@pytest.mark.parametrize("make", [conv_net, encoder])
def test_the_error_is_that_of_8_bits_and_a_reloaded_model_gives_the_same_bits(
    make: Any, precision: str, tmp_path: Path
) -> None:
    from lowprec_check import load_quantized, quantize

    model, x = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        quantized = quantize(model, x, calibration=[x, x + 0.1], precision=precision)
        assert 1e-4 < rel_l2(quantized(x), expected) < 0.1
    for name, tensor in model.state_dict().items():
        assert tensor.stride() == before[name].stride()
        assert torch.equal(tensor, before[name])
    path = tmp_path / "model.pt"
    quantized.save(path)
    loaded = load_quantized(path)
    assert loaded.precision == precision
    assert torch.equal(loaded(x), quantized(x))


@pytest.mark.slow
def test_keyword_arguments() -> None:
    from lowprec_check.schema.axes import BACKENDS, Example
    from lowprec_check.schema.precisions import PRECISIONS

    model, x = conv_net()
    int8 = BACKENDS.get("int8")
    example = Example(
        args=(), kwargs={"x": x}, precision=PRECISIONS.get("fp32"), device="cpu", calibration=lambda: [((), {"x": x})]
    )
    with torch.no_grad():
        prepared = int8.prepare(model, example)
        assert 1e-4 < rel_l2(prepared(x=x), model(x)) < 0.1
        assert not int8.layer_errors(prepared, model, example)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_code_gives_the_output_of_the_run(precision: str) -> None:
    from lowprec_check import quantize
    from lowprec_check.analysis.snippet import snippet
    from lowprec_check.engine.model.model_info import describe_target
    from lowprec_check.engine.model.target import make_target
    from lowprec_check.schema.run_key import RunKey
    from lowprec_check.schema.scan_result import Run

    model, x = conv_net()

    def calibration() -> list[Tensor]:
        return [x, 2 * x]

    target = make_target(model, x, calibration=calibration)
    info = describe_target(target, Run(precision="fp32", device="cpu", status="ok"))
    values: dict[str, Any] = {"model": model, "inputs": x, "calibration": calibration}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(snippet(RunKey(precision, "int8", "cpu"), info), values)
    expected = quantize(model, x, calibration=calibration, precision=precision)(x)
    assert torch.equal(values["output"], expected)


def test_a_model_that_is_not_quantized_is_an_error() -> None:
    from lowprec_check import UsageError, quantize

    with pytest.raises(UsageError, match="found none in LayerNorm"):
        quantize(nn.LayerNorm(4).eval(), torch.randn(2, 4))


def test_a_file_of_the_other_library_is_named(tmp_path: Path) -> None:
    import zipfile

    from lowprec_check import UsageError, load_quantized

    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/models/model.json", "{}")
    with pytest.raises(UsageError, match="quantized by torchao"):
        load_quantized(path)
