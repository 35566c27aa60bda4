"""How far the conclusions of a scan can be trusted: what it rests on and what it did not see, as sentences. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.run_summary import candidates, counted, reference_of, some
from lowprec_check.analysis.speed import speed
from lowprec_check.report import summary
from lowprec_check.report.escape import visible
from lowprec_check.report.run_rows import spread
from lowprec_check.report.times_table import disturbances
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import Run, ScanResult

NAMED = 5


def confidence(result: ScanResult) -> list[tuple[str, str]]:
    """What each part of the conclusions rests on: ``("Times", "…")``, in the order of a page."""
    parts = [
        ("Inputs", " ".join(_inputs(result))),
        ("Weights", " ".join(_weights(result))),
        ("Times", " ".join(_times(result))),
        ("Op by op", " ".join(_analysis(result))),
        ("Not run", " ".join(_not_run(result))),
    ]
    return [(name, visible(text, 2000)) for name, text in parts if text]


def _inputs(result: ScanResult) -> Iterator[str]:
    batches = int(result.options.get("batches") or 1)
    yield f"{batches} batches." if batches > 1 else "One batch: values of other inputs may be larger."
    reference = reference_of(result.runs)
    if reference is not None and reference.nondeterministic:
        yield "fp32 differs from itself, so tolerances are wider."
    if any(run.random for run in result.runs):
        yield "The model draws random numbers; all runs draw the same."


def _weights(result: ScanResult) -> Iterator[str]:
    origin = result.model.weights
    if origin in ("random", "scaled"):
        how = ", scaled layer by layer where the signal vanishes or explodes" if origin == "scaled" else ""
        yield f"Random{how}: trained weights may have other errors, and other overflows."
    elif origin == "loaded":
        yield "Loaded from a file."


def _times(result: ScanResult) -> Iterator[str]:
    reference = reference_of(result.runs)
    if result.prediction is not None or reference is None:
        return
    if reference.latency is None:
        yield "Not compared in rounds."
        return
    rounds = [run.latency.speedup.rounds for run in result.runs if run.latency and run.latency.speedup]
    if rounds:
        yield f"{counted(min(rounds), 'round')} in turns with fp32, whose calls varied by {spread(reference.latency)}."
    noisy = [summary.label(run) for run in candidates(result.runs) if speed(run, result.runs).told == "noisy"]
    if noisy:
        yield f"Cannot be told: {', '.join(noisy)}."
    yield from disturbances(result)


def _analysis(result: ScanResult) -> Iterator[str]:
    low = [run for run in candidates(result.runs) if run.is_eager and run.status != "skipped"]
    partly = [run for run in low if not run.complete]
    for run in partly[:NAMED]:
        why = run.incomplete_because or (run.stopped_by.text if run.stopped_by is not None else "not known")
        yield f"{summary.label(run)} was analyzed in part: {why.rstrip('.')}."
    without = [run for run in low if not len(run.op_calls) and run not in partly]
    if without:
        yield f"No op-by-op analysis of {_labels(without)}."
    changed = [run for run in low if run.perturbed]
    if changed:
        yield f"The analysis changed the output of {_labels(changed)}."
    emulated = sorted({op for run in low for op in run.emulated})
    if emulated:
        yield f"Emulated, as their kernels are too slow or crash: {some(emulated, NAMED)}."


def _not_run(result: ScanResult) -> Iterator[str]:
    never = next((run.uncalled_modules for run in candidates(result.runs) if run.complete and len(run.op_calls)), [])
    if never:
        yield f"{counted(len(never), 'module')} whose parameters no op read: {some(never, NAMED)}."
    left = [run for run in candidates(result.runs) if run.status == "skipped"]
    if left:
        yield f"Skipped: {_labels(left)}."


def _labels(runs: Sequence[Run]) -> str:
    return choices([summary.label(run) for run in runs], "and")
