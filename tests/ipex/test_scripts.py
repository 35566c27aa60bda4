"""Scripts that use the extension, and rows on a processor without AVX-512, which oneDNN can be told to behave as."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = """import torch
from torch import nn
import intel_extension_for_pytorch as ipex
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer{options})
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled={is_low}):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""
CONVOLUTIONS = """import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
inputs = torch.randn(2, 3, 16, 16)
"""
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SPLIT = ", dtype=torch.bfloat16, weights_prepack=False"


def run(*command: str | Path, limits: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | limits, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def scan(path: Path, *options: str, limits: dict[str, str]) -> Any:
    command = [
        "-m",
        "lowprec_check",
        "scan",
        path,
        *options,
        "--times",
        "off",
        "--json",
        "-",
        "-q",
        "--fail-on",
        "never",
    ]
    return json.loads(run(*command, limits=limits))


@pytest.mark.parametrize("limits", [{}, AVX2], ids=["", "avx2"])
@pytest.mark.parametrize("options", ["", SPLIT], ids=["fp32", "bf16"])
def test_a_script_is_observed(tmp_path: Path, options: str, limits: dict[str, str]) -> None:
    """Its losses are those of the fused and the split steps that the script makes with the extension."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format(options=options, is_low=bool(options)))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(path, limits=limits))]
    result = scan(path, "--train", "--steps", "3", "-p", "autocast-bf16", limits=limits)
    assert [run["status"] for run in result["runs"]] == ["ok", "ok"]
    ways = {way["name"]: way for way in result["runs"][1]["training"]["ways"]}
    of_fp32 = result["runs"][0]["training"]["ways"][0]["losses"]
    scanned = ways["ipex-split"]["losses"] if options else of_fp32
    assert scanned[:3] == pytest.approx(losses, rel=1e-3 if options else 1e-5)
    assert any(
        "leaves out ipex.optimize (train.py:9) and runs stock PyTorch" in note for note in result["model"]["notes"]
    )
    assert [ways[name]["status"] for name in ("ipex-split", "ipex-master", "ipex-fused")] == ["ok"] * 3


def test_rows_without_avx512_are_not_prepacked(tmp_path: Path) -> None:
    path = tmp_path / "convolutions.py"
    path.write_text(CONVOLUTIONS)
    result = scan(path, "--backend", "ipex,ipex-jit", "-p", "bfloat16,autocast-bf16", "--no-plan", limits=AVX2)
    assert [run["status"] for run in result["runs"]] == ["ok"] * 5
    limit = "without AVX-512, ipex.optimize cannot prepack weights in bfloat16 and needs weights_prepack=False"
    assert f"{limit}, as rows on ipex and ipex-jit have it here" in result["model"]["notes"]
    environment = run("-m", "lowprec_check", "env", limits=AVX2)
    assert limit in " ".join(environment.split())


def test_parts_that_are_not_left_out_are_those_of_the_extension(tmp_path: Path) -> None:
    path = tmp_path / "lamb.py"
    text = TRAIN.format(options="", is_low=False).replace(
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)", "LAMB"
    )
    lamb = "__import__('intel_extension_for_pytorch.optim._lamb', fromlist=['Lamb']).Lamb(model.parameters(), lr=0.05)"
    path.write_text(text.replace("LAMB", lamb))
    result = scan(path, "--train", "-p", "autocast-bf16", limits={})
    assert result["runs"][0]["status"] == "ok"
