"""Autocast in a training script's own loop: the patched text, run plainly, trains as a loop written by hand does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Call
from shared_result import shared_result

from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.fix import source_trial
from lowprec_check.features.fix.fix_sites import OwnFiles, Sites
from lowprec_check.features.fix.scene import compose
from lowprec_check.features.fix.script_fixes import scaled
from lowprec_check.features.fix.script_precision import autocast_changes, switches
from lowprec_check.features.fix.script_steps import made_steps
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import Locate, SourceText, edited
from lowprec_check.features.fix.statements import patch_of_script
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.fixing import Fixing
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.statements import Sentence
from lowprec_check.schema.training import TrainingSetup
from lowprec_check.torchkit.output_comparison import digest_of

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X, Y = torch.randn(256, 20), torch.randn(256, 1)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(zip(X.split(32), Y.split(32)))
"""

LOOPS = {
    "function": """
def train_one_epoch(net, criterion, opt, loader):
    for x, y in loader:
        out = net(x)
        loss = criterion(out, y)  # as it was
        opt.zero_grad()
        loss.backward()
        opt.step()


train_one_epoch(model, F.mse_loss, optimizer, batches)
""",
    "accumulation and clipping": """
for number, (x, y) in enumerate(batches):
    loss = F.mse_loss(model(x), y) / 2

    loss.backward()
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "one statement": """
for x, y in batches:
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) * 2).backward(); optimizer.step()
""",
    "a method, with a helper for the backward pass": """
class Trainer:
    def losses(self, x, y):
        return F.mse_loss(model(x), y), model[0].weight.square().mean()

    def update(self, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def fit(self):
        for x, y in batches:
            data, decay = self.losses(x, y)
            self.loss = data + 1e-3 * decay
            self.seen = x.shape
            self.update(self.loss)


Trainer().fit()
""",
    "a loss that the model returns": """
class Output:
    def __init__(self, loss):
        self.loss = loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model

    def forward(self, x, labels):
        return Output(F.mse_loss(self.body(x), labels))


net = Net()
for x, y in batches:
\toptimizer.zero_grad()
\tloss = net(x, labels=y).loss
\tloss.backward()
\toptimizer.step()
""",
    "a closure": """
for x, y in batches:
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    "calls in two branches and a loop": """
for number, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    total = 0.0
    if number % 2:
        out = model(x)
    else:
        out = model(x * 1.0)
    for part in (out, model(-x)):
        total = total + F.mse_loss(part, y)
    total.backward()
    optimizer.step()
""",
    "two models": """
other = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
second = torch.optim.SGD(other.parameters(), lr=0.1)
for x, y in batches:
    fake = model(x)
    second.zero_grad()
    real_loss = F.mse_loss(other(y), torch.ones(32, 1))
    real_loss.backward()
    fake_loss = F.mse_loss(other(fake.detach()), torch.zeros(32, 1))
    fake_loss.backward()
    second.step()
    optimizer.zero_grad()
    loss = F.mse_loss(other(fake), torch.ones(32, 1))
    loss.backward()
    optimizer.step()
""",
}


def observed(path: Path, text: str, steps: int = 8) -> tuple[ScriptFacts, Locate]:
    """What a script's steps show, and what finds its expressions."""
    path.write_text(text)
    facts = made_steps(path, (), steps, 0, fp32=False).facts()
    sites = Sites(OwnFiles(str(path)), {}, "cpu")

    def locate(place: ScriptPlace, name: str) -> tuple[SourceText, ast.AST] | str:
        return sites.located(OpCall(name, source=place.source, caller=place.caller, span=place.span))

    return facts, locate


IN_FP32, AS_IT_IS, WITH_NOISE = (True, False), (False, False), (True, True)
RUNS = {
    "torch.no_grad()": [IN_FP32, AS_IT_IS, WITH_NOISE],
    'torch.autocast("cpu", torch.bfloat16)': [IN_FP32, AS_IT_IS, IN_FP32, WITH_NOISE],
    'torch.autocast("cpu", torch.float16)': [IN_FP32, AS_IT_IS, IN_FP32],  # its loss is not scaled
}
"""How often steps are made before any change is tried: what they do in fp32 is not repeated."""
NOTES_ITS_RUN = """
import os
import time
open(f"run-{os.getpid()}-{time.time_ns()}", "x").close()
"""


@pytest.mark.parametrize("may_fork", [True, False])
@pytest.mark.parametrize("context", RUNS)
def test_a_script_runs_once_and_makes_its_steps_as_often_as_the_verdict_needs(
    context: str, may_fork: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made_so = tmp_path / "train.py", list[tuple[bool, bool]]()
    path.write_text(f"{NOTES_ITS_RUN}{HEAD}\nwith {context}:\n    model(X)\n{LOOPS['function']}")
    monkeypatch.chdir(tmp_path)
    facts_of = source_trial.ScriptTrial._facts

    def noted(trial: source_trial.ScriptTrial, made: Any, *args: Any) -> ScriptFacts:
        def counted(*, fp32: bool, noise: bool = False) -> Any:
            made_so.append((fp32, noise))
            return made(fp32=fp32, noise=noise)

        return facts_of(trial, counted, *args)

    monkeypatch.setattr(source_trial.ScriptTrial, "_facts", noted)
    facts = {}
    for twice in (True, False):
        trial = source_trial.ScriptTrial(path=str(path), arguments=(), steps=4, twice=twice)
        facts[twice] = trial.run(TargetSpec(str(path)), ScanOptions(), may_fork=may_fork)
        assert facts[twice].runs_again != may_fork
    is_other = "autocast" in context
    assert made_so == [*RUNS[context], IN_FP32, *([AS_IT_IS] if is_other else [])]
    # Once up to where it waits, and from the start for each time where it cannot go on in forks
    assert len(list(tmp_path.glob("run-*"))) == 2 + (0 if may_fork else len(made_so))
    assert facts[True].fp32 == facts[False].fp32 != ""
    assert facts[True].distance == facts[False].distance == 0.0
    assert bool(facts[True].autocast) == is_other


READS_A_FILE = """
rows = open(__file__)
for x, y in batches:
    optimizer.zero_grad()
    scale = 1 + len(rows.readline())  # each step has a line of its own
    F.mse_loss(scale * model(x), y).backward()
    optimizer.step()
rows.close()
"""
WAITS_FOR_A_THREAD = """
import queue
import threading
ready = queue.Queue(1)
threading.Thread(target=lambda: [ready.put(batch) for batch in batches], daemon=True).start()
for _ in batches:
    x, y = ready.get()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("loop", [READS_A_FILE, WAITS_FOR_A_THREAD])
def test_forks_read_a_file_where_the_script_does_and_wait_for_no_thread(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lost = tmp_path / "train.py", list[object]()
    path.write_text(HEAD + loop)

    def note(error: source_trial.ForkLostError) -> None:
        lost.append(error)

    monkeypatch.setattr(source_trial.ForkLostError, "__init__", note)
    trial = source_trial.ScriptTrial(path=str(path), arguments=(), steps=8, twice=True)
    facts = trial.run(TargetSpec(str(path)), ScanOptions())
    assert not facts.problem
    assert not lost
    assert facts.runs_again == (loop == WAITS_FOR_A_THREAD)
    plain = run(f"__file__ = {str(path)!r}\n{HEAD}{loop}")
    assert facts.fp32 == digest_of([p.detach().double() for p in plain["model"].parameters()])


def run(text: str) -> dict[str, Any]:
    """The variables of a script, by nothing but its text."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), space)
    return space


def weights(space: dict[str, Any]) -> torch.Tensor:
    models = [space[name] for name in ("model", "other") if name in space]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def all_in_autocast(text: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether autocast is on wherever a script calls a layer or computes a loss, and nowhere else."""
    forward, backward = list[bool](), list[bool]()

    def watched(owner: Any, name: str, seen: list[bool]) -> None:
        original = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, function)

    for owner, name in ((torch.nn.functional, "linear"), (torch.nn.functional, "mse_loss")):
        watched(owner, name, forward)
    for owner, name in ((torch.autograd, "backward"), (torch.nn.utils, "clip_grad_norm_")):
        watched(owner, name, backward)
    run(text)
    monkeypatch.undo()
    return bool(forward and backward) and all(forward) and not any(backward)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "train.py"
    assert not torch.is_autocast_enabled("cpu")


def patched(path: Path, text: str, dtype: str = "bfloat16") -> str:
    facts, locate = observed(path, text)
    changes = autocast_changes(facts, locate, dtype)
    assert not isinstance(changes, str), changes
    if dtype == "float16":
        scaler = scaled(facts, locate, None)
        assert not isinstance(scaler, str), scaler
        changes.append(scaler)
    (source,) = {source for source, _ in changes}
    return edited(source.text, compose(source, [fix for _, fix in changes]))


@pytest.mark.parametrize("name", LOOPS)
def test_a_patched_loop_trains_under_autocast(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = HEAD + LOOPS[name]
    changed = patched(here, text)
    wide, low = weights(run(text)), weights(run(changed))
    assert not torch.equal(wide, low)
    # Backward passes, steps and what is not computed for them stay outside
    assert torch.equal(weights(run(changed.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)"))), wide)
    for block in [node for node in ast.walk(ast.parse(changed)) if isinstance(node, ast.With)]:
        inside = ast.unparse(block)
        assert not any(call in inside for call in (".backward()", ".step()", "self.seen"))
    assert all_in_autocast(changed, monkeypatch)
    assert not all_in_autocast(text, monkeypatch)


def test_outputs_in_fp32_are_those_outside_of_a_loss_of_its_own(here: Path) -> None:
    for name, line in (
        ("function", "out = net(x).float()\n"),
        ("one statement", "loss = F.mse_loss(model(x), y) * 2\n"),
    ):
        facts, locate = observed(here, HEAD + LOOPS[name])
        changes = autocast_changes(facts, locate, "bfloat16", "outputs")
        assert not isinstance(changes, str), changes
        ((source, fix),) = changes
        changed = edited(source.text, compose(source, [fix]))
        assert line in changed
        run(changed)


def test_what_is_read_later_is_cast_to_fp32_if_it_must_be(here: Path) -> None:
    text = (
        HEAD
        + """
seen = []
for x, y in batches:
    optimizer.zero_grad()
    hidden, out = model[0](x), model(x)
    loss = F.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    seen.append(out.detach().numpy())
"""
    )
    facts, locate = observed(here, text)
    changes = autocast_changes(facts, locate, "bfloat16", "read later")
    assert not isinstance(changes, str), changes
    ((source, fix),) = changes
    changed = edited(source.text, compose(source, [fix]))
    assert "        loss = F.mse_loss(out, y)\n        out = out.float()\n    loss.backward()" in changed
    assert len(run(changed)["seen"]) == 8
    with pytest.raises(TypeError, match="BFloat16"):
        run(patched(here, text))


@pytest.mark.parametrize("name", ["function", "accumulation and clipping", "one statement"])
def test_fp16_gets_a_scaler_that_is_updated_once_a_step(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = HEAD + LOOPS[name]
    changed = patched(here, text, "float16")
    calls: dict[str, int] = {}

    def counted(owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def function(*args: Any, **kwargs: Any) -> Any:
            calls[method] = calls.get(method, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, function)

    for method in ("scale", "unscale_", "step", "update"):
        counted(torch.amp.GradScaler, method)
    run(changed)
    steps = 4 if "accumulation" in name else 8
    assert {method: calls[method] for method in ("step", "update")} == {"step": steps, "update": steps}
    assert calls["scale"] == 8
    assert calls["unscale_"] >= steps  # of the scaler itself, or before clipping
    wide = weights(run(text))
    disabled = changed.replace("torch.float16)", "torch.float16, enabled=False)")
    disabled = disabled.replace('GradScaler("cpu"', 'GradScaler("cpu", enabled=False')
    assert torch.equal(weights(run(disabled)), wide)


def test_what_trains_elsewhere_or_in_one_line_is_left_alone(here: Path) -> None:
    facts, locate = observed(here, HEAD + "for x, y in batches: F.mse_loss(model(x), y).backward(); optimizer.step()\n")
    assert autocast_changes(msgspec.structs.replace(facts, passes=()), locate, "bfloat16") == (
        "no call of a model leads to its backward passes in its own code"
    )
    string = LOOPS["function"].replace("criterion(out, y)  #", 'criterion(out, y) + len("""a\n""") * 0  #')
    facts, locate = observed(here, HEAD + string)
    assert "cannot be indented" in str(autocast_changes(facts, locate, "bfloat16"))


SWITCHES = {
    "--amp": 'parser.add_argument("--amp", action="store_true")',
    "--amp --amp-dtype bfloat16": 'parser.add_argument("--amp", action="store_true")\n'
    'parser.add_argument("--amp-dtype", default="float16")',
    "--mixed-precision bf16": 'parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")',
    "--bfloat16": 'parser.add_argument("--bfloat16", action="store_true")',
    "--dtype bfloat16": 'parser.add_argument("--dtype", default="float32")',
}


@pytest.mark.parametrize("words", SWITCHES)
def test_options_that_may_be_switches_are_seen_at_run_time(here: Path, words: str) -> None:
    parser = f"import argparse\nparser = argparse.ArgumentParser()\n{SWITCHES[words]}\n"
    parser += 'parser.add_argument("--fp16-only", action="store_true")\nparser.add_argument("--lr", type=float)\n'
    facts, _ = observed(here, f"{parser}args = parser.parse_args()\n{HEAD}{LOOPS['function']}", steps=1)
    first = next(switches(facts, ("--lr", "1"), [], "bfloat16"))
    assert first.words == words
    assert first.arguments == ("--lr", "1", *words.split())
    assert not any("fp16-only" in switch.words for switch in switches(facts, (), [], "bfloat16"))


def test_a_value_that_is_given_is_changed() -> None:
    facts = ScriptFacts(steps=1)
    for given, changed in (
        (("--dtype=float32",), ("--dtype=bfloat16",)),
        (("-p", "x", "--precision", "no"), ("-p", "x", "--precision", "bf16")),
    ):
        assert next(switches(facts, given, [], "bfloat16")).arguments == changed
    assert not [*switches(facts, ("--name=float32", "no"), [], "bfloat16")]


def test_constants_and_arguments_of_frameworks_are_switches(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("dtype = 'float32'\nuse_amp: bool = False\nfit(precision='32-true')\nsample = 3\nfp16 = False\n")
    source = SourceText(file)
    tried = [switch.change for switch in switches(ScriptFacts(steps=1), (), [source], "bfloat16")]
    changed = [edited(source.text, change[1].edits) for change in tried if change is not None]
    lines = [
        next(new for new, old in zip(text.splitlines(), source.text.splitlines(), strict=True) if new != old)
        for text in changed
    ]
    assert lines == ["dtype = 'bfloat16'", "use_amp: bool = True", "fit(precision='bf16-mixed')"]
    file.write_text("accelerator = Accelerator()\ntrainer = pl.Trainer(max_epochs=1)\n")
    for framework, line in (
        ("accelerate", 'Accelerator(mixed_precision="bf16")'),
        ("lightning", 'precision="bf16-mixed")'),
    ):
        source = SourceText(file)
        (switch,) = switches(ScriptFacts(steps=1, framework=framework), (), [source], "bfloat16")
        assert switch.change is not None
        assert line in edited(source.text, switch.change[1].edits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["function", "two models"])
def test_fix_prints_the_patch_of_a_script_in_fp32_and_what_it_does(call: Call, tmp_path: Path, name: str) -> None:
    file, text = tmp_path / "train.py", HEAD + LOOPS[name]
    file.write_text(text)
    done = call("fix", file, "-q", "--train", "-f", "json", "--apply", folder=tmp_path)
    found = msgspec.json.decode(done.stdout, type=Fixing)
    assert found.passes
    assert found.script is not None
    assert found.script.precision == "autocast-bf16"
    wide, low, start = (weights(run(each)) for each in (text, file.read_text(), HEAD))
    if name == "function":
        assert found.script.after == pytest.approx(float((low - wide).norm() / (wide - start).norm()), rel=1e-2)
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert done.returncode == 0
    assert "Nothing to fix" in done.stdout


@pytest.mark.slow
def test_a_switch_of_the_script_is_used_if_it_trains_as_fp32_does(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    parser = "import argparse\nparser = argparse.ArgumentParser()\n"
    parser += 'parser.add_argument("--amp", action="store_true")\nargs = parser.parse_args()\n'
    loop = LOOPS["function"].replace("out = net(x)", "out = under(net, x)")
    under = "def under(net, x):\n    with torch.autocast('cpu', torch.bfloat16, enabled=args.amp):\n"
    under += "        return net(x).float()\n"
    file.write_text(f"{parser}{HEAD}{under}{loop}")
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert "run the script with --amp" in " ".join(done.stdout.split())
    assert "@@" not in done.stdout
    # One that does something else than it says
    file.write_text(f"{parser}{HEAD}{under}{loop}".replace("enabled=args.amp", "enabled=False"))
    done = call("fix", file, "-q", "--train", folder=tmp_path)
    assert "it does not enter autocast to bfloat16" in " ".join(done.stdout.split())
    # In the block of the script, a patch around it changes nothing
    assert "nothing is computed in 16 bits" in " ".join(done.stdout.split())
    assert "@@" not in done.stdout


def test_a_scan_of_a_script_names_the_search_for_a_patch_of_its_own_loop() -> None:
    setup = TrainingSetup(steps=3, loss="", optimizer="", script="train.py:9")
    best = Recommendation(
        precision="autocast-bf16",
        backend="eager",
        memory_format="contiguous",
        keep_fp32=[],
        way="plain",
        evidence="measured",
        reason="",
        code="for step in range(3): ...",
    )
    result = msgspec.structs.replace(shared_result(""), target="train.py", training=setup, recommendation=best)

    def said(**changes: Any) -> list[str]:
        made = list(patch_of_script(msgspec.structs.replace(result, **changes)))
        return [statement.text for statement in made if isinstance(statement, Sentence)]

    assert said() == [
        "a patch of the script's own loop was not tried: lowprec-check fix train.py --train -p autocast-bf16 "
        "searches for one"
    ]
    for name, value in (("script", ""), ("framework", "lightning")):
        assert not said(training=msgspec.structs.replace(setup, **{name: value}))
    for name, value in (("precision", "half"), ("stay_in_fp32", True), ("keep_fp32", ["fc"]), ("way", "kahan")):
        assert not said(recommendation=msgspec.structs.replace(best, **{name: value}))
