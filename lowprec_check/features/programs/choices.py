"""In which precisions the program is run again: each model as recommended, then all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lowprec_check.features.programs.program_scan import ProgramScan, ScannedModel
from lowprec_check.schema.base import Struct
from lowprec_check.schema.precisions import PRECISIONS

RECOMMENDED = "each as recommended"


class Choice(Struct, frozen=True):
    """The precision of a model in a run of the program."""

    precision: str
    keep_fp32: list[str] = []
    """Modules that stay in fp32."""
    keep_fp32_inputs: list[str] = []


Choices = Mapping[str, Choice]
"""By the key of a model; without any, the program runs as it is."""


def choices_of(program: ProgramScan) -> Iterator[tuple[str, Choices]]:
    """fp32, whose outputs are kept; fp32 again; each model as recommended; all in one precision."""
    keys = dict.fromkeys(model.key for model in program.models)
    yield "fp32", {}
    yield "fp32 again", {key: Choice("fp32") for key in keys}
    recommended: dict[str, Choice] = {}
    for model in program.models:
        choice = recommended_choice(model)
        # Of one whose methods are called, the first that cannot be cast decides
        if recommended.get(model.key, choice).precision != "fp32":
            recommended[model.key] = choice
    if any(choice.precision != "fp32" for choice in recommended.values()):
        yield RECOMMENDED, recommended
    names = dict.fromkeys(
        run.precision
        for model in program.models
        if model.scan
        for run in model.scan.runs
        if run.is_low and not run.base
    )
    for name in names:
        alike = {key: Choice(name) for key in keys}
        if alike != recommended and PRECISIONS.get(name).kind == "cast":
            yield name, alike


def recommended_choice(model: ScannedModel) -> Choice:
    """The precision that a model passes in, whatever it gains; fp32 if none."""
    best = model.scan.recommendation if model.scan is not None else None
    if best is None or best.backend != "eager":
        return Choice("fp32")
    return Choice(best.precision, list(best.keep_fp32), list(best.keep_fp32_inputs))
