"""Takes times inside a worker: the turns of one run, or of all, in rounds over all runs."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import nn

from lowprec_check.core.messages import Receive, Send, TaskAnswer
from lowprec_check.core.preparation import OnBackend
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.plain_run import call_once, run_once
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import UsageError, one_line
from lowprec_check.features.times.event_times import MOST_CALLS, TURN_SECONDS, EventCalls, enough_calls, has_events
from lowprec_check.features.times.rounds import LONG_SECONDS, NextTurn, RoundSchedule, TurnFailed, Turns, TurnTimed
from lowprec_check.process import system
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.compiled import compiled_frames, restorer_of_settings
from lowprec_check.torchkit.devices import free_memory, seed_everything

# -- What disturbs times: threads that wait for a core, a processor that changes its speed

WORK_STEPS = 20_000
"""About a millisecond of work."""
WORK_REPEATS = 3
"""The fastest of so many counts: the others may have been interrupted."""


def seconds_of_fixed_work() -> float:
    """Seconds of a fixed piece of integer work: more if the processor's clock is slower."""
    found = []
    for _ in range(WORK_REPEATS):
        value, started = 1, system.perf_counter()
        for _ in range(WORK_STEPS):
            value = (value * 25214903917 + 11) & 0xFFFFFFFF
        found.append(system.perf_counter() - started)
    return min(found)


# -- A turn: a few calls of the prepared model

VERY_LONG_SECONDS = 5.0
"""A longer call is not repeated on one core: its time averages over all that disturbs it."""
DISTURBED = 0.03
"""The largest part of a few calls in which threads may wait for a core."""
PATIENCE = 0.15
"""How long calls are repeated, in seconds, to find some that nothing disturbed."""
ONE_CORE_SECONDS = 0.5
"""How long calls on one core are repeated."""
LEAST_CALLS = 3
"""Of a turn on a CPU, unless they are long."""
REFUSED_SECONDS = 0.1
"""After so long, none will count: a compiler has threads of its own."""
ALONE = 0.3
"""The part of a call on one core in which torch's other threads may still spin, or none works."""
SHORT_SECONDS = 0.005
"""A shorter call is made after one that fills the caches."""
WARM_UP_CALLS = 3
"""Before the first turn of a compiled model: a traced graph is optimized in its second call."""
FILLS = 2.0
"""A long call, so many times its usual time, made something (a table) that rewinding forgets."""
IN_A_ROW = 3
"""The state of the model is rewound after so many calls: it need not survive more."""


class TimedCalls:
    """Calls one prepared model, in turns."""

    def __init__(self, task: ModelTask, target: Target, ready: Prepared) -> None:
        self._task, self._ready, self._inputs = task, ready, target.inputs
        self._snapshot = Snapshot(ready.model, target.rewound, parameters=task.changes_parameters)
        self._calls, self._fills_caches = 0, False
        """Timed calls since the state was rewound; whether one before them makes what they use."""
        self._events = None
        if has_events(ready.device):
            self._events = EventCalls(ready, target.inputs, task.seed, self._rewind)

    def warm_up(self, calls: int | None = None) -> None:
        """Calls that are not timed: they compile, allocate, choose kernels."""
        if calls is None:
            calls = 1 if self._task.backend == EAGER else WARM_UP_CALLS
        usual = self._task.usual_ms or 0.0
        if self._task.backend == EAGER and usual >= VERY_LONG_SECONDS * 1e3:
            return
        first = self.call()
        for _ in range(1, calls):
            self.call()
        if self._is_unusual(first):
            self._rewind()
            self._fills_caches = self._is_unusual(self.call())

    def _is_unusual(self, seconds: float) -> bool:
        usual = self._task.usual_ms
        return seconds >= LONG_SECONDS and usual is not None and seconds > FILLS * usual / 1e3

    def turn(
        self, row: int, number: int, *, on_one_core: bool, least: float = 0.0, on_device: bool = True
    ) -> TurnTimed:
        """The turn of ``row`` in a round, at least ``least`` s; ``on_one_core`` adds such calls,
        ``on_device`` some that an accelerator makes without waiting for the host.
        """
        work = seconds_of_fixed_work()
        self._rewind()
        started, waits = system.perf_counter(), system.CoreWaits()
        first = self.call()
        if self._events is not None and first < LONG_SECONDS:
            seconds = self._events.seconds(IN_A_ROW, least, again=number > 0)
            launched = self._events.launched() if on_device else None
            return TurnTimed(row=row, round=number, seconds=seconds, waited=None, launched=launched, fixed_work=work)
        # Calls are repeated until enough were undisturbed, or as long as patience lasts.
        clean, disturbed, waited = list[float](), list[float](), 0.0
        calls, since = [first] if first >= LONG_SECONDS else self._burst(first), started
        while True:
            now, longest = system.perf_counter(), waits.longest()
            wait = longest or 0.0
            (disturbed if wait > DISTURBED * (now - since) else clean).extend(calls)
            waited += wait
            is_over = now - started >= PATIENCE and enough_calls(clean + disturbed, LEAST_CALLS, least)
            if is_over or enough_calls(clean, LEAST_CALLS, least):
                break
            waits = system.CoreWaits()
            calls, since = self._burst(first), now
        return TurnTimed(
            row=row,
            round=number,
            seconds=clean or disturbed,
            waited=None if longest is None else min(1.0, waited / (now - started)),
            is_disturbed=not clean,
            on_one_core=self._on_one_core() if on_one_core and first < VERY_LONG_SECONDS else [],
            fixed_work=work,
        )

    def _burst(self, first: float) -> list[float]:
        """Seconds of calls from the same state; a short one after one that fills the caches."""
        if first >= SHORT_SECONDS:
            return [self.call()]
        self._snapshot.rewind()
        inputs_in_a_row = [self._ready.inputs(*self._inputs) for _ in range(IN_A_ROW)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [call_once(self._ready, *inputs)[1] for inputs in inputs_in_a_row][1:]

    def _on_one_core(self) -> list[float]:
        """Seconds of calls with one thread, of the processor: load does not change them."""
        threads = torch.get_num_threads()
        try:
            seconds = []
            first = self._call_alone()
            if first is not None and first >= LONG_SECONDS:
                seconds = [first]
            calls = IN_A_ROW if first is None or first < SHORT_SECONDS else 1
            started = system.monotonic()
            while sum(seconds) < TURN_SECONDS and len(seconds) < MOST_CALLS:
                alone = self._call_alone(calls)
                if alone is not None:
                    seconds.append(alone)
                if system.monotonic() - started > (ONE_CORE_SECONDS if seconds else REFUSED_SECONDS):
                    break
            return seconds
        finally:
            torch.set_num_threads(threads)

    def _call_alone(self, calls: int = 1) -> float | None:
        """Seconds of the processor for the last of ``calls`` on one core, if these do no more."""
        self._rewind()  # which restores the number of threads, too
        torch.set_num_threads(1)
        seed_everything(self._task.seed)
        inputs_in_a_row = [self._ready.inputs(*self._inputs) for _ in range(calls)]
        taken = worked = used = 0.0
        before, others, frames = system.own_wait(), system.time_of_other_threads(), compiled_frames()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for inputs in inputs_in_a_row:
                started = system.thread_time()
                _, seconds = call_once(self._ready, *inputs)
                used = min(system.thread_time() - started, seconds)
                taken, worked = taken + seconds, worked + used
        after = system.own_wait()
        # They may not sleep, nor other threads work, or code be compiled again for fewer threads.
        others_worked = system.time_of_other_threads() - others > ALONE * taken
        if before is None or after is None or others_worked or compiled_frames() > frames:
            return None
        slept = taken - worked - (after - before)
        return used if slept <= ALONE * worked else None

    def call(self) -> float:
        """Seconds of a call."""
        if self._calls >= IN_A_ROW:
            self._rewind()
        self._calls += 1
        return self._call()

    def _rewind(self) -> None:
        self._snapshot.rewind()
        self._calls = 0
        if self._fills_caches:
            self._call()

    def _call(self) -> float:
        with warnings.catch_warnings():  # the plain run has shown them
            warnings.simplefilter("ignore")
            return run_once(self._ready, *self._inputs, self._task.seed)[1]


# -- What a worker does

MEMORY = 0.25
"""The part of the free memory that copies of the weights may take while runs are timed."""


def copies_fit(tasks: Sequence[ModelTask], model: nn.Module) -> bool:
    """Whether each run can have its own copy of the weights, where it or its backend makes one."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    copies = sum(not task.is_reference and not (task.uses_autocast and task.backend == EAGER) for task in tasks)
    return weights * copies <= MEMORY * free_memory(torch.device(tasks[0].device))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeTask(ModelTask):
    """In one process: take the turns of all ``runs``, the first of which is fp32."""

    runs: tuple[ModelTask, ...]
    final: bool = False
    """Whether the rounds decide which of them is the fastest."""
    earlier: tuple[Turns, ...] = ()
    """The turns of each in earlier rounds; empty if there were none."""
    failing: tuple[int, ...] = ()
    """The positions of those that do not pass."""

    @property
    def uses_autocast(self) -> bool:
        """Whether any of the runs does."""
        return any(run.uses_autocast for run in self.runs)

    @property
    def progress(self) -> tuple[str, str]:
        """It is about no run of its own."""
        return "times", "round 1"

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Cast the model in place for each turn, and send each. What backends made is kept."""
        on_accelerator = torch.device(self.device).type != "cpu"
        schedule = RoundSchedule(
            len(self.runs), final=self.final, on_accelerator=on_accelerator, earlier=self.earlier, failing=self.failing
        )
        changes_parameters = any(run.changes_parameters for run in self.runs)
        snapshot = Snapshot(target.model, target.rewound, parameters=changes_parameters)
        made: dict[int, OnBackend] = {}
        keeps = copies_fit(self.runs, target.model)
        # What a backend sets for the process counts in its own turns only.
        at_first, settings = restorer_of_settings(), dict[int, Callable[[], None]]()
        for row in schedule:
            run = self.runs[row]
            settings.get(row, at_first)()
            turn: TurnTimed | TurnFailed
            try:
                started = system.monotonic()
                with run.mode.ready(run, target, snapshot) as ready:
                    if row in made:
                        # The model is as it was when its backend prepared it.
                        calls = TimedCalls(run, target, ready.calling(made[row]))
                        calls.warm_up(1)
                    else:
                        calls = TimedCalls(run, target, ready)
                        calls.warm_up()
                        if keeps and isinstance(ready.call, OnBackend):
                            made[row] = ready.call
                            schedule.preparing += system.monotonic() - started
                    # Preparing takes at most twice as long as what it is for.
                    least = min(LONG_SECONDS, (system.monotonic() - started) / 2)
                    alone, on_device = schedule.is_disturbed, not schedule.is_told_on_device
                    turn = calls.turn(row, schedule.number, on_one_core=alone, least=least, on_device=on_device)
                settings[row] = restorer_of_settings()
            except BaseException as error:
                reraise_interrupt(error)
                turn = TurnFailed(row, failure_of(error))
            at_first()
            schedule.note(turn)
            send(TaskAnswer.of(turn))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnsTask(ModelTask):
    """In a fork: take the turns of one run in the rounds over all."""

    row: int

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Prepare the run, then take a turn when asked; :class:`UsageError` if it fails."""
        # What the model prints was printed by its plain run.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        try:
            with self.mode.ready(self, target) as ready:
                calls = TimedCalls(self, target, ready)
                calls.warm_up()
                send(TaskAnswer())
                while (data := receive()) is not None:
                    turn = msgspec.msgpack.decode(data, type=NextTurn)
                    send(TaskAnswer.of(calls.turn(self.row, turn.round, on_one_core=turn.on_one_core)))
        except BaseException as error:
            reraise_interrupt(error)
            raise UsageError(failure_of(error)) from None


def failure_of(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    return one_line(error)
