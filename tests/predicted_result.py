"""A predicted result for tests of every format: each status of a prediction, known and assumed ops, fallbacks."""

from __future__ import annotations

import msgspec
from shared_result import ENVIRONMENT, gap, op_calls, run, shared_result

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.op_calls import OpCalls, without_times
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ExceptionInfo

DEVICE = PredictedDevice(name="xpu", torch="2.3", kernels="measured on xpu (a test), torch 2.3", autocast="2.6")
BASIS = "measured on xpu (a test), torch 2.3: aten::linalg_cholesky_ex in half, shown by linalg.cholesky"
FALLBACK = (
    "aten::gelu falls back to the CPU: each call copies its inputs (2048 bytes) there, and its result back (predicted)"
)


def a_prediction(precision: str, status: str = "ok", rel_l2: float | None = None, **more: object) -> Run:
    """A predicted run, which has no times and no memory."""
    calls = more.pop("op_calls", None)
    nothing = {"latency_ms": None, "peak_memory_bytes": None}
    return run(
        precision,
        status,
        rel_l2,
        device="xpu",
        evidence="predicted",
        op_calls=without_times(calls) if isinstance(calls, OpCalls) else OpCalls(),
        known_ops=["convolution", "gelu", "native_layer_norm"],
        assumed_ops=["aminmax"] if precision == "half" else [],
        **nothing | more,
    )


def predicted_result(text: str = "") -> ScanResult:
    """The result; with ``text`` wherever a user's model could put a string."""
    message = text or "\"linalg_cholesky_ex\" not implemented for 'Half'"
    lacking = gap(text, predicted_by=text or BASIS)
    raised = ExceptionInfo(type="NotImplementedError", message=message, module=text, source=text)
    runs = [
        a_prediction("fp32", tolerance=None, fallbacks=[FALLBACK]),
        a_prediction("bfloat16", "inaccurate", 0.31, tolerance=5e-2, op_calls=op_calls(48, jump=20, half=False)),
        a_prediction("autocast-bf16", "ok", 4.7e-3, tolerance=5e-2, fallbacks=[FALLBACK], op_calls=op_calls(6)),
        a_prediction("half", "error", gaps=[lacking], exception=raised, op_calls=op_calls(48, text=text)),
        a_prediction("autocast-fp16", "nonfinite", op_calls=op_calls(60, nan=41, text=text)),
        a_prediction("half", "skipped", backend="inductor", reason=text or "only eager runs are predicted"),
    ]
    base = shared_result(text)
    environment = ENVIRONMENT | {"device": "xpu", "device_name": "predicted on a CPU"}
    environment |= {"bf16_accelerated": None, "fp16_accelerated": None}
    result = ScanResult(
        tool=base.tool,
        target=base.target,
        model=msgspec.structs.replace(base.model, setup=["model = make_model()"]),
        environment=environment,
        options={"budget": 20.0, "seed": 0, "precisions": ["bfloat16", "autocast-bf16", "half", "autocast-fp16"]},
        runs=runs,
        prediction=DEVICE,
    )
    return conclude(result)
