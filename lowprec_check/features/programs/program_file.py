"""Scans the models of a script that runs to its end, then runs it with them in 16 bits."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from lowprec_check.core.session import Session
from lowprec_check.engine.model.output_measures import RELATIVE_ERROR, parse_limits
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.engine.model.target_spec import LOAD_SECONDS, NOTICE, OnProgress, TargetSpec
from lowprec_check.engine.model.user_module import use_sources
from lowprec_check.errors import ProcessLostError, UsageError, first_line, message_of
from lowprec_check.features.programs.program_code import forms_of_code, patched, why_no_code
from lowprec_check.features.programs.program_scan import (
    AGAIN,
    RECOMMENDED,
    Assignment,
    Assignments,
    CallError,
    PastedCode,
    ProgramRun,
    ProgramScan,
    assignments_of,
)
from lowprec_check.process import Isolation, system
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.statements import agree, some

if TYPE_CHECKING:
    from lowprec_check.features.programs.models_of_program import WatchedProgram

Wanted = dict[tuple[str, str], set[int]]
"""Numbers of calls, by the key of a model and its method."""
PROGRAM_SECONDS = 600.0
"""The program is stopped then, and what was seen is scanned."""
MOST_BLAMED = 4
"""Models that are put back into fp32, one after the other, until the program ends as in fp32."""
_SHORT, _CLEAR = 0.05, 1.2
"""Seconds of fp32 from which on a speed is told, if it differs by this factor and by three times as
much as two runs of fp32.
"""
_WAITING = 0.05
"""The part of the time in calls, waited for a core in one run, from which on no speed is told."""
FORGIVEN = 4.0
"""So many times as long it may take in another precision, which the device may not accelerate."""


def scan_program_file(
    spec: TargetSpec,
    options: ScanOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
    compare: Sequence[str] = (),
) -> Iterator[ProgramScan]:
    """Yield the result after each model, and after each run of the whole program, in which the
    variables ``compare`` of the script are compared too.

    Raises :class:`UsageError` for what the user can fix, as a script that fails.
    """
    runs = _Runs(spec, options, isolation, on_progress, compare)
    result = yield from _incomplete(runs.scanned())
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as folder:
        outputs = Path(folder)
        result = yield from _incomplete(runs.added_to(result, outputs))
        missed = missed_calls(result)
        if missed:
            result = yield from _incomplete(runs.scanned(missed, result))
            result = yield from _incomplete(runs.added_to(result, outputs))
        for _ in range(MOST_BLAMED):
            key = key_to_blame(result)
            if key is None:
                break
            result = msgspec.structs.replace(result, stay_in_fp32=[*result.stay_in_fp32, key])
            result = yield from _incomplete(runs.added_to(result, outputs))
    yield msgspec.structs.replace(result, complete=True)


def _incomplete(results: Iterator[ProgramScan]) -> Generator[ProgramScan, None, ProgramScan]:
    """Yield the results as incomplete ones, and return the last."""
    for result in results:
        yield msgspec.structs.replace(result, complete=False)
    return result


@dataclass
class _Runs:
    """The program in processes of its own: watched, and with its models in other precisions."""

    spec: TargetSpec
    options: ScanOptions
    isolation: Isolation | None
    on_progress: OnProgress | None
    compare: Sequence[str]
    made: dict[str, Assignments] = field(default_factory=dict)
    in_fp32: list[ProgramRun] = field(default_factory=list)

    def scanned(self, wanted: Wanted | None = None, earlier: ProgramScan | None = None) -> Iterator[ProgramScan]:
        """Watch it, keep the calls that are ``wanted``, and yield the result after each model."""
        session = self._session(functools.partial(_watched, self.compare, wanted or {}))
        return session.grow(functools.partial(_growing_scan, earlier=earlier), ProgramScan)

    def added_to(self, result: ProgramScan, outputs: Path) -> Iterator[ProgramScan]:
        """Yield the result without runs that are out of date, then after each new one."""
        assignments = dict(assignments_of(result))
        result = msgspec.structs.replace(result, runs=[run for run in result.runs if run.name in assignments])
        yield result
        for name, assigned in assignments.items():
            if self.made.get(name) == assigned:
                continue
            self.made[name] = assigned
            run_of = functools.partial(self._run, result, outputs)
            run = _run_by_code(result, assigned, run_of) if name == RECOMMENDED else run_of(name, assigned)
            if name in ("fp32", AGAIN):
                self.in_fp32.append(run)
            if not assigned and not run.problem:  # it has only saved its outputs
                continue
            by_name = {other.name: other for other in result.runs} | {name: run}
            runs = sorted(by_name.values(), key=lambda run: run.name != AGAIN)
            if len(self.in_fp32) == 2:
                runs = [_timed(each, self.in_fp32) for each in runs]
            result = msgspec.structs.replace(result, runs=runs)
            yield result
            if not assigned:  # fp32 failed: there is nothing to compare with
                return

    def _run(
        self,
        program: ProgramScan,
        outputs: Path,
        name: str,
        assigned: Assignments,
        pasted: Sequence[PastedCode] = (),
    ) -> ProgramRun:
        """The program again, with casts from outside, or by the code in it."""
        models = {(model.key, model.method): model.name for model in program.models}
        calls, most = sum(model.calls for model in program.models), None
        if assigned:
            most = len(list(outputs.glob("*#*.pt")))
        elif program.was_stopped:
            most = calls
        load = functools.partial(
            _run_cast, assigned, models, self.compare, outputs, patched(program, pasted), (calls, most)
        )
        try:
            *_, run = self._session(load, name).grow(_run_of, ProgramRun)
        except (UsageError, ProcessLostError) as error:
            run = ProgramRun("", [], problem=first_line(message_of(error)))
        precisions = [assigned[model.key].precision if assigned else "fp32" for model in program.models]
        calls_of_fp32 = most if assigned and most is not None else 0
        return msgspec.structs.replace(
            run, name=name, precisions=precisions, code=[*pasted], calls_of_fp32=calls_of_fp32
        )

    def _session(self, load: Callable[[TargetSpec, Any], Any], name: str = "") -> Session[ScanOptions]:
        # The process ends the program before, and says so
        seconds = LOAD_SECONDS + 2 * FORGIVEN * (self.options.budget or PROGRAM_SECONDS)
        on_progress = shown = self.on_progress
        if name and shown is not None:

            def on_progress(run: str, doing: str) -> None:
                shown(run if run == NOTICE else f"{run} · {name}", doing)

        return Session(self.spec, self.options, self.isolation, seconds, on_progress, load=load)


def _run_by_code(program: ProgramScan, assigned: Assignments, run_of: Callable[..., ProgramRun]) -> ProgramRun:
    """The program with the first form of the code that gives the result of fp32; without any, with
    casts from outside.
    """
    why, outside = why_no_code(program, assigned), None
    for pasted in () if why else forms_of_code(program, assigned):
        run: ProgramRun = run_of(RECOMMENDED, assigned, pasted)
        if run.passes:
            return run
        tried = f"fails: {run.problem.rstrip('.')}" if run.problem else "does not give the result of fp32"
        why = f"There is no code to paste: what was tried {tried}."
        if outside is None:
            outside = run_of(RECOMMENDED, assigned)
        if not outside.passes:  # the precisions are at fault, not the code
            break
    return msgspec.structs.replace(outside or run_of(RECOMMENDED, assigned), no_code=why)


def _timed(run: ProgramRun, in_fp32: Sequence[ProgramRun]) -> ProgramRun:
    """A run with its speed against two of fp32, before and after it, if that is clear."""
    runs = [*in_fp32, run]
    if run.name == AGAIN or run.problem or any(each.waited > _WAITING * each.seconds for each in runs):
        return run
    counted = [_typical_seconds(each.errors) for each in runs]
    before, after, own = (sum(seconds.values()) for seconds in counted)
    if not own or min(before, after) < _SHORT or any(seconds.keys() != counted[0].keys() for seconds in counted):
        return run
    speed = math.sqrt(before * after) / own
    if abs(math.log(speed)) < max(math.log(_CLEAR), 3 * abs(math.log(after / before))):
        return run
    return msgspec.structs.replace(run, speed=speed)


def _typical_seconds(errors: Sequence[CallError]) -> dict[tuple[str, str, int], float]:
    """Of the calls of each model, of which there are so many: their number times the median."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for error in errors:
        seconds.setdefault((error.model, error.method), []).append(error.seconds)
    return {(*key, len(times)): len(times) * statistics.median(times) for key, times in seconds.items()}


def missed_calls(result: ProgramScan) -> Wanted:
    """Calls at which the program parts from fp32, though the model passes on those kept."""
    models = {(model.key, model.method): model for model in result.models}
    missed: Wanted = {}
    for run in result.runs:
        error = run.first_error
        if error is None or run.name == AGAIN or (error.model, error.method) not in models:
            continue
        model = models[error.model, error.method]
        precision = run.precisions[result.models.index(model)]
        passes = model.scan is not None and any(
            scanned.precision == precision and scanned.status == "ok" for scanned in model.scan.runs
        )
        if passes and error.call not in model.kept and not error.note:
            missed.setdefault((error.model, error.method), set()).add(error.call)
    return missed


def key_to_blame(result: ProgramScan) -> str | None:
    """The model from which the recommended run parts; ``None`` if it ends as fp32 does."""
    run = next((run for run in result.runs if run.name == RECOMMENDED), None)
    if run is None or run.passes or run.is_late:
        return None
    low = {model.key for model, name in zip(result.models, run.precisions, strict=True) if name != "fp32"}
    error, called = run.first_error, [error.model for error in run.errors]
    if error is not None:
        # The last one in 16 bits; where a choice differs, that was made before the call
        called = called[: run.errors.index(error) + (not error.note)]
    return next((key for key in reversed(called) if key in low), min(low, default=None))


# -- inside the processes


def _watched(compare: Sequence[str], wanted: Wanted, spec: TargetSpec, options: ScanOptions) -> WatchedProgram:
    """The program, after it ran to its end; the calls that are ``wanted`` are kept."""
    from lowprec_check.features.programs.models_of_program import WatchedProgram
    from lowprec_check.features.programs.running import STOPPED, run_to_end
    from lowprec_check.features.programs.variables import check_variables
    from lowprec_check.torchkit.floating_dtypes import NARROW

    program, ended = WatchedProgram(spec.name, wanted), dict[str, Any]()
    seconds = options.budget or PROGRAM_SECONDS

    @contextlib.contextmanager
    def watching(variables: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        with program.watching(variables):
            yield
        ended.update({name: variables()[name] for name in compare if name in variables()})

    program.notes = run_to_end(spec, options.seed, watching, seconds=seconds, threads=1)
    program.was_stopped = any(note.startswith(STOPPED) for note in program.notes)
    narrow = [model.name for model in program.models if any(p.dtype in NARROW for p in model.module.parameters())]
    if narrow:
        note = f"{some(narrow)} {agree(len(narrow), 'has', 'have')} weights in 16 bits or fewer in the script"
        program.notes += (f"{note}: runs of the program are compared with the script as it is, not with fp32",)
    check_variables(compare, ended, was_stopped=program.was_stopped)
    missing = [name for name in compare if name not in ended]
    if missing:
        program.notes += (f"{some(missing)} cannot be compared: the program was stopped before it was made",)
    return program


def _growing_scan(
    program: WatchedProgram, isolation: Isolation | None, options: ScanOptions, earlier: ProgramScan | None = None
) -> Iterator[ProgramScan]:
    yield from program.growing_scan(options, isolation, earlier)


def _run_cast(
    assigned: Assignments,
    models: Mapping[tuple[str, str], str],
    compare: Sequence[str],
    outputs: Path,
    texts: Mapping[str, str],
    calls: tuple[int, int | None],
    spec: TargetSpec,
    options: ScanOptions,
) -> Any:
    """What came of the program; if its files have other ``texts``, these make the casts.

    ``calls`` are those that are expected, and the most that it may make.
    """
    from lowprec_check.features.programs.casting import ProgramCaster
    from lowprec_check.features.programs.running import STOPPED, Draws, run_to_end
    from lowprec_check.features.programs.variables import VariableComparison

    from_outside = dict.fromkeys(assigned, Assignment("fp32")) if texts else assigned
    judge = options.judge if options.judge == RELATIVE_ERROR else None  # others fit some of the models
    asked = OutputForm(judge=judge, limits=parse_limits(options.limit))
    caster = ProgramCaster(from_outside, [*models], outputs, calls=calls[0], most=calls[1], asked=asked)
    ended, draws = VariableComparison(compare, outputs, saves=not assigned), Draws()
    waited_before = system.own_wait() or 0.0
    seconds = FORGIVEN * (options.budget or PROGRAM_SECONDS)

    @contextlib.contextmanager
    def watching(variables: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        caster.at_end = functools.partial(ended.read, variables)
        with draws.as_in_fp32(), caster.watching():
            yield
        caster.at_end()

    use_sources(texts)
    is_late = False
    try:
        notes = run_to_end(spec, options.seed, watching, seconds=seconds)
        if not caster.is_ending and any(note.startswith(STOPPED) for note in notes):
            caster.problem, is_late = f"it did not end within {seconds:g} s", True
    except UsageError as error:
        if not assigned:
            raise
        caster.problem = first_line(error.message)
    finally:
        use_sources({})
    if texts and not caster.problem:
        missed = [key for key, assignment in assigned.items() if not caster.has_applied(key, assignment)]
        caster.problem = f"it has no effect on {', '.join(missed)}" if missed else ""
    called = {(error.model, error.method) for error in caster.errors}
    if not assigned and not caster.problem and len(called) < len(models):
        number = f"only {len(called)}" if called else "none"
        caster.problem = f"it calls {number} of its {len(models)} models then, as if it kept results of the run before"
    seconds = sum(error.seconds for error in caster.errors)
    weights = caster.weight_bytes()
    run = ProgramRun(
        "",
        [],
        caster.errors,
        caster.problem,
        is_late,
        seconds,
        (system.own_wait() or 0.0) - waited_before,
        other_draws=draws.lines,
        weight_bytes=weights,
        variables=ended.errors,
    )
    return SimpleNamespace(run=run, on_progress=None)


def _run_of(ended: Any, _isolation: Any, _options: Any) -> Iterator[ProgramRun]:
    yield ended.run
