"""The one result that every format is made from: each status, each kind of finding, a plan, NaNs, awkward numbers.

``shared_result(text)`` puts ``text`` wherever a user's model, file or exception could put a string.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import ErrorBudget, Latency, Share, Speedup, TimingConditions
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.plan import Blame, Plan
from lowprec_check.schema.scan_result import Gap, ModelInfo, Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo

ENVIRONMENT: dict[str, Any] = {
    "torch": "2.13.0+cpu",
    "python": "3.11.7",
    "platform": "Linux x86_64",
    "device": "cpu",
    "device_name": "a processor",
    "cpu_capability": "AVX512",
    "cpu_features": ["avx2", "avx512", "avx512_bf16"],
    "bf16_accelerated": True,
    "fp16_accelerated": False,
    "threads": 2,
    "accelerators": [],
    "ipex": None,
}

MODULES = ("", "encoder", "encoder.blocks.0", "encoder.blocks.0.norm", "encoder.blocks.1", "head", "head.out")


def op_calls(
    count: int, *, jump: int | None = None, nan: int | None = None, text: str = "", half: bool = True
) -> OpCalls:
    """``count`` calls whose accumulated error creeps up and falls back; jumps at ``jump``, is Inf from ``nan`` on."""
    draw = random.Random(0)
    columns: dict[str, list[Any]] = {}
    error, limit = (2**-11, 8e-3) if half else (2**-8, 3e-2)
    for index in range(count):
        before, error = error, error * (100.0 if index == jump else 1.0 + draw.random() / 20)
        error = error if index == jump or error < limit else error / 10
        finite = nan is None or index < nan
        row = {
            "op": ("aten.convolution.default", "aten.native_layer_norm.default", "aten.gelu.default")[index % 3],
            "module": text or MODULES[1 + index * (len(MODULES) - 1) // count],
            "source": text or f"net.py:{20 + index % 7}" if index % 5 else None,
            "dtypes": "f16→f16" if half else "bf16→bf16",
            "shape": "1×64×32×32",
            "outcome": "rescued" if index == 4 else "ok",
            "local_error": None if index == 7 else 2**-12 * draw.random(),
            "accumulated_error": error if finite else None,
            "input_error": before if nan is None or index <= nan else None,
            "absmax": 10 ** (4.9 * index / count) if finite else None,
            "rms": 10 ** (4 * index / count - 2),
            "introduced_inf": 12 if index == nan else 0,
            "introduced_nan": 0,
            "flushed": 0.25 if index == 3 and half else 0.0,
            "subnormal": (0.4 if index == 3 else 0.0) if half else None,
            "input_flushed": 0.0,
            "flips": 3 if index == 6 else 0,
            "recast": 0,
            "to_python": 0,
            "time_ms": 0.5,
            "reference_ms": 0.4,
            "compared_values": 1 << 16 if index == nan else 0,
            "compared_choices": 1 << 16 if index == 6 else 0,
            "share": None,
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return OpCalls(**columns)


def run(precision: str, status: str = "ok", rel_l2: float | None = None, **more: Any) -> Run:
    """One run; the reference without an error."""
    error = None
    if rel_l2 is not None:
        error = ErrorStats(rel_l2=rel_l2, max_abs=0.25, cosine=0.9999, sqnr_db=54.2, top1=1.0)
    fields = {"device": "cpu", "latency_ms": 8.0, "peak_memory_bytes": 3 << 20, "tolerance": 1e-2} | more
    return Run(precision=precision, status=status, output_error=error, **fields)  # type: ignore[arg-type]


def latency(median: float, speedup: float | None = None, spread: float = 0.05) -> Latency:
    """The times of a run, in rounds with fp32 if there is a ``speedup``; ``spread`` is that of the interval."""
    ratio = None
    if speedup is not None:
        ratio = Speedup(median=speedup, low=speedup * (1 - spread), high=speedup * (1 + spread), rounds=15)
    return Latency(median_ms=median, quartiles_ms=(0.96 * median, 1.04 * median), samples=30, speedup=ratio)


def gap(text: str = "", **more: Any) -> Gap:
    """A missing kernel."""
    fields: dict[str, Any] = {
        "op": text or "aten.linalg_cholesky_ex.default",
        "layer": "dispatch",
        "kind": "missing-kernel",
        "module": text or "encoder.blocks.0.norm",
        "source": text or "net.py:23",
        "dtypes": ["float16"],
        "message": text or "\"cholesky_cpu\" not implemented for 'Half'",
        "calls": 3,
    }
    return Gap(**fields | more)


def shared_result(text: str = "") -> ScanResult:
    """The result; with ``text``, as hostile as it."""
    mismatch = gap(text, op="torch.quantile", layer="function", kind="unsupported-dtype", source=text or "net.py:31")
    raised = ExceptionInfo(
        type="RuntimeError", message=text or "\"cholesky_cpu\" not implemented for 'Half'", module=text, source=text
    )
    runs = [
        run("fp32", latency_ms=10.0, latency=latency(10.0), peak_memory_bytes=6 << 20, tolerance=None),
        run("bfloat16", "inaccurate", 0.31, tolerance=5e-2, op_calls=op_calls(48, jump=20, text=text, half=False)),
        run(
            "autocast-bf16",
            "ok",
            4.7e-3,
            tolerance=5e-2,
            latency_ms=7.25,
            latency=latency(7.25, 1.38),
            op_calls=op_calls(60, text=text, half=False),
        ),
        run(
            "half",
            "error",
            gaps=[gap(text), mismatch],
            exception=raised,
            latency_ms=None,
            op_calls=op_calls(48, text=text),
        ),
        run("autocast-fp16", "nonfinite", latency_ms=571.0, op_calls=op_calls(60, nan=41, text=text)),
        run(
            "half",
            "crashed",
            backend="inductor",
            reason=text or "killed by signal 11 in aten.mm.default",
            latency_ms=None,
        ),
        run("half", "timeout", backend="jit", reason=text or "not done after 20 s", latency_ms=None),
        run("half", "skipped", backend="ipex", reason=text or "the extension is not installed", latency_ms=None),
        run("plan", "ok", 8.1e-4, base="half", keep_fp32=[text or "encoder.blocks.0.norm", "head"], latency_ms=6.5),
    ]
    model = ModelInfo(
        name=text or "Whitening",
        parameters=11_689_512,
        inputs=[text or "(1, 3, 224, 224)"],
        modules=7,
        training=False,
        setup=["model = make_model()"],
        source=text or "net.py:12",
        notes=[text] if text else [],
    )
    advice = Recommendation(
        precision="half",
        keep_fp32=runs[-1].keep_fp32,
        reason="passes (error 8.1e-04, tolerance 1e-02), measured here, 1.5 times as fast as fp32; "
        "saves 50 % of the memory.",
        code=f"model = model.half()\n{text or '# the rest'}\nwith torch.no_grad():\n    output = model(*inputs)",
        speedup=10.0 / 6.5,
        rel_l2=8.1e-4,
        worth="faster and smaller",
        gain="1.5 times as fast as fp32, saves 50 % of the memory",
    )
    result = ScanResult(
        tool="lowprec-check 0.1.0",
        target=text or "net.py",
        model=model,
        environment=ENVIRONMENT | ({"device_name": text} if text else {}),
        options={"budget": 20.0, "seed": 0},
        runs=runs,
        timing_conditions=TimingConditions(waited=0.41, speed_change=1.05),
        recommendation=advice,
        plan=Plan(
            tool="lowprec-check 0.1.0",
            target=text or "net.py",
            base="half",
            device="cpu",
            keep_fp32=runs[-1].keep_fp32,
            minimal=True,
            trials=5,
            seconds=1.5,
            modules={text or "head": "Linear"},
            code=advice.code,
            blame=[
                Blame(module=path, why="has no kernel", op="aten.mm.default", source=text or "net.py:23")
                for path in runs[-1].keep_fp32
            ],
        ),
    )
    return msgspec.structs.replace(result, diagnostics=diagnose(result))


# -- with error budgets


SHARES = {"head.out": 0.46, "encoder.blocks.0.norm": 0.12, "encoder.blocks.1": 0.09, "encoder": 0.02}
"""The share of each module in :func:`budgeted`; the others have none."""


def budgeted(found: Run, shares: dict[str, float] | None = None, **more: Any) -> Run:
    """``found`` with a budget: each module's share at its first call, and the rest not explained."""
    wanted = SHARES if shares is None else shares
    calls = found.op_calls
    column: list[float | None] = [0.0] * len(calls)
    listed = []
    for module, share in sorted(wanted.items(), key=lambda item: -item[1]):
        index = calls.module.index(module) if module in calls.module else None
        if index is not None:
            column[index] = share
        op, source = ("cast input", None) if index is None else (calls.op[index], calls.source[index])
        listed.append(Share(module=module, op=op, source=source, share=share))
    measured = found.output_error.rel_l2 if found.output_error else 0.5
    fields: dict[str, Any] = {
        "predicted": 0.9 * (measured or 0.0),
        "measured": measured,
        "unexplained": 1 - sum(wanted.values()),
        "shares": listed,
        "output_rms": 1.0,
    }
    budget = ErrorBudget(**fields | more)
    return msgspec.structs.replace(
        found, budget=budget, op_calls=msgspec.structs.replace(calls, share=column) if len(calls) else calls
    )


def budgeted_result(text: str = "") -> ScanResult:
    """:func:`shared_result` in which the error of three runs has causes, and one has none that is known."""
    base = shared_result(text)
    runs = list(base.runs)
    by_module = {module: share for module, share in SHARES.items() if not text}
    by_module |= {"": 0.05} if not text else {text: 0.7, "": 0.05}
    for index, found in enumerate(runs):
        if found.precision in ("bfloat16", "autocast-bf16") or found.base:
            runs[index] = budgeted(found, by_module)
        elif found.status == "nonfinite":
            reason = text or "the output has NaN or Inf"
            runs[index] = msgspec.structs.replace(found, budget=ErrorBudget(reason=reason))
    result = msgspec.structs.replace(base, runs=runs)
    return msgspec.structs.replace(result, diagnostics=diagnose(result))
