"""Properties of training scans, on generated models with planted faults; a loop without the tool checks each figure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generated import GAPS, STEPS, Step, build, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training_loops import sgd, trained, training

few = settings(max_examples=12, deadline=None)
LOW = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")


def can_be_trained(kind: type[Step]) -> bool:
    try:
        nn.Sequential(nn.Linear(8, 8), build([kind]))(inputs()).sum().backward()
    except RuntimeError:  # ``out=`` has no derivative
        return False
    return True


trainable = st.lists(st.sampled_from([kind for kind in STEPS if can_be_trained(kind)]), min_size=1, max_size=5)
trainable_with_gaps = st.lists(
    st.sampled_from([kind for kind in (*STEPS[:8], *GAPS) if can_be_trained(kind)]), min_size=1, max_size=5
)


def network(width: int) -> nn.Sequential:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))


def data(rows: int = 16, size: int = 16) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


def gradients(model: nn.Module, x: Tensor, loss: Any, **autocast: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        value = loss(model(x))
    value.backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@few
@given(exponent=st.integers(-7, -2), width=st.integers(4, 96))
def test_planted_underflows_are_found_with_their_share(exponent: int, width: int) -> None:
    model, x = network(width), data()

    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean() * 10.0**exponent

    exact, low = gradients(model, x, loss), gradients(model, x, loss, dtype=torch.float16)
    result = training(model, x, "autocast-fp16", loss=loss, optimizer=sgd(0.1))
    found = {row.parameter: row for row in trained(result, "autocast-fp16")[1].gradients}
    for name, reference in exact.items():
        share = ((low[name] == 0) & (reference != 0)).float().mean().item()
        assert found[name].underflow == pytest.approx(share, abs=0.02)


@few
@given(exponent=st.floats(-6.0, -1.0), width=st.integers(4, 96), decay=st.sampled_from([0.0, 0.1]))
def test_planted_lost_updates_are_found_with_their_share(exponent: float, width: int, decay: float) -> None:
    model, x, rate = network(width), data(), 10.0**exponent
    low = copy.deepcopy(model).bfloat16()
    low(x.bfloat16()).square().mean().backward()
    before = {name: p.detach().clone() for name, p in low.named_parameters()}
    wanted = {name: p.float() - rate * (p.grad.float() + decay * p.float()) for name, p in low.named_parameters()}  # type: ignore[union-attr]
    torch.optim.SGD(low.parameters(), lr=rate, weight_decay=decay).step()
    result = training(model, x, "bfloat16", optimizer=sgd(rate, weight_decay=decay))
    found = {row.name: row.lost for row in trained(result, "bfloat16")[1].lost_updates if row.values == "weight"}
    for name, parameter in low.named_parameters():
        changes = wanted[name] != before[name].float()
        if changes.any():
            share = (changes & (parameter == before[name])).sum().item() / changes.sum().item()
            assert found[name] == pytest.approx(share, abs=0.02), name


@few
@given(kinds=trainable, precision=st.sampled_from(LOW))
def test_the_instruments_do_not_change_a_step(kinds: list[type[Step]], precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), build(kinds))
    result = training(model, inputs(), precision, optimizer=sgd(0.01, momentum=0.9), errors="both")
    for run in result.runs:
        assert run.perturbed is not True, (run.precision, run.notes)
        skipped = run.training is not None and run.training.ways[0].skipped_steps  # explained at another loss scale
        if run.status in ("ok", "inaccurate") and not (run.gaps or run.emulated or skipped):
            assert run.perturbed is False
            assert run.complete
        assert not [note for note in run.notes if "lowprec-check failed" in note]


@few
@given(kinds=trainable_with_gaps, precision=st.sampled_from(("half", "bfloat16")))
def test_a_step_has_all_gaps_of_its_model(kinds: list[type[Step]], precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), build(kinds))
    result = training(model, inputs(), precision, optimizer=sgd(0.01), errors="both")
    run = result.run(precision)
    assert run.complete, (run.stopped_by, run.incomplete_because)
    assert (run.status == "error") == bool(run.gaps)
