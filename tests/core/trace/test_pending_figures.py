"""Figures that are read in batches are those that are read at once, and no op waits for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from generated import Step, build, chains, inputs
from helpers import CPU, DEFAULT, LOW, begun, budget_observer, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check.core.trace import pending_figures
from lowprec_check.core.trace.instrument import fp32_state, run_instrumented
from lowprec_check.core.trace.pending_figures import PendingFigures
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run

many = settings(max_examples=25, deadline=None)

TIMES = ("time_ms", "reference_ms")


WAITS = ("item", "cpu", "__bool__", "__float__", "__int__", "nonzero")


def count_waits(patch: pytest.MonkeyPatch) -> Iterator[int]:
    """A counter of calls that would wait for an accelerator. A list would be restored with the model's state."""
    counter = itertools.count()

    def counting(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            next(counter)
            return function(*args, **kwargs)

        return counted

    for owner, names in ((Tensor, WAITS), (torch, ("equal", "allclose"))):
        for name in names:
            patch.setattr(owner, name, counting(getattr(owner, name)))
    return counter


class Layers(nn.Module):
    """Products, norms, casts, choices, writes in place; ``-inf`` in a mask; values that overflow in fp16."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(24, 24) for _ in range(depth))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(24, 24, dtype=torch.bool).tril()
        for linear in self.linears:
            x = self.norm(x + linear(x))
            scores = (x @ x.transpose(-1, -2)).masked_fill(~mask, -math.inf)
            x = scores.softmax(-1) @ x
            x = x.float().to(x.dtype)
            best = x.max(-1).values
            large = best * 3e4 * 3
            large.clamp_(max=1.0)
            x.mul_(1.5).add_(large[..., None]).relu_()
        return x


def found_by(model: nn.Module, x: Tensor, precision: str, *, budget: bool, **options: Any) -> Run:
    return run(model, (x,), precision, options=DEFAULT._replace(**options), budget=budget)[1]


def same_figures(found: Run, expected: Run) -> Iterator[None]:
    assert found.gaps == expected.gaps
    assert found.perturbed == expected.perturbed
    assert len(found.op_calls) == len(expected.op_calls)
    for row, other in zip(found.op_calls.rows(), expected.op_calls.rows(), strict=True):
        for field in set(row.__struct_fields__) - set(TIMES):
            mine, its = getattr(row, field), getattr(other, field)
            if isinstance(its, float):
                assert mine == pytest.approx(its, rel=1e-4, abs=1e-12), (row, field, its)
            else:
                assert mine == its, (row, field, its)
    for name in ("predicted", "measured", "unexplained") if expected.budget is not None else ():
        assert getattr(found.budget, name) == pytest.approx(getattr(expected.budget, name), rel=1e-4, abs=1e-6)


@many
@given(kinds=chains, precision=st.sampled_from(LOW), training=st.booleans(), budget=st.booleans())
def test_figures_read_in_batches_are_the_same(
    kinds: list[type[Step]], precision: str, training: bool, budget: bool
) -> None:
    model = build(kinds, training=training)
    expected = found_by(model, inputs(), precision, budget=budget)
    same_figures(found_by(model, inputs(), precision, budget=budget, deferred=True), expected)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("errors", ["both", "accumulated", "none"])
@pytest.mark.parametrize("batch", [1, 7, 10_000])
def test_special_values_are_compared_as_they_were(
    precision: str, errors: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_figures, "BATCH", batch)
    torch.manual_seed(0)
    model, x = Layers(3).eval(), torch.randn(24, 24)
    expected = found_by(model, x, precision, budget=errors == "both", errors=errors)
    same_figures(found_by(model, x, precision, budget=errors == "both", errors=errors, deferred=True), expected)
    if errors == "both" and precision == "half":
        assert sum(row.introduced_inf for row in expected.op_calls.rows())


def waits_of(depth: int, *, budget: bool, deferred: bool) -> int:
    """The waits of an instrumented run."""
    torch.manual_seed(0)
    model, args = Layers(depth).eval(), (torch.randn(24, 24),)
    fp32, outputs = fp32_state(model), [model(*args).detach()]
    options = DEFAULT._replace(deferred=deferred)
    if budget:
        options = options._replace(observers=(budget_observer(outputs), *options.observers))
    with prepared(model, PRECISIONS.get("bfloat16"), CPU) as ready, pytest.MonkeyPatch.context() as patch:
        counter = count_waits(patch)
        found = run_instrumented(begun("bfloat16"), ready, args, {}, fp32, options)
        waits = next(counter)
    assert found.run.complete
    assert not found.faults
    return waits


@pytest.mark.parametrize("budget", [False, True])
def test_no_op_waits_for_its_figures(budget: bool) -> None:
    assert waits_of(12, budget=budget, deferred=True) == waits_of(2, budget=budget, deferred=True)
    assert waits_of(12, budget=budget, deferred=False) > waits_of(2, budget=budget, deferred=False) + 100


def test_what_is_not_known_yet_cannot_be_used() -> None:
    figures, done = PendingFigures(deferred=True, everywhere=True), list[float]()
    number = figures.number(torch.tensor(3))
    figures.then(lambda: done.append(number.value))
    with pytest.raises(RuntimeError):
        _ = number.value
    assert not done
    figures.settle()
    assert done == [3.0]


def test_tensors_that_are_compared_later_are_kept_from_writes() -> None:
    figures = PendingFigures(deferred=True, everywhere=True)
    out, reference = torch.tensor([math.inf, 2.0]).half(), torch.tensor([70000.0, 2.0])
    compared = figures.compare(out, [reference], count_flushed=False)
    figures.before_write([out, reference[1:]])
    out.zero_()
    reference.zero_()
    figures.settle()
    assert (compared.value.introduced_inf, compared.value.absmax) == (1, 2.0)


def test_an_action_that_fails_does_not_stop_those_after_it() -> None:
    figures, done = PendingFigures(deferred=True, everywhere=True), list[int]()
    figures.then(lambda: done.__delitem__(0))
    figures.then(lambda: done.append(1))
    with pytest.raises(IndexError):
        figures.settle()
    assert done == [1]


def test_comparisons_are_read_before_they_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_figures, "HELD", 16384)
    figures = PendingFigures(deferred=True, everywhere=True)
    first = figures.compare(torch.ones(1024).half(), [torch.ones(1024)], count_flushed=False)
    assert first.value.errors == [0.0]


def test_what_is_reported_before_the_end_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_check.core.trace.journal.SECONDS", 0.0)
    reported: list[Any] = []
    found = found_by(
        Layers(2).eval(), torch.randn(24, 24), "bfloat16", budget=False, deferred=True, on_op_calls=reported.append
    )
    rows = [row for part in reported for row in part.rows()]
    final = list(found.op_calls.rows())[: len(rows)]
    assert len(rows) > 20
    unlike = [
        (mine, its)
        for mine, its in zip(rows, final, strict=True)
        if msgspec.structs.astuple(mine) != msgspec.structs.astuple(its)
    ]
    assert all(mine.accumulated_error is None for mine, _ in unlike)  # a call whose outputs nothing had used yet
    assert len(unlike) < len(rows) / 5
