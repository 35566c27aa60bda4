"""LP9xx: the limits of a scan: what it did not run, and what its instruments changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.schema.scan_result import ScanResult


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
            yield Finding("two seeded fp32 runs differ; the tolerance was widened", run=run)


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
                yield Finding(f"emulated: {reason}", run=run, op=op, calls=counts[op])


@rule("LP904", "instruments-perturb", "note")
def instruments_perturb(result: ScanResult) -> Iterator[Finding]:
    """The instrumented output differs from the plain one.

    Nothing was rescued or emulated, and still the two differ: a kernel that is not deterministic, or a model that
    notices it is watched. Status, error and time are the plain run's; the op-by-op figures are of another path.
    """
    for run in low_runs(result):
        if run.perturbed:
            yield Finding("the instrumented output differs from the plain one", run=run)


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
            yield Finding(message, run=run, module=module, source=source)
