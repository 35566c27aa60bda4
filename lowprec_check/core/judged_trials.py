"""A run that was explained, called again in its worker with something changed, and judged again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lowprec_check.core.feature_hooks import Explained
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.schema.axes import Call
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.verdict import Status
from lowprec_check.torchkit.dispatch_mode import DispatchMode

SHARE = 1 / 4
"""The part of the time for the explanation that further calls of a run may take."""


def fails_first_call(explained: Explained) -> bool:
    """Whether the first call of an eager run gives wrong values, and soon enough to be repeated."""
    task, run = explained.task, explained.report.run
    if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.failed_call is not None:
        return False
    return run.status in ("nonfinite", "inaccurate") and (run.latency_ms or 0.0) / 1e3 <= SHARE * task.explain_budget


class JudgedTrials:
    """Calls of the model ``ready``, each judged by ``fp32``, the output of the fp32 run."""

    def __init__(
        self,
        ready: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fp32: Sequence[Tensor],
        *,
        tolerance: float,
        seed: int,
    ) -> None:
        self.ready, self._given, self._fp32 = ready, (args, kwargs), fp32
        self._tolerance, self._seed = tolerance, seed
        self.snapshot = Snapshot(ready.model, self._given)

    def inputs(self) -> Call:
        """The positional and named inputs, as the model gets them."""
        return self.ready.inputs(*self._given)

    def judged(
        self,
        mode: DispatchMode,
        inputs: Call | None = None,
        inner: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Status, float | None] | None:
        """The status under ``mode`` and ``inner``, and the error if it is finite; ``None`` if the
        call raises. What it changes in the model is left to :attr:`snapshot`.
        """
        args, kwargs = inputs or self.inputs()
        output, error = call_under(mode, self.ready, args, kwargs, self._seed, inner)
        if error is not None:
            return None
        status, compared = judge(output_tensors(output), self._fp32, self._tolerance)
        rel_l2 = compared.error.rel_l2
        if rel_l2 is not None and not math.isfinite(rel_l2):
            rel_l2 = None
        return status, rel_l2


@contextlib.contextmanager
def trials_of(explained: Explained, task: ModelTask | None = None) -> Iterator[JudgedTrials | None]:
    """The model of ``task``, by default that of the run, for trials; then it is as it was.

    ``None`` if the output of the model holds nothing to compare.
    """
    target, tolerance = explained.target, explained.task.tolerance or 0.0
    saved = Fp32Outputs.load(explained.task.files, target)
    if saved.probe is not None:
        yield None
        return
    task = task or explained.task
    with prepared_for(task, target) as ready:
        eager, fp32 = in_eager_mode(ready, target), saved.outputs[0]
        trials = JudgedTrials(eager, target.args, target.kwargs, fp32, tolerance=tolerance, seed=task.seed)
        try:
            yield trials
        finally:
            trials.snapshot.restore()
