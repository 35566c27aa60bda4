"""Runs one target repeatedly, each time as a task of its own, and returns a :class:`Run` each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.analysis.run_summary import passes_clearly
from lowprec_check.core.feature_hooks import TimedRuns, features
from lowprec_check.core.launcher import OF_REFERENCE, Launcher
from lowprec_check.core.long_calls import LongCalls
from lowprec_check.core.memory_limits import check_weights_fit, why_too_large
from lowprec_check.core.mode import Mode, mode_of
from lowprec_check.core.outcome import compared_with, explained_by, finished
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.reference_errors import check_reference
from lowprec_check.core.tasks import LONG_CALL, RunTask, TaskFiles, open_task_files
from lowprec_check.engine.model.output_measures import OWN, check_judge, parse_limits
from lowprec_check.engine.model.prepared import format_problem
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.target_spec import NOTICE
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation, system
from lowprec_check.schema.axes import BACKENDS, keeps_layers
from lowprec_check.schema.measures import Errors, TimingConditions
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import FP16, PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE, MemoryFormat, RunKey
from lowprec_check.schema.scan_result import Run, skipped
from lowprec_check.schema.training import TrainingSetup
from lowprec_check.torchkit.devices import kept_generators, rounds_to_tf32

if TYPE_CHECKING:
    from lowprec_check.core.machine import Machine

REFERENCE_BUDGET = 600.0
"""Budget in seconds of the fp32 run, whose time is not known yet."""
MAX_SELF_ERROR = 0.1
"""Largest rel_l2 between two fp32 runs for which fp32 is used as the reference."""
EXPLAIN_RATIO = 60.0
"""Times an fp32 forward that the instrumented part may take; 20 are usual with many small ops."""
BUDGET, BUDGET_RATIO = 20.0, 10.0
"""Seconds for each other run; more if so many fp32 forwards, or a few first ones, take longer."""
FIRST_CALLS = 3.0
MOST_SLOWDOWN = 10.0
"""A limit that was exceeded is raised at most so much when the run is repeated."""

ERRORS_OF_FP32 = 3.0
"""So many times the difference between two fp32 runs passes."""
HIDDEN_STATE = "the model keeps state that a scan cannot rewind: plain and instrumented runs use separate processes"


class TargetRuns:
    """Runs a target: first the fp32 reference, then other precisions, compared with it."""

    def __init__(
        self,
        source: TargetSource,
        options: ScanOptions,
        machine: Machine,
        isolation: Isolation,
        files: TaskFiles,
        mode: Mode | None = None,
    ) -> None:
        self.target, self.options, self._machine = source.target, options, machine
        self.mode = mode or mode_of(source, options, machine)
        judge = options.judge or source.target.judge
        check_judge(judge, options.limit)
        limited = {key.partition(".")[0] for key, _ in parse_limits(options.limit)}
        if OWN in (judge, *limited) and source.target.judge_function is None:
            raise UsageError("There is no function `judge`.", "Define judge(output, reference) -> dict in the file.")
        self._template = RunTask(
            precision=REFERENCE,
            device=machine.runs_on,
            mode=self.mode,
            files=files,
            seed=options.seed,
            without_kernel=tuple(options.without_kernel),
            judge=judge,
            limits=parse_limits(options.limit),
            process_memory=options.names_of("backends") != [EAGER],  # others hold more than torch's tensors
            alone=isolation in ("fork", "spawn"),
            further_inputs=options.further_inputs,
            batches=options.batches,
            errors=options.errors,
            explains_all=options.explains_all,
            budget_error=options.budget_error != "off" and self.mode.is_forward,
            limits_memory=options.budget_error != "on",
            reference=options.reference,
            timed=options.times == "on",
        )
        """What all tasks have in common."""
        self.launcher = Launcher(source, isolation)
        self._features = features()  # forks have their modules, too
        self.fp32: Run | None = None
        self.training: TrainingSetup | None = None
        """How the model is trained; known after the reference."""
        self._fp32_ms: float | None = None
        """The time of fp32 here, which limits are derived from."""
        self._self_error = 0.0
        self._first_seconds = self._seconds_by_clock = 0.0
        self._started = system.monotonic()
        self.long_calls: LongCalls | None = None
        """What the runs may take, if calls are long."""
        self._drew: dict[RunKey, bool | None] = {}
        """Whether a run without modules kept in fp32 drew random numbers; ``None``: unknown."""
        self._ablations: dict[tuple[RunKey, frozenset[str], frozenset[str]], Run] = {}
        """By the run and the modules in fp32: one may be a trial of a plan, too."""
        self._eager: dict[RunKey, Run] = {}
        """The eager runs without a plan, whose analysis explains those on other backends."""

    @property
    def isolation(self) -> Isolation:
        """Where runs happen."""
        return self.launcher.isolation

    def close(self) -> None:
        """End what was begun in advance."""
        self.launcher.side_by_side.close()

    def show_step(self, search: str, step: str | None) -> None:
        """Show the ``step`` of a ``search``, if there is one, as progress in place of its runs'."""
        source = self.launcher.source
        source.search_step = None
        if step is not None:
            source.search_step = (search, step)
            source.report(search, step)

    # -- the reference

    def reference(self, timed_as: Run | None = None, *, instrumented: bool = True) -> Run:
        """Run fp32; :class:`UsageError` if the model fails, hangs, or gives NaN or Inf."""
        # A run on another batch was analyzed, and its time is used here.
        first = timed_as is None
        if self._template.device == "cpu":
            check_weights_fit(self.target.model, torch.device("cpu"), self.isolation)
        task = self._task(
            REFERENCE,
            budget=self.reference_budget,
            saves_reference=True,
            measured=first,
            instrumented=first and instrumented and self.mode.repeats_fp32,
        )
        outcome = self.launcher.do(task, OF_REFERENCE)
        so_far = check_reference(task, outcome, self.target)
        self._self_error = self._self_error_in(so_far)
        if self._self_error > MAX_SELF_ERROR:
            raise UsageError(
                f"Two fp32 runs with the same seed differ by {self._self_error:.1e} (rel_l2), too much for a "
                "reference.",
                "Remove clocks, unseeded generators, and state outside the model's attributes from the forward.",
            )
        self._first_seconds, self._seconds_by_clock = so_far.first_seconds, so_far.seconds_by_clock
        run = finished(task, outcome)
        self._drew[task.key] = so_far.draws
        self.training = so_far.training
        repeatable = self.training is None or self.training.repeatable
        run = msgspec.structs.replace(run, nondeterministic=self._self_error > 0 or not repeatable)
        if self.launcher.hidden_state:
            run = msgspec.structs.replace(run, notes=[*run.notes, HIDDEN_STATE])
        # The time of fp32 sets the limits of all other runs.
        if timed_as is not None:
            self._fp32_ms, peak = timed_as.latency_ms, timed_as.peak_memory_bytes
            self.fp32 = msgspec.structs.replace(run, latency_ms=self._fp32_ms, peak_memory_bytes=peak)
        else:
            self._fp32_ms = so_far.seconds * 1e3
            self.fp32 = self._completed(run, task)
        self._eager[run.key] = self.fp32
        if self.options.budget is None and self.mode.is_forward:
            self.launcher.slowdown = self._slowdown
        return self.fp32

    def _slowdown(self) -> float:
        """How many times as long as at first a call of fp32 takes now, beside other programs."""
        task = self._task(REFERENCE, budget=REFERENCE_BUDGET, measured=False, instrumented=False)
        so_far = self.launcher.do(task).so_far
        if so_far is None or not so_far.is_judged:
            return MOST_SLOWDOWN
        first = so_far.first_seconds / max(self._first_seconds, 1e-3)
        later = so_far.seconds * 1e3 / max(self._fp32_ms or 0.0, 1e-3)
        return min(max(1.0, first, later), MOST_SLOWDOWN)

    def reference_task(self) -> RunTask:
        """The task of the fp32 run, for what is found from another such run."""
        return self._task(REFERENCE)

    def fp32_output(self) -> list[Tensor]:
        """The tensors of the output of :meth:`reference`, on the CPU."""
        return Fp32Outputs.load(self._template.files).outputs[0]

    def _self_error_in(self, so_far: RunSoFar) -> float:
        if so_far.self_error is None:
            return 0.0
        within = so_far.self_error.distance
        if within is None:
            within = math.inf
        if not within or self.isolation == "none":
            return within
        # They do in one process, in spite of the rewound state: another process makes the second.
        self.launcher.renew()
        task = self._task(REFERENCE, budget=self.reference_budget, measured=False, instrumented=False)
        again = self.launcher.do(task)
        error = again.run.output_error if again.run else None
        if error is None or error.distance is None:
            return within
        self.launcher.hidden_state = not error.distance
        return error.distance

    @property
    def reference_budget(self) -> float:
        """Seconds for each part of the fp32 run."""
        return self.options.budget or REFERENCE_BUDGET

    @property
    def budget(self) -> float:
        """Seconds for each part of a run."""
        if self.long_calls is not None:
            return self.options.budget or self.long_calls.plain_seconds
        calls = BUDGET_RATIO * (self._fp32_ms or 0.0) / 1e3
        return self.options.budget or max(BUDGET, calls, FIRST_CALLS * self._first_seconds)

    def tolerance(self, precision: str, backend: str = EAGER) -> float:
        """Largest rel_l2 of the output that passes; larger if two fp32 runs differ."""
        default = max(PRECISIONS.get(precision).tolerance, BACKENDS.get(backend).tolerance)
        ops: set[str] = set()
        if precision == REFERENCE and self.fp32 is not None:
            ops = set(self.fp32.op_calls.op)
        if rounds_to_tf32(torch.device(self._template.device), ops):
            default = max(default, FP16.tolerance)
        asked = default if self.options.tolerance is None else self.options.tolerance
        return max(asked, ERRORS_OF_FP32 * self._self_error)

    # -- other runs

    def in_order(self, keys: Sequence[RunKey]) -> list[RunKey]:
        """``keys`` in the order to run them: slow ones last, which may run side by side."""
        fp32_seconds = max(self._seconds_by_clock, (self._fp32_ms or 0.0) / 1e3)
        if self.mode.limits_calls and fp32_seconds > LONG_CALL:
            self.long_calls = LongCalls(self._started, fp32_seconds, len(keys))
            self.launcher.source.report(NOTICE, self.long_calls.notice)
        one_by_one = self.launcher.hidden_state or self.options.scenario is not None or self.options.batches > 1
        # What is left for a run is known when it begins, so none begins in advance.
        one_by_one = one_by_one or self.long_calls is not None
        if self.mode.runs_side_by_side and not one_by_one and self._template.device == "cpu":
            slow = [key for key in keys if key.backend == EAGER and self.is_slow(key.precision)]
            possible = [key for key in slow if self._why_skipped(key) is None]
            self.launcher.side_by_side.expect(map(self._usual_task, possible))
        return sorted(keys, key=lambda key: self.is_slow(key.precision))

    def run(
        self,
        precision: str,
        backend: str = EAGER,
        memory_format: MemoryFormat = CONTIGUOUS,
        *,
        keep_fp32: tuple[str, ...] = (),
        keep_fp32_inputs: tuple[str, ...] = (),
        measured: bool = True,
        instrumented: bool = True,
        errors: Errors | None = None,
        status_only: bool = False,
    ) -> Run:
        """Run ``precision`` on ``backend``; a crash, a hang or an exception is its status."""
        # ``measured`` adds time and memory, ``instrumented`` explains every op, with the errors of
        # the options by default; ``status_only`` ends the calls with the first that fails.
        key = RunKey(precision, backend, self._template.device, memory_format)
        ablation, kept = None, (*keep_fp32, *keep_fp32_inputs)
        if kept and not (measured or instrumented):
            ablation = (key, frozenset(keep_fp32), frozenset(keep_fp32_inputs))
        if ablation in self._ablations:
            return self._ablations[ablation]
        why_ended = None
        if self.long_calls is not None and measured and not kept:
            why_ended = self.long_calls.begin_run()
        task = self._usual_task(
            key,
            keep_fp32=keep_fp32,
            keep_fp32_inputs=keep_fp32_inputs,
            measured=measured,
            errors=errors or self.options.errors,
        )
        reason = self._why_skipped(task.key) or why_ended
        if reason is not None:
            run = skipped(task.key, reason, task.evidence)
            return msgspec.structs.replace(run, time_was_over=reason == why_ended)
        # The eager run of the same precision and memory format explains one on another backend.
        eager = None
        if backend != EAGER and (not kept or keeps_layers(backend)):
            eager = self._eager.get(task.key._replace(backend=EAGER))
        task = dataclasses.replace(task, instrumented=instrumented and eager is None, status_only=status_only)
        # It draws what is drawn without kept modules, or in fp32.
        if kept and self.fp32 is not None:
            drew = {self._drew.get(task.key), self._drew.get(self.fp32.key)}
            task = dataclasses.replace(task, draws=drew != {False})
        outcome = self.launcher.run(task)
        if not kept:
            self._drew[task.key] = outcome.draws
        run = compared_with(finished(task, outcome), self.fp32)
        if measured:
            run = self._completed(run, task)
        if ablation is not None and not status_only:
            self._ablations[ablation] = run
        if backend == EAGER and instrumented and not kept:
            self._eager[task.key] = run
        if eager is None:
            return run
        return explained_by(run, eager)

    def explained(self, run: Run) -> Run:
        """``run``, which passes clearly and has no errors of ops, with them unless it is slow."""
        if (
            self.options.errors == "none"
            or run.judged_by_one_call
            or not run.op_calls
            or not passes_clearly(run)
            or any(run.op_calls.accumulated_error)
        ):
            return run
        if self.long_calls is not None and self.long_calls.begin_run() is not None:
            return run
        task = dataclasses.replace(self.task_of(run), explains_all=True)
        if not self.mode.may_repeat(task):
            return run
        outcome = self.launcher.do(dataclasses.replace(task, so_far=RunSoFar(run=run, is_judged=True)))
        if outcome.so_far is None or not outcome.is_explained:
            return run
        # Its output was compared bit by bit before.
        notes = list(dict.fromkeys([*outcome.so_far.run.notes, *outcome.faults, *outcome.notes]))
        again = msgspec.structs.replace(outcome.so_far.run, notes=notes, perturbed=run.perturbed)
        return compared_with(again, self.fp32)

    def time(self, runs: Sequence[Run]) -> TimedRuns:
        """fp32 and ``runs``, with times that can be compared; without, if there are none."""
        assert self.fp32 is not None
        self.close()
        for feature in self._features:
            timed = feature.timed(self, runs)
            if timed is not None:
                return timed
        # Those of plain parts are not fit for a comparison.
        without, conditions = [msgspec.structs.replace(run, latency_ms=None) for run in (self.fp32, *runs)], None
        if self.mode.evidence == "measured":
            reason = "times are off" if self.mode.has_times else f"what is {self.mode.name} has no times"
            conditions = TimingConditions(reason=reason)
        return TimedRuns(without, conditions)

    @property
    def has_times(self) -> bool:
        """Whether times are asked for, and can be compared."""
        return self._template.timed and self.mode.has_times

    def task_of(self, run: Run) -> RunTask:
        """The task that makes ``run`` again, to be timed or explained."""
        return self._usual_task(
            run.key._replace(precision=run.base or run.precision),
            keep_fp32=tuple(run.keep_fp32),
            keep_fp32_inputs=tuple(run.keep_fp32_inputs),
            usual_ms=run.latency_ms,
            setup_budget=BACKENDS.get(run.backend).setup_budget,
        )

    def is_slow(self, precision: str) -> bool:
        """Whether the device does not accelerate its format: one call may decide about a run."""
        if self.options.thorough or self.mode.evidence != "measured":
            return False
        return self._machine.environment.get(f"{PRECISIONS.get(precision).format.short}_accelerated") is False

    def _completed(self, run: Run, task: RunTask) -> Run:
        """``run`` with what features find in other processes."""
        for feature in self._features:
            run = feature.beside(self, task, run)
        return run

    def _why_skipped(self, key: RunKey) -> str | None:
        target, backend = self.target, BACKENDS.get(key.backend)
        refused = self.mode.refuses_backend(backend.name)
        if refused is not None:
            return refused
        if backend.changes_process and self.isolation == "none":
            return (
                f"{backend.name} changes its process for good, so it runs in a worker only (--isolation fork or spawn)"
            )
        precision = PRECISIONS.get(key.precision)
        reason = backend.skip_reason(precision, key.device, key.memory_format)
        reason = reason or self.mode.why_skipped(precision, key.device)
        reason = reason or format_problem(key.memory_format, target.model, target.inputs)
        device, files = self._template.device, self._template.files
        return reason or why_too_large(target.model, device, self.isolation, self._fp32_peak, files)

    @property
    def _fp32_peak(self) -> int | None:
        """Peak memory of the fp32 run in bytes, if that is known."""
        if self.fp32 is None:
            return None
        return self.fp32.peak_memory_bytes

    def _usual_task(self, key: RunKey, **changes: Any) -> RunTask:
        setup = 0.0 if self.options.budget else BACKENDS.get(key.backend).setup_budget
        usual = {"backend": key.backend, "memory_format": key.memory_format, "setup_budget": setup}
        return self._task(key.precision, **usual | changes)

    def _task(self, precision: str, **changes: Any) -> RunTask:
        fp32_ms = self._fp32_ms or 0.0
        forwards = min(EXPLAIN_RATIO * fp32_ms / 1e3, REFERENCE_BUDGET)
        task = dataclasses.replace(
            self._template,
            precision=precision,
            tolerance=self.tolerance(precision, changes.get("backend", EAGER)),
            budget=self.budget,
            explain_budget=self.options.budget or max(self.budget, forwards),
            fp32_ms=self._fp32_ms,
            fp32_setup=max(0.0, self._first_seconds - fp32_ms / 1e3),
            fp32_peak=self._fp32_peak,
            changes_parameters=self.launcher.changes_parameters or self.mode.changes_parameters,
            accelerated=not self.is_slow(precision),
        )
        if self.long_calls is not None:
            explain_budget = self.options.budget or self.long_calls.explain_seconds
            task = dataclasses.replace(task, budget_error=False, explain_budget=explain_budget, waits_count=True)
            if changes.get("errors") == "both":
                changes["errors"] = "accumulated"
        return self.mode.adjusted(dataclasses.replace(task, **changes))


@contextlib.contextmanager
def open_runs(
    source: TargetSource, options: ScanOptions, machine: Machine, isolation: Isolation, mode: Mode | None = None
) -> Iterator[TargetRuns]:
    """Yield a :class:`TargetRuns` with its files; ``mode`` is by default that of the options."""
    with open_task_files() as files, contextlib.closing(source):
        runs = TargetRuns(source, options, machine, isolation, files, mode)
        with contextlib.closing(runs):
            yield runs


@contextlib.contextmanager
def open_batches(
    source: TargetSource, options: ScanOptions, machine: Machine, isolation: Isolation, mode: Mode
) -> Iterator[list[TargetRuns]]:
    """Yield the runs on each batch; :class:`UsageError` if there are fewer than asked for."""

    def report(index: int, run: str, doing: str) -> None:
        source.on_progress(run, f"batch {index}, {doing}")

    with contextlib.ExitStack() as stack:
        batches = [stack.enter_context(open_runs(source, options, machine, isolation, mode))]
        stack.enter_context(kept_generators())
        for index in range(1, options.batches):
            batch = source.batch(index, options.seed)
            batch.on_progress = functools.partial(report, index)
            batches.append(stack.enter_context(open_runs(batch, options, machine, isolation, mode)))
        yield batches
