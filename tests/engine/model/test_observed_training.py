"""A script's training step is observed as it happens: the same batches, losses and weights as without the tool."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from conftest import Call
from observed_scripts import BY_HAND, FRAMEWORKS, HEAD, MIXED, NOTED, REFUSED, SCRIPTS, SEVERAL, STEP, WHOLE
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowprec_check import ScanResult, UsageError
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.observed_training import ScriptStep
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.training import LossInputs, describe_loss, loss_of
from lowprec_check.engine.model.whole_optimizer import OptimizerLike
from lowprec_check.features.training.advice import training_code
from lowprec_check.features.training.spread import OtherSeeds
from lowprec_check.features.training.steps import USUAL, TrainingStep
from lowprec_check.features.training.training_reference import script_parts
from lowprec_check.features.training.ways import usual
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.schema.training import TrainingSetup, TrainingWay

Write = Callable[..., Path]
MODEL = "model = nn.Linear(8, 3)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


SCAN_HERE = ("--isolation", "none", "--times", "off", "--further-inputs", "0")
"""Options of scans of which only the steps and losses are looked at."""


def run_as_it_is(path: Path, optimizers: int = 1) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The losses of a script, summed for each step of all its optimizers, and their weights after each."""
    losses: list[float] = []
    weights: list[list[torch.Tensor]] = []
    pending: list[float] = []
    several: list[Any] = []
    kept = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        pending.append(self.item())
        kept(self, *args, **kwargs)

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not pending:
            return
        several.append(optimizer)
        if len(several) % optimizers == 0:
            groups = [group for one in dict.fromkeys(several) for group in one.param_groups]
            losses.append(sum(pending))
            weights.append([p.detach().clone() for group in groups for p in group["params"]])
            pending.clear()

    hook = register_optimizer_step_post_hook(after)
    torch.Tensor.backward = backward  # type: ignore[assignment,method-assign]
    try:
        with torchvision_works():  # as beside a torch that it was not built for
            exec(compile(path.read_bytes(), str(path), "exec"), {"__name__": "__main__"})
    finally:
        hook.remove()
        torch.Tensor.backward = kept  # type: ignore[method-assign]
    return losses, weights


def run_observed(target: Target, steps: int) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The same of a target."""
    assert callable(target.optimizer)
    optimizer: Any = target.optimizer([p for p in target.model.parameters() if p.requires_grad])
    parts: list[torch.optim.Optimizer] = getattr(optimizer, "parts", [optimizer])
    losses, weights = [], []
    for number in range(steps):
        batch = target.batch(number)
        losses.append(0.0)
        for phase in target.model.start(batch.args) if isinstance(target.model, ScriptStep) else USUAL:
            for one in phase.clears:
                parts[one].zero_grad()
            output = target.model(*batch.args, **batch.kwargs)
            loss = loss_of(target.loss, output, LossInputs(batch.args, batch.kwargs, batch.targets))
            loss.backward()
            for one in phase.steps:
                parts[one].step()
            losses[-1] += loss.item()
        weights.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
    return losses, weights


@pytest.mark.parametrize("kind", SCRIPTS)
def test_steps_are_those_of_the_script(here: Path, write: Write, kind: str) -> None:
    path = write(HEAD + SCRIPTS[kind], "train.py")
    losses, weights = run_as_it_is(path, SEVERAL[kind][0] if kind in SEVERAL else 2 if "GAN" in kind else 1)
    target = load_target("train.py", steps=3)
    found, after = run_observed(target, 3)
    assert len(losses) == 3
    assert any("makes a number" in note for note in target.notes) == ("official" in kind)  # before its second loss
    several = "a GAN" in kind
    torch.testing.assert_close(found, losses, rtol=1e-6 if several else 0, atol=0)
    for step, wanted in zip(after, weights, strict=True):
        for one, other in zip(step, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5 if several else 0, atol=1e-7 if several else 0)


@pytest.mark.parametrize("with_unused_optimizer", [False, True])
@pytest.mark.parametrize("update", BY_HAND)
def test_updates_by_hand_are_those_of_the_script(
    here: Path, write: Write, update: str, with_unused_optimizer: bool
) -> None:
    script = (
        "model = net()\nmoments = [torch.zeros_like(p) for p in model.parameters()]\nhistory = []\n"
        + "optimizer = torch.optim.Adam(model.parameters())\n" * with_unused_optimizer
        + "for step, (x, y) in enumerate(batches()):\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n"
        + BY_HAND[update]
        + "    history.append((loss.item(), [p.detach().clone() for p in model.parameters()]))\n"
    )
    path = write(HEAD + script, "train.py")
    space: dict[str, Any] = {}
    exec(path.read_text(), space)
    target = load_target("train.py", steps=3)
    losses, weights = run_observed(target, 3)
    assert losses == pytest.approx([loss for loss, _ in space["history"]], rel=1e-6)
    trained = [[*after][4:] if update == "frozen weights" else after for _, after in space["history"]]
    for step, wanted in zip(weights, trained, strict=True):
        for one, other in zip(step, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def plain_steps(script: str, precision: str = "fp32", scale: float = 0.0) -> list[list[torch.Tensor]]:
    """The weights of a script after each turn of its loop, its model in a precision by hand."""
    *before, loop, body = re.split(r"(?m)^(for x, y in .*\n)", HEAD + script)
    kept = "    kept.append([p.detach().clone() for p in model.parameters()])\n"
    if precision == "bfloat16":
        before[0] = before[0].replace("model = n", "torch.set_default_dtype(torch.bfloat16)\nmodel = n", 1)
        before[0] = before[0].replace("X, Y = torch.randn(96, 8)", "X, Y = torch.randn(96, 8).bfloat16()", 1)
    if precision == "autocast-bf16":
        body = re.sub(r"(F\.cross_entropy\(model\(x\), y\))", r"cast(lambda: \1)", body)
    space: dict[str, Any] = {"kept": [], "cast": torch.autocast("cpu", torch.bfloat16)(lambda call: call())}
    try:
        exec(f"{''.join(before)}{loop}{body}{kept}", space)
    finally:
        torch.set_default_dtype(torch.float32)
    kept_weights: list[list[torch.Tensor]] = space["kept"]
    return kept_weights


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_an_optimizer_of_several_passes_is_taken_whole(here: Path, write: Write, kind: str, precision: str) -> None:
    """Compared with the script itself, with autocast put into it by hand."""
    if "line search" in kind and precision != "fp32":
        pytest.skip("its loss is more than cross-entropy")
    write(HEAD + WHOLE[kind], "train.py")
    wanted = plain_steps(WHOLE[kind], precision)
    target = load_target("train.py", steps=3)
    observed = target.observed
    assert observed is not None
    assert any("called again" in note for note in target.notes)
    ready = cast(Any, SimpleNamespace(model=target.model, call=target.model, device=torch.device("cpu")))
    ready.inputs = lambda args, kwargs: (args, kwargs)
    dtype = torch.bfloat16 if precision != "fp32" else None
    context = torch.autocast("cpu", dtype, enabled=dtype is not None)
    ready.application = SimpleNamespace(context=lambda _device: context)
    step = TrainingStep(target, ready, usual.PLAIN)
    trained = {id(p) for part in step.parts for p in part.parameters}
    names = [name for name, p in target.model.named_parameters() if id(p) in trained]
    for number, after in enumerate(wanted):
        batch = target.batch(number)
        step.targets = batch.targets
        step(*batch.args, **batch.kwargs)
        own = dict(target.model.named_parameters())
        for name, other in zip(names, after, strict=True):
            torch.testing.assert_close(own[name], other, rtol=1e-4, atol=1e-5)


def test_an_update_by_hand_is_an_optimizer_in_printed_code(here: Path, write: Write) -> None:
    body = "model = net()\nfor x, y in batches():\n    F.cross_entropy(model(x), y).backward()\n"
    write(HEAD + body + BY_HAND["p.data"], "train.py")
    target = load_target("train.py", steps=1)
    assert "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the update at train.py:15" in target.setup


def test_accumulated_gradients_are_computed_loss_by_loss(here: Path, write: Write) -> None:
    body = "    for xs, ys in zip(x.split(4), y.split(4)):\n        (F.cross_entropy(wide(xs), ys) / 8).backward()\n"
    body += "    optimizer.step()\n    optimizer.zero_grad()\n"
    made = "wide = nn.Sequential(nn.Linear(8, 5000), nn.ReLU(), nn.Linear(5000, 3))\n"
    made += "optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)\n"
    write(f"{HEAD}{made}for x, y in batches():\n{body}", "train.py")
    target = load_target("train.py", steps=1)
    assert isinstance(target.model, ScriptStep)
    (program,) = target.model.programs
    assert len(target.model.start(target.args)) == 8
    for _ in range(8):
        target.model(*target.args).backward()
        # Nothing of this size may wait for the end of the step
        assert all(tensor.numel() < 4 * 5000 or tensor.is_leaf for tensor in program._values.values())
    assert not program._values
    assert not any("backward() 8 times" in note for note in target.notes)


def test_the_code_for_accumulated_gradients_is_a_loop(here: Path, write: Write) -> None:
    write(HEAD + SCRIPTS["accumulation"], "train.py")
    losses, weights = run_as_it_is(here / "train.py")
    target = load_target("train.py", steps=1)
    assert isinstance(target.optimizer, OptimizerLike)
    setup = msgspec.structs.replace(setup_of(), **script_parts(target))
    key = RunKey("bfloat16", "eager", "cpu", "contiguous")
    way = TrainingWay(name="master-weights", status="ok")
    code = training_code(key, INFO, setup, way).replace("output = model(inputs)", "output = model(*inputs)")
    assert code.count("updater.backward(step_loss)") == 1
    code = code.replace("model.bfloat16()", "model.float()").replace("torch.bfloat16", "torch.float32")
    exec(code, {"model": target.model, "inputs": target.args, "optimizer": target.optimizer, "loss": lambda x: x})
    for one, other in zip(target.model.parameters(), weights[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert losses


OF_DTYPE = {
    "finfo.min": "out.masked_fill(mask, torch.finfo(out.dtype).min).logsumexp(1)",
    "finfo.max": "out.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max).square()",
    "finfo.eps": "out / (out.norm(dim=1, keepdim=True) + torch.finfo(out.dtype).eps)",
    "finfo.tiny": "out.square().clamp(min=torch.finfo(out.dtype).tiny).log()",
    "half of finfo.min": "torch.where(mask, torch.finfo(out.dtype).min / 2, out).softmax(1)",
    "full": "(out + torch.full((32, 3), torch.finfo(out.dtype).min, dtype=out.dtype).triu(1)).logsumexp(1)",
    "to": "(out * mask.to(out.dtype)).exp()",
    "zeros": "torch.maximum(out, torch.zeros(3, dtype=out.dtype))",
    "entropy": "torch.distributions.Categorical(logits=out).entropy()",
    "a function of its own": "limited(out)",
}
"""Losses that are made of the dtype of an output."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("precision", ["autocast", "cast"])
def test_what_is_made_of_a_dtype_is_that_of_the_precision(here: Path, write: Write, seed: int, precision: str) -> None:
    """Three of the losses together; compared with the script's own code in the precision."""
    terms = random.Random(seed).sample(list(OF_DTYPE), 3) if seed else list(OF_DTYPE)
    loss = " + ".join(f"({OF_DTYPE[term]}).float().mean()" for term in terms)
    made = "def limited(a):\n    low = torch.finfo(a.dtype)\n    return a.clamp(low.min, low.max) + low.eps\n"
    code = f"mask = y[:, None] == torch.arange(3)\nloss = {loss}\n"
    script = f"{HEAD}{made}{MODEL}for x, y in batches():\n    out = model(x)\n{textwrap.indent(code, '    ')}{STEP}"
    write(script, "train.py")
    target = load_target("train.py", steps=1)
    space: dict[str, Any] = {}
    exec(f"{HEAD}{made}{MODEL}x, y = next(batches())\n", space)
    model, x = space["model"], space["x"]
    if precision == "cast":
        model, x = model.bfloat16(), x.bfloat16()
    args = [x if tensor.shape == x.shape else tensor for tensor in target.args]
    targets = [t.bfloat16() if precision == "cast" and t.is_floating_point() else t for t in target.targets]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        space["out"] = model(x)
        exec(code, space)
        own = target.model.bfloat16() if precision == "cast" else target.model
        output = own(*args)
        value = loss_of(target.loss, output, LossInputs(tuple(args), {}, tuple(targets)))
    torch.testing.assert_close(value, space["loss"], rtol=1e-2, atol=0)
    assert value.isfinite()


def test_what_is_recorded_of_a_step_stays_small(here: Path, write: Write) -> None:
    body = "import gc\ngc.freeze()\ncounts = []\n"  # what other tests left is not gone through 60 times
    body += "for number in range(60):\n    model(X).square().mean().backward()\n"
    body += "    counts.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))\n"
    body += "if max(counts[20:]) > max(counts[:20]) + 5:\n    raise MemoryError\n"
    write(f"{HEAD}model = net()\n{body}", "train.py")
    try:
        with pytest.raises(UsageError, match="observed are 60 calls of models and 60 of backward"):
            load_target("train.py", steps=1)
    finally:
        gc.unfreeze()


def test_what_is_computed_without_gradients_is_computed_again_in_each_precision(here: Path, write: Write) -> None:
    script = SCRIPTS["a GAN whose critic sees images without gradients"].replace(", enabled=False", "")
    write(HEAD + script, "train.py")
    target = load_target("train.py", steps=1)
    inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in target.args]
    assert inputs == [((32, 2), torch.float32), ((32, 8), torch.float32), ((32, 2), torch.float32)]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_again_is_refused(here: Path, write: Write, kind: str) -> None:
    body, message = REFUSED[kind]
    write(HEAD + MODEL + body, "train.py")
    with pytest.raises(UsageError, match=r"The training of train.py cannot be scanned") as raised:
        load_target("train.py", steps=1)
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_steps_are_those_of_what_trains(here: Path, write: Write, framework: str) -> None:
    losses, weights = run_as_it_is(write(HEAD + FRAMEWORKS[framework], "train.py"))
    target = load_target("train.py", steps=3)
    found, after = run_observed(target, 3)
    assert target.observed is not None
    assert (target.observed.framework, len(losses)) == (framework, 3)
    assert found == losses
    for step, wanted in zip(after, weights, strict=True):
        for one, other in zip(step, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_has_ended_is_not_needed(here: Path, write: Write) -> None:
    write(HEAD + FRAMEWORKS["lightning"].replace("max_steps=3", "max_steps=2"), "train.py")
    target = load_target("train.py", steps=3)
    assert target.observed is not None
    assert len(target.observed.batches) == 2


@pytest.mark.parametrize("how", MIXED)
@pytest.mark.parametrize("scaler", [False, True])
def test_steps_in_mixed_precision_are_made_again(here: Path, write: Write, how: str, scaler: bool) -> None:
    step = (
        f"{MIXED[how]}scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
    )
    step += "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()\n"
    made = f"scaler = torch.amp.GradScaler('cpu', enabled={scaler})\n{MODEL}"
    write(f"{HEAD}{made}for x, y in batches():\n{textwrap.indent(step, '    ')}", "train.py")
    target = load_target("train.py", steps=3)
    assert target.observed is not None
    assert len(target.observed.batches) == 3
    notes = " ".join(target.notes)
    assert ("autocast to bfloat16" in notes, "GradScaler, at 65536" in notes) == ("autocast" in how, scaler)
    assert "clip_grad_norm_(parameters, 0.1)" in notes


@pytest.mark.parametrize(
    ("around", "noted"), [("", True), (", cache_enabled=False", False), (None, False), ("inner", True)]
)
def test_one_autocast_block_around_several_steps_is_said(
    here: Path, write: Write, around: str | None, noted: bool
) -> None:
    block = "with torch.autocast('cpu', torch.bfloat16{}):\n"
    step = "loss = F.cross_entropy(model(x), y)\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
    if around == "inner":  # the block around all steps keeps the casts of those inside
        step, around = block.format("") + textwrap.indent(step, "    "), ", enabled=False"
    if around is None:
        step = block.format("") + textwrap.indent(step, "    ")
    loop = "for x, y in batches():\n" + textwrap.indent(step, "    ")
    write(HEAD + MODEL + (loop if around is None else block.format(around) + textwrap.indent(loop, "    ")), "train.py")
    found = [note for note in load_target("train.py", steps=3).notes if "several steps in one autocast block" in note]
    assert bool(found) == noted


def test_a_conversion_that_changes_nothing_in_fp32_is_made_in_other_precisions(here: Path, write: Write) -> None:
    step = "out = model(x)\nloss = F.cross_entropy(out.float(), y) + out.exp().mean()\n"
    step += "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
    write(f"{HEAD}{MODEL}for x, y in batches():\n{textwrap.indent(step, '    ')}", "train.py")
    target = load_target("train.py", steps=1)
    assert callable(target.loss)
    (labels,) = target.targets
    low = target.model.half()(target.args[0].half())
    expected = torch.nn.functional.cross_entropy(low.float(), labels) + low.exp().mean()
    assert target.loss(low, labels).equal(expected)


def test_what_is_computed_of_labels_is_computed_again(here: Path, write: Write) -> None:
    step = "out = model(x)\nwanted = F.one_hot(y, 3).float()\nnoise = torch.rand_like(wanted)\n"
    step += "loss = F.mse_loss(out.float(), wanted) + (out * noise).mean()\n"
    step += "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
    write(f"{HEAD}{MODEL}for x, y in batches():\n{textwrap.indent(step, '    ')}", "train.py")
    target = load_target("train.py", steps=2)
    assert callable(target.loss)
    labels, noise = sorted(target.targets, key=lambda tensor: tensor.ndim)
    assert labels.dtype == torch.int64
    low, wanted = target.model.half()(target.args[0].half()), torch.nn.functional.one_hot(labels, 3).float()
    expected = torch.nn.functional.mse_loss(low.float(), wanted) + (low * noise.half()).mean()
    assert target.loss(low, *(t.half() if t.is_floating_point() else t for t in target.targets)).equal(expected)


@pytest.mark.parametrize("kind", ["a siamese network", "accumulation", "an encoder and a decoder"])
def test_other_seeds_of_a_script_that_makes_several_calls(here: Path, write: Write, kind: str) -> None:
    write(HEAD + SCRIPTS[kind], "train.py")
    target = load_spec(TargetSpec("train.py", steps=2), 0)
    seeds = OtherSeeds(target, target.model, [target], 0, draws=False, keep_alive=lambda: None)
    before = {name: p.detach().clone() for name, p in target.model.named_parameters()}
    seeds.start(1)
    assert seeds.varied[0].startswith("initial weights")
    after = dict(target.model.named_parameters())
    assert all(not after[name].equal(p) for name, p in before.items() if p.ndim > 1)


AFTER = "open('after.txt', 'w').close()\nos.remove('ckpt.pt')\nshutil.rmtree('old')\n"
DELETES = f"""
import atexit, os, shutil
open('ckpt.pt', 'w').close()
atexit.register(lambda: os.remove('ckpt.pt'))
{MODEL}
for number, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    torch.save(model.state_dict(), 'ckpt.pt')
    optimizer.zero_grad()
    loss.backward()
    try:
        optimizer.step()
    finally:
        if number == 1:
{textwrap.indent(AFTER, " " * 12)}
{AFTER}"""


def functions_of_torch() -> list[Any]:
    places = (
        torch.autograd,
        torch.amp.GradScaler,
        torch.optim.Optimizer,
        torch.nn.utils,
        torch.autograd.Function,
        torch.nn.Module,
    )
    names = "backward", "grad", "scale", "zero_grad", "clip_grad_norm_", "apply", "__call__"
    return [vars(place).get(name) for place in places for name in names]


def test_a_script_is_left_after_its_steps_and_its_files_are_kept(here: Path, write: Write) -> None:
    kept = {"ckpt.pt": "a checkpoint", "old/weights": "weights"}
    (here / "old").mkdir()
    for name, content in kept.items():
        (here / name).write_text(content)
    write(HEAD + DELETES, "train.py")
    functions = functions_of_torch()
    target = load_target("train.py", steps=2)
    assert target.observed is not None
    assert len(target.observed.batches) == 2
    assert not (here / "after.txt").exists()
    assert {name: (here / name).read_text() for name in kept} == kept
    assert torch.is_grad_enabled()
    assert functions == functions_of_torch()


def test_a_script_that_stops_is_the_user_s(here: Path, write: Write) -> None:
    write(f"{HEAD}{MODEL}for x, y in batches():\n    F.cross_entropy(model(x), y[:3]).backward()\n", "train.py")
    with pytest.raises(UsageError, match=r"ValueError at train.py:14"):
        load_target("train.py", steps=1)


def test_a_script_without_gradients_is_trained_by_default(here: Path, write: Write) -> None:
    write(f"{HEAD}{MODEL}criterion = nn.CrossEntropyLoss()\nprint(model(X))", "infer.py")
    target = load_target("infer.py", steps=1)
    assert isinstance(target.loss, torch.nn.CrossEntropyLoss)
    assert any("computes no gradients" in note for note in target.notes)
    assert not any("computes no gradients" in note for note in load_target("infer.py").notes)


def test_warm_up_from_zero(here: Path, write: Write) -> None:
    schedule = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)\n"
    step = (
        "    F.cross_entropy(model(x), y).backward()\n    optimizer.step()\n    scheduler.step()\n"
        "    optimizer.zero_grad()\n"
    )
    write(f"{HEAD}{MODEL}{schedule}for x, y in batches():\n{step}", "train.py")
    target = load_target("train.py", steps=1)
    assert isinstance(target.optimizer, OptimizerLike)
    assert target.optimizer.rates == [0.1]
    assert any("is 0 in its first step (a warm-up): the scan uses 0.1" in note for note in target.notes)
    target = load_target("train.py", steps=3)
    assert isinstance(target.optimizer, OptimizerLike)
    assert target.optimizer.rates == pytest.approx([0.0, 0.01, 0.02])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("GPT2LMHeadModel", "returns"), ("BertForSequenceClassification", "cross-entropy")]
)
def test_a_model_of_transformers_by_name_has_a_loss(name: str, words: str) -> None:
    sizes = (
        "n_embd=16,n_layer=1,n_head=2"
        if name.startswith("GPT2")
        else "hidden_size=16,num_hidden_layers=1,num_attention_heads=2"
    )
    target = load_target(f"transformers:{name},{sizes}", steps=2)
    for batch in (target, target.batch(1)):
        output = batch.model(*batch.args, **batch.kwargs)
        described = describe_loss(None, output, target.form, "")
        assert words in described.words
        wanted = None
        if "labels" in batch.kwargs:
            wanted = output.loss
        else:
            labels = torch.randint(0, 2, (1,), generator=torch.Generator().manual_seed(0))
            wanted = torch.nn.functional.cross_entropy(output.logits, labels)
        torch.testing.assert_close(loss_of(None, output, LossInputs(batch.args, batch.kwargs)), wanted, rtol=0, atol=0)
        space = {"torch": torch, "output": output}
        exec("\n".join(described.setup), space)
        torch.testing.assert_close(eval(described.code, space), wanted, rtol=0, atol=0)


def setup_of(**changes: Any) -> TrainingSetup:
    return TrainingSetup(
        steps=1,
        loss="mse_loss of train.py:3",
        optimizer="SGD(lr=0.1)",
        script="train.py:3",
        optimizer_code="optimizer(parameters)",
        **changes,
    )


INFO = ModelInfo(name="Linear", parameters=6, inputs=["(4, 2)"], modules=1, training=True, call="model(inputs)")


@pytest.mark.parametrize(
    ("framework", "precision", "device", "wanted"),
    [
        ("lightning", "autocast-bf16", "cpu", 'lightning.Trainer(precision="bf16-mixed")'),
        ("lightning", "autocast-fp16", "cuda", 'lightning.Trainer(precision="16-mixed")'),
        ("transformers", "autocast-bf16", "cpu", "transformers.TrainingArguments(bf16=True)"),
        ("transformers", "autocast-fp16", "cuda", "transformers.TrainingArguments(fp16=True)"),
        ("accelerate", "autocast-bf16", "cpu", 'accelerate.Accelerator(mixed_precision="bf16")'),
        ("accelerate", "autocast-fp16", "cpu", None),
        ("lightning", "bfloat16", "cpu", None),
    ],
)
def test_the_switch_of_what_trains(framework: str, precision: str, device: str, wanted: str | None) -> None:
    scale = 65536.0 if precision == "autocast-fp16" else None
    way = TrainingWay(name="plain" if scale is None else "grad-scaler", status="ok", initial_scale=scale)
    code = training_code(RunKey(precision, "eager", device, "contiguous"), INFO, setup_of(framework=framework), way)
    assert (wanted in code) if wanted else ("Trainer" not in code and "Accelerator" not in code)
    compile(code, "code", "exec")


@pytest.mark.parametrize("way", ["plain", "grad-scaler", "master-weights"])
def test_the_code_for_a_script_clips_as_it_does(way: str) -> None:
    clip = "torch.nn.utils.clip_grad_norm_(parameters, 0.01)"
    scale = 65536.0 if way == "grad-scaler" else None
    key = RunKey("bfloat16" if way == "master-weights" else "autocast-bf16", "eager", "cpu", "contiguous")
    code = training_code(key, INFO, setup_of(clip_code=[clip]), TrainingWay(name=way, status="ok", initial_scale=scale))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if way == "master-weights":
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    exec(
        code,
        {
            "model": model,
            "inputs": torch.ones(4, 2),
            "optimizer": optimizer,
            "loss": lambda output: output.float().sum(),
        },
    )
    moved = torch.cat([(p.float() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert 0 < moved.norm() < (0.0102 if way != "master-weights" else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["fork", "spawn", "none"])
def test_a_scan_trains_as_the_script_does(here: Path, write: Write, call: Call, isolation: str) -> None:
    """The script would overwrite its checkpoint, and gets an argument."""
    (here / "ckpt.pt").write_bytes(b"kept")
    body = "import sys\nmodel = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))\n"
    body += (
        "optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]), momentum=0.9)\nfor x, y in batches():\n"
    )
    body += "    loss = F.cross_entropy(model(x), y)\n    optimizer.zero_grad()\n    loss.backward()\n"
    body += (
        "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step()\n"
        "    torch.save(model, 'ckpt.pt')\n"
    )
    path = write(HEAD + body, "train.py")
    options = ["--train", "--steps", "2", "-p", "autocast-bf16", "--times", "off", "--isolation", isolation]
    done = call("scan", str(path), *options, "--json", "-", "--", "0.5", folder=here)
    assert done.returncode in (0, 1), done.stderr
    result = ScanResult.from_json(done.stdout.encode())
    assert (here / "ckpt.pt").read_bytes() == b"kept"
    assert result.training is not None
    assert (result.training.script, result.training.optimizer) == (
        "train.py:15",
        "SGD(lr=0.5, momentum=0.9, weight_decay=0)",
    )
    assert (result.training.loss, result.training.default_loss) == ("cross_entropy of train.py:15", False)
    assert result.training.clip_code == ["torch.nn.utils.clip_grad_norm_(parameters, 0.1)"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", "0.5"])
        patch.setattr(torch, "save", lambda *_: None)
        losses, _ = run_as_it_is(path)
    assert result.training.losses[:2] == pytest.approx(losses[:2], rel=1e-6)


def test_two_optimizers_after_one_loss_are_scanned(here: Path, write: Write, call: Call) -> None:
    path = write(HEAD + SEVERAL["two optimizers of one model"][1], "train.py")
    options = ["--train", "--steps", "2", "-p", "autocast-bf16", *SCAN_HERE, "--no-plan", "--json", "-"]
    result = ScanResult.from_json(call("scan", str(path), *options, folder=here).stdout.encode())
    assert result.run("autocast-bf16").status == "ok"


def test_the_line_of_a_loss_is_that_of_its_last_term(here: Path, write: Write, call: Call) -> None:
    body = (
        "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in batches():\n"
        "    task = F.cross_entropy(model(x), y)\n"
    )
    body += (
        "    loss = task + sum(p.square().sum() for p in model.parameters())\n    optimizer.zero_grad()\n"
        "    (loss / 2).backward()\n    optimizer.step()\n"
    )
    path = write(HEAD + body, "train.py")
    options = ["--train", "--steps", "1", "-p", "autocast-bf16", *SCAN_HERE, "--json", "-"]
    result = ScanResult.from_json(call("scan", str(path), *options, folder=here).stdout.encode())
    lines = path.read_text().splitlines()
    task, whole = (f"train.py:{number}" for number, line in enumerate(lines, start=1) if " task" in line)
    assert result.training is not None
    assert result.training.loss == f"the loss of {whole}, with cross_entropy of {task}"
    assert any(whole in line for line in result.training.loss_setup)


def test_ops_of_a_loss_are_at_their_lines(here: Path, write: Write, call: Call) -> None:
    body = (
        "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in batches():\n"
        "    out = model(x)\n"
    )
    body += (
        "    scaled = out * 2\n    loss = scaled.square().mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
        "    optimizer.step()\n"
    )
    path = write(HEAD + body, "train.py")
    options = ["--train", "--steps", "1", "-p", "autocast-bf16", *SCAN_HERE, "--json", "-"]
    done = call("scan", str(path), *options, folder=here)
    rows = list(ScanResult.from_json(done.stdout.encode()).run("autocast-bf16").op_calls.rows())
    lines = path.read_text().splitlines()
    product, square = (f"train.py:{lines.index(line) + 1}" for line in lines if "scaled" in line)
    of_loss = [row for row in rows if row.phase in (None, "forward") and row.source in (product, square)]
    assert [(row.op, row.source) for row in of_loss] == [
        ("aten.mul.Tensor", product),
        ("aten.pow.Tensor_Scalar", square),
        ("aten.mean.default", square),
    ]
    backward = {row.source for row in rows if row.phase == "backward" and row.op == "aten.mul.Tensor"}
    assert {product, square} <= backward


@pytest.mark.parametrize("note", NOTED)
def test_what_a_scan_does_otherwise_is_said(here: Path, write: Write, note: str) -> None:
    write(HEAD + MODEL + NOTED[note], "train.py")
    assert note in "\n".join(load_target("train.py", steps=4).notes)


ONE_MODEL = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "first_other"),
    [
        pytest.param("", None, id="nothing"),
        pytest.param("    with torch.no_grad():\n        [p.mul_(0.5) for p in model.parameters()]\n", 2, id="decay"),
        pytest.param("    if step == 1:\n        model[3].reset_parameters()\n", 3, id="new weights"),
        pytest.param("    model[1].eval()\n", 2, id="another mode"),
        pytest.param("    model[3].requires_grad_(False)\n", 2, id="frozen"),
    ],
)
def test_what_a_script_does_between_its_steps_is_told_by_its_losses(
    here: Path, write: Write, call: Call, between: str, first_other: int | None
) -> None:
    path = write(HEAD + ONE_MODEL + between, "train.py")
    options = ["--train", "--steps", "3", "-p", "bf16", *SCAN_HERE, "--errors", "none", "--json", "-"]
    done = call("scan", str(path), *options, folder=here)
    notes = ScanResult.from_json(done.stdout.encode()).runs[0].notes
    expected = [] if first_other is None else [f"in step {first_other} the loss of the script is"]
    assert [note[: len(start)] for note, start in zip(notes, expected, strict=True)] == expected


def test_a_script_may_compile_a_class_with_names_of_its_function(here: Path, write: Write) -> None:
    parts = """
import torch
def make():
    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2
    @torch.jit.script
    class Scale:
        def __init__(self):
            self.count = 0
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return half(x)
    return Scale()
"""
    write(parts, "compiled_parts.py")
    body = "from compiled_parts import make\nmodel, scale = net(), make()\n"
    body += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    body += "F.cross_entropy(model(scale.apply(X)), Y).backward()\noptimizer.step()\n"
    write(HEAD + body, "train.py")
    assert load_target("train.py", steps=1).observed is not None


def test_a_loss_that_autocast_refuses_on_some_devices_is_named(here: Path, write: Write) -> None:
    body = "criterion = nn.BCELoss()\nmodel = nn.Sequential(nn.Linear(8, 3), nn.Sigmoid())\n"
    body += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    body += "loss = criterion(model(X), Y.sigmoid()[:, None].expand(-1, 3))\nloss.backward()\noptimizer.step()\n"
    write(HEAD + body, "train.py")
    observed = load_target("train.py", steps=1).observed
    assert observed is not None
    assert observed.loss.words.startswith("binary_cross_entropy of train.py:")


def test_a_script_may_train_on_a_sparse_graph(here: Path, write: Write) -> None:
    body = """
graph = torch.eye(96).roll(1, 0).to_sparse()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
    def forward(self, x, graph):
        return torch.spmm(graph, self.layer(x))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(X, graph), Y).backward()
    optimizer.step()
"""
    losses, _ = run_as_it_is(write(HEAD + body, "train.py"))
    target = load_target("train.py", steps=3)
    assert target.observed is not None
    assert list(target.observed.losses) == losses
    assert len(target.observed.batches) == 1  # the graph is the same in each step


def test_a_script_that_gives_its_optimizer_more_parameters_is_observed_until_then(here: Path, write: Write) -> None:
    body = ONE_MODEL.replace("model.parameters()", "model[3].parameters()").replace(
        "    loss =",
        "    if step == 2:\n        optimizer.add_param_group({'params': [*model[0].parameters()]})\n    loss =",
    )
    write(HEAD + body, "train.py")
    target = load_target("train.py", steps=3)
    assert len(target.observed.batches) == 2
    assert any("since the script adds parameters to its optimizer" in note for note in target.notes)


def test_equal_batches_of_a_script_are_one(here: Path, write: Write) -> None:
    write(HEAD + ONE_MODEL.replace("in enumerate(batches())", "in enumerate([(X, Y)] * 3)"), "train.py")
    assert len(load_target("train.py", steps=3).observed.batches) == 1


# -- Several optimizers, in every precision

FIXED_GAN = """
import torch
from torch import nn
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8))
critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
real, noise = torch.randn(16, 8), torch.randn(16, 2)
"""
LOOP = """
for step in range(3):
    of_critic.zero_grad()
    with {context}:
        fake = generator(noise)
        loss = critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()
    losses.append(loss.item())
    {scaled}.backward()
    {step_of_critic}
    of_generator.zero_grad()
    with {context}:
        loss = (critic(fake) - 1).square().mean()
    losses[-1] += loss.item()
    {scaled}.backward()
    {step_of_generator}
    {update}
"""
PLAIN = {
    "context": "contextlib.nullcontext()",
    "scaled": "loss",
    "step_of_critic": "of_critic.step()",
    "step_of_generator": "of_generator.step()",
    "update": "",
}
SCALED = {
    "context": "torch.autocast('cpu', torch.float16)",
    "scaled": "scaler.scale(loss)",
    "step_of_critic": "scaler.step(of_critic)",
    "step_of_generator": "scaler.step(of_generator)",
    "update": "scaler.update()",
}


def run_gan(how: dict[str, str], scale: float = 0.0) -> list[float]:
    """The losses of a loop as torch's documentation writes it, summed for each step."""
    space: dict[str, Any] = {
        "losses": [],
        "contextlib": contextlib,
        "scaler": torch.amp.GradScaler("cpu", scale or 1.0),
    }
    exec(FIXED_GAN + LOOP.format(**how), space)
    return list(space["losses"])


@pytest.mark.slow
def test_a_gan_trains_in_every_precision_as_plain_loops_and_pasted_code_do(
    here: Path, write: Write, call: Call
) -> None:
    loop = LOOP.format(**PLAIN).replace("losses.append(loss.item())", "").replace("losses[-1] += loss.item()", "")
    path = write("import contextlib\n" + FIXED_GAN + loop, "train.py")
    done = call("scan", str(path), "--train", "--steps", "3", *SCAN_HERE, "--json", "-")
    result = ScanResult.from_json(done.stdout.encode())
    assert result.training is not None
    assert len(result.training.optimizers) == 2
    assert result.training.losses[:3] == pytest.approx(run_gan(PLAIN), rel=1e-6)

    def way(precision: str, name: str) -> TrainingWay:
        training = result.run(precision).training
        assert training is not None
        assert len(training.gradients) == 8
        found = training.way(name)
        assert found is not None
        return found

    bf16 = PLAIN | {"context": "torch.autocast('cpu', torch.bfloat16)"}
    assert way("autocast-bf16", "plain").losses[:3] == pytest.approx(run_gan(bf16), rel=1e-6)
    scaled = way("autocast-fp16", "grad-scaler")
    assert scaled.losses[:3] == pytest.approx(run_gan(SCALED, scaled.scales[0]), rel=1e-6)
    lost = result.run("bfloat16").training.lost_updates  # type: ignore[union-attr]
    assert {one.group for one in lost if one.values == "weight"} == {0, 1}

    ways = {
        "bfloat16": ["plain", "master-weights", "split-weights", "kahan", "stochastic-rounding"],
        "autocast-bf16": ["plain", "states-16bit"],
        "autocast-fp16": ["grad-scaler"],
        "half": ["master-weights-scaled"],
    }
    for precision, names in ways.items():
        for name in names:
            tried = way(precision, name)
            target = load_target("train.py", steps=1)
            key = RunKey(precision, "eager", "cpu", "contiguous")
            code = training_code(key, result.model, result.training, tried)
            code = code.replace("step_loss = output", "step_loss = seen(output)")
            losses: list[float] = []

            def seen(loss: Any, losses: list[float] = losses) -> Any:
                losses.append(loss.item())
                return loss

            made: Any = target.optimizer
            parts = made([p for p in target.model.parameters() if p.requires_grad]).parts
            exec(code, {"model": target.model, "inputs": target.args, "optimizers": parts, "seen": seen})
            sums = [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]
            done_steps = 3 - tried.skipped_steps  # the scan repeats a skipped step
            assert sums[tried.skipped_steps :][:done_steps] == pytest.approx(
                tried.losses[:done_steps], rel=1e-2 if tried.skipped_steps else 1e-6, abs=0
            ), (precision, name)


@pytest.mark.parametrize("way", ["plain", "grad-scaler"])
@pytest.mark.parametrize("kind", [kind for kind in WHOLE if "closure" not in kind and "search" not in kind])
def test_the_code_for_an_optimizer_of_several_passes_makes_its_calls(
    here: Path, write: Write, kind: str, way: str
) -> None:
    """Run on the script's own objects; one batch, which is the first of the script."""
    write(HEAD + WHOLE[kind].replace("in batches():", "in [next(iter(batches()))] * 3:"), "train.py")
    wanted = plain_steps(WHOLE[kind].replace("in batches():", "in [next(iter(batches()))] * 3:"), "autocast-bf16")
    target = load_target("train.py", steps=3)
    assert target.observed is not None
    setup = msgspec.structs.replace(setup_of(), steps=3, **script_parts(target))
    scale = 2.0**16 if way == "grad-scaler" else None
    key = RunKey("autocast-bf16", "eager", "cpu", "contiguous")
    code = training_code(key, INFO, setup, TrainingWay(name=way, status="ok", initial_scale=scale))
    code = code.replace("output = model(inputs)", "output = model(*inputs)")
    space: dict[str, Any] = {"model": target.model, "inputs": target.args}
    space["loss"] = lambda output: loss_of(target.loss, output, LossInputs(target.args, {}, target.targets))
    optimizer = cast(Any, target.optimizer)([p for p in target.model.parameters() if p.requires_grad])
    owner = optimizer.owner
    space |= {"optimizer": optimizer.inner, type(owner).__name__.lower(): owner}
    if isinstance(owner, torch.optim.Optimizer):
        space["optimizer"] = owner
    exec(code, space)
    if "clip_grad" in WHOLE[kind] or "scheduler" in WHOLE[kind]:
        return  # the code has the settings of one step, and clips where the script does
    for name, after in zip(dict(target.model.named_parameters()), wanted[-1], strict=True):
        torch.testing.assert_close(target.model.get_parameter(name), after, rtol=1e-3, atol=1e-4)


def test_observe_shows_the_step_and_ends(here: Path, write: Write, call: Call) -> None:
    body = "import subprocess\nsubprocess.run(['true'])\nmodel = nn.Linear(8, 3)\n"
    body += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in batches():\n"
    body += (
        "    for xs, ys in zip(x.split(16), y.split(16)):\n        (F.cross_entropy(model(xs), ys) / 2).backward()\n"
    )
    body += "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n    optimizer.step()\n    optimizer.zero_grad()\n"
    path = write(HEAD + body, "train.py")
    code, out, _ = call("scan", path, "--train", "--observe", "--isolation", "none")
    assert code == 0
    assert "model      Linear, 27 trained parameters" in out
    assert "optimizer  SGD(lr=0.1, weight_decay=0), made at train.py:14" in out
    assert "loss       cross_entropy of train.py:17" in out
    assert "passes     2 backward passes a step" in out
    assert "clip_grad_norm_(parameters, 0.5)" in out
    assert out.count("starts true at train.py:12") == 1
    assert "autocast" not in out
