"""A way to train is one file: found by name, then tried, judged, reported, recommended and printed as code."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import ROOT
from torch import nn
from training_cases import a_result, a_trained, a_way
from training_loops import mean_square, sgd, trained, training

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.whole_optimizer import Clip, OptimizerLike, settings_of
from lowprec_check.features.training import run as training_run
from lowprec_check.features.training import ways
from lowprec_check.features.training.advice import training_code
from lowprec_check.features.training.run import Training
from lowprec_check.features.training.statements import power_of_two
from lowprec_check.report.registry import FORMATS, render
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.training import Divergence, LostUpdates, TrainingRun, TrainingWay
from lowprec_check.schema.ways_to_train import WAYS, way_named, ways_of

TOY = '''
from lowprec_check.schema.ways_to_train import WayToTrain


def twice():
    import torch

    class Twice:
        """Makes each step of the optimizer twice, on copies in fp32."""

        def __init__(self, parameters, make_optimizer):
            self.parameters = [p for p in parameters if p.requires_grad]
            self.wide = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
            self.optimizer = make_optimizer(self.wide)

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

        def backward(self, loss):
            loss.backward()

        @torch.no_grad()
        def step(self):
            for parameter, wide in zip(self.parameters, self.wide):
                wide.grad = parameter.grad.float()
            self.optimizer.step()
            self.optimizer.step()
            for parameter, wide in zip(self.parameters, self.wide):
                parameter.copy_(wide)

    return Twice


WAYS = (
    WayToTrain(
        name="twice", words="two steps at once", summary="each step is made twice.", order=55, kinds=("cast",),
        updater=twice, weights=lambda updates: updates.wide, is_random=True,
    ),
)
'''
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more file among those of the ways; nothing else is told of it."""
    (tmp_path / "toy_way.py").write_text(TOY, encoding="utf-8")
    monkeypatch.setattr(ways, "__path__", [*ways.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    vars(WAYS).pop("_items", None)
    yield
    vars(WAYS).pop("_items", None)
    sys.modules.pop(f"{ways.__name__}.toy_way", None)
    vars(ways).pop("toy_way", None)


@pytest.mark.usefixtures("toy")
def test_a_way_in_a_file_is_tried_reported_and_printed() -> None:
    result = training(net(), X, "bfloat16,half,autocast-bf16", steps=3, optimizer=sgd(0.01), isolation="fork")
    run, found = trained(result, "bfloat16")
    names = ["plain", "master-weights", "twice", "split-weights", "kahan", "stochastic-rounding"]
    assert [way.name for way in found.ways] == names
    assert [way.name for way in trained(result, "half")[1].ways][3] == "twice"
    assert "twice" not in [way.name for way in trained(result, "autocast-bf16")[1].ways]
    way = found.way("twice")
    assert way is not None
    assert way.state_bytes == 6 * sum(parameter.numel() for parameter in net().parameters())
    assert way.progress == pytest.approx(2.0, abs=0.2)
    for name in ("text", "markdown", "html"):
        assert "two steps at once" in FORMATS.get(name).render_verbose(result), name
    random = "two steps at once, stochastic rounding or 8-bit optimizer states and stochastic rounding"
    assert f"not judged with {random}" in render(result, "html")

    assert result.training is not None
    code = training_code(run.key, result.model, result.training, way)
    assert "\nclass Twice:\n" in code
    assert "\nupdater = Twice(parameters, optimizer)\n" in code
    space: dict[str, Any] = {"model": net(), "inputs": X, "loss": mean_square, "optimizer": sgd(0.01)}
    exec(compile(code, "pasted.py", "exec"), space)
    assert space["step_loss"].item() == way.losses[-2]


@pytest.mark.usefixtures("toy")
def test_a_way_in_a_file_is_recommended_where_it_passes() -> None:
    outside = Divergence(step=4, what="weights", value=0.5, limit=0.2)
    lost = [LostUpdates(name="w", values="weight", elements=9, lost=0.5, updates=9)]
    fails, other = a_way(status="inaccurate", divergence=outside, lost_updates=0.5), a_way("kahan", status="error")
    result = conclude(a_result(a_trained("bfloat16", fails, a_way("twice"), other, lost_updates=lost)))
    assert result.recommendation is not None
    assert result.recommendation.way == "twice"
    assert "class Twice:" in result.recommendation.code
    assert (
        "It trains with two steps at once; as it is, rounding loses 50 % of the updates of weights"
        in result.recommendation.reason
    )
    assert [found.help for found in result.diagnostics if found.code == "LP503"] == [
        "passes with two steps at once (3.0 MiB) (weights and optimizer state as it is: 3.0 MiB)"
    ]


def test_a_way_that_is_not_installed_is_shown_by_its_name() -> None:
    assert way_named("twice").words == "twice"
    fails = a_way(status="error")
    result = conclude(a_result(a_trained("bfloat16", fails, a_way("twice"))))
    assert result.recommendation is None
    assert "passes with twice" in render(result, "text")


def test_each_way_is_declared_in_full() -> None:
    for way in WAYS:
        assert way.summary.endswith(".")
        assert way.words
        assert (way.updater is None) == (not way.class_code())
        assert any(way.suits(precision) for precision in PRECISIONS)
    assert [way.order for way in WAYS] == sorted({way.order for way in WAYS})


def test_the_documentation_describes_each_way() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for way in WAYS:
        assert f"- **{way.words}** (`{way.name}`): {way.summary}\n" in text


def test_one_autocast_has_the_scale_of_the_usual_way() -> None:
    usual, _, around, *_ = ways_of(PRECISIONS.get("autocast-fp16"), 2)
    assert (usual.name, around.name, around.scale) == ("grad-scaler", "one-autocast", usual.scale)
    assert [way.name for way in ways_of(PRECISIONS.get("autocast-fp16"), 1)] == ["grad-scaler", "plain", *STATES]


# -- States of optimizers in 16 and 8 bits

STATES = ("states-16bit", "states-8bit")
WIDE = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.99))


@pytest.mark.slow
def test_states_in_fewer_bits_are_smaller_and_the_code_gives_the_same_bits() -> None:
    pytest.importorskip("torchao.optim")
    result = training(wide(), WIDE, "autocast-bf16,autocast-fp16,bfloat16", steps=4, optimizer=adamw, isolation="fork")
    assert result.training is not None
    size = sum(p.numel() for p in wide().parameters())
    for precision in ("autocast-bf16", "autocast-fp16"):
        run, found = trained(result, precision)
        first, small, smaller = found.ways[0], *(found.way(name) for name in STATES)
        assert small is not None
        assert smaller is not None
        counters = first.state_bytes - 12 * size if first.state_bytes else 0  # the steps that Adam counts
        assert small.state_bytes == 8 * size + counters
        assert 0.45 < (smaller.state_bytes or 0) / (12 * size) < 0.65
        for way in (small, smaller):
            assert (way.status, way.initial_scale) == ("ok", first.initial_scale)
            code = training_code(run.key, result.model, result.training, way)
            space: dict[str, Any] = {"model": wide(), "inputs": WIDE, "loss": mean_square, "optimizer": adamw}
            losses = []
            code = code.replace("    updater.backward", "    losses.append(step_loss.item())\n    updater.backward")
            exec(compile(code, "pasted.py", "exec"), space | {"losses": losses})
            assert losses[way.skipped_steps :] == way.losses[: 4 - way.skipped_steps]
    way = trained(result, "bfloat16")[1].way("states-8bit-stochastic")
    assert way is not None
    assert (way.status, (way.state_bytes or 0) < 6 * size) == ("ok", True)
    assert "with 8-bit optimizer states, which passes too, they take" in result.recommendation.reason  # type: ignore[union-attr]


def test_a_state_in_fewer_bits_clips_and_follows_a_schedule() -> None:
    pytest.importorskip("torchao.optim")
    made = adamw(wide().parameters())
    clip = Clip(nn.utils.clip_grad_norm_, [id(p) for p in made.param_groups[0]["params"]], (1e-3,), {})
    first, second = ([dict(settings, lr=rate) for settings in settings_of(made)] for rate in (1e-2, 0.0))
    for name in STATES:
        model = wide()
        given = adamw(model.parameters())
        like = OptimizerLike(
            given, model, [clip._replace(parameters=[id(p) for p in model.parameters()])], None, [first, second]
        )
        updates = WAYS.get(name).updates(model, like)
        weights = []
        for _ in range(2):
            updates.zero_grad()
            updates.backward(model(WIDE).square().mean())
            updates.step()
            norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
            assert norm == pytest.approx(1e-3, rel=1e-3)
            weights.append([p.detach().clone() for p in model.parameters()])
        assert all(a.equal(b) for a, b in zip(*weights, strict=True)), name
        assert not any(a.equal(b) for a, b in zip(weights[0], wide().parameters(), strict=True)), name


def test_why_a_way_is_not_tried_is_shown() -> None:
    result = training(net(), X, "autocast-bf16", steps=2, optimizer=sgd(0.01), isolation="fork")
    assert trained(result, "autocast-bf16")[1].untried == {
        "states-16bit": "SGD without momentum keeps no state",
        "states-8bit": "torchao has Adam and AdamW, not SGD",
    }
    shown = " ".join(FORMATS.get("text").render_verbose(result).split())
    assert "not tried: 16-bit optimizer states (SGD without momentum keeps no state)" in shown
    result = training(net(), X, "autocast-bf16", steps=2, optimizer=sgd(0.01, momentum=0.9), isolation="fork")
    assert trained(result, "autocast-bf16")[1].way("states-16bit").status == "ok"  # type: ignore[union-attr]
    assert WAYS.get("states-8bit").why_not(adamw(net().parameters())) == (
        "no weight has a multiple of 256 elements, at least 4096"
    )


# -- The scale of GradScaler in a training that is longer than the scan


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_the_scale_grows_as_a_long_training_shows(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """``GradScaler`` doubles its scale after 3 steps instead of 2000; the weights stay, and so do the gradients."""
    result = training(net(), X, "autocast-fp16", steps=2, optimizer=sgd(1e-9), loss=lambda y: y.square().sum() * size)
    found = trained(result, "autocast-fp16")[1].ways[0]
    assert found.scales == [found.final_scale] * 2
    (said,) = (one.text for one in result.statements if one.kind == "scale-growth")
    model = net()
    optimizer = sgd(1e-9)(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=found.final_scale or 0.0, growth_interval=3)
    scales = []
    for _ in range(80):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(X).square().sum() * size
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
    highest = scales[-1] if scales[-2] > scales[-1] else sorted(scales)[-1] / 2
    assert scales[-8:].count(2 * highest) == 2, "two of eight steps are skipped: one after three"
    assert f"{'stays near' if highest == found.final_scale else 'to'} {power_of_two(highest)}" in said
    if highest > (found.final_scale or 0.0):
        assert f"in {scales.index(highest) // 3 * 2000:,} steps" in said


@pytest.mark.parametrize(("scales", "wanted"), [([1024.0], 1024.0), ([], None)])
def test_an_explanation_that_is_tried_again_has_the_scale_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, scales: list[float], wanted: float | None
) -> None:
    trained = TrainingWay(
        name="grad-scaler", status="ok", skipped_steps=6, scales=scales, initial_scale=65536.0, final_scale=1024.0
    )
    so_far = SimpleNamespace(run=SimpleNamespace(training=TrainingRun(ways=[trained])))
    task = object.__new__(RunTask)
    object.__setattr__(task, "so_far", so_far)
    explained = []
    ready = SimpleNamespace(precision=PRECISIONS.get("autocast-fp16"))
    monkeypatch.setattr(training_run, "in_training", lambda *_: contextlib.nullcontext(ready))
    monkeypatch.setattr(training_run, "TrainingStep", lambda _target, _ready, way, _model: explained.append(way))
    monkeypatch.setattr(training_run, "with_step", lambda ready, _step: ready)
    target = cast(Any, SimpleNamespace(optimizer=None, model=None))
    with Training(steps=3).explained(task, target, cast(Any, SimpleNamespace(_replace=lambda **_: None))):
        assert [way.scale for way in explained] == [wanted]
