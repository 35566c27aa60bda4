"""LP306, LP308 to LP310: where backends and compilers differ from eager mode, and warn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.analysis.run_summary import remarks_of
from lowprec_check.schema.axes import project_of
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import ScanResult, Severity
from lowprec_check.schema.statements import fill, say


@rule("LP306", "compiled-worse", "error")
def compiled_worse(result: ScanResult) -> Iterator[Finding]:
    """A compiler makes the output worse than eager mode does in the same precision.

    Observed: the model was run in fp64, in fp32, in the precision of the run in eager mode, and
    compiled, on the same inputs and the same (rounded) weights. For a tensor of the output, the
    compiled result has NaN or Inf where eager has numbers, or changes more than twice as many
    decisions (integers, booleans), or is more than twice as far from fp64 as eager's. The distance
    is relative to that tensor. A larger distance is confirmed on eight other inputs, and counts
    only if it is over a tenth of the tolerance: a result that differs from eager's but is not
    further from fp64 is no fault. In a run that passes this is a warning.

    Usual causes: the compiler computes a value in fp32 at one place and rounds it to 16 bits at
    another, so that two values that were equal in eager mode differ; a fault of the compiler.

    What to do: run the part in eager mode (`torch.compiler.disable`), and report it to the project
    that the finding names, with the pass. Or, if the finding says that `emulate_precision_casts`
    removes it, set that:

        # before
        model = torch.compile(model)
        # after
        import torch._inductor.config
        torch._inductor.config.emulate_precision_casts = True
        model = torch.compile(model)
    """
    for run in result.runs:
        check = run.compiler
        if check is None or check.verdict != "worse":
            continue
        # A run in eager mode is here that of a model which its user has compiled.
        where = f" in tensor {check.tensor} of the output" if check.tensors > 1 else ""
        about, project = {"what": run.backend, "where": where, "exact": check.exact}, project_of(run.backend)
        if run.backend == EAGER:
            about["what"], project = "the compiled model", "pytorch/pytorch"
        if check.nonfinite:
            words = "{what:text} gives {values:count NaN or Inf value}{where:text}"
            message = say(f"{words} where eager and {{exact:text}} have numbers", **about, values=check.nonfinite)
        elif check.decisions:
            words = "{what:text} changes {compiled:of decision}{where:text} against {exact:text}"
            words += "; eager changes {eager:number}"
            compiled = [check.compiled_changed, check.decisions]
            message = say(words, **about, compiled=compiled, eager=check.eager_changed)
        else:
            words = "the error of {what:text} against {exact:text} is {compiled:error}{where:text}"
            errors = {"compiled": check.compiled_error, "eager": check.eager_error or 0.0}
            message = say(f"{words}, that of eager {{eager:error}}", **about, **errors)
        advice = fill("torch's bisection finds {}; ", check.culprit)
        if check.emulated is not None and check.emulated != "worse":
            config = "torch._inductor.config.emulate_precision_casts"
            advice += f"set {config} = True, with which it was not worse"
        elif run.status == "ok" and run.compiled and check.emulated is None:
            advice = f"--explain all searches for a setting that avoids it, and for the pass, to report it to {project}"
        else:
            advice += f"use eager mode, and report the fault to {project}"
        severity: Severity | None = "warning" if run.status == "ok" else None
        yield Finding(message, run, source=result.model.source, help=advice, severity=severity)


@rule("LP308", "backend-differs", "warning")
def backend_differs(result: ScanResult) -> Iterator[Finding]:
    """A backend gives another dtype, or changes other inputs or buffers, than eager mode.

    Observed: the run in its precision, on its backend and in eager mode, on the same inputs. The
    dtype of a tensor of the output differs; or, after two calls, the values of an input or a buffer
    differ by more than the tolerance. In the second case it is an error, and the run is not
    recommended.

    Usual causes: a backend that computes in one dtype and does not cast back; one that reuses the
    memory of inputs, or that keeps a copy of buffers, so that updates of them are lost.

    What to do: cast the output; clone the inputs; or use eager mode, and report it to the project
    that the finding names.

        # before
        y = compiled(x)
        # after
        y = compiled(x.clone()).to(x.dtype)
    """
    for run in result.runs:
        check = run.backend_check
        if check is None:
            continue
        project = project_of(run.backend)
        if check.changed:
            words = "{values:names} {differ:text} after two calls than after two calls in eager mode"
            differ = "has other values" if len(check.changed) == 1 else "have other values"
            message = say(words, values=check.changed, differ=differ)
            yield Finding(message, run, help=f"use eager mode, or report this to {project}", severity="error")
        for eager, other in check.dtypes:
            message = say("its output is {other:text}, that of eager mode {eager:text}", other=other, eager=eager)
            yield Finding(message, run, help=f"cast the output, or report this to {project}")


@rule("LP309", "compiler-warning", "note")
def compiler_warning(result: ScanResult) -> Iterator[Finding]:
    """A compiler warned of a line of the model.

    Observed: while the model was prepared and called on its backend, a warning that eager mode does
    not give: that of `torch.jit.trace` where Python code reads a value of a tensor, or one of
    another compiler. It is a warning if the run fails.

    Usual causes: control flow, a number or an array of NumPy that depends on the data. A trace
    keeps the branch and the number of its example, for all inputs; a scan tries some, and the run
    fails if it is wrong on one.

    What to do: use operators of tensors instead, or a compiler that handles Python code, such as
    `inductor`:

        # before
        y = self.b(x) if x.mean() > 0 else x
        # after
        y = torch.where(x.mean() > 0, self.b(x), x)
    """
    yield from _remarks(result, "warning")


@rule("LP310", "graph-break", "note")
def graph_break(result: ScanResult) -> Iterator[Finding]:
    """Dynamo could not compile a line, so that what is before and after it is compiled separately.

    Observed: the graph breaks that Dynamo recorded when the row was compiled. The code at the line
    runs in Python. What this costs is not known without a model that has no breaks; the table of
    runs has the speed with them.

    Usual causes: control flow that depends on the data, `.item()`, NumPy, printing, and functions
    that Dynamo does not know.

    What to do: use operators of tensors instead, or set the option that the reason names.
    `torch.compile(fullgraph=True)` raises an exception at the first graph break:

        # before
        scale = float(y.abs().max())
        # after
        scale = y.abs().max()
    """
    yield from _remarks(result, "graph-break")


def _remarks(result: ScanResult, kind: Literal["warning", "graph-break"]) -> Iterator[Finding]:
    for run in result.runs:
        for remark in remarks_of(run):
            if remark.kind != kind:
                continue
            if kind == "warning":
                severity: Severity = "note" if run.status in ("ok", "unjudged") else "warning"
                yield Finding(say("{text:text}", text=remark.text), run, source=remark.source, severity=severity)
            else:
                message = say("graph break: {text:text}", text=remark.text)
                yield Finding(message, run, source=remark.source, calls=remark.count)
