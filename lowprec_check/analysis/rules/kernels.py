"""LP1xx: does it run, and on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, from_gaps, low_runs, rule
from lowprec_check.schema.scan_result import Run, ScanResult

SLOW_RATIO = 5.0
SLOW_MS = 5.0
COLD_MS = 50.0


@rule("LP101", "missing-kernel", "error")
def missing_kernel(result: ScanResult) -> Iterator[Finding]:
    """No kernel for this dtype on this device, raised in dispatch.

    The op failed on its low-precision inputs and succeeded on the same inputs widened to fp32. The scan computed it
    in fp32, rounded the result and went on, so that all gaps are found in one pass.

    What to do: use autocast if it passes; or compute this op in fp32 and cast back,

        y = torch.linalg.cholesky(x.float()).to(x.dtype)

    or keep the module that holds it in fp32.
    """
    yield from from_gaps(result, "missing-kernel", "compute it in fp32 and cast back, or use autocast")


@rule("LP102", "unsupported-dtype", "error")
def unsupported_dtype(result: ScanResult) -> Iterator[Finding]:
    """The API refuses the dtype above dispatch.

    A check in the function itself (`torch.fft.*`, `torch.quantile`, `lstsq`) raised before any kernel was looked
    up. The same call with its inputs widened to fp32 succeeds. Found in a second pass with a function mode, which
    takes some modules off their fast paths; the result says so.

    What to do: call it on `x.float()` and cast the result back.
    """
    yield from from_gaps(result, "unsupported-dtype", "call it on x.float() and cast the result back")


@rule("LP103", "dtype-mismatch", "error")
def dtype_mismatch(result: ScanResult) -> Iterator[Finding]:
    """Mixed dtypes meet in one op.

    The op fails as called and succeeds once its floating inputs share one dtype. Usual causes: a tensor made in
    forward with the default dtype (`torch.zeros(n)`), an attribute that is no buffer and is not cast with the
    model, an op that returns fp32 whatever goes in.

    What to do: make the tensor with `dtype=x.dtype`, register it as a buffer, or cast at that line.
    """
    yield from from_gaps(result, "dtype-mismatch", "give both the same dtype: dtype=x.dtype where one is made")


@rule("LP104", "no-backend-kernel", "error")
def no_backend_kernel(result: ScanResult) -> Iterator[Finding]:
    """The op has no kernel on this device at all.

    It fails on the device in fp32 too and succeeds on the CPU. On XPU, `PYTORCH_ENABLE_XPU_FALLBACK=1` (on MPS,
    `PYTORCH_ENABLE_MPS_FALLBACK=1`) computes such ops on the CPU, at the price of two copies.
    """
    yield from from_gaps(result, "no-backend-kernel", "run it on the CPU, or enable the backend's fallback variable")


@rule("LP105", "silent-fallback", "warning")
def silent_fallback(result: ScanResult) -> Iterator[Finding]:
    """Runs, but on the CPU behind your back.

    The backend warned, once, that an op has no kernel on the device and was computed on the CPU. Every such op
    copies its inputs to the host and its result back.
    """
    for run in result.runs:
        for message in run.fallbacks:
            yield Finding(message, run=run, help="avoid the op on this device, or move it to the CPU once")


@rule("LP106", "slow-kernel", "warning")
def slow_kernel(result: ScanResult) -> Iterator[Finding]:
    """Runs, many times slower than fp32.

    Over the whole run the op took at least 5 times as long as the same calls in fp32 right after. Typical: fp16
    convolutions and matrix products on a CPU without fp16 arithmetic (`lowprec-check env` tells). Where the budget
    did not allow for it, the op was measured once and emulated afterwards (LP903).
    """
    for run in low_runs(result):
        yield from _slow_ops(run)


def _slow_ops(run: Run) -> Iterator[Finding]:
    advice = "use a dtype that this device accelerates (lowprec-check env)"
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in run.op_calls.rows():
        if row.time_ms is not None and row.reference_ms is not None:
            times[row.op].append((row.time_ms, row.reference_ms))
    slow = {op: found for op, calls in times.items() if (found := _slow_total(calls, run.latency_ms)) is not None}
    for op, (here, fp32) in sorted(slow.items(), key=lambda item: -item[1][0]):
        message = f"{here / max(fp32, 1e-6):.0f} times slower than in fp32: {here:.0f} ms against {fp32:.1f} ms"
        yield Finding(message, run=run, op=op, help=advice, calls=len(times[op]))
    for op, reason in run.emulated.items():
        if op not in slow and not any(gap.kind == "crash" and gap.op == op for gap in run.gaps):
            yield Finding(reason, run=run, op=op, help=advice)


def _slow_total(calls: list[tuple[float, float]], latency_ms: float | None) -> tuple[float, float] | None:
    """Milliseconds here and in fp32, if slow. The first call pays for the kernel's set-up, so it counts alone only
    where it is very long; and no op takes longer than the plain run did.
    """
    counted = calls[1:] if len(calls) > 1 else [call for call in calls if call[0] > COLD_MS]
    here, fp32 = sum(here for here, _ in counted), sum(fp32 for _, fp32 in counted)
    plausible = latency_ms is None or here < 2 * latency_ms
    return (here, fp32) if plausible and here > max(SLOW_MS, SLOW_RATIO * fp32) else None


@rule("LP107", "crash", "error")
def crash(result: ScanResult) -> Iterator[Finding]:
    """The process died in this op.

    Not an exception: a signal, an exit, or the kernel's out-of-memory killer. The run had a process of its own, so
    the scan went on; the op named is the one that was running when the process died.
    """
    yield from from_gaps(result, "crash", "compute it in fp32, and report it to PyTorch")
    for run in low_runs(result):
        if run.status == "crashed" and not any(gap.kind == "crash" for gap in run.gaps):
            yield Finding(run.reason or "the process died", run=run, help="run it alone under a debugger")
