"""The result of a scan: immutable, saved as JSON.

Every float is finite or ``None``: JSON has no infinity, so a value that is infinite or undefined is
``null`` in the file and ``None`` in memory, and a saved result that is read again equals the
original.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from lowprec_check.schema.axes import lowers_precision
from lowprec_check.schema.backend_checks import BackendCheck, CompilerCheck
from lowprec_check.schema.base import Struct, decode, encoded, write_file
from lowprec_check.schema.findings import (
    Diagnostic,
    Gap,
    GapKind,
    Layer,
    MixedDtypes,
    ModelAsGiven,
    Recommendation,
    Severity,
)
from lowprec_check.schema.fixing import Fixing
from lowprec_check.schema.measures import (
    Ablation,
    BatchRanges,
    ClampTrial,
    CodeTrial,
    ConstantTrial,
    ErrorBudget,
    InputsTried,
    InputTrial,
    Latency,
    LayerError,
    ModuleMagnitudes,
    PredictedDevice,
    RangeTrial,
    Timing,
    TimingConditions,
    UncoveredFault,
)
from lowprec_check.schema.op_calls import OpCall, OpCalls
from lowprec_check.schema.plan import Attempt, Plan
from lowprec_check.schema.precisions import PRECISIONS, FloatFormat, Precision
from lowprec_check.schema.run_key import EAGER, REFERENCE, MemoryFormat, RunKey, qualified
from lowprec_check.schema.scanned_model import ModelInfo, WeightsOrigin
from lowprec_check.schema.statements import Statement
from lowprec_check.schema.training import TrainingRun, TrainingSetup
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo, Meaning, Status

Part = Literal["runs", "op_calls", "gaps", "diagnostics"]
Columns = dict[str, list[Any]]
"""Lists of equal length, by the name of the column."""

_KEY = ("precision", "backend", "memory_format")


def columns_of(result: ScanResult, part: Part) -> Columns:
    """All rows of ``part``: those of one run after those of another, with the key of the run.

    Raises ``ValueError`` for another part.
    """
    if part == "runs":
        return _transposed([dict(_flat(run, type(run))) for run in result.runs])
    if part == "op_calls":
        # They are columns already; there may be 100,000 rows in each run.
        keys = {name: [getattr(run, name) for run in result.runs for _ in range(len(run.op_calls))] for name in _KEY}
        calls = [run.op_calls for run in result.runs]
        names = OpCall.__struct_fields__
        return keys | {name: [value for columns in calls for value in getattr(columns, name)] for name in names}
    if part == "gaps":
        keyed = [({name: getattr(run, name) for name in _KEY}, gap) for run in result.runs for gap in run.gaps]
        return _transposed([key | msgspec.structs.asdict(gap) for key, gap in keyed], _KEY + Gap.__struct_fields__)
    if part == "diagnostics":
        rows = [msgspec.structs.asdict(diagnostic) for diagnostic in result.diagnostics]
        return _transposed(rows, Diagnostic.__struct_fields__)
    raise ValueError(f"unknown part {part!r}; known are {', '.join(get_args(Part))}")


def _flat(value: Any, kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and texts in ``value`` by dotted name, ``None`` too; no lists and no objects."""
    for field in msgspec.structs.fields(kind):
        inner, kinds = getattr(value, field.name, None), (field.type, *get_args(field.type))
        if isinstance(inner, (list, dict, tuple)) or any(get_origin(kind) in (list, dict, tuple) for kind in kinds):
            continue
        # A column is there whether the run has the part or not: its type says so.
        within = next((kind for kind in kinds if isinstance(kind, msgspec.StructMeta)), None)
        if within is not None:
            yield from _flat(inner, within, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def _transposed(rows: list[dict[str, Any]], names: Sequence[str] = ()) -> Columns:
    """A column for each of ``names`` and each key, in order; ``None`` where a row lacks it."""
    all_names = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in all_names}


__all__ = [
    "SCHEMA",
    "Diagnostic",
    "Evidence",
    "Gap",
    "GapKind",
    "Layer",
    "ModelInfo",
    "ResultError",
    "Run",
    "ScanResult",
    "Severity",
    "Status",
    "WeightsOrigin",
    "skipped",
]

SCHEMA = 1

Evidence = Literal["measured", "predicted"]

MEASURED = ("latency_ms", "latency", "peak_memory_bytes", "process_memory_bytes", "timing", "setup_seconds", "compiler")
"""What only a run on the device itself can tell, and the times of its op calls."""


class Run(Struct, frozen=True, kw_only=True):
    """One precision × backend × device × memory format: a plain and an instrumented part."""

    # What was run.
    precision: str
    """``fp32``, ``half``, ``bfloat16``, ``autocast-fp16``, ``autocast-bf16``, ``plan``."""
    backend: str = EAGER
    """How the model is executed: ``eager``, ``inductor``, …"""
    quantized: bool | None = None
    """Whether the backend computes in fewer bits, as ``int8`` does; ``None`` in older files."""
    device: str
    """The device: ``cpu``, ``cuda:0``."""
    memory_format: MemoryFormat = "contiguous"
    """The memory format of the model and its inputs."""
    evidence: Evidence = "measured"
    """``predicted``: the ops ran emulated, for a device that is not here."""
    # How it ended, and on which call, batch or input it failed.
    status: Status
    """How the plain part ended."""
    reason: str | None = None
    """Why it was skipped, timed out or crashed, in words."""
    exception: ExceptionInfo | None = None
    """What the plain part raised; ``None`` if it did not."""
    calls: int = 1
    """Calls in a row that the status rests on. The outputs of the first three are compared."""
    failed_call: int | None = None
    """The call, from 1, in which it failed; ``None`` if it passed, or failed in the first."""
    failed_batch: int | None = None
    """The batch on which it failed, if not the first: all but time and memory is about it."""
    batches: BatchRanges | None = None
    """Status and range of each op per batch, if several were asked for and the first passed."""
    further_inputs: InputsTried | None = None
    """How it does on further inputs; ``None`` if it does not pass, or they were not asked for."""
    # How far its output is from that of fp32, and where that comes from.
    output_error: ErrorStats | None = None
    """The largest of the calls compared."""
    compared_output: str | None = None
    """The place of the tensor that the status is about, ``logits.0``; ``None`` if the only one."""
    compared_module: str | None = None
    """The module whose output was compared, since the model's holds nothing to compare."""
    budget: ErrorBudget | None = None
    """Where the output error comes from; ``None`` if the run was not analyzed op by op."""
    ablation: Ablation | None = None
    """What fp32 in the modules blamed for its error changed; ``None`` if it passes, or none is."""
    uncovered: list[UncoveredFault] = []
    """Further ops with Inf, NaN or errors, which the first one hides; of a run that fails by it."""
    clamp_trial: ClampTrial | None = None
    """The run with other inputs of logarithms that give Inf; ``None`` if it passes, or has none."""
    input_trials: list[InputTrial] = []
    """What single inputs that are not cast change; of a cast that fails, in which casts matter."""
    range_trials: list[RangeTrial] = []
    """What single places with values out of range do to the output of fp32; of a run that fails."""
    constant_trial: ConstantTrial | None = None
    """The run with numbers that its dtype holds for constants that are zero in it; if it fails."""
    lockstep_error: ErrorStats | None = None
    """Error of the instrumented output against its reference, which decides as the run does."""
    # Time and memory, of the plain part.
    latency_ms: float | None = None
    """``latency.median_ms``; of a run that was not timed, the calls of its plain part."""
    latency: Latency | None = None
    """The times of calls, in rounds over all runs; ``None`` if it was not timed so."""
    peak_memory_bytes: int | None = None
    """Peak memory of a call, in bytes: weights, buffers, inputs and live tensors; on an
    accelerator, what its allocator reports. On another backend on the CPU,
    ``process_memory_bytes``, since it may hold memory that is not torch's.
    """
    process_memory_bytes: int | None = None
    """What a process holds at the peak of a call that serves this run alone, in bytes, beyond one
    that has loaded torch and the model's file, but no model; ``None`` in scans of eager runs only,
    if it was not measured, and on an accelerator.
    """
    timing: Timing | None = None
    """Times in the scenario that the scan was asked for."""
    setup_seconds: float | None = None
    """What the first call took longer (preparing, compiling); ``None`` if not compiled."""
    # Of a backend: what it does otherwise than eager mode.
    explained_by: str | None = None
    """The label of the eager run whose op calls explain this one, which has none of its own."""
    compiler: CompilerCheck | None = None
    """Whether the compiler made the output worse; ``None`` if not compiled, or it is random."""
    backend_check: BackendCheck | None = None
    """What the backend does otherwise than eager mode; ``None`` for eager, or without output."""
    failed_input: str | None = None
    """The :class:`ChangedInputs` on which it failed, which its status is about; or ``None``."""
    # What the instrumented part found.
    gaps: list[Gap] = []
    """What fails in low precision and succeeds when its inputs are widened."""
    mixed_dtypes: MixedDtypes | None = None
    """The run with casts where ops get several dtypes, and where these come from; if it fails."""
    op_calls: OpCalls = OpCalls()
    """Every op call of the instrumented part."""
    uncalled_modules: list[str] = []
    """Modules whose parameters no op read; for a whole subtree, its root."""
    called_modules: list[str] = []
    """Submodules whose ``forward`` ran, in the model's order."""
    # Of a ``plan`` run.
    keep_fp32: list[str] = []
    """Modules kept in fp32, for a ``plan`` run."""
    keep_fp32_inputs: list[str] = []
    """Inputs that are not cast, for a ``plan`` run."""
    base: str | None = None
    """The precision that a ``plan`` run starts from."""
    untied: list[str] = []
    """Shared parameters of kept modules that get their own copy, for a ``plan`` run."""
    # What it is judged by.
    tolerance: float | None = None
    """The largest ``output_error`` that passes: rel_l2, or the share of integers that differ."""
    loss: float | None = None
    """The value of the file's loss; ``None`` if it defines none, or it is not finite."""
    metric: float | None = None
    """The value of the file's ``metric(model)``; ``None`` if it defines none."""
    # Whether the instrumented part can be relied on, and how far it came.
    perturbed: bool | None = None
    """Whether the instrumented output differed from the plain one; ``None`` if unknown."""
    function_mode: bool = False
    """Whether a second pass with a function mode was needed, which keeps fast paths out."""
    complete: bool = True
    """Whether the instrumented pass reached the end of the model."""
    stopped_by: ExceptionInfo | None = None
    """The exception that ended the instrumented pass early, if any."""
    incomplete_because: str | None = None
    """What else ended it early, and where: a budget, or the death of its process."""
    emulated: dict[str, str] = {}
    """Ops computed in fp32 and rounded, with the reason."""
    notes: list[str] = []
    """What else to know of the run, in words."""
    fallbacks: list[str] = []
    """Warnings about falling back to the CPU."""
    # What else affects the comparison with fp32.
    nondeterministic: bool = False
    """Of fp32: whether two runs of it differed, which widens the tolerance of the others."""
    compiled: bool = False
    """Whether the plain part ran compiled code; the instrumented part runs in eager mode."""
    judged_by_one_call: bool = False
    """Whether one call, twice as slow as fp32's in a format without acceleration, sufficed."""
    one_call_ratio: float | None = None
    """How many times as long as fp32 this call took; ``None`` in older files: over 20."""
    time_was_over: bool = False
    """Whether it was skipped because the runs before it took the time of the scan."""
    random: bool = False
    """Whether the model drew random numbers."""
    output_is_zero: bool = False
    """Whether the floating output is all zeros, so that a relative error is meaningless."""
    output_rms: float | None = None
    """Root mean square of the fp32 tensor judged; of fp32, of its largest; or ``None``."""
    # What further parts of a scan found.
    training: TrainingRun | None = None
    """What training in this precision does, for a scan with ``--train``."""
    magnitudes: list[ModuleMagnitudes] = []
    """How the fp32 reference's values are distributed in each module, in order of first run."""
    layer_errors: list[LayerError] = []
    """The errors of the layers that a quantizing backend measured, in the order of the model."""
    unquantized_error: float | None = None
    """Of a quantized run: rel_l2 from the output of its precision in eager mode."""
    weight_bytes: int | None = None
    """Of a quantized run: the bytes of its parameters and buffers."""
    unquantized_bytes: int | None = None
    """Those of the same precision without quantization."""
    without_kernels: str | None = None
    """Why its format was emulated, a clause; such a run has no times and no memory."""
    known_ops: list[str] = []
    """Of a predicted run: the aten ops in 16 bits that the catalog has for the device."""
    assumed_ops: list[str] = []
    """Of a predicted run: those that it does not have; they are taken to run."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a predicted run with a measured time or memory."""
        has_measured = any(getattr(self, name) is not None for name in MEASURED)
        if self.evidence != "measured" and (has_measured or self.op_calls.are_timed):
            raise ValueError("a predicted run has no times and no memory: they would be those of another device")

    @property
    def key(self) -> RunKey:
        """The key that identifies the run."""
        return RunKey(self.precision, self.backend, self.device, self.memory_format)

    @property
    def kept(self) -> list[str]:
        """The inputs and modules kept in fp32."""
        return [*self.keep_fp32_inputs, *self.keep_fp32]

    @property
    def is_reference(self) -> bool:
        """Whether this is the fp32 run that all other runs are compared with."""
        return self.key.is_reference

    @property
    def is_forward(self) -> bool:
        """Whether it is about the forward pass alone, and not about training."""
        return self.training is None

    @property
    def is_low(self) -> bool:
        """Whether it computes in a lower precision than fp32."""
        return self.precision != REFERENCE or self.is_quantized

    @property
    def is_quantized(self) -> bool:
        """Whether its backend computes in fewer bits than its precision, ``int8``."""
        if self.quantized is None:
            return lowers_precision(self.backend)
        return self.quantized

    @property
    def batch_count(self) -> int:
        """Batches of inputs that it was run on, further inputs aside."""
        if self.batches:
            return len(self.batches.statuses)
        return 1

    @property
    def is_eager(self) -> bool:
        """Whether both parts ran the same ops; if not, op calls explain it only in part."""
        return self.backend == EAGER and not self.compiled

    @property
    def basis(self) -> Precision | None:
        """The precision, or the base of a plan; ``None`` if it is unknown here."""
        return PRECISIONS.find(self.base or self.precision)

    @property
    def format(self) -> FloatFormat | None:
        """The float format of its :attr:`basis`."""
        return self.basis.format if self.basis else None

    @property
    def is_autocast(self) -> bool:
        """Whether it, or the base of a plan, runs under autocast."""
        return self.basis is not None and self.basis.kind == "autocast"

    @property
    def rel_l2(self) -> float | None:
        """That of its output; ``None`` if nothing was compared, or it is infinite."""
        return self.output_error.rel_l2 if self.output_error else None

    @property
    def by_meaning(self) -> Meaning | None:
        """The measure of what its output means that its status rests on; ``None``: rel_l2."""
        return self.output_error.by_meaning if self.output_error else None

    @property
    def distance(self) -> float | None:
        """What is held against the tolerance; ``None``: nothing compared, or infinite."""
        return self.output_error.distance if self.output_error else None

    @property
    def relative_error(self) -> float | None:
        """The same of values, whatever they mean."""
        return self.distance if self.by_meaning is None else self.rel_l2

    @property
    def relative_tolerance(self) -> float | None:
        """Of relative errors; ``tolerance`` is the limit of the measure that decides."""
        return self.tolerance if self.by_meaning is None else self.by_meaning.tolerance


def skipped(key: RunKey, reason: str, evidence: Evidence = "measured") -> Run:
    """A run that is not possible, or was not reached."""
    return Run(
        precision=key.precision,
        backend=key.backend,
        quantized=lowers_precision(key.backend),
        device=key.device,
        memory_format=key.memory_format,
        evidence=evidence,
        status="skipped",
        reason=reason,
    )


class ScanResult(Struct, frozen=True, kw_only=True):
    """Everything that a scan found; reports and comparisons need nothing else.

    >>> result = ScanResult.load("scan.json")  # doctest: +SKIP
    >>> [run.status for run in result.runs]  # doctest: +SKIP
    """

    schema: int = SCHEMA
    """The version of the format."""
    tool: str
    """What saved it: ``lowprec-check 0.2.0``."""
    # What was scanned, where, and with which options.
    target: str
    """What was scanned, as its user wrote it; of the Python API, the class of the model."""
    model: ModelInfo
    """The model and its inputs."""
    environment: dict[str, Any]
    """The machine and the versions of packages."""
    options: dict[str, Any] = {}
    """What the scan was asked for."""
    # What was measured.
    runs: list[Run]
    """One for each precision, backend and memory format; fp32 first."""
    timing_conditions: TimingConditions | None = None
    """What may have disturbed the times of the runs; ``None`` if they were not timed in rounds."""
    # What follows from that: the conclusion is made from the rest alone.
    diagnostics: list[Diagnostic] = []
    """The findings."""
    recommendation: Recommendation | None = None
    """What to use; ``None`` if nothing passed."""
    statements: list[Statement] = []
    """What the result means: every report has these sentences about its runs, no others."""
    plan: Plan | None = None
    """The plan of the ``plan`` run, if there is one."""
    attempts: list[Attempt] = []
    """What the search for a plan found from each base; empty if there was none."""
    # What only some scans have.
    prediction: PredictedDevice | None = None
    """The device that is not here, and what predictions rest on; ``None`` if measured."""
    training: TrainingSetup | None = None
    """How the model was trained; ``None`` if only the forward pass was run."""
    as_given: ModelAsGiven | None = None
    """The model as given, if it has several floating dtypes; the runs convert it to one."""
    fixing: Fixing | None = None
    """The patch of the user's source that ``lowprec-check fix`` found, if it was asked for."""
    # For the reader of a report, and for resuming.
    source_lines: dict[str, str] = {}
    """The text of the lines that op calls and gaps name, ``model.py:41``, if found."""
    complete: bool = True
    """Whether the scan reached its end; if not, runs, times or the search may be missing."""
    target_options: list[str] | None = None
    """What a command said of the target: its ``--inputs`` and ``--weights``, and ``--`` with the
    arguments of a script; ``None`` if no command made the scan.
    """
    code_trial: CodeTrial | None = None
    """What happened when the recommended code was executed; ``None`` if it was not tried."""
    digest: str | None = None
    """SHA-256 of source files and fp32's output, with streamed weights: what resuming needs."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if measured and predicted runs, times or advice are mixed."""
        claims: list[Run | Recommendation | Plan | None] = [*self.runs, self.recommendation, self.plan]
        if any(claim is not None and claim.evidence != self.evidence for claim in claims):
            raise ValueError("measured and predicted runs are mixed: a scan either measures or predicts")
        if self.prediction is not None and self.timing_conditions is not None:
            raise ValueError("a prediction has no times")

    @property
    def torch(self) -> str:
        """The version of torch that the runs are about: predicted, or the machine's; or empty."""
        if self.prediction is not None:
            return self.prediction.torch
        return str(self.environment.get("torch") or "")

    @property
    def is_forward(self) -> bool:
        """Whether its runs are about the forward pass alone, and not about training."""
        return self.training is None

    @property
    def evidence(self) -> Evidence:
        """Whether the runs were measured or predicted."""
        return "measured" if self.prediction is None else "predicted"

    def __repr__(self) -> str:
        """Three lines: what was scanned, the status of each run, the recommendation."""
        return str(_shown_by("text", self))

    def _repr_html_(self) -> str:
        """The table of runs, for notebooks."""
        return str(_shown_by("html", self))

    def run(self, precision: str, backend: str = EAGER, memory_format: MemoryFormat = "contiguous") -> Run:
        """Return one run; raises ``KeyError`` if it was not part of the scan."""
        for run in self.runs:
            if (run.precision, run.backend, run.memory_format) == (precision, backend, memory_format):
                return run
        raise KeyError(qualified(precision, backend, memory_format))

    def columns(self, part: Part) -> Columns:
        """Runs, op calls, gaps or diagnostics as a dict of columns, for
        ``pandas.DataFrame(result.columns("op_calls"))``.

        Op calls and gaps have the ``precision``, ``backend`` and ``memory_format`` of their run.
        docs/schema.json describes them. Raises ``ValueError`` for another part.
        """
        return columns_of(self, part)

    def to_json(self) -> bytes:
        """Encode as one line of JSON."""
        return encoded(self, msgspec.json.encode) + b"\n"

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to ``path``; raises :class:`UsageError` if that fails."""
        write_file(path, self.to_json())

    @classmethod
    def from_json(cls, data: bytes) -> ScanResult:
        """Decode JSON; raises :class:`ResultError` naming the wrong key."""
        try:
            return decode(data, cls, SCHEMA)
        except ValueError as error:
            raise ResultError(f"not a scan result: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> ScanResult:
        """Read a file that :meth:`save` wrote; raises ``OSError`` or :class:`ResultError`."""
        return cls.from_json(Path(path).read_bytes())


def _shown_by(function: str, result: ScanResult) -> Any:
    """Loads the report by name on use, since reports are above this package."""
    return getattr(importlib.import_module("lowprec_check.report.scan_document"), function)(result)


class ResultError(ValueError):
    """A saved result that cannot be read."""
