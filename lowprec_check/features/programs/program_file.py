"""Scans the models of a script that runs to its end, then runs it with them in 16 bits."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lowprec_check.core.session import Session
from lowprec_check.engine.model.patched_source import use_sources
from lowprec_check.engine.model.target_spec import NOTICE, OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError, first_line, message_of
from lowprec_check.features.programs.assignments import RECOMMENDED, Assignment, Assignments, assignments_of
from lowprec_check.features.programs.program_code import forms_of_code, patched, why_no_code
from lowprec_check.features.programs.program_scan import PastedCode, ProgramRun, ProgramScan
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions

if TYPE_CHECKING:
    from lowprec_check.features.programs.models_of_program import WatchedProgram

PROGRAM_SECONDS = 600.0
"""The program is stopped then, and what was seen is scanned."""
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
    seconds = FORGIVEN * (options.budget or PROGRAM_SECONDS)
    load = functools.partial(_watched, compare)
    watching = Session(spec, options, isolation, seconds, on_progress, load=load)
    result: ProgramScan | None = None
    for result in watching.grow(_growing_scan, ProgramScan):
        yield msgspec.structs.replace(result, complete=False)
    assert result is not None
    program = result
    methods = [(model.key, model.method) for model in program.models if model.method]
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as folder:

        def run_of(name: str, assigned: Assignments, pasted: Sequence[PastedCode] = ()) -> ProgramRun:
            """The program again, with casts from outside, or by the code in it."""
            load = functools.partial(_run_cast, assigned, methods, compare, Path(folder), patched(program, pasted))
            session = Session(spec, options, isolation, seconds, _named(on_progress, name), load=load)
            try:
                *_, run = session.grow(_run_of, ProgramRun)
            except (UsageError, ProcessLostError) as error:
                run = ProgramRun("", [], problem=first_line(message_of(error)))
            precisions = [assigned[model.key].precision if assigned else "fp32" for model in program.models]
            return msgspec.structs.replace(run, name=name, precisions=precisions, code=[*pasted])

        for name, assigned in assignments_of(result):
            run = _run_by_code(program, assigned, run_of) if name == RECOMMENDED else run_of(name, assigned)
            if not assigned and not run.problem:  # it has only saved its outputs
                continue
            result = msgspec.structs.replace(result, runs=[*result.runs, run])
            yield msgspec.structs.replace(result, complete=False)
            if not assigned:  # fp32 failed: there is nothing to compare with
                break
    yield msgspec.structs.replace(result, complete=True)


def _run_by_code(program: ProgramScan, assigned: Assignments, run_of: Callable[..., ProgramRun]) -> ProgramRun:
    """The program with the first form of the code that gives the result of fp32; without any, with
    casts from outside.
    """
    why = why_no_code(program, assigned)
    if not why:
        for pasted in forms_of_code(program, assigned):
            run: ProgramRun = run_of(RECOMMENDED, assigned, pasted)
            if run.passes:
                return run
            why = f"There is no code to paste: what was tried {_fault(run)}."
    return msgspec.structs.replace(run_of(RECOMMENDED, assigned), no_code=why)


def _fault(run: ProgramRun) -> str:
    if run.problem:
        return f"fails: {run.problem.rstrip('.')}"
    return "does not give the result of fp32"


def _named(on_progress: OnProgress | None, name: str) -> OnProgress | None:
    """Progress of a run of the program, with its name."""
    if on_progress is None:
        return None
    return lambda run, doing: on_progress(run if run == NOTICE else f"{run} · {name}", doing)


# -- inside the processes


def _watched(compare: Sequence[str], spec: TargetSpec, options: ScanOptions) -> WatchedProgram:
    """The program, after it ran to its end."""
    from lowprec_check.features.programs.models_of_program import WatchedProgram
    from lowprec_check.features.programs.running import run_to_end
    from lowprec_check.features.programs.variables import check_variables

    program, ended = WatchedProgram(spec.name), dict[str, Any]()
    seconds = options.budget or PROGRAM_SECONDS

    @contextlib.contextmanager
    def watching(variables: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        with program.watching(variables):
            yield
        ended.update({name: variables()[name] for name in compare if name in variables()})

    program.notes = run_to_end(spec, options.seed, watching, seconds=seconds, threads=1)
    check_variables(compare, ended)
    return program


def _growing_scan(program: WatchedProgram, isolation: Isolation | None, options: ScanOptions) -> Iterator[ProgramScan]:
    yield from program.growing_scan(options, isolation)


def _run_cast(
    assigned: Assignments,
    methods: list[tuple[str, str]],
    compare: Sequence[str],
    outputs: Path,
    texts: Mapping[str, str],
    spec: TargetSpec,
    options: ScanOptions,
) -> _Ended:
    """What came of the program; if its files have other ``texts``, these make the casts."""
    from lowprec_check.features.programs.casting import ProgramCaster
    from lowprec_check.features.programs.running import run_to_end
    from lowprec_check.features.programs.variables import VariableComparison

    from_outside = dict.fromkeys(assigned, Assignment("fp32")) if texts else assigned
    caster = ProgramCaster(from_outside, methods, outputs)
    ended = VariableComparison(compare, outputs, saves=not assigned)
    seconds = FORGIVEN * (options.budget or PROGRAM_SECONDS)

    @contextlib.contextmanager
    def watching(variables: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        with caster.watching(), ended.watching(variables):
            yield

    use_sources(texts)
    try:
        run_to_end(spec, options.seed, watching, seconds=seconds)
    except UsageError as error:
        if not assigned:
            raise
        caster.problem = first_line(error.message)
    finally:
        use_sources({})
    if texts and not caster.problem:
        missed = [key for key, assignment in assigned.items() if not caster.has_applied(key, assignment)]
        caster.problem = f"it has no effect on {', '.join(missed)}" if missed else ""
    run = ProgramRun("", [], caster.errors, caster.problem, caster.seconds, caster.weight_bytes(), ended.errors)
    return _Ended(run)


@dataclass
class _Ended:
    """A run of the program, for a session."""

    run: ProgramRun
    on_progress: OnProgress | None = None


def _run_of(ended: _Ended, _isolation: Any, _options: Any) -> Iterator[ProgramRun]:
    yield ended.run
