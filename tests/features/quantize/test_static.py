"""Static quantization to int8 by torchao: error, calibration, per-layer errors, save and reload, the code to paste."""

from __future__ import annotations

import copy
import importlib.metadata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import screen_of
from torch import Tensor, nn

from lowprec_check import LayerError, QuantizedModel, UsageError, load_quantized, quantize, scan
from lowprec_check.analysis.snippet import snippet
from lowprec_check.core.preparation import OnBackend
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.model_info import describe_target
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import make_target
from lowprec_check.features.quantize import libraries
from lowprec_check.features.quantize.report import quantized_layers
from lowprec_check.report.blocks import Table, cell_text
from lowprec_check.report.registry import render
from lowprec_check.schema.axes import BACKENDS, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run

INT8 = BACKENDS.get("int8")
needs_torchao = pytest.mark.skipif(libraries.library() != "torchao", reason="needs a torchao that fits this torch")

OF_KERNELS = 1e-2 if torch.cpu._is_vnni_supported() else 0.1
"""How far compiled kernels may be from the graph: they may add in another order, and round to another integer. Without
VNNI their sums may saturate: 0.015 was seen with AVX2."""


class ConvNet(nn.Module):
    """A convolution before a batch norm, a ReLU module that is called twice, a linear layer outside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.act = nn.Conv2d(16, 16, 3), nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 10)
        self.last = nn.Parameter(torch.randn(10, 10))
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv1(x)))
        x = self.act(self.conv2(x))
        return nn.functional.linear(self.head(x.mean((2, 3))), self.last)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.head(self.layer(x)) * scale


def conv_net() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet().eval()


def images(batch: int = 0) -> Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(batch))


def rel_l2(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def converted(model: nn.Module, inputs: Any, **options: Any) -> Any:
    """The graph that is compiled, which gives the same values in eager mode up to rounding, without compiling it."""
    return quantize(model, inputs, **options)._quantized.converted  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def quantized() -> QuantizedModel:
    return quantize(conv_net(), images())


# -- without torchao


@pytest.mark.parametrize(
    ("precision", "device", "words"),
    [
        ("half", "cpu", "fp32 weights"),
        ("bfloat16", "cpu", "fp32 weights"),
        ("autocast-fp16", "cpu", "autocast-bf16"),
        ("fp32", "cuda", "does not apply to cuda"),
        ("fp32", "xpu", "does not apply to xpu"),
    ],
)
def test_what_it_cannot_run_is_skipped_with_the_reason(
    precision: str, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert words in (INT8.skip_reason(PRECISIONS.get(precision), device, "contiguous") or "")


@pytest.mark.parametrize(
    ("versions", "expected", "advice"),
    [
        ({"torch": "2.13.0+cpu", "torchao": "0.18.0"}, "torchao", ""),
        ({"torch": "2.15.0", "torchao": "0.19.1"}, "torchao", ""),
        ({"torch": "2.13.0"}, None, "pip install torchao==0.18.0"),
        (
            {"torch": "2.13.0", "torchao": "0.17.0"},
            None,
            "torchao 0.17 does not fit torch 2.13: pip install torchao==0.18.0",
        ),
        ({"torch": "2.8.0+cu128"}, None, "pip install torchao==0.13.0"),
        ({"torch": "2.8.0", "torchao": "0.18.0"}, None, "pip install torchao==0.13.0"),
        ({"torch": "2.8.0", "torchao": "0.13.0"}, "torchao", ""),
        ({"torch": "2.8.0", "intel-extension-for-pytorch": "2.8.0"}, "ipex", ""),
        ({"torch": "2.13.0", "intel-extension-for-pytorch": "2.8.0"}, None, "pip install torchao==0.18.0"),
    ],
)
def test_the_library_fits_the_torch_that_is_installed(
    versions: dict[str, str], expected: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert libraries.library() == expected
    reason = INT8.skip_reason(PRECISIONS.get("fp32"), "cpu", "contiguous")
    assert (reason is None) == (expected is not None)
    assert advice in (reason or "")


def test_calibration_of_the_file_replaces_the_inputs(write: Any) -> None:
    path = write(
        "import torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "inputs = torch.zeros(3, 4)\n"
        "def calibration():\n"
        "    for number in range(2):\n"
        "        yield torch.full((3, 4), float(number))\n"
    )
    target = load_target(str(path))
    assert target.calibration_code == "calibration()"
    for _ in range(2):  # a generator is made anew
        assert [float(args[0].mean()) for args, kwargs in target.calibration() if not kwargs] == [0.0, 1.0]
    assert list(make_target(target.model, target.args[0]).calibration()) == [target.inputs]


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ("calibration = 3", "has type int"),
        ("calibration = torch.zeros(3, 4)", "has type Tensor"),
        ("calibration = iter([inputs])", "read only once"),
    ],
)
def test_a_wrong_calibration_is_an_error_of_the_file(write: Any, calibration: str, message: str) -> None:
    path = write(f"import torch\nmodel = torch.nn.Linear(4, 2)\ninputs = torch.zeros(3, 4)\n{calibration}\n")
    with pytest.raises(UsageError, match=message):
        load_target(str(path))


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (list, "is empty"),
        (images, "type Tensor, not a list"),
        (lambda: [1], "type int with 0 tensors"),
        (lambda: [(images(), torch.zeros(2))], "type tuple with 2 tensors"),
        (lambda: [images(), {"x": images()}], "Batch 2"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_batch_of_calibration_is_named(calibration: Any, message: str) -> None:
    target = make_target(conv_net(), images(), calibration=calibration)
    with pytest.raises(UsageError, match=message):
        list(target.calibration())


def test_reports_show_the_worst_layers() -> None:
    layers = [LayerError(module=f"layer{number}", op="conv2d", local=number / 100) for number in range(8)]
    layers.append(LayerError(module="", op="linear", accumulated=0.5))
    result = scan(nn.Linear(4, 2).eval(), torch.ones(3, 4), precisions="bfloat16", isolation="none")
    run = Run(precision="fp32", backend="int8", device="cpu", status="ok", layer_errors=layers)
    result = msgspec.structs.replace(result, runs=[*result.runs, run])
    _, table = quantized_layers(result, [])
    assert isinstance(table, Table)
    shown = [[cell_text(v, c.type) for v, c in zip(row.cells, table.columns, strict=True)] for row in table.rows]
    assert shown[0] == ["fp32 · int8", "the model itself", "linear", "–", "5.0e-01"]
    assert shown[1] == ["fp32 · int8", "layer7", "conv2d", "7.0e-02", "–"]
    assert "layer3" not in [row[1] for row in shown]
    for report in (screen_of(result, verbose=True), render(result, "markdown")):
        assert "7.0e-02" in report
        assert "4 more rows" in report or "4 of 9 rows" in report
    assert type(result).from_json(result.to_json()).runs[-1].layer_errors == layers


# -- with torchao


@needs_torchao
@pytest.mark.slow
def test_the_error_is_that_of_8_bits(quantized: QuantizedModel) -> None:
    model, x = conv_net(), images()
    with torch.no_grad():
        expected = model(x)
    first = quantized(x)
    assert 1e-4 < rel_l2(first, expected) < 0.1
    assert torch.equal(quantized(x), first)
    graph = quantized._quantized.converted  # type: ignore[attr-defined]
    assert rel_l2(first, graph(x)) < OF_KERNELS  # they may add in another order, and round to another integer


@needs_torchao
@pytest.mark.slow
def test_int8_kernels_are_used() -> None:
    from torch._dynamo.utils import counters

    before = dict(counters["inductor"])
    quantize(conv_net(), images())(images())
    after = counters["inductor"]
    names = [f"q{kind}_weight_prepack_matcher_count" for kind in ("conv", "linear")]
    assert [after[name] - before.get(name, 0) for name in names] == [2, 2]


@needs_torchao
def test_the_model_is_left_unchanged() -> None:
    model = conv_net()
    with torch.no_grad():
        before = model(images())
        quantize(model, images())
        assert torch.equal(model(images()), before)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_an_encoder_with_keyword_arguments(precision: str) -> None:
    torch.manual_seed(0)
    model, inputs = Encoder().eval(), {"x": torch.randn(2, 8, 32), "scale": 2.0}
    with torch.no_grad():
        expected = model(**inputs)
        graph = converted(model, inputs, precision=precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            assert 1e-4 < rel_l2(graph(**inputs), expected) < 0.1


@needs_torchao
@pytest.mark.slow
def test_ranges_come_from_the_calibration() -> None:
    model, x = conv_net(), images()
    with torch.no_grad():
        expected = model(x)
        like_inputs, narrow = (converted(model, x, calibration=[scale * images(1)]) for scale in (1.0, 0.01))
        assert rel_l2(narrow(x), expected) > 2 * rel_l2(like_inputs(x), expected)


@needs_torchao
def test_calibration_batches_of_another_shape_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"Batch 2 .*\(3, 3, 12, 12\) float32, but the inputs are \(2, 3, 12, 12\)"):
        quantize(conv_net(), images(), calibration=lambda: [images(), torch.zeros(3, 3, 12, 12)])


@needs_torchao
def test_a_model_that_is_not_quantized_is_an_error() -> None:
    with pytest.raises(UsageError, match="found none in LayerNorm"):
        quantize(nn.LayerNorm(4).eval(), torch.randn(2, 4))
    with pytest.raises(UsageError, match="training mode"):
        quantize(conv_net().train(), images())


@needs_torchao
@pytest.mark.slow
def test_errors_of_layers() -> None:
    model, x = conv_net(), images()

    def calibration() -> Iterator[Tensor]:
        yield from (x, images(1))

    target = make_target(model, x, calibration=calibration)
    example = Example(
        args=(x,), kwargs={}, precision=PRECISIONS.get("fp32"), device="cpu", calibration=target.calibration
    )
    prepared = INT8.prepare(model, example)
    found = INT8.layer_errors(prepared, model, example)
    assert [(error.module, error.op) for error in found] == [
        ("conv1", "conv2d"),
        ("conv2", "conv2d"),
        ("head", "linear"),
        ("", "linear"),
    ]
    assert all(1e-4 < (error.local or 0) < 0.05 and 1e-4 < (error.accumulated or 0) < 0.1 for error in found)
    assert found[0].local == pytest.approx(found[0].accumulated)  # nothing before it is quantized
    assert (found[1].accumulated or 0) > (found[1].local or 0)


@needs_torchao
@pytest.mark.slow
def test_a_reloaded_model_gives_the_same_bits(quantized: QuantizedModel, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    quantized.save(path)
    loaded = load_quantized(path)
    assert loaded.precision == "fp32"
    first, second = quantized(images(3)), loaded(images(3))
    graphs = [made._quantized.converted for made in (quantized, loaded)]  # type: ignore[attr-defined]
    assert torch.equal(graphs[0](images(3)), graphs[1](images(3)))
    assert rel_l2(second, first) < OF_KERNELS  # two compilations of one graph may differ in the last bit


def test_a_file_in_a_missing_folder_cannot_be_saved(tmp_path: Path) -> None:
    model = QuantizedModel(None, "fp32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="its folder does not exist"):
        model.save(tmp_path / "missing" / "model.pt2")


@needs_torchao
def test_files_that_are_no_saved_model(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(UsageError, match="No such file"):
        load_quantized(path)
    path.write_text("text")
    with pytest.raises(UsageError, match="not a saved model"):
        load_quantized(path)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_code_gives_the_output_of_the_run(precision: str) -> None:
    model, x = conv_net(), images()

    def calibration() -> list[Tensor]:
        return [images(1), images(2)]

    quantized = quantize(model, x, calibration=calibration, precision=precision)
    info = describe_target(
        make_target(model, x, calibration=calibration), Run(precision="fp32", device="cpu", status="ok")
    )
    values: dict[str, Any] = {"model": model, "inputs": x, "calibration": calibration}
    code = snippet(RunKey(precision, "int8", "cpu"), info)
    import torch._inductor.config as inductor

    with warnings.catch_warnings(), inductor.patch(freezing=False):  # restores what the code sets
        warnings.simplefilter("ignore")
        exec(code, values)
        context = torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32")
        with torch.no_grad(), context:
            expected = quantized._quantized.converted(x)  # type: ignore[attr-defined]
            assert torch.equal(values["model"]._orig_mod(x), expected)
    assert rel_l2(values["output"], expected.float()) < OF_KERNELS
    assert values["output"].dtype == expected.dtype


@needs_torchao
@pytest.mark.slow
def test_a_scan_has_a_row() -> None:
    result = scan(
        conv_net(), images(), precisions="autocast-bf16", backends="int8", plan=False, budget=300, further_inputs=3
    )
    run = next(run for run in result.runs if run.backend == "int8" and run.precision == "autocast-bf16")
    assert run.status == "ok", run
    assert [error.module for error in run.layer_errors] == ["conv1", "conv2", "head", ""]
    assert run.further_inputs is not None
    assert (run.further_inputs.kind, run.further_inputs.tried) == ("resampled", 3)


@needs_torchao
def test_a_model_whose_weights_are_int8_already_is_scanned() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    quantize_(model, Int8WeightOnlyConfig())
    x = torch.randn(4, 32)
    result = scan(model, x, precisions="half,autocast-bf16", times="off", plan=False)
    with torch.no_grad():
        fp32 = model(x)
        half = copy.deepcopy(model).half()(x.half()).float()
    error = float((half - fp32).norm() / fp32.norm())
    run = result.run("half")
    assert (run.status, result.run("autocast-bf16").status) == ("ok", "ok")
    assert run.rel_l2 == pytest.approx(error, rel=1e-3)
    assert not run.notes


def test_a_calibration_that_draws_gives_the_same_batches_each_time_it_is_read() -> None:
    def batches() -> Iterator[Tensor]:
        scale = torch.rand(())
        for _ in range(3):
            yield scale * torch.randn(2, 4)

    target = make_target(nn.Linear(4, 4), torch.randn(2, 4), calibration=batches)
    with prepared(target.model, PRECISIONS.get("fp32"), torch.device("cpu")) as ready:
        on_backend = OnBackend(INT8, target, ready, seed=0)
        before = torch.get_rng_state()
        first = [args[0] for args, _ in on_backend._calibration()]
        assert torch.equal(torch.get_rng_state(), before)
        second = []
        for args, _ in on_backend._calibration():
            torch.manual_seed(7)  # as a quantizer may do between batches
            second.append(args[0])
    assert len(first) == 3
    assert not torch.equal(first[0], first[1])
    assert all(map(torch.equal, first, second))
