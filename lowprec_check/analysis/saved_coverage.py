"""What is saved of the operators that a test suite uses: read, updated by later runs, compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.catalog.answers import find_fix
from lowprec_check.catalog.aten import FROM_WORST, AtenSupport, AutocastDtype
from lowprec_check.catalog.names import overload_name
from lowprec_check.catalog.records import Numbers, in_samples, stronger
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encoded
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.statements import fill

SCHEMA = 2
"""2: ``tests`` of an operator are indices into those of the file; 1: ids, and a number."""

_Key = TypeVar("_Key")

Cell = Literal["runs", "low", "fp32", "inputs", "some", "none", "unknown", "inapplicable"]
"""What a precision does to an operator; the first four run, three of them under autocast."""
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
    phase: Phase = "forward"
    """``backward``: the formula of its derivative, which fails before it dispatches an operator.
    Derivatives whose formula does not fail are listed as the operators that they dispatch, in the
    phase ``forward``.
    """
    tests: list[int]
    """The tests that dispatched it: indices into :attr:`Coverage.tests`, in ascending order."""
    numbers: Numbers = "floating"
    """The strongest numbers of any call; see :mod:`lowprec_check.catalog.records`."""
    support: dict[str, AtenSupport]
    """By the names in :attr:`Coverage.dtypes`."""
    sources: list[str] = []
    """Only of gaps: the lines of the project that call it, ``src/net.py:41``; else those of the
    tests.
    """

    @property
    def key(self) -> tuple[str, Phase]:
        """What identifies it."""
        return self.op, self.phase

    @property
    def name(self) -> str:
        """As reports name it: ``mm``, ``special_i1 (backward)``."""
        return shown_name(*self.key)

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
    """What was asked for: the dtype of a cast (``float16``, ``bfloat16``), or autocast
    (``autocast-fp16``, ``autocast-bf16``).
    """
    tests: list[str]
    """The ids of the tests that ran, sorted, and of those whose operators are from an earlier run.
    Skipped tests are left out.
    """
    incomplete: dict[str, str] = {}
    """Tests that did not run from the setup of their fixtures to the teardown without a failure, by
    id, and why (``failed``): they may use more operators. Those that were to run but did not (``not
    run``) have no operators, and are not among ``tests``.
    """
    kept: list[str] = []
    """The incomplete tests whose operators are from an earlier run that completed them."""
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

    @property
    def never_complete(self) -> set[str]:
        """Tests of which the operators of no whole run are known."""
        return {*self.incomplete} - {*self.kept}

    def tests_of(self, use: OpUse) -> list[str]:
        """The ids of the tests that dispatched an operator."""
        return [self.tests[index] for index in use.tests]

    def to_json(self) -> bytes:
        """Encode as JSON, a line per test and operator: short, and diffs show changes."""

        def line(value: object) -> bytes:
            return encoded(value, msgspec.json.encode)

        lines = []
        # long lists have an entry on each line, all else is on one
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in ("tests", "kept", "ops") and value:
                text = b"[\n  " + b",\n  ".join(map(line, value)) + b"\n ]"
            elif name == "incomplete" and value:
                pairs = (b"%s: %s" % (line(key), line(why)) for key, why in value.items())
                text = b"{\n  " + b",\n  ".join(pairs) + b"\n }"
            else:
                text = line(value)
            lines.append(b"%s: %s" % (line(name), text))
        return b"{\n " + b",\n ".join(lines) + b"\n}\n"


def shown_name(op: str, phase: Phase) -> str:
    """``mm`` for ``aten.mm.default``, ``special_i1 (backward)`` for its derivative."""
    return overload_name(op) + (" (backward)" if phase == "backward" else "")


def indexed(tests: list[str], uses: Mapping[_Key, Iterable[str]]) -> dict[_Key, list[int]]:
    """The tests of each operator as indices into the sorted ``tests``."""
    index = {test: at for at, test in enumerate(tests)}
    return {op: sorted(index[test] for test in its_tests) for op, its_tests in uses.items()}


def reason_of(support: AtenSupport) -> str:
    """How an operator fails: the kind, the message and on which arguments it depends."""
    if not support.kind:
        return support.message or ""
    return f"{support.kind}: {shorten(support.message or '')}{in_samples(support.condition)}"


# -- A saved coverage, updated with a later run

LookUp = Callable[[OpUse, str], AtenSupport]
"""The support of an operator, for a key of :attr:`Coverage.dtypes`."""


def updated(saved: Coverage, run: Coverage, removed: Collection[str] = (), look_up: LookUp | None = None) -> Coverage:
    """``run``, in which tests that it did not complete have the operators that ``saved`` has of
    them.

    So a test that fails, or does not run, takes no operator from a baseline. Tests that were
    ``removed`` from the suite are left out. ``look_up`` gives the current support of the operators
    of ``saved``; without it, they keep the support that was saved.
    """
    # the tests that this run did not complete, and those of them whose operators are saved
    complete = {*run.tests} - run.incomplete.keys()
    missed = {*saved.tests, *saved.incomplete} - complete - {*removed}
    stay = missed & {*saved.tests}
    before = {use.key: use for use in saved.ops}
    after = {use.key: use for use in run.ops}
    tests_of: dict[tuple[str, Phase], set[str]] = {}
    for use in saved.ops:
        tests_of.setdefault(use.key, set()).update({*saved.tests_of(use)} & stay)
    for use in run.ops:
        tests_of.setdefault(use.key, set()).update({*run.tests_of(use)} - stay)
    # each operator with the worst of what both runs know of it
    uses = []
    for key in sorted(key for key, tests in tests_of.items() if tests):
        was, here = before.get(key), after.get(key)
        # only tests that stay use it in this run: what is saved of them counts
        if here and {*run.tests_of(here)} <= stay:
            here = None
        stays = was is not None and not stay.isdisjoint(saved.tests_of(was))
        one, other = here or was, was if stays and here else None
        assert one is not None
        support = {}
        for dtype in run.dtypes:
            # of the calls of this run, and of those of tests that it did not complete
            cells, then = [here.support[dtype]] if here else [], None
            if was:
                then = was.support.get(dtype, AtenSupport(state=None))
            if was and then and stays:
                cells.append(look_up(was, dtype) if look_up else then)
            # what was known before counts too if a call was tried for it, and none was for what the
            # catalog does not know today: a process that crashes takes its calls with it
            tried = any(cell.tried_here for cell in cells)
            is_open = all(cell.tried_here or cell.state in (None, "some") for cell in cells)
            if then and then.tried_here and (stays or not tried) and is_open:
                cells.append(then)
            support[dtype] = min(cells, key=lambda cell: (not cell.applies, FROM_WORST.index(cell.state)))
        numbers, lines = one.numbers, one.sources
        if other:
            numbers, lines = stronger(numbers, other.numbers), lines or other.sources
        use = msgspec.structs.replace(one, numbers=numbers, support=support)
        uses.append(msgspec.structs.replace(use, sources=lines if use.is_gap else []))
    # indices count the tests of both
    all_tests = sorted(stay | {*run.tests})
    by_key = indexed(all_tests, tests_of)
    never = missed & saved.never_complete
    incomplete = {test: why for test, why in saved.incomplete.items() if test in never} | run.incomplete
    return msgspec.structs.replace(
        run,
        tests=all_tests,
        incomplete=dict(sorted(incomplete.items())),
        kept=sorted((stay & incomplete.keys()) - saved.never_complete),
        ops=[msgspec.structs.replace(use, tests=by_key[use.key]) for use in uses],
    )


HINT = "Save one with: pytest --lowprec-coverage half --lowprec-report FILE.json"


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
        keys = msgspec.json.decode(data, type=_Kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    if keys.schema is not None and msgspec.UNSET not in (keys.dtypes, keys.ops):
        return "coverage"
    if keys.runs is not msgspec.UNSET:
        return "scan"
    return "baseline of scan" if keys.findings is not msgspec.UNSET else None


def coverage_from_json(data: bytes) -> Coverage:
    """Decode a coverage of this schema or an older one; ``ValueError`` says what is wrong."""
    kind = kind_of(data)
    if kind != "coverage":
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise ValueError("it is not JSON") from None
        raise ValueError(f"it is a {kind}" if kind else "it lacks the keys of a coverage")
    if msgspec.json.decode(data, type=_Kind).schema == 1:  # it lists only the tests that use an operator: it stays 1
        # schema 1 has the ids of tests beside each operator
        old = decode(data, _OldCoverage, 1)
        tests = sorted({test for use in old.ops for test in use.tests})
        by_op = indexed(tests, {use.op: use.tests for use in old.ops})
        ops = [OpUse(**{**msgspec.structs.asdict(use), "tests": by_op[use.op]}) for use in old.ops]
        return Coverage(**{**msgspec.structs.asdict(old), "schema": 1, "tests": tests, "ops": ops})
    found = decode(data, Coverage, SCHEMA)
    # a file that was edited by hand may name what it lacks
    for use in found.ops:
        if use.tests and not 0 <= min(use.tests) <= max(use.tests) < len(found.tests):
            raise ValueError(f"{use.op} names a test that the file does not have")
    for use in found.ops:
        if not set(found.dtypes) <= use.support.keys():
            raise ValueError(f"{use.op} lacks one of the precisions of the file")
    return found


def coverage_of(data: bytes, path: Path) -> Coverage:
    """Decode the content of a file; raises :class:`UsageError` that names it."""
    try:
        return coverage_from_json(data)
    except ValueError as error:
        raise UsageError(f"{path} is not a coverage that can be read: {error}.", HINT) from None


# -- The difference of two: gaps, operators and tests that came and went

CellBefore = Literal["unused"] | Cell
"""``unused``: no test used the operator."""
_UNUSED: CellBefore = "unused"
_RANKS: dict[CellBefore, int] = {"none": 2, "some": 1}
"""How bad a cell is; all others are 0."""


class CellChange(Struct, frozen=True, kw_only=True):
    """What a precision does to an operator, in both coverages."""

    old: CellBefore
    """In the old one: a cell such as ``runs``; ``unused`` if no test used the operator."""
    new: CellBefore
    """In the new one."""


class GapChange(Struct, frozen=True, kw_only=True):
    """An operator that became or is no longer a gap, or became a worse or a smaller one."""

    op: str
    """The overload name."""
    phase: Phase = "forward"
    """``backward``: the formula of its derivative."""
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

    @property
    def name(self) -> str:
        """As reports name it."""
        return shown_name(self.op, self.phase)


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
    """The new coverage has complete runs of all tests that used them."""
    first_gaps: list[GapChange] = []
    """Gaps of the new coverage that only tests use of which the old one has no complete run, so
    they may not be new.
    """
    unchecked_gaps: list[GapChange] = []
    """Gaps of the old coverage that the new one lacks, but that a test used of which it has no
    complete run.
    """
    new_ops: list[str] = []
    gone_ops: list[str] = []
    new_tests: list[str] = []
    gone_tests: list[str] = []
    """Tests of the old coverage that did not run for the new one."""
    old_incomplete: dict[str, str] = {}
    """Tests that the run of the old coverage did not complete, and why."""
    new_incomplete: dict[str, str] = {}
    """The same of the new one."""

    @property
    def regressions(self) -> int:
        """The number of operators that are a new or a worse gap."""
        return len(self.new_gaps)


def diff_coverages(old: Coverage, new: Coverage) -> CoverageDiff:
    """Compare two coverages in their common precisions; :class:`UsageError` without any."""
    both = [key for key in new.dtypes if key in old.dtypes]
    if not both:
        sides = " and the new one ".join(", ".join(map(precision_of, side.dtypes)) for side in (old, new))
        problem = f"The old coverage has {sides}: no precision to compare."
        raise UsageError(problem, "Save both for the same precisions.")
    # operators by overload and phase
    before, after = ({use.key: use for use in side.ops} for side in (old, new))
    tests_before, tests_after = set(old.tests), set(new.tests)
    if min(old.schema, new.schema) == 1:  # that lists only the tests that use an operator
        tests_before, tests_after = ({side.tests[n] for use in side.ops for n in use.tests} for side in (old, new))
    # tests of which the new coverage has all operators
    whole = tests_after - new.never_complete
    stable: dict[tuple[str, Phase], list[str]] = {}
    if tests_before - whole:  # a cell that rests on one call of the tests may now rest on that of another test
        stable = {
            use.key: [key for key in both if not (use.support[key].tried_here or was.support[key].tried_here)]
            for use in new.ops
            if (was := before.get(use.key)) and {*new.tests_of(use)} <= {*old.tests_of(was)}
        }
    worse = [_change(before.get(use.key), use, stable.get(use.key, both), new, 1) for use in new.ops]
    better = [_change(use, after.get(use.key), stable.get(use.key, both), old, -1) for use in old.ops]
    # a gap may be old if it rests on a test of which the old coverage has no complete run
    first, missed = [], old.never_complete
    for use, change in zip(new.ops, worse, strict=True):
        if change is None:
            continue
        was = before.get(use.key)
        shows = was and all(use.support[key].tried_here or not was.support[key].applies for key in change.precisions)
        if missed.issuperset(change.tests) or (shows and not missed.isdisjoint(change.tests)):
            first.append(change)
    # it may only seem to be gone if no test made the call that failed
    is_open = {"unused", "inapplicable", "unknown"}
    lost = [change for change in better if change and not whole.issuperset(change.tests)]
    not_run = [change for change in lost if is_open.issuperset(cell.new for cell in change.precisions.values())]
    ops_before, ops_after = ({use.op for use in side.ops} for side in (old, new))
    # the names of fields, in the words of a report; precisions that only one has cannot be compared
    conditions = {"device": "device", "torch of the catalog": "torch"}
    conditions |= {"evidence": "evidence", "torch of the tests": "recorded_torch"}
    values = {what: (getattr(old, name), getattr(new, name)) for what, name in conditions.items()}
    warnings = [f"{what} {was} → {is_now}" for what, (was, is_now) in values.items() if was != is_now]
    for side, which in ((old, "old"), (new, "new")):
        alone = [precision_of(key) for key in side.dtypes if key not in both]
        if alone:
            warnings.append(f"only the {which} one has {', '.join(alone)}")
    return CoverageDiff(
        old=_side(old),
        new=_side(new),
        warnings=warnings,
        dtypes=both,
        new_gaps=sorted(
            (change for change in worse if change and change not in first),
            key=lambda change: (-max(_RANKS[cell.new] for cell in change.precisions.values()), change.op),
        ),
        gone_gaps=[change for change in better if change and change not in not_run],
        first_gaps=first,
        unchecked_gaps=not_run,
        new_ops=sorted(ops_after - ops_before),
        gone_ops=sorted(ops_before - ops_after),
        new_tests=sorted(tests_after - tests_before),
        gone_tests=sorted(tests_before - tests_after),
        old_incomplete=old.incomplete,
        new_incomplete=new.incomplete,
    )


def _change(old: OpUse | None, new: OpUse | None, keys: Sequence[str], side: Coverage, sign: int) -> GapChange | None:
    """Where an operator of ``side`` became a worse (``sign`` 1) or a smaller gap (-1)."""
    use = new if sign > 0 else old
    assert use is not None
    changed: dict[str, CellChange] = {}
    for key in keys:
        was = is_now = _UNUSED
        if old:
            was = cell_of(old.support[key])
        if new:
            is_now = cell_of(new.support[key])
        if sign * (_RANKS.get(is_now, 0) - _RANKS.get(was, 0)) > 0:
            changed[key] = CellChange(old=was, new=is_now)
    if not changed:
        return None
    # the first precision that changed gives the reason
    key = next(iter(changed))
    advised = next((each for each in changed if _is_autocast(each)), key)  # what helps there helps in a cast too
    return GapChange(
        op=use.op,
        phase=use.phase,
        precisions=changed,
        tests=side.tests_of(use),
        sources=use.sources,
        reason=reason_of(use.support[key]),
        fix=fix_of(use, advised, side) if sign > 0 else None,
    )


def _side(found: Coverage) -> CoverageSide:
    alike = {name: getattr(found, name) for name in ("device", "torch", "evidence", "recorded_torch", "dtypes")}
    return CoverageSide(**alike, operators=len(found.ops), gaps=len(found.gaps), tests=len(found.tests))


WITHOUT_KERNEL = "compute it in fp32 and cast real results back, or try autocast"
"""Advice without a model's run, where it is not known whether results are complex."""


def _is_autocast(key: str) -> bool:
    precision = PRECISIONS.find(key)
    return precision is not None and precision.kind == "autocast"


def fix_of(use: OpUse, key: str, found: Coverage) -> str:
    """What to do about a gap, and the release of torch that fixes it, if the catalog knows that."""
    precision, autocast = PRECISIONS.find(key), _is_autocast(key)
    advice = "give it fp32 inputs" if autocast else WITHOUT_KERNEL
    op, phases = use.op, ["forward", "backward"]
    if use.phase == "backward":  # the formula fails, not an operator: the catalog has it by the function
        op, phases = f"torch.{next(iter(use.support[key].shown_by), use.op)}", ["backward"]
    try:
        dtype = precision.format.name if precision else key
        about = {"device": found.device, "dtype": dtype, "torch": found.torch}
        fixes = (find_fix(op, phase=phase, autocast=autocast, **about) for phase in phases)
        return f"{advice}{fill('; {}', next(filter(None, fixes), None))}"
    except UsageError:  # a release or a dtype that this catalog does not have
        return advice
