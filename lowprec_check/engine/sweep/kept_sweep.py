"""Sweeps of single operators, one after another, whose worker lives as long as this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from lowprec_check.catalog.measured_sweep import MeasuredSweep
from lowprec_check.engine.sweep.build import OperatorSweep, sweep_command
from lowprec_check.process.process_group import GUARDIAN, announce

_locks = [threading.Lock()]
"""One; in a fork a new one, since a thread of the parent may have held the other."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _locks.__setitem__(0, threading.Lock()))

WORKER = "lowprec_check.engine.sweep.worker"
CALL_SECONDS = 30.0

_Key = tuple[int, str, str]
_kept: dict[_Key, OperatorSweep] = {}
"""By process, device and the module that a worker runs. A fork cannot use the worker of its parent: they would share its pipes."""


def measure_briefly(
    device: str, ops: list[str], *, worker: str = WORKER, call_seconds: float = CALL_SECONDS
) -> MeasuredSweep:
    """Find out what runs of the samples of operators: no errors, no times, nothing under autocast.

    The first call starts the worker, which imports torch and its description of operators; a worker that crashes is
    replaced, as in :func:`~lowprec_check.engine.sweep.build.build`. Raises the same errors.
    """
    with _locks[0]:
        key = os.getpid(), device, worker
        try:
            return _sweep_of(key, call_seconds).measure(ops)
        except BaseException:
            _end(key)  # a worker may be busy, or wait for nothing
            raise


def start_early(device: str, *, worker: str = WORKER, call_seconds: float = CALL_SECONDS) -> None:
    """Start the worker of :func:`measure_briefly`, which imports torch in the background; does nothing if that fails."""
    with _locks[0], contextlib.suppress(OSError):
        _sweep_of((os.getpid(), device, worker), call_seconds).start()


def _sweep_of(key: _Key, call_seconds: float) -> OperatorSweep:
    sweep = _kept.get(key)
    if sweep is None:
        workdir = Path(tempfile.mkdtemp(prefix="lowprec-check-"))
        announce(str(workdir), GUARDIAN.lifeline())  # it removes the folder if this process is killed
        command = sweep_command(key[1], worker=key[2])
        _kept[key] = sweep = OperatorSweep(command, workdir, call_seconds=call_seconds, brief=True)
        atexit.register(_end, key)
    return sweep


def _end(key: _Key) -> None:
    """End the worker, unless this is a fork of the process that started it."""
    sweep = _kept.pop(key, None)
    if sweep is not None and key[0] == os.getpid():
        with sweep.supervisor:
            pass
        shutil.rmtree(sweep.workdir, ignore_errors=True)
        announce(str(sweep.workdir), GUARDIAN.lifeline(), ended=True)
