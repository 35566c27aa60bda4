"""Adds to a run that fails what each place with values out of range does alone to fp32's output."""

from __future__ import annotations

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, in_fp32, prepared_for
from lowprec_check.features.range_trials.out_of_range import places_to_try, poles, try_clamped, try_places
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.floating_dtypes import torch_dtype


class RangeTrials(Feature):
    """Trials of single places."""

    place = 10

    def after_explanation(self, explained: Explained) -> None:
        """Try them, in a format with a small range."""
        _try_clamped(explained)
        task, target, report = explained.task, explained.target, explained.report
        low_format, limit = PRECISIONS.get(task.precision).format, task.tolerance or 0.0
        if task.is_reference or not task.mode.is_forward or not low_format.underflows:
            return
        # The error that is known of the run: one that is not a number fails, too.
        error, budget = report.run.lockstep_error, report.run.budget
        fails = budget is not None and budget.measured is not None and budget.measured > limit
        if error is not None:
            fails = fails or error.distance is None or error.distance > limit
        rows = []
        if fails:
            rows = places_to_try(report.run.op_calls, low_format.mark)
        if not rows:
            return
        saved = Fp32Outputs.load(task.files, target)
        if saved.probe is not None:
            return
        with prepared_for(in_fp32(task), target) as ready:
            trials = try_places(
                in_eager_mode(ready, target),
                target.args,
                target.kwargs,
                rows,
                torch_dtype(low_format),
                saved.outputs[0],
                tolerance=limit,
                seed=task.seed,
                seconds=task.explain_budget / 2,
            )
        report.add(range_trials=trials)


def _try_clamped(explained: Explained) -> None:
    """Add what a run gives with clamped inputs of the functions that give Inf for zeros."""
    task, target, run = explained.task, explained.target, explained.report.run
    if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.failed_call is not None:
        return
    if run.status not in ("nonfinite", "inaccurate") or (run.latency_ms or 0.0) / 1e3 > task.explain_budget / 4:
        return
    places = poles(run.op_calls.rows())
    # Constants with which the run passes have advice of their own.
    if not places or (run.constant_trial is not None and run.constant_trial.status == "ok"):
        return
    saved = Fp32Outputs.load(task.files, target)
    if saved.probe is not None:
        return
    with prepared_for(task, target) as ready:
        eager, limit = in_eager_mode(ready, target), task.tolerance or 0.0
        inputs = target.args, target.kwargs
        trial = try_clamped(eager, *inputs, places, saved.outputs[0], tolerance=limit, seed=task.seed)
    explained.report.add(clamp_trial=trial)


RANGE_TRIALS = RangeTrials()
