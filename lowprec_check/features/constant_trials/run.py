"""Adds to a run that fails what it gives with numbers that its dtype holds for its constants."""

from __future__ import annotations

from typing import Any

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, in_fp32, prepared_for
from lowprec_check.core.trace.instrument import fp32_state
from lowprec_check.features.constant_trials.replaced import ConstantTrials, vanished_constants
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.floating_dtypes import torch_dtype


class ConstantTrialsFeature(Feature):
    """A run again, with other constants."""

    place = 5

    def after_explanation(self, explained: Explained) -> None:
        """Try it, if the first call of an eager run gives wrong values."""
        task, target, report = explained.task, explained.target, explained.report
        run = report.run
        if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.failed_call is not None:
            return
        seconds = task.explain_budget / 4
        if run.status not in ("nonfinite", "inaccurate") or (run.latency_ms or 0.0) / 1e3 > seconds:
            return
        constants = vanished_constants(run.op_calls.rows(), fp32_state(target.model))
        if not constants:
            return
        saved = Fp32Outputs.load(task.files)
        if saved.probe is not None:
            return
        fp32, dtype = saved.outputs[0], torch_dtype(PRECISIONS.get(task.precision).format)
        limits: Any = {
            "tolerance": task.tolerance or 0.0,
            "seed": task.seed,
            "seconds": seconds,
        }
        with prepared_for(task, target) as ready:
            eager = in_eager_mode(ready, target)
            trial = ConstantTrials(eager, target.args, target.kwargs, dtype, fp32, **limits).of_run(constants)
        if trial is not None and trial.status == run.status:
            # Something else is wrong, too: what the constants do alone shows in fp32.
            with prepared_for(in_fp32(task), target) as ready:
                eager = in_eager_mode(ready, target)
                alone = ConstantTrials(eager, target.args, target.kwargs, dtype, fp32, **limits).of_fp32(constants)
            trial = alone or trial
        report.add(constant_trial=trial)


CONSTANT_TRIALS = ConstantTrialsFeature()
