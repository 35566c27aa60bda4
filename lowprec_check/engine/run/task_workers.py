"""Runs a task in a worker: starts it, takes its messages and sets its limits; slow tasks may run
side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pickle
from collections.abc import Iterable, Iterator

import torch

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.memory_limits import most_at_once
from lowprec_check.engine.run.messages import (
    CallStarted,
    Checked,
    InputStarted,
    Measures,
    TaskMessage,
    TurnTimed,
    WeightRead,
    decode,
)
from lowprec_check.engine.run.outcome import Outcome, describe_position
from lowprec_check.engine.run.place_log import model_line
from lowprec_check.engine.run.target_source import FreshLoad, TargetSource
from lowprec_check.engine.run.target_spec import LOAD_SECONDS
from lowprec_check.engine.run.tasks import AnalysisTask, ExplainTask, ModelTask, RunTask
from lowprec_check.engine.run.worker import QUESTION, do_task, serve, work
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process import Isolation, system
from lowprec_check.process.breadcrumb import Breadcrumb, clear_shared, read_shared, shared_file
from lowprec_check.process.function_worker import Ended, FunctionWorker, Loaded, Method
from lowprec_check.process.process_group import PRIVATE, WHOLE_PROCESS
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor, describe_exit, signal_name
from lowprec_check.schema.statements import percent

CHECK_SECONDS = 30.0
"""Time in which a shared worker must have said whether it can do another task."""

WATCHED_SECONDS = 1.0
"""How long a call must have run before others may start beside it."""

BUSY = 0.9
"""A call that uses fewer cores waits for other programs."""

TaskWorker = FunctionWorker[TaskMessage]

Event = MessageEvent[TaskWorker, TaskMessage] | StateEvent[TaskWorker]


def execute(task: ModelTask, source: TargetSource, isolation: Isolation, *, idle_limit: float = math.inf) -> Outcome:
    """Do ``task``. A worker that does not use the processor for ``idle_limit`` seconds is killed.

    Raises :class:`WorkerError` if the tool itself fails, and :class:`UsageError` if the worker
    cannot load the target or save the fp32 output.
    """
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
    if method == "fork":
        fresh = FreshLoad(source.forked)
    else:
        fresh = source.fresh()
    worker: TaskWorker = FunctionWorker(
        functools.partial(serve, fresh.load) if shared else functools.partial(do_task, task, fresh.load),
        decode,
        method=method,
        log=task.files.log,
        breadcrumb=Breadcrumb.clear(task.files.breadcrumb),
        descriptors=(*fresh.descriptors, *task.files),
    )
    worker.set_timeout(LOAD_SECONDS)
    return worker


def _shared_worker(task: ModelTask, source: TargetSource) -> tuple[TaskWorker, bool]:
    """A worker that waits for ``task``, and whether it has done other tasks; one that has left
    something behind is ended.
    """
    kept = source.kept
    worker: TaskWorker | None = kept.take(_owner(task, source))
    if worker is not None:
        worker.start_anew()
        worker.send(QUESTION)
        worker.set_timeout(CHECK_SECONDS)
        with Supervisor[TaskWorker, TaskMessage]([worker]) as supervisor:
            for event in supervisor.events():
                if isinstance(event, MessageEvent) and isinstance(event.message, Checked):
                    kept.left += event.message.left
                    if not event.message.left:
                        supervisor.release(worker)
                        worker.start_anew(Breadcrumb.clear(task.files.breadcrumb))
                        return worker, True
                    break
    kept.started += 1
    return start_worker(task, source, source.method, shared=True), False


def _owner(task: ModelTask, source: TargetSource) -> tuple[object, ...]:
    """What a worker can be used for: tasks of one source, device, set of files and way to start."""
    return id(source), task.device, task.files, source.method


def _set_limits(worker: TaskWorker, message: TaskMessage, task: ModelTask) -> None:
    """Each call and each part gets its budget; if the plain run is too slow or failed, each op gets
    its limit.
    """
    failed = isinstance(message, PlainResult) and message.status == "error"
    if isinstance(task, AnalysisTask) and (
        failed or isinstance(message, Measures)
    ):  # the instrumented part may be next
        worker.set_timeout(max(task.call_budget, task.explain_budget))
    elif isinstance(message, (Loaded, CallStarted, PlainResult, InputStarted, TurnTimed, WeightRead)):
        worker.set_timeout(task.part_budget)
    if failed or (isinstance(message, Loaded) and isinstance(task, ExplainTask) and task.measure_once):
        worker.op_limit = task.op_limit


def _take(event: Event, outcome: Outcome, task: ModelTask) -> None:
    """Add what a worker sent, or how it is, to the ``outcome`` of its ``task``, and set its limits."""
    if isinstance(event, MessageEvent):
        outcome.add(event.message)
        if isinstance(event.message, Ended):
            event.message.check()
        else:
            _set_limits(event.worker, event.message, task)
        return
    outcome.position = event.position
    if event.state == "running":
        return
    if event.position is not None:
        outcome.seconds_in_op = event.position.seconds_in_op()
    else:
        outcome.seconds_in_op = 0.0
    line = model_line(read_shared(task.files.log))
    if event.state != "ended":
        outcome.ended = event.state
        outcome.line = line if event.position is None else None
    elif event.exit_code is not None:
        hint = " (out of memory?)" if signal_name(event.exit_code) == "SIGKILL" else ""
        outcome.ended, outcome.exit_code = "crashed", event.exit_code
        outcome.reason = f"{describe_exit(event.exit_code)}{hint}{f' at {line}' if line else ''}"


def _report(event: Event, outcome: Outcome, task: ModelTask, source: TargetSource) -> None:
    """Show as progress where the worker of ``task`` is, if the event says that it runs."""
    if isinstance(event, MessageEvent) or event.state != "running":
        return
    (name, doing), read = task.progress, outcome.weight_read
    if read is not None:
        doing = f"{doing} in {read.module}"
    if outcome.position:
        doing = describe_position(outcome.position)
    if read is not None:
        doing = f"{doing}, {percent(read.share)} of the weights"
    so_far = None if task.is_reference else outcome.verdict_so_far
    source.report(name, f"{so_far} · {doing}" if so_far is not None else doing)


# -- Slow tasks side by side


@dataclasses.dataclass(kw_only=True)
class _Begun:
    """A task that runs in a worker."""

    worker: TaskWorker
    task: AnalysisTask
    own: AnalysisTask
    """The same with files of its own."""
    files: contextlib.ExitStack
    """Closes these files."""
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    ended: bool = False
    called: tuple[float, float] | None = None
    """The time, and the processor time of the worker, at the start of the first call."""
    beside: bool = False
    """Whether others ran at the same time."""
    waited: float = 0.0
    """Seconds that its threads have waited for a core, by which its limits were put off."""
    watched: bool = False
    """Whether it is known how many cores its call uses."""
    threads: int = 0
    """How many threads its instruments may use; 0: as many as they like."""

    def end(self) -> None:
        """Close its files."""
        self.ended = True
        self.files.close()


class SideBySide:
    """Runs the first attempts at slow tasks in forks, several at once if the first one leaves cores
    idle: kernels that are not made for a format often use one core. A call beside others that uses
    several cores is ended, since its time would be wrong: its task must run alone. What a worker
    waits for a core does not count against its budget. A failed run is explained beside the calls
    of others.
    """

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
        """That of the first attempt at ``task``; ``None`` if it must run alone. Waits for it, and
        may begin others meanwhile.
        """
        with self._reading():
            return self._outcome(task, idle_limit)

    def finish(self) -> None:
        """Wait for what was begun, so that what follows runs alone."""
        with self._reading():
            while self._running:
                self._take_next(None)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """This process reads what the workers send."""
        for worker in self._running:
            worker.resume(system.monotonic() - self._left)
        try:
            yield
        finally:
            self._left = system.monotonic()

    def _outcome(self, task: ModelTask, idle_limit: float) -> Outcome | None:
        if task in self._expected:
            self._expected.remove(task)
            self._begin(task, idle_limit)
        elif isinstance(task, ExplainTask):
            self._begin(task, idle_limit)
        while mine := next((its for its in self._begun.values() if its.task == task), None):
            if mine.ended:
                return self._begun.pop(mine.worker).outcome
            self._take_next(mine)
            leaves_cores = isinstance(mine.task, RunTask) or mine.threads
            if self._expected and leaves_cores and not mine.ended and len(self._running) < self._at_once:
                with contextlib.suppress(OSError, UsageError):  # it runs when it is asked for
                    self._begin(self._expected.pop(0), idle_limit)
        return None

    def _take_next(self, asked: _Begun | None) -> None:
        """Take the next event of any worker, and show as progress that of the one ``asked`` for."""
        event = next(self._events, None)
        if event is None:  # there was no worker
            self._events = self._supervisor.events()
            return
        its = self._begun.get(event.worker)
        if its is None:  # it was discarded
            return
        try:
            _take(event, its.outcome, its.own)
        except (UsageError, WorkerError):
            if its is asked:
                raise
            self._discard(event.worker)  # it is raised when it is asked for
            return
        if its is asked:
            _report(event, its.outcome, its.own, self._source)
        self._note(event, its)

    def _begin(self, task: AnalysisTask, idle_limit: float) -> None:
        with contextlib.ExitStack() as files:
            own: dict[str, int] = {}
            for name in ("breadcrumb", "log"):
                own[name] = shared_file()
                files.callback(os.close, own[name])
            with_own = dataclasses.replace(task, files=task.files._replace(**own))
            worker = start_worker(with_own, self._source, "fork")
            worker.idle_limit = idle_limit
            self._supervisor.add(worker)
            for descriptor in own.values():  # not for those that begin beside it
                PRIVATE.add(descriptor)
                files.callback(PRIVATE.discard, descriptor)
            self._begun[worker] = _Begun(worker=worker, task=task, own=with_own, files=files.pop_all())
        self._share_threads()

    def _share_threads(self) -> None:
        """Limit the threads of the instruments: those that spin while they wait cost a worker
        beside them several times their share of the cores.
        """
        running = self._running
        for worker in running if len(running) > 1 else ():
            self._begun[worker].beside = True
        if len(running) <= 1 and self._expected:  # another one may begin beside it
            return
        for worker in running:
            if len(running) > 1:
                self._begun[worker].threads = max(1, torch.get_num_threads() // len(running))
            else:
                self._begun[worker].threads = 0
            assert worker.breadcrumb is not None
            worker.breadcrumb.limit_threads(self._begun[worker].threads)

    def _discard(self, worker: TaskWorker) -> None:
        self._begun.pop(worker).end()
        self._supervisor.release(worker)
        worker.end()

    @property
    def _running(self) -> list[TaskWorker]:
        return [worker for worker, its in self._begun.items() if not its.ended and worker.exit_code is None]

    def _note(self, event: Event, its: _Begun) -> None:
        """Note the start of the first call, how many cores it uses, and the end of a worker."""
        worker, now = event.worker, system.monotonic()
        if isinstance(event, MessageEvent) and isinstance(event.message, CallStarted):
            its.called = its.called or (now, worker.processor_seconds())
        elif isinstance(event, MessageEvent) and isinstance(event.message, Ended):
            self._supervisor.release(worker)
            worker.end()
            its.end()
            self._share_threads()
        elif isinstance(event, StateEvent) and event.state != "running":
            its.end()
            self._share_threads()
        else:
            waited, its.waited = its.waited, max(its.waited, worker.waited_seconds())
            worker.deadline += its.waited - waited if its.beside else 0.0
            if its.watched or its.called is None or not isinstance(its.task, RunTask):
                return
            started, before = its.called
            if its.outcome.plain is not None or now >= started + WATCHED_SECONDS:
                its.watched = True
                self._learn(its, (worker.processor_seconds() - before) / max(now - started, 1e-3))

    def _learn(self, its: _Begun, used: float) -> None:
        """Learn from the cores that a call has ``used`` whether others may run beside it."""
        if len(self._running) > 1:
            if round(used) > 1:
                self._at_once = 1
                self._discard(its.worker)
        elif its.outcome.plain is None and used > BUSY:  # else it is quick, or other programs use the cores
            most = most_at_once(its.task, self._source.target.model)
            self._at_once = min(torch.get_num_threads() // round(used), most)

    def close(self) -> None:
        """End what was begun and not asked for, and begin no more."""
        self._expected.clear()
        for worker in list(self._begun):
            if not self._begun[worker].ended:
                self._discard(worker)
        self._begun.clear()
