"""In which precisions the program is run again: each model as recommended, then all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lowprec_check.features.programs.program_scan import AGAIN, RECOMMENDED, ProgramScan, ScannedModel
from lowprec_check.schema.base import Struct
from lowprec_check.schema.precisions import PRECISIONS


class Assignment(Struct, frozen=True):
    """The precision of a model in a run of the program."""

    precision: str
    keep_fp32: list[str] = []
    """Modules that stay in fp32."""
    keep_fp32_inputs: list[str] = []


Assignments = Mapping[str, Assignment]
"""By the key of a model; without any, the program runs as it is."""


def assignments_of(program: ProgramScan) -> Iterator[tuple[str, Assignments]]:
    """fp32, whose outputs are kept; each model as recommended, and fp32 again, between which it can
    be timed; all in one precision.
    """
    keys = dict.fromkeys(model.key for model in program.models)
    yield "fp32", {}
    recommended: dict[str, Assignment] = {}
    for key in keys:
        recommended[key] = Assignment("fp32")
        if key not in program.stay_in_fp32:
            recommended[key] = _assignment_of_methods([model for model in program.models if model.key == key])
    if any(assignment.precision != "fp32" for assignment in recommended.values()):
        yield RECOMMENDED, recommended
    yield AGAIN, {key: Assignment("fp32") for key in keys}
    names = dict.fromkeys(
        run.precision
        for model in program.models
        if model.scan
        for run in model.scan.runs
        if run.is_low and not run.base
    )
    for name in names:
        alike = {key: Assignment(name) for key in keys}
        if alike != recommended and PRECISIONS.get(name).kind == "cast":
            yield name, alike


def _assignment_of_methods(methods: Sequence[ScannedModel]) -> Assignment:
    """What is recommended for one method of a model, and passes in the others; fp32 if one passes
    in none. If there is no such thing, the program shows whether the last one's will do.
    """
    assignments = [recommended_assignment(method) for method in methods]
    for assignment in assignments:
        if assignment.precision == "fp32":
            return assignment
    for assignment in assignments:
        if all(_passes(method, assignment) for method in methods):
            return assignment
    return assignments[-1]


def _passes(model: ScannedModel, assignment: Assignment) -> bool:
    if recommended_assignment(model) == assignment:
        return True
    is_whole = assignment == Assignment(assignment.precision)
    runs = model.scan.runs if model.scan is not None else []
    names = {run.precision for run in runs if run.status == "ok" and run.backend == "eager"}
    return is_whole and assignment.precision in names


def recommended_assignment(model: ScannedModel) -> Assignment:
    """The precision that a model passes in, whatever it gains; fp32 if none."""
    best = model.scan.recommendation if model.scan is not None else None
    if best is None or best.backend != "eager":
        return Assignment("fp32")
    return Assignment(best.precision, list(best.keep_fp32), list(best.keep_fp32_inputs))
