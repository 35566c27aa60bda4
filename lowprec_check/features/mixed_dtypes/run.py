"""Adds to a run with ops that get several dtypes where these come from, and a cast that helps."""

from __future__ import annotations

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.features.mixed_dtypes.casts_tried import try_casts
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.floating_dtypes import torch_dtype


class MixedDtypesTrials(Feature):
    """A run again, with casts where dtypes meet."""

    place = 6

    def after_explanation(self, explained: Explained) -> None:
        """Try them in an eager run that fails in its forward pass."""
        task, target, report = explained.task, explained.target, explained.report
        run = report.run
        if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.status != "error":
            return
        if not any(gap.kind == "dtype-mismatch" for gap in run.gaps):
            return
        saved = Fp32Outputs.load(task.files)
        if saved.probe is not None:
            return
        with prepared_for(task, target) as ready:
            tried = try_casts(
                in_eager_mode(ready, target),
                target.args,
                target.kwargs,
                run.gaps,
                torch_dtype(PRECISIONS.get(task.precision).format),
                saved.outputs[0],
                tolerance=task.tolerance or 0.0,
                seed=task.seed,
            )
        report.add(mixed_dtypes=tried)


MIXED_DTYPES = MixedDtypesTrials()
