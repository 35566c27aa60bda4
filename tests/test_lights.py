"""The four lights of a scan, and why its runs break: what they say of each outcome, in which color."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from predicted_result import predicted_result
from shared_result import ENVIRONMENT, budgeted, gap, latency, op_calls, run, shared_result
from training_result import training_result

from lowprec_check import Run, ScanResult
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.report import summary
from lowprec_check.report.html.causes import run_causes
from lowprec_check.report.lights import Light, lights
from lowprec_check.schema.ablation import Ablation
from lowprec_check.schema.error_budget import ErrorBudget
from lowprec_check.schema.measures import Latency, Speedup
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo

MIB = 1 << 20
RAISED = ExceptionInfo(type="RuntimeError", message="\"cholesky_cpu\" not implemented for 'Half'")


def times(median: float, low: float, high: float) -> Latency:
    found = Speedup(median=median, low=low, high=high, rounds=15)
    return Latency(median_ms=10.0 / median, quartiles_ms=(9.0 / median, 11.0 / median), samples=30, speedup=found)


def passing(precision: str, error: float = 1e-3, speedup: float = 1.4, memory: float = 3, **more: Any) -> Run:
    timed = times(speedup, 0.97 * speedup, 1.03 * speedup)
    fields: dict[str, Any] = {"latency": timed, "latency_ms": timed.median_ms, "peak_memory_bytes": int(memory * MIB)}
    fields["tolerance"] = 5e-2 if "bf" in precision else 1e-2
    return run(precision, "ok", error, **fields | more)


def failing(precision: str, *gaps: Gap, status: str = "error", **more: Any) -> Run:
    fields: dict[str, Any] = {"gaps": list(gaps), "exception": RAISED, "latency_ms": None, "peak_memory_bytes": None}
    return run(precision, status, **fields | more)


def result_of(*runs: Run, **of_fp32: Any) -> ScanResult:
    fields: dict[str, Any] = {"latency": latency(10.0), "latency_ms": 10.0, "peak_memory_bytes": 6 * MIB}
    fp32 = run("fp32", tolerance=None, **fields | of_fp32)
    base = msgspec.structs.replace(shared_result(), runs=[fp32, *runs], plan=None, environment=ENVIRONMENT)
    return conclude(base)


def colors(found: list[Light]) -> list[str]:
    return [light.color for light in found]


def answers(*runs: Run, **of_fp32: Any) -> list[str]:
    return [light.answer for light in lights(result_of(*runs, **of_fp32))]


def test_all_lights_are_green_if_everything_passes_and_is_faster() -> None:
    found = lights(result_of(passing("bfloat16", 4e-3), passing("half", 2e-3, speedup=1.1)))
    assert colors(found) == ["good"] * 4
    assert [light.answer for light in found] == [
        "Both precisions run.",
        "Both precisions are within the tolerance. half is closest to its tolerance: error 2.0e-03 (tolerance 1e-02).",
        "bfloat16: 1.4 times as fast as fp32, saves 50 % of the memory.",
        "Use bfloat16.",
    ]
    assert [light.question for light in found] == ["Does it run?", "Is it right?", "Is it worth it?", "What to do?"]


def test_the_fourth_light_is_grey_if_nothing_is_gained() -> None:
    found = lights(result_of(passing("bfloat16", speedup=1.0, memory=6)))
    assert colors(found) == ["good", "good", "none", "none"]
    assert [light.answer for light in found] == [
        "bfloat16 runs.",
        "bfloat16 is within the tolerance: error 1.0e-03 (tolerance 5e-02).",
        "bfloat16: about as fast as fp32, takes about as much memory.",
        "Stay in fp32: bfloat16 is not faster and saves no memory.",
    ]


def test_slower_but_smaller_is_a_warning() -> None:
    found = lights(result_of(passing("bfloat16", speedup=0.5)))
    assert colors(found) == ["good", "good", "warn", "none"]
    assert found[2].answer == "bfloat16: 2.0 times slower than fp32, saves 50 % of the memory."
    assert found[3].answer == "Stay in fp32 for speed; bfloat16 saves 50 % of the memory."


def test_slower_and_larger_is_grey() -> None:
    found = lights(result_of(passing("autocast-bf16", speedup=0.5, memory=8)))
    assert colors(found) == ["good", "good", "none", "none"]
    assert found[2].answer == "autocast-bf16: 2.0 times slower than fp32, takes 33 % more memory."


@pytest.mark.parametrize(
    ("latency", "text"),
    [
        (times(1.4, 0.6, 3.0), "times too noisy to compare on this machine"),
        (times(1.4, 0.6, float("inf")), "calls too short to compare times"),
        (None, "not timed"),
    ],
)
def test_a_time_that_cannot_be_told_is_grey(latency: Latency | None, text: str) -> None:
    untimed = {"latency_ms": None} if latency is None else {}
    found = lights(result_of(passing("bfloat16", memory=6, latency=latency, **untimed)))
    assert colors(found) == ["good", "good", "none", "none"]
    assert found[2].answer == f"bfloat16: {text}, takes about as much memory."
    assert found[3].answer == "Use bfloat16; whether that gains anything cannot be told."


def test_a_noisy_time_leaves_what_is_saved() -> None:
    found = lights(result_of(passing("bfloat16", latency=times(1.4, 0.6, 3.0))))
    assert colors(found) == ["good"] * 4
    assert found[2].answer == "bfloat16: times too noisy to compare on this machine, saves 50 % of the memory."


def test_a_prediction_claims_no_gain_and_says_that_it_is_one() -> None:
    found = lights(predicted_result())
    assert colors(found) == ["warn", "warn", "none", "none"]
    assert found[0].answer.startswith("3 of 4 precisions are predicted to run. half · predicted: ")
    assert found[1].answer.startswith("1 of 3 precisions that run is predicted to be within the tolerance. ")
    assert "bfloat16 · predicted: error 3.1e-01 (tolerance 5e-02)." in found[1].answer
    assert found[2].answer == "Times and memory are not predicted."
    assert "not known" not in found[3].answer


def test_training_is_compared_with_fp32_and_not_with_a_tolerance() -> None:
    result = training_result()
    found = lights(result)
    assert "close to fp32" in found[1].answer
    assert "tolerance" not in found[1].answer
    assert all(light.answer for light in found)


def test_an_output_of_zeros_is_grey() -> None:
    result = result_of(passing("half", compared_module="head"), passing("bfloat16"), output_is_zero=True)
    found = lights(result)
    assert summary.verdict_with_gain(result) == "bfloat16 could not be judged."
    assert colors(found) == ["good", "none", "none", "none"]
    assert found[1].answer == (
        "half cannot be judged: the fp32 output is all zeros; the error is that of head. "
        "bfloat16 cannot be judged: the fp32 output is all zeros."
    )
    assert found[2].answer.endswith("Its output could not be judged.")
    assert found[3].answer == "bfloat16 runs, but its output could not be judged."
    assert not any(summary.tag(run, result) for run in result.runs)  # no "recommended": nothing is


def test_a_tiny_output_is_not_wrong() -> None:
    tiny = passing("half", 1.0, output_rms=1e-9)
    found = lights(result_of(msgspec.structs.replace(tiny, status="inaccurate"), passing("bfloat16", output_rms=1e-9)))
    assert colors(found) == ["good", "warn", "good", "good"]
    assert found[1].answer == (
        "bfloat16 is within the tolerance: error 1.0e-03 (tolerance 5e-02). "
        "half cannot be judged: the output is tiny (rms 1e-09): fp16 flushes it to zero."
    )


def test_no_pass_is_red() -> None:
    wrong = [run(name, "inaccurate", 0.3, tolerance=1e-2) for name in ("half", "autocast-fp16")]
    found = lights(result_of(*wrong, run("bfloat16", "nonfinite", tolerance=5e-2)))
    assert colors(found) == ["good", "bad", "none", "bad"]
    assert found[0].answer == "All 3 precisions run."
    assert found[1].answer == (
        "None of the 3 precisions is within the tolerance. half and autocast-fp16: error 3.0e-01 (tolerance 1e-02). "
        "bfloat16: NaN or Inf in the output."
    )
    assert found[2].answer == "Nothing passed, so there is nothing to gain."


def test_nothing_that_runs_is_red() -> None:
    found = lights(result_of(failing("half", gap()), failing("bfloat16", gap())))
    assert colors(found) == ["bad", "none", "none", "bad"]
    assert found[0].answer == "Neither of the 2 precisions runs. half and bfloat16: 1 op has no kernel: cholesky_ex."
    assert found[1].answer == "Nothing ran that could be compared."


def test_one_run_is_named() -> None:
    assert answers(failing("half", gap()))[0] == "half does not run. half: 1 op has no kernel: cholesky_ex."
    assert (
        answers(run("half", "inaccurate", 0.3))[1]
        == "half is not within the tolerance. half: error 3.0e-01 (tolerance 1e-02)."
    )


def test_a_plan_that_passes_makes_a_warning_of_what_fails() -> None:
    half = run("half", "inaccurate", 0.3, tolerance=1e-2)
    plan = passing("plan", 2e-3, base="half", keep_fp32=["head", "norm"], tolerance=1e-2)
    found = lights(result_of(half, run("bfloat16", "inaccurate", 0.3, tolerance=5e-2), plan))
    assert colors(found) == ["good", "warn", "good", "good"]
    assert found[1].answer == (
        "Neither of the 2 precisions is within the tolerance. half: error 3.0e-01 (tolerance 1e-02). "
        "bfloat16: error 3.0e-01 (tolerance 5e-02). "
        "plan (half), which keeps head, norm in fp32, passes: error 2.0e-03 (tolerance 1e-02)."
    )
    assert found[2].answer == "plan (half): 1.4 times as fast as fp32, saves 50 % of the memory."
    assert found[3].answer == "Use half with 2 of 6 modules in fp32."


def test_gaps_are_counted_over_the_ops_and_named_once_for_all_precisions() -> None:
    gaps = gap(), gap(op="torch.quantile", layer="function", kind="unsupported-dtype")
    found = lights(
        result_of(
            *(failing(name, *gaps, op_calls=op_calls(6)) for name in ("half", "bfloat16")), passing("autocast-bf16")
        )
    )
    assert colors(found)[:2] == ["warn", "good"]
    assert (
        found[0].answer
        == "1 of 3 precisions runs. half and bfloat16: 2 of 5 ops have no kernel: cholesky_ex, quantile."
    )
    assert found[1].answer == "autocast-bf16 is within the tolerance: error 1.0e-03 (tolerance 5e-02)."


def test_precisions_that_do_not_run_are_not_counted_as_right() -> None:
    ran = [passing(name) for name in ("half", "bfloat16", "autocast-fp16")]
    assert answers(*ran, failing("autocast-bf16", gap()))[1].startswith(
        "All 3 precisions that run are within the tolerance."
    )


def test_a_constant_out_of_range_is_named_with_its_op() -> None:
    masked = gap(op="aten.masked_fill.Scalar", kind="scalar-overflow", constant=-1e9, message="without overflow")
    text = answers(failing("half", masked), passing("bfloat16"))[0]
    assert text.endswith("half: the constant -1e+09 in masked_fill is outside the range of fp16.")
    result = result_of(failing("half", masked), passing("bfloat16"))
    assert run_causes(result)[0].text == "the constant -1e+09 in masked_fill is outside the range of fp16"
    more = masked, gap()
    assert "constant" not in answers(failing("half", *more), passing("bfloat16"))[0]


def test_integers_that_differ_are_not_an_error() -> None:
    differ = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None, mismatched=0.008)
    found = msgspec.structs.replace(passing("half"), output_error=differ)
    assert answers(found)[1] == "half is within the tolerance: 0.8 % of the integers differ (tolerance 1e-02)."


def test_runs_of_one_precision_on_several_backends_are_ways() -> None:
    found = answers(passing("half"), passing("half", backend="inductor"), failing("half", gap(), backend="jit"))
    assert found[0].startswith("2 of 3 ways run. half · jit: ")
    assert found[1].startswith("Both ways that run are within the tolerance.")


# -- causes


def test_one_call_that_fails_is_singular() -> None:
    result = result_of(failing("half", gap(calls=1)), failing("bfloat16", gap(), complete=False))
    assert [cause.proofs for cause in run_causes(result)] == [
        ["1 call failed in this precision and succeeded with inputs in fp32; the model then ran to its end."],
        [
            "3 calls failed in this precision and succeeded with inputs in fp32; the model then ran on, but not to its end."
        ],
    ]


def test_a_budget_without_shares_is_no_cause() -> None:
    nothing = ErrorBudget(predicted=0.0, measured=0.0, unexplained=0.0, output_rms=1.0)
    known = budgeted(passing("bfloat16", op_calls=op_calls(48)))
    result = result_of(msgspec.structs.replace(passing("half"), budget=nothing), known)
    assert [cause.label for cause in run_causes(result)] == ["bfloat16"]


def test_a_run_that_cannot_be_judged_has_no_shares() -> None:
    tiny = run("half", "inaccurate", 1.0, output_rms=1e-9, op_calls=op_calls(48))
    (cause,) = run_causes(result_of(budgeted(tiny), passing("bfloat16")))
    assert cause.text == "cannot be judged: the output is tiny (rms 1e-09): fp16 flushes it to zero"
    assert not cause.fails
    assert (cause.bars, cause.lines, cause.proofs, cause.predicted) == ([], [], [], "")


@pytest.mark.parametrize(
    ("status", "rel_l2", "text"),
    [
        ("ok", 2e-3, "With head in fp32 the error is 2.0e-03 instead of 3.0e-01 (measured)."),
        ("inaccurate", 0.301, "With head in fp32 the error is still 3.0e-01 (measured)."),
        ("nonfinite", None, "With head in fp32 the output has NaN or Inf (measured)."),
    ],
)
def test_an_ablation_is_a_proof(status: Any, rel_l2: float | None, text: str) -> None:
    tried = Ablation(keep_fp32=["head"], blamed_for="share", status=status, rel_l2=rel_l2)
    result = result_of(run("half", "inaccurate", 0.3, ablation=tried))
    assert run_causes(result)[0].proofs == [text]
