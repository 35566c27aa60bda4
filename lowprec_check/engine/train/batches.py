"""The batches of a run of training steps."""

from __future__ import annotations

import functools

from lowprec_check.engine.model.inputs import NoBatchError
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import call_user_code


def batches_of(target: Target, count: int) -> list[Target]:
    """``target`` with the inputs of each of the first ``count`` batches; fewer if there are fewer, one if its inputs are fixed."""
    found = [target]
    while len(found) < count:
        number = len(found)
        try:
            found.append(call_user_code(f"Making batch {number}", functools.partial(target.batch, number)))
        except NoBatchError:  # fixed inputs, or the end of a loader
            break
    return found
