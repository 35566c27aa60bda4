"""Measures every operator in worker processes, which may crash, and collects the results.

A worker measures one operator at a time. If it dies, or one call takes too long, its breadcrumb names the cell (dtype and
mode) it was in. That cell is recorded as lost, a new worker starts, and the operator is measured again without the cell.
"""

from __future__ import annotations

import collections
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from lowprec_check.catalog.measured_sweep import MeasuredSweep
from lowprec_check.catalog.records import DTYPES, Failure, Header, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.messages import (
    DEVICE_LOST,
    Answer,
    CannotMeasure,
    Fault,
    FromWorker,
    Hello,
    Task,
    decode,
)
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.command_worker import LineWorker
from lowprec_check.process.interpreter import module_command
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor, describe_exit, signal_name

SAMPLES = 24
CALL_SECONDS = 30.0
"""The worker is killed if one call takes longer."""
MAX_DEATHS = 8
"""An operator is given up after this many deaths of its worker, or after one in fp32, which all others are compared with."""
START_SECONDS = 300.0

REPRODUCIBLE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment that makes sweeps reproducible: the order of sets, the choice of samples, and the order of MKL's additions."""

OnProgress = Callable[[int, int, str], None]
"""Called with the number of finished operators, the number of all, and the name of the next."""


def build(
    device: str = "cpu",
    *,
    jobs: int | None = None,
    samples: int = SAMPLES,
    only: list[str] | None = None,
    extension: str | None = None,
    python: str = sys.executable,
    worker: str = "lowprec_check.engine.sweep.worker",
    call_seconds: float = CALL_SECONDS,
    on_progress: OnProgress | None = None,
) -> MeasuredSweep:
    """Measure every operator (or those named in ``only``) with the torch of the interpreter ``python``.

    ``worker`` is the module that a worker runs; it is killed if one call takes longer than ``call_seconds``. Raises
    :class:`UsageError` if this torch or the device cannot be measured, or if an operator is unknown.
    """
    command = sweep_command(device, samples=samples, extension=extension, python=python, worker=worker)
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as workdir:
        sweep = OperatorSweep(command, Path(workdir), call_seconds=call_seconds, on_progress=on_progress)
        with sweep.supervisor:
            return sweep.measure(only, jobs or os.cpu_count() or 1)


def sweep_command(
    device: str,
    *,
    samples: int = SAMPLES,
    extension: str | None = None,
    python: str = sys.executable,
    worker: str = "lowprec_check.engine.sweep.worker",
) -> list[str]:
    """The command of a worker."""
    command = module_command(worker, "--device", device, "--samples", str(samples), python=python)
    return command + (["--extension", extension] if extension else [])


SweepWorker = LineWorker[FromWorker]


class OperatorSweep:
    """Workers that measure operators, and the queue of these. They run until ``supervisor`` ends."""

    def __init__(
        self,
        command: list[str],
        workdir: Path,
        *,
        call_seconds: float = CALL_SECONDS,
        brief: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        """``brief``: whether to find out only what runs."""
        self.command, self.workdir, self.on_progress = command, workdir, on_progress
        self.call_seconds, self.brief = call_seconds, brief
        self.supervisor: Supervisor[SweepWorker, FromWorker] = Supervisor(tick=0.2)
        self.workers: list[SweepWorker] = []
        """Those that run."""
        self.measuring: dict[SweepWorker, str] = {}
        """The operator that each busy worker measures."""
        self.hello: Hello | None = None
        self.waiting: collections.deque[str] = collections.deque()
        self.lost: dict[str, dict[str, Raised]] = collections.defaultdict(dict)
        self.retried: set[str] = set()
        self.found: dict[str, Answer] = {}
        self.only: list[str] | None = None
        self.total = self.started = 0

    def start(self) -> None:
        """Start a worker, unless one runs, so that it is ready when the first operator is measured."""
        if not self.workers:
            self._start()

    def measure(self, only: list[str] | None, jobs: int = 1) -> MeasuredSweep:
        """Run until every operator (or those named in ``only``) is measured or given up; workers are kept for the next call."""
        self.only, self.found, self.total = only, {}, 0
        self.waiting.clear()
        for worker in [worker for worker in self.workers if worker.exit_code is not None]:  # it died while it was idle
            self.workers.remove(worker)
            self.supervisor.release(worker)
            worker.end()
        if self.hello is not None:
            self._set_operators(self.hello)
            for worker in self.workers:
                if worker.deadline == math.inf:  # it has said hello
                    self._send_next(worker)
        for _ in range(jobs - len(self.workers)):
            self._start()
        for event in self.supervisor.events():
            if isinstance(event, MessageEvent):
                self._handle(event.worker, event.message)
            elif event.state != "running":
                self._replace(event)
            if self.hello is not None and len(self.found) >= self.total:
                return self._measured(self.hello.header)
        raise AssertionError("a worker that ends is replaced")

    def _measured(self, header: Header) -> MeasuredSweep:
        answers = [answer for _, answer in sorted(self.found.items())]
        header = msgspec.structs.replace(header, ops=len(answers))
        return MeasuredSweep(header, [a.record for a in answers], [a.times for a in answers if a.times.float32_us])

    def _start(self) -> None:
        self.started += 1
        path = self.workdir / f"{self.started}.breadcrumb"
        breadcrumb = Breadcrumb.create(path)
        worker = LineWorker(
            [*self.command, "--breadcrumb", str(path)],
            decode,
            environment=os.environ | REPRODUCIBLE,
            log=path.with_suffix(".log"),
            breadcrumb=breadcrumb,
        )
        worker.set_timeout(START_SECONDS)
        self.supervisor.add(worker)
        self.workers.append(worker)

    def _handle(self, worker: SweepWorker, message: FromWorker) -> None:
        if isinstance(message, CannotMeasure):
            raise UsageError(message.message, message.hint)
        if isinstance(message, Fault):
            raise RuntimeError(f"the sweep failed at {message.op}:\n{message.traceback}")
        if isinstance(message, Hello):
            worker.set_timeout(math.inf)
            if self.hello is None:
                self.hello = message
                self._set_operators(message)
        else:
            self.found[message.record.op] = message
        self._send_next(worker)

    def _set_operators(self, hello: Hello) -> None:
        unknown = sorted(set(self.only or ()) - set(hello.operators))
        if unknown:
            raise UsageError(
                f"torch {hello.header.torch} has no operator {unknown[0]!r} in its OpInfo database.",
                "Check the spelling; variants are written as in std.unbiased.",
            )
        self.waiting.extend(self.only or hello.operators)
        self.total = len(self.waiting)

    def _send_next(self, worker: SweepWorker) -> None:
        """Send the next operator to ``worker``, if there is one."""
        self.measuring.pop(worker, None)
        worker.op_limit = math.inf
        if not self.waiting:
            return
        op = self.waiting.popleft()
        self.measuring[worker] = op
        if worker.breadcrumb is not None:
            worker.breadcrumb.enter(op, "samples", None)  # its position until its first call
        worker.op_limit = self.call_seconds
        worker.send_task(msgspec.json.encode(Task(op, self.lost.get(op, {}), self.brief)))
        if self.on_progress is not None:
            self.on_progress(len(self.found), self.total, op)

    def _replace(self, ended: StateEvent[SweepWorker]) -> None:
        """Start another worker, and put the operator back in the queue, without the cell in which the worker died."""
        op = self.measuring.pop(ended.worker, None)
        self.workers.remove(ended.worker)
        if op is None or ended.position is None:
            raise RuntimeError(_startup_failure(ended))
        cell = ended.position.module
        if cell == "samples" and op not in self.retried:  # it may have died before it read the task
            self.retried.add(op)
            self.waiting.appendleft(op)
            self._start()
            return
        self.lost[op][cell] = self._describe_end(ended)
        if len(self.lost[op]) < MAX_DEATHS and cell != "float32/forward":
            self.waiting.appendleft(op)
        else:
            self.found[op] = _given_up(op, self.lost[op])
        self._start()

    def _describe_end(self, ended: StateEvent[SweepWorker]) -> Raised:
        if ended.exit_code is None:
            return Raised("timeout", f"took longer than {self.call_seconds:.0f} s", died=True)
        if ended.exit_code == DEVICE_LOST:
            return Raised("assertion", "an assertion failed on the device, which then refused every call", died=True)
        return Raised(signal_name(ended.exit_code) or "exit", describe_exit(ended.exit_code), died=True)


def _startup_failure(ended: StateEvent[SweepWorker]) -> str:
    if ended.exit_code is None:
        return f"a sweep worker did not start within {START_SECONDS:.0f} s"
    log = ended.worker.log.read_text(errors="replace")
    return f"a sweep worker ended with exit code {ended.exit_code}:\n{log[-2000:]}"


def _given_up(op: str, lost: dict[str, Raised]) -> Answer:
    """The record of an operator that kills its worker repeatedly."""
    raised = next(iter(lost.values()))
    failure = Failure(
        cells=[cell for cell in lost if cell.partition("/")[0] in DTYPES],
        type=raised.type,
        kind="timeout" if raised.type == "timeout" else "crash",
        message=raised.message,
    )
    note = f"given up: {raised.message} in {', '.join(lost)}"
    return Answer(OpRecord(op=op, samples=(0, 0), note=note, failures=[failure]), OpTimes(op=op))
