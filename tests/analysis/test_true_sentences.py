"""Statements of generated results: figures are those of the saved JSON; merging or rounding never makes one false."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_result import ENVIRONMENT, budgeted, gap, op_calls, run, shared_result

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.schema.measures import Ablation, BatchRanges, Latency, Speedup, TimingConditions
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

MODULES = ("encoder.blocks.0", "encoder.blocks.1", "head.out", "encoder.blocks.0.norm")
TOLERANCES = {"half": 1e-2, "autocast-fp16": 1e-2, "bfloat16": 5e-2, "autocast-bf16": 5e-2}


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


# -- what the saved JSON has


def saved_figures(kind: str, saved: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, Any]:
    """What figures of these names must be, from the JSON of the runs."""
    error = saved["output_error"] and saved["output_error"]["rel_l2"]
    ablation, latency = saved["ablation"], saved["latency"] or {}
    plan = runs.get(f"plan ({saved['precision']})")
    if ablation is None and plan is not None:
        ablation = {"keep_fp32": plan["keep_fp32"], "rel_l2": plan["output_error"]["rel_l2"]}
    figures = {
        "error": error,
        "before": error,
        "limit": saved["tolerance"],
        "after": ablation and ablation["rel_l2"],
        "kept": ablation and patterns(ablation["keep_fp32"], saved["called_modules"]),
        "total": len({*saved["op_calls"]["op"], *(its["op"] for its in saved["gaps"])}),
        "ops": len({its["op"] for its in saved["gaps"]}),
    }
    if saved["tolerance"] and error:
        figures["part"] = error / saved["tolerance"]
    if saved["batches"]:
        figures["batches"] = len(saved["batches"]["statuses"])
    if kind == "plan-passes":
        figures["error"] = figures["after"]
    if kind == "rescued":
        figures["calls"] = sum(its["calls"] for its in saved["gaps"])
    if kind == "interval":
        figures |= {name: latency["speedup"][name] for name in ("low", "high", "rounds")}
    if kind == "gain":
        figures["share"] = abs(1 - saved["peak_memory_bytes"] / runs["fp32"]["peak_memory_bytes"])
    return figures


def saved_share(saved: Mapping[str, Any], figures: Mapping[str, Any], number: str) -> float:
    """The share of the module of this number: with all below it, except those that the statement names."""
    if f"module{number}" not in figures:
        return abs(float(saved["budget"]["unexplained"]))
    shares = {its["module"]: its["share"] for its in saved["budget"]["shares"]}
    _, is_rest, name = figures[f"module{number}"].rpartition("the rest of ")
    below = [path for path in shares if path == name or path.startswith(f"{name}.")]
    named = [value for key, value in figures.items() if key.startswith("module")] if is_rest else []
    return sum(shares[path] for path in below if path not in named)


def wrong_figures(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Figures of statements that are not those of the saved run, and texts that do not hold them."""
    runs = {name_of(saved): saved for saved in raw["runs"]}
    for statement in raw["statements"]:
        kind, text = statement["kind"], statement["text"]
        types = {name: spec for _, name, spec, _ in string.Formatter().parse(statement["template"]) if name}
        for name, figures in zip(statement["runs"], statement["figures"], strict=bool(statement["runs"])):
            saved = runs[name]
            known = saved_figures(kind, saved, runs)
            for key, value in figures.items():
                base, _, number = key.partition("_")
                if base == "share" and kind in ("shares", "failure", "not-chosen"):
                    wanted = saved_share(saved, figures, f"_{number}" if number else "")
                elif key in ("module", "op"):
                    wanted = value if value in saved["op_calls"][key] else f"one of the {key}s that were called"
                else:
                    wanted = known.get(key, value)
                if value != wanted and not close(value, wanted):
                    yield text, f"{name}: {key} is {value}, in the saved run {wanted}"
                if types[key] in ROUNDED and not holds(text, types[key], value):
                    yield text, f"{name}: {key} is {value}, which the text does not say"
        factor = re.search(r"(?<!about )\b\d\S* times as fast|(?<!about )\b\d\S* times slower", text)
        if kind in ("gain", "also-faster") and factor:
            for name in statement["runs"]:
                in_rounds = (runs[name]["latency"] or {}).get("speedup")
                ratio = runs["fp32"]["latency_ms"] / runs[name]["latency_ms"]
                if in_rounds:
                    ratio = in_rounds["median"]
                if not holds(factor[0], "times", max(ratio, 1 / ratio)):
                    yield text, f"{name}: its speed is {ratio} in the saved run"
        if kind == "failure" and any(runs[name]["status"] == "ok" for name in statement["runs"]):
            yield text, "said of a run that passes"
        if kind == "passes" and any(runs[name]["status"] not in ("ok", "unjudged") for name in statement["runs"]):
            yield text, "said of a run that fails"


def name_of(saved: Mapping[str, Any]) -> str:
    """As statements name a run."""
    if saved["base"]:
        return f"plan ({saved['base']})"
    return saved["precision"] if saved["backend"] == "eager" else f"{saved['precision']} · {saved['backend']}"


def close(value: Any, wanted: Any) -> bool:
    return isinstance(value, int | float) and isinstance(wanted, int | float) and math.isclose(value, wanted)


# -- what a text says, read without the formatters


NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?"
ROUNDED = {"error": 1, "limit": 1, "times": 1, "share": 100, "percent": 100, "three": 1}
"""Types of figures that are rounded, and what the text multiplies them by."""


def holds(text: str, kind: str, value: float | None) -> bool:
    """Whether the text says this figure, rounded at its last digit, or a range around it."""
    if value is None:
        return "infinite" in text
    if kind in ("error", "limit"):
        # an error as large as the values is said as a share of them
        text = re.sub(rf"({NUMBER}) %", r"\1e-02", text)
    for sign, low, high in re.findall(rf"([<>−] ?)?({NUMBER})(?: %)?(?: – −?({NUMBER}|infinite))?", text):
        least, most = rounded_from(low)
        if high == "infinite" or sign == "> ":
            most = math.inf
        elif high:
            most = rounded_from(high)[1]
        elif sign == "< ":
            least = 0.0
        if least <= abs(value) * ROUNDED[kind] <= most:
            return True
    return False


def rounded_from(number: str) -> tuple[float, float]:
    """The smallest and the largest figure that is rounded to this text."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    half = 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    value = float(number.replace(",", ""))
    return value - half, value + half


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(results())
def test_statements_of_generated_results_are_true(result: ScanResult) -> None:
    raw = json.loads(result.to_json())
    assert raw["statements"]
    assert [*wrong_figures(raw)] == []


def test_statements_of_the_shared_result_are_true() -> None:
    raw = json.loads(conclude(shared_result()).to_json())
    kinds = {statement["kind"] for statement in raw["statements"]}
    assert {"failure", "passes", "gain"} <= kinds
    assert [*wrong_figures(raw)] == []


@pytest.mark.parametrize(("figure", "value"), [("error", 0.5), ("part", 0.011), ("limit", 0.5), ("low", 9.0)])
def test_a_planted_figure_is_found(figure: str, value: float) -> None:
    raw = json.loads(conclude(shared_result()).to_json())
    planted = [figures for its in raw["statements"] if its["runs"] for figures in its["figures"] if figure in figures]
    for figures in planted:
        figures[figure] = value
    assert planted
    assert len([*wrong_figures(raw)]) >= len(planted)


def test_a_range_must_hold_each_figure() -> None:
    for value, is_held in ((1e-3, True), (2e-2, True), (4.04e-2, True), (4.2e-2, False), (9e-4, False)):
        assert holds("error 1.0e-03 – 4.0e-02", "error", value) == is_held
    for value, is_held in ((1.0, True), (1.004, True), (1.01, False), (100.0, False)):
        assert holds("error 100 %", "error", value) == is_held
    assert holds("error 4.3e-02 – 120 %", "error", 1.2)
    assert not holds("error 4.3e-02 – 120 %", "error", 1.21)
    assert holds("about 46 % from head", "share", 0.464)
    assert not holds("about 46 % from head", "share", 0.47)
    assert holds("< 1 % from head", "share", 0.004)
