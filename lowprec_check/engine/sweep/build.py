"""Measures every operator in worker processes that may die, and collects what they found. Never imports torch.

A worker takes one operator at a time. When it dies, or one call takes too long, the cell it was in (its breadcrumb
tells) is noted as lost, another worker takes its place, and the operator is measured again without that cell.
"""

from __future__ import annotations

import collections
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lowprec_check.catalog.measured_sweep import MeasuredSweep
from lowprec_check.catalog.records import Failure, Header, OpRecord, OpTimes
from lowprec_check.engine.core.breadcrumb import Crumb
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.messages import POISONED, Answer, Fault, FromWorker, Hello, Refusal, Task
from lowprec_check.errors import UsageError

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
        sweep = _Sweep(command, Path(workdir), only, call_seconds, on_progress)
        try:
            return sweep.run(jobs or os.cpu_count() or 1)
        finally:
            sweep.close()


class _Worker:
    """One process, and the operator it has."""

    def __init__(self, command: list[str], crumb: Path) -> None:
        self.crumb = Crumb.create(crumb)
        self.log = crumb.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--crumb", str(crumb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | REPRODUCIBLE,
            )
        self.op: str | None = None
        self.since = time.time()
        self._read = b""

    def give(self, task: Task) -> None:
        """Hand it an operator; a dead worker is noticed when it is read."""
        assert self.process.stdin is not None
        self.op, self.since = task.op, time.time()
        try:
            self.process.stdin.write(msgspec.json.encode(task) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def read(self) -> list[FromWorker] | None:
        """What it said; ``None`` when it has ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._read = (self._read + data).split(b"\n")
        return [msgspec.json.decode(line, type=FromWorker) for line in lines]

    def where(self) -> tuple[str, float]:
        """The cell it is in, and seconds since the call in it began."""
        position = self.crumb.read()
        if position is None or position.op != self.op or position.started < self.since:
            return "samples", time.time() - self.since
        return position.module, time.time() - position.started

    def kill(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


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
        self.selector = selectors.DefaultSelector()
        self.header: Header | None = None
        self.waiting: collections.deque[str] = collections.deque()
        self.lost: dict[str, dict[str, Raised]] = collections.defaultdict(dict)
        self.found: dict[str, Answer] = {}
        self.total = self.started = 0

    def run(self, jobs: int) -> MeasuredSweep:
        """Work until every operator is answered."""
        for _ in range(jobs):
            self._start()
        while self.header is None or len(self.found) < self.total:
            for key, _ in self.selector.select(timeout=0.2):
                self._listen(key.data)
            for worker in self._workers():
                self._check(worker)
        answers = [answer for _, answer in sorted(self.found.items())]
        header = msgspec.structs.replace(self.header, ops=len(answers))
        return MeasuredSweep(header, [a.record for a in answers], [a.times for a in answers if a.times.float32_us])

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers():
            worker.kill()
        self.selector.close()

    def _workers(self) -> list[_Worker]:
        return [key.data for key in list(self.selector.get_map().values())]

    def _start(self) -> None:
        self.started += 1
        worker = _Worker(self.command, self.workdir / f"{self.started}.crumb")
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _listen(self, worker: _Worker) -> None:
        messages = worker.read()
        if messages is None:
            self._ended(worker)
            return
        for message in messages:
            if isinstance(message, Refusal):
                raise UsageError(message.message, message.hint)
            if isinstance(message, Fault):
                raise RuntimeError(f"the sweep failed at {message.op}:\n{message.traceback}")
            if isinstance(message, Hello):
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

    def _feed(self, worker: _Worker) -> None:
        """Give it the next operator."""
        worker.op = None
        if self.waiting:
            op = self.waiting.popleft()
            worker.give(Task(op, self.lost.get(op, {})))
            if self.on_progress is not None:
                self.on_progress(len(self.found), self.total, op)

    def _check(self, worker: _Worker) -> None:
        """Kill a worker that is stuck."""
        if worker.op is not None:
            cell, seconds = worker.where()
            if seconds > self.call_seconds:
                self._drop(worker, cell, Raised("timeout", f"took longer than {self.call_seconds:.0f} s", died=True))
        elif self.header is None and time.time() - worker.since > START_SECONDS:
            raise RuntimeError(f"a worker of the sweep did not start within {START_SECONDS:.0f} s")

    def _ended(self, worker: _Worker) -> None:
        """A worker died by itself."""
        code = worker.process.wait()
        if worker.op is None:
            log = worker.log.read_text(errors="replace")
            raise RuntimeError(f"a worker of the sweep ended with exit code {code}:\n{log[-2000:]}")
        self._drop(worker, worker.where()[0], _how_it_died(code))

    def _drop(self, worker: _Worker, cell: str, raised: Raised) -> None:
        """Put another in its place, and its operator back in the queue without that cell."""
        op = worker.op
        assert op is not None
        self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        worker.kill()
        self.lost[op][cell] = raised
        if len(self.lost[op]) < DEATHS and cell != "float32/forward":
            self.waiting.appendleft(op)
        else:
            self.found[op] = _given_up(op, self.lost[op])
        self._start()


def _how_it_died(code: int) -> Raised:
    if code < 0:
        name = signal.Signals(-code).name
        return Raised(name, f"the process died of {name}", died=True)
    if code == POISONED:
        return Raised("assertion", "an assertion failed on the device, which then refused every call", died=True)
    return Raised("exit", f"the process ended with exit code {code}", died=True)


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
