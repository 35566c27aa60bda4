"""Findings about training and the recommended way: each fires on its case only; the code trains as it says."""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
import torch
from test_manual import example_of
from torch import Tensor, nn
from training_cases import LOSSES, MODEL, SETUP, STEPS, UNSCALE, a_result, a_trained, a_way

from lowprec_check import scan
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.features.training.advice import training_code
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Diagnostic, Gap, Run, ScanResult
from lowprec_check.schema.training import (
    Divergence,
    EpsilonCheck,
    LossScale,
    LostUpdates,
    ParameterGradient,
    TrainingSetup,
    TrainingWay,
)
from lowprec_check.schema.ways_to_train import WAYS

NAN_LOSSES: list[float | None] = [2.0, 1.9, None]
OUTSIDE = Divergence(step=4, what="weights", value=0.5, limit=0.2, parameter="body.0.weight")


def found(code: str, *runs: Run, **more: Any) -> list[Diagnostic]:
    """What one rule says of these runs, with the recommendation that follows from them."""
    return [diagnostic for diagnostic in conclude(a_result(*runs, **more)).diagnostics if diagnostic.code == code]


def one(code: str, *runs: Run, **more: Any) -> Diagnostic:
    [diagnostic] = found(code, *runs, **more)
    return diagnostic


def advice(*runs: Run, **more: Any) -> Recommendation:
    best = conclude(a_result(*runs, **more)).recommendation
    assert best is not None
    return best


# -- gradients

UNDERFLOWING = [
    ParameterGradient(parameter="head.weight", elements=100, underflow=0.05),
    ParameterGradient(parameter="body.0.weight", elements=100, underflow=0.4),
    ParameterGradient(parameter="body.0.bias", elements=10, underflow=0.1),
    ParameterGradient(parameter="body.1.weight", elements=10, underflow=0.9),
]


def test_gradients_that_underflow_are_grouped_by_module() -> None:
    half = a_trained("half", a_way(status="nonfinite", losses=NAN_LOSSES), gradients=UNDERFLOWING)
    first, second = found("LP501", half)
    assert (first.module, second.module) == ("body.1", "body.0")
    assert "37.3 % of the elements of weight, bias" in second.message
    assert {first.severity, second.severity} == {"warning"}
    assert first.help is None, "no way to train was tried with GradScaler"
    assert not found("LP501", a_trained("half", gradients=UNDERFLOWING[:1]))


STILL = {"body.0.weight": 0.3}


@pytest.mark.parametrize(
    ("default", "suggested", "severity", "says", "helps"),
    [
        (None, None, "note", "training with GradScaler passes", 'GradScaler("cpu")'),  # of a version that did not count
        ({}, None, "note", "training with GradScaler passes", 'GradScaler("cpu")'),
        (STILL, {}, "warning", "still 30 % with GradScaler from 65536", "init_scale=16777216"),
        (STILL, STILL, "warning", "still 30 % with GradScaler from 65536", ""),
    ],
)
def test_a_scaled_loss_avoids_underflow_where_that_was_tried(
    default: Any, suggested: Any, severity: str, says: str, helps: str
) -> None:
    ways = [a_way("grad-scaler", initial_scale=65536.0, underflow=default), a_way()]
    if suggested is not None:
        ways.append(a_way("grad-scaler-suggested", initial_scale=2.0**24, underflow=suggested))
    finding = one("LP501", a_trained("autocast-fp16", *ways, gradients=UNDERFLOWING[:2]))
    assert finding.severity == severity
    assert says in finding.message
    assert helps in (finding.help or "")


def test_a_way_that_fails_is_no_way_to_avoid_underflow() -> None:
    failed = a_way("grad-scaler", "nonfinite", initial_scale=65536.0, losses=NAN_LOSSES, underflow={})
    finding = one("LP501", a_trained("autocast-fp16", failed, a_way(), gradients=UNDERFLOWING[:2]))
    assert finding.severity == "warning"
    assert finding.help is None


def test_underflow_names_bf16_only_if_it_passes() -> None:
    half = a_trained("half", a_way(status="nonfinite", losses=NAN_LOSSES), gradients=UNDERFLOWING[:2])
    bad = a_way(status="inaccurate", divergence=OUTSIDE)
    helps = [one("LP501", half, other).help or "" for other in (a_trained("bfloat16"), a_trained("bfloat16", bad))]
    assert helps == ["bfloat16 passes", ""]


def backward_call(**more: Any) -> OpCall:
    return OpCall("aten.div.Tensor", "body.0", "net.py:7", phase="backward", **more)


def test_the_op_is_named_in_which_a_gradient_becomes_nan() -> None:
    wrong = [ParameterGradient(parameter="body.0.weight", elements=1000, overflow=0.25)]
    calls = [backward_call(), backward_call(introduced_nan=3), backward_call(introduced_inf=1)]
    failed = a_way(status="nonfinite", losses=NAN_LOSSES)
    finding = one("LP502", a_trained("half", failed, gradients=wrong, calls=calls))
    assert finding.severity == "error"
    assert (finding.module, finding.op, finding.source) == ("body.0", "aten.div.Tensor", "net.py:7")
    assert "250 of 1,000 elements (25 %)" in finding.message
    assert "NaN originates in div, whose inputs are finite" in finding.message
    unknown = one("LP502", a_trained("half", gradients=wrong, calls=[backward_call()]))
    assert unknown.severity == "warning"
    assert "originates" not in unknown.message
    assert "loss" not in (unknown.help or "")
    large = [msgspec.structs.replace(wrong[0], absmax=1.6e5)]
    scaled = one("LP502", a_trained("half", gradients=large, calls=[backward_call()]))
    assert "scale the loss down, as GradScaler does: in fp32 they are up to 1.6e+05, over 65504" in (scaled.help or "")


def test_gradients_that_are_not_finite_follow_from_the_loss_or_from_fp32() -> None:
    wrong = [ParameterGradient(parameter="body.0.weight", elements=1000, overflow=0.25)]
    failed = a_way(status="nonfinite", losses=[None])
    assert not found("LP502", a_trained("half", failed, gradients=wrong))
    assert not found("LP502", a_trained("half", gradients=UNDERFLOWING))


def test_ops_of_the_backward_pass_are_not_findings_about_the_output() -> None:
    calls = [backward_call(introduced_inf=1, introduced_nan=1, flushed=0.9, flips=3, to_python=1)]
    run = a_trained("autocast-fp16", a_way("grad-scaler"), calls=calls)
    assert not {"LP201", "LP202", "LP203", "LP304"} & {d.code for d in diagnose(a_result(run))}
    forward = [msgspec.structs.replace(calls[0], phase="forward")]
    run = a_trained("autocast-fp16", a_way("grad-scaler"), calls=forward)
    assert {"LP201", "LP202", "LP203", "LP304"} <= {d.code for d in diagnose(a_result(run))}


@pytest.mark.parametrize(("before", "after", "count"), [(0.01, 0.9, 1), (880.0, 5e5, 0)])
def test_inputs_that_are_wrong_already_are_not_magnified(before: float, after: float, count: int) -> None:
    """As the square of a gradient that is zero but for rounding."""
    call = OpCall(
        "aten.addcmul_.default", "", phase="optimizer", input_error=before, accumulated_error=after, local_error=0.0
    )
    failed = a_way(status="inaccurate", divergence=OUTSIDE)
    assert len(found("LP303", a_trained("bfloat16", failed, calls=[call]))) == count


# -- updates


def lost(name: str, share: float, values: Any = "weight", **more: Any) -> LostUpdates:
    return LostUpdates(name=name, values=values, elements=100, lost=share, **more)


def test_lost_updates_by_parameter_group_and_by_weight_decay() -> None:
    updates = [
        lost("body.weight", 0.9, group=0, decay_lost=1.0),
        lost("body.bias", 0.7, group=0),
        lost("head.weight", 0.05, group=1, decay_lost=0.8),
        lost("norm.weight", 0.05, group=2),
    ]
    decayed, only_decay = found("LP503", a_trained("bfloat16", lost_updates=updates))
    assert "80 % of the updates of weights of parameter group 0" in decayed.message
    assert "by weight decay alone: 100 %" in decayed.message
    assert "most in body.weight: 90 %" in decayed.message
    assert decayed.module == "body"
    assert only_decay.message.startswith("80 % of the updates of weights of parameter group 1 by weight decay alone")
    assert "autocast" in (decayed.help or "")
    assert not found("LP503", a_trained("bfloat16", lost_updates=updates[3:]))


def test_lost_updates_of_an_average() -> None:
    run = a_trained("bfloat16", lost_updates=[lost("head.weight", 0.99, "average")])
    assert "99 % of the updates of the average" in one("LP503", run).message


def test_lost_updates_name_what_recovers_them_here() -> None:
    ways = [
        a_way(status="inaccurate", divergence=OUTSIDE, lost_updates=0.9, state_bytes=1 << 20),
        a_way("master-weights", state_bytes=3 << 20),
        a_way("kahan", state_bytes=2 << 20, lost_updates=0.004),
        a_way("stochastic-rounding", "inaccurate", divergence=OUTSIDE),
    ]
    run = a_trained("bfloat16", *ways, lost_updates=[lost("head.weight", 0.9)])
    text = one("LP503", run).help or ""
    assert "fp32 master weights (3.0 MiB)" in text
    assert "Kahan summation (0.4 % lost, 2.0 MiB)" in text
    assert "as it is: 1.0 MiB" in text
    assert "stochastic" not in text
    assert "autocast" not in text
    both = (
        "autocast-bf16 passes, with its weights in fp32; this precision with fp32 master weights (3.0 MiB); with Kahan"
    )
    assert (one("LP503", run, a_trained("autocast-bf16")).help or "").startswith(both)
    weights_in_16_bits = a_trained("autocast-bf16", lost_updates=[lost("head.weight", 0.9)], status="inaccurate")
    assert "autocast, which" not in (one("LP503", weights_in_16_bits).help or "")


def test_buffers_and_optimizer_state_that_stall() -> None:
    updates = [
        lost("a.norm.running_var", 0.6, "buffer"),
        lost("b.norm.running_var", 0.8, "buffer"),
        lost("b.norm.running_mean", 0.3, "buffer"),
        lost("fc.weight · exp_avg_sq", 0.99, "optimizer state"),
    ]
    buffers, state = found("LP504", a_trained("bfloat16", lost_updates=updates))
    assert "70 % of the updates of running_var of 2 tensors" in buffers.message
    assert (buffers.module, state.module) == ("b.norm", "fc")
    assert "exp_avg_sq" in state.message
    assert not found("LP503", a_trained("bfloat16", lost_updates=updates))


def test_an_epsilon_of_zero_and_the_implementations_that_differ() -> None:
    checks = [
        EpsilonCheck(implementation="as given", nonfinite=1.0),
        EpsilonCheck(implementation="loop", nonfinite=1.0),
        EpsilonCheck(implementation="foreach", nonfinite=1.0),
        EpsilonCheck(implementation="fused", nonfinite=0.0),
    ]
    finding = one("LP506", a_trained("half", epsilon=checks))
    assert "with loop and foreach, not with fused" in finding.message
    assert "fused=True avoids it too" in (finding.help or "")
    given = EpsilonCheck(implementation="as given", nonfinite=0.0)
    assert finding.severity == "warning"
    note = one("LP506", a_trained("half", epsilon=[given, *checks[1:]]))
    assert (note.severity, note.help) == ("note", None)
    assert note.message.startswith("not with the optimizer as given: a step with zero gradients")
    failed = EpsilonCheck(implementation="fused", nonfinite=1.0, error="RuntimeError: no")
    assert not found("LP506", a_trained("half", epsilon=[checks[3], failed]))


# -- steps


def test_unscaling_fp16_gradients_is_explained() -> None:
    scaler = a_way("grad-scaler", "error", exception=UNSCALE, losses=[2.0])
    run = a_trained("half", a_way(), scaler, a_way("master-weights-scaled", initial_scale=65536.0))
    finding = one("LP505", run)
    assert finding.severity == "note"
    assert finding.help == "passes with fp32 master weights and GradScaler"
    autocast = a_trained("autocast-fp16", a_way("grad-scaler", initial_scale=65536.0))
    both = "autocast-fp16 passes with GradScaler; this precision with fp32 master weights and GradScaler"
    assert one("LP505", run, autocast).help == both
    first = a_trained("half", scaler)
    assert one("LP505", first).severity == "error"
    assert not found("LP108", first)
    later = msgspec.structs.replace(a_trained("half", a_way()), status="error", exception=UNSCALE, failed_call=2)
    words = "look at the weights that the steps before left, and what the model keeps between calls"
    assert one("LP108", later).help == words  # the weights may have become NaN
    other = msgspec.structs.replace(scaler, exception=msgspec.structs.replace(UNSCALE, message="no"))
    assert not found("LP505", a_trained("half", other))


@pytest.mark.parametrize(
    ("way", "message", "module"),
    [
        (a_way(status="inaccurate", divergence=OUTSIDE), "from step 4 on", "body.0"),
        (
            a_way(status="inaccurate", divergence=Divergence(step=2, what="loss", value=-0.1, limit=-0.2)),
            "it has changed by -0.1",
            None,
        ),
        (
            a_way(status="inaccurate", divergence=Divergence(step=1, what="movement", value=0.01, limit=0.9)),
            "moved 0.01 times as far",
            None,
        ),
        (
            a_way(status="inaccurate", divergence=Divergence(step=0, what="loss", value=3.0, limit=0.1)),
            "before the first step",
            None,
        ),
        (a_way(status="nonfinite", losses=NAN_LOSSES, failed_step=3), "NaN or Inf in step 3", None),
        (a_way(status="nonfinite", losses=[*LOSSES[:-1], None]), f"NaN or Inf after step {STEPS}", None),
        (a_way("grad-scaler", "nonfinite", losses=[], skipped_steps=25), "skips step 1 with every scale", None),
        (a_way(status="nonfinite", failed_step=STEPS), f"weights are NaN or Inf after step {STEPS}", None),
    ],
)
def test_training_that_diverges(way: TrainingWay, message: str, module: str | None) -> None:
    finding = one(
        "LP507",
        a_trained("half", way),
    )
    assert message in finding.message
    tells = way.divergence is not OUTSIDE  # only its weights differ
    assert (finding.module, finding.severity) == (module, "error" if tells else "warning")
    assert not found("LP301", a_trained("half", way))
    assert "autocast-bf16" in (one("LP507", a_trained("half", way), a_trained("autocast-bf16")).help or "")


def test_training_that_passes_or_raises_does_not_diverge() -> None:
    raised = a_way(status="error", exception=UNSCALE, losses=[])
    assert not found("LP507", a_trained("half"), a_trained("bfloat16", raised))


def test_one_autocast_around_all_steps() -> None:
    stale = a_way("one-autocast", "inaccurate", losses=[2.0] * (STEPS + 1), divergence=OUTSIDE)
    finding = one("LP508", a_trained("autocast-bf16", a_way(), stale))
    assert "the loss is still 2 after the last step; entered in each step, the loss goes from 2 to 1" in finding.message
    assert finding.severity == "note"
    assert not found("LP508", a_trained("autocast-bf16", a_way(), a_way("one-autocast")))
    failed = a_way(status="inaccurate", divergence=OUTSIDE)
    assert not found("LP508", a_trained("autocast-bf16", failed, stale))


def test_a_scaler_that_skips_many_steps() -> None:
    def run(skipped: int, scale: LossScale | None = None) -> Run:
        way = a_way("grad-scaler", initial_scale=65536.0, final_scale=4096.0, skipped_steps=skipped)
        return a_trained("autocast-fp16", way, loss_scale=scale)

    assert not found("LP509", run(1))
    finding = one("LP509", run(4))
    assert "skipped 4 steps with an initial loss scale of 65536" in finding.message
    assert "ended at 4096" in (finding.help or "")
    scale = LossScale(scale=2048.0, largest=10.0, underflow_unscaled=0.0, skipped_steps=0)
    assert one("LP509", run(4, scale)).help == "use GradScaler(init_scale=2048), which skipped no step"
    long = msgspec.structs.replace(SETUP, steps=100)
    assert not found("LP509", run(4), setup=long)


@pytest.mark.parametrize(
    ("phase", "prefix", "advised"),
    [
        ("forward", "no kernel", "compute it in fp32 and cast back"),
        ("backward", "in the backward pass: no kernel", "compute the op of the forward pass in fp32, on x.float()"),
        (
            "optimizer",
            "in the optimizer step: no kernel",
            "keep the weights and the optimizer's state in fp32: fp32 master weights",
        ),
    ],
)
def test_gaps_name_the_part_of_the_step(phase: Any, prefix: str, advised: str) -> None:
    gap = Gap(
        op="aten.foo.default",
        layer="dispatch",
        kind="missing-kernel",
        phase=phase,
        module="body",
        source=None,
        dtypes=["float16"],
        message="no kernel",
    )
    failed = a_trained("half", a_way(status="error", exception=UNSCALE, losses=[]), gaps=[gap])
    finding = one("LP101", failed, a_trained("autocast-fp16", calls=[OpCall("aten.foo.default")]))
    assert finding.message == prefix
    assert finding.help == f"{advised}; it runs under autocast"

    under_autocast = a_trained("autocast-fp16", a_way(status="error", exception=UNSCALE, losses=[]), gaps=[gap])
    advised = "compute it in fp32 and cast back" if phase == "optimizer" else advised  # its weights are in fp32
    assert (one("LP101", under_autocast).help or "").startswith(advised)


@pytest.mark.parametrize(
    ("phase", "advised"),
    [
        ("forward", "not tried: the inputs of this op in fp32"),
        ("backward", "not tried: the inputs of the op of the forward pass in fp32"),
        ("optimizer", "not tried: the modules in fp32 whose gradients it reads"),
    ],
)
def test_an_op_that_magnifies_errors_says_which_inputs_were_not_tried(phase: Any, advised: str) -> None:
    call = OpCall("aten.foo.default", phase=phase, input_error=1e-3, accumulated_error=0.5, local_error=0.0)
    failed = a_trained("autocast-fp16", a_way(status="error", exception=UNSCALE, losses=[]), calls=[call])
    assert one("LP303", failed).help == advised


# -- the recommendation

BAD = a_way(status="inaccurate", divergence=OUTSIDE, lost_updates=0.9)


def said(result: ScanResult, kind: str) -> list[str]:
    return [f"{', '.join(its.runs)}: {its.text}" for its in statements(result) if its.kind == kind]


def test_autocast_is_recommended_before_a_cast() -> None:
    cast = a_trained("bfloat16", a_way(lost_updates=0.2), latency_ms=2.0)
    autocast = a_trained("autocast-bf16", a_way(distances=[0.05] * STEPS), latency_ms=5.0)
    best = advice(cast, autocast)
    assert (best.precision, best.way) == ("autocast-bf16", "plain")
    assert "The weights stay in fp32" in best.reason
    assert "No GradScaler" in best.reason
    assert said(conclude(a_result(cast, autocast)), "also-faster") == [
        "bfloat16: passes too, 5.0 times as fast as fp32, but its weights are in bf16: rounding loses 20 % of their "
        "updates"
    ]


def test_a_cast_that_saves_memory_is_named_where_autocast_gains_nothing() -> None:
    ways = a_way(lost_updates=0.2)
    fp32 = {"peak_memory_bytes": 8 << 20}
    autocast = a_trained("autocast-bf16", latency_ms=40.0, peak_memory_bytes=8 << 20)
    result = a_result(a_trained("bfloat16", ways, latency_ms=10.0, peak_memory_bytes=4 << 20), autocast)
    result = conclude(
        msgspec.structs.replace(result, runs=[msgspec.structs.replace(result.runs[0], **fp32), *result.runs[1:]])
    )
    assert verdict(result).startswith("Stay in fp32: autocast-bf16 is 4.0 times slower")
    assert said(result, "also-smaller") == [
        "bfloat16: passes too, saves 50 % of the peak memory, but its weights are in bf16: rounding loses 20 % of "
        "their updates"
    ]


def test_a_run_that_fails_or_is_slower_than_fp32_is_never_called_faster() -> None:
    autocast = a_trained("autocast-bf16", latency_ms=40.0)
    assert not said(conclude(a_result(a_trained("half", BAD, latency_ms=2.0), autocast)), "also-faster")
    result = conclude(a_result(a_trained("bfloat16", latency_ms=20.0), autocast))
    assert not said(result, "also-faster")
    assert "faster" not in (result.recommendation.reason if result.recommendation else "faster")


def test_the_verdict_says_its_margin() -> None:
    near = conclude(a_result(a_trained("autocast-bf16", a_way(distances=[0.18] * STEPS), latency_ms=5.0)))
    assert said(near, "training")[0].endswith("distance of the weights from fp32's: 90 % of the limit")
    assert "90 % of the limit from 3 fp32 runs with other seeds" in said(near, "trained")[0]
    tones = [its.tone for its in statements(near) if its.kind in ("verdict", "training", "trained")]
    assert tones == ["warn", "warn", "warn"]
    random = a_trained("bfloat16", BAD, a_way("stochastic-rounding", distances=[0.9] * STEPS))
    assert "which is not judged" in said(conclude(a_result(random)), "trained")[0]


def test_the_distance_decides_between_equals() -> None:
    far, near = a_way(distances=[0.01, 0.05]), a_way("grad-scaler", distances=[0.05, 0.01], initial_scale=65536.0)
    best = advice(a_trained("autocast-bf16", far), a_trained("autocast-fp16", near, underflow=0.2))
    assert (best.precision, best.way) == ("autocast-fp16", "grad-scaler")
    assert "With GradScaler from 65536, no step skipped; 20 % of the elements of gradients underflow" in best.reason
    assert "1.0e-02 from those of fp32 (relative to how far these moved), 5 % of the limit" in best.reason
    accelerated = advice(a_trained("autocast-bf16", far), a_trained("autocast-fp16", near), bf16_accelerated=True)
    assert accelerated.precision == "autocast-bf16"


def test_what_the_framework_of_a_script_has_a_switch_for_comes_first() -> None:
    runs = [
        a_trained("autocast-bf16", a_way(distances=[0.05] * STEPS)),
        a_trained("autocast-fp16", a_way("grad-scaler", distances=[0.01] * STEPS, initial_scale=65536.0)),
    ]
    for framework, wanted in (("", "autocast-fp16"), ("lightning", "autocast-bf16")):
        setup = msgspec.structs.replace(SETUP, script="train.py:3", framework=framework)
        assert advice(*runs, setup=setup).precision == wanted


def test_another_way_is_recommended_if_no_run_passes_as_it_is() -> None:
    ways = [BAD, a_way("kahan"), a_way("master-weights", distances=[0.05] * STEPS), a_way("one-autocast")]
    best = advice(a_trained("bfloat16", *ways), a_trained("half", BAD, a_way("stochastic-rounding")))
    assert (best.precision, best.way) == ("bfloat16", "master-weights")
    assert "as it is, rounding loses 90 % of the updates of weights" in best.reason
    assert "Weights and optimizer state take 3.0 MiB, in fp32 6.0 MiB." in best.reason
    assert "As it is it does not pass: weights diverge from step 4" in best.reason
    assert (best.speedup, best.worth, best.stay_in_fp32) == (None, "unknown", False)
    scaled = a_trained("autocast-fp16", BAD, a_way("grad-scaler-suggested", initial_scale=8.0))
    assert advice(a_trained("bfloat16", *ways), scaled).way == "grad-scaler-suggested"


def test_a_plan_is_not_recommended_over_a_way_that_takes_less_memory() -> None:
    bad = a_way(status="nonfinite", losses=NAN_LOSSES)
    plan = a_trained("plan", a_way(), base="half", keep_fp32=["body", "head"], peak_memory_bytes=8 << 20)
    for peak, way in ((7 << 20, "master-weights"), (9 << 20, "plain")):
        half = a_trained("half", bad, a_way("master-weights", peak_memory_bytes=peak))
        best = advice(half, plan)
        assert (best.precision, best.way, bool(best.keep_fp32)) == ("half", way, way == "plain")


def test_nothing_is_recommended_if_nothing_passes() -> None:
    assert conclude(a_result(a_trained("half", BAD, a_way("one-autocast")))).recommendation is None


def test_the_suggested_scale_is_used_if_it_skips_fewer_steps() -> None:
    def ways(skipped: int) -> list[TrainingWay]:
        return [
            a_way("grad-scaler", initial_scale=65536.0, skipped_steps=4),
            a_way("grad-scaler-suggested", initial_scale=128.0, skipped_steps=skipped),
        ]

    best = advice(a_trained("autocast-fp16", *ways(0)))
    assert best.way == "grad-scaler-suggested"
    assert "init_scale=128.0" in best.code
    assert advice(a_trained("autocast-fp16", *ways(4))).way == "grad-scaler"
    slow = advice(a_trained("autocast-fp16", *ways(0), latency_ms=30.0))
    assert (slow.way, slow.worth, slow.stay_in_fp32) == ("grad-scaler-suggested", "nothing", True)


def test_a_scan_without_training_is_judged_by_its_output() -> None:
    result = a_result(a_trained("half", BAD, status="ok"))
    result = msgspec.structs.replace(result, training=None)
    best = conclude(result).recommendation
    assert best is not None
    assert (best.precision, best.way) == ("half", None)


# -- the code


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 4


def loss(output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), LABELS)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pasted(precision: str, way: TrainingWay, setup: TrainingSetup = SETUP, **more: Any) -> dict[str, Any]:
    """The names after the code was executed, beside what the user's file defines."""
    code = training_code(RunKey(precision), msgspec.structs.replace(MODEL, **more), setup, way)
    space: dict[str, Any] = {"make_model": make_model, "inputs": INPUTS, "loss": loss, "optimizer": optimizer}
    exec(compile(code, "pasted.py", "exec"), space)
    return space


def trained(
    dtype: torch.dtype | None, *, cast: bool = False, scaler: Any = None, steps: int = STEPS
) -> dict[str, Tensor]:
    """The weights after the steps, by a loop of our own."""
    model = make_model().to(dtype) if cast else make_model()
    updates = optimizer(model.parameters())
    for _ in range(steps):
        updates.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None and not cast):
            value = loss(model(INPUTS.to(dtype) if cast else INPUTS))
        (value if scaler is None else scaler.scale(value)).backward()
        if scaler is None:
            updates.step()
        else:
            scaler.step(updates)
            scaler.update()
    return dict(model.named_parameters())


def assert_same(space: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    for name, parameter in space["model"].named_parameters():
        assert parameter.dtype == wanted[name].dtype
        assert torch.equal(parameter, wanted[name]), name


def test_the_code_trains_under_autocast() -> None:
    assert_same(pasted("autocast-bf16", a_way()), trained(torch.bfloat16))


def test_the_code_trains_a_cast_model() -> None:
    assert_same(pasted("bfloat16", a_way()), trained(torch.bfloat16, cast=True))


@pytest.mark.parametrize("scale", [65536.0, 128.0])
def test_the_code_scales_the_loss(scale: float) -> None:
    space = pasted("autocast-fp16", a_way("grad-scaler", initial_scale=scale))
    assert_same(space, trained(torch.float16, scaler=torch.amp.GradScaler("cpu", init_scale=scale)))
    assert space["scaler"].get_scale() <= scale


@pytest.mark.parametrize(
    ("precision", "name", "scale"),
    [
        ("bfloat16", "master-weights", None),
        ("half", "master-weights-scaled", 1024.0),
        ("bfloat16", "split-weights", None),
        ("bfloat16", "kahan", None),
        ("bfloat16", "stochastic-rounding", None),
    ],
)
def test_the_code_keeps_what_a_cast_loses(precision: str, name: str, scale: float | None) -> None:
    setup = msgspec.structs.replace(SETUP, steps=200, optimizer_code="torch.optim.SGD(parameters, lr=1e-4)")
    setups = {"fp32": setup, precision: setup}
    exact = pasted("fp32", a_way(), setups["fp32"])
    plain = pasted(precision, a_way(), setup)
    kept = pasted(precision, a_way(name, initial_scale=scale), setup)
    assert kept["updater"].parameters[0].dtype == getattr(torch, "float16" if precision == "half" else precision)

    def distance(space: dict[str, Any]) -> float:
        first = torch.cat([p.detach().flatten() for p in make_model().parameters()])
        moved = [
            torch.cat([p.detach().float().flatten() for p in given["model"].parameters()]) - first
            for given in (space, exact)
        ]
        return float((moved[0] - moved[1]).norm() / moved[1].norm())

    assert distance(kept) < 0.9 * distance(plain)


def test_what_is_pasted_is_what_the_scan_ran() -> None:
    """The class in the code has the same text as the one that the engine runs."""
    for name in ("master-weights", "split-weights", "kahan", "stochastic-rounding"):
        code = training_code(RunKey("bfloat16"), MODEL, SETUP, a_way(name))
        updates = WAYS.get(name).updates(nn.Linear(2, 2), torch.optim.SGD)
        text = textwrap.dedent(inspect.getsource(type(updates))).strip()
        assert text.startswith(f"class {type(updates).__name__}:")
        assert text in code


def test_the_code_calls_the_extension_that_is_recommended() -> None:
    fails = a_way(status="inaccurate", divergence=OUTSIDE)
    best = advice(a_trained("autocast-bf16", fails, a_way("ipex-split")))
    assert best.way == "ipex-split"
    assert "It trains with Intel's extension, split weights." in best.reason
    assert "stay in fp32" not in best.reason
    lines = best.code.splitlines()
    assert "import intel_extension_for_pytorch as ipex" in lines
    (call,) = [line for line in lines if "ipex.optimize(" in line]
    assert call.startswith("model, updater = ipex.optimize(model, optimizer=updater, dtype=torch.bfloat16, ")
    assert "split_master_weight_for_bf16=True" in call
    pure = a_trained("bfloat16", fails, a_way("split-weights"))
    assert advice(a_trained("autocast-bf16", fails, a_way("ipex-split")), pure).way == "ipex-split"  # autocast first


def test_the_code_uses_targets_averages_and_default_optimizers() -> None:
    setup = msgspec.structs.replace(
        SETUP,
        loss_setup=["targets = (torch.ones(8, 4),)"],
        loss_code="(output - targets[0]).square().mean()",
        optimizer_code="torch.optim.AdamW(parameters, lr=0.001)",
        default_optimizer=True,
        average_code="torch.optim.swa_utils.AveragedModel(model)",
        new_batches=True,
    )
    space = pasted("bfloat16", a_way(), setup)
    assert space["targets"][0].dtype == torch.bfloat16
    assert space["optimizer"].state
    assert space["average"].n_averaged == STEPS


def test_modules_stay_in_fp32_in_the_code() -> None:
    code = training_code(RunKey("bfloat16"), MODEL, SETUP, a_way(), ["2"])
    space: dict[str, Any] = {"make_model": make_model, "inputs": INPUTS, "loss": loss, "optimizer": optimizer}
    exec(code, space)
    assert [p.dtype for p in space["model"].parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    before = dict(make_model().named_parameters())
    assert not any(torch.equal(p.float(), before[n]) for n, p in space["model"].named_parameters())


# -- the examples of the manual pages


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + 4)


def run_examples(code: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """The names after each version of the example of a page, beside those that ``make`` returns."""
    spaces = []
    for text in example_of(code):
        space = {"torch": torch, "inputs": INPUTS, "targets": LABELS} | make()
        exec(text, space)
        spaces.append(space)
    return spaces


def test_the_example_of_underflowing_gradients() -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(16, 4)
        small = lambda output, labels: 1e-7 * nn.functional.cross_entropy(output.float(), labels)  # noqa: E731
        return {"model": model, "criterion": small, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}

    before, after = (space["model"].weight.grad for space in run_examples("LP501", make))
    assert (before == 0).float().mean() > 0.1
    assert (after == 0).float().mean() < 0.01


def test_the_example_of_a_gradient_that_is_not_finite() -> None:
    finite = []
    for text in example_of("LP502"):
        x = torch.full((2, 8), 1e-3, dtype=torch.half, requires_grad=True)
        space = {"torch": torch, "x": x}
        exec(text, space)
        y: Any = space["y"]
        y.backward(torch.full_like(y, 1000.0))
        assert x.grad is not None
        finite.append(bool(x.grad.isfinite().all()))
    assert finite == [False, True]


@pytest.mark.parametrize("code", ["LP503", "LP507"])
def test_the_examples_of_lost_updates(code: str) -> None:
    before, after = run_examples(code, lambda: {"model": nn.Linear(16, 4)})
    moved = []
    for space in (before, after):
        weight = space["model"].weight
        known = weight.detach().clone()
        space["output"].float().square().mean().backward()
        torch.optim.SGD([weight], lr=1e-6).step()
        moved.append(float((weight != known).float().mean()))
    assert moved[0] < 0.5 < moved[1]


def test_the_example_of_running_statistics() -> None:
    means = []
    for space in run_examples("LP504", lambda: {"model": Small()}):
        for _ in range(1500):
            space["model"](INPUTS.bfloat16())
        means.append(float(space["model"].norm.running_mean.float().mean()))
    assert means[0] < 0.75 * means[1]


def test_the_example_of_unscaling() -> None:
    before, after = run_examples("LP505", lambda: {"model": nn.Linear(16, 4)})
    for space in (before, after):
        scaler = torch.amp.GradScaler("cpu")
        updates = torch.optim.SGD(space["model"].parameters(), lr=0.1)
        scaler.scale(space["output"].float().mean()).backward()
        if space is before:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler.step(updates)
        else:
            scaler.step(updates)


def test_the_example_of_an_epsilon() -> None:
    finite = []
    for space in run_examples("LP506", lambda: {"model": nn.Linear(16, 4)}):
        for parameter in space["model"].parameters():
            parameter.grad = torch.zeros_like(parameter)
        space["optimizer"].step()
        finite.append(all(bool(p.isfinite().all()) for p in space["model"].parameters()))
    assert finite == [False, True]


def test_the_example_of_a_stale_cache() -> None:
    def make() -> dict[str, Any]:
        model = make_model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    before, after = run_examples("LP508", make)
    first = make_model()(INPUTS).square().mean().item()
    assert before["loss"].item() == pytest.approx(first, rel=0.02)
    assert after["loss"].item() < 0.9 * first


def test_the_example_of_an_initial_scale() -> None:
    skipped = []
    for space in run_examples("LP509", dict):
        weight = nn.Parameter(torch.ones(4))
        updates = torch.optim.SGD([weight], lr=0.1)
        with torch.autocast("cpu", dtype=torch.float16):
            output = weight.half() * 4
        space["scaler"].scale(output.float().sum()).backward()
        known = weight.detach().clone()
        space["scaler"].step(updates)
        skipped.append(torch.equal(weight, known))
    assert skipped == [True, False]


def test_a_result_of_training_is_read_as_it_was_saved() -> None:
    result = conclude(a_result(a_trained("bfloat16", BAD, a_way("kahan")), copy.copy(a_trained("half", BAD))))
    assert ScanResult.from_json(result.to_json()) == result


# -- a scan


def dtype_of(run: Run) -> torch.dtype:
    assert run.basis is not None
    dtype: torch.dtype = getattr(torch, run.basis.format.name)
    return dtype


@pytest.mark.slow
def test_the_code_gives_the_loss_of_the_scan() -> None:
    result = scan(
        make_model(),
        INPUTS,
        loss=loss,
        optimizer=optimizer,
        train=True,
        steps=6,
        precisions=["bfloat16", "autocast-bf16", "autocast-fp16"],
        plan=False,
    )
    best = result.recommendation
    assert best is not None
    assert result.training is not None
    assert best.way in ("plain", "grad-scaler")
    tried = []
    for run in result.runs:
        for way in run.training.ways if run.training else []:
            if way.name != "one-autocast" and not way.skipped_steps:  # the scan repeats a skipped step
                setup = msgspec.structs.replace(result.training, loss_code="", optimizer_code="")
                code = training_code(run.key, result.model, setup, way)
                space = {"model": make_model(), "inputs": INPUTS, "loss": loss, "optimizer": optimizer}
                exec(code, space)
                model, inputs = space["model"], space["inputs"]
                with torch.no_grad(), torch.autocast("cpu", dtype_of(run), enabled="autocast" in run.precision):
                    after = loss(model(inputs)).item()
                assert after == pytest.approx(way.losses[-1], rel=1e-3), (run.precision, way.name)
                tried.append((run.precision, way.name))
    assert {("fp32", "plain"), ("bfloat16", "kahan"), ("autocast-bf16", "plain")} <= set(tried)
    assert result.recommendation.code == training_code(
        result.run(best.precision).key,
        result.model,
        result.training,
        next(way for way in result.run(best.precision).training.ways if way.name == best.way),  # type: ignore[union-attr]
        torch_version=result.torch,
    )
