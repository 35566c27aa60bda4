"""A result of a scan with ``--train`` for tests of every format: each way to train, gradients, updates, a loss scale.

``training_result(text)`` puts ``text`` wherever a user's model, file or exception could put a string.
"""

from __future__ import annotations

from typing import Any

import msgspec
from shared_result import gap, latency, op_calls, run, shared_result

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import (
    Divergence,
    EpsilonCheck,
    LossScale,
    LostUpdates,
    ParameterGradient,
    TrainingRun,
    TrainingSetup,
    TrainingWay,
)
from lowprec_check.schema.verdict import ExceptionInfo

STEPS = 8
FP32_LOSSES = [2.303, 2.121, 1.967, 1.835, 1.722, 1.625, 1.542, 1.472, 1.412]
UNSCALE = "Attempting to unscale FP16 gradients."


def losses(shift: float = 0.0, *, from_step: int = 0) -> list[float | None]:
    """The loss of fp32, to which each step after ``from_step`` adds ``shift``."""
    return [round(loss + shift * max(0, step - from_step), 6) for step, loss in enumerate(FP32_LOSSES)]


def distances(first: float, growth: float = 1.0) -> list[float]:
    """One per step, each ``growth`` times the one before."""
    return [first * growth**step for step in range(STEPS)]


def way(name: str, status: str = "ok", **more: Any) -> TrainingWay:
    """A way to train that stays near fp32."""
    fields: dict[str, Any] = {
        "losses": losses(0.0004),
        "distances": distances(0.012, 1.08),
        "progress": 0.99,
        "moved": 0.99,
        "state_bytes": 140 << 20,
    }
    return TrainingWay(name=name, status=status, **fields | more)  # type: ignore[arg-type]


def in_phases(calls: OpCalls) -> OpCalls:
    """``calls`` of a training step: a third in each phase."""
    phases: list[Phase] = ["forward", "backward", "optimizer"]
    column = [phases[3 * index // len(calls)] for index in range(len(calls))]
    return msgspec.structs.replace(calls, phase=column)


def setup(text: str = "", **more: Any) -> TrainingSetup:
    """Eight steps, judged by three other seeds."""
    fields: dict[str, Any] = {
        "steps": STEPS,
        "loss": text or "cross-entropy with random labels",
        "optimizer": text or "AdamW(lr=0.001, weight_decay=0.01)",
        "default_loss": not text,
        "loss_setup": ["labels = torch.randint(0, 10, (4,))"],
        "loss_code": text or "torch.nn.functional.cross_entropy(output, labels)",
        "optimizer_code": text or "torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.01)",
        "seeds": 3,
        "varied": ["initial weights", "batches", "random draws"],
        "losses": FP32_LOSSES,
        "loss_low": [loss - FP32_LOSSES[0] - 0.012 * step for step, loss in enumerate(FP32_LOSSES)],
        "loss_high": [loss - FP32_LOSSES[0] + 0.009 * step for step, loss in enumerate(FP32_LOSSES)],
        "limit_low": [loss - FP32_LOSSES[0] - 0.04 * step for step, loss in enumerate(FP32_LOSSES)],
        "limit_high": [loss - FP32_LOSSES[0] + 0.03 * step for step, loss in enumerate(FP32_LOSSES)],
        "distances": distances(0.19, 1.05),
    }
    return TrainingSetup(**fields | more)


def _gradients(text: str, underflow: float, error: float, overflow: float = 0.0) -> list[ParameterGradient]:
    """Three parameters, of which one underflows and one overflows."""
    shares = (None, None, None) if overflow else (0.27, 0.65, 0.08)
    return [
        ParameterGradient(
            parameter=text or "encoder.0.weight", elements=9408, error=error, error_share=shares[0], absmax=0.031
        ),
        ParameterGradient(
            parameter=text or "encoder.blocks.0.conv.weight",
            elements=36_864,
            error=1.7 * error,
            error_share=shares[1],
            absmax=8.2e-4,
            underflow=min(1.0, 1.4 * underflow),
        ),
        ParameterGradient(
            parameter=text or "head.out.weight",
            elements=4096,
            error=None if overflow else 0.5 * error,
            error_share=shares[2],
            absmax=0.21,
            underflow=underflow / 8,
            overflow=overflow,
        ),
    ]


def _half(text: str) -> TrainingRun:
    diverges = Divergence(step=6, what="weights", value=0.72, limit=0.49, parameter=text or "head.out.weight")
    error = ExceptionInfo(type="ValueError", message=text or UNSCALE, phase="optimizer")
    return TrainingRun(
        ways=[
            way(
                "plain",
                "nonfinite",
                failed_step=3,
                losses=[2.304, 2.127, None],
                distances=distances(0.11, 1.2)[:2],
                lost_updates=0.42,
                state_bytes=70 << 20,
            ),
            TrainingWay(name="grad-scaler", status="error", exception=error, failed_step=1),
            way("master-weights", "inaccurate", distances=distances(0.343, 1.16), divergence=diverges),
            way(
                "master-weights-scaled",
                skipped_steps=1,
                initial_scale=65536.0,
                final_scale=32768.0,
                state_bytes=175 << 20,
            ),
        ],
        gradients=_gradients(text, 0.34, 0.02, overflow=0.003),
        gradient_error=None,
        underflow=0.34,
        lost_updates=[
            LostUpdates(name=text or "encoder.0.weight", values="weight", elements=9408, lost=0.41, group=0),
            LostUpdates(name=text or "head.out.weight", values="weight", elements=4096, lost=0.44, group=1),
        ],
        epsilon=[
            EpsilonCheck(implementation="as given", nonfinite=1.0),
            EpsilonCheck(implementation="loop", nonfinite=1.0),
            EpsilonCheck(implementation="foreach", nonfinite=1.0),
            EpsilonCheck(implementation="fused", nonfinite=0.0, error=text or None),
        ],
    )


def _bfloat16(text: str) -> TrainingRun:
    name = text or "head.out.weight"
    diverges = Divergence(step=3, what="loss", value=-0.347, limit=-0.38, parameter=name)
    stalls = Divergence(step=2, what="progress", value=0.03, limit=0.9, parameter=name)
    lost: list[dict[str, Any]] = [
        {"name": "encoder.0.weight", "values": "weight", "elements": 9408, "lost": 0.95, "group": 0, "decay_lost": 1.0},
        {"name": "head.out.weight", "values": "weight", "elements": 4096, "lost": 0.99, "group": 0, "decay_lost": 1.0},
        {"name": "encoder.bn.running_mean", "values": "buffer", "elements": 64, "lost": 0.22},
        {"name": "encoder.0.weight · exp_avg_sq", "values": "optimizer state", "elements": 9408, "lost": 0.2},
        {"name": "head.out.weight · exp_avg_sq", "values": "optimizer state", "elements": 4096, "lost": 0.61},
        {"name": "head.out.weight · exp_avg", "values": "optimizer state", "elements": 4096, "lost": 0.0},
        {"name": "module.head.out.weight", "values": "average", "elements": 4096, "lost": 1.0},
    ]
    return TrainingRun(
        ways=[
            way(
                "plain",
                "inaccurate",
                losses=losses(0.06, from_step=1),
                distances=distances(0.93, 1.005),
                progress=0.05,
                moved=0.05,
                divergence=diverges,
                lost_updates=0.962,
                state_bytes=70 << 20,
            ),
            way("master-weights", state_bytes=175 << 20),
            way("split-weights", state_bytes=140 << 20),
            way(
                "kahan",
                "inaccurate",
                state_bytes=93 << 20,
                distances=distances(0.97),
                progress=0.03,
                moved=0.03,
                divergence=stalls,
            ),
            way(
                "stochastic-rounding",
                state_bytes=70 << 20,
                distances=distances(0.16, 1.01),
                losses=losses(0.004),
            ),
        ],
        gradients=_gradients(text, 0.0, 0.013),
        gradient_error=0.016,
        underflow=0.0,
        lost_updates=[LostUpdates(**(one | {"name": text or one["name"]})) for one in lost],
    )


def _autocast_fp16(text: str) -> TrainingRun:
    return TrainingRun(
        ways=[
            way("grad-scaler", initial_scale=65536.0, final_scale=65536.0),
            way("plain", distances=distances(0.08)),
            way("grad-scaler-suggested", initial_scale=131072.0, final_scale=131072.0, distances=distances(0.011)),
        ],
        gradients=_gradients(text, 0.34, 0.004),
        gradient_error=0.0061,
        underflow=0.34,
        loss_scale=LossScale(
            scale=131072.0,
            largest=0.21,
            largest_at=text or "encoder.blocks.1",
            underflow_unscaled=0.34,
            underflow=0.003,
            skipped_steps=0,
        ),
    )


def _autocast_bf16(text: str) -> TrainingRun:
    stale = Divergence(step=1, what="loss", value=0.0, limit=-0.17, parameter=text or None)
    return TrainingRun(
        ways=[
            way("plain"),
            way(
                "one-autocast",
                "inaccurate",
                losses=[2.303] * 9,
                distances=distances(1.0),
                progress=0.0,
                moved=0.0,
                divergence=stale,
            ),
        ],
        gradients=_gradients(text, 0.0, 0.005),
        gradient_error=0.0072,
        underflow=0.0,
    )


def _runs(text: str) -> list[Run]:
    backward = gap(
        text,
        op=text or "aten._pdist_backward.default",
        phase="backward",
        module=text or "head",
        message=text or "\"pdist_backward\" not implemented for 'Half'",
    )
    fp32 = way("plain", losses=list(FP32_LOSSES), distances=[])
    return [
        run(
            "fp32",
            latency_ms=10.0,
            latency=latency(10.0),
            peak_memory_bytes=6 << 20,
            tolerance=None,
            training=TrainingRun(ways=[fp32]),
        ),
        run(
            "half",
            "nonfinite",
            8.1e-4,
            gaps=[backward],
            op_calls=in_phases(op_calls(48, nan=20, text=text)),
            training=_half(text),
        ),
        run(
            "bfloat16",
            "inaccurate",
            6.3e-3,
            tolerance=5e-2,
            op_calls=in_phases(op_calls(48, half=False, text=text)),
            training=_bfloat16(text),
        ),
        run(
            "autocast-fp16",
            "ok",
            7.4e-4,
            latency_ms=8.5,
            latency=latency(8.5, 1.18),
            op_calls=in_phases(op_calls(60, text=text)),
            training=_autocast_fp16(text),
        ),
        run(
            "autocast-bf16",
            "ok",
            4.7e-3,
            tolerance=5e-2,
            latency_ms=7.25,
            latency=latency(7.25, 1.38),
            op_calls=in_phases(op_calls(60, half=False, text=text)),
            training=_autocast_bf16(text),
        ),
        run("half", "skipped", backend="inductor", reason=text or "only eager runs are trained", latency_ms=None),
    ]


def training_result(text: str = "") -> ScanResult:
    """The result; with ``text``, as hostile as it."""
    base = shared_result(text)
    result = msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, training=True),
        options={"budget": 20.0, "seed": 0, "train": True, "steps": STEPS},
        runs=_runs(text),
        timing_conditions=None,
        plan=None,
        training=setup(text),
    )
    return conclude(result)
