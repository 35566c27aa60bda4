"""Where and how often tasks are done: in forks, fresh interpreters or a shared worker; retries."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from lowprec_check.core.outcome import Outcome, only_explained
from lowprec_check.core.task_workers import SideBySide, execute
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.core.trace.places import CallSite
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process import Isolation
from lowprec_check.process.function_worker import Activity
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.op_calls import killed_reason
from lowprec_check.torchkit.isolation import IDLE_SECONDS, other_threads

AFTER_VERDICT = "after the output was judged: memory, metric or compiler check may be missing"

FORK_WAITED = (
    "a forked process stopped using the processor, perhaps because of a thread or lock that is not copied: "
    "the runs used fresh interpreters"
)

MAX_ATTEMPTS = 20
"""Number of times that the instrumented part is started before it is left incomplete."""
MAX_SUSPECTS = 4
"""Places in which the process dies, or takes too long, once each before the attempts end."""
MAX_CRASHES = 6
"""Number of places at which one op crashes before its other calls are not run any more."""


class Launcher:
    """Does the tasks of a target."""

    def __init__(self, source: TargetSource, isolation: Isolation) -> None:
        self.source, self.isolation = source, isolation
        """Where tasks are done; ``spawn`` instead of ``fork`` once only a fork has failed."""
        self.changes_parameters = isolation == "none"
        """Whether a run was seen to write to parameters: their values are saved from then on."""
        self.hidden_state = False
        """Whether the model keeps state that cannot be rewound: each part gets its own process."""
        self.side_by_side = SideBySide(source)
        self.forks_may_wait = True
        """Whether a fork that only waits may do so because it is a fork."""
        self.slowdown: Callable[[], float] | None = None
        """How many times as long as at first fp32 takes now; ``None``: no limit is put in doubt."""

    def do(self, task: ModelTask, retries: Sequence[Retry] | None = None) -> Outcome:
        """Do ``task``; each of ``retries`` in turn looks at its end and may do it again."""
        if self.hidden_state or BACKENDS.get(task.backend).changes_process:
            self.renew()
        # One measurement may be of a process that lacks a core.
        idle_limit = math.inf
        if self.forks and self.forks_may_wait:
            idle_limit = idle_limit_of(task)
        outcome = None
        if self.isolation == "fork":
            outcome = self.side_by_side.outcome(task, idle_limit)
        if outcome is None:
            # Neither may disturb the times of the other.
            if isinstance(task, RunTask):
                self.side_by_side.finish()
            outcome = execute(task, self.source, self.isolation, idle_limit=idle_limit)
        retries = OF_ANY_TASK if retries is None else retries
        for number, retry in enumerate(retries):
            outcome = retry(self, task, outcome, functools.partial(self.do, retries=retries[:number]))
        return outcome

    def renew(self) -> None:
        """Do the next task in a new worker."""
        self.source.kept.end()

    def run(self, task: RunTask) -> Outcome:
        """Do ``task``, and repeat its instrumented part until that reaches its end."""
        first = dataclasses.replace(task, instrumented=task.instrumented and not self.hidden_state)
        outcome = self.do(first, OF_A_RUN)
        if not task.instrumented or outcome.is_explained or outcome.faults:
            return outcome
        again = dataclasses.replace(task, changes_parameters=task.changes_parameters or self.changes_parameters)
        so_far = outcome.so_far or task.begun()
        attempts = Attempts(dataclasses.replace(again, measure_once=outcome.failed, so_far=so_far))
        explanation = outcome
        if outcome.position is None or attempts.learn(outcome):
            explanation = self.do(attempts.task)
            while attempts.learn(explanation):
                explanation = self.do(attempts.task)
        if explanation is not outcome:
            outcome.so_far = explanation.so_far or so_far
            outcome.gaps, outcome.op_calls_found = explanation.gaps, explanation.op_calls_found
            outcome.faults += explanation.faults
            outcome.notes += explanation.notes
        outcome.incomplete_because = explanation.why_incomplete(task.explain_budget)
        return outcome

    @property
    def forks(self) -> bool:
        """Whether a worker is a copy of this process."""
        return self.isolation == "fork" or (self.isolation == "shared" and self.source.method == "fork")

    def stop_forking(self) -> None:
        """Use fresh interpreters from now on."""
        self.source.stop_forking()
        self.side_by_side.close()
        if self.isolation == "fork":
            self.isolation = "spawn"


def idle_limit_of(task: ModelTask) -> float:
    """Seconds without use of the processor after which a worker may wait for something."""
    return max(2 * Activity.SECONDS, min(IDLE_SECONDS, task.budget / 2))


# -- Why a task is done again: what ended it may have been something else
#
# Each gets the task, how it ended, and a function that does a task again, with the retries
# before it.

Again = Callable[[ModelTask], Outcome]
Retry = Callable[[Launcher, Any, Outcome, Again], Outcome]


def _after_other_tasks(launcher: Launcher, task: ModelTask, outcome: Outcome, again: Again) -> Outcome:
    """In a new worker, if earlier tasks of the old one may be to blame."""
    if not outcome.may_be_of_others:
        return outcome
    launcher.renew()
    return again(task)


def _after_a_fork_that_waited(launcher: Launcher, task: ModelTask, outcome: Outcome, again: Again) -> Outcome:
    """In a fresh interpreter, which may not wait as the fork did."""
    if outcome.ended != "idle":
        return outcome
    try:
        launcher.source.fresh()
    except UsageError as error:
        threads = other_threads()
        if threads:
            names = ", ".join(threads[:3]) + (", …" if len(threads) > 3 else "")
            raise UsageError(
                "The model stopped working in a copy of this process, in which the threads of this process "
                f"({names}) do not run. {error.message}",
                'Scan its file from the command line, or pass isolation="none" while no thread uses the model.',
            ) from None
        launcher.forks_may_wait = False
        return again(task)
    launcher.side_by_side.finish()  # others would disturb its time
    outcome = execute(task, launcher.source, "spawn", idle_limit=idle_limit_of(task))
    # The model itself waits: it sleeps, or another program works for it.
    if outcome.ended == "idle":
        launcher.forks_may_wait = False
        return again(task)
    if outcome.ended in ("timeout", "stuck"):  # it was not because of the fork
        launcher.forks_may_wait = False
    else:
        launcher.stop_forking()
        outcome.notes.append(FORK_WAITED)
    return outcome


def _in_a_simpler_way(launcher: Launcher, task: RunTask, outcome: Outcome, again: Again) -> Outcome:
    """As its mode says, if there is no verdict."""
    simpler = task.mode.simpler(task)
    if simpler is None or outcome.run is not None:
        return outcome
    return again(simpler)


def _after_a_death(launcher: Launcher, task: RunTask, outcome: Outcome, again: Again) -> Outcome:
    """Once more if its process died in the plain part: it may have been killed."""
    if not outcome.died_in_plain_part:
        if outcome.ended in ("crashed", "timeout") and outcome.run is not None and outcome.position is None:
            reason = outcome.reason or f"the budget of {task.call_budget:.3g} s ended"
            outcome.notes.append(f"{reason} {AFTER_VERDICT}")
        return outcome
    second = again(task.mode.simpler(task) or task)
    if second.died_in_plain_part:
        return second
    if outcome.killed_from_outside:
        second.notes.append(f"{outcome.reason}, once; the run was repeated")
        return second
    outcome.reason = f"{outcome.reason}, in one of two attempts"
    outcome.incomplete_because = second.why_incomplete(task.explain_budget)
    if second.so_far is not None:
        outcome.so_far = only_explained(second.so_far, task)
    return outcome


def _after_its_limit(launcher: Launcher, task: RunTask, outcome: Outcome, again: Again) -> Outcome:
    """Once more if its plain part took too long, in more time if fp32, too, takes longer by now."""
    if outcome.run is not None or outcome.ended != "timeout" or launcher.slowdown is None or task.waits_count:
        return outcome
    budget = math.ceil(task.budget * launcher.slowdown())
    second = again(dataclasses.replace(task, budget=budget))
    # It is slow, not the machine: so may be the runs to come.
    if second.run is None and second.ended == "timeout":
        launcher.slowdown = None
    return second


def _in_a_fresh_interpreter(launcher: Launcher, task: RunTask, outcome: Outcome, again: Again) -> Outcome:
    """If fp32 failed in a fork, which may be to blame."""
    if not launcher.forks or not outcome.failed:
        return outcome
    # Nothing tells a fork from a fresh interpreter: no file to load again, and no threads.
    if launcher.source.reload is None and outcome.ended == "done" and not other_threads():
        return outcome
    try:
        fresh = execute(task, launcher.source, "spawn")
    except (UsageError, WorkerError):
        return outcome
    if fresh.run is None:
        return outcome
    if not fresh.failed:
        launcher.stop_forking()
        why, how = outcome.reason, "took too long in a forked process"
        if outcome.run is not None and outcome.run.exception is not None:
            why = outcome.run.exception.text
        if why:
            how = f"fails in a forked process ({why})"
        fresh.notes.append(f"the model {how}, but not in a fresh interpreter, which the runs used")
    return fresh


def _with_parameters_kept(launcher: Launcher, task: RunTask, outcome: Outcome, again: Again) -> Outcome:
    """With parameters saved, if it is the first run to write to them."""
    if launcher.changes_parameters or outcome.so_far is None or not outcome.so_far.changes_parameters:
        return outcome
    launcher.changes_parameters = True
    launcher.side_by_side.close()  # others were begun without
    return again(dataclasses.replace(task, changes_parameters=True))


OF_ANY_TASK: tuple[Retry, ...] = (_after_other_tasks, _after_a_fork_that_waited)
_OF_VERDICT: tuple[Retry, ...] = (*OF_ANY_TASK, _in_a_simpler_way, _after_a_death)
OF_A_RUN: tuple[Retry, ...] = (*_OF_VERDICT, _after_its_limit, _with_parameters_kept)
OF_REFERENCE: tuple[Retry, ...] = (*_OF_VERDICT, _in_a_fresh_interpreter, _with_parameters_kept)
"""Why a task, a run and fp32 are done again, in this order."""


# -- The instrumented part, until it reaches its end


class Attempts:
    """The next attempt at the instrumented part, to see the ops after the place where it ended."""

    # An op is blamed for its time only if it took its limit twice: the budget may end in any op,
    # and a call may be long because something else had the processor. It is blamed for a crash if
    # the process died in it twice: at the same place, or elsewhere in an op that is already blamed.
    # What died once may have been killed from outside, or by something that an earlier op broke.

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self._suspect: CallSite | None = None
        self._slow_suspect: str | None = None
        self._suspects = 0
        self._left = MAX_ATTEMPTS
        self._died_between_ops = False

    def learn(self, outcome: Outcome) -> bool:
        """Change the task by what ended an attempt; false if another one would not get further."""
        self._left -= 1
        place = outcome.place
        if self._left < 0 or outcome.ended in ("done", "idle"):
            return False
        self.task = dataclasses.replace(self.task, measure_once=True)
        if outcome.ended == "crashed":
            # It died between ops: if only once, it may have been killed from outside.
            if place is None:
                again, self._died_between_ops = self._died_between_ops, True
                return not again
            # Blamed at the same place again, or at another place of an op that is already blamed.
            crashed = [earlier for earlier, _ in self.task.crashed if earlier[0] == place[0]]
            if place != self._suspect and not crashed:
                self._suspect = place
                return self._suspect_another()
            self._suspects = 0
            reason = outcome.reason or "the process died"
            self.task = dataclasses.replace(self.task, crashed=(*self.task.crashed, (place, reason)))
            if len(crashed) + 1 == MAX_CRASHES:
                self._emulate(place[0], f"it crashed at {MAX_CRASHES} places; its other calls were not tried")
            return True
        # Without an op that took long, there were too many ops for the budget.
        if place is None or (outcome.ended == "timeout" and outcome.seconds_in_op < self.task.op_limit):
            return False
        op = place[0]
        if outcome.ended == "stuck" and op == self._slow_suspect:
            self._suspects = 0
            self._emulate(op, killed_reason(outcome.seconds_in_op))
            return True
        self._slow_suspect = op
        return self._suspect_another()

    def _suspect_another(self) -> bool:
        self._suspects += 1
        return self._suspects < MAX_SUSPECTS

    def _emulate(self, op: str, reason: str) -> None:
        self.task = dataclasses.replace(self.task, slow=(*self.task.slow, (op, reason)))
