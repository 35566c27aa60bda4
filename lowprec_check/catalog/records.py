"""What is measured of an operator, on which machine, and which precisions apply to it. Times, which
differ from run to run, are in another file, so that records are the same when measured again.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from lowprec_check.catalog.versions import version_key
from lowprec_check.schema.base import StrictStruct, Struct
from lowprec_check.schema.findings import GapKind
from lowprec_check.schema.precisions import BF16, FP16, FP32, FloatFormat

Dtype = Literal["float32", "float16", "bfloat16"]
FORMATS: dict[Dtype, FloatFormat] = {"float32": FP32, "float16": FP16, "bfloat16": BF16}
DTYPES: tuple[Dtype, ...] = tuple(FORMATS)
LOW: tuple[Dtype, ...] = ("float16", "bfloat16")
SHORT: dict[Dtype, str] = {"float32": "float32", "float16": "half", "bfloat16": "bfloat16"}
"""The names that users, declarations and known issues use."""
Mode = Literal["forward", "backward", "autocast", "autocast-backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "autocast", "autocast-backward")
"""How an operator was called. Under autocast its floating inputs were low-precision too."""

CellName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPES)})/({'|'.join(MODES)})$")]
State = Literal["all", "some", "none"]
STATES: tuple[State, ...] = ("none", "some", "all")
"""From worst to best."""
FailureKind = GapKind | Literal["timeout", "other"]


class Header(StrictStruct, frozen=True, kw_only=True):
    """What was measured, on which machine."""

    device: str
    """The type of device, ``cuda``."""
    torch: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+(\.\d+)?$")]
    """Version without the build's suffix, ``2.13.0``."""
    capability: str
    """The CPU capability that torch reports (``avx512``), or the accelerator's (``sm_90``)."""
    hardware: str
    features: list[str] = []
    """CPU features that matter for low precision: ``avx512_bf16``."""
    extension: str | None = None
    """``ipex 2.8.0``, if Intel's extension was loaded."""
    autocast: list[Dtype]
    """Dtypes that autocast supports on this device; for others it disables itself."""
    samples: int
    """The maximum number of samples per operator, without the enlarged ones."""
    ops: int
    """The number of operators, to detect edited files."""

    @property
    def build(self) -> str:
        """The key of the sweep in its file: ``2.13.0``, ``2.8.0+ipex2.8.0``."""
        if self.extension:
            return f"{self.torch}+{self.extension.replace(' ', '')}"
        return self.torch

    @property
    def order(self) -> tuple[str, tuple[int, ...]]:
        """The extension, and the version as numbers: sweeps are sorted by it."""
        return self.extension or "", version_key(self.torch)


class Failure(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One failure of an operator, and the cells it occurs in: ``float16/backward``."""

    cells: list[CellName]
    type: str
    kind: FailureKind
    message: str
    """The message for the dtype of the first cell; see :meth:`message_in`."""
    at: str | None = None
    """The aten overload that raised, ``_linalg_svd``; ``None``: raised above dispatch."""
    condition: str | None = None
    """The property that separates failing samples from passing ones, if there is one."""

    def of(self, dtype: Dtype) -> Failure | None:
        """The failure in one dtype, with its cells and message; ``None`` if there is none."""
        cells = [cell for cell in self.cells if cell.startswith(f"{dtype}/")]
        if cells:
            return msgspec.structs.replace(self, cells=cells, message=self.message_in(dtype))
        return None

    def message_in(self, dtype: Dtype | None) -> str:
        """The message for another dtype; for ``None``, with a star in place of the dtype."""
        # The names of the dtype in C++ and in Python are replaced.
        message = self.message
        own = next(dtype for dtype in DTYPES if self.cells[0].startswith(f"{dtype}/"))
        for name, other in ((FORMATS[own].cpp_name, dtype and FORMATS[dtype].cpp_name), (own, dtype)):
            message = re.sub(rf"(?<![A-Za-z]){name}(?![a-z0-9])", other or "*", message)
        return message


def in_samples(condition: str | None) -> str:
    """A condition as text after a failure; it may not apply to other than measured samples."""
    if condition:
        return f"; in the measured samples it {condition}"
    return ""


class Ulp(NamedTuple):
    """Error against fp64 on the same inputs, in ULP of the dtype, over all output elements."""

    median: float | None
    """``None``: not finite although fp64 rounded to the dtype is."""
    max: float | None


class OpRecord(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of one operator: how many of its samples run, by dtype and mode."""

    op: str
    """The name in OpInfo, with the variant after a dot: ``std.unbiased``."""
    samples: tuple[int, int]
    """The number of samples that run in any dtype, forward and backward."""
    passed: dict[Dtype, list[int]] = {}
    """For dtypes in which not all samples run: how many do, by measured mode of :data:`MODES`."""
    ulp: dict[Dtype, list[Ulp | None]] = {}
    """By dtype, the errors of the output and of the gradients."""
    aten: list[str] = []
    """Overloads dispatched in fp32, without ``aten.`` and ``.default``."""
    backward_aten: list[str] = []
    """Overloads that only training dispatches."""
    random: bool = False
    note: str | None = None
    """Why nothing was measured."""
    failures: list[Failure] = []

    def count(self, dtype: Dtype, mode: Mode) -> tuple[int, int] | None:
        """The number of samples that pass, and of all samples; ``None`` if nothing was measured."""
        # A dtype that is not listed passes all samples; fp32 was not measured under autocast.
        index = MODES.index(mode)
        total = self.samples[index % 2]
        passed = self.passed.get(dtype, self.samples if dtype == "float32" else self.samples * 2)
        if total and index < len(passed):
            return (passed[index], total)
        return None

    def __post_init__(self) -> None:
        """Reject impossible counts; msgspec turns this into an error that names the line."""
        for dtype, passed in self.passed.items():
            possible = all(0 <= count <= self.samples[index % 2] for index, count in enumerate(passed))
            if len(passed) not in (2, 4) or not possible:
                counts = f"{dtype} passes {passed} of {list(self.samples)} samples"
                raise ValueError(f"{self.op}: impossible counts: {counts}")

    def state(self, dtype: Dtype, mode: Mode) -> State | None:
        """Whether all, some or none of the samples run; ``None`` if nothing was measured."""
        count = self.count(dtype, mode)
        if count is None:
            return "none" if self.failure(dtype, mode) is not None else None
        if count[0] == count[1]:
            return "all"
        if count[0]:
            return "some"
        return "none"

    def failure(self, dtype: Dtype, mode: Mode) -> Failure | None:
        """The failure in a dtype and mode, with the message of that dtype, if it fails."""
        cell = f"{dtype}/{mode}"
        return next((failure.of(dtype) for failure in self.failures if cell in failure.cells), None)

    def error(self, dtype: Dtype, mode: Mode) -> Ulp | None:
        """The error in ULP, forward or backward; not measured under autocast."""
        errors, index = self.ulp.get(dtype, ()), MODES.index(mode)
        return errors[index] if index < len(errors) else None


class OpTimes(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The time of an operator's largest sample in fp32, and ratios to it in low precision."""

    op: str
    float32_us: list[float | None] = []
    """Microseconds for forward, and for forward and backward together; the least of a few calls."""
    slower: dict[Dtype, list[float | None]] = {}
    """Ratios to fp32, in the same order."""


# -- The numbers that an op computes with, and whether a low precision applies to them

Numbers = Literal["integer", "complex", "float64", "floating"]
"""``integer``: booleans too; ``floating``: floating-point numbers other than float64, or both."""
NUMBERS: tuple[Numbers, ...] = ("integer", "complex", "float64", "floating")
"""From weakest to strongest, by the number of precisions that apply."""

COMPLEX_OPERATORS = frozenset({"imag", "istft", "nn.functional.silu.complex", "view_as_real"})
"""Operators of the catalog whose samples are complex: they stay complex64 in bfloat16."""


def stronger(one: Numbers, other: Numbers) -> Numbers:
    """The stronger of two."""
    return max(one, other, key=NUMBERS.index)


def why_not_applicable(numbers: Numbers, dtype: Dtype, mode: Mode = "forward") -> str | None:
    """Why a low precision changes nothing for an op that computes with ``numbers``, if so. A cast
    to half makes complex numbers complex32. Autocast casts neither these nor float64.
    """
    under_autocast = mode.startswith("autocast")
    if numbers == "integer":
        return "only integers and booleans"
    if numbers == "complex" and under_autocast:
        return "only complex numbers, which autocast does not cast"
    if numbers == "complex" and dtype == "bfloat16":
        return "only complex numbers, and there is no complex bfloat16 dtype"
    if numbers == "float64" and under_autocast:
        return "only float64, which autocast does not cast"
    return None


def why_operator_not_applicable(op: str, dtype: Dtype) -> str | None:
    """The same for an operator of the catalog, whose samples were cast, under autocast too."""
    if op in COMPLEX_OPERATORS and dtype != "float32":
        return why_not_applicable("complex", dtype)
    return None


# -- Support, derived from records

Evidence = Literal["measured", "declared"]
Registration = Literal["native", "fallback", "composite", "none"]
"""How a device runs an aten op: with its own kernel, on the CPU, by other ops, or not at all."""
OnCpu = Literal["partly", "wholly"]
Rank = tuple[int, int]
_ON_CPU = ("wholly", "partly", None)


class OpSupport(NamedTuple):
    """The support of an operator in one dtype and mode."""

    state: State
    on_cpu: OnCpu | None = None
    """If declared and it runs: whether tensors are copied to the CPU and back for it."""
    at: str | None = None
    """If declared: the aten op that fails, or that runs on the CPU."""
    failure: Failure | None = None
    """Why not all samples run."""

    @property
    def rank(self) -> Rank:
        """For comparing: higher is better."""
        return STATES.index(self.state), _ON_CPU.index(self.on_cpu)


class SupportCell(Struct, frozen=True, kw_only=True):
    """One operator in one dtype and mode, on one device under one version of torch."""

    device: str
    torch: str
    """Release, ``2.13``."""
    extension: str | None = None
    dtype: Dtype
    mode: Mode
    state: State | None
    """``None``: not measured, no source covers it, or the dtype does not apply."""
    not_applicable: str | None = None
    """Why the dtype does not apply."""
    evidence: Evidence
    passed: int | None = None
    samples: int | None = None
    since: str | None = None
    """Since when it has always run; if declared, also with a kernel, or always on the CPU."""
    since_oldest: bool = False
    """Whether that is the oldest release in the catalog: it may have run before."""
    failed_before: bool = False
    """Whether the release before is known not to run it, or to run it in another way."""
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release that runs it, if this one does not."""
    error: Ulp | None = None
    slower: float | None = None
    """The time of a call divided by that in fp32."""
    failure: Failure | None = None
    registration: Registration | None = None
    """If declared: the registration of the worst op that it dispatches."""
    on_cpu: OnCpu | None = None
    """If declared: whether tensors are copied to the CPU and back."""
    at: str | None = None
    """If declared: the aten op that does not run, or only on the CPU."""
    links: list[str] = []


class TorchRelease(abc.ABC):
    """What the catalog knows of the operators in one release of torch on one device."""

    basis: Evidence
    modes: tuple[Mode, ...]
    """Those that are known."""
    device: str
    release: str
    """``2.13``."""
    extension: str | None = None
    """``ipex 2.8.0``, if Intel's extension is loaded."""
    key: tuple[int, ...]
    """The version as numbers, for comparing."""

    @property
    def version(self) -> str:
        """As users write it: ``2.13``, ``2.8+ipex``."""
        if self.extension:
            return f"{self.release}+{self.extension.split()[0]}"
        return self.release

    @property
    @abc.abstractmethod
    def operators(self) -> Collection[str]:
        """The names of all that are known, sorted."""

    @abc.abstractmethod
    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The support of an operator; ``None`` if it is not known or ``dtype`` does not apply."""

    @abc.abstractmethod
    def history(self) -> Sequence[TorchRelease]:
        """All releases on the device, oldest first."""

    def state(self, op: str, dtype: Dtype, mode: Mode) -> State | None:
        """The state alone; ``None`` as in :meth:`support`."""
        support = self.support(op, dtype, mode)
        return support.state if support else None

    def counts_for(self, op: str) -> bool:
        """Whether the release has the operator, so that it says since when it runs."""
        return True

    def cell(self, op: str, dtype: Dtype, mode: Mode) -> SupportCell:
        """The support of an operator, since or until which release, and what subclasses add."""
        support = self.support(op, dtype, mode)
        state, since, is_oldest, failed = support and support.state, None, False, False
        if support is not None and state == "all":
            # Back through the releases as long as it runs in the same way.
            past = [other for other in self.history() if other.key <= self.key and other.counts_for(op)]
            while past and (found := past[-1].support(op, dtype, mode)) and found.rank == support.rank:
                since = past.pop().release
            is_oldest, failed = not past, bool(past) and found is not None
        on_cpu = at = failure = None
        if support is not None:
            on_cpu, at, failure = support.on_cpu, support.at, support.failure
        return SupportCell(
            device=self.device,
            torch=self.release,
            extension=self.extension,
            dtype=dtype,
            mode=mode,
            state=state,
            not_applicable=why_operator_not_applicable(op, dtype),
            evidence=self.basis,
            since=since,
            since_oldest=is_oldest,
            failed_before=failed,
            fixed_in=fixed_since(self, [op], dtype, mode) if state in ("some", "none") else None,
            on_cpu=on_cpu,
            at=at,
            failure=failure,
        )


def fixed_since(
    release: TorchRelease, ops: Sequence[str], dtype: Dtype, mode: Mode, at: str | None = None
) -> str | None:
    """The first later release since which all ``ops`` run in all samples, if there is one. Those
    that fail there in another aten op than ``at`` do not count.
    """
    since = None
    for other in release.history():
        if other.key <= release.key:
            continue
        supports = [other.support(op, dtype, mode) for op in ops if other.counts_for(op)]
        runs = [
            support is not None and support.state == "all"
            for support in supports
            if at is None or not support or not support.failure or support.failure.at in (None, at)
        ]
        if not runs or not all(runs):
            since = None
        elif since is None:
            since = other.release
    return since
