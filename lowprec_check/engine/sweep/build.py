"""Measures every operator in worker processes that may die, and collects what they found. Never imports torch.

A worker takes one operator at a time. When it dies, or one call takes too long, the cell it was in (its breadcrumb
tells) is noted as lost, another worker takes its place, and the operator is measured again without that cell.
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
from lowprec_check.catalog.records import Failure, Header, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.messages import POISONED, Answer, Fault, FromWorker, Hello, Refusal, Task, decode
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.command_worker import LineWorker
from lowprec_check.process.exit_code import describe_exit, signal_name
from lowprec_check.process.supervisor import Said, Seen, Supervisor

SAMPLES = 24
CALL_SECONDS = 30.0
"""A call that takes longer has its process killed."""
DEATHS = 8
"""So many deaths in one operator, and it is given up; one is enough in fp32, as there is nothing to compare with then."""
START_SECONDS = 300.0

REPRODUCIBLE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The order of a set must not decide which samples are drawn, nor the alignment of memory which way MKL adds."""

OnProgress = Callable[[int, int, str], None]
"""Told how many operators are done, of how many, and which comes next."""


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

    ``worker`` is the module that a worker runs; a call that takes longer than ``call_seconds`` has its process killed.
    Raises :class:`UsageError` where this torch or the device cannot be measured, or an operator is not known.
    """
    command = [python, "-m", worker, "--device", device, "--samples", str(samples)]
    command += ["--extension", extension] if extension else []
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as workdir:
        return _Sweep(command, Path(workdir), only, call_seconds, on_progress).run(jobs or os.cpu_count() or 1)


SweepWorker = LineWorker[FromWorker]


class _Sweep:
    """The queue of operators and the workers that empty it."""

    def __init__(
        self,
        command: list[str],
        workdir: Path,
        only: list[str] | None,
        call_seconds: float,
        on_progress: OnProgress | None,
    ) -> None:
        self.command, self.workdir, self.only, self.on_progress = command, workdir, only, on_progress
        self.call_seconds = call_seconds
        self.supervisor: Supervisor[SweepWorker, FromWorker] = Supervisor(tick=0.2)
        self.measuring: dict[SweepWorker, str] = {}
        """The operator that each busy worker has."""
        self.header: Header | None = None
        self.waiting: collections.deque[str] = collections.deque()
        self.lost: dict[str, dict[str, Raised]] = collections.defaultdict(dict)
        self.found: dict[str, Answer] = {}
        self.total = self.started = 0

    def run(self, jobs: int) -> MeasuredSweep:
        """Work until every operator is answered."""
        with self.supervisor:
            for _ in range(jobs):
                self._start()
            for event in self.supervisor.events():
                if isinstance(event, Said):
                    self._hear(event.worker, event.message)
                elif event.state != "running":
                    self._replace(event)
                if self.header is not None and len(self.found) >= self.total:
                    return self._measured(self.header)
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
        worker.allow(START_SECONDS)
        self.supervisor.add(worker)

    def _hear(self, worker: SweepWorker, message: FromWorker) -> None:
        if isinstance(message, Refusal):
            raise UsageError(message.message, message.hint)
        if isinstance(message, Fault):
            raise RuntimeError(f"the sweep failed at {message.op}:\n{message.traceback}")
        if isinstance(message, Hello):
            worker.allow(math.inf)
            self._greeted(message)
        else:
            self.found[message.record.op] = message
        self._feed(worker)

    def _greeted(self, hello: Hello) -> None:
        if self.header is not None:
            return
        unknown = sorted(set(self.only or ()) - set(hello.operators))
        if unknown:
            raise UsageError(f"torch {hello.header.torch} describes no operator {unknown[0]!r}.")
        self.header = hello.header
        self.waiting.extend(self.only or hello.operators)
        self.total = len(self.waiting)

    def _feed(self, worker: SweepWorker) -> None:
        """Give it the next operator, if there is one."""
        self.measuring.pop(worker, None)
        worker.op_limit = math.inf
        if not self.waiting:
            return
        op = self.waiting.popleft()
        self.measuring[worker] = op
        if worker.breadcrumb is not None:
            worker.breadcrumb.enter(op, "samples", None)  # where it is until its first call
        worker.op_limit = self.call_seconds
        worker.give(msgspec.json.encode(Task(op, self.lost.get(op, {}))))
        if self.on_progress is not None:
            self.on_progress(len(self.found), self.total, op)

    def _replace(self, gone: Seen[SweepWorker]) -> None:
        """Start another worker, and put the operator of this one back in the queue without the cell it was in."""
        op = self.measuring.pop(gone.worker, None)
        if op is None or gone.position is None:
            raise RuntimeError(_never_worked(gone))
        cell = gone.position.module
        self.lost[op][cell] = self._why(gone)
        if len(self.lost[op]) < DEATHS and cell != "float32/forward":
            self.waiting.appendleft(op)
        else:
            self.found[op] = _given_up(op, self.lost[op])
        self._start()

    def _why(self, gone: Seen[SweepWorker]) -> Raised:
        if gone.exit_code is None:
            return Raised("timeout", f"took longer than {self.call_seconds:.0f} s", died=True)
        if gone.exit_code == POISONED:
            return Raised("assertion", "an assertion failed on the device, which then refused every call", died=True)
        return Raised(signal_name(gone.exit_code) or "exit", describe_exit(gone.exit_code), died=True)


def _never_worked(gone: Seen[SweepWorker]) -> str:
    if gone.exit_code is None:
        return f"a worker of the sweep did not start within {START_SECONDS:.0f} s"
    log = gone.worker.log.read_text(errors="replace")
    return f"a worker of the sweep ended with exit code {gone.exit_code}:\n{log[-2000:]}"


def _given_up(op: str, lost: dict[str, Raised]) -> Answer:
    """What remains of an operator that kills its process again and again."""
    raised = next(iter(lost.values()))
    failure = Failure(
        cells=[cell for cell in lost if "/" in cell],
        type=raised.type,
        kind="timeout" if raised.type == "timeout" else "crash",
        message=raised.message,
    )
    note = f"given up: {raised.message} in {', '.join(lost)}"
    return Answer(OpRecord(op=op, samples=(0, 0), note=note, failures=[failure]), OpTimes(op=op))
