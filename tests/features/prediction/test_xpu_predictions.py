"""Predictions for XPU, held against what people reported (docs/prediction.md)."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Call, Done, call_process
from helpers import screen_of
from thread_models import Between, Calling, ConVit, Demucs, Roma, encoder, histogram, spectral, volume
from torch import nn

import lowprec_check
from lowprec_check.errors import UsageError
from lowprec_check.schema.scan_result import ScanResult

WHITENING = ROOT / "examples" / "whitening.py"


def predict(model: nn.Module, inputs: Any, release: str, *precisions: str, device: str = "xpu") -> ScanResult:
    """A prediction, of those precisions only."""
    torch.manual_seed(0)
    return lowprec_check.scan(
        model.eval(),
        inputs,
        device=device,
        torch_version=release,
        predict=True,
        precisions=precisions,
        budget_error="off",
        plan=False,
        further_inputs=0,
        isolation="fork",
    )


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def found(result: ScanResult, precision: str) -> set[tuple[str, str | None]]:
    """Code and op of the findings about ops that fail or run elsewhere."""
    return {(d.code, d.op) for d in result.diagnostics if d.precision == precision and d.code.startswith("LP10")}


def test_the_seed_case() -> None:
    """ipex-673: spectral norm lacks a dot in half, and autocast works."""
    result = predict(spectral(), drawn(1, 3, 8, 8), "2.3", "half", "autocast-fp16")
    assert result.prediction is not None
    assert (result.prediction.name, result.torch) == ("xpu", "2.3")
    half, autocast = result.run("half"), result.run("autocast-fp16")
    assert (half.status, autocast.status) == ("error", "ok")
    assert {gap.op for gap in half.gaps} == {"aten.dot.default"}
    lacking = [d for d in result.diagnostics if d.code == "LP101"]
    link = "https://github.com/intel/intel-extension-for-pytorch/issues/673"
    assert lacking
    assert {d.url for d in lacking} == {link}
    assert all(d.rests_on is not None and link in d.rests_on for d in lacking)
    assert result.recommendation is not None
    assert result.recommendation.evidence == "predicted"
    assert "import intel_extension_for_pytorch" in result.recommendation.code
    assert 'torch.autocast("xpu", dtype=torch.float16)' in result.recommendation.code


Make = Callable[[], nn.Module]
DOT: Make = functools.partial(Calling, lambda x: torch.dot(x.flatten(), x.flatten()))
NDTRI: Make = functools.partial(Calling, lambda x: torch.special.ndtri(x.sigmoid()))
PCA: Make = functools.partial(Calling, lambda x: torch.pca_lowrank(x, q=4)[1])
RFFT: Make = functools.partial(Calling, lambda x: torch.fft.rfft(x).abs())
POLAR: Make = functools.partial(Calling, lambda x: torch.polar(x.abs(), x).abs())
CDIST: Make = functools.partial(Calling, lambda x: torch.cdist(x, x))
ERFCX: Make = functools.partial(Calling, torch.special.erfcx)
ANGLE: Make = functools.partial(Calling, torch.angle)
SVD: Make = functools.partial(Calling, torch.linalg.svdvals)
PINV: Make = functools.partial(Calling, lambda x: torch.linalg.pinv(x.float()))
INV: Make = functools.partial(Calling, lambda x: torch.linalg.inv(x @ x.t() + 8 * torch.eye(8, dtype=x.dtype)))
THREADS: list[tuple[str, Make, tuple[int, ...], str, str, str | None]] = [
    # thread, model, shape, torch, precision, finding
    ("torch-xpu-ops#2799", DOT, (8, 8), "2.8", "half", "LP105 aten.dot.default"),
    ("torch-xpu-ops#2799", DOT, (8, 8), "2.11", "half", None),
    ("pytorch#99710", PCA, (16, 8), "2.8", "autocast-fp16", "LP101 aten.linalg_qr.default"),
    ("torch-xpu-ops#499", Demucs, (1, 2, 16), "2.8", "half", "LP103 torch.nn.functional.conv1d"),
    ("torch-xpu-ops#2599", ConVit, (1, 4, 8), "2.10", "half", "LP103 aten.addmm.default"),
    ("torch-xpu-ops#1338", ERFCX, (8, 8), "2.8", "bfloat16", "LP101 aten.special_erfcx.default"),
    ("torch-xpu-ops#1338", NDTRI, (8, 8), "2.8", "bfloat16", "LP101 aten.special_ndtri.default"),
    ("torch-xpu-ops#4751", ANGLE, (8, 8), "2.13", "half", "LP101 aten.angle.default"),
    ("torch-xpu-ops#4751", ANGLE, (8, 8), "2.14", "half", None),
    ("torch-xpu-ops#4900", POLAR, (8, 8), "2.13", "half", "LP101 aten.polar.default"),
    ("torch-xpu-ops#4900", POLAR, (8, 8), "2.14", "half", None),
    ("torch-xpu-ops#1902", PINV, (8, 8), "2.8", "autocast-fp16", "LP105 aten._linalg_svd.default"),
    ("recurrent", functools.partial(nn.LSTM, 8, 8), (4, 2, 8), "2.13", "half", None),
    ("torch-xpu-ops#2615", RFFT, (8, 8), "2.11", "half", "LP102 torch.fft.rfft"),
    ("torch-xpu-ops#2615", RFFT, (8, 8), "2.12", "half", None),
    ("rfft of bfloat16", RFFT, (8, 8), "2.13", "bfloat16", "LP102 torch.fft.rfft"),
    ("rfft of bfloat16", RFFT, (8, 8), "2.15", "bfloat16", None),
    ("torch-xpu-ops#1887", INV, (8, 8), "2.8", "autocast-fp16", "LP105 aten.linalg_inv_ex.default"),
    ("cdist", CDIST, (8, 8), "2.13", "half", "LP101 aten._cdist_forward.default"),
    ("histc", functools.partial(Calling, histogram), (8, 8), "2.13", "bfloat16", None),
    ("grid_sampler_3d", functools.partial(Calling, volume), (64,), "2.13", "half", None),
    ("_linalg_svd", SVD, (8, 8), "2.13", "half", "LP101 aten._linalg_svd.default"),
]


@pytest.mark.parametrize(("thread", "make", "shape", "release", "precision", "expected"), THREADS)
def test_a_thread_is_confirmed(
    thread: str, make: Make, shape: tuple[int, ...], release: str, precision: str, expected: str | None
) -> None:
    result = predict(make(), drawn(*shape), release, precision)
    assert {f"{code} {op}" for code, op in found(result, precision)} >= ({expected} if expected else set())
    if expected is None:
        assert not found(result, precision), thread
        assert result.run(precision).status == "ok"
    else:
        fails = not expected.startswith("LP105")
        assert (result.run(precision).status == "error") is fails
    number = thread.partition("#")[2]
    for finding in result.diagnostics:
        if number and f"{finding.code} {finding.op}" == expected:
            assert (finding.url or "").endswith(f"/{number}")


def test_mixed_dtypes_under_autocast() -> None:
    """RoMa (pytorch#132715): grid_sample promotes, but not to a dtype that is not autocast's own."""
    run = predict(Roma(), drawn(8, 8), "2.8", "autocast-fp16").run("autocast-fp16")
    assert run.exception is not None
    assert run.exception.message == "Unexpected floating ScalarType in at::autocast::prioritize"


def test_the_fast_path_of_an_encoder() -> None:
    """pytorch#191796: bf16 weights meet fp32 values in the fast path."""
    run = predict(encoder(), drawn(1, 4, 8), "2.10", "autocast-bf16").run("autocast-bf16")
    assert run.exception is not None
    assert "mat1 and mat2 must have the same dtype" in run.exception.message


def test_the_fix_follows_the_predicted_torch() -> None:
    """angle has a kernel since 2.14, whatever torch is installed here."""
    old = predict(ANGLE(), drawn(8, 8), "2.13", "half")
    assert any("supported since torch 2.14" in (d.help or "") for d in old.diagnostics if d.code == "LP101")


def test_a_fallback_between_layers_has_place_calls_and_bytes() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.linalg.inv(x.float() @ x.float().t() + 8 * torch.eye(8)))

    result = predict(Between(twice), drawn(8, 8), "2.8", "autocast-fp16")
    [fallback] = [d for d in result.diagnostics if d.code == "LP105" and d.precision == "autocast-fp16"]
    assert fallback.op == "aten.linalg_inv_ex.default"
    assert fallback.calls == 2
    assert fallback.message.endswith(
        "copies its inputs (256 bytes) to the CPU, and its result back; 2 calls, 512 bytes in all"
    )
    assert (fallback.source or "").startswith(f"{Path(__file__).name}:") or Path(__file__).name in (
        fallback.source or ""
    )


# -- the command


def text_of(done: Done | subprocess.CompletedProcess[str], code: int = 0) -> str:
    """What the command prints, on both streams, in one line."""
    assert done.returncode == code, done.stdout + done.stderr
    return re.sub(r"\s+", " ", done.stdout + done.stderr)


def test_the_command_predicts_an_absent_device(tmp_path: Path) -> None:
    saved = tmp_path / "scan.json"
    options = shlex.split(f"--device xpu --torch 2.8 --predict -p half,autocast-fp16 -q --json {saved}")
    shown = text_of(call_process("scan", WHITENING, *options))
    # how many further inputs there are depends on the speed of the machine
    passes = r"redicted to pass on (\d+) of \1 inputs, worst 6 % of the tolerance\."
    assert re.search(rf"torch 2\.8 · xpu, predicted on a CPU autocast-fp16 is p{passes}", shown)
    assert "UserWarning" not in shown
    assert "measured" not in shown
    result = ScanResult.load(saved)
    in_full = " ".join(screen_of(result, verbose=True).split())
    assert "Predicted: nothing ran on xpu. Its kernels: declared for xpu, torch 2.8" in in_full
    assert re.search(rf"autocast-fp16 passes \(predicted\)\. P{passes}", in_full)
    assert "Error 6.1e-04, tolerance 1e-02" in in_full
    assert {run.evidence for run in result.runs} == {"predicted"}
    assert text_of(call_process("report", saved)) == shown


def test_a_plan_of_a_prediction(tmp_path: Path, call: Call) -> None:
    model = tmp_path / "bad.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "class Bad(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return self.b(self.a(x) + torch.linalg.svdvals(self.a(x)))\n"
        "torch.manual_seed(0)\nmodel = Bad().eval()\ninputs = torch.randn(8, 8)\n"
    )
    plan = tmp_path / "plan.json"
    words = shlex.split(f"--device xpu --torch 2.13 --predict -p autocast-bf16 -q --save-plan {plan}")
    shown = text_of(call("scan", model, *words))
    assert "autocast-bf16 with 1 of 2 modules in fp32 is predicted to pass on " in shown
    saved = lowprec_check.Plan.load(plan)
    assert (saved.evidence, saved.device, saved.keep_fp32) == ("predicted", "xpu", ["a"])
    assert (saved.latency_ms, saved.speedup, saved.peak_memory_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--device mps --predict", "nothing can be predicted for it: the catalog does not cover it."),
        ("--device xpu --predict --scenario realtime", "A prediction has no times, so no scenario."),
        ("--torch 2.13", "No device is named to predict."),
        ("--device xpu --torch foo", "'foo' is not a version of torch."),
        ("--device xpu --torch 2.13,2.15", "'2.13,2.15' is not a version of torch."),
        ("--device cpu --torch 2.6", "Add --predict to predict for torch 2.6."),
        ("--device xpu --predict --isolation none", "A prediction needs a new process for each run"),
    ],
)
def test_what_cannot_be_predicted(words: str, text: str, call: Call) -> None:
    assert text in text_of(call("scan", WHITENING, "-q", *shlex.split(words)), code=2)


def test_other_backends_are_skipped_with_a_reason(call: Call) -> None:
    words = shlex.split("--device xpu --predict --torch 2.13 --backend inductor -p half -q")
    shown = text_of(call("scan", WHITENING, *words), code=1)
    assert "half · inductor skipped" in shown
    assert "only eager runs are predicted" in shown


@pytest.mark.skipif(hasattr(torch, "xpu") and torch.xpu.is_available(), reason="XPU is here")
def test_a_plan_for_an_absent_device_names_the_scan() -> None:
    with pytest.raises(UsageError, match="is not available") as caught:
        lowprec_check.find_plan(nn.Linear(2, 2), torch.ones(1, 2), device="xpu")
    assert "lowprec-check scan TARGET --device xpu" in str(caught.value.hint)
