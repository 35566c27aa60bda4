"""LP306: what a compiler made worse."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.schema.measures import CompilerCheck
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult, Severity
from lowprec_check.schema.statements import Sentence, say


@rule("LP306", "compiled-worse", "error")
def compiled_worse(result: ScanResult) -> Iterator[Finding]:
    """A compiler makes the output worse than eager mode does in the same precision.

    Observed: the model was run in fp64, in fp32, in the precision of the run in eager mode, and compiled, on the same
    inputs and the same (rounded) weights. For a tensor of the output, the compiled result has NaN or Inf where eager has
    numbers, or changes more than twice as many decisions (integers, booleans), or is more than twice as far from fp64 as
    eager's. The distance is relative to that tensor. A larger distance is confirmed on eight other inputs, and counts
    only if it is over a tenth of the tolerance: a result that differs from eager's but is not further from fp64 is no
    fault. In a run that passes this is a warning.

    Usual causes: the compiler computes a value in fp32 at one place and rounds it to 16 bits at another, so that two
    values that were equal in eager mode differ; a fault of the compiler.

    What to do: run the part in eager mode (`torch.compiler.disable`), and report it to pytorch/pytorch with the pass that
    the finding names. Or, if the finding says that `emulate_precision_casts` removes it, set that:

        # before
        model = torch.compile(model)
        # after
        import torch._inductor.config
        torch._inductor.config.emulate_precision_casts = True
        model = torch.compile(model)
    """
    for run in result.runs:
        check = run.compiler
        if check is not None and check.verdict == "worse":
            severity: Severity | None = "warning" if run.status == "ok" else None
            yield Finding(_message(run, check), run, source=result.model.source, help=_help(check), severity=severity)


def _message(run: Run, check: CompilerCheck) -> Sentence:
    what = "the compiled model" if run.backend == EAGER else run.backend
    where = f" in tensor {check.tensor} of the output" if check.tensors > 1 else ""
    about = {"what": what, "where": where, "exact": check.exact}
    if check.nonfinite:
        return say(
            "{what:text} gives {values:count NaN or Inf value}{where:text} where eager and {exact:text} have numbers",
            **about,
            values=check.nonfinite,
        )
    if check.decisions:
        return say(
            "{what:text} changes {compiled:of decision}{where:text} against {exact:text}; eager changes {eager:number}",
            **about,
            compiled=[check.compiled_changed, check.decisions],
            eager=check.eager_changed,
        )
    return say(
        "the error of {what:text} against {exact:text} is {compiled:error}{where:text}, that of eager {eager:error}",
        **about,
        compiled=check.compiled_error,
        eager=check.eager_error or 0.0,
    )


def _help(check: CompilerCheck) -> str:
    found = f"torch's bisection finds {check.culprit}; " if check.culprit else ""
    if check.emulated is not None and check.emulated != "worse":
        return f"{found}set torch._inductor.config.emulate_precision_casts = True, with which it was not worse"
    return f"{found}use eager mode, and report the fault to pytorch/pytorch"
