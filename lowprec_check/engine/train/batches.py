"""The batches of a run of training steps."""

from __future__ import annotations

from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError


def batches_of(target: Target, count: int) -> list[Target]:
    """``target`` with the inputs of each of the first ``count`` batches; fewer if there are fewer, one if its inputs are fixed."""
    found = [target]
    while len(found) < count:
        try:
            found.append(target.batch(len(found)))
        except UsageError:  # fixed inputs, or the end of a loader
            break
    return found
