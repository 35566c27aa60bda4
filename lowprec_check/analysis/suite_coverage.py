"""The operators that a test suite uses and their support in low precision: what is saved, and how it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from lowprec_check.catalog.aten import FROM_WORST, AtenSupport, AutocastDtype
from lowprec_check.catalog.numbers import Numbers
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encoded
from lowprec_check.schema.precisions import PRECISIONS

SCHEMA = 2
"""2: ``tests`` of the file are the ids, and ``tests`` of an operator indices into them. 1: the number of tests, and ids."""

Cell = Literal["runs", "low", "fp32", "inputs", "some", "none", "unknown", "inapplicable"]
"""What a precision does to an operator; the first four run, the last three of them under autocast."""
_BY_POLICY: dict[AutocastDtype | None, Cell] = {"low": "low", "inputs": "inputs", "fp32": "fp32", None: "runs"}


def cell_of(support: AtenSupport) -> Cell:
    """What a precision does to an operator."""
    if not support.applies:
        return "inapplicable"
    if support.state == "all":
        return _BY_POLICY[support.autocast]
    return support.state or "unknown"


def precision_of(key: str) -> str:
    """The precision that a key of the saved coverage stands for: ``half`` for ``float16``."""
    precision = PRECISIONS.find(key)
    return precision.name if precision else key


class OpUse(Struct, frozen=True, kw_only=True):
    """One operator that tests dispatched."""

    op: str
    """The overload name, ``aten.mm.default``."""
    tests: list[int]
    """The tests that dispatched it: indices into :attr:`Coverage.tests`, in ascending order."""
    numbers: Numbers = "floating"
    """The strongest numbers that any test called it with; see :mod:`lowprec_check.catalog.numbers`."""
    support: dict[str, AtenSupport]
    """By the names in :attr:`Coverage.dtypes`."""
    sources: list[str] = []
    """Only of gaps: the lines of the project that call it, ``src/net.py:41``; else those of the tests."""

    @property
    def worst(self) -> int:
        """0 if it does not run in one of the dtypes, 3 if it runs in all, 4 if none applies."""
        states = [FROM_WORST.index(support.state) for support in self.support.values() if support.applies]
        return min(states, default=len(FROM_WORST))

    @property
    def is_gap(self) -> bool:
        """Whether it fails always or sometimes in one of the dtypes."""
        return self.worst < FROM_WORST.index(None)

    @property
    def failing(self) -> list[str]:
        """The keys of the precisions in which it fails always or sometimes."""
        return [key for key, support in self.support.items() if support.state in ("none", "some")]


class Coverage(Struct, frozen=True, kw_only=True):
    """The operators that a run of a test suite used."""

    schema: int = SCHEMA
    """The version of the format."""
    tool: str = ""
    """The version of lowprec-check that wrote it."""
    device: str
    """The device that support is told for."""
    torch: str
    """The torch release whose support is shown."""
    evidence: str
    """``measured`` or ``declared``."""
    recorded_torch: str
    """The torch version that the tests ran with."""
    dtypes: list[str]
    """What was asked for: the dtype of a cast (``float16``, ``bfloat16``), or autocast (``autocast-fp16``, ``autocast-bf16``)."""
    tests: list[str]
    """The ids of the tests that ran, sorted. Skipped tests are left out."""
    ops: list[OpUse]
    """Every operator that a test dispatched."""

    @property
    def gaps(self) -> list[OpUse]:
        """Operators that fail always or sometimes, the worst first."""
        return sorted((use for use in self.ops if use.is_gap), key=lambda use: (use.worst, use.op))

    @property
    def unknown(self) -> list[OpUse]:
        """Operators without data in the catalog."""
        return [use for use in self.ops if use.worst == FROM_WORST.index(None)]

    def tests_of(self, use: OpUse) -> list[str]:
        """The ids of the tests that dispatched an operator."""
        return [self.tests[index] for index in use.tests]

    def to_json(self) -> bytes:
        """Encode as JSON with one test and one operator per line: short, and diffs show what changed."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("tests", "ops")}
        head = [b"%s: %s" % (_line(name), _line(value)) for name, value in fields.items()]
        lists = [b'"%s": %s' % (name.encode(), _lines(getattr(self, name))) for name in ("tests", "ops")]
        return b"{\n " + b",\n ".join([*head, *lists]) + b"\n}\n"


def _line(value: object) -> bytes:
    return encoded(value, msgspec.json.encode)


def _lines(values: list[object]) -> bytes:
    return b"[\n  " + b",\n  ".join(map(_line, values)) + b"\n ]" if values else b"[]"


class _OldUse(Struct, frozen=True, kw_only=True):
    """An operator in a file with schema 1."""

    op: str
    tests: list[str]
    numbers: Numbers = "floating"
    support: dict[str, AtenSupport]
    sources: list[str] = []


class _OldCoverage(Struct, frozen=True, kw_only=True):
    """A file with schema 1."""

    device: str
    torch: str
    evidence: str
    recorded_torch: str
    dtypes: list[str]
    ops: list[_OldUse]


def indexed(tests: list[str], uses: Mapping[str, Iterable[str]]) -> dict[str, list[int]]:
    """The tests of each operator as indices into the sorted ``tests``."""
    index = {test: at for at, test in enumerate(tests)}
    return {op: sorted(index[test] for test in found) for op, found in uses.items()}


def _upgraded(old: _OldCoverage) -> Coverage:
    """A file with schema 1, which lists only the tests that use an operator; the ``schema`` stays 1 to tell so."""
    tests = sorted({test for use in old.ops for test in use.tests})
    by_op = indexed(tests, {use.op: use.tests for use in old.ops})
    ops = [
        OpUse(op=use.op, tests=by_op[use.op], numbers=use.numbers, support=use.support, sources=use.sources)
        for use in old.ops
    ]
    head = {name: getattr(old, name) for name in old.__struct_fields__ if name != "ops"}
    return Coverage(schema=1, tests=tests, ops=ops, **head)


class _Kind(msgspec.Struct):
    """The keys by which saved files differ."""

    schema: int | None = None
    dtypes: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    ops: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    runs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    findings: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def kind_of(data: bytes) -> Literal["coverage", "scan", "baseline of scan"] | None:
    """What a saved file is; ``None`` if it is none of these."""
    try:
        found = msgspec.json.decode(data, type=_Kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    if found.schema is not None and msgspec.UNSET not in (found.dtypes, found.ops):
        return "coverage"
    if found.runs is not msgspec.UNSET:
        return "scan"
    return "baseline of scan" if found.findings is not msgspec.UNSET else None


def coverage_from_json(data: bytes) -> Coverage:
    """Decode a saved coverage of this schema or an older one; raises ``ValueError`` that says why it cannot be read."""
    kind = kind_of(data)
    if kind is None:
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise ValueError("it is not JSON") from None
        raise ValueError("it lacks the keys of a coverage")
    if kind != "coverage":
        raise ValueError(f"it is a {kind}")
    if msgspec.json.decode(data, type=_Kind).schema == 1:
        return _upgraded(decode(data, _OldCoverage, 1))
    found = decode(data, Coverage, SCHEMA)
    lost = next(
        (use for use in found.ops if use.tests and not 0 <= min(use.tests) <= max(use.tests) < len(found.tests)), None
    )
    if lost is not None:
        raise ValueError(f"{lost.op} names a test that the file does not have")
    wrong = next((use for use in found.ops if not set(found.dtypes) <= use.support.keys()), None)
    if wrong is not None:
        raise ValueError(f"{wrong.op} lacks one of the precisions of the file")
    return found


HINT = "Save one with: pytest --lowprec-coverage half --lowprec-report FILE.json"


def coverage_of(data: bytes, path: Path) -> Coverage:
    """Decode the content of a file; raises :class:`UsageError` that names it and says why it cannot be read."""
    try:
        return coverage_from_json(data)
    except ValueError as error:
        raise UsageError(f"{path} is not a coverage that can be read: {error}.", HINT) from None
