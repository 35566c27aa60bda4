"""The difference of two coverages of a test suite: gaps, operators and tests that came and went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.analysis.suite_coverage import Cell, Coverage, OpUse, cell_of, precision_of
from lowprec_check.catalog.aten import AtenSupport
from lowprec_check.catalog.fixes import find_fix
from lowprec_check.catalog.records import in_samples
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct
from lowprec_check.schema.precisions import PRECISIONS

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
    tests_before, tests_after = _tests(old, new)
    stable = _stable_keys(old, new) if tests_before - tests_after else {}
    worse = [_change(before.get(use.op), use, stable.get(use.op, both), new, 1) for use in new.ops]
    better = [_change(use, after.get(use.op), stable.get(use.op, both), old, -1) for use in old.ops]
    return CoverageDiff(
        old=_side(old),
        new=_side(new),
        warnings=_warnings(old, new),
        dtypes=both,
        new_gaps=sorted(filter(None, worse), key=_worst_first),
        gone_gaps=[change for change in better if change],
        new_ops=sorted(after.keys() - before.keys()),
        gone_ops=sorted(before.keys() - after.keys()),
        new_tests=sorted(tests_after - tests_before),
        gone_tests=sorted(tests_before - tests_after),
    )


def _stable_keys(old: Coverage, new: Coverage) -> dict[str, list[str]]:
    """For each op that tests of both use, and no new test, the precisions to compare although tests of the old one did not run.

    A cell that rests on one call of the tests may rest on another call then, of a test that did not change.
    """
    before, stable = {use.op: use for use in old.ops}, {}
    for use in new.ops:
        other = before.get(use.op)
        if other is not None and {*new.tests_of(use)} <= {*old.tests_of(other)}:
            both = [key for key in new.dtypes if key in old.dtypes]
            tried = {key for key in both if use.support[key].tried_here or other.support[key].tried_here}
            stable[use.op] = [key for key in both if key not in tried]
    return stable


def _change(old: OpUse | None, new: OpUse | None, keys: Sequence[str], side: Coverage, sign: int) -> GapChange | None:
    """The precisions in which an operator of ``side`` is a worse (``sign`` 1) or a smaller (-1) gap than before."""
    use = new if sign > 0 else old
    assert use is not None
    cells = {key: CellChange(old=_cell(old, key), new=_cell(new, key)) for key in keys}
    changed = {
        key: cell for key, cell in cells.items() if sign * (_RANKS.get(cell.new, 0) - _RANKS.get(cell.old, 0)) > 0
    }
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


def _cell(use: OpUse | None, key: str) -> CellBefore:
    return cell_of(use.support[key]) if use else "unused"


def _worst_first(change: GapChange) -> tuple[int, str]:
    return -max(_RANKS[cell.new] for cell in change.precisions.values()), change.op


def _tests(old: Coverage, new: Coverage) -> tuple[set[str], set[str]]:
    """The tests of both; if one has schema 1, which lists no others, only those that use an operator."""
    if min(old.schema, new.schema) > 1:
        return set(old.tests), set(new.tests)
    used = [{side.tests[index] for use in side.ops for index in use.tests} for side in (old, new)]
    return used[0], used[1]


_CONDITIONS = {
    "device": "device",
    "torch": "torch of the catalog",
    "evidence": "evidence",
    "recorded_torch": "torch of the tests",
}
"""By field, what warnings call it."""


def _side(found: Coverage) -> CoverageSide:
    given: dict[str, Any] = {name: getattr(found, name) for name in (*_CONDITIONS, "dtypes")}
    return CoverageSide(**given, operators=len(found.ops), gaps=len(found.gaps), tests=len(found.tests))


def _warnings(old: Coverage, new: Coverage) -> list[str]:
    """The conditions that differ, each as a short text."""
    sides = [(what, getattr(old, name), getattr(new, name)) for name, what in _CONDITIONS.items()]
    found = [f"{what} {before} → {after}" for what, before, after in sides if before != after]
    for side, other, name in ((old, new, "old"), (new, old, "new")):
        alone = [precision_of(key) for key in side.dtypes if key not in other.dtypes]
        found += [f"only the {name} one has {', '.join(alone)}"] if alone else []
    return found


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
