"""The result of scanning a program: its models, each with the scan of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lowprec_check.schema.base import Struct, write_file
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ScanResult

RECOMMENDED, AGAIN = "each as recommended", "fp32 again"
"""Names of runs of the program."""
OTHER_INTEGERS = "gets other integers than in fp32, such as tokens: a choice before it differs"
"""The note of a call that is not to blame for its error."""
NO_SUCH_CALL = "fp32 makes no such call"
NOTHING = "returns nothing that can be compared"
"""Notes of calls that tell nothing."""


class FirstCall(Struct, frozen=True):
    """Where a program calls a model first."""

    line: str
    """``infer.py:21``, of the user's own code; empty if there is none."""
    path: str = ""
    """The way to the model from a variable there: ``pipe.vae``; empty if there is none."""
    pipeline: str = ""
    """The variable of a pipeline of diffusers that has it."""
    switches: list[str] = []
    """Methods of the pipeline that set precisions."""
    takes_low: bool = False
    """Whether it may be cast without its inputs: a package gives them, or they are integers."""
    is_double: bool = False
    """Whether it has weights in fp64."""


class ScannedModel(Struct, frozen=True):
    """A model of a program, and its scan on the calls that were kept."""

    name: str
    """As the program reaches it: ``pipe.vae.decode``."""
    kind: str
    """Its class."""
    calls: int
    """How often the program calls it."""
    kept: list[int]
    """Which of these calls are the batches of the scan, from 1."""
    scan: ScanResult | None = None
    """``None`` before it was scanned, and if it cannot be."""
    problem: str = ""
    """Why it cannot be scanned."""
    key: str = ""
    """Its class, and which of this class it is: ``UNet#0``."""
    method: str = ""
    """What of it is called; empty for the module itself."""
    place: FirstCall | None = None
    """Where it is called first."""
    writes: bool = False
    """Whether it writes to what it is called with, such as a cache."""


class OtherChoice(Struct, frozen=True):
    """The largest of some logits, which is not that of fp32."""

    chosen: int
    of_fp32: int
    apart: float
    """By how much fp32 prefers its own, as a part of that logit."""
    among: int
    """How many logits there are."""


class CallError(Struct, frozen=True):
    """What a model returned in a run of the program, against the same call in fp32."""

    model: str
    """Its key: the class, and which of that class it is."""
    call: int
    """1 for the first call of the model."""
    error: float | None
    """As the error of an output in a scan; ``None`` if it is not finite."""
    nonfinite: bool = False
    """Whether it has NaN or Inf where fp32 has none."""
    note: str = ""
    """Why they cannot be compared, or why they differ."""
    method: str = ""
    """What of the model was called; empty for the module itself."""
    limit: float | None = None
    """The largest error that passes, if the output is judged by what it means."""
    meaning: str = ""
    """How it differs in what it means: ``97 % of the tokens agree``."""
    shown: str = ""
    """The same in short: ``tokens 97 %``."""
    seconds: float = 0.0
    """Of the call, with the casts of its inputs and outputs."""
    choice: OtherChoice | None = None
    """Of the first sequence in the batch in which it differs, at the last position."""

    def exceeds(self, tolerance: float) -> bool:
        """Whether it parts from fp32 by more than passes."""
        limit = tolerance if self.limit is None else self.limit
        return self.nonfinite or self.error is None or self.error > limit or self.note == OTHER_INTEGERS


class VariableError(Struct, frozen=True):
    """A variable of the script at its end, against fp32."""

    name: str
    error: float | None
    """As the error of an output; ``None`` if it is not finite or cannot be compared."""
    psnr: float | None = None
    """Of a picture, in dB; ``None`` if it is none, or equal."""
    is_black: bool = False
    """Whether a picture is all zeros, where that of fp32 is not."""
    note: str = ""
    """Why it cannot be compared, or how it differs if that is no figure."""


class PastedCode(Struct, frozen=True):
    """Code to paste into the script."""

    line: str
    """The line before which it belongs: ``infer.py:21``."""
    text: str
    is_around: bool = False
    """Whether it is a ``with`` statement for what that line does."""
    is_instead: bool = False
    """Whether it takes the place of the statement there."""


class ProgramRun(Struct, frozen=True):
    """The program run again with its models in other precisions."""

    name: str
    """``each as recommended``, or the precision of all: ``half``."""
    precisions: list[str]
    """Of each model."""
    errors: list[CallError] = []
    """Of each call that no other model makes, in order; up to the exception if there is one."""
    problem: str = ""
    """The exception that ended it, or why it tells nothing."""
    is_late: bool = False
    """Whether it was ended for taking too long, which is no fault of a model."""
    seconds: float = 0.0
    """In calls of models, in this one run, with the casts of their inputs and outputs."""
    waited: float = 0.0
    """Seconds of a whole run in which its thread waited for a core that other programs had."""
    speed: float | None = None
    """How many times as fast as fp32 these calls are, about; ``None`` if noise may be all of it."""
    other_draws: list[str] = []
    """Lines that draw random numbers in 16 bits, which torch makes other ones than in fp32. In this
    run they were those of fp32, rounded.
    """
    weight_bytes: int = 0
    """Of the parameters and buffers of the models."""
    calls_of_fp32: int = 0
    """How many calls fp32 makes."""
    variables: list[VariableError] = []
    """Those of ``--compare``."""
    code: list[PastedCode] = []
    """By which the models got their precisions; empty if they were cast from outside."""
    no_code: str = ""
    """Why there is none."""

    @property
    def tolerance(self) -> float:
        """The largest tolerance of the precisions."""
        return max(PRECISIONS.get(name).tolerance for name in self.precisions)

    @property
    def last(self) -> CallError | None:
        """Its last call that returns something to compare."""
        return next((error for error in reversed(self.errors) if error.note != NOTHING), None)

    @property
    def too_few(self) -> str:
        """What it says if it does not make all calls of fp32; else empty."""
        made = sum(error.note != NO_SUCH_CALL for error in self.errors)
        return f"makes {made} of fp32's {self.calls_of_fp32} calls" if made < self.calls_of_fp32 else ""

    @property
    def passes(self) -> bool:
        """Whether its last output, and the variables that are compared, are those of fp32.

        Without variables it makes all calls of fp32; with them, a loop may end sooner.
        """
        last = self.last
        if self.problem or not self.errors or (last is not None and last.exceeds(self.tolerance)):
            return False
        if not self.variables:
            return last is not None and not self.too_few
        return all(each.error is not None and each.error <= self.tolerance for each in self.variables)

    @property
    def first_error(self) -> CallError | None:
        """Its first call that exceeds the tolerance; if that only gets another token, the call
        before it that chose one.
        """
        number = next((at for at, error in enumerate(self.errors) if error.exceeds(self.tolerance)), None)
        if number is None:
            return None
        error = self.errors[number]
        if error.note != OTHER_INTEGERS:
            return error
        return next((before for before in reversed(self.errors[:number]) if before.choice is not None), error)


class ProgramScan(Struct, frozen=True, kw_only=True):
    """Every model that a program calls, with the scan of each."""

    tool: str
    """What saved it: ``lowprec-check 0.2.0``."""
    target: str
    """The script, or ``program``."""
    models: list[ScannedModel]
    """In the order of their first calls."""
    runs: list[ProgramRun] = []
    """Of the whole program: first fp32 once more, which shows how far two runs differ."""
    notes: list[str] = []
    """What its reader needs to know, such as why it did not run to its end."""
    complete: bool = True
    """Whether all models were scanned, and the program ran again as often as it was to."""
    stay_in_fp32: list[str] = []
    """Keys of models that pass in 16 bits, but with which the program parts from fp32."""
    was_stopped: bool = False
    """Whether the program did not end within its time."""

    @property
    def fails(self) -> bool:
        """Whether no mixture of precisions gives the result of fp32; if the program did not run
        again, whether no model passes in a low precision.
        """
        if self.runs:
            return not any(run.name == RECOMMENDED and run.passes for run in self.runs)
        return not any(model.scan is not None and model.scan.recommendation is not None for model in self.models)

    def __repr__(self) -> str:
        """One line per model: its calls, and the status of each run."""
        lines = [f"ProgramScan: {self.target}"]
        for model in self.models:
            statuses = [f"{run.key.label} {run.status}" for run in (model.scan.runs[1:] if model.scan else [])]
            lines.append(f"{model.name}, {model.calls} calls: {', '.join(statuses) or model.problem}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON; raises :class:`UsageError` if that is not possible."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self)))


# -- In which precisions the program is run again: each model as recommended, then all alike


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
