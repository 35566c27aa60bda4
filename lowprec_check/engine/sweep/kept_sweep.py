"""Measures operators in worker processes, by messages; :func:`measure_briefly` keeps one. If a
worker dies, or a call takes too long, its breadcrumb names the cell (dtype and mode): it is
recorded as lost, and a new worker measures the operator again without it.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lowprec_check.catalog.records import DTYPES, Failure, OpRecord
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.errors import UsageError
from lowprec_check.process.command_worker import LineWorker, TaskQueue
from lowprec_check.process.fork_lock import ForkLock
from lowprec_check.process.interpreter import module_command
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.process.supervisor import StateEvent
from lowprec_check.schema.base import Struct, encoded

# -- The messages between a sweep and its workers, one JSON object per line


class Hello(Struct, frozen=True, tag="hello"):
    """The worker's first line: the version of torch, and the names of all operators."""

    torch: str
    operators: list[str]


class CannotMeasure(Struct, frozen=True, tag="cannot-measure"):
    """Sent instead of :class:`Hello`: why nothing can be measured."""

    message: str
    hint: str | None = None


class Task(Struct, frozen=True):
    """Sent to the worker: an operator, and the cells in which earlier workers died."""

    op: str
    lost: dict[str, Raised] = {}


class Answer(Struct, frozen=True, tag="answer"):
    """The results of one operator."""

    record: OpRecord


class OperatorFault(Struct, frozen=True, tag="fault"):
    """The tool itself failed at an operator; the text is the traceback."""

    op: str
    traceback: str


FromWorker = Hello | CannotMeasure | Answer | OperatorFault
Decode = Callable[[bytes], FromWorker]
"""Decodes a line from a worker; raises ``msgspec.DecodeError`` if it is not a message."""
_decode: Decode = msgspec.json.Decoder(FromWorker).decode


def open_channel() -> Callable[[Struct], None]:
    """In a worker: a function that sends. What ops print goes to standard error from now on."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def send(message: Struct) -> None:
        stream.write(encoded(message, msgspec.json.encode) + b"\n")

    return send


# -- The sweep

SAMPLES = 24
CALL_SECONDS = 30.0
"""The worker is killed if one call takes longer."""
MAX_DEATHS = 8
"""An operator is given up after so many deaths of its worker, or after one in fp32."""
START_SECONDS = 300.0
WORKER = "lowprec_check.engine.sweep.operator_worker"

REPRODUCIBLE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Makes sweeps reproducible: the order of sets, the choice of samples, MKL's additions."""


class NotMeasurableError(UsageError):
    """This torch or the device cannot be measured; the worker says why."""


class OperatorSweep:
    """Workers that measure operators. They run until ``queue.supervisor`` ends."""

    def __init__(
        self,
        command: Sequence[str],
        workdir: Path,
        *,
        call_seconds: float = CALL_SECONDS,
        environment: Mapping[str, str] = os.environ,
        decode: Decode = _decode,
        on_send: Callable[[Task], None] = lambda _: None,
    ) -> None:
        self.queue: TaskQueue[Task, FromWorker] = TaskQueue(
            command,
            decode,
            workdir,
            environment={**environment, **REPRODUCIBLE},
            start_seconds=START_SECONDS,
            call_seconds=call_seconds,
            on_send=on_send,
        )
        self.call_seconds = call_seconds
        self.hello: Hello | None = None
        self._lost: dict[str, dict[str, Raised]] = collections.defaultdict(dict)
        self._retried: set[str] = set()
        # Of the present call of `measure`: answers by operator, and how many there will be.
        self.answers: dict[str, Answer] = {}
        self.total = 0

    def measure(self, only: Sequence[str] | None, jobs: int = 1) -> list[Answer]:
        """Measure all operators or those in ``only``; the answers are sorted. Workers are kept.
        Raises :class:`NotMeasurableError`, or :class:`UsageError` for an unknown operator.
        """
        # What an interrupted call has left in the queue is dropped.
        self.answers, self.total = {}, 0
        self.queue.waiting.clear()
        if self.hello is not None:
            self._set_operators(self.hello, only)
        self.queue.fill(jobs)
        for task, event in self.queue.events():
            if isinstance(event, CannotMeasure):
                raise NotMeasurableError(event.message, event.hint)
            if isinstance(event, OperatorFault):
                raise RuntimeError(f"the sweep failed at {event.op}:\n{event.traceback}")
            if isinstance(event, Answer):
                self.answers[event.record.op] = event
            elif isinstance(event, StateEvent):
                self._handle_end(task, event)
            elif self.hello is None:
                self.hello = event
                self._set_operators(event, only)
            if self.hello is not None and len(self.answers) >= self.total:
                break
        return [answer for _, answer in sorted(self.answers.items())]

    def _set_operators(self, hello: Hello, only: Sequence[str] | None) -> None:
        unknown = sorted(set(only or ()) - set(hello.operators))
        if unknown:
            hint = "Check the spelling; variants are written as in std.unbiased."
            raise UsageError(f"torch {hello.torch} has no operator {unknown[0]!r} in its OpInfo database.", hint)
        self.queue.waiting.extend(Task(op, self._lost.get(op, {})) for op in only or hello.operators)
        self.total = len(self.queue.waiting)

    def _handle_end(self, task: Task | None, ended: StateEvent[LineWorker[FromWorker]]) -> None:
        """Put the operator back in the queue, without the cell in which the worker died."""
        if task is None or ended.position is None:
            if ended.exit_code is None:
                raise RuntimeError(f"a sweep worker did not start within {START_SECONDS:.0f} s")
            log = ended.worker.log.read_text(errors="replace")
            raise RuntimeError(f"a sweep worker ended with exit code {ended.exit_code}:\n{log[-2000:]}")
        # Before it read the task, the worker may have died for another reason: once more.
        op, cell = task.op, ended.position.module or "samples"
        if cell == "samples" and op not in self._retried:
            self._retried.add(op)
            self.queue.waiting.appendleft(task)
            return
        lost = self._lost[op]
        lost[cell] = Raised.of_end(ended.exit_code, f"took longer than {self.call_seconds:.0f} s")
        if len(lost) < MAX_DEATHS and cell != "float32/forward":
            self.queue.waiting.appendleft(Task(op, lost))
            return
        # Given up, with the first failure in all cells that were lost.
        raised = next(iter(lost.values()))
        failure = Failure(
            cells=[cell for cell in lost if cell.partition("/")[0] in DTYPES],
            type=raised.type,
            kind="timeout" if raised.type == "timeout" else "crash",
            message=raised.message,
        )
        note = f"given up: {raised.message} in {', '.join(lost)}"
        self.answers[op] = Answer(OpRecord(op=op, samples=(0, 0), note=note, failures=[failure]))


# -- Single operators, one after another


class BriefSweep(NamedTuple):
    """What runs of operators, with one version of torch."""

    torch: str
    """Version without the build's suffix, ``2.13.0``."""
    records: list[OpRecord]


_sweeping = ForkLock()

_Key = tuple[int, str, str]
# By process, device and worker. A fork cannot use the worker of its parent, nor its pipes.
_kept: dict[_Key, OperatorSweep] = {}


def measure_briefly(
    device: str, ops: list[str], *, worker: str = WORKER, call_seconds: float = CALL_SECONDS
) -> BriefSweep:
    """What runs of the samples of operators, without errors, times and autocast. The worker,
    started by the first call, is kept. Raises the errors of :meth:`OperatorSweep.measure`.
    """
    with _sweeping:
        key = os.getpid(), device, worker
        try:
            sweep = _sweep_of(key, call_seconds)
            answers = sweep.measure(ops)
            assert sweep.hello is not None  # nothing is measured before it
            return BriefSweep(sweep.hello.torch, [answer.record for answer in answers])
        except BaseException:
            _end(key)  # a worker may be busy, or wait for nothing
            raise


def start_early(device: str, *, worker: str = WORKER, call_seconds: float = CALL_SECONDS) -> None:
    """Start the worker of :func:`measure_briefly`, which imports torch meanwhile."""
    with _sweeping, contextlib.suppress(OSError):
        queue = _sweep_of((os.getpid(), device, worker), call_seconds).queue
        if not queue.workers:
            queue.start()


def _sweep_of(key: _Key, call_seconds: float) -> OperatorSweep:
    sweep = _kept.get(key)
    if sweep is None:
        workdir = Path(GUARDIAN.temporary_folder())
        command = module_command(key[2], "--device", key[1], "--samples", str(SAMPLES))
        _kept[key] = sweep = OperatorSweep(command, workdir, call_seconds=call_seconds)
        atexit.register(_end, key)
    return sweep


def _end(key: _Key) -> None:
    """End the worker, unless this is a fork of the process that started it."""
    sweep = _kept.pop(key, None)
    if sweep is not None and key[0] == os.getpid():
        with sweep.queue.supervisor:
            pass
        shutil.rmtree(sweep.queue.folder, ignore_errors=True)
