"""LP4xx: what autocast does. LP9xx: what the scan did not see, or saw with its own hands on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.schema.scan_result import Run, ScanResult


@rule("LP401", "cast-churn", "note")
def cast_churn(result: ScanResult) -> Iterator[Finding]:
    """Autocast casts the same tensor back and forth.

    Casts in one module that repeat a cast already made of the same tensor, or undo it. Autocast remembers the casts
    of weights, not those of activations. What to do: cast once before the branch, or put the region of fp32 ops
    under one `autocast(enabled=False)`.
    """
    for run in low_runs(result):
        if not (run.base or run.precision).startswith("autocast"):
            continue
        places = Counter((row.module, row.source) for row in run.op_calls.rows() if row.recast)
        for (module, source), count in places.most_common():
            message = f"{count} {'casts repeat' if count > 1 else 'cast repeats'} or undo{'' if count > 1 else 'es'} another of the same tensor"
            yield Finding(message, run.precision, module, "aten._to_copy.default", source, calls=count)


@rule("LP402", "vacuous-autocast", "note")
def vacuous_autocast(result: ScanResult) -> Iterator[Finding]:
    """Passes only because nothing low-precision reaches the op.

    The op has no kernel in this dtype (the blanket cast shows it) and passes under autocast because its inputs here
    are fp32 from the start. Fed by a layer that autocast runs in 16 bits, it may fail.
    """
    runs = {run.precision: run for run in result.runs}
    for cast, autocast in (("half", "autocast-fp16"), ("bfloat16", "autocast-bf16")):
        if cast in runs and autocast in runs and runs[autocast].status == "ok":
            yield from _vacuous(runs[cast], runs[autocast])


def _vacuous(cast: Run, autocast: Run) -> Iterator[Finding]:
    gaps = {(gap.op, gap.module, gap.source) for gap in cast.gaps if gap.layer == "dispatch"}
    places: Counter[tuple[str, str, str | None]] = Counter()
    for row in autocast.op_calls.rows():
        key = (row.op, row.module, row.source)
        if key in gaps and not row.accumulated_error and row.dtypes.startswith("f32"):
            places[key] += 1
    for (op, module, source), count in places.items():
        message = f"passes only because its inputs are fp32 here; {cast.precision} has no kernel for it"
        yield Finding(message, autocast.precision, module, op, source, calls=count)


@rule("LP901", "uncalled-module", "note")
def uncalled_module(result: ScanResult) -> Iterator[Finding]:
    """Never ran on these inputs.

    A module with parameters that no op read: the scan says nothing about it. A subtree is named by its root.
    """
    complete = [run for run in result.runs if run.complete]
    if complete:
        for module in min((run.uncalled_modules for run in complete), key=len):
            yield Finding("never ran on these inputs: not covered", module=module)


@rule("LP902", "nondeterministic-reference", "warning")
def nondeterministic_reference(result: ScanResult) -> Iterator[Finding]:
    """fp32 differs from itself.

    Two fp32 runs from one seed and one state differ. The tolerance was widened to three times that difference.
    """
    for run in result.runs:
        if run.nondeterministic:
            yield Finding("two seeded fp32 runs differ; the tolerance was widened", precision=run.precision)


@rule("LP903", "emulated-op", "note")
def emulated_op(result: ScanResult) -> Iterator[Finding]:
    """Computed by emulation, with the reason.

    In the instrumented part this op was computed in fp32 and rounded to the dtype, which is what an ideal kernel
    with fp32 accumulation gives, because its own kernel is too slow for the budget or kills the process.
    """
    for run in low_runs(result):
        counts = Counter(row.op for row in run.op_calls.rows() if row.outcome == "emulated")
        for op, reason in run.emulated.items():
            if counts[op]:
                yield Finding(f"emulated: {reason}", precision=run.precision, op=op, calls=counts[op])


@rule("LP904", "instruments-perturb", "note")
def instruments_perturb(result: ScanResult) -> Iterator[Finding]:
    """The instrumented output differs from the plain one.

    Nothing was rescued or emulated, and still the two differ: a kernel that is not deterministic, or a model that
    notices it is watched. Status, error and time are the plain run's; the op-by-op figures are of another path.
    """
    for run in low_runs(result):
        if run.perturbed:
            yield Finding("the instrumented output differs from the plain one", precision=run.precision)


@rule("LP905", "incomplete-scan", "warning")
def incomplete_scan(result: ScanResult) -> Iterator[Finding]:
    """The instrumented pass did not reach the end of the model.

    What lies behind the place named was not looked at in this precision.
    """
    for run in low_runs(result):
        if not run.complete and run.status != "skipped":
            stop = run.stopped_by
            message = (
                f"ended early: {stop.type}: {stop.message}" if stop else f"ended early: {run.reason or run.status}"
            )
            module, source = (stop.module, stop.source) if stop else (None, None)
            yield Finding(message, precision=run.precision, module=module, source=source)
