"""Facts of a run that several modules need: label, memory, kernels, ranges, judgeability."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from lowprec_check.schema.backend_checks import INPUT_CHANGES, CompilerRemark
from lowprec_check.schema.findings import Gap
from lowprec_check.schema.measures import BatchRanges, InputsTried, PlaceRange
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.op_calls import OpCall, OpCalls
from lowprec_check.schema.plan import Attempt
from lowprec_check.schema.precisions import FP16, plan_bases
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE, qualified
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, fill, say, short_op
from lowprec_check.schema.verdict import look

PREDICTED = " · predicted"
"""What the label of a predicted run ends with."""


def label(run: Run) -> str:
    """Name in reports: ``half``, ``plan (half)``, ``half · inductor``, ``half · predicted``."""
    precision = f"{run.precision}{fill(' ({})', run.base)}"
    name = qualified(precision, run.backend, run.memory_format)
    if run.without_kernels is not None:
        name += " · emulated"
    return name if run.evidence == "measured" else f"{name}{PREDICTED}"


def reference_of(runs: Sequence[Run]) -> Run | None:
    """The fp32 run that the others are compared with."""
    return next((run for run in runs if run.is_reference), None)


def candidates(runs: Sequence[Run]) -> list[Run]:
    """The runs that may be recommended: all but the reference."""
    return [run for run in runs if not run.is_reference]


HOPELESS = 20.0  # times as long as fp32: with such a call, nothing more is tried


def is_hopeless(run: Run) -> bool:
    """Whether its only call took so much longer than fp32's that no trial is made with it."""
    return run.judged_by_one_call and (run.one_call_ratio is None or run.one_call_ratio > HOPELESS)


def plan_starts(runs: Sequence[Run], *, wanted: bool | None) -> list[Run]:
    """The failing runs from which a scan searches for a plan; none if it does not.

    ``wanted`` is its option ``plan``: with ``None``, it searches only if no run passes.
    """
    # a plan starts from whole models in low precision
    tried = [run for run in runs if run.is_low and run.base is None and run.status != "skipped"]
    if not wanted:  # what was emulated cannot be used here
        tried = [run for run in tried if run.without_kernels is None]
    if wanted is False or (wanted is None and any(passes_all(run, runs) or is_unjudged(run, runs) for run in tried)):
        return []
    bases = [precision.name for precision in plan_bases()]
    return [
        run
        for run in tried
        if run.precision in bases and run.status not in ("ok", "unjudged") and (wanted or not is_hopeless(run))
    ]


def searched_plan(result: ScanResult) -> bool:
    """Whether the scan has searched for a plan."""
    return result.complete and bool(plan_starts(result.runs, wanted=result.options.get("plan", False)))


def failed_search(run: Run, attempts: Sequence[Attempt]) -> Attempt | None:
    """The search of a scan for a plan that starts from ``run``, if it found none."""
    if run.status in ("ok", "skipped") or run.memory_format != CONTIGUOUS:
        return None
    from_run = (tried for tried in attempts if (tried.base, tried.backend) == (run.precision, run.backend))
    return next((tried for tried in from_run if tried.trials and tried.kept is None), None)


def is_plan_of(plan: Run, run: Run) -> bool:
    """Whether ``plan`` is ``run`` with modules kept in fp32."""
    return (plan.base, plan.backend, plan.memory_format) == (run.precision, run.backend, run.memory_format)


LEAST_MEMORY = 4 << 20
"""Bytes. Less memory of a process is not compared: allocators keep a few megabytes."""


def is_too_small(memory: int | None) -> bool:
    """Whether the ``memory`` of a process counts as :data:`LEAST_MEMORY`."""
    return memory is not None and 0 < memory < LEAST_MEMORY


SMALLER = 0.9  # a run saves memory if its peak is at most this part of fp32's
LEAST_SAVING = 1 << 20  # bytes: nobody changes a program for less


def memory_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """Peak memory over fp32's, of processes if fp32 has that, else of tensors; may be missing."""
    peaks = compared_peaks(run, runs)
    if peaks is None:
        return None
    return peaks[0] / peaks[1]


def saved_memory(run: Run, runs: Sequence[Run]) -> tuple[int, int] | None:
    """The peaks of a run and of fp32, if that of the run is so far below that it matters."""
    peaks = compared_peaks(run, runs)
    if peaks is not None and peaks[0] <= SMALLER * peaks[1] and peaks[1] - peaks[0] >= LEAST_SAVING:
        return peaks
    return None


def saves_memory(run: Run, runs: Sequence[Run]) -> bool:
    """Whether the peak of a run is so far below fp32's that it matters."""
    return saved_memory(run, runs) is not None


def compared_peaks(run: Run, runs: Sequence[Run]) -> tuple[int, int] | None:
    """Bytes of ``run`` and of fp32 that can be compared."""
    reference = reference_of(runs)
    if reference is None:
        return None
    of_process, fp32 = run.process_memory_bytes, reference.process_memory_bytes
    if fp32 and of_process:
        return max(of_process, LEAST_MEMORY), max(fp32, LEAST_MEMORY)
    # without processes, tensors are compared; the peak of a backend with one is that of its process
    if fp32 or (run.backend != EAGER and of_process is not None):
        return None
    if run.peak_memory_bytes and reference.peak_memory_bytes:
        return run.peak_memory_bytes, reference.peak_memory_bytes
    return None


def error_of(run: Run) -> float:
    """The output's error against fp32, for sorting; infinite if unknown.

    Of a measure, whose units are its own, the relative error that uses as much of its tolerance.
    """
    if run.by_meaning is not None:
        return run.by_meaning.used * (run.by_meaning.tolerance or 1.0)
    return run.distance if run.distance is not None else float("inf")


CLEAR = 0.5  # the part of the tolerance below which a run that passes is not explained with errors
CLOSE = 0.8  # the part of the tolerance from which on another input may well exceed it


def passes_all(run: Run, runs: Sequence[Run]) -> bool:
    """Whether the run passes on all inputs and changes no input or buffer unlike eager mode."""
    return effective_status(run, runs) == "ok" and not changed_by_backend(run)


def is_unjudged(run: Run, runs: Sequence[Run]) -> bool:
    """Whether the run ends, with an output that cannot be compared or tells nothing."""
    return run.status == "unjudged" or (run.status == "ok" and degenerate_output(run, runs) is not None)


def effective_status(run: Run, runs: Sequence[Run]) -> str:
    """``unjudged`` if its output is degenerate; else the worst status over all inputs."""
    if degenerate_output(run, runs) is not None:
        return "unjudged"
    # the status of a run is that of the inputs of the scan
    further = fails_elsewhere(run)
    if further is None:
        return run.status
    return max(further.statuses or ["inaccurate"], key=lambda each: look(each).rank)


def changed_by_backend(run: Run) -> list[str]:
    """The inputs and buffers whose values differ from those of eager mode after the same calls."""
    return run.backend_check.changed if run.backend_check is not None else []


def blames_backend(run: Run, runs: Sequence[Run]) -> bool:
    """Whether a failure of ``run`` is due to its backend, not to its precision."""
    if run.backend == EAGER or run.failed_input is not None:
        return run.backend != EAGER
    if not run.is_low or run.is_quantized:
        return not run.is_low
    # either eager mode passes in this precision, or fp32 fails on this backend too
    statuses = {other.key: other.status for other in runs}
    in_eager_mode = statuses.get(run.key._replace(backend=EAGER)) or status_in_eager_mode(run)
    return in_eager_mode == "ok" or look(statuses.get(run.key._replace(precision=REFERENCE), "ok")).tone == "bad"


def status_in_eager_mode(run: Run) -> str | None:
    """How the op-by-op analysis of ``run``, in eager mode, ends; ``None`` if not known."""
    error = run.lockstep_error
    if error is None or not run.complete or failing_gaps(run) or run.failed_call:  # it is of the first call
        return None
    if error.distance is None:
        return "nonfinite"
    return "ok" if error.distance <= (run.relative_tolerance or 0.0) else "inaccurate"


def fails_elsewhere(run: Run) -> InputsTried | None:
    """The further inputs, if the run fails on some and passes on the scan's; else ``None``."""
    if run.status == "ok" and run.further_inputs is not None and run.further_inputs.failed:
        return run.further_inputs
    return None


def lacked_time(run: Run) -> bool:
    """Whether a limit of time ended or skipped it: it might pass with more."""
    if run.status == "skipped":
        return run.time_was_over
    further = fails_elsewhere(run)
    if further is not None:
        return set(further.statuses) - {"ok"} == {"timeout"}
    return run.status == "timeout"


def part_of_tolerance(run: Run) -> float:
    """The largest error over all inputs, relative to the tolerance; 0 if it is unknown."""
    worst = run.distance or 0.0
    if run.further_inputs is not None:
        worst = max(worst, run.further_inputs.worst or 0.0)
    if run.tolerance:
        return worst / run.tolerance
    return 0.0


def passes_clearly(run: Run) -> bool:
    """Whether it passes on all inputs with less than half of the tolerance: nobody asks why."""
    return run.status == "ok" and not fails_elsewhere(run) and part_of_tolerance(run) < CLEAR


def on_which_call(run: Run) -> str:
    """``on call 2: `` or ``on batch 3: `` for a run that did not fail in its first call on the
    first batch; or on which changed inputs.

    The reason of a run that crashed or took too long names the call. That of one that was trained
    names the step.
    """
    if not run.is_forward:
        return ""
    parts = []
    if run.failed_batch:
        parts.append(f"batch {run.failed_batch}")
    if run.failed_call and run.status not in ("crashed", "timeout"):
        parts.append(f"call {run.failed_call}")
    if run.failed_input is not None:
        parts.append(f"{INPUT_CHANGES.get(run.failed_input, run.failed_input)}, compared with eager mode")
    return fill("on {}: ", ", ".join(parts))


def is_cast(run: Run) -> bool:
    """Whether the run casts the whole model and keeps no module in fp32."""
    return run.base is None and run.basis is not None and run.basis.kind == "cast"


def failing_gaps(run: Run) -> list[Gap]:
    """The gaps by which ``run`` may fail; none if the model catches all."""
    raised, again, first = run.exception, run.stopped_by, 0
    # it catches all if the exception is no gap's, and also occurs where gaps are computed in fp32:
    # the same, or one of the same kind from the same line
    if raised is not None and again is not None and not any(gap.message in raised.message for gap in run.gaps):
        is_same_line = raised.source is not None and (raised.type, raised.source) == (again.type, again.source)
        if raised == again or is_same_line:
            return []
    # the model catches those before the one that raises; a backend casts around some ops itself
    if raised is not None and not run.failed_call:
        first = next((number for number, gap in enumerate(run.gaps) if gap.message == raised.message), 0)
    return [gap for gap in run.gaps[first:] if not gap.is_between_casts]


def never_called(runs: Sequence[Run]) -> list[str]:
    """The outermost modules that none of ``runs`` with a complete analysis has called."""
    lists = [run.uncalled_modules for run in runs if run.complete and len(run.op_calls)]
    names = dict.fromkeys(itertools.chain(*lists))
    return [name for name in names if all(any(is_inside(name, other) for other in each) for each in lists)]


def was_checked(run: Run) -> bool:
    """Whether the whole model was analyzed, so that what is not listed does not exist."""
    return run.complete and run.status not in ("skipped", "timeout", "crashed")


_NO_KERNEL = ("missing-kernel", "unsupported-dtype", "no-backend-kernel", "crash")


def missing_kernels(run: Run) -> list[str]:
    """Ops without a kernel that nothing else computed, each once."""
    return list(dict.fromkeys(gap.op for gap in failing_gaps(run) if gap.kind in _NO_KERNEL))


def shorten(message: str, most: int = 110) -> str:
    """A message of at most ``most`` characters, for a table."""
    return message if len(message) <= most else f"{message[: most - 1]}…"


# -- Outputs that a run cannot be judged by: all zeros, or too small for the format of the run

_JUDGED = ("ok", "unjudged", "inaccurate")
"""Statuses that need comparable numbers; NaN and Inf where fp32 has numbers do not."""

ALL_LOST = 0.99  # the rel_l2 from which on nothing of an output is left


def degenerate_output(run: Run, runs: Sequence[Run]) -> str | None:
    """Why ``run`` cannot be judged by its output, in words; ``None`` if it can, or failed for
    another reason.

    The fp32 output is all zeros, or its root mean square is below the smallest normal number of the
    run's format and the run is over tolerance: then its error is that of the format's range, not of
    the model. A run that passes in spite of a tiny output was compared number by number, and a run
    with NaN or Inf fails without a comparison: both keep their status.
    """
    if run.status not in _JUDGED or run.is_reference or not run.is_forward:
        return None
    if any(other.is_reference and other.output_is_zero for other in runs):
        return f"the fp32 output is all zeros{fill('; the error is that of {}', run.compared_module)}"
    if run.status != "inaccurate":
        return None
    if output_rms(run) == 0:
        which = "a tensor of the fp32 output" if run.compared_output is None else f"{judged_output(run)} of fp32"
        return f"{which} is all zeros"
    return tiny_output(run)


def tiny_output(run: Run) -> str | None:
    """What the run's format does to an fp32 output below its normal range; else ``None``."""
    rms, low = output_rms(run), run.format
    if not rms or low is None or rms >= low.smallest_normal:
        return None
    is_lost = rms < low.smallest_subnormal and (run.rel_l2 is None or run.rel_l2 >= ALL_LOST)
    what = "flushes it to zero" if is_lost else "has few digits for it"
    return f"{judged_output(run)} is tiny (rms {rms:.0e}): {low.short} {what}"


def vanishes(fp32: Run) -> bool:
    """Whether the output of ``fp32`` is all zeros, or below the smallest normal number of fp16."""
    rms = fp32.output_rms
    return fp32.output_is_zero or (rms is not None and rms < FP16.smallest_normal)


def differing_integers(run: Run) -> Sentence | None:
    """Integers that differ beside floating values."""
    error = run.output_error
    if error is None or error.rel_l2 is None or not error.mismatched:
        return None
    words = "{share:percent} of the integers or booleans in a tensor of the output differ"
    return say(words, share=error.mismatched)


def judged_output(run: Run) -> str:
    """What the status is about: ``the output``, ``output logits.0`` of several tensors."""
    return "the output" if run.compared_output is None else f"output {run.compared_output}"


def output_rms(run: Run) -> float | None:
    """Root mean square of the fp32 output compared with; ``None`` in older files."""
    if run.output_rms is not None:
        return run.output_rms
    return run.budget.output_rms if run.budget else None


# -- The range of each op at one place, over all its calls and over batches


def ranges_by_place(batches: Sequence[OpCalls]) -> list[PlaceRange]:
    """The forward ranges of a run over its batches, without weight casts, by first call."""
    # the calls at each place, by batch
    calls_at: dict[tuple[str, str, str | None, str], list[list[OpCall]]] = {}
    for number, op_calls in enumerate(batches):
        flows = any(op_calls.reads)
        for row in op_calls.rows():
            if row.absmax is not None and row.is_forward and not (flows and row.casts_weight):
                calls_at.setdefault((*row.place, row.dtypes), [[] for _ in batches])[number].append(row)

    def largest(calls: list[OpCall], field: str) -> float | None:
        return max((value for row in calls if (value := getattr(row, field)) is not None), default=None)

    return [
        PlaceRange(
            module=module,
            op=op,
            source=source,
            dtypes=dtypes,
            largest=[largest(calls, "absmax") for calls in by_batch],
            overflows=[sum(row.introduced_inf for row in calls) for calls in by_batch],
            flushed=[largest(calls, "flushed") for calls in by_batch],
            subnormal=[largest(calls, "subnormal") for calls in by_batch],
        )
        for (module, op, source, dtypes), by_batch in calls_at.items()
    ]


def ranges_of(runs: Sequence[Run]) -> BatchRanges:
    """The results of ``runs``, each on another batch, and the ranges of places."""
    return BatchRanges(
        statuses=[run.status for run in runs],
        output_errors=[run.output_error.distance if run.output_error else None for run in runs],
        places=ranges_by_place([run.op_calls for run in runs]),
    )


def remarks_of(run: Run) -> list[CompilerRemark]:
    """What its backend said while it compiled the model; empty in eager mode."""
    return run.backend_check.remarks if run.backend_check is not None else []


# -- Choices that a run makes otherwise than fp32

DECISIVE = 5  # choices decide if the output error is more than so many times what is left with those of fp32


def error_with_same_choices(run: Run) -> float | None:
    """The error left with fp32's choices, if choices decide that the run fails; else ``None``."""
    # the analysis follows the first call in eager mode, to the output itself
    about_another_run = not run.is_eager or run.failed_call or run.compared_module or not run.complete
    if run.status != "inaccurate" or about_another_run or run.output_error is None or run.lockstep_error is None:
        return None
    error, in_lockstep, limit = run.relative_error, run.lockstep_error.distance, run.relative_tolerance
    if fails_by_integers(run) and run.by_meaning is not None:
        error, in_lockstep, limit = run.output_error.mismatched, run.lockstep_error.mismatched, run.by_meaning.limit
    if in_lockstep is None:
        return None
    is_far = error is None or error > DECISIVE * in_lockstep
    return in_lockstep if is_far and in_lockstep <= (limit or 0.0) else None


def fails_by_integers(run: Run) -> bool:
    """Whether integers or booleans differ beside floating values that are within the tolerance."""
    if run.by_meaning is None or run.output_error is None or not run.output_error.mismatched:
        return False
    return run.rel_l2 is not None and run.rel_l2 <= (run.relative_tolerance or 0.0)


_COPIES = ("to_copy", "copy_", "clone", "contiguous", "detach")


def other_ops(run: Run, fp32: Run) -> list[str]:
    """Ops that ``run`` calls more often than ``fp32``, by a branch on the dtype; no copies."""
    # a value that Python reads may decide too, and an incomplete analysis lacks calls
    if not (run.complete and fp32.complete and fp32.op_calls) or any(run.op_calls.to_python):
        return []
    low, wide = (Counter((row.module, row.op) for row in each.op_calls.rows()) for each in (run, fp32))
    more = (op for _, op in low - wide if not op.startswith("cast ") and short_op(op) not in _COPIES)
    return list(dict.fromkeys(more))
