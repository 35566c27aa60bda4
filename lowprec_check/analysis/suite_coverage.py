"""The operators that a test suite uses and their support in low precision: what is saved, how it is read, and two compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.catalog.answers import find_fix
from lowprec_check.catalog.aten import FROM_WORST, AtenSupport, AutocastDtype
from lowprec_check.catalog.records import Numbers, in_samples
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encoded
from lowprec_check.schema.precisions import PRECISIONS

SCHEMA = 2
"""2: ``tests`` of the file are the ids, and ``tests`` of an operator indices into them. 1: the number of tests, and ids."""

HINT = "Save one with: pytest --lowprec-coverage half --lowprec-report FILE.json"

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
    """The strongest numbers that any test called it with; see :mod:`lowprec_check.catalog.records`."""
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

        def line(value: object) -> bytes:
            return encoded(value, msgspec.json.encode)

        heads = (name for name in self.__struct_fields__ if name not in ("tests", "ops"))
        lines = [b"%s: %s" % (line(name), line(getattr(self, name))) for name in heads]
        for name in ("tests", "ops"):
            values = b",\n  ".join(map(line, getattr(self, name)))
            lines.append(b'"%s": %s' % (name.encode(), b"[\n  " + values + b"\n ]" if values else b"[]"))
        return b"{\n " + b",\n ".join(lines) + b"\n}\n"


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
    if kind != "coverage":
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise ValueError("it is not JSON") from None
        raise ValueError(f"it is a {kind}" if kind else "it lacks the keys of a coverage")
    if msgspec.json.decode(data, type=_Kind).schema == 1:  # it lists only the tests that use an operator: it stays 1
        old = decode(data, _OldCoverage, 1)
        tests = sorted({test for use in old.ops for test in use.tests})
        by_op = indexed(tests, {use.op: use.tests for use in old.ops})
        ops = [OpUse(**{**msgspec.structs.asdict(use), "tests": by_op[use.op]}) for use in old.ops]
        return Coverage(**{**msgspec.structs.asdict(old), "schema": 1, "tests": tests, "ops": ops})
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


def coverage_of(data: bytes, path: Path) -> Coverage:
    """Decode the content of a file; raises :class:`UsageError` that names it and says why it cannot be read."""
    try:
        return coverage_from_json(data)
    except ValueError as error:
        raise UsageError(f"{path} is not a coverage that can be read: {error}.", HINT) from None


# -- The difference of two: gaps, operators and tests that came and went

CellBefore = Literal["unused"] | Cell
"""``unused``: no test used the operator."""
_RANKS: dict[CellBefore, int] = {"none": 2, "some": 1}
"""How bad a cell is; all others are 0."""


class CellChange(Struct, frozen=True, kw_only=True):
    """What a precision does to an operator, in both coverages."""

    old: CellBefore
    """In the old one: a cell such as ``runs`` or ``none``; ``unused`` if no test used the operator."""
    new: CellBefore
    """In the new one."""


class GapChange(Struct, frozen=True, kw_only=True):
    """An operator that became or is no longer a gap, or became a worse or a smaller one."""

    op: str
    """The overload name."""
    precisions: dict[str, CellChange]
    """Only those that changed."""
    tests: list[str]
    """The tests that use it; of an operator that no test uses any more, those that did."""
    sources: list[str]
    """The lines that call it."""
    reason: str
    """How it fails, or failed."""
    fix: str | None = None
    """What to do; only of new gaps."""


class CoverageSide(Struct, frozen=True, kw_only=True):
    """Where one of the two comes from."""

    device: str
    torch: str
    evidence: str
    recorded_torch: str
    dtypes: list[str]
    operators: int
    gaps: int
    tests: int


class CoverageDiff(Struct, frozen=True, kw_only=True):
    """All differences; ``warnings`` lists the conditions that differ."""

    schema: int = 1
    old: CoverageSide
    new: CoverageSide
    warnings: list[str] = []
    dtypes: list[str]
    """The precisions that both have."""
    new_gaps: list[GapChange] = []
    gone_gaps: list[GapChange] = []
    new_ops: list[str] = []
    gone_ops: list[str] = []
    new_tests: list[str] = []
    gone_tests: list[str] = []
    """Tests of the old coverage that did not run for the new one."""

    @property
    def regressions(self) -> int:
        """The number of operators that are a new or a worse gap."""
        return len(self.new_gaps)


def diff_coverages(old: Coverage, new: Coverage) -> CoverageDiff:
    """Compare two coverages in the precisions that both have; raises :class:`UsageError` if there are none."""
    both = [key for key in new.dtypes if key in old.dtypes]
    if not both:
        sides = " and the new one ".join(", ".join(map(precision_of, side.dtypes)) for side in (old, new))
        raise UsageError(
            f"The old coverage has {sides}: no precision to compare.", "Save both for the same precisions."
        )
    before, after = ({use.op: use for use in side.ops} for side in (old, new))
    tests_before, tests_after = set(old.tests), set(new.tests)
    if min(old.schema, new.schema) == 1:  # that lists only the tests that use an operator
        tests_before, tests_after = ({side.tests[n] for use in side.ops for n in use.tests} for side in (old, new))
    stable: dict[str, list[str]] = {}
    if tests_before - tests_after:  # a cell that rests on one call of the tests may now rest on that of another test
        stable = {
            use.op: [key for key in both if not (use.support[key].tried_here or was.support[key].tried_here)]
            for use in new.ops
            if (was := before.get(use.op)) and {*new.tests_of(use)} <= {*old.tests_of(was)}
        }
    worse = [_change(before.get(use.op), use, stable.get(use.op, both), new, 1) for use in new.ops]
    better = [_change(use, after.get(use.op), stable.get(use.op, both), old, -1) for use in old.ops]
    return CoverageDiff(
        old=_side(old),
        new=_side(new),
        warnings=list(_warnings(old, new)),
        dtypes=both,
        new_gaps=sorted(
            filter(None, worse),
            key=lambda change: (-max(_RANKS[cell.new] for cell in change.precisions.values()), change.op),
        ),
        gone_gaps=[change for change in better if change],
        new_ops=sorted(after.keys() - before.keys()),
        gone_ops=sorted(before.keys() - after.keys()),
        new_tests=sorted(tests_after - tests_before),
        gone_tests=sorted(tests_before - tests_after),
    )


def _change(old: OpUse | None, new: OpUse | None, keys: Sequence[str], side: Coverage, sign: int) -> GapChange | None:
    """The precisions in which an operator of ``side`` is a worse (``sign`` 1) or a smaller (-1) gap than before."""
    use = new if sign > 0 else old
    assert use is not None
    changed: dict[str, CellChange] = {}
    for key in keys:
        was: CellBefore = cell_of(old.support[key]) if old else "unused"
        is_now: CellBefore = cell_of(new.support[key]) if new else "unused"
        if sign * (_RANKS.get(is_now, 0) - _RANKS.get(was, 0)) > 0:
            changed[key] = CellChange(old=was, new=is_now)
    if not changed:
        return None
    key = next(iter(changed))
    return GapChange(
        op=use.op,
        precisions=changed,
        tests=side.tests_of(use),
        sources=use.sources,
        reason=reason_of(use.support[key]),
        fix=fix_of(use.op, key, side) if sign > 0 else None,
    )


def _side(found: Coverage) -> CoverageSide:
    return CoverageSide(
        device=found.device,
        torch=found.torch,
        evidence=found.evidence,
        recorded_torch=found.recorded_torch,
        dtypes=found.dtypes,
        operators=len(found.ops),
        gaps=len(found.gaps),
        tests=len(found.tests),
    )


def _warnings(old: Coverage, new: Coverage) -> Iterator[str]:
    for what, name in (
        ("device", "device"),
        ("torch of the catalog", "torch"),
        ("evidence", "evidence"),
        ("torch of the tests", "recorded_torch"),
    ):
        if getattr(old, name) != getattr(new, name):
            yield f"{what} {getattr(old, name)} → {getattr(new, name)}"
    for side, other, which in ((old, new, "old"), (new, old, "new")):
        alone = [precision_of(key) for key in side.dtypes if key not in other.dtypes]
        if alone:
            yield f"only the {which} one has {', '.join(alone)}"


def reason_of(support: AtenSupport) -> str:
    """How an operator fails: the kind, the message and on which arguments it depends."""
    failure = f"{support.kind}: {shorten(support.message or '')}{in_samples(support.condition)}"
    return failure if support.kind else support.message or ""


def fix_of(op: str, key: str, found: Coverage) -> str:
    """What to do about a gap, and the release of torch that fixes it, if the catalog knows that."""
    precision = PRECISIONS.find(key)
    autocast = precision is not None and precision.kind == "autocast"
    advice = "give it fp32 inputs" if autocast else "compute it in fp32 and cast back, or try autocast"
    try:
        dtype = precision.format.name if precision else key
        fixes = (
            find_fix(op, device=found.device, dtype=dtype, torch=found.torch, phase=phase, autocast=autocast)
            for phase in ("forward", "backward")
        )
        fix = next(filter(None, fixes), None)
    except UsageError:  # a release or a dtype that this catalog does not have
        return advice
    return f"{advice}; {fix}" if fix else advice
