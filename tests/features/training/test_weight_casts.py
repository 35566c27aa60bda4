"""A script that trains weights in 16 bits is scanned from weights in fp32, and told which cast to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call

from lowprec_check import ScanResult
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.features.training.advice import training_code
from lowprec_check.features.training.run import Training
from lowprec_check.features.training.spread import Samples, Spread, Trajectory
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.schema.training import TrainingSetup, TrainingWay, WeightCast
from lowprec_check.schema.verdict import ExceptionInfo

HEAD = """\
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
base = nn.Linear(16, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
"""
TRAINS = """
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-7)
x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
for step in range(4):
    loss = F.cross_entropy(model({x}), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CASTS = {
    "model = model.to(torch.bfloat16)": ("train.py:6", ".to(torch.bfloat16)"),
    "model.half()": ("train.py:6", ".half()"),
    "model.bfloat16()": ("train.py:6", ".bfloat16()"),
    "model[0].bfloat16(); model[2:].bfloat16()": ("train.py:6", ".bfloat16()"),
    "model = nn.Linear(16, 4, dtype=torch.bfloat16)": ("", ".()"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("cast", CASTS)
def test_weights_start_in_fp32_with_the_values_of_the_script(here: Path, cast: str) -> None:
    dtype = "half" if "half" in cast else "bfloat16"
    script = f"{HEAD}{cast}\n{TRAINS.format(x=f'x.{dtype}()')}"
    Path("train.py").write_text(script)
    target = load_target("train.py", steps=2)
    assert target.observed is not None
    assert target.observed.cast is not None
    line, code = CASTS[cast]
    assert target.observed.cast.line == line
    assert not line or target.observed.cast.code == code
    assert {p.dtype for p in (*target.model.parameters(), *target.args)} == {torch.float32}
    assert not target.observed.losses
    scope: dict[str, Any] = {}
    exec(script.partition("for step")[0], scope)
    assert all(
        torch.equal(a, b) for a, b in zip(target.model.parameters(), scope["model"].float().parameters(), strict=True)
    )


def test_a_frozen_base_in_16_bits_stays(here: Path) -> None:
    freeze = (
        "model[0].requires_grad_(False).bfloat16()\nmodel.register_forward_pre_hook(lambda _, a: (a[0].bfloat16(),))\n"
    )
    cast = "model[1].register_forward_hook(lambda _, __, out: out.float())\n"
    Path("train.py").write_text(HEAD + freeze + cast + TRAINS.format(x="x"))
    target = load_target("train.py", steps=1)
    assert target.observed is not None
    assert target.observed.cast is None
    assert target.model[0].weight.dtype == torch.bfloat16  # type: ignore[index]


@pytest.mark.parametrize("precision", ["autocast-bf16", "bfloat16"])
def test_code_for_autocast_takes_the_cast_back(precision: str) -> None:
    cast = WeightCast(line="train.py:6", call="to", dtype="bfloat16")
    setup = TrainingSetup(
        steps=1, loss="", optimizer="", script="train.py:9", cast=cast, loss_code="output.square().mean()"
    )
    key = RunKey(precision, "eager", "cpu", "contiguous")
    info = ModelInfo(name="Linear", parameters=20, modules=1, inputs=["(8, 4)"], castable=True, training=True)
    code = training_code(key, info, setup, TrainingWay(name="plain", status="ok"))
    model = torch.nn.Linear(4, 4).bfloat16()
    scope = {"model": model, "inputs": (torch.randn(8, 4),), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    before = model.weight.detach().float().clone()
    exec(code, scope)
    assert (model.weight.dtype == torch.float32) == (precision == "autocast-bf16")
    assert not torch.equal(model.weight.float(), before)
    assert ("in place of .to(torch.bfloat16) at train.py:6" in code) == (precision == "autocast-bf16")


def test_a_small_parameter_that_loses_all_updates_stands_still() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.ones(100)), "bias": torch.nn.Parameter(torch.ones(2))}
    samples = Samples.of(parameters)

    def trajectory(bias: float) -> Trajectory:
        start = torch.ones(102)
        return Trajectory(losses=[1.0, 0.9], weights=[start, start + torch.tensor([0.1] * 100 + [bias] * 2)])

    spread = Spread(trajectory(0.1), [trajectory(0.1)], samples, 0.05)
    assert spread.stuck(trajectory(0.1), ["bias"]) is None
    assert spread.stuck(trajectory(0.0), ["weight"]) is None
    still = spread.stuck(trajectory(0.0), ["bias"])
    assert still is not None
    assert (still.parameter, still.value, still.stands_still) == ("bias", 0.0, True)


@pytest.mark.slow
def test_a_scan_recommends_weights_in_fp32(here: Path, call: Call) -> None:
    Path("train.py").write_text(f"{HEAD}model.to(torch.bfloat16)\n{TRAINS.format(x='x.bfloat16()')}")
    options = ["-p", "bfloat16", "-p", "autocast-bf16", "--times", "off", "--isolation", "none", "--json", "-"]
    done = call("scan", "train.py", "--train", *options, folder=here)
    result = ScanResult.from_json(done.stdout.encode())
    assert result.run("bfloat16").status == "inaccurate"
    assert result.run("autocast-bf16").status == "ok"
    assert result.recommendation is not None
    assert not result.recommendation.keep_fp32
    (said,) = [said.text for said in result.statements if said.kind == "weight-cast"]
    assert said.startswith("remove .to(torch.bfloat16) at train.py:6")
    assert not [note for note in result.model.notes if "the loss of the script is" in note]


def test_a_model_that_casts_its_own_values_is_told_to_follow_its_weights(here: Path) -> None:
    Path("train.py").write_text(f"{HEAD}model.bfloat16()\n{TRAINS.format(x='x.bfloat16()')}")
    target = load_target("train.py", steps=1)
    mismatch = ExceptionInfo(type="RuntimeError", message="mat1 and mat2 must have the same dtype")
    hint = Training(1).failure_hint(mismatch, "cpu", target)
    assert hint is not None
    assert "cast the inputs of layers with x.to(layer.weight.dtype)" in hint
    assert Training(1).failure_hint(ExceptionInfo(type="RuntimeError", message="no"), "cpu", target) is None
