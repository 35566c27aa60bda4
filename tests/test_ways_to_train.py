"""A way to train is one file: found by name, then tried, judged, reported, recommended and printed as code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn
from training_cases import a_result, a_trained, a_way
from training_loops import mean_square, sgd, trained, training

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.training_advice import training_code
from lowprec_check.engine.train import ways
from lowprec_check.report.registry import FORMATS, render
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.training import Divergence, LostUpdates
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
    assert "not judged with two steps at once or stochastic rounding" in render(result, "html")

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
        "With two steps at once; as it is, rounding loses 50 % of the updates of weights"
        in result.recommendation.reason
    )
    assert [found.help for found in result.diagnostics if found.code == "LP503"] == [
        "use two steps at once (3.0 MiB) (weights and optimizer state as it is: 3.0 MiB)"
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
    usual, *_, around = ways_of(PRECISIONS.get("autocast-fp16"), 2)
    assert (usual.name, around.name, around.scale) == ("grad-scaler", "one-autocast", usual.scale)
    assert [way.name for way in ways_of(PRECISIONS.get("autocast-fp16"), 1)] == ["grad-scaler", "plain"]
