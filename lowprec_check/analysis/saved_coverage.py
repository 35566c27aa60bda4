"""What is saved of the operators that a test suite uses, and that updated with a later run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.catalog.aten import FROM_WORST, AtenSupport, AutocastDtype
from lowprec_check.catalog.names import overload_name
from lowprec_check.catalog.records import Numbers, in_samples, stronger
from lowprec_check.schema.base import Struct, encoded
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import Phase

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
