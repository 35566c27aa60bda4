"""Each row of a scan on the extension equals the bare recipe, and the code that it prints."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_printed

from lowprec_check.analysis.snippet import snippet
from lowprec_check.schema.scan_result import Run, ScanResult

CONVOLUTIONS = '''
import torch
from torch import nn

class Small(nn.Module):
    """Convolutions with batch norm, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)
        self.out = nn.Linear(32, 10)

    def forward(self, image):
        return self.out(self.b(self.norm(self.a(image)).relu()).relu().mean((2, 3)))

torch.manual_seed(0)
model, inputs = Small().eval(), torch.randn(2, 3, 16, 16)
'''
KEYWORDS = """
import torch
from torch import nn
from transformers import BertConfig, BertModel

torch.manual_seed(0)
model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)).eval()
inputs = {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": torch.ones(2, 16).long()}
"""
FUSED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
inputs = torch.randn(2, 16, 64)
"""
DTYPES = {"half": torch.half, "bfloat16": torch.bfloat16, "autocast-bf16": torch.bfloat16}


def scan(tmp_path: Path, text: str, precisions: str, backends: str) -> tuple[Path, ScanResult]:
    """Without times, for which every row would import the extension once more, in 10 seconds."""
    path = tmp_path / "mymodel.py"
    path.write_text(text)
    options = (
        "-p",
        precisions,
        "--backend",
        backends,
        "--budget",
        "200",
        "--no-plan",
        "--errors",
        "none",
        "--times",
        "off",
    )
    command = [sys.executable, "-m", "lowprec_check", "scan", path, *options, "--json", "-", "--fail-on", "never", "-q"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return path, ScanResult.from_json(done.stdout)


def bare(ipex: Any, path: Path, precision: str, backend: str) -> Any:
    """The output of what Intel documents, written out; its exception, if it raises one."""
    file = runpy.run_path(str(path))
    model, inputs, dtype = file["model"], file["inputs"], DTYPES.get(precision)
    kwargs = inputs if isinstance(inputs, dict) else {}
    args = () if kwargs else (inputs,)
    autocast = precision.startswith("autocast")
    if dtype is not None and not autocast:
        model, args = model.to(dtype), tuple(arg.to(dtype) for arg in args)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=autocast, cache_enabled=False):
            if backend == "ipex-compile":
                model = torch.compile(ipex.optimize(model, dtype=dtype, weights_prepack=False), backend="ipex")
            else:
                has_instructions = {
                    torch.bfloat16: ipex._C.onednn_has_bf16_support,
                    torch.half: ipex._C.onednn_has_fp16_support,
                }
                options = {} if dtype is None or has_instructions[dtype]() else {"weights_prepack": False}
                model = ipex.optimize(model, dtype=dtype, **options)
            if backend == "ipex-jit":
                given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
                model = torch.jit.freeze(torch.jit.trace(model, **given, check_trace=False, strict=False))
            return [model(*args, **kwargs) for _ in range(3)][-1]
    except Exception as error:
        return error


def distance(path: Path, output: Any) -> float:
    """The largest rel_l2 of an output, compared with eager fp32."""
    file = runpy.run_path(str(path))
    model, inputs = file["model"], file["inputs"]
    with torch.no_grad():
        expected = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    pairs = [(output[key], expected[key]) for key in expected] if isinstance(inputs, dict) else [(output, expected)]
    return max(float((y.float() - r).norm() / r.norm()) for y, r in pairs)


def check(ipex: Any, path: Path, result: ScanResult, run: Run) -> None:
    """The row has the status and the error of the bare recipe, and its code the same error."""
    output = bare(ipex, path, run.precision, run.backend)
    if isinstance(output, Exception):
        assert (run.status, run.exception.type if run.exception else None) == ("error", type(output).__name__)
        assert run.exception is not None
        assert run.exception.message[:60] == str(output).strip()[:60]
        return
    assert (run.status, run.reason) == ("ok", None)
    assert run.output_error is not None
    expected = distance(path, output)
    assert run.output_error.rel_l2 == pytest.approx(expected, rel=0.02, abs=3e-7)
    assert expected < (2e-2 if run.is_low else 1e-5)
    names = runpy.run_path(str(path))
    torch._dynamo.reset()
    space = run_printed(snippet(run.key, result.model), names)
    assert distance(path, space["output"]) == pytest.approx(expected, rel=0.02, abs=3e-7)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def rows(result: ScanResult) -> list[Run]:
    return [run for run in result.runs if run.backend != "eager"]


@pytest.mark.parametrize(
    ("backends", "precisions"),
    [
        ("ipex,ipex-jit", "fp32,bfloat16,autocast-bf16,half"),
        pytest.param("ipex-compile", "fp32,autocast-bf16", id="compile"),
    ],
)
def test_rows_of_convolutions(ipex: Any, tmp_path: Path, backends: str, precisions: str) -> None:
    path, result = scan(tmp_path, CONVOLUTIONS, precisions, backends)
    found = rows(result)
    expected = [(name, precision) for name in backends.split(",") for precision in precisions.split(",")]
    assert [(run.backend, run.precision) for run in found] == expected
    for run in found:
        check(ipex, path, result, run)
    assert all(run.status == "ok" for run in found if run.precision != "half")


def test_rows_of_keyword_arguments(ipex: Any, tmp_path: Path) -> None:
    path, result = scan(tmp_path, KEYWORDS, "autocast-bf16", "ipex,ipex-jit")
    assert [run.backend for run in rows(result)] == ["ipex", "ipex-jit"]
    for run in rows(result):
        check(ipex, path, result, run)


def test_the_failure_of_a_recipe_is_its_row(ipex: Any, tmp_path: Path) -> None:
    path, result = scan(tmp_path, FUSED, "autocast-bf16", "ipex")
    (run,) = rows(result)
    assert run.status == "error"
    check(ipex, path, result, run)


def test_scans_leave_the_extension_to_the_workers(ipex: Any, tmp_path: Path) -> None:
    """The API runs it in a worker, since it overrides kernels of its process."""
    code = """
import sys, torch, lowprec_check
model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
result = lowprec_check.scan(model, torch.ones(2, 8), precisions="bfloat16", backends="ipex", plan=False, times="off")
assert [run.status for run in result.runs] == ["ok", "ok"], result
assert "intel_extension_for_pytorch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
