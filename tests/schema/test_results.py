"""The saved result: round trips, errors about broken files, no infinities; and its text report."""

from __future__ import annotations

import json
import math
import pickle

import msgspec
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.analysis.conclusion import conclude, conclude_early
from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import rule, rules
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.report.layout.text import text as as_text
from lowprec_check.report.scan_document import scan_document
from lowprec_check.schema.measures import TimingConditions
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Gap, ModelInfo, ResultError, Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

MODEL = ModelInfo(name="Net", parameters=1234567, inputs=["(1, 3)"], modules=3, training=False)


def a_run(precision: str = "half", status: str = "ok", rel_l2: float = 1e-3, ms: float = 1.0, **more: object) -> Run:
    error = ErrorStats(rel_l2=rel_l2, max_abs=0.1, cosine=1.0, sqnr_db=60.0)
    return Run(
        precision=precision,
        device="cpu",
        status=status,  # type: ignore[arg-type]
        output_error=None if precision == "fp32" else error,
        latency_ms=ms,
        peak_memory_bytes=1000,
        tolerance=1e-2,
        **more,  # type: ignore[arg-type]
    )


def a_gap(**more: object) -> Gap:
    fields: dict[str, object] = {
        "op": "aten.dot.default",
        "layer": "dispatch",
        "kind": "missing-kernel",
        "module": "layer",
        "source": "m.py:3",
        "dtypes": ["float16"],
        "message": "\"dot\" not implemented for 'Half'",
    }
    return Gap(**fields | more)  # type: ignore[arg-type]


def a_result(*runs: Run) -> ScanResult:
    return ScanResult(tool="t", target="m.py", model=MODEL, environment={"torch": "2.13.0"}, runs=list(runs))


def render(result: ScanResult, width: int = 100) -> str:
    return as_text(scan_document(result), width=width)


def with_diagnostics(result: ScanResult) -> ScanResult:
    return conclude(result)


def test_round_trip() -> None:
    result = with_diagnostics(a_result(a_run("fp32", ms=2.0), a_run(gaps=[a_gap()]), a_run("bfloat16", "inaccurate")))
    assert ScanResult.from_json(result.to_json()) == result
    assert "NaN" not in result.to_json().decode()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda d: d | {"schema": 99}, "schema 99"),
        (lambda d: {k: v for k, v in d.items() if k != "runs"}, "runs"),
        (lambda d: d | {"runs": [{"precision": 3}]}, r"runs\[0\]|runs\[\.\.\.\]"),
    ],
)
def test_errors_about_bad_files_name_the_key(change: object, names: str) -> None:
    data = json.loads(a_result(a_run()).to_json())
    with pytest.raises(ResultError, match=names):
        ScanResult.from_json(json.dumps(change(data)).encode())  # type: ignore[operator]


def test_what_a_newer_version_added_is_skipped() -> None:
    result = a_result(a_run())
    data = json.loads(result.to_json())
    data["surprise"] = data["runs"][0]["surprise"] = data["runs"][0]["op_calls"]["surprise"] = 1
    assert ScanResult.from_json(json.dumps(data).encode()) == result


def test_a_scan_saved_by_the_first_release_is_read() -> None:
    saved = (ROOT / "tests" / "goldens" / "scan-0.1.0.json").read_bytes()
    result = ScanResult.from_json(saved)
    assert [run.key.label for run in result.runs] == [run["precision"] for run in json.loads(saved)["runs"]]
    assert {diagnostic.backend for diagnostic in result.diagnostics} == {"eager"}
    assert "Use autocast-fp16" in render(result)
    assert ScanResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": "one"}'])
def test_other_files_are_not_a_scan_result(data: bytes) -> None:
    with pytest.raises(ResultError, match="not a scan result"):
        ScanResult.from_json(data)


def test_the_fastest_passing_run_is_recommended() -> None:
    runs = [a_run("fp32", ms=2.0), a_run("half", ms=1.0), a_run("bfloat16", "inaccurate", ms=0.1)]
    result = conclude(a_result(*runs))
    assert result.recommendation is not None
    assert (result.recommendation.precision, result.recommendation.speedup) == ("half", 2.0)
    assert "Not bfloat16: error 1.0e-03" in render(result)


def test_among_equally_fast_runs_the_simpler_one_then_the_most_accurate_is_recommended() -> None:
    runs = [a_run("fp32"), a_run("half", ms=1.0, rel_l2=1e-3), a_run("bfloat16", ms=1.01, rel_l2=1e-4)]
    advice = recommend([*runs, a_run("autocast-fp16", ms=1.01, rel_l2=1e-5)], MODEL)
    assert advice is not None
    assert advice.precision == "bfloat16"


def test_the_verdict_mentions_if_fp32_is_faster() -> None:
    result = conclude(a_result(a_run("fp32", ms=1.0), a_run("half", ms=57.0)))
    assert verdict(result).startswith("Stay in fp32: half is 57 times slower")


def test_nothing_is_recommended_if_nothing_passed() -> None:
    assert recommend([a_run("fp32"), a_run("half", "error")], MODEL) is None


@pytest.mark.slow
def test_a_thousand_findings_fit_on_a_screen() -> None:
    gaps = [a_gap(module=f"layers.{i}", source=f"m.py:{i}") for i in range(1000)]
    screen = render(with_diagnostics(a_result(a_run("fp32"), a_run(status="error", gaps=gaps))), width=80)
    assert len(screen.splitlines()) < 30
    assert "dot of layers.0, layers.1 and 998 more (m.py:0, 1, 2 and 997 more)" in " ".join(screen.split())
    assert max(map(len, screen.splitlines())) <= 80


def test_a_thousand_ops_without_kernel_fit_on_a_screen() -> None:
    gaps = [a_gap(op=f"op{i}", source=f"m.py:{i}") for i in range(1000)]
    screen = render(with_diagnostics(a_result(a_run("fp32"), a_run(status="error", gaps=gaps))), width=80)
    assert len(screen.splitlines()) < 30
    assert "op0, op1, op2, op3 and 996 more of layer (m.py:0, 1, 2 and 997 more)" in " ".join(screen.split())
    assert max(map(len, screen.splitlines())) <= 80


text = st.text(min_size=1, max_size=60)


@given(name=text, module=text, message=text, source=text)
def test_any_name_survives_a_round_trip(name: str, module: str, message: str, source: str) -> None:
    gap = a_gap(op=name, module=module, message=message, source=source)
    result = with_diagnostics(a_result(a_run("fp32"), a_run(status="error", gaps=[gap])))
    assert ScanResult.from_json(result.to_json()) == result
    assert render(result, width=80)


rows_of_calls = st.lists(
    st.builds(
        OpCall,
        op=st.text(max_size=9),
        source=st.none() | st.text(max_size=9),
        outcome=st.sampled_from(["ok", "rescued", "emulated"]),
        local_error=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        flips=st.integers(0, 2**40),
        reads=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    )
)


@given(rows=rows_of_calls)
def test_rows_survive_a_round_trip_as_columns(rows: list[OpCall]) -> None:
    calls = to_columns(rows)
    assert len(calls) == len(rows)
    assert list(calls.rows()) == rows
    assert msgspec.json.decode(msgspec.json.encode(calls), type=OpCalls) == calls
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(calls), type=OpCalls) == calls
    assert pickle.loads(pickle.dumps(calls)) == calls


def test_columns_are_saved_in_order() -> None:
    saved = json.loads(msgspec.json.encode(OpCalls()))
    assert list(saved) == [
        *["op", "module", "source", "dtypes", "shape", "outcome", "local_error", "accumulated_error", "input_error"],
        *["absmax", "rms", "introduced_inf", "introduced_nan", "flushed", "subnormal", "input_flushed", "flips"],
        *["recast", "to_python", "time_ms", "reference_ms", "compared_values", "compared_choices", "share", "phase"],
        *["vanished", "caller", "reads", "leaving", "nth", "reaches_output", "span"],
    ]
    assert set(map(str, saved.values())) == {"[]"}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_are_not_finite_are_saved_as_none(value: float) -> None:
    calls = to_columns([OpCall("aten.mm.default", absmax=1.0, accumulated_error=value, flushed=value)])
    assert (calls.absmax, calls.accumulated_error, calls.flushed) == ([1.0], [None], [None])


@pytest.mark.parametrize("missing", OpCalls.__struct_fields__[1:])
def test_columns_that_an_older_file_lacks_get_their_defaults(missing: str) -> None:
    saved = json.loads(msgspec.json.encode(to_columns([OpCall("a"), OpCall("b")])))
    saved.pop(missing)
    calls = msgspec.json.decode(json.dumps(saved), type=OpCalls)
    assert list(calls.rows()) == [OpCall("a"), OpCall("b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms": []}, "column 'rms' has 0 entries, 'op' has 2"),
        ({"flips": [1, 2, 3]}, "column 'flips' has 3 entries"),
        ({"op": []}, "'op' has 0"),
        ({"op": None}, r"\$\.op"),
        ({"module": None}, r"\$\.module"),
        ({"rms": ["x", None]}, r"\$\.rms"),
        ({"flips": [None, 1]}, r"\$\.flips"),
        ({"outcome": ["ok", "odd"]}, r"\$\.outcome"),
    ],
)
def test_errors_about_bad_columns_name_the_column(change: dict[str, object], message: str) -> None:
    saved = json.loads(msgspec.json.encode(to_columns([OpCall("a"), OpCall("b")])))
    with pytest.raises(ValueError, match=message):
        msgspec.json.decode(json.dumps(saved | change), type=OpCalls)


def test_codes_are_registered_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        rule("LP101", "again", "note")(lambda result: iter(()))
    assert set(rules()) >= {
        *(["LP101", "LP102", "LP103", "LP104", "LP105", "LP106", "LP107", "LP108", "LP201", "LP202", "LP203", "LP204"]),
        *(
            [
                "LP205",
                "LP301",
                "LP302",
                "LP303",
                "LP304",
                "LP306",
                "LP307",
                "LP308",
                "LP309",
                "LP310",
                "LP401",
                "LP402",
                "LP901",
                "LP902",
                "LP903",
            ]
        ),
    }


def test_equal_numbers_of_op_calls_are_stored_once_and_saved_as_they_are() -> None:
    rows = [OpCall("a", local_error=0.1 + index % 2, absmax=(0.0, -0.0)[index % 2], flips=index) for index in range(4)]
    read = msgspec.json.decode(msgspec.json.encode(to_columns(rows)), type=OpCalls)
    assert [str(value) for value in read.absmax] == ["0.0", "-0.0", "0.0", "-0.0"]
    assert read.local_error == [0.1, 1.1, 0.1, 1.1]
    assert len({id(value) for value in read.local_error}) == 2
    assert read.recast is read.introduced_inf
    assert read.recast == [0] * 4
    assert read.rms is read.time_ms
    assert list(read.rows()) == rows
    assert msgspec.json.encode(read) == msgspec.json.encode(to_columns(rows))


@pytest.mark.parametrize("in_rounds", [True, False])
def test_a_scan_that_ended_before_its_rounds_claims_no_times(in_rounds: bool) -> None:
    fp32 = Run(precision="fp32", device="cpu", status="ok", latency_ms=10.0)
    half = Run(precision="half", device="cpu", status="ok", latency_ms=90.0)
    conditions = TimingConditions() if in_rounds else None
    result = ScanResult(
        tool="t",
        target="t",
        model=MODEL,
        environment={},
        options={},
        runs=[fp32, half],
        timing_conditions=conditions,
    )
    early = conclude_early(result, [fp32.key, half.key], "the scan was interrupted")
    assert early is not None
    assert [run.latency_ms for run in early.runs] == ([10.0, 90.0] if in_rounds else [None, None])


def test_a_scan_that_ended_early_says_what_was_tried() -> None:
    fp32 = Run(precision="fp32", device="cpu", status="ok", latency_ms=1.0)
    failed = Run(precision="bfloat16", device="cpu", status="error")
    result = ScanResult(tool="t", target="t", model=MODEL, environment={}, options={}, runs=[fp32, failed])
    early = conclude_early(result, ScanOptions().keys("cpu"), "the scan was interrupted")
    assert early is not None
    assert [(run.precision, run.status) for run in early.runs[2:]] == [
        ("autocast-bf16", "skipped"),
        ("half", "skipped"),
        ("autocast-fp16", "skipped"),
    ]
    assert verdict(early) == "After 2 of 5 runs: bfloat16 did not pass here"
    assert conclude_early(msgspec.structs.replace(result, runs=[fp32]), ScanOptions().keys("cpu")) is None
