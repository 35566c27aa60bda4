"""What every worker of a run does around its work: load the target, say how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Send
from lowprec_check.engine.run.messages import Finished, Loaded, ToolFailed, UsageFailed
from lowprec_check.engine.run.target_source import Load
from lowprec_check.errors import UsageError, traceback_of
from lowprec_check.process.function_worker import end_if_forked

LOAD_SECONDS = 600.0
"""A fresh interpreter must have loaded the target by then."""


def work_on(load: Load, work: Callable[[Target], None], send: Send) -> None:
    """Load the target and ``work`` on it; every exception becomes a message."""
    try:
        target = load()
        send(Loaded())
        work(target)
        send(Finished())
    except UsageError as error:
        send(UsageFailed(error.message, error.hint))
    except BaseException as error:
        end_if_forked(error)
        with contextlib.suppress(Exception):
            send(ToolFailed(traceback_of(error)))
