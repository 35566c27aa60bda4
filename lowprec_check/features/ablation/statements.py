"""What keeping the modules that are blamed in fp32 changed."""

from __future__ import annotations

from lowprec_check.analysis.error_shares import error_beside, is_disproved
from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.run_summary import degenerate_output, searched_plan
from lowprec_check.analysis.statements.kinds import Made, Said, per_run
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say, say_if


@per_run("ablation", "error", after="unknown-cause", detail="more")
def ablation(run: Run, result: ScanResult) -> Made:
    """What keeping the modules with the largest shares in fp32 changed, in a plain run."""
    tried, before = run.ablation, run.rel_l2
    if tried is None or degenerate_output(run, result.runs) is not None:
        return None
    kept, after, passes = patterns(tried.keep_fp32, run.called_modules), tried.rel_l2, tried.status == "ok"
    if (passes or tried.status == "inaccurate") and after is not None:
        and_passes = " and it passes" if passes else ""
        if before is None:  # the output was not finite
            finite = f"with {{kept:modules}} in fp32 the output is finite, error {{after:error}}{and_passes}"
            return say(finite, kept=kept, after=after)
        if not passes and error_beside(run) >= after:
            return None  # it may be that of another tensor of the output
        words = f"with {{kept:modules}} in fp32 the error is {{after:error}} instead of {{before:error}}{and_passes}"
        if is_disproved(run):
            words = "keeping {kept:modules} in fp32 does not help: the error is {after:error} instead of {before:error}"
        return say(words, kept=kept, after=after, before=before)
    if tried.status == "nonfinite":
        return say("with {kept:modules} in fp32 the output has NaN or Inf", kept=kept)
    return say("with {kept:modules} in fp32 the run ends as {status:text}", kept=kept, status=tried.status)


@per_run("way-out", "advice", after="verdict")
def way_out(run: Run, result: ScanResult) -> Made:
    """Modules with which in fp32 a run passes, where nothing passes as it is."""
    ablation = run.ablation
    if result.recommendation is not None or ablation is None or ablation.status != "ok":
        return None
    kept = patterns(ablation.keep_fp32, run.called_modules)
    passes = say("passes with {kept:modules} in fp32, error {after:error}", kept=kept, after=ablation.rel_l2)
    search = command(result, "plan" if result.prediction is None else "scan --plan")  # plan needs the device
    words = "{command:text} searches for the fewest modules"
    return Said(chained(passes, say_if(not searched_plan(result), words, command=search)), "warn")
