"""Sweeps of single operators, one after another, whose worker lives as long as this process. Never imports torch."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from pathlib import Path

from lowprec_check.catalog.measured_sweep import MeasuredSweep
from lowprec_check.engine.sweep.build import OperatorSweep, sweep_command

_locks = [threading.Lock()]
"""One; in a fork a new one, since a thread of the parent may have held the other."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _locks.__setitem__(0, threading.Lock()))

_kept: dict[tuple[int, str, str], OperatorSweep] = {}
"""By process, device and the module that a worker runs. A fork cannot use the worker of its parent: they would share its pipes."""


def measure_briefly(
    device: str, ops: list[str], *, worker: str = "lowprec_check.engine.sweep.worker", call_seconds: float = 30.0
) -> MeasuredSweep:
    """Find out what runs of the samples of operators: no errors, no times, nothing under autocast.

    The first call starts the worker, which imports torch and its description of operators; a worker that crashes is
    replaced, as in :func:`~lowprec_check.engine.sweep.build.build`. Raises the same errors.
    """
    with _locks[0]:
        key = os.getpid(), device, worker
        sweep = _kept.get(key)
        if sweep is None:
            workdir = Path(tempfile.mkdtemp(prefix="lowprec-check-"))
            sweep = OperatorSweep(sweep_command(device, worker=worker), workdir, call_seconds=call_seconds, brief=True)
            _kept[key] = sweep
            atexit.register(_end, key)
        try:
            return sweep.measure(ops)
        except BaseException:
            _end(key)  # a worker may be busy, or wait for nothing
            raise


def _end(key: tuple[int, str, str]) -> None:
    """End the worker, unless this is a fork of the process that started it."""
    sweep = _kept.pop(key, None)
    if sweep is not None and key[0] == os.getpid():
        with sweep.supervisor:
            pass
        shutil.rmtree(sweep.workdir, ignore_errors=True)
