"""``lowprec-check fix --train``: patches of training scripts, checked here by plain runs of their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import ROOT, Call

from lowprec_check.features.fix.script_fixes import faults
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.schema.fixing import Fixing

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
X, Y = torch.randn(256, 20), torch.randn(256, 1)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
"""

SCRIPTS = {
    "no scaler": (
        """
def main():
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    for x, y in zip(X.split(32), Y.split(32)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        (loss * 1e-7).backward()  # as it was
        optimizer.step()


if __name__ == "__main__":
    main()
""",
        ["grad_scaler"],
        ['    scaler = torch.amp.GradScaler("cpu")', "        scaler.scale(loss * 1e-7).backward()  # as it was"],
    ),
    "no scaler, accumulation and clipping": (
        """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def step(number, x, y):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y) * 1e-6
    loss.backward()
    if number % 2:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-7)
        optimizer.step()
        optimizer.zero_grad()


for number in range(8):
    step(number, X[32 * number :][:32], Y[32 * number :][:32])
""",
        ["grad_scaler"],
        ["        scaler.unscale_(optimizer)", "        scaler.step(optimizer)", "        scaler.update()"],
    ),
    "a scale that skips no step": (
        """
other = nn.Linear(20, 1)
optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 1e-3}, {"params": other.parameters(), "lr": 1e6}])
for x, y in zip(X.split(32), Y.split(32)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = 4 * F.mse_loss(model(x), y) + 1e-7 * F.mse_loss(other(x), y)
    loss.backward()
    optimizer.step()
""",
        ["grad_scaler"],
        ["init_scale="],
    ),
    "clipping of scaled gradients": (
        """
class Trainer:
    def __init__(self):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        self.scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


trainer = Trainer()
for x, y in zip(X.split(32), Y.split(32)):
    trainer.step(x, y)
""",
        ["unscale"],
        ["        self.scaler.unscale_(self.optimizer)"],
    ),
    "gradients changed by hand": (
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
for x, y in zip(X.split(32), Y.split(32)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y) * 1e-7
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 1e-9 * p.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        ["grad_scaler"],
        ["    scaler.unscale_(optimizer)\n    for p in model.parameters():"],
    ),
    "two clippings of scaled gradients": (
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in zip(X.split(32), Y.split(32)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    clip_grad_norm_(model[0].parameters(), 1.0)
    if x.ndim:
        clip_grad_norm_(model[2].parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        ["unscale"],
        ["    scaler.unscale_(optimizer)\n    clip_grad_norm_(model[0]"],
    ),
    "gradients read before a clipping, and cleared between two optimizers": (
        """
other = nn.Linear(20, 1)
optimizer, two = (torch.optim.SGD(its.parameters(), lr=1e6) for its in (model, other))
for number, (x, y) in enumerate(zip(X.split(32), Y.split(32))):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y) * 1e-7
    optimizer.zero_grad()
    loss.backward()
    if number == 20:
        print(model[0].weight.grad.norm())
    for its in (model,):
        clip_grad_norm_(its.parameters(), 1.0)
    optimizer.step()
    for p in other.parameters():
        p.grad = None
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(other(x), y) * 1e-7
    loss.backward()
    two.step()
""",
        ["grad_scaler"],
        [
            "    scaler.unscale_(optimizer)\n    if number == 20:",
            "    scaler.scale(loss).backward()\n    scaler.step(two)",
        ],
    ),
    "autocast around all steps": (
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cpu", torch.bfloat16):
    for x, y in zip(X.split(32), Y.split(32)):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
        ["autocast_cache"],
        ['with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):'],
    ),
}


def weights(text: str) -> torch.Tensor:
    """Those that a script leaves, by nothing but its text."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), space)
    models = [space[name] for name in ("model", "other") if name in space]
    return torch.cat([p.detach().flatten() for its in models for p in its.parameters()])


def in_fp32(text: str) -> str:
    text = re.sub(r'torch\.autocast\("cpu", (torch\.\w+)', r'torch.autocast("cpu", \1, enabled=False', text)
    return text.replace('GradScaler("cpu"', 'GradScaler("cpu", enabled=False')


def distance(text: str, fp32: str) -> float:
    """Of the weights after the steps from those of fp32, relative to how far those have moved."""
    start = weights(re.split("\n(?=optimizer|def|class)", text)[0])
    wide = weights(fp32)
    return float((weights(text) - wide).norm() / (wide - start).norm())


def fixed(call: Call, file: Path, *options: str) -> Fixing:
    done = call("fix", file, "-q", "--train", "-f", "json", *options, folder=file.parent)
    assert done.returncode in (0, 1), done.stderr
    return msgspec.json.decode(done.stdout, type=Fixing)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_fixed(call: Call, tmp_path: Path, name: str) -> None:
    body, kinds, expected = SCRIPTS[name]
    file, text = tmp_path / "train.py", HEAD + body
    file.write_text(text)
    found = fixed(call, file, "--apply")
    patched = file.read_text()
    assert [change.kind for change in found.changes] == kinds
    assert all(line in patched for line in expected), found.diff
    assert found.passes
    assert found.script is not None
    assert torch.equal(weights(in_fp32(patched)), weights(in_fp32(text)))
    assert found.outputs_equal
    before, after = (distance(each, in_fp32(text)) for each in (text, patched))
    assert before > 0.05
    assert after < 0.01
    assert found.script.before == pytest.approx(before, rel=1e-2)
    assert found.script.after == pytest.approx(after, rel=1e-2)
    assert not found.script.skipped
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 0
    assert "Nothing to fix" in done.stdout


FAULTY_HEAD = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number, (x, y) in enumerate(zip(X.split(32), Y.split(32))):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y)
"""

FAULTY = {
    "unscaled for each batch of an accumulation": (
        """\
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 100.0)
    if number % 2: scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        ["unscale_once"],
        ["    if number % 2: scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 100.0); scaler.step("],
    ),
    "unscaled twice": (
        """\
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # again
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        ["unscale_once"],
        ["    scaler.unscale_(optimizer)\n    scaler.step(optimizer); scaler.update()"],
    ),
    "a plain step, with clipping": (
        """\
    scaler.scale(loss).backward(); clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
    optimizer.zero_grad()
""",
        ["scaler_step", "unscale"],
        ["scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0); scaler.step(optimizer); scaler.u"],
    ),
    "updates without a step": (
        """\
    scaler.scale(loss).backward()
    if number % 2:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
""",
        ["scaler_update"],
        ["        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n"],
    ),
    "no scaled loss and no update": (
        """\
    loss.backward(); scaler.step(optimizer)
    optimizer.zero_grad(); scaler.update()
""",
        ["scaled_loss"],
        ["    scaler.scale(loss).backward(); scaler.step(optimizer)\n"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_faults_of_the_scaler_are_fixed(call: Call, tmp_path: Path, name: str) -> None:
    body, kinds, expected = FAULTY[name]
    file, text = tmp_path / "train.py", HEAD + FAULTY_HEAD + body
    file.write_text(text)
    found = fixed(call, file, "--apply")
    patched = file.read_text()
    assert [change.kind for change in found.changes] == kinds
    assert all(line in patched for line in expected), found.diff
    assert found.passes
    assert torch.equal(weights(in_fp32(patched)), weights(in_fp32(text)))
    assert distance(patched, in_fp32(patched)) < 0.01  # it runs as it is


@pytest.mark.slow
def test_a_scaler_that_the_steps_do_not_need_is_not_added(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text((HEAD + SCRIPTS["no scaler"][0]).replace(" * 1e-7", "").replace("lr=1e6", "lr=0.1"))
    found = fixed(call, file)
    assert found.passes
    assert not found.due
    assert [its.op for its in found.left_alone] == ["backward"]
    assert "within the tolerance" in found.left_alone[0].reason


@pytest.mark.slow
def test_what_cannot_be_compared_with_fp32_is_refused(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    steps = "optimizer = torch.optim.Adam(model.half().parameters())\nfor x in X.half().split(32):\n"
    steps += "    optimizer.zero_grad()\n    model(x).square().mean().backward()\n    optimizer.step()\n"
    file.write_text(HEAD + steps)
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 2
    assert "weights in float16, in which eps of its optimizer is zero" in done.stderr
    file.write_text((HEAD + SCRIPTS["no scaler"][0]).replace("torch.manual_seed(0)", "torch.seed()"))
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 2
    assert "in fp32 differ" in done.stderr
    done = call("fix", ROOT / "examples" / "train_gan.py", "-q", "--train")
    assert done.returncode == 2
    assert "makes no steps of training itself" in done.stderr


def test_why_a_script_is_left_alone() -> None:
    place = (ScriptPlace("train.py:3"),)
    facts = ScriptFacts(steps=1, autocast=("float16",), backward=place, made_steps=place, framework="lightning")

    def nowhere(_place: ScriptPlace, _name: str) -> str:
        return "its file is not found"

    (fault,) = faults(facts, nowhere)
    assert "lightning calls backward()" in fault.found
    (fault,) = faults(msgspec.structs.replace(facts, framework=""), nowhere)
    assert fault.found == "its file is not found"
    assert not [*faults(msgspec.structs.replace(facts, autocast=("bfloat16",)), nowhere)]
    assert not [*faults(msgspec.structs.replace(facts, scaled_backward=place), nowhere)]


LOOP = """
    for x, y in zip(X.split(32), Y.split(32)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        (loss * 1e-7).backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_what_ends_far_from_fp32_fails(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + SCRIPTS["no scaler"][0])
    done = call("fix", file, "-q", "--train", "--tolerance", "1e-9", folder=tmp_path)
    assert done.returncode == 1
    assert "With 1 change" in done.stdout
    assert "The tolerance is 1e-09" in " ".join(done.stdout.split())
    with_scaler = SCRIPTS["clipping of scaled gradients"][0].replace(
        "        clip_grad_norm_(model.parameters(), 1.0)\n", ""
    )
    file.write_text(
        (HEAD + with_scaler).replace("loss = F.mse_loss(model(x), y)", "loss = F.mse_loss(model(x * 1e6), y)")
    )
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 1
    assert "No known fault was seen" in done.stdout
    assert "lowprec-check scan --train tries other loss scales" in done.stdout


@pytest.mark.slow
def test_a_scaler_is_made_once_and_updated_once_a_step(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    head = HEAD + "optimizer = torch.optim.SGD(model.parameters(), lr=1e6)\n\n\n"
    file.write_text(f"{head}def epoch():{LOOP}\n\nfor _ in range(3):\n    epoch()\n")
    assert "\n+scaler = torch.amp.GradScaler" in fixed(call, file).diff  # though 8 steps are within the first epoch
    file.write_text(f"{head}def epoch():{LOOP}\n\nepoch()\nepoch()\n")
    assert "\n+scaler = torch.amp.GradScaler" in fixed(call, file).diff
    optimizers = "others = [torch.optim.SGD(layer.parameters(), lr=1e6) for layer in (model[0], model[2])]\n"
    several = LOOP.replace("        optimizer.step()", "        for other in others:\n            other.step()")
    file.write_text(f"{head}{optimizers}def epoch():{several}\n\nepoch()\n")
    found = fixed(call, file)
    assert not found.due
    assert "several optimizers" in found.left_alone[0].reason


@pytest.mark.slow
def test_runs_of_other_numbers_of_steps_are_not_compared(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = HEAD + "optimizer = torch.optim.SGD(model.parameters(), lr=1e6)\nseen = []\nif True:" + LOOP
    stops = "            seen.append(torch.is_autocast_enabled('cpu'))\n            if sum(seen) > 3: break\n"
    file.write_text(text.replace("            loss =", f"{stops}            loss ="))
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 2
    assert "8 steps in fp32, but 3 as it is" in done.stderr
    assert "--steps 3" in done.stderr
    assert call("fix", file, "-q", "--train", "--steps", "3", folder=tmp_path).returncode == 0


@pytest.mark.slow
def test_why_steps_are_not_seen_or_not_changed(call: Call, tmp_path: Path) -> None:
    file, head = tmp_path / "train.py", HEAD + "optimizer = torch.optim.SGD(model.parameters(), lr=1e6)\n\n\n"
    file.write_text(
        f"{head}def run():{LOOP}\n\nimport threading\nt = threading.Thread(target=run)\nt.start()\nt.join()\n"
    )
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 2
    assert "in another thread" in done.stderr
    file.write_text(f"{head}scaler = torch.amp.GradScaler('cpu', enabled=False)\nif True:{LOOP}")
    assert "enabled=False" in fixed(call, file).left_alone[0].reason


def test_options_and_targets_of_models_are_refused(call: Call, tmp_path: Path) -> None:
    for target in ("train.py:make", "torchvision:resnet18"):
        done = call("fix", target, "-q", "--train", folder=tmp_path)
        assert done.returncode == 2
        assert "is not a training script" in done.stderr
    given = ["-p", "half", "--plan", "--search-seconds", "30", "--further-inputs", "0"]
    given += ["--without-kernel", "aten.dot:half", "--device", "cpu", "--weights", "w.pt", "--inputs", "1x2"]
    done = call("fix", "train.py", "-q", "--train", *given, folder=tmp_path)
    assert done.returncode == 2
    for option in ("--precision", *(each for each in given if each.startswith("--"))):
        assert option in done.stderr
    done = call("fix", "train.py", "-q", "--steps", "3", folder=tmp_path)
    assert done.returncode == 2
    assert "Add --train" in done.stderr


@pytest.mark.parametrize("place", ["before the steps", "after the first"])
def test_a_script_that_cannot_run_twice_is_an_error_not_a_failed_change(place: str, call: Call, tmp_path: Path) -> None:
    makes = 'import os; os.mkdir("made")'
    first, later = (makes, "pass") if place == "before the steps" else ("pass", f"if not number: {makes}")
    (tmp_path / "train.py").write_text(
        f"""{HEAD}
{first}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x, y) in enumerate(zip(X.split(32), Y.split(32))):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    {later}
"""
    )
    done = call("fix", "train.py", "-q", "--train", folder=tmp_path)
    assert done.returncode == 2
    assert "fails when it runs again: FileExistsError" in done.stderr
