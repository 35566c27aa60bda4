"""A run in a few words and figures: its label, its memory against fp32, why it failed. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowprec_check.analysis.error_shares import causes_in_brief
from lowprec_check.analysis.training_status import diverges, first_way, in_phase, nonfinite, when_raised
from lowprec_check.schema.run_key import qualified
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import TrainingWay
from lowprec_check.schema.verdict import ErrorStats

NOTHING_TO_COMPARE = "its output holds nothing to compare with fp32's"

_NO_KERNEL = ("missing-kernel", "unsupported-dtype", "no-backend-kernel", "crash")


def label(run: Run) -> str:
    """The name of the run in reports: ``half``, ``plan (half)``, ``half · inductor``, ``half · predicted``."""
    precision = run.precision if run.base is None else f"{run.precision} ({run.base})"
    name = qualified(precision, run.backend, run.memory_format)
    return name if run.evidence == "measured" else f"{name} · {run.evidence}"


def reference_of(runs: Sequence[Run]) -> Run | None:
    """The fp32 run that the others are compared with."""
    return next((run for run in runs if run.is_reference), None)


def candidates(runs: Sequence[Run]) -> list[Run]:
    """The runs that may be recommended: those in low precision; if there is none, those of fp32 on other backends."""
    return [run for run in runs if run.is_low] or [run for run in runs if not run.is_reference]


def is_plan_of(plan: Run, run: Run) -> bool:
    """Whether ``plan`` is ``run`` with modules kept in fp32."""
    return (plan.base, plan.backend, plan.memory_format) == (run.precision, run.backend, run.memory_format)


def memory_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """This run's peak memory over fp32's."""
    reference = reference_of(runs)
    fp32 = reference.peak_memory_bytes if reference else None
    return run.peak_memory_bytes / fp32 if fp32 and run.peak_memory_bytes else None


def error_of(run: Run) -> float:
    """The output's error against fp32, for sorting; infinite if unknown."""
    distance = run.output_error.distance if run.output_error else None
    return distance if distance is not None else float("inf")


def error_text(error: ErrorStats) -> str:
    """``1.3e-03``; ``0.8 % differ`` for integers; ``∞``."""
    if error.rel_l2 is not None:
        return f"{error.rel_l2:.1e}"
    if error.distance is None:
        return "∞"
    return f"{percent(error.distance)} differ" if error.distance else "equal"


def error_phrase(error: ErrorStats) -> str:
    """The same in a sentence: ``output error 1.3e-03``, ``0.8 % of the integers differ``."""
    if error.rel_l2 is None and error.distance is not None:
        return f"{percent(error.distance)} of the integers differ" if error.distance else "all integers are equal"
    return f"output error {error_text(error)}"


def judged_by(run: Run) -> str | None:
    """What was compared, if not the output of the model: ``output of head.norm``."""
    return f"output of {run.compared_module}" if run.compared_module else None


def on_which_call(run: Run) -> str:
    """``on call 2: `` or ``on batch 3: `` for a run that did not fail in its first call on the first batch.

    The reason of a run that crashed or took too long names the call. That of one that was trained names the step.
    """
    if run.training is not None:
        return ""
    call = None if run.status in ("crashed", "timeout") else run.failed_call
    parts = [f"{noun} {number}" for noun, number in (("batch", run.failed_batch), ("call", call)) if number]
    return f"on {', '.join(parts)}: " if parts else ""


def is_cast(run: Run) -> bool:
    """Whether the run casts the whole model and keeps no module in fp32."""
    return run.base is None and run.basis is not None and run.basis.kind == "cast"


def missing_kernels(run: Run) -> list[str]:
    """Ops without a kernel, each once."""
    return list(dict.fromkeys(gap.op for gap in run.gaps if gap.kind in _NO_KERNEL))


def explain_status(run: Run) -> str:
    """Why a run failed, in a few words, and what causes most of its error: ``error over …: 46 % from lm_head``."""
    causes = causes_in_brief(run)
    return f"{status_reason(run)}: {causes}" if causes else status_reason(run)


def status_reason(run: Run) -> str:
    """Why a run failed, in a few words."""
    if run.status == "unjudged":
        return f"runs, but {'; '.join(run.notes) or NOTHING_TO_COMPARE}"
    return on_which_call(run) + _explained(run)


def _explained(run: Run) -> str:
    ops, way = missing_kernels(run), first_way(run)
    if run.status in ("error", "crashed") and ops and not run.failed_call:
        names = ", ".join(map(_with_phase(run), ops[:4])) + (", …" if len(ops) > 4 else "")
        return f"{_of_all(ops, run)} no kernel: {names}"
    if run.status == "error":
        kinds = list(dict.fromkeys(gap.kind for gap in run.gaps))
        when = when_raised(way.failed_step if way else None, run.exception)
        text = when + shorten(run.exception.text if run.exception else "it raised an exception")
        return f"{', '.join(kinds)}: {text}" if kinds and not run.failed_call else text
    if run.status == "inaccurate":
        return _inaccurate(run, way)
    if run.status == "nonfinite":
        first = next((row for row in run.op_calls.rows() if row.introduced_inf or row.introduced_nan), None)
        where = f", first in {short_op(first.op)} of {first.module or 'the model'}" if first else ""
        what = nonfinite(way).text if way is not None else "NaN or Inf in the output"
        return f"{what}{where}{in_phase(first.phase) if first else ''}"
    return run.reason or run.status


def _inaccurate(run: Run, way: TrainingWay | None) -> str:
    if way is not None and way.divergence is not None:
        return diverges(way.divergence, way).text
    if run.output_error is None or run.output_error.distance is None:
        return "; ".join(run.notes) or "the error is infinite"
    what = f", {judged_by(run)}" if run.compared_module else ""
    return f"error over the tolerance {run.tolerance or 0:.0e}{what}"


def _with_phase(run: Run) -> Callable[[str], str]:
    """The short name of an op, with the phase in which it has no kernel, unless that is the forward pass."""
    phases = {gap.op: gap.phase for gap in reversed(run.gaps)}
    return lambda op: f"{short_op(op)}{in_phase(phases[op])}"


def _of_all(ops: Sequence[str], run: Run) -> str:
    """``4 of 17 ops have``; the total counts each op once, and is left out if none was recorded."""
    known = set(run.op_calls.op)
    total = f" of {len(known.union(ops))}" if known else ""
    return f"{len(ops)}{total} {'op' if len(ops) == 1 and not total else 'ops'} {'has' if len(ops) == 1 else 'have'}"


def shorten(message: str, most: int = 110) -> str:
    """A message of at most ``most`` characters, for a table."""
    return message if len(message) <= most else f"{message[: most - 1]}…"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``2,000 trials``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def bytes_text(number: int) -> str:
    """``12.5 MiB``, ``3 KiB``, ``1 byte``."""
    if number < 2**10:
        return counted(number, "byte")
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"


def in_fp32(kept: Sequence[str], modules: int) -> str:
    """``2 of 6 modules in fp32`` of a model with 7 ``modules``, itself included."""
    total = max(0, modules - 1)
    return (
        f"{len(kept)} of {counted(total, 'module')} in fp32"
        if len(kept) <= total
        else f"{counted(len(kept), 'module')} in fp32"
    )


def out_of(number: int, total: int, noun: str) -> str:
    """``417 of 200,704 values (0.2 %)``; without a known total ``417 values``."""
    if total < number or not total:
        return counted(number, noun)
    return f"{number:,} of {counted(total, noun)} ({percent(number / total)})"


def short_op(op: str) -> str:
    """``cholesky_ex`` of ``aten.linalg_cholesky_ex.default``; ``quantile`` of ``torch.quantile``."""
    parts = op.split(".")
    name = parts[1] if parts[0] != "torch" and len(parts) == 3 else parts[-1]
    return name.removeprefix("_").removeprefix("linalg_")


def percent(share: float) -> str:
    """``0.2 %`` of 0.002; ``< 0.1 %`` for less than can be shown."""
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %") if share >= 0.001 else "< 0.1 %"
