"""The recommendation: the best run that passed, and why not the others. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lowprec_check.analysis.snippet import paste
from lowprec_check.schema.scan_result import ModelInfo, Recommendation, Run

NOISE = 1.05
"""Runs whose times differ by less than this factor are equally fast."""

SHORT_MS = 1.0
"""Below this, the times of two processes on a busy machine say nothing about the model."""


def recommend(runs: Sequence[Run], model: ModelInfo) -> Recommendation | None:
    """The best of the runs that passed: the fastest, among equals the most exact. ``None`` if none passed.

    Where a blanket cast has missing kernels, autocast goes before any blanket cast: it computes such ops in fp32, and
    what is missing in one dtype today is the next input or release away in the other.
    """
    passed = [run for run in runs if run.precision != "fp32" and run.status == "ok"]
    if not passed:
        return None
    if any(missing(run) for run in runs if _is_cast(run)):
        passed = [run for run in passed if not _is_cast(run)] or passed
    fastest = min(run.latency_ms or float("inf") for run in passed)
    noise = NOISE if fastest >= SHORT_MS else float("inf")
    equals = [run for run in passed if (run.latency_ms or float("inf")) <= noise * fastest]
    best = min(equals, key=lambda run: (error_of(run), run.latency_ms or float("inf")))
    base = best.base or best.precision
    return Recommendation(
        precision=best.precision if best.base is None else base,
        backend=best.backend,
        keep_fp32=best.keep_fp32,
        evidence=best.evidence,
        reason=_reason(best, runs),
        code=paste(base, best.device, model, best.keep_fp32, best.untied),
        speedup=speedup(best, runs),
        rel_l2=best.output_error.rel_l2 if best.output_error else None,
    )


def _is_cast(run: Run) -> bool:
    return run.precision in ("half", "bfloat16")


def missing(run: Run) -> list[str]:
    """Ops without a kernel, each once."""
    return list(dict.fromkeys(gap.op for gap in run.gaps if gap.kind in _NO_KERNEL))


def speedup(run: Run, runs: Sequence[Run]) -> float | None:
    """fp32's latency over this run's."""
    fp32 = next((other.latency_ms for other in runs if other.precision == "fp32"), None)
    return fp32 / run.latency_ms if fp32 and run.latency_ms else None


def time_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """This run's latency over fp32's."""
    ratio = speedup(run, runs)
    return 1 / ratio if ratio else None


def memory_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """This run's peak memory over fp32's."""
    fp32 = next((other.peak_memory_bytes for other in runs if other.precision == "fp32"), None)
    return run.peak_memory_bytes / fp32 if fp32 and run.peak_memory_bytes else None


def label(run: Run) -> str:
    """The precision, with the backend and the evidence where they are not the usual ones."""
    name = run.precision if run.base is None else f"plan ({run.base})"
    name = name if run.backend == "eager" else f"{name} · {run.backend}"
    return name if run.evidence == "measured" else f"{name} · {run.evidence}"


def error_of(run: Run) -> float:
    """Relative error of the output against fp32, for sorting: infinite where there is none."""
    rel_l2 = run.output_error.rel_l2 if run.output_error else None
    return rel_l2 if rel_l2 is not None else float("inf")


def _reason(best: Run, runs: Sequence[Run]) -> str:
    error = f"error {error_of(best):.1e}, tolerance {best.tolerance or 0:.0e}"
    short = best.latency_ms is not None and best.latency_ms < SHORT_MS
    speed = " (too short a run to compare times)" if short else _speed(speedup(best, runs))
    parts = [f"passes ({error}), measured here{speed}."]
    if best.keep_fp32:
        parts.append(f"Kept in fp32: {some(best.keep_fp32)}.")
    held_back = not _is_cast(best) and any(missing(run) for run in runs if _is_cast(run))
    cast = [run for run in runs if _is_cast(run) and run.status == "ok" and held_back]
    faster = [run.precision for run in cast if NOISE * (run.latency_ms or 0.0) < (best.latency_ms or 0.0)]
    why = defaultdict(list)
    for run in runs:
        if run.precision not in ("fp32", best.precision, "plan") and run.status != "ok":
            why[explain_status(run)].append(run.precision)
    parts += [f"{' and '.join(faster)} is faster, but kernels are missing for another blanket cast."] if faster else []
    parts += [f"Not {' or '.join(names)}: {reason}." for reason, names in why.items()]
    return " ".join(parts)


def _speed(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if ratio >= NOISE:
        return f", {ratio:.1f} times as fast as fp32"
    if ratio > 1 / NOISE:
        return ", about as fast as fp32"
    return f", {1 / ratio:.1f} times slower than fp32 (on this machine fp32 is the faster way)"


def explain_status(run: Run) -> str:
    """Why a run did not pass, in a few words."""
    ops = missing(run)
    if run.status in ("error", "crashed") and ops:
        names = ", ".join(short_op(op) for op in ops[:4]) + (", …" if len(ops) > 4 else "")
        return f"{len(ops)} {'op has' if len(ops) == 1 else 'ops have'} no kernel: {names}"
    if run.status == "error":
        kinds = list(dict.fromkeys(gap.kind for gap in run.gaps))
        text = shorten(run.exception.message if run.exception else "it raises")
        return f"{', '.join(kinds)}: {text}" if kinds else text
    if run.status == "inaccurate":
        rel_l2 = run.output_error.rel_l2 if run.output_error else None
        return f"error over tolerance {run.tolerance or 0:.0e}" if rel_l2 is not None else "; ".join(run.notes)
    if run.status == "nonfinite":
        born = next((row for row in run.op_calls.rows() if row.introduced_inf or row.introduced_nan), None)
        where = f", first in {short_op(born.op)} of {born.module or 'the model'}" if born else ""
        return f"NaN or Inf in the output{where}"
    return run.reason or run.status


def shorten(message: str, most: int = 110) -> str:
    """A message on one line of a table."""
    return message if len(message) <= most else f"{message[: most - 1]}…"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


_NO_KERNEL = ("missing-kernel", "unsupported-dtype", "no-backend-kernel", "crash")


def short_op(op: str) -> str:
    """``cholesky_ex`` of ``aten.linalg_cholesky_ex.default``; ``quantile`` of ``torch.quantile``."""
    parts = op.split(".")
    name = parts[1] if parts[0] != "torch" and len(parts) == 3 else parts[-1]
    return name.removeprefix("_").removeprefix("linalg_")
