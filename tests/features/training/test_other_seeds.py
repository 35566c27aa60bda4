"""fp32 runs from other seeds: what differs in them, and what a few steps tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import SETUP, a_result, a_trained, a_way
from training_loops import sgd, trained, training

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.target_source import load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.training.spread import OtherSeeds, Samples, Spread, Trajectory
from lowprec_check.features.training.steps import batches_of
from lowprec_check.schema.training import Divergence

FACTORY = """\
import torch
from torch import nn
def make_model():
    torch.manual_seed(3)
    return nn.Linear(4, 2)
def inputs(batch=0):
    return torch.full((8, 4), float(batch))
"""
ZEROS = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for parameter in model[0].parameters():
    parameter.requires_grad_(False)
nn.init.zeros_(model[2].weight)
def inputs(batch=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
"""
TRAINED = """\
import torch
from torch import nn
model = nn.Linear(4, 2)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5)
inputs = torch.randn(8, 4)
def loss(output):
    return output.square().mean()
"""


def seeds_of(target: Target, steps: int = 2, *, draws: bool = False) -> OtherSeeds:
    return OtherSeeds(target, target.model, batches_of(target, steps), 0, draws=draws, keep_alive=lambda: None)


def loaded(tmp_path: Path, text: str) -> Target:
    (tmp_path / "seeded.py").write_text(text, encoding="utf-8")
    return load_spec(TargetSpec(str(tmp_path / "seeded.py")), 0)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_factory_that_sets_its_seed_makes_other_weights_and_the_next_batches_follow(tmp_path: Path) -> None:
    target = loaded(tmp_path, FACTORY)
    seeds, found = seeds_of(target), [values(target.model)]
    batches = []
    for number in (1, 2):
        batches += seeds.start(number)
        found.append(values(target.model))
    assert len({weight.sum().item() for weight, _ in found}) == 3
    assert [batch.args[0][0, 0].item() for batch in batches] == [2, 3, 4, 5]
    assert seeds.varied == ["initial weights", "batches"]
    torch.manual_seed(5)  # the seed of the file is its own again
    assert torch.initial_seed() == 5


def test_zeros_stay_zeros_and_frozen_weights_differ(tmp_path: Path) -> None:
    target = loaded(tmp_path, ZEROS)
    before, seeds = values(target.model), seeds_of(target)
    seeds.start(1)
    assert not torch.equal(before[0], values(target.model)[0])
    assert not target.model[2].weight.any()  # type: ignore[index, union-attr]
    assert seeds.varied == ["initial weights", "batches"]


def test_where_nothing_else_can_differ_there_is_noise_and_it_is_said(tmp_path: Path) -> None:
    target = loaded(tmp_path, TRAINED)
    seeds = seeds_of(target)
    (batch,) = seeds.start(1)
    assert batch.args[0] is target.args[0]
    assert seeds.varied == ["1 % noise on the initial weights"]
    off = target.model.weight.detach() / 0.5 - 1  # type: ignore[union-attr, operator]
    assert 0 < float(off.abs().max()) < 0.06


def test_random_draws_alone_need_no_noise(tmp_path: Path) -> None:
    target = loaded(tmp_path, TRAINED)
    seeds = seeds_of(target, draws=True)
    seeds.start(1)
    assert seeds.varied == ["random draws"]
    assert bool((target.model.weight == 0.5).all())  # type: ignore[union-attr]


def test_a_loader_that_ends_gives_its_batches_in_another_order() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12)), batch_size=2)
    target = make_target(nn.Linear(1, 1), loader)
    seeds = seeds_of(target, 6)
    found = [batch.args[0][0, 0].item() for batch in seeds.start(1)]
    assert sorted(found) == [0, 2, 4, 6, 8, 10]
    assert found != sorted(found)
    assert seeds.varied == ["initial weights", "order of the batches"]


def test_rows_are_drawn_with_their_targets() -> None:
    x = torch.arange(16.0).reshape(16, 1)
    target = make_target(nn.Linear(1, 1), x, loss=lambda output, x: (output - x).square().mean())
    target = target._replace(targets=(x * 2,))
    (batch,) = seeds_of(target).start(1)
    assert not torch.equal(batch.args[0], x)
    assert torch.equal(batch.args[0] * 2, batch.targets[0])


def test_the_rows_of_a_sparse_graph_stay() -> None:
    graph, x = torch.eye(8).to_sparse(), torch.randn(8, 4)
    target = make_target(nn.Linear(4, 2), x, loss=lambda output, graph: torch.mm(graph, output).square().mean())
    (batch,) = seeds_of(target._replace(targets=(graph,))).start(1)
    assert torch.equal(batch.args[0], x)
    assert batch.targets[0] is graph


@pytest.mark.parametrize(("factor", "varied"), [(1.0, True), (4.0, False)])
def test_weights_that_are_not_as_their_modules_initialize_them_stay(factor: float, varied: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.mul_(factor)
    before = values(model)
    seeds = seeds_of(make_target(model, torch.randn(8, 16)))
    seeds.start(1)
    assert ("initial weights" in seeds.varied) == varied
    assert torch.equal(before[0], values(model)[0]) == (not varied)


def test_a_scan_saves_what_differs_and_says_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    result = training(model, torch.randn(16, 8), "autocast-bf16", steps=2, optimizer=sgd(0.1), loss=None)
    assert result.training is not None
    assert result.training.varied == ["initial weights", "rows of the batch", "random draws"]
    said = [found.text for found in statements(result) if found.kind == "seeds"]
    assert "(other initial weights, rows of the batch, random draws)" in said[0]


# -- what a few steps tell

SAMPLES = Samples({"weight": 4})


def moving(losses: list[float], by: float, start: float = 0.0) -> Trajectory:
    return Trajectory(losses=losses, weights=[torch.full((4,), start + by * step) for step in range(len(losses))])


def spread() -> Spread:
    others = [moving([2.2, 1.8, 1.4], -0.98, 3.0), moving([1.8, 1.5, 1.1], 1.01, 7.0), moving([2.1, 1.6, 1.2], -1.02)]
    return Spread(moving([2.0, 1.6, 1.2], 1.0), others, SAMPLES, 0.05)


def test_weights_that_hardly_move_fail_though_other_seeds_move_in_other_directions() -> None:
    found = spread().divergence(moving([2.0, 1.9, 1.8], 0.05), 0.0, noisy=False)
    assert found is not None
    assert (found.what, found.step) == ("progress", 1)
    assert found.value == pytest.approx(0.05)


def test_weights_that_stand_still_fail_though_other_seeds_move_by_very_different_lengths() -> None:
    others = [moving([2.0, 1.9, 1.9], by) for by in (5.0, 0.4, -2.0, 9.0)]
    found = Spread(moving([2.0, 1.8, 1.7], 1.0), others, SAMPLES, 0.05)
    assert found.divergence(moving([2.0, 2.0, 2.0], 0.3), 0.0, noisy=False) is None
    stands = found.divergence(moving([2.0, 2.0, 2.0], 0.0), 0.0, noisy=False)
    assert stands is not None
    assert (stands.what, stands.value, stands.limit) == ("progress", 0.0, pytest.approx(0.04))


def test_a_run_that_moves_elsewhere_as_far_and_learns_as_much_passes() -> None:
    assert spread().divergence(moving([2.0, 1.65, 1.22], -1.0), 0.0, noisy=False) is None


@pytest.mark.parametrize(
    ("found", "varied", "severity"),
    [
        (Divergence(step=3, what="loss", value=1.0, limit=0.5), ["batches"], "error"),
        (Divergence(step=3, what="loss", value=1.0, limit=0.5), ["1 % noise on the initial weights"], "warning"),
        (Divergence(step=3, what="weights", value=3.0, limit=2.8), ["batches"], "warning"),
        (Divergence(step=3, what="progress", value=0.8, limit=0.9), ["batches"], "warning"),
        (Divergence(step=3, what="progress", value=0.05, limit=0.9), ["batches"], "error"),
    ],
)
def test_a_divergence_is_an_error_where_the_steps_tell(found: Divergence, varied: list[str], severity: str) -> None:
    run = a_trained("autocast-bf16", a_way(status="inaccurate", divergence=found))
    setup: Any = SETUP.__class__(
        **{name: getattr(SETUP, name) for name in SETUP.__struct_fields__} | {"varied": varied}
    )
    result = conclude(a_result(run, setup=setup))
    (diagnostic,) = [each for each in result.diagnostics if each.code == "LP507"]
    assert diagnostic.severity == severity
    assert ("10 steps cannot tell whether it trains worse" in diagnostic.message) == (severity == "warning")


def test_steps_that_are_too_few_for_the_loss_are_named() -> None:
    fields = {name: getattr(SETUP, name) for name in SETUP.__struct_fields__}
    for low, high, few in ((-0.5, 0.1, True), (-0.5, -0.1, False)):
        limits = {"limit_low": [low] * 11, "limit_high": [high] * 11}
        said = [found.text for found in statements(a_result(setup=SETUP.__class__(**fields | limits)))]
        assert any("10 steps cannot tell whether the loss falls" in text for text in said) == few


def test_16_bit_weights_that_learn_as_fp32_does_pass() -> None:
    """Copies with 1 % noise that share the batches end so near each other that this failed."""
    teacher = torch.randn(20, 5, generator=torch.Generator().manual_seed(9))

    def inputs(batch: int = 0) -> Tensor:
        return torch.randn(64, 20, generator=torch.Generator().manual_seed(100 + batch))

    def loss(output: Tensor, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, (x.float() @ teacher).argmax(-1))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    result = training(model, inputs, "bfloat16,half", steps=8, optimizer=sgd(0.1), loss=loss)
    assert [trained(result, name)[0].status for name in ("bfloat16", "half")] == ["ok", "ok"]
