"""Runs a task in a worker: starts it, takes its messages, sets its limits; or several at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

from lowprec_check.core.memory_limits import most_at_once
from lowprec_check.core.messages import GapFound, Started, TaskAnswer, TaskMessage, WeightRead, decode
from lowprec_check.core.outcome import Outcome, describe_position
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.core.worker import QUESTION, do_task, serve, work
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target_source import FreshLoad, TargetSource
from lowprec_check.engine.model.target_spec import LOAD_SECONDS
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process import Isolation, system
from lowprec_check.process.breadcrumb import Breadcrumb, clear_shared, read_shared, shared_file
from lowprec_check.process.function_worker import Ended, FunctionWorker, Method
from lowprec_check.process.process_group import PRIVATE, WHOLE_PROCESS
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor, describe_exit, signal_name
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import percent
from lowprec_check.torchkit.place_log import model_line

CHECK_SECONDS = 30.0
"""Time in which a shared worker must have said whether it can do another task."""
WATCHED_SECONDS = 1.0
"""How long a call must have run before others may start beside it."""
BUSY = 0.9
"""A call that uses fewer cores waits for other programs."""
TaskWorker = FunctionWorker[TaskMessage]

Event = MessageEvent[TaskWorker, TaskMessage] | StateEvent[TaskWorker]


def execute(task: ModelTask, source: TargetSource, isolation: Isolation, *, idle_limit: float = math.inf) -> Outcome:
    """Do ``task``; a worker that leaves the processor unused for ``idle_limit`` s is killed."""
    outcome = Outcome()
    clear_shared(task.files.log)
    if isolation == "none":
        Breadcrumb.clear(task.files.breadcrumb)
        with WHOLE_PROCESS:
            work(task, source.forked(), outcome.add, lambda: None)
        return outcome
    if isolation == "shared":
        worker, outcome.reused = _shared_worker(task, source)
        worker.send(pickle.dumps(task))
    else:
        worker = start_worker(task, source, isolation)
    worker.puts_off = not task.waits_count
    worker.set_timeout(LOAD_SECONDS)
    worker.idle_limit = idle_limit
    with Supervisor[TaskWorker, TaskMessage]([worker]) as supervisor:
        for event in supervisor.events():
            _take(event, outcome, task)
            _report(event, outcome, task, source)
            if isinstance(event, MessageEvent) and isinstance(event.message, Ended):
                if isolation == "shared":
                    supervisor.release(worker)
                    source.kept.keep(worker, _owner(task, source))
                break
    return outcome


def start_worker(task: ModelTask, source: TargetSource, method: Method, *, shared: bool = False) -> TaskWorker:
    """A worker for ``task`` alone; a ``shared`` one waits for it, and for those that follow."""
    fresh = FreshLoad(source.forked) if method == "fork" else source.fresh()
    breadcrumb, log, of_fp32 = task.files
    worker: TaskWorker = FunctionWorker(
        functools.partial(serve, fresh.load) if shared else functools.partial(do_task, task, fresh.load),
        decode,
        method=method,
        log=log,
        breadcrumb=Breadcrumb.clear(breadcrumb),
        descriptors=(*fresh.descriptors, breadcrumb, log, *dict(of_fp32).values()),
    )
    worker.set_timeout(LOAD_SECONDS)
    return worker


def _shared_worker(task: ModelTask, source: TargetSource) -> tuple[TaskWorker, bool]:
    """A waiting worker, and whether it did other tasks; one with leftovers is replaced."""
    kept = source.kept
    worker: TaskWorker | None = kept.take(_owner(task, source))
    if worker is not None:
        worker.start_anew()
        worker.send(QUESTION)
        worker.set_timeout(CHECK_SECONDS)
        with Supervisor[TaskWorker, TaskMessage]([worker]) as supervisor:
            for event in supervisor.events():
                if isinstance(event, MessageEvent) and isinstance(event.message, TaskAnswer):
                    left = event.message.read(list[str])
                    kept.left += left
                    if not left:
                        supervisor.release(worker)
                        worker.start_anew(Breadcrumb.clear(task.files.breadcrumb))
                        return worker, True
                    break
    kept.started += 1
    return start_worker(task, source, source.method, shared=True), False


def _owner(task: ModelTask, source: TargetSource) -> tuple[object, ...]:
    """What a worker can be used for: tasks of one source, device, set of files and way to start."""
    return id(source), task.device, task.files, source.method


def _take(event: Event, outcome: Outcome, task: ModelTask) -> None:
    """Add what a worker sent, or its state, to the ``outcome`` of ``task``; set its limits."""
    if isinstance(event, StateEvent):
        _take_state(event, outcome, task)
        return
    worker, message = event.worker, event.message
    outcome.add(message)
    if isinstance(message, Ended):
        message.check()
        return
    # The worker has said how long each step of it may take; ops are one step together.
    if isinstance(message, (Started, RunSoFar, WeightRead, TaskAnswer)):
        started = outcome.started
        worker.set_timeout(started.seconds if started is not None else task.part_budget)
    if isinstance(message, Started) and message.op_seconds is not None:
        worker.op_limit = message.op_seconds


def _take_state(event: StateEvent[TaskWorker], outcome: Outcome, task: ModelTask) -> None:
    position = outcome.position = event.position
    if event.state == "running":
        return
    outcome.seconds_in_op = position.seconds_in_op() if position is not None else 0.0
    line = model_line(read_shared(task.files.log))
    if event.state != "ended":
        outcome.ended = event.state
        outcome.line = line if position is None else None
    elif event.exit_code is not None:
        outcome.ended, outcome.exit_code = "crashed", event.exit_code
        outcome.reason = describe_exit(event.exit_code)
        if signal_name(event.exit_code) == "SIGKILL":
            outcome.reason += " (out of memory?)"
        if line:
            outcome.reason += f" at {line}"
    if outcome.ended != "done":
        outcome.take_end()


def _report(event: Event, outcome: Outcome, task: ModelTask, source: TargetSource) -> None:
    """Show as progress where the worker of ``task`` is, if the event says that it runs, or what is
    new of its run.
    """
    if isinstance(event, MessageEvent):
        run = _shown_from(event.message, outcome)
        is_row = isinstance(task, RunTask) and task.measured and task.so_far is None and not task.keep_fp32
        if is_row and not task.is_reference and run is not None and run != outcome.shown:
            outcome.shown = run
            source.on_judged(run)
        return
    if event.state != "running":
        return
    (name, doing), read = task.progress, outcome.weight_read
    if outcome.started is not None and outcome.started.doing is not None:
        doing = outcome.started.doing
    elif outcome.position:
        doing = describe_position(outcome.position)
    elif read is not None:
        doing = f"{doing} in {read.module}"
    if read is not None:
        doing = f"{doing}, {percent(read.share)} of the weights"
    so_far = None if task.is_reference else outcome.verdict_so_far
    source.report(name, f"{so_far} · {doing}" if so_far is not None else doing)


def _shown_from(message: TaskMessage, outcome: Outcome) -> Run | None:
    """The run as its row shows it from ``message`` on; ``None`` if that says nothing to show."""
    run = outcome.run
    if run is None:
        return None
    if isinstance(message, GapFound):
        # The first that raises what the run raised is its cause; further ones wait for the end.
        gaps, raised = outcome.gaps, run.exception
        is_first = all(gap.message != message.gap.message for gap in gaps[:-1])
        if raised is None or not is_first or message.gap.message not in raised.message:
            return None
        return msgspec.structs.replace(run, gaps=list(gaps))
    if not isinstance(message, RunSoFar):
        return None
    if not message.is_explained:
        return run
    # That it passes is known already. What is still tested is no cause yet: shares of an error, and
    # what each place does alone, but for the first from which NaN or Inf reaches the output.
    if run.status == "ok":
        return None
    reaches = run.op_calls.reaches_output
    if True in reaches:
        first = reaches.index(True) + 1
        untested = [None if reached else reached for reached in reaches[first:]]
        op_calls = msgspec.structs.replace(run.op_calls, reaches_output=[*reaches[:first], *untested])
        run = msgspec.structs.replace(run, op_calls=op_calls)
    return msgspec.structs.replace(run, budget=None)


# -- Slow tasks side by side


@dataclasses.dataclass(kw_only=True)
class _Begun:
    """A task that runs in a worker."""

    worker: TaskWorker
    task: RunTask
    own: RunTask
    """The same with files of its own."""
    files: contextlib.ExitStack
    """Closes these files."""
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    ended: bool = False
    called: tuple[float, float] | None = None
    """The time, and the processor time of the worker, at the start of the first call."""
    watched: bool = False
    """Whether it is known how many cores its call uses."""
    threads: int = 0
    """How many threads its instruments may use; 0: as many as they like."""

    def end(self) -> None:
        """Close its files."""
        self.ended = True
        self.files.close()


class SideBySide:
    """Runs the first attempts at slow tasks in forks, several at once if the first leaves cores."""

    # Kernels that are not made for a format often use one core. A call beside others that uses
    # several cores is ended, since its time would be wrong: its task must run alone. Waiting for a
    # core does not count against the budget. A failed run is explained beside the calls of others.

    def __init__(self, source: TargetSource) -> None:
        self._source = source
        self._supervisor = Supervisor[TaskWorker, TaskMessage]()
        self._events = self._supervisor.events()
        self._expected: list[RunTask] = []
        self._begun: dict[TaskWorker, _Begun] = {}
        self._at_once = 1
        self._left = 0.0
        """When this process stopped to read what the workers send."""

    def expect(self, tasks: Iterable[RunTask]) -> None:
        """Note the ``tasks`` to come."""
        self._expected = list(tasks)

    def outcome(self, task: ModelTask, idle_limit: float) -> Outcome | None:
        """The first attempt at ``task``, waited for; ``None`` if it must run alone."""
        with self._reading():
            if task in self._expected:
                self._expected.remove(task)
                self._begin(task, idle_limit)
            elif isinstance(task, RunTask) and task.so_far is not None:
                self._begin(task, idle_limit)
            while asked := next((begun for begun in self._begun.values() if begun.task == task), None):
                if asked.ended:
                    return self._begun.pop(asked.worker).outcome
                self._take_next(asked)
                # Others may begin meanwhile, if the task leaves cores idle.
                leaves_cores = asked.task.so_far is None or asked.threads
                if self._expected and leaves_cores and not asked.ended and len(self._running) < self._at_once:
                    with contextlib.suppress(OSError, UsageError):  # it runs when it is asked for
                        self._begin(self._expected.pop(0), idle_limit)
            return None

    def finish(self) -> None:
        """Wait for what was begun, so that what follows runs alone."""
        with self._reading():
            while self._running:
                self._take_next(None)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        for worker in self._running:
            worker.resume(system.monotonic() - self._left)
        try:
            yield
        finally:
            self._left = system.monotonic()

    def _take_next(self, asked: _Begun | None) -> None:
        """Take the next event of any worker, and show as progress that of the one ``asked`` for."""
        event = next(self._events, None)
        # There was no worker.
        if event is None:
            self._events = self._supervisor.events()
            return
        sender = self._begun.get(event.worker)
        # It was discarded.
        if sender is None:
            return
        try:
            _take(event, sender.outcome, sender.own)
        except (UsageError, WorkerError):
            if sender is asked:
                raise
            # It is raised when it is asked for.
            self._discard(event.worker)
            return
        if sender is asked:
            _report(event, sender.outcome, sender.own, self._source)
        self._note(event, sender)

    def _begin(self, task: RunTask, idle_limit: float) -> None:
        with contextlib.ExitStack() as files:
            own: dict[str, Any] = {}
            for name in ("breadcrumb", "log"):
                own[name] = shared_file()
                files.callback(os.close, own[name])
            with_own = dataclasses.replace(task, files=task.files._replace(**own))
            worker = start_worker(with_own, self._source, "fork")
            worker.idle_limit = idle_limit
            self._supervisor.add(worker)
            # Not for those that begin beside it.
            for descriptor in own.values():
                PRIVATE.add(descriptor)
                files.callback(PRIVATE.discard, descriptor)
            self._begun[worker] = _Begun(worker=worker, task=task, own=with_own, files=files.pop_all())
        self._share_threads()

    def _share_threads(self) -> None:
        """Limit instruments' threads: spinning ones cost a neighbour several times their share."""
        running, threads = self._running, 0
        if len(running) > 1:
            threads = max(1, torch.get_num_threads() // len(running))
        elif self._expected:  # another one may begin beside it
            return
        for worker in running:
            self._begun[worker].threads = threads
            assert worker.breadcrumb is not None
            worker.breadcrumb.limit_threads(threads)

    def _discard(self, worker: TaskWorker) -> None:
        self._begun.pop(worker).end()
        self._supervisor.release(worker)
        worker.end()

    @property
    def _running(self) -> list[TaskWorker]:
        return [worker for worker, begun in self._begun.items() if not begun.ended and worker.exit_code is None]

    def _note(self, event: Event, begun: _Begun) -> None:
        """Note the start of the first call, how many cores it uses, and the end of a worker."""
        worker, now = event.worker, system.monotonic()
        if isinstance(event, MessageEvent) and isinstance(event.message, Started) and event.message.call:
            begun.called = begun.called or (now, worker.processor_seconds())
            return
        if isinstance(event, MessageEvent) and isinstance(event.message, Ended):
            self._supervisor.release(worker)
            worker.end()
            begun.end()
            self._share_threads()
            return
        if isinstance(event, StateEvent) and event.state != "running":
            begun.end()
            self._share_threads()
            return
        if begun.watched or begun.called is None or begun.task.so_far is not None:
            return
        started, before = begun.called
        has_result = begun.outcome.run is not None
        if not has_result and now < started + WATCHED_SECONDS:
            return
        # The cores that its call uses say whether others may run beside it.
        begun.watched = True
        used = (worker.processor_seconds() - before) / max(now - started, 1e-3)
        if len(self._running) > 1:
            if round(used) > 1:
                self._at_once = 1
                self._discard(worker)
        elif not has_result and used > BUSY:  # else it is quick, or other programs use the cores
            most = most_at_once(begun.task, self._source.target.model)
            self._at_once = min(torch.get_num_threads() // round(used), most)

    def close(self) -> None:
        """End what was begun and not asked for, and begin no more."""
        self._expected.clear()
        for worker, begun in list(self._begun.items()):
            if not begun.ended:
                self._discard(worker)
        self._begun.clear()
