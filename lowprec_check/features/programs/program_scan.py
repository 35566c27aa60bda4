"""The result of scanning a program: its models, each with the scan of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lowprec_check.schema.base import Struct, write_file
from lowprec_check.schema.scan_result import ScanResult


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
    """Why they cannot be compared."""

    def exceeds(self, limit: float) -> bool:
        """Whether it parts from fp32 by more than a tolerance."""
        return self.nonfinite or self.error is None or self.error > limit


class ProgramRun(Struct, frozen=True):
    """The program run again with its models in other precisions."""

    name: str
    """``each as recommended``, or the precision of all: ``half``."""
    precisions: list[str]
    """Of each model."""
    errors: list[CallError] = []
    """Of each call that no other model makes, in order; up to the exception if there is one."""
    problem: str = ""
    """The exception that ended it."""
    seconds: float = 0.0
    """In calls of models, in this one run, with the casts of their inputs and outputs."""


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
    """Whether all models were scanned."""

    @property
    def fails(self) -> bool:
        """Whether a model passes in no low precision."""
        return any(model.scan is not None and model.scan.recommendation is None for model in self.models)

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
