"""Scans the models of a script that runs to its end, then runs it with them in 16 bits."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lowprec_check.core.session import Session
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError, first_line, message_of
from lowprec_check.features.programs.assignments import Assignments, assignments_of
from lowprec_check.features.programs.program_scan import ProgramRun, ProgramScan
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions

if TYPE_CHECKING:
    from lowprec_check.features.programs.casting import ProgramCaster
    from lowprec_check.features.programs.models_of_program import WatchedProgram

PROGRAM_SECONDS = 600.0
"""The program is stopped then, and what was seen is scanned."""
FORGIVEN = 4.0
"""So many times as long it may take in another precision, which the device may not accelerate."""


def scan_program_file(
    spec: TargetSpec, options: ScanOptions, isolation: Isolation | None = None, on_progress: OnProgress | None = None
) -> Iterator[ProgramScan]:
    """Yield the result after each model, and after each run of the whole program.

    Raises :class:`UsageError` for what the user can fix, as a script that fails.
    """
    seconds = FORGIVEN * (options.budget or PROGRAM_SECONDS)
    watching = Session(spec, options, isolation, seconds, on_progress, load=_watched)
    result: ProgramScan | None = None
    for result in watching.grow(_growing_scan, ProgramScan):
        yield msgspec.structs.replace(result, complete=False)
    assert result is not None
    methods = [(model.key, model.method) for model in result.models if model.method]
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as folder:
        for name, assigned in assignments_of(result):
            load = functools.partial(_run_cast, assigned, methods, Path(folder))
            session = Session(spec, options, isolation, seconds, on_progress, load=load)
            try:
                for run in session.grow(_run_of, ProgramRun):
                    made = run
            except (UsageError, ProcessLostError) as error:
                made = ProgramRun("", [], problem=first_line(message_of(error)))
            precisions = [assigned[model.key].precision if assigned else "fp32" for model in result.models]
            made = msgspec.structs.replace(made, name=name, precisions=precisions)
            if not assigned and not made.problem:  # it has only saved its outputs
                continue
            result = msgspec.structs.replace(result, runs=[*result.runs, made])
            yield msgspec.structs.replace(result, complete=False)
            if not assigned:  # fp32 failed: there is nothing to compare with
                break
    yield msgspec.structs.replace(result, complete=True)


# -- inside the processes


def _watched(spec: TargetSpec, options: ScanOptions) -> WatchedProgram:
    """The program, after it ran to its end."""
    from lowprec_check.features.programs.models_of_program import WatchedProgram
    from lowprec_check.features.programs.running import run_to_end

    program = WatchedProgram(spec.name)
    seconds = options.budget or PROGRAM_SECONDS
    program.notes = run_to_end(spec, options.seed, program.watching, seconds=seconds, threads=1)
    return program


def _growing_scan(program: WatchedProgram, isolation: Isolation | None, options: ScanOptions) -> Iterator[ProgramScan]:
    yield from program.growing_scan(options, isolation)


def _run_cast(
    assigned: Assignments, methods: list[tuple[str, str]], outputs: Path, spec: TargetSpec, options: ScanOptions
) -> ProgramCaster:
    """The models, after the program ran to its end with them."""
    from lowprec_check.features.programs.casting import ProgramCaster
    from lowprec_check.features.programs.running import run_to_end

    caster = ProgramCaster(assigned, methods, outputs)
    seconds = FORGIVEN * (options.budget or PROGRAM_SECONDS)
    try:
        run_to_end(spec, options.seed, lambda _: caster.watching(), seconds=seconds)
    except UsageError as error:
        if not assigned:
            raise
        caster.problem = first_line(error.message)
    return caster


def _run_of(caster: ProgramCaster, _isolation: Any, _options: Any) -> Iterator[ProgramRun]:
    yield ProgramRun("", [], caster.errors, caster.problem, caster.seconds)
