"""``scan --what-if``: predicted output errors are those of models whose layers really compute in the format."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Call
from emulated_layers import (
    MatMul,
    bf16,
    e4m3,
    e5m2,
    emulated_layer,
    emulated_model,
    int8_rows,
    rel_l2,
    tf32,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import budgeted_result
from torch import Tensor, nn

from lowprec_check import ResultError, ScanResult, UsageError, WhatIf, render, scan
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.what_if import matrix_products, prediction, run
from lowprec_check.features.what_if.prediction import predict
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.what_if import WHAT_IF_FORMATS, OperandFormat

FORMATS = WHAT_IF_FORMATS.names()
FACTOR = 1.5
CPU = torch.device("cpu")


def predictions(
    model: nn.Module, *args: Any, formats: Sequence[str] = FORMATS, probes: int = prediction.PROBES
) -> dict[str, WhatIf]:
    """In this process."""
    with prepared(model, PRECISIONS.get("fp32"), CPU) as ready:
        found = predict(ready, args, {}, formats, probes=probes)
    assert [entry.format for entry in found] == list(formats)
    return {entry.format: entry for entry in found}


def true_error(model: nn.Module, format: str, x: Tensor) -> float:
    with torch.no_grad():
        return rel_l2(emulated_model(model, format)(x), model(x))


# -- what is predicted


class Attention(nn.Module):
    """With one head, in plain products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scores, self.mix = MatMul(), MatMul()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (self.scores(q, k.mT) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out(self.mix(weights, v))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def mlp() -> tuple[nn.Module, Tensor]:
    layers = nn.Sequential(nn.Linear(48, 96), nn.ReLU(inplace=True), nn.LayerNorm(96), nn.Linear(96, 10, bias=False))
    return layers, torch.randn(16, 48)


def conv_net() -> tuple[nn.Module, Tensor]:
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, groups=4, bias=False),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.SiLU(),
        nn.Conv2d(32, 48, 1),
        nn.Flatten(),
        nn.Linear(48 * 25, 10),
    )
    return layers.eval(), torch.randn(2, 3, 16, 16)


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(32), Block(32), nn.Linear(32, 50)), torch.randn(2, 12, 32)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("build", [mlp, conv_net, transformer])
def test_the_prediction_is_the_error_of_the_emulated_model(build: Any, format: str) -> None:
    torch.manual_seed(0)
    model, x = build()
    entry = predictions(model, x, formats=[format], probes=256)[format]  # what is tested is not their number
    true = true_error(model, format, x)
    assert entry.predicted is not None
    assert true / FACTOR < entry.predicted < true * FACTOR, (entry.predicted, true)
    assert entry.note is None


class Twice(nn.Module):
    """The same layer two times, with an addition in place between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh_()
        y[:, ::2] += x[:, ::2]
        return self.layer(y)


class Parts(nn.Module):
    """Works on parts of a tensor, and writes to one that was allocated before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width // 2, width // 2), nn.Linear(width // 2, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        out = torch.empty_like(x)
        torch.mul(self.left(first), 0.75, out=out[:, : x.shape[1] // 2])
        out[:, x.shape[1] // 2 :] = self.right(second.t().contiguous().t())
        return torch.where(out > 0, out, out.expm1())


WIDTH = 64
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "gelu": nn.GELU,
    "relu": lambda: nn.ReLU(inplace=True),
    "twice": lambda: Twice(nn.Linear(WIDTH, WIDTH)),
    "parts": lambda: Parts(WIDTH),
    "attention": lambda: Residual(Attention(WIDTH)),
    "bottleneck": lambda: nn.Sequential(nn.Linear(WIDTH, 100, bias=False), nn.SiLU(), nn.Linear(100, WIDTH)),
}


@pytest.mark.slow
@settings(max_examples=15)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6),
    format=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_the_prediction_is_right_for_generated_models(names: list[str], format: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in names)).eval()
    x = torch.randn(64, WIDTH)
    entry = predictions(model, x, formats=[format], probes=64)[format]
    true = true_error(model, format, x)
    assert entry.predicted is not None
    assert true / FACTOR < entry.predicted < true * FACTOR, (entry.predicted, true)


def test_more_probes_estimate_the_same_error() -> None:
    torch.manual_seed(0)
    model, x = mlp()
    many = predictions(model, x, probes=1024)
    for name, entry in predictions(model, x).items():
        assert entry.predicted == pytest.approx(many[name].predicted, rel=0.4), name


def test_the_largest_share_is_that_of_the_layer_with_the_largest_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(layer.weight.sign() / 4)  # which int8 holds exactly
    entry = predictions(model, torch.randn(8, 32), formats=["int8-weights"])["int8-weights"]
    assert entry.shares[0].module == "1"
    assert entry.shares[0].op == "aten.addmm.default"
    assert entry.shares[0].share > 0.999


def test_the_worst_tensor_of_the_output_counts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y + 1000.0, y

    torch.manual_seed(0)
    model, x = Two(), torch.randn(8, 64)
    entry = predictions(model, x, formats=["tf32"])["tf32"]
    true = true_error(nn.Sequential(model.linear), "tf32", x)
    assert entry.predicted == pytest.approx(true, rel=0.5)


# -- what is emulated


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=25)
@given(values=st.lists(numbers, min_size=1, max_size=20))
def test_rounding_is_that_of_the_format(values: list[float]) -> None:
    given_ = torch.tensor(values)
    for dtype, expected in (("tf32", tf32), ("bfloat16", bf16)):
        if given_.abs().max() < 3e38:  # not rounded to infinity
            torch.testing.assert_close(
                matrix_products.rounded(given_, OperandFormat(dtype), ()), expected(given_), rtol=0, atol=0
            )
    for dtype, largest, expected in (("float8_e4m3fn", 448.0, e4m3), ("float8_e5m2", 57344.0, e5m2)):
        clipped = given_.clamp(-largest, largest)
        torch.testing.assert_close(
            matrix_products.rounded(clipped, OperandFormat(dtype), ()), expected(clipped), rtol=0, atol=0
        )


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-20, 20))
def test_integers_have_a_scale_for_each_output_channel(seed: int, exponent: int) -> None:
    weight = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[2] = 0.0
    found = matrix_products.rounded(weight, OperandFormat("int8", "channel"), (1, 2, 3))
    torch.testing.assert_close(found, int8_rows(weight))
    assert not found[2].any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(40, 24), (6, 40)),
        (nn.Linear(40, 24, bias=False), (2, 3, 40)),
        (nn.Conv2d(8, 16, 3, padding=1, stride=2), (2, 8, 9, 9)),
        (nn.Conv2d(40, 16, 3, dilation=2, groups=4, bias=False), (2, 40, 9, 9)),
        (nn.Conv2d(12, 12, 3, groups=12), (12, 9, 9)),
    ],
)
def test_one_layer_is_emulated_as_a_layer_in_the_format(
    layer: nn.Module, shape: tuple[int, ...], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, results = torch.randn(shape), []

    def kept(*args: Any) -> Tensor | None:
        results.append(matrix_products.product_in_format(*args))
        return results[-1]

    monkeypatch.setattr(prediction, "product_in_format", kept)
    predictions(nn.Sequential(layer), x, formats=[format])
    other = emulated_layer(layer, format)
    assert other is not None
    with torch.no_grad():
        batched = x if len(shape) != 3 or isinstance(layer, nn.Linear) else x[None]
        expected, exact = other(batched), layer(batched)
    (found,) = results
    difference = found.reshape(expected.shape) - expected
    assert difference.norm() < 0.1 * (expected - exact).norm()  # sums in another order may round another way


def test_a_transposed_convolution_is_the_sum_of_its_blocks() -> None:
    torch.manual_seed(0)
    layer, x = nn.ConvTranspose2d(24, 8, 3, stride=2, groups=2), torch.randn(2, 24, 5, 5)
    found = predictions(layer, x)
    assert 1e-4 < (found["bf16-accumulate"].predicted or 0.0) < 2e-2
    assert 1e-5 < (found["tf32"].predicted or 0.0) < 1e-3


def test_products_of_two_activations_stay_in_fp32_in_fp8() -> None:
    class Gram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    found = predictions(Gram(), torch.randn(2, 8, 16))
    known = {name for name, entry in found.items() if entry.predicted is not None}
    assert known == {"tf32", "bf16-accumulate"}
    assert found["fp8-e4m3"].note == "the model has no op in fp32 that it applies to"


def test_ops_that_are_not_emulated_are_named() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 8, 32)
    entry = predictions(layer, x)["fp8-e4m3"]
    assert re.fullmatch(r"left in fp32: scaled_dot_product\w*", entry.note or "")
    assert {share.module for share in entry.shares} == {"self_attn", "linear1", "linear2"}
    assert torch.backends.mha.get_fastpath_enabled()


# -- states of the model


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.first(x)
        with torch.no_grad():
            y = y.detach().clone() * 2
        return self.last(y)


def test_gradients_that_the_model_disables_do_not_matter() -> None:
    torch.manual_seed(0)
    model, x = WithoutGradients(), torch.randn(8, 16)
    entry = predictions(model, x, formats=["int8-weights"])["int8-weights"]
    assert {share.module for share in entry.shares} == {"first", "last"}
    assert entry.predicted == pytest.approx(true_error(model, "int8-weights", x), rel=0.5)


def test_a_model_that_draws_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    entry = predictions(model.train(), torch.randn(16, 64), formats=["tf32"])["tf32"]
    assert 1e-4 < (entry.predicted or 0.0) < 1e-3
    assert {share.module for share in entry.shares} == {"0", "2"}


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda y: y * 0, "the output of fp32 is all zeros"),
        (lambda y: y.argmax(-1), "the output has no floating-point values"),
        (lambda y: 1 / 0, "the model raised ZeroDivisionError when its ops were emulated: division by zero"),
    ],
)
def test_why_there_is_no_prediction(function: Any, note: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return function(self.linear(x))

    for entry in predictions(Odd(), torch.randn(4, 8)).values():
        assert (entry.predicted, entry.note, entry.shares) == (None, note, [])


def test_an_output_that_no_product_reaches_has_no_error() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.linear(x)
            return x + 1

    assert predictions(Constant(), torch.randn(4, 8))["tf32"].predicted == 0.0


def test_a_failure_of_the_emulation_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(prediction, "product_in_format", fails)
    for entry in predictions(nn.Linear(8, 8), torch.randn(4, 8)).values():
        assert entry.predicted is None
        assert entry.note == "emulating aten.addmm.default failed: ValueError: no such thing"


def test_too_little_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "free_memory", lambda _: 100)
    for entry in predictions(nn.Linear(8, 8), torch.randn(4, 8)).values():
        assert entry.predicted is None
        assert "memory" in (entry.note or "")


# -- in a scan


def test_a_scan_predicts_what_was_asked_for() -> None:
    torch.manual_seed(0)
    model, x = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps: list[str] = []
    result = scan(
        model,
        x,
        precisions="bfloat16",
        device="cpu",
        plan=False,
        what_if="FP8, w8",
        on_progress=lambda run, _: steps.append(run),
    )
    assert [entry.format for entry in result.what_if] == ["fp8-e4m3", "int8-weights"]
    assert result.options["what_if"] == ["fp8-e4m3", "int8-weights"]
    for entry in result.what_if:
        true = true_error(model, entry.format, x)
        assert true / FACTOR < (entry.predicted or 0.0) < true * FACTOR
    assert [run.precision for run in result.runs] == ["fp32", "bfloat16"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ScanResult.from_json(result.to_json()) == result


def test_a_scan_predicts_nothing_by_default() -> None:
    model, x = mlp()
    assert scan(model, x, precisions="bfloat16", device="cpu", plan=False).what_if == []


def test_an_unknown_format_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UsageError) as error:
        scan(*mlp(), device="cpu", what_if="bf16-acumulate")
    assert "Unknown what-if format 'bf16-acumulate'." in str(error.value)
    assert "Did you mean bf16-accumulate?" in str(error.value)


def test_a_worker_that_dies_costs_the_predictions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "predict", lambda *_, **__: os.abort())
    result = scan(*mlp(), precisions="bfloat16", device="cpu", plan=False, isolation="fork", what_if="tf32")
    assert result.run("bfloat16").status == "ok"
    (entry,) = result.what_if
    assert entry.predicted is None
    assert "SIGABRT" in (entry.note or "")


def test_an_exception_in_the_worker_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(run, "predict", fails)
    result = scan(*mlp(), precisions="bfloat16", device="cpu", plan=False, what_if="tf32")
    (entry,) = result.what_if
    assert entry.note == "predicting failed: ValueError: no such thing"


def test_the_command_saves_and_shows_predictions(tmp_path: Path, call: Call) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()\ninputs = torch.randn(4, 32)\n"
    )
    done = call(
        "scan", str(tmp_path / "net.py"), "-p", "bfloat16", "--device", "cpu", "--what-if", "tf32",
        "--what-if", "fp8,fp8", "--json", str(tmp_path / "scan.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "scan.json").read_text())
    assert [entry["format"] for entry in saved["what_if"]] == ["tf32", "fp8-e4m3"]
    assert all(set(entry) == {"format", "evidence", "predicted", "shares", "note"} for entry in saved["what_if"])
    assert re.search(r"tf32 +predicted +≈ \d\.\de-04", done.stdout)


# -- a prediction is never shown or saved as measured


def test_a_prediction_cannot_be_saved_as_measured() -> None:
    result = budgeted_result()
    assert result.what_if
    saved = json.loads(result.to_json())
    assert {entry["evidence"] for entry in saved["what_if"]} == {"predicted"}
    assert not {"latency_ms", "status", "output_error", "measured"} & {
        key for entry in saved["what_if"] for key in entry
    }
    saved["what_if"][0]["evidence"] = "measured"
    with pytest.raises(ResultError, match="what_if"):
        ScanResult.from_json(json.dumps(saved).encode())


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_a_prediction_is_shown_as_predicted(format: str) -> None:
    shown = render(budgeted_result(), format)
    for entry in budgeted_result().what_if:
        lines = [
            line
            for line in shown.splitlines()
            if re.search(rf"{re.escape(entry.format)}\b.*≈|{re.escape(entry.format)}.*–", line)
        ]
        assert lines, entry.format
        for line in lines:
            assert "predicted" in line
            assert "measured" not in line


def test_predictions_are_in_a_table_of_their_own() -> None:
    """Nowhere else: not among the runs, in findings or in the recommendation."""
    result = budgeted_result()
    without = msgspec.structs.replace(result, what_if=[])
    for name in ("concise", "github", "sarif", "junit"):
        assert render(result, name) == render(without, name)
    shown, plain = render(result, "text").splitlines(), render(without, "text").splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("What if"))
    added = len(shown) - len(plain)
    assert shown[: start - 1] + shown[start - 1 + added :] == plain
    assert not any(line.startswith("What if") for line in plain)
