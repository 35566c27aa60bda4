"""Faults of AMP in a training script are those that torch raises, at its lines, or that change the gradients."""

from __future__ import annotations

import os
import random
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from shared_result import shared_result

from lowprec_check import UsageError
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.observed_training import ObservedTraining
from lowprec_check.schema.training import AmpFault, AmpUse, TrainingSetup

Write = Callable[..., Path]

HEAD = """\
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
"""
FORWARD = """\
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
"""
LINES = {
    "backward": "scaler.scale(F.cross_entropy(model(x), y)).backward()",
    "plain backward": "F.cross_entropy(model(x), y).backward()",
    "unscale": "scaler.unscale_(optimizer)",
    "step": "scaler.step(optimizer)",
    "plain step": "optimizer.step()",
    "update": "scaler.update()",
    "clear": "optimizer.zero_grad()",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not torch.is_autocast_enabled("cpu")


def observed(script: str, steps: int = 2) -> ObservedTraining:
    """What is observed of a script's training."""
    Path("train.py").write_text(script)
    training = load_target("train.py", steps=steps).observed
    assert training is not None
    return training


def raised(script: str) -> tuple[str, str] | None:
    """What the script raises as it is, and where; ``None`` if it ends."""
    try:
        exec(compile(script, "train.py", "exec"), {})
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "train.py"]
        return f"{type(error).__name__}: {error}", f"train.py:{lines[-1]}"
    return None


@pytest.mark.parametrize("seed", range(40))
def test_calls_in_any_order_have_the_faults_that_torch_raises(here: Path, seed: int) -> None:
    """The first fault that raises is what torch raises there; without one, the script ends."""
    draw = random.Random(seed)
    lines = ["backward", *draw.choices(list(LINES), weights=[4, 1, 2, 4, 1, 4, 1], k=9)]
    script = HEAD + "\n".join(LINES[name] for name in lines) + "\n"
    as_it_is = raised(script)
    if "optimizer" not in script.partition(LINES["backward"])[2].replace("unscale_(optimizer", "").replace("zero", ""):
        with pytest.raises(UsageError, match=rf"makes no step(.|\n)*{as_it_is[1] if as_it_is else ''}"):
            observed(script, steps=10)
        return
    uses = observed(script, steps=10).amp
    stops = [use for use in uses if use.raises]
    if as_it_is is None:
        assert not stops
        return
    what, line = as_it_is
    # After a plain step, an update without checks is a consequence of the step
    passed_over = [use for use in uses if use.fault == "scaled-step"]
    first = stops[0] if stops else passed_over[0]
    assert first.line == line or passed_over
    assert what.startswith(first.raises) or passed_over


FAULTS: dict[str, tuple[str, list[tuple[AmpFault, int]]]] = {
    "none": (
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer); scaler.update()\n",
        [],
    ),
    "a plain step": (
        "    scaler.scale(loss).backward()\n    optimizer.step(); scaler.update()\n",
        [("scaled-step", 13)],
    ),
    "clipping": (
        "    scaler.scale(loss).backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer); scaler.update()\n",
        [("scaled-clip", 13)],
    ),
    "unscaled by hand": (
        "    scaler.scale(loss).backward()\n    scale = scaler.get_scale()\n"
        "    for p in model.parameters():\n        p.grad /= scale\n    optimizer.step()\n",
        [],
    ),
    "gradients of another loss": (
        "    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n    optimizer.zero_grad()\n"
        "    F.mse_loss(model(x), x[:, :3]).backward()\n    optimizer.step()\n",
        [],
    ),
    "inside autocast": (
        "        scaler.scale(loss).backward()\n    scaler.step(optimizer); scaler.update()\n",
        [("backward-in-autocast", 12)],
    ),
    "no update": ("    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n", [("no-update", 13)]),
    "an exception after the steps": (
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer); scaler.update()\n    1 / (step - 1)\n",
        [],
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_script_has_the_faults_that_it_has(here: Path, kind: str) -> None:
    body, wanted = FAULTS[kind]
    script = HEAD + "for step in range(4):\n    optimizer.zero_grad()\n" + FORWARD + body
    assert [(use.fault, use.line) for use in observed(script).amp] == [(f, f"train.py:{n}") for f, n in wanted]


def test_a_scaler_for_bf16_is_needless(here: Path) -> None:
    body = FORWARD.replace("float16", "bfloat16") + "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n"
    (use,) = observed(f"{HEAD}for step in range(1):\n{body}", 1).amp
    assert use.fault == "scaler-for-bf16"
    assert use.is_harmless


def test_parameters_in_fp16_are_named(here: Path) -> None:
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.act = nn.Linear(8, 3), nn.PReLU(3, dtype=torch.float16)\n"
        "    def forward(self, x):\n        return self.act(self.a(x).half()).float()\n"
    )
    body = "    scaler.scale(loss).backward()\n    scaler.step(optimizer); scaler.update()\n"
    made = HEAD.replace("model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))\n", f"{net}model = Net()\n")
    script = f"{made}for step in range(2):\n{FORWARD}{body}"
    (use,) = observed(script).amp
    as_it_is = raised(script)
    assert as_it_is is not None
    assert use.names == ("act.weight",)
    assert (use.raises, use.line) == as_it_is


def test_a_loss_without_a_kernel_for_fp16_is_computed_in_fp32(here: Path) -> None:
    body = (
        "model.half()\nfor step in range(2):\n    scores = model(x.half())[:, None].log_softmax(-1)\n"
        "    loss = F.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([16]), torch.tensor([2]))\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    (use,) = observed(HEAD + body).amp
    as_it_is = raised(HEAD + body)
    assert as_it_is is not None
    assert (use.fault, use.op, use.raises, use.line) == ("no-kernel", "ctc_loss", *as_it_is)


def test_what_needs_autocast_is_observed_under_it(here: Path) -> None:
    body = (
        "model.bfloat16()\nfor step in range(2):\n    with torch.autocast('cpu', torch.bfloat16):\n"
        "        loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    optimizer.step()\n"
    )
    training = observed(HEAD + body)
    assert not training.losses
    assert any("autocast to bfloat16" in note for note in training.notes)


def test_losses_are_those_without_autocast(here: Path) -> None:
    body = FORWARD + "    scaler.scale(loss).backward()\n    scaler.step(optimizer); scaler.update()\n"
    scope: dict[str, object] = {}
    exec(f"{HEAD}loss = F.cross_entropy(model(x), y).item()\n", scope)
    assert observed(f"{HEAD}for step in range(1):\n{body}", 1).losses == (scope["loss"],)


PAGES = {
    "LP510": "{}",
    "LP511": "for x, y in loader:\n    optimizer.zero_grad()\n    loss = criterion(model(x), y)\n{}",
    "LP514": "for x, y in loader:\n    optimizer.zero_grad()\n{}\n    optimizer.step()",
}


@pytest.mark.parametrize("code", PAGES)
def test_the_example_of_a_page_has_the_fault_and_its_repair_has_none(here: Path, code: str) -> None:
    head = f"{HEAD}from torch.nn.utils import clip_grad_norm_\nloader, criterion = [(x, y)] * 8, F.cross_entropy\n"
    before, after = textwrap.dedent(rules()[code].manual.rpartition("\n\n")[2]).split("# after\n")
    for text, codes in ((before, {code}), (after, set())):
        body = PAGES[code].format(textwrap.indent(text, "    " if code != "LP510" else ""))
        uses = observed((head + body).replace('"cuda"', '"cpu"')).amp
        setup = TrainingSetup(steps=1, loss="", optimizer="SGD(lr=0.1)", amp=list(uses))
        result = conclude(msgspec.structs.replace(shared_result(), training=setup))
        assert {found.code for found in result.diagnostics if found.code.startswith("LP51")} == codes


def test_faults_are_findings_and_follow_the_verdict() -> None:
    use = AmpUse(fault="scaled-step", source="train.py:12", op="step", scale=1024.0)
    raises = "AssertionError: No."
    late = AmpUse(fault="no-inf-checks", source="pkg.py:3", caller="train.py:14", op="update", raises=raises)
    setup = TrainingSetup(steps=1, loss="", optimizer="SGD(lr=0.1)", amp=[use, late])
    result = conclude(msgspec.structs.replace(shared_result(), training=setup))
    found = {found.code: found for found in result.diagnostics if found.code.startswith("LP51")}
    assert [(code, one.source, one.severity) for code, one in sorted(found.items())] == [
        ("LP510", "train.py:14", "error"),
        ("LP511", "train.py:12", "error"),
    ]
    assert "1024 times as large" in found["LP511"].message
    assert "AssertionError: No" in found["LP510"].message
    first = [said.text for said in result.statements if said.kind == "amp-use"]
    assert [text.split(":")[1] for text in first] == ["12", "14"]
    assert os.linesep not in first[0]


READS = {
    "the scale": "    print(scaler._scale.item(), scaler.get_scale(), scaler.state_dict()['scale'])\n",
    "whether a step was skipped": "    skipped = scaler.get_scale() < 1\n    assert not skipped\n",
    "its saved state": "    scaler.load_state_dict(scaler.state_dict())\n",
}


@pytest.mark.parametrize("kind", READS)
def test_a_script_may_read_its_scaler(here: Path, kind: str) -> None:
    body = "    scaler.scale(loss).backward()\n    scaler.step(optimizer); scaler.update()\n" + READS[kind]
    training = observed(f"{HEAD}for step in range(3):\n    optimizer.zero_grad()\n{FORWARD}{body}")
    assert not training.amp
    assert len(training.losses) == 2


@pytest.mark.parametrize("check", ["torch.is_autocast_enabled('cpu')", "model(x).dtype == torch.float16"])
def test_a_script_that_checks_its_autocast_is_observed_under_it(here: Path, check: str) -> None:
    body = f"        assert {check}\n    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n"
    training = observed(f"{HEAD}for step in range(3):\n    optimizer.zero_grad()\n{FORWARD}{body}")
    assert not training.losses
    assert any("autocast to float16" in note for note in training.notes)


def test_parameters_may_come_from_a_generator(here: Path) -> None:
    body = "    torch.autograd.grad(loss, model.parameters(), retain_graph=True)\n    loss.backward()\n"
    body += "    optimizer.step()\n"
    assert observed(f"{HEAD}for step in range(2):\n{FORWARD}{body}").losses
