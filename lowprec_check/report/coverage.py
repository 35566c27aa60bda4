"""The operators that a test suite uses, their low-precision support, and how it changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from lowprec_check.analysis.saved_coverage import (
    Cell,
    CellBefore,
    CellChange,
    Coverage,
    CoverageDiff,
    GapChange,
    OpUse,
    cell_of,
    precision_of,
    reason_of,
)
from lowprec_check.catalog.names import overload_name
from lowprec_check.report.blocks import Block, Column, Document, Fold, Heading, Row, Say, Table
from lowprec_check.report.diff import compared
from lowprec_check.report.foreign_text import workflow_command
from lowprec_check.report.layout.html import html
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.statements import agree, counted, fill, some

WIDTH = 110
LONGEST_SUMMARY = 200_000
"""Bytes. GitHub drops the summary of a step over 1 MiB, which all its commands share."""

_TITLE = "Low precision in the tests"
_SHOWN = 40
"""Changes that are shown."""
_SHOWN_TESTS = 3
_SHOWN_NAMES = 8
_CELLS: dict[Cell, tuple[str, str]] = {
    "runs": ("yes", "run"),
    "low": ("in {dtype}", "run in 16 bits"),
    "fp32": ("in fp32", "run in fp32"),
    "inputs": ("as its inputs", "run as their inputs"),
    "some": ("in part", "run in part"),
    "none": ("no", "do not run"),
    "unknown": ("not known", "not known"),
    "inapplicable": ("does not apply", "does not apply"),
}
"""What is said of one operator, and above the number of them."""
_CHANGES: dict[CellBefore, tuple[str, str]] = {
    "none": ("does not run in {}", "did not run before"),
    "some": ("does not always run in {}", "ran in part before"),
    "unused": ("no longer used", "not used before"),
    "unknown": ("no longer known to fail in {}", "not known before"),
    "inapplicable": ("{} no longer applies", "did not apply before"),
}
"""What is said of one that changed, now and before; the others run."""


# -- one coverage


def coverage_document(found: Coverage) -> Document:
    """Counts, operators (a terminal shows those with gaps), and the tests that use each gap."""
    blocks = [Say(_TITLE, role="title", detail="more"), *_head(found)]
    uses = sorted(found.ops, key=lambda use: (use.worst, use.op))
    blocks += [Heading("Operators"), _uses(found, uses, "operators")]
    blocks.append(Heading("Tests that use them"))
    for use in found.gaps:
        tests = [Row([test]) for test in found.tests_of(use)]
        listed = Table([Column("test")], tests, f"tests that use {use.name}", most=_SHOWN_TESTS)
        blocks.append(Fold(f"{use.name}: used by {counted(len(tests), 'test')}", [listed]))
    blocks.append(Heading("What was left out"))
    blocks += _incomplete(found)
    if found.unknown:
        blocks.append(Say(f"Not known to the catalog: {some([use.name for use in found.unknown], 8)}"))
    # precisions that do not apply, such as to complex numbers: operators by precisions and reason
    without: dict[tuple[str, str], list[str]] = {}
    for use in found.ops:
        reasons: dict[str, list[str]] = {}
        for key, support in use.support.items():
            if not support.applies:
                reasons.setdefault(support.message or "", []).append(precision_of(key))
        for reason, names in reasons.items():
            without.setdefault((", ".join(names), reason), []).append(use.name)
    for (precisions, reason), ops in without.items():
        verb = "do" if "," in precisions else "does"
        blocks.append(Say(f"{precisions} {verb} not apply to {some(ops, _SHOWN_NAMES)}: {reason}"))
    return Document(_TITLE, blocks, found.tool)


def _head(found: Coverage) -> Iterator[Block]:
    """What was recorded and looked up, and the counts of each precision."""
    used = f"{counted(len(found.ops), 'operator')} in {counted(len(found.tests), 'test')}"
    yield Say(f"{used} · {found.device}, torch {found.torch}, {found.evidence}")
    if not found.recorded_torch.startswith(f"{found.torch}."):
        yield Say(f"The tests ran with torch {found.recorded_torch}, which the catalog lacks for this device.")
    counts = {key: Counter(cell_of(use.support[key]) for use in found.ops) for key in found.dtypes}
    # gaps are counted even if there are none
    kinds = [cell for cell in _CELLS if cell in ("some", "none") or any(cells[cell] for cells in counts.values())]
    columns = [Column("precision", "run"), *(Column(_CELLS[cell][1], "number") for cell in kinds)]
    rows = [Row([precision_of(key), *(counts[key][cell] for cell in kinds)]) for key in found.dtypes]
    yield Table(columns, rows, "operators by precision")


def _incomplete(found: Coverage) -> Iterator[Block]:
    """The tests that the run did not complete, by reason."""
    reasons: dict[str, list[str]] = {}
    for test, why in found.incomplete.items():
        reasons.setdefault(why, []).append(test)
    if reasons:
        number = len(found.incomplete)
        yield Say(f"{counted(number, 'test')} {agree(number, 'is', 'are')} incomplete, and may use more operators:")
    for why, tests in reasons.items():
        yield Say(f"{why}: {some(tests, _SHOWN_NAMES)}", role="item")


def _uses(found: Coverage, uses: Sequence[OpUse], name: str) -> Table:
    """A row per operator; those with gaps are shown."""
    most = len(found.gaps)
    columns = [
        Column("operator", "op"),
        *(Column(precision_of(key)) for key in found.dtypes),
        Column("tests", "number"),
        Column("line", "source"),
        Column("why", "sentence"),
    ]
    rows = []
    for use in uses:
        words = []
        for key in found.dtypes:
            support, precision, on = use.support[key], PRECISIONS.find(key), ""
            low, cell = precision.format.short if precision else key, cell_of(support)
            # an op that fails under autocast got 16-bit inputs
            if cell in ("some", "none") and key.startswith("autocast"):
                on = f" on {low} inputs"
            words.append(f"{_CELLS[cell][0].format(dtype=low)}{on}{fill(', from torch {}', support.fixed_in)}")
        line = next(iter(use.sources), None)
        rows.append(Row([use.name, *words, len(use.tests), line, why(use)]))
    return Table(columns, rows, name, searchable=True, most=most, detail="first" if most else "more")


def why(use: OpUse) -> str:
    """How it fails in the first failing dtype; else why a dtype does not apply or is unknown."""
    failing = [support for support in use.support.values() if support.state in ("none", "some")]
    if failing:
        return reason_of(failing[0])
    return "; ".join(dict.fromkeys(support.message for support in use.support.values() if support.message))


# -- the difference of two


def coverage_diff_document(found: CoverageDiff) -> Document:
    """The verdict, what was compared, the gaps, operators and tests that came and went."""
    sides = []
    for name, side in (("old", found.old), ("new", found.new)):
        used = f"{counted(side.operators, 'operator')}, {counted(side.gaps, 'gap')}, {counted(side.tests, 'test')}"
        precisions = ", ".join(map(precision_of, side.dtypes))
        sides.append((name, f"{precisions} on {side.device}, torch {side.torch}, {side.evidence}, {used}"))
    head = verdict(found)
    blocks = list(compared(head, bool(found.regressions), sides, found.warnings, "coverages were recorded"))
    for title, changes in (("New gaps", found.new_gaps), ("Gaps that are gone", found.gone_gaps)):
        if changes:
            blocks += [Heading(title), *change_blocks(changes)]
    incomplete = (
        [f"{test} ({why})" for test, why in tests.items()] for tests in (found.old_incomplete, found.new_incomplete)
    )
    for title, names in (
        ("Gaps of tests without a complete run in the old one", [change.name for change in found.first_gaps]),
        ("Gaps of tests without a complete run in the new one", [change.name for change in found.unchecked_gaps]),
        ("Operators only in the new one", [*map(overload_name, found.new_ops)]),
        ("Operators only in the old one", [*map(overload_name, found.gone_ops)]),
        ("Tests only in the new one", found.new_tests),
        ("Tests only in the old one", found.gone_tests),
        *zip(("Tests incomplete in the old one", "Tests incomplete in the new one"), incomplete, strict=True),
    ):
        listed = Table([Column("name")], [Row([name]) for name in names], title, most=_SHOWN_NAMES)
        if names:
            blocks.append(Fold(f"{title} ({len(names):,})", [listed]))
    return Document(f"{head} · low precision in the tests", blocks)


def change_blocks(changes: Sequence[GapChange]) -> list[Block]:
    """What changed of each gap; below a new one its lines, reason, advice and tests."""
    blocks: list[Block] = []
    for change in changes[:_SHOWN]:
        precisions: dict[CellChange, list[str]] = {}
        for key, cell in change.precisions.items():
            precisions.setdefault(cell, []).append(precision_of(key))
        parts = []
        for cell, names in precisions.items():
            now = _CHANGES.get(cell.new, ("runs in {}",))[0].format(", ".join(names))
            before = _CHANGES.get(cell.old, ("", "ran before"))[1]
            if cell.new != "unused":
                now = f"{now} ({before})"
            parts.append(now)
        title = f"{change.name}: {'; '.join(parts)}"
        if change.fix is None:
            blocks.append(Say(title, role="item"))
            continue
        lines = [f"at {some(change.sources)}"] if change.sources else []
        lines += [change.reason, f"→ {change.fix}", f"used by {some(change.tests)}"]
        blocks.append(Fold(title, [Say(line, role="item") for line in lines], open=True))
    more = len(changes) - _SHOWN
    if more > 0:
        return [*blocks, Say(f"{more:,} more are not shown; a JSON report has all.")]
    return blocks


def verdict(found: CoverageDiff) -> str:
    """The number of new gaps, and of those that are gone."""
    new = "No new gap"
    if found.new_gaps:
        new = counted(len(found.new_gaps), "new gap")
    if found.gone_gaps:
        return f"{new}, {counted(len(found.gone_gaps), 'gap')} gone"
    return new


# -- GitHub


def coverage_github(found: Coverage, new: Collection[str] | None = None) -> str:
    """A workflow command of GitHub for each gap, shown in a pull request at the first line that
    uses it.

    GitHub shows 10 errors and 10 warnings of a step, so the message names further lines. With
    ``new``, the ops that are new gaps, these come first and say so, and others are notices, which
    have 10 of their own.
    """
    gaps = sorted(found.gaps, key=lambda use: use.name not in (new or ()))
    commands = []
    for use in gaps:
        # an annotation needs one line: the first that uses the op
        path, _, line = use.sources[0].rpartition(":")
        is_new = new is not None and use.name in new
        states = {state: [key for key in use.failing if use.support[key].state == state] for state in ("none", "some")}
        fails = {"none": "does not run", "some": "does not always run"}
        parts = [f"{fails[state]} in {', '.join(map(precision_of, keys))}" for state, keys in states.items() if keys]
        if new is not None and not is_new:
            level = "notice"
        elif states["none"]:
            level = "error"
        else:
            level = "warning"
        title = f"lowprec: {'new: ' * is_new}{use.name} {', '.join(parts)} on {found.device}"
        message = f"{why(use)} ({found.evidence}, torch {found.torch}). Used by {counted(len(use.tests), 'test')}"
        message += fill("; also at {}", some(use.sources[1:]))
        commands.append(workflow_command(level, message, file=path.replace("\\", "/"), line=line, title=title) + "\n")
    return "".join(commands)


def step_summary(
    found: Coverage, changes: CoverageDiff | None, head: str | None, longest: int = LONGEST_SUMMARY
) -> str:
    """The summary of a step as Markdown of at most ``longest`` bytes: new gaps, the counts, then
    the table of all gaps.

    ``head`` is the verdict of the gate. Tests are left out: the report has them.
    """
    blocks: list[Block] = [Heading(_TITLE)]
    if head:
        blocks.append(Say(head, role="note"))
    blocks += _head(found)
    if changes is not None:
        blocks += change_blocks(changes.new_gaps) or [Say(verdict(changes))]
    blocks += _incomplete(found)
    if found.gaps:
        gaps = _uses(found, found.gaps, "gaps")
        blocks.append(Fold(f"All {counted(len(found.gaps), 'gap')}", [gaps]))
    # Markdown limits characters, GitHub bytes
    document, most = Document(_TITLE, blocks), longest
    while len((text := f"{markdown(document, most)}\n").encode()) > longest and most:
        most = most * 2 // 3
    return text


RENDERERS: dict[str, Callable[[Coverage], str]] = {
    ".json": lambda found: found.to_json().decode(),
    ".md": lambda found: markdown(coverage_document(found)),
    ".html": lambda found: html(coverage_document(found)),
}
"""By the suffix of the file."""
