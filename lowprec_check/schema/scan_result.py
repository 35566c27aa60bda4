"""The one saved artefact: what a scan found, frozen, JSON in and out. Never imports torch.

Every float here is finite or ``None``: JSON has no infinity, so "not finite, or not defined" is ``null``
in the file and ``None`` in memory, and a result equals itself after a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from lowprec_check.schema.backends import EAGER
from lowprec_check.schema.base import Struct, decode
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.run_key import MemoryFormat, Phase, RunKey, qualified

SCHEMA = 1

Status = Literal["ok", "inaccurate", "nonfinite", "error", "crashed", "timeout", "skipped"]
Evidence = Literal["measured", "predicted"]
Severity = Literal["error", "warning", "note"]
Layer = Literal["dispatch", "function"]
GapKind = Literal[
    "missing-kernel",
    "unsupported-dtype",
    "dtype-mismatch",
    "no-backend-kernel",
    "scalar-overflow",
    "numeric-failure",
    "crash",
]


class ErrorStats(Struct, frozen=True, kw_only=True):
    """How far an output is from its reference, the worst over its floating leaves."""

    rel_l2: float | None
    """‖y − r‖₂ / ‖r‖₂; 0/0 is 0; ``None`` where it is infinite or NaN."""
    max_abs: float | None
    cosine: float | None
    sqnr_db: float | None
    """Signal-to-quantisation-noise ratio, −20·log₁₀(rel_l2), in dB; ``None`` also where the error is 0."""
    top1: float | None = None
    """Share of rows whose argmax agrees, for an output that looks like a classifier's (N × classes)."""


class ExceptionInfo(Struct, frozen=True, kw_only=True):
    """What the user would see when the plain run raises."""

    type: str
    message: str
    module: str | None = None
    source: str | None = None


class Gap(Struct, frozen=True, kw_only=True):
    """Op calls of one kind at one place that fail in low precision and succeed when widened."""

    op: str
    layer: Layer
    kind: GapKind
    phase: Phase = "forward"
    module: str
    source: str | None
    dtypes: list[str]
    message: str
    calls: int = 1
    rescued: bool = True
    """Always true: a failure that is not rescued ends the run and is its ``stopped_by``."""
    constant: float | None = None
    """The number in the code that does not fit the dtype, for a ``scalar-overflow``."""


class Run(Struct, frozen=True, kw_only=True):
    """One precision × backend × device × memory format: the plain part and the instrumented part that explains it."""

    precision: str
    backend: str = EAGER
    device: str
    memory_format: MemoryFormat = "contiguous"
    evidence: Evidence = "measured"
    status: Status
    reason: str | None = None
    """Why it was skipped, timed out or crashed, in words."""
    exception: ExceptionInfo | None = None
    output_error: ErrorStats | None = None
    latency_ms: float | None = None
    peak_memory_bytes: int | None = None
    gaps: list[Gap] = []
    op_calls: OpCalls = OpCalls()
    uncalled_modules: list[str] = []
    """Modules with parameters that no op read; a subtree by its root."""
    called_modules: list[str] = []
    """Submodules whose ``forward`` ran, in the model's order."""
    keep_fp32: list[str] = []
    """Modules kept in fp32, for a ``plan`` run."""
    base: str | None = None
    """The precision that a ``plan`` run starts from."""
    untied: list[str] = []
    """Shared parameters of kept modules that get a copy of their own, for a ``plan`` run."""
    tolerance: float | None = None
    loss: float | None = None
    metric: float | None = None
    perturbed: bool | None = None
    """Whether the instrumented output differed from the plain one; ``None`` where that says nothing."""
    function_mode: bool = False
    """Whether a second pass with a function mode was needed (it takes modules off their fast paths)."""
    complete: bool = True
    """Whether the instrumented pass reached the end of the model."""
    stopped_by: ExceptionInfo | None = None
    """What ended the instrumented pass, where it did not reach the end."""
    emulated: dict[str, str] = {}
    """Ops computed in fp32 and rounded, with the reason."""
    notes: list[str] = []
    fallbacks: list[str] = []
    """Warnings in which the backend said that it fell back to the CPU."""
    nondeterministic: bool = False
    random: bool = False
    """Whether the model drew random numbers."""
    output_is_zero: bool = False
    """Whether the floating output is all zeros: an error relative to it says nothing."""

    @property
    def key(self) -> RunKey:
        """What identifies the run."""
        return RunKey(self.precision, self.backend, self.device, self.memory_format)

    @property
    def is_reference(self) -> bool:
        """Whether this is the fp32 run that all others are compared with."""
        return self.key.is_reference

    @property
    def basis(self) -> Precision | None:
        """The precision, or the one that a plan starts from; ``None`` if this installation does not know it."""
        return PRECISIONS.find(self.base or self.precision)


class Diagnostic(Struct, frozen=True, kw_only=True):
    """One finding, at one place."""

    code: str
    name: str
    severity: Severity
    precision: str | None = None
    backend: str = EAGER
    memory_format: MemoryFormat = "contiguous"
    module: str | None = None
    op: str | None = None
    source: str | None = None
    message: str
    help: str | None = None
    url: str | None = None
    calls: int = 1
    accepted: bool = False
    """Whether the scan's baseline accepts it."""

    @property
    def run_label(self) -> str | None:
        """The run that it is about, ``half · inductor``; ``None`` for the whole scan."""
        return self.precision and qualified(self.precision, self.backend, self.memory_format)

    def is_about(self, run: Run) -> bool:
        """Whether it is about ``run``."""
        return (self.precision, self.backend, self.memory_format) == (run.precision, run.backend, run.memory_format)


def is_selected(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Whether a diagnostic's code begins as one of ``select`` does (if there is any), and not as one of ``ignore``."""
    chosen, left_out = tuple(select), tuple(ignore)
    return (not chosen or code.startswith(chosen)) and not code.startswith(left_out)


class Recommendation(Struct, frozen=True, kw_only=True):
    """The way to run the model that was tried and passed."""

    precision: str
    backend: str = EAGER
    memory_format: MemoryFormat = "contiguous"
    keep_fp32: list[str] = []
    evidence: Evidence = "measured"
    reason: str
    code: str
    speedup: float | None = None
    rel_l2: float | None = None


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What was scanned, for the head of a report."""

    name: str
    parameters: int
    inputs: list[str]
    modules: int
    training: bool
    call: str = "model(*inputs)"
    """How the model is called, as code."""
    setup: list[str] = []
    """Code that makes ``model`` and ``inputs`` of what the file defines."""
    castable: bool = True
    """Whether ``tree_map`` reaches every tensor of the inputs."""
    source: str | None = None
    """Where the model is made."""
    notes: list[str] = []


class ScanResult(Struct, frozen=True, kw_only=True):
    """Everything a scan found; renders, compares and gates without the model.

    >>> result = ScanResult.load("scan.json")  # doctest: +SKIP
    >>> [run.status for run in result.runs]  # doctest: +SKIP
    """

    schema: int = SCHEMA
    tool: str
    target: str
    model: ModelInfo
    environment: dict[str, Any]
    options: dict[str, Any] = {}
    runs: list[Run]
    diagnostics: list[Diagnostic] = []
    recommendation: Recommendation | None = None
    plan: Plan | None = None
    """What the ``plan`` run is made of, where there is one."""

    def run(self, precision: str, backend: str = EAGER, memory_format: MemoryFormat = "contiguous") -> Run:
        """Return one run; raises ``KeyError`` if it was not part of the scan."""
        for run in self.runs:
            if (run.precision, run.backend, run.memory_format) == (precision, backend, memory_format):
                return run
        raise KeyError(qualified(precision, backend, memory_format))

    def to_json(self) -> bytes:
        """Encode as one line of JSON."""
        return msgspec.json.encode(self) + b"\n"

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to ``path``."""
        Path(path).write_bytes(self.to_json())

    @classmethod
    def from_json(cls, data: bytes) -> ScanResult:
        """Decode strictly; raises :class:`ResultError` naming the key that is wrong."""
        try:
            return decode(data, cls, SCHEMA)
        except ValueError as error:
            raise ResultError(f"not a scan result: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> ScanResult:
        """Read a file that :meth:`save` wrote; raises ``OSError`` or :class:`ResultError`."""
        return cls.from_json(Path(path).read_bytes())


class ResultError(ValueError):
    """A saved result that cannot be read."""
