"""Work grows with the size of a model, not with its square. Function calls are counted, so no test depends on time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import lowprec_check
from lowprec_check.analysis.suspects import Suspects, blame
from lowprec_check.core.trace.instrument import uncalled_modules
from lowprec_check.features.plan.apply import describe_modules
from lowprec_check.features.plan.minimize import ModuleTree, Trials, Verdict, search
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.torchkit.source_location import ModuleStack

SMALL, LARGE = 100, 400


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions ``work`` calls; each step of a generator counts."""
    count = 0

    def note(_frame: Any, event: str, _function: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def assert_linear(prepare: Callable[[int], Callable[[], Any]]) -> None:
    """Work on four times as many modules calls about four times as many functions; quadratic work, sixteen times."""
    small, large = (calls_of(prepare(count)) for count in (SMALL, LARGE))
    assert small > SMALL
    assert large < 6 * small


def stack(count: int) -> nn.Sequential:
    """``count`` small layers."""
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


@pytest.mark.parametrize("base", ["bfloat16", "half", "autocast-bf16"])
def test_apply_is_linear_in_the_number_of_kept_modules(base: str) -> None:
    def prepare(count: int) -> Callable[[], Any]:
        model = stack(count)
        plan = Plan(
            tool="test",
            target="test",
            base=base,
            device="cpu",
            keep_fp32=[str(index) for index in range(count)],
            minimal=True,
            trials=1,
            seconds=0.0,
            modules=describe_modules(model),
            code="",
        )
        return lambda: lowprec_check.apply(model, plan)

    assert_linear(prepare)


def testuncalled_modules_modules_are_found_in_linear_time() -> None:
    def prepare(count: int) -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(2, 2), stack(count))
        modules = ModuleStack(model)
        modules.calls["1.0"] = 1  # so that the container counts as called, and each uncalled layer is found
        assert uncalled_modules(model, modules, ()) == ["0", *(f"1.{index}" for index in range(1, count))]
        return lambda: uncalled_modules(model, modules, ())

    assert_linear(prepare)


def run_with_gaps(names: list[str]) -> Run:
    """A run with a gap and a row in every module."""
    gaps = [
        Gap(
            op="aten.mm.default", layer="dispatch", kind="missing-kernel", module=n, source=None, dtypes=[], message="m"
        )
        for n in names
    ]
    rows = [OpCall("aten.mm.default", name, local_error=0.1) for name in names]
    return Run(precision="half", device="cpu", status="inaccurate", gaps=gaps, op_calls=to_columns(rows))


def test_kept_modules_are_explained_in_linear_time() -> None:
    def prepare(count: int) -> Callable[[], Any]:
        names = [str(index) for index in range(count)]
        run = run_with_gaps([f"{name}.inner" for name in names])
        assert [found.why for found in blame([run], names)] == ["has no kernel"] * count
        return lambda: blame([run], names)

    assert_linear(prepare)


def test_each_trial_of_a_search_is_linear() -> None:
    def prepare(count: int) -> Callable[[], Any]:
        tree = ModuleTree({str(index): "Linear" for index in range(count)})
        suspects = Suspects([], list(tree.types), False)
        trials = Trials(tree, lambda keep: Verdict(len(keep) == count), lambda tried: "enough" if tried == 10 else None)
        return lambda: search(tree, suspects, trials, lambda _: suspects)

    assert_linear(prepare)
