"""The numbers that an op was called with, noted by the shortest path, are those of looking at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from watched import watching

from lowprec_check.pytest_plugin.fixture.watch import Watch

N, B, D, X, C = (
    torch.arange(4),
    torch.tensor([True, False] * 2),
    torch.ones(4).double(),
    torch.ones(4),
    torch.ones(4) + 1j,
)
D0, X0 = torch.tensor(2.0).double(), torch.tensor(2.0)
CALLS: list[Callable[[], Any]] = [
    *(lambda one=one, other=other: one * other
      for one in (N, B, D, X, C, D0, X0) for other in (N, D, X, C, 2, 2.0, 2j)),
    *(lambda one=one, other=other: one / other for one in (N, D, X, C) for other in (N, D, 2, 2.0)),
    *(lambda one=one, mode=mode: torch.div(one, N + 1, rounding_mode=mode)
      for one in (N, D, X) for mode in (None, "floor")),
    *(lambda one=one, dtype=dtype: one.sum(dtype=dtype)
      for one in (N, D, X) for dtype in (None, torch.double, torch.half)),
    *(lambda one=one, dtype=dtype: one.to(dtype, copy=True) for one in (N, D, X) for dtype in (torch.int, torch.half)),
    *(lambda one=one: torch.stack([one, one]) for one in (N, D, X, C)),
    *(lambda one=one: one[N] for one in (N, D, X, C)),
    lambda: torch.cat([D, X]),
    lambda: torch.where(B, D, 0.0),
    lambda: torch.where(B, N, 0.5),
    lambda: torch.linspace(0, 1, 4, dtype=torch.double),
    lambda: torch.linspace(0, 1, 4),
    lambda: torch.bincount(N),
    lambda: torch.bincount(N, D),
    lambda: torch.bincount(N, X),
    lambda: torch.set_default_dtype(torch.double),
    lambda: torch.set_default_dtype(torch.float),
]  # fmt: skip


class EveryCall(TorchDispatchMode):
    """Notes the dtypes of each op's tensor arguments or, if none is floating or complex, of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if not any(dtype.is_floating_point or dtype.is_complex for dtype in given):
            given |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        self.dtypes.setdefault(str(func), set()).update(given)
        return out

    def numbers(self, op: str) -> str:
        floating = {dtype for dtype in self.dtypes[op] if dtype.is_floating_point}
        if floating:
            return "float64" if floating == {torch.double} else "floating"
        return "complex" if any(dtype.is_complex for dtype in self.dtypes[op]) else "integer"


@settings(max_examples=25, deadline=None)
@given(tests=st.lists(st.lists(st.sampled_from(CALLS), max_size=25), max_size=3))
def test_numbers_are_those_of_every_call(tests: list[list[Callable[[], Any]]]) -> None:
    for calls in tests:
        with watching() as watch:
            run(calls)
        with EveryCall() as every:
            run(calls)
        found = watch.take()
        assert {op: recorded.numbers for op, recorded in found.items()} == {op: every.numbers(op) for op in found}
        assert not calls or found.keys() <= every.dtypes.keys()


def test_calls_that_are_equal_are_looked_at_once() -> None:
    with watching() as watch:
        for _ in range(3):
            D * D
        assert len(watch._seen) == 1
        (N / 2).sum()
    assert {op: recorded.numbers for op, recorded in watch.take().items()} == {
        "aten.mul.Tensor": "float64",
        "aten.div.Tensor": "floating",
        "aten.sum.default": "floating",
    }
    assert Watch().take() == {}


def run(calls: list[Callable[[], Any]]) -> None:
    try:
        with torch.no_grad():
            for call in calls:
                call()
    finally:
        torch.set_default_dtype(torch.float)
