"""The limits of the loss that a training scan saves are those that it judges by."""

from __future__ import annotations

import pytest
import torch

from lowprec_check.features.training.spread import Samples, Spread, Trajectory

SAMPLES = Samples({"weight": 4})
LOSSES = ([2.0, 1.5, 1.2], [2.1, 1.62, 1.31], [1.9, 1.41, 1.13], [2.0, 1.52, 1.24])


def trained(losses: list[float]) -> Trajectory:
    return Trajectory(losses=losses, weights=[torch.full((4,), float(step)) for step in range(3)])


def spread(count: int = 4) -> Spread:
    base, *others = map(trained, LOSSES[:count])
    return Spread(base, others, SAMPLES, 0.1)


@pytest.mark.parametrize(("side", "sign"), [(0, -1), (1, 1)])
def test_a_loss_beyond_the_saved_limit_diverges(side: int, sign: int) -> None:
    limit = spread().loss_limits()[side][2]
    for beyond, diverges in ((1e-3, True), (-1e-3, False)):
        run = trained([2.0, 1.5, 2.0 + limit + sign * beyond])
        found = spread().divergence(run, 0.0, noisy=False)
        assert (found is not None) == diverges
        if found is not None:
            assert (found.what, found.step) == ("loss", 2)
            assert found.limit == pytest.approx(limit)


def test_the_limits_hold_the_range_of_the_seeds() -> None:
    low, high = spread().loss_band()
    limit_low, limit_high = spread().loss_limits()
    assert all(outer <= inner for outer, inner in zip(limit_low, low, strict=True))
    assert all(outer >= inner for outer, inner in zip(limit_high, high, strict=True))


def test_without_seeds_there_are_no_limits() -> None:
    assert spread(1).loss_limits() == ([], [])


@pytest.mark.parametrize(("tensors", "kept"), [(2, 5000), (1000, 1024)])
def test_distances_in_small_models_are_exact(tensors: int, kept: int) -> None:
    samples = Samples({str(number): 5000 for number in range(tensors)})
    assert len(samples.weights) == tensors * kept
    assert float(samples.weights.sum()) == pytest.approx(tensors * 5000)
