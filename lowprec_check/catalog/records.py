"""What a sweep finds and the catalog knows: the header of a sweep, and of each operator its record and its times. Never imports torch.

Timings, which differ from run to run, are in a file of their own, so that the records are the same byte for byte whenever they
are measured again on one machine: see `sweep_file` and `times_file`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec

from lowprec_check.schema.base import StrictStruct
from lowprec_check.schema.precisions import BF16, FP16, FP32, FloatFormat
from lowprec_check.schema.scan_result import GapKind

Dtype = Literal["float32", "float16", "bfloat16"]
FORMATS: dict[Dtype, FloatFormat] = {"float32": FP32, "float16": FP16, "bfloat16": BF16}
DTYPES: tuple[Dtype, ...] = tuple(FORMATS)
LOW: tuple[Dtype, ...] = ("float16", "bfloat16")
SHORT: dict[Dtype, str] = {"float32": "float32", "float16": "half", "bfloat16": "bfloat16"}
"""What people call them, and the declarations and known issues too."""
Mode = Literal["forward", "backward", "autocast", "autocast-backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "autocast", "autocast-backward")
"""How an operator was called; under autocast its floating inputs were low-precision, as they are behind a Linear."""

CellName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPES)})/({'|'.join(MODES)})$")]
Version = Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+(\.\d+)?$")]
State = Literal["all", "some", "none"]
STATES: tuple[State, ...] = ("none", "some", "all")
"""From worst to best."""
FailureKind = GapKind | Literal["timeout", "other"]


class Header(StrictStruct, frozen=True, kw_only=True):
    """What was measured, and on what."""

    device: str
    """``cpu``, ``cuda`` or ``xpu``."""
    torch: Version
    """Version without the build's suffix, ``2.13.0``."""
    capability: str
    """Of the CPU, as torch names it (``avx512``), or of the accelerator (``sm_90``)."""
    hardware: str
    features: list[str] = []
    """Of the CPU, those that matter to low precision: ``avx512_bf16``."""
    extension: str | None = None
    """``ipex 2.8.0``, where Intel's extension was loaded."""
    autocast: list[Dtype]
    """Dtypes that autocast takes on this device; it disables itself for others."""
    samples: int
    """At most so many samples per operator, besides those made larger."""
    ops: int
    """Operators described: an edited file is detected by it."""

    @property
    def build(self) -> str:
        """What tells it from the other sweeps of its file: ``2.13.0``, ``2.8.0+ipex2.8.0``."""
        return f"{self.torch}+{self.extension.replace(' ', '')}" if self.extension else self.torch

    @property
    def stem(self) -> str:
        """The name of its file, without suffix: ``measured-cpu-avx512``."""
        return f"measured-{self.device}-{self.capability.replace('_', '')}"


class Failure(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One way in which an operator fails, and in which cells: ``float16/backward``."""

    cells: list[CellName]
    type: str
    kind: FailureKind
    message: str
    """As the dtype of the first cell has it, see :meth:`message_in`."""
    at: str | None = None
    """The aten overload that raised, ``_linalg_svd``; ``None`` where it was raised above dispatch."""
    condition: str | None = None
    """Which samples fail, where one property of theirs tells; shown by :func:`in_samples`."""

    def of(self, dtype: Dtype) -> Failure | None:
        """What it is of one dtype: those cells, and the message that names it; ``None`` where there are none."""
        cells = [cell for cell in self.cells if cell.startswith(f"{dtype}/")]
        return msgspec.structs.replace(self, cells=cells, message=self.message_in(dtype)) if cells else None

    def message_in(self, dtype: Dtype | None) -> str:
        """The message as another dtype of the cells has it; of ``None``, with a star for its name."""
        message = self.message
        own = next(dtype for dtype in DTYPES if self.cells[0].startswith(f"{dtype}/"))
        for name, other in zip(_names_in_messages(own), _names_in_messages(dtype), strict=True):
            message = re.sub(rf"(?<![A-Za-z]){name}(?![a-z0-9])", other, message)
        return message


def _names_in_messages(dtype: Dtype | None) -> tuple[str, str]:
    """The names of a dtype in messages of torch's C++ and Python code; stars for ``None``."""
    return ("*", "*") if dtype is None else (FORMATS[dtype].cpp_name, dtype)


def in_samples(condition: str | None) -> str:
    """A condition as what it is, to follow what failed: it parts the samples measured, and may not hold of others."""
    return f"; in the samples measured it {condition}" if condition else ""


class Ulp(NamedTuple):
    """Error against fp64 on the same inputs, in units in the last place of the dtype, over all output elements."""

    median: float | None
    """``None``: not finite where fp64 rounded to the dtype is."""
    max: float | None


class OpRecord(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One operator: how many of its samples run, by dtype and mode."""

    op: str
    """OpInfo's name, with the variant after a dot: ``std.unbiased``."""
    samples: tuple[int, int]
    """Samples that run in any dtype, forward and backward: what the counts below are out of."""
    passed: dict[Dtype, list[int]] = {}
    """Of the dtypes in which not all run: samples that do, in each mode of :data:`MODES` that was measured."""
    ulp: dict[Dtype, list[Ulp | None]] = {}
    """By dtype, error of the output and of the gradients."""
    aten: list[str] = []
    """Overloads dispatched in fp32, without ``aten.`` and ``.default``."""
    backward_aten: list[str] = []
    """Further ones in training."""
    random: bool = False
    note: str | None = None
    """Why nothing was measured."""
    failures: list[Failure] = []

    def count(self, dtype: Dtype, mode: Mode) -> tuple[int, int] | None:
        """Samples that pass, and out of how many; ``None`` where nothing was measured."""
        index = MODES.index(mode)
        total = self.samples[index % 2]
        passed = self.passed.get(dtype, self.samples if dtype == "float32" else self.samples * 2)
        return (passed[index], total) if total and index < len(passed) else None

    def __post_init__(self) -> None:
        """Refuse counts that cannot be (msgspec turns this into an error that names the line)."""
        for dtype, passed in self.passed.items():
            possible = all(0 <= count <= self.samples[index % 2] for index, count in enumerate(passed))
            if len(passed) not in (2, 4) or not possible:
                raise ValueError(f"{self.op}: {dtype} passes {passed} of {list(self.samples)} samples")

    def state(self, dtype: Dtype, mode: Mode) -> State | None:
        """Whether all, some or none of the samples run; ``None`` where there was nothing to measure."""
        count = self.count(dtype, mode)
        if count is None:
            return "none" if self.failure(dtype, mode) is not None else None
        return "all" if count[0] == count[1] else "some" if count[0] else "none"

    def failure(self, dtype: Dtype, mode: Mode) -> Failure | None:
        """How it fails, where it does: with the cells and in the words of that dtype."""
        cell = f"{dtype}/{mode}"
        return next((failure.of(dtype) for failure in self.failures if cell in failure.cells), None)

    def error(self, dtype: Dtype, mode: Mode) -> Ulp | None:
        """Error in ULP, forward or backward; not measured under autocast."""
        found = self.ulp.get(dtype, ())
        index = MODES.index(mode)
        return found[index] if index < len(found) else None


class OpTimes(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """How long an operator's largest sample takes in fp32, and how many times as long in low precision."""

    op: str
    float32_us: list[float | None] = []
    """Microseconds forward, and forward and backward together; the least of a few calls."""
    slower: dict[Dtype, list[float | None]] = {}
    """Times fp32, in the same order."""
