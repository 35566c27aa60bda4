"""What is measured of an operator, on which machine, and which precisions apply to it. Times, which
differ from run to run, are in another file, so that records are the same when measured again.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec

from lowprec_check.catalog.versions import version_key
from lowprec_check.schema.base import StrictStruct
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
