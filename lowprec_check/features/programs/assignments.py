"""In which precisions the program is run again: each model as recommended, then all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lowprec_check.features.programs.program_scan import ProgramScan, ScannedModel
from lowprec_check.schema.base import Struct
from lowprec_check.schema.precisions import PRECISIONS

RECOMMENDED, AGAIN = "each as recommended", "fp32 again"
"""Names of runs of the program."""


class Assignment(Struct, frozen=True):
    """The precision of a model in a run of the program."""

    precision: str
    keep_fp32: list[str] = []
    """Modules that stay in fp32."""
    keep_fp32_inputs: list[str] = []


Assignments = Mapping[str, Assignment]
"""By the key of a model; without any, the program runs as it is."""


def assignments_of(program: ProgramScan) -> Iterator[tuple[str, Assignments]]:
    """fp32, whose outputs are kept; fp32 again; each model as recommended; all in one precision."""
    keys = dict.fromkeys(model.key for model in program.models)
    yield "fp32", {}
    yield AGAIN, {key: Assignment("fp32") for key in keys}
    recommended: dict[str, Assignment] = {}
    for model in program.models:
        assignment = recommended_assignment(model)
        if model.key in program.stay_in_fp32:
            assignment = Assignment("fp32")
        # Of one whose methods are called, the first that cannot be cast decides
        if model.key not in recommended or recommended[model.key].precision != "fp32":
            recommended[model.key] = assignment
    if any(assignment.precision != "fp32" for assignment in recommended.values()):
        yield RECOMMENDED, recommended
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


def recommended_assignment(model: ScannedModel) -> Assignment:
    """The precision that a model passes in, whatever it gains; fp32 if none."""
    best = model.scan.recommendation if model.scan is not None else None
    if best is None or best.backend != "eager":
        return Assignment("fp32")
    return Assignment(best.precision, list(best.keep_fp32), list(best.keep_fp32_inputs))
