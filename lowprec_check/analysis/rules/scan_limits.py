"""LP9xx: limits of a scan: what it did not run, and what its instruments changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.run_summary import never_called
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import chained, say, say_if


@rule("LP901", "uncalled-module", "note")
def uncalled_module(result: ScanResult) -> Iterator[Finding]:
    """The module never ran on these inputs, so the scan does not cover it.

    Observed: the module has parameters, and no op read them. If all modules inside a module are
    unused, only the outer one is listed.

    Usual causes: a branch that these inputs do not take, a layer that only training uses, an unused
    layer.

    What to do: remove the module if nothing uses it. Otherwise scan in the mode that uses it
    (`model.train()`), or with inputs that reach it:

        # before: the layer for long inputs never runs
        inputs = torch.randn(1, 8)
        # after
        inputs = torch.randn(1, 32)
    """
    where = "on these inputs" if result.is_forward else "in the first step"
    for module in never_called(result.runs):
        yield Finding(say(f"never ran {where}: not covered"), module=module, help="scan with inputs that reach it")


@rule("LP902", "nondeterministic-reference", "warning")
def nondeterministic_reference(result: ScanResult) -> Iterator[Finding]:
    """Two fp32 runs of the model differ.

    Observed: two fp32 runs with the same seed, weights and inputs gave different outputs. Each
    tolerance is at least three times their difference, so that a run in low precision is not judged
    by it. In a scan of training, two first steps differ; the tolerance stays.

    Usual causes: random numbers from a generator that the scan cannot seed, atomic additions on a
    GPU, time or state that the model reads or changes.

    What to do: make the model deterministic in the file that you scan, and scan again. For kernels,
    call `torch.use_deterministic_algorithms(True)` there; in the model's own code, remove what
    differs from call to call:

        # before: the scan cannot seed this generator
        generator = torch.Generator()
        generator.seed()
        y = x + 1e-4 * torch.rand(x.shape, generator=generator)
        # after
        y = x + 1e-4 * torch.rand(x.shape)
    """
    advice = "make the model deterministic, e.g. with torch.use_deterministic_algorithms(True)"
    for run in result.runs:
        if run.nondeterministic:
            least = say_if(run.is_forward, "each tolerance is at least three times their difference")
            yield Finding(chained(say("two fp32 runs with one seed differ"), least), run=run, help=advice)


@rule("LP903", "emulated-op", "note")
def emulated_op(result: ScanResult) -> Iterator[Finding]:
    """The op-by-op analysis computed this op in fp32 and rounded the result.

    Observed: the op's own kernel crashes the process, or it is slow in a run that fails, that one
    call has judged or that is near the time budget. The emulated result is that of an ideal kernel,
    which computes in fp32 and rounds once. Status, output error and time of the run come from a run
    without instruments, except the error of a model that draws random numbers.

    Usual causes: those of LP106 (slow kernel) and LP107 (crash).

    What to do: fix that finding, if there is one for this op. If the op is only slow, fix what
    fails in its run; or raise the time budget, or add `--thorough` if the run was judged by one
    call:

        # before
        lowprec-check scan mymodel.py
        # after
        lowprec-check scan mymodel.py --budget 120
    """
    for run in low_runs(result):
        counts = Counter(row.op for row in run.op_calls.rows() if row.outcome == "emulated")
        for op, reason in run.emulated.items():
            if not counts[op]:
                continue
            message = say("computed in fp32 and rounded: {reason:text}", reason=reason)
            # A crash is the same each time; how slow an op is depends on the machine.
            crashes = any(gap.kind == "crash" and gap.op == op for gap in run.gaps)
            if crashes:
                advice = "see LP107 of this op"
            elif run.status == "error":
                advice = "fix what fails in this run, and scan again"
            elif run.judged_by_one_call:
                advice = "--thorough"
            else:
                advice = "raise the time budget: --budget"
            yield Finding(message, run=run, op=op, help=advice, calls=counts[op], timed=not crashes)


@rule("LP904", "instruments-perturb", "note")
def instruments_perturb(result: ScanResult) -> Iterator[Finding]:
    """The op-by-op analysis gave another output than the plain run.

    Observed: the scan runs the model twice, once without instruments and once op by op. The outputs
    differ, although no op failed or was emulated. Status, output error and time are those of the
    plain run and remain valid; the op-by-op findings of this precision may be about another path.

    Usual causes: a kernel that is not deterministic; memory that is read before it is written; a
    model that behaves differently when hooks or a `TorchDispatchMode` are active.

    What to do: check the op-by-op findings of this precision by hand, or make the model
    deterministic (see LP902):

        # before: half of y is never written
        y = torch.empty_like(x)
        y[::2] = x[::2]
        # after
        y = torch.zeros_like(x)
        y[::2] = x[::2]
    """
    advice = "check the op-by-op findings of this precision by hand"
    for run in low_runs(result):
        if run.perturbed:
            yield Finding(say("the op-by-op analysis gave another output than the plain run"), run=run, help=advice)


@rule("LP905", "incomplete-scan", "warning")
def incomplete_scan(result: ScanResult) -> Iterator[Finding]:
    """The op-by-op analysis did not reach the end of the model.

    Observed: the analysis stopped at this place, and ops after it were not checked in this
    precision.

    Usual causes: a check in Python that raises, such as an `assert` on a dtype or a custom
    `autograd.Function`; an op that fails in fp32 too; a run over the time budget; too little
    memory.

    What to do: after a timeout, raise the time budget: `lowprec-check scan --budget 120`. Otherwise
    fix the error at this place and scan again:

        # before
        assert x.dtype == torch.float32
        y = x * 2
        # after
        assert x.is_floating_point()
        y = x * 2
    """
    for run in low_runs(result):
        if run.complete or run.status == "skipped":
            continue
        stop, unchecked, advice = run.stopped_by, "later ops were not checked: {why:text}", "fix this and scan again"
        if stop:
            message = say(unchecked, why=stop.text)
            yield Finding(message, run=run, module=stop.module, source=stop.source, help=advice)
            continue
        why = run.incomplete_because or run.reason or "the op-by-op analysis ended early"
        timed = "budget" in why
        advice = "scan with a larger --budget or smaller inputs" if timed else advice
        yield Finding(say(unchecked, why=why), run=run, help=advice, timed=timed)
