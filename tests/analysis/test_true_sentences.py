"""Merging runs, grouping findings and rounding never make a sentence false: the predicates of benchmarks/statements.py on generated results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_result import ENVIRONMENT, budgeted, gap, op_calls, run, shared_result

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.schema.measures import Ablation, BatchRanges, Latency, Speedup, TimingConditions
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

MODULES = ("encoder.blocks.0", "encoder.blocks.1", "head.out", "encoder.blocks.0.norm")
TOLERANCES = {"half": 1e-2, "autocast-fp16": 1e-2, "bfloat16": 5e-2, "autocast-bf16": 5e-2}


@pytest.fixture(scope="module")
def held() -> Iterator[Any]:
    """The benchmark as a module."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("statements")
    sys.path.remove(folder)


@st.composite
def latencies(draw: st.DrawFn) -> Latency | None:
    """Times around those of fp32, 10 ms, with a narrow or a wide interval."""
    ratio, spread = draw(st.floats(0.5, 2.0)), draw(st.sampled_from([0.01, 0.04, 0.3]))
    if draw(st.booleans()):
        return None
    rounds = Speedup(
        median=ratio,
        low=ratio * (1 - spread),
        high=ratio * (1 + spread),
        rounds=draw(st.integers(3, 15)),
        one_core=draw(st.booleans()),
    )
    return Latency(median_ms=10 / ratio, quartiles_ms=(9.6 / ratio, 10.4 / ratio), samples=30, speedup=rounds)


@st.composite
def low_runs(draw: st.DrawFn, precision: str) -> Run:
    """A run of any status whose error is near the tolerance, or far from it."""
    tolerance = TOLERANCES[precision]
    status = draw(st.sampled_from(["ok", "inaccurate", "inaccurate", "nonfinite", "error", "skipped", "unjudged"]))
    part = draw(st.floats(0.01, 1.0)) if status == "ok" else draw(st.floats(1.0001, 60.0))
    error = tolerance * part if status in ("ok", "inaccurate") else None
    more: dict[str, Any] = {"latency": draw(latencies()), "peak_memory_bytes": draw(st.integers(1 << 20, 9 << 20))}
    if status == "skipped":
        return run(precision, status, reason="not reached", latency_ms=None, peak_memory_bytes=None)
    if status == "error":
        more["gaps"] = [gap(calls=draw(st.integers(1, 9)))]
    if status == "nonfinite":
        more["output_error"] = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None)
    if status == "ok" and draw(st.booleans()):
        count = draw(st.integers(2, 5))
        more["batches"] = BatchRanges(statuses=["ok"] * count, output_errors=[error] * count)
    nan = draw(st.integers(0, 20)) if status == "nonfinite" else None
    calls = op_calls(
        24, jump=draw(st.sampled_from([None, 9])), nan=nan, half="fp16" in precision or precision == "half"
    )
    made = msgspec.structs.replace(
        run(precision, status, error, op_calls=calls, tolerance=tolerance, called_modules=[*MODULES]),
        latency_ms=more["latency"].median_ms if more["latency"] else None,
        **more,
    )
    if status in ("inaccurate", "nonfinite"):
        left, shares = 1.2, {}
        for module in draw(st.permutations(MODULES)):
            shares[module] = draw(st.floats(-0.02, left))
            left -= max(0.0, shares[module])
        made = budgeted(made, shares, **({} if error is not None else {"measured": 0.5}))
        kept = draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=3, unique=True))
        ends = draw(st.sampled_from(["ok", "inaccurate", "nonfinite"]))
        before = error or 1.0
        after = {
            "ok": draw(st.floats(0.01, 1.0)) * tolerance,
            "inaccurate": max(tolerance * 1.001, before * draw(st.floats(0.05, 1.1))),
            "nonfinite": None,
        }[ends]
        made = msgspec.structs.replace(
            made, ablation=Ablation(keep_fp32=kept, blamed_for="share", status=ends, rel_l2=after)
        )
    return made


@st.composite
def results(draw: st.DrawFn) -> ScanResult:
    """A scan of all precisions, and perhaps of some on another backend."""
    fp32 = Latency(median_ms=10.0, quartiles_ms=(9.5, 10.5), samples=30)
    reference = run(
        "fp32", latency_ms=10.0, latency=fp32, peak_memory_bytes=6 << 20, tolerance=None, random=draw(st.booleans())
    )
    runs = [reference, *(draw(low_runs(name)) for name in TOLERANCES)]
    more = draw(st.lists(st.sampled_from(list(TOLERANCES)), max_size=2, unique=True))
    runs += [msgspec.structs.replace(draw(low_runs(name)), backend="inductor") for name in more]
    result = msgspec.structs.replace(
        shared_result(),
        environment=ENVIRONMENT,
        options={"prefer": draw(st.sampled_from(["speed", "memory", "accuracy"]))},
        runs=runs,
        timing_conditions=TimingConditions(waited=draw(st.floats(0, 1)), speed_change=draw(st.floats(1, 2))),
        plan=None,
    )
    return conclude(result)


def _false(held: Any, result: ScanResult) -> list[Any]:
    raw = json.loads(result.to_json())
    found = [*held._statements(raw), *held._findings(raw, result)]
    return [one for _, wrong in found for one in wrong]


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(results())
def test_sentences_of_generated_results_are_true(held: Any, result: ScanResult) -> None:
    assert _false(held, result) == []


def test_the_shared_result_is_told_truly(held: Any) -> None:
    assert _false(held, conclude(shared_result())) == []


@pytest.mark.parametrize(
    ("figure", "value"), [("error", 0.5), ("part", 0.011), ("limit", 0.5), ("low", 9.0), ("share", 0.77)]
)
def test_a_planted_figure_is_caught(held: Any, figure: str, value: float) -> None:
    raw = json.loads(conclude(shared_result()).to_json())
    planted = 0
    for statement in raw["statements"]:
        for figures in statement["figures"]:
            if figure in figures:
                figures[figure], planted = value, planted + 1
    found = [one for _, wrong in held._statements(raw) for one in wrong]
    assert planted
    assert len(found) >= planted


def test_a_planted_run_is_caught(held: Any) -> None:
    """A sentence that is said of a run for which it does not hold."""
    raw = json.loads(conclude(shared_result()).to_json())
    failure = next(its for its in raw["statements"] if its["kind"] == "failure")
    failure["runs"] = ["autocast-bf16"] * len(failure["runs"])
    assert any(wrong for _, wrong in held._statements(raw))


def test_a_range_must_hold_every_run(held: Any) -> None:
    template = "error {error:error} of {module:module}"
    figures = [{"error": error, "module": "0"} for error in (1e-3, 2e-2, 4e-2)]
    assert held.misread(template, figures, 'error 1.0e-03 – 4.0e-02 of "0"') == []
    assert held.misread(template, figures, 'error 1.0e-03 of "0"')
    assert held.misread(template, figures, 'error 1.0e-03 – 2.0e-02 of "0"')
    assert held.misread(template, figures, "error 1.0e-03 – 4.0e-02 of 0")
