"""The gaps of a test suite on GitHub: annotations and the summary of the step. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection

from lowprec_check.analysis.coverage_changes import CoverageDiff
from lowprec_check.analysis.run_summary import counted, some
from lowprec_check.analysis.suite_coverage import Coverage, OpUse, precision_of
from lowprec_check.catalog.declared import overload_name
from lowprec_check.report.coverage import head_lines, why, words_of
from lowprec_check.report.coverage_diff import change_lines, verdict_line
from lowprec_check.report.escape import visible, workflow_command
from lowprec_check.report.markdown import code, escape, fitting, fold, table

LONGEST_SUMMARY = 200_000
"""Bytes. GitHub drops the summary of a step of more than 1 MiB, which other commands of the step share, and shows 20 per job."""


def coverage_github(found: Coverage, new: Collection[str] | None = None) -> str:
    """A workflow command of GitHub for each gap, shown in a pull request at the first line that uses it.

    GitHub shows 10 errors and 10 warnings of a step, so the message names further lines. With ``new``, the ops that are new
    gaps, these come first and say so, and others are notices, which have 10 of their own.
    """
    gaps = found.gaps if new is None else sorted(found.gaps, key=lambda use: use.op not in new)
    return "".join(_annotation(use, found, None if new is None else use.op in new) for use in gaps)


def _annotation(use: OpUse, found: Coverage, is_new: bool | None) -> str:
    path, _, line = use.sources[0].rpartition(":")
    level = "notice" if is_new is False else "error" if use.worst == 0 else "warning"
    verb = "does not run" if use.worst == 0 else "does not always run"
    what = f"{overload_name(use.op)} {verb} in {', '.join(map(precision_of, use.failing))} on {found.device}"
    message = f"{why(use)} ({found.evidence}, torch {found.torch}). Used by {counted(len(use.tests), 'test')}"
    message += f"; also at {some(use.sources[1:])}" if len(use.sources) > 1 else ""
    file = path.replace("\\", "/")
    title = f"lowprec: {'new: ' if is_new else ''}{what}"
    return workflow_command(level, message, file=file, line=line, title=title) + "\n"


def step_summary(
    found: Coverage, changes: CoverageDiff | None, head: str | None, longest: int = LONGEST_SUMMARY
) -> str:
    """The summary of a step as Markdown of at most ``longest`` bytes: new gaps, the counts, then the table of all gaps.

    ``head`` is the verdict of the gate. Tests are left out: the report has them.
    """
    parts = ["### Low precision in the tests", *([f"**{escape(visible(head))}**"] if head else [])]
    parts.append("  \n".join(escape(line) for line in head_lines(found)))
    if changes is not None and changes.new_gaps:
        blocks = ["\n".join(_as_item(change_lines(change))) for change in changes.new_gaps]
        parts += _fitting(blocks, longest // 2)
    elif changes is not None:
        parts.append(escape(verdict_line(changes)))
    if found.gaps:
        parts.append(_gap_table(found, longest - _size(parts) - 500))
    return "\n\n".join(parts) + "\n\n"


def _as_item(lines: list[str]) -> list[str]:
    """An item of a list; what follows the first line is indented."""
    first, *rest = (escape(visible(line)) for line in lines)
    return [f"- **{first}**", *(f"  <br>{line}" for line in rest)]


def _fitting(blocks: list[str], room: int) -> list[str]:
    """The list of the blocks that fit, and how many did not."""
    kept = fitting((_size([block]) for block in blocks), room)
    more = [f"*{len(blocks) - kept} more are not shown; the report has all.*"] if kept < len(blocks) else []
    return ["\n".join(blocks[:kept]), *more]


def _gap_table(found: Coverage, room: int) -> str:
    """The folded table of all gaps with as many rows as fit."""
    heads = ["operator", *map(precision_of, found.dtypes), "tests", "line", "why"]
    rows = [
        [
            code(overload_name(use.op)),
            *(words_of(use, key) for key in found.dtypes),
            f"{len(use.tests):,}",
            code(use.sources[0]) if use.sources else "",
            escape(visible(why(use))),
        ]
        for use in found.gaps
    ]
    kept = len(rows)
    align = "l" * (1 + len(found.dtypes)) + "rll"
    while kept and _size([table(rows[:kept], heads, align)]) > room:
        kept //= 2
    more = f"\n\n*{len(rows) - kept} more are not shown; the report has all.*" if kept < len(rows) else ""
    return fold(f"All {counted(len(rows), 'gap')}", table(rows[:kept], heads, align) + more)


def _size(parts: list[str]) -> int:
    return sum(len(part.encode()) + 2 for part in parts)
