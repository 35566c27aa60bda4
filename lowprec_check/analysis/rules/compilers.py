"""LP306: what a compiler made worse."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.analysis.run_summary import counted, out_of
from lowprec_check.schema.compiler_check import CompilerCheck
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult, Severity


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


def _message(run: Run, check: CompilerCheck) -> str:
    what = "the compiled model" if run.backend == EAGER else run.backend
    where = f" in tensor {check.tensor} of the output" if check.tensors > 1 else ""
    if check.nonfinite:
        return f"{what} gives {counted(check.nonfinite, 'NaN or Inf value')}{where} where eager and {check.exact} have numbers"
    if check.decisions:
        changed = out_of(check.compiled_changed, check.decisions, "decision")
        return f"{what} changes {changed}{where} against {check.exact}; eager changes {check.eager_changed:,}"
    ratio = (
        f"{check.compiled_error / check.eager_error:.0f} times"
        if check.compiled_error and check.eager_error
        else "∞ times"
    )
    errors = f"{check.compiled_error or float('inf'):.1e} and {check.eager_error or 0.0:.1e}"
    return f"{what} is {ratio} as far from {check.exact} as eager{where} ({errors})"


def _help(check: CompilerCheck) -> str:
    found = f"torch's bisection finds {check.culprit}; " if check.culprit else ""
    if check.emulated is not None and check.emulated != "worse":
        return f"{found}set torch._inductor.config.emulate_precision_casts = True, with which it was not worse"
    return f"{found}run this model in eager mode, and report the fault to pytorch/pytorch"
