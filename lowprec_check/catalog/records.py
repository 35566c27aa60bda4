"""What a sweep writes and the catalog reads: one file per build of torch and device, one operator per line.

The first line is a :class:`Header`, every other an :class:`OpRecord`, sorted by name. Timings, which differ from run to run,
are in a file of their own, so that the main file is the same byte for byte whenever it is measured again on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import GapKind

SCHEMA = 1

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
LOW: tuple[Dtype, ...] = ("float16", "bfloat16")
SHORT: dict[Dtype, str] = {"float32": "float32", "float16": "half", "bfloat16": "bfloat16"}
"""What people call them, and the declarations and known issues too."""
_IN_MESSAGES: dict[Dtype | None, tuple[str, str]] = {
    "float32": ("Float", "float32"),
    "float16": ("Half", "float16"),
    "bfloat16": ("BFloat16", "bfloat16"),
    None: ("*", "*"),
}
"""What torch calls them in C++ and in Python; ``None`` for whichever it is."""
Mode = Literal["forward", "backward", "autocast", "autocast-backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "autocast", "autocast-backward")
"""How an operator was called; under autocast its floating inputs were low-precision, as they are behind a Linear."""

CellName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPES)})/({'|'.join(MODES)})$")]
Version = Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+(\.\d+)?$")]
State = Literal["all", "some", "none"]
STATES: tuple[State, ...] = ("none", "some", "all")
"""From worst to best."""
FailureKind = GapKind | Literal["timeout", "other"]


class Header(Struct, frozen=True, kw_only=True):
    """What was measured, and on what."""

    schema: int = SCHEMA
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
    """Lines that follow: a truncated file is told by it."""

    @property
    def stem(self) -> str:
        """The name of its file, without suffix."""
        extension = f"-{self.extension.replace(' ', '')}" if self.extension else ""
        return f"measured-{self.device}-{self.torch}{extension}-{self.capability.replace('_', '')}"


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
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
        for name, other in zip(_IN_MESSAGES[own], _IN_MESSAGES[dtype], strict=True):
            message = re.sub(rf"(?<![A-Za-z]){name}(?![a-z0-9])", other, message)
        return message


def in_samples(condition: str | None) -> str:
    """A condition as what it is, to follow what failed: it parts the samples measured, and may not hold of others."""
    return f"; in the samples measured it {condition}" if condition else ""


class Ulp(NamedTuple):
    """Error against fp64 on the same inputs, in units in the last place of the dtype, over all output elements."""

    median: float | None
    """``None``: not finite where fp64 rounded to the dtype is."""
    max: float | None


class OpRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class OpTimes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long an operator's largest sample takes in fp32, and how many times as long in low precision."""

    op: str
    float32_us: list[float | None] = []
    """Microseconds forward, and forward and backward together; the least of a few calls."""
    slower: dict[Dtype, list[float | None]] = {}
    """Times fp32, in the same order."""


class Measured(NamedTuple):
    """One file of the catalog."""

    header: Header
    records: list[OpRecord]
    times: list[OpTimes]

    def save(self, folder: Path) -> list[Path]:
        """Write the records and the times; return the two paths.

        Raises :class:`UsageError` where that would put a few operators in the place of many.
        """
        records, times = folder / f"{self.header.stem}.jsonl", folder / f"{self.header.stem}.times.jsonl"
        there = read_header(records).ops if records.exists() else 0
        if there > self.header.ops:
            raise UsageError(
                f"{records} has {there} operators, this sweep {self.header.ops}: not overwritten.",
                "Give --out another folder.",
            )
        records.write_bytes(_lines([self.header, *self.records]))
        times.write_bytes(_lines(self.times))
        return [records, times]


def _lines(structs: Sequence[Struct]) -> bytes:
    encoder = msgspec.json.Encoder(order="deterministic")
    return b"".join(encoder.encode(struct) + b"\n" for struct in structs)


MEASURE_AGAIN = "Restore it, or measure it again with `lowprec-check catalog build`."


class CatalogError(UsageError):
    """A file of the catalog that cannot be read; says which line and key."""


T = TypeVar("T", bound=Struct)


def read_header(path: Path) -> Header:
    """The first line of a file of records; raises :class:`CatalogError`."""
    with path.open("rb") as file:
        return _header(path, file.readline())


class Lines(Mapping[str, T]):
    """The lines of a file by the operator they are about, each decoded when it is asked for and not before.

    Raises :class:`CatalogError` naming file, line and key; at once where a line does not begin as one of ours.
    """

    def __init__(self, path: Path, data: bytes, kind: type[T], first_line: int) -> None:
        self.path, self._first = path, first_line
        self._decoder = msgspec.json.Decoder(kind)
        self._lines = data.removesuffix(b"\n").split(b"\n") if data else []
        self._decoded: dict[str, T] = {}
        self._numbers = {self._name(number): number for number in range(len(self._lines))}
        if len(self._numbers) != len(self._lines):
            raise CatalogError(f"{path.name}: an operator is there twice", MEASURE_AGAIN)

    def _name(self, number: int) -> str:
        line = self._lines[number]
        if line[:7] != b'{"op":"' or (end := line.find(b'"', 7)) < 0:
            self._decode(number)  # says what is wrong
            raise CatalogError(
                f"{self.path.name}:{number + self._first}: does not begin with its operator", MEASURE_AGAIN
            )
        return line[7:end].decode(errors="replace")

    def _decode(self, number: int) -> T:
        try:
            return self._decoder.decode(self._lines[number])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CatalogError(f"{self.path.name}:{number + self._first}: {error}", MEASURE_AGAIN) from None

    def __getitem__(self, op: str) -> T:
        if op not in self._decoded:
            self._decoded[op] = self._decode(self._numbers[op])
        return self._decoded[op]

    def __contains__(self, op: object) -> bool:
        return op in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._lines)


def read_records(path: Path) -> tuple[Header, Lines[OpRecord]]:
    """Read a file of records; raises :class:`CatalogError` naming file, line and key, and where lines are missing."""
    first, _, rest = path.read_bytes().partition(b"\n")
    header, records = _header(path, first), Lines(path, rest, OpRecord, first_line=2)
    if len(records) != header.ops:
        raise CatalogError(
            f"{path.name}: {len(records)} operators, the header says {header.ops}: truncated or edited", MEASURE_AGAIN
        )
    return header, records


def read_times(path: Path) -> Lines[OpTimes]:
    """Read a file of times; empty where there is none."""
    return Lines(path, path.read_bytes() if path.exists() else b"", OpTimes, first_line=1)


def _header(path: Path, line: bytes) -> Header:
    try:
        schema = msgspec.json.decode(line, type=_Schema).schema
        if schema != SCHEMA:
            raise CatalogError(f"{path.name}:1: schema {schema} is not {SCHEMA}, the one this version reads")
        return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path.name}:1: {error}") from None


class _Schema(msgspec.Struct):
    schema: int
