"""Patches of LP512 to LP514: the patched text runs plainly, and has the fault no more."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call

from lowprec_check.features.fix.amp_fixes import loss_fixes
from lowprec_check.features.fix.fix_sites import OwnFiles, Sites
from lowprec_check.features.fix.scene import compose
from lowprec_check.features.fix.script_fixes import faults
from lowprec_check.features.fix.script_steps import made_steps
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import Locate, SourceText, edited
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.training import AmpUse

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X, Y = torch.randn(64, 20), torch.rand(64, 1)
model = nn.Sequential(nn.Linear(20, 8), nn.PReLU(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
"""
STEP = """\
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

SCRIPTS = {
    "a scaler for bf16": (
        """
for x, y in zip(X.split(16), Y.split(16)):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
"""
        + STEP,
        "scaler-for-bf16",
        'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=False)',
    ),
    "a backward pass in the block of autocast": (
        """
for x, y in zip(X.split(16), Y.split(16)):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y)

        # then
        scaler.scale(loss).backward()
    """
        + STEP.replace("\n    ", "\n        "),
        "backward-in-autocast",
        "\n\n    # then\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n",
    ),
    "two passes in one block": (
        """
for x, y in zip(X.split(16), Y.split(16)):
    with torch.autocast("cpu", torch.float16):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        loss = F.mse_loss(model(-x), y)
        scaler.scale(loss).backward()
"""
        + STEP,
        "backward-in-autocast",
        '        with torch.autocast("cpu", enabled=False):\n'
        "            scaler.scale(F.mse_loss(model(x), y)).backward()\n",
    ),
    "a layer made in fp16": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(20, 8), nn.Linear(8, 1)
        self.b = nn.PReLU(8, dtype=torch.float16)

    def forward(self, x):
        return self.c(self.b(self.a(x).half()).float())


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in zip(X.split(16), Y.split(16)):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
"""
        + STEP,
        "unscaled-fp16",
        "        self.b = nn.PReLU(8)\n",
    ),
    "a model that is cast": (
        """
model = model.to(torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in zip(X.split(16), Y.split(16)):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
    scaler.scale(loss).backward()
"""
        + STEP,
        "unscaled-fp16",
        "\nmodel = model\n",
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(action="ignore"):
        yield tmp_path / "train.py"


def observed(path: Path, text: str) -> tuple[ScriptFacts, Sites]:
    path.write_text(text)
    return made_steps(path, (), 3, 0, fp32=True).facts(), Sites(OwnFiles(str(path)), {}, "cpu")


def located_by(sites: Sites) -> Locate:
    def locate(place: ScriptPlace, op: str) -> tuple[SourceText, ast.AST] | str:
        return sites.located(OpCall(op, source=place.source, caller=place.caller, span=place.span))

    return locate


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_patch_removes_the_fault(here: Path, name: str) -> None:
    body, fault, line = SCRIPTS[name]
    facts, sites = observed(here, HEAD + body)
    assert {use.fault for use in facts.amp} == {fault}
    changes = [each.found for each in faults(facts, located_by(sites))]
    fixes = [change[1] for change in changes if not isinstance(change, str)]
    assert len(fixes) == len(changes)
    changed = edited(HEAD + body, compose(SourceText(here), fixes))
    assert line in changed
    assert not observed(here, changed)[0].amp
    space: dict[str, Any] = {}
    exec(compile(changed, "train.py", "exec"), space)
    assert all(parameter.dtype == torch.float32 for parameter in space["model"].parameters())
    assert all(parameter.isfinite().all() for parameter in space["model"].parameters())


def test_a_loss_that_a_device_refuses_is_computed_outside_of_its_autocast(here: Path) -> None:
    head = HEAD.count("\n")
    text = (
        f"{HEAD}with torch.autocast('cuda', torch.float16):\n    loss = F.binary_cross_entropy(model(X).sigmoid(), Y)\n"
    )
    here.write_text(text)
    place = {"source": f"train.py:{head + 2}", "span": f"{head + 2}:11-{head + 2}:56"}
    use = AmpUse(fault="refused-loss", op="binary_cross_entropy", names=("cuda",), **place)
    sites = Sites(OwnFiles(str(here)), {}, "cpu")
    ((*_, found),) = loss_fixes(ScriptFacts(steps=1, amp=(use,)), located_by(sites))
    assert not isinstance(found, str), found
    lines = edited(text, found[1].edits).splitlines()
    assert lines[-2:] == [
        '    with torch.autocast("cuda", enabled=False):',
        "        loss = F.binary_cross_entropy(model(X).sigmoid().float(), Y)",
    ]


def test_a_function_without_a_kernel_gets_fp32(here: Path) -> None:
    calls = {"F.ctc(x.half(), y)": "F.ctc(x.float(), y)", "F.ctc(x.to(torch.half), y)": "F.ctc(x.float(), y)"}
    calls |= {"F.ctc(x + z, y)": "F.ctc((x + z).float(), y)", "F.ctc(input=x)": "is called without a positional"}
    for before, after in calls.items():
        here.write_text(f"loss = {before}\n")
        sites = Sites(OwnFiles(str(here)), {}, "cpu")
        use = AmpUse(fault="no-kernel", op="ctc", source="train.py:1", span=f"1:7-1:{7 + len(before)}")
        ((*_, found),) = loss_fixes(ScriptFacts(steps=1, amp=(use,)), located_by(sites))
        assert after in (found if isinstance(found, str) else edited(here.read_text(), found[1].edits))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a scaler for bf16", "a layer made in fp16"])
def test_fix_offers_it(call: Call, tmp_path: Path, name: str) -> None:
    body, _, line = SCRIPTS[name]
    file = tmp_path / "train.py"
    file.write_text(HEAD + body)
    done = call("fix", file, "-q", "--train", "--apply", folder=tmp_path)
    assert done.returncode == 0
    assert line in file.read_text()
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert "Nothing to fix" in done.stdout


@pytest.mark.slow
def test_a_script_that_a_missing_kernel_stops_is_fixed(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    loop = """
lengths = torch.full((4,), 16), torch.full((4,), 3)
model = nn.Linear(20, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X.view(16, 4, 20).contiguous()).log_softmax(-1)
    F.ctc_loss(out.bfloat16(), torch.ones(4, 3, dtype=torch.long), *lengths).backward()
    optimizer.step()
"""
    file.write_text(HEAD + loop)
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert "F.ctc_loss(out.float(), torch.ones" in done.stdout
    assert "without, the script fails" in " ".join(done.stdout.split())
    assert done.returncode == 0
