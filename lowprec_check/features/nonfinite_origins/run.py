"""Adds to op calls whether the Inf and NaN that they give reach the output."""

from __future__ import annotations

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.observers import MakeObserver, OpObserver, Pass
from lowprec_check.features.nonfinite_origins.origins import NonfiniteOrigins


def origins_of(observed: Pass) -> OpObserver | None:
    """While figures are deferred, nobody knows yet which values are Inf and NaN."""
    if observed.lockstep.figures.deferred:
        return None
    return NonfiniteOrigins(observed)


class Origins(Feature):
    """Where Inf and NaN come from."""

    place = 30

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """Always."""
        return origins_of


ORIGINS = Origins()
