"""What a plan keeps in fp32, and why there is none."""

from __future__ import annotations

from lowprec_check.analysis.error_shares import best_input_trial
from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.run_summary import degenerate_output, failed_search, is_plan_of, passes_all
from lowprec_check.analysis.statements.kinds import Made, per_run
from lowprec_check.schema.axes import kept_in
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say, say_if


@per_run("plan-passes", "error", after="unknown-cause", detail="more")
def plan_passes(run: Run, result: ScanResult) -> Made:
    """The modules that a plan keeps in fp32, with which this run passes."""
    for plan in result.runs:
        if is_plan_of(plan, run) and passes_all(plan, result.runs) and plan.keep_fp32:
            kept, dtype = patterns(plan.kept, plan.called_modules), kept_in(plan.backend, plan.base)
            passes = say("with {kept:modules} in {dtype:text} (the plan) it passes", kept=kept, dtype=dtype)
            error = say_if(plan.rel_l2 is not None, ", error {error:error}", error=plan.rel_l2)
            return chained(passes, error, between="")
    return None


@per_run("fp32-inputs", "error", after="unknown-cause", detail="more")
def _inputs(run: Run, result: ScanResult) -> Made:
    """What not casting an input changed, in a plain run."""
    trial = best_input_trial(run)
    if trial is None or degenerate_output(run, result.runs) is not None:
        return None
    passes = " and it passes" if trial.status == "ok" else ""
    if run.rel_l2 is None:
        words = f"with {{inputs:names}} in fp32 the output is finite, error {{after:error}}{passes}"
        return say(words, inputs=trial.inputs, after=trial.rel_l2)
    words = f"with {{inputs:names}} in fp32 the error is {{after:error}}, not {{before:error}}{passes}"
    return say(words, inputs=trial.inputs, after=trial.rel_l2, before=run.rel_l2)


@per_run("no-plan", "advice", after="verdict")
def _no_plan(run: Run, result: ScanResult) -> Made:
    """What the search for modules to keep in fp32 found from a run, where it found none."""
    search = failed_search(run, result.attempts)
    if search is None or result.plan is not None:
        return None
    ended = say("{outcome:text} ({trials:count trial})", outcome=search.outcome, trials=search.trials)
    if search.stopped_without_plan and result.prediction is None:
        return chained(ended, say("{command:text} searches longer", command=command(result, "plan")))
    return ended


@per_run("kept", "advice", after="setup", basis=90)
def kept(run: Run, result: ScanResult) -> Made:
    """What the recommendation keeps in fp32."""
    is_best = run is recommended_run(result)
    kept, dtype = patterns(run.kept, run.called_modules), kept_in(run.backend, run.base)
    return say_if(is_best and run.kept, "kept in {dtype:text}: {kept:modules}", kept=kept, dtype=dtype)
