"""Runs a script to its end, as ``python script.py`` does, with the user's files as they are."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.user_module import run_script
from lowprec_check.engine.model.user_script import Ran
from lowprec_check.engine.model.user_surroundings import KeptFiles, OutsideEffects, exit_handlers_of_the_user
from lowprec_check.errors import UsageError
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.source_location import PACKAGE, is_installed, is_user_code

Watching = Callable[[Callable[[], Mapping[str, Any]]], contextlib.AbstractContextManager[None]]
"""Entered around the script, with what returns its variables."""


def run_to_end(
    spec: TargetSpec, seed: int, watching: Watching, *, seconds: float, threads: int | None = None
) -> tuple[str, ...]:
    """Run the script of ``spec``, for so many ``seconds`` at most; returns notes.

    With ``threads``, torch computes with so many: one leaves no pool, which a fork would lack.
    Raises :class:`UsageError` if it is no script, or fails.
    """
    path = Path(spec.name)
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"{spec.name} is not a script.", "Pass the path of a Python file that calls its models.")
    argv, folders, before = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = [spec.name, *spec.arguments]
    sys.path.insert(0, str(path.resolve().parent))
    seed_everything(seed)
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with contextlib.redirect_stdout(sys.stderr), torchvision_works():
            return run_script(path, run=lambda work: _run(work, watching, seconds)).ran.notes
    finally:
        torch.set_num_threads(before)
        sys.argv, sys.path[:] = argv, folders


STOPPED = "the program was stopped after"
"""How the note of a program starts that did not end."""
_AGAIN, _ANYWHERE = 0.01, 1.0
"""Seconds until the end of a program is tried again; until it is tried wherever the program is."""


class _OverdueError(BaseException):
    """Ends a program that runs too long."""


class _Overdue:
    """The end of a program whose time is over, as the handler of a timer."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Raise :class:`_OverdueError` where the program can be ended, or be called again soon."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        is_patient = now - self._since < _ANYWHERE
        # What is raised in a hook of a package, as of the garbage collector, nobody may see
        is_hook = frame is not None and is_installed(frame.f_code.co_filename)
        if _is_ours(frame) or (is_patient and is_hook):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        signal.setitimer(signal.ITIMER_REAL, _ANYWHERE)  # again, if nobody sees this one
        raise _OverdueError


def _is_ours(frame: FrameType | None) -> bool:
    """Whether this package copies or compares, on behalf of the program: it is soon over."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _run(work: Callable[[], object], watching: Watching, seconds: float) -> Ran:
    """Run ``work`` to its end: ``exit()`` is one, and so are so many ``seconds``."""
    variables, effects = vars(sys.modules["__main__"]), OutsideEffects()
    over: tuple[str, ...] = ()
    handler = signal.signal(signal.SIGALRM, _Overdue())
    with exit_handlers_of_the_user(), KeptFiles() as files, effects.watched(), watching(lambda: variables):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            work()
        except UsageError as error:
            ended = error.__context__
            if isinstance(ended, _OverdueError):
                over = (f"{STOPPED} {seconds:g} s (--budget), with the calls up to there",)
            elif not (isinstance(ended, SystemExit) and ended.code in (None, 0)):
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
    return Ran(None, (*over, *files.notes, *effects.notes))
