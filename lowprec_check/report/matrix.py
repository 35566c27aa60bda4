"""The matrix of models, precisions and devices as Markdown, with the ops that most often lack a kernel; and its words."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter

from lowprec_check.analysis.recommend import SMALLER
from lowprec_check.analysis.run_summary import short_op, shorten
from lowprec_check.analysis.speed import TOLD
from lowprec_check.report.escape import visible
from lowprec_check.report.markdown import code, escape, table
from lowprec_check.report.summary import format_count, format_ratio
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow
from lowprec_check.schema.run_key import PLAN

CANNOT_BE_JUDGED = "cannot be judged"
"""The word for a run whose output is all zeros, too small for its format, or holds nothing to compare."""

WORDS = ("ok", "inaccurate", CANNOT_BE_JUDGED, "nonfinite", "error", "crashed", "timeout", "skipped")
"""What a cell is counted and filtered by, from good to bad."""

WEIGHTS = {"unknown": "", "random": "random", "scaled": "scaled random", "loaded": "loaded"}
"""Where the weights of a model come from, in a word."""

_SIGNS = {"ok": "✅", "inaccurate": "⚠️", CANNOT_BE_JUDGED: "❔", "skipped": "⏭️"}
_MOST_OPS = 30


def markdown(matrix: Matrix, title: str = "Compatibility", *, linked: bool = True, note: str = "") -> str:
    """The index page; each model links to ``models/<slug>.md``, unless not ``linked``. ``note`` follows the title."""
    columns, names = precisions(matrix), Names(matrix)
    rows = [_row(row, columns, names, linked) for row in matrix.rows]
    parts = [
        f"# {escape(visible(title))}",
        *([escape(visible(note, 2000))] if note else []),
        *_head(matrix),
        f"{_legend()}{about_predictions(matrix)}",
        _totals(matrix, columns),
    ]
    missing = _missing(matrix)
    if missing:
        parts += ["## Ops without a kernel", table(missing, ["op", "precision", "models"], "llr")]
    parts += [
        "## Models",
        table(rows, [*_FIRST_COLUMNS, *map(escape, columns), "recommended"], "llr" + "l" * (len(columns) + 1)),
    ]
    return "\n\n".join(parts) + "\n"


def precisions(matrix: Matrix) -> list[str]:
    """The columns, each once, in the order of the scans; all plans share one column."""
    return list(dict.fromkeys(visible(column_of(cell)) for row in matrix.rows for cell in row.cells))


def column_of(cell: MatrixCell) -> str:
    """``plan`` of ``plan (half)``; backends have columns of their own."""
    if cell.column is not None:
        return cell.column
    return PLAN if cell.precision.startswith(f"{PLAN} (") else cell.precision


def cells(row: MatrixRow) -> dict[str, MatrixCell]:
    """The cells of a row by their column."""
    return {visible(column_of(cell)): cell for cell in row.cells}


def word(cell: MatrixCell) -> str:
    """The status of a cell in :data:`WORDS`."""
    return CANNOT_BE_JUDGED if cell.degenerate or cell.status == "unjudged" else cell.status


def describe(cell: MatrixCell | None) -> str:
    """``✅ 1.2e-03 · 0.62 ×``, or why it fails; ``➖ 1.2e-03 · predicted``."""
    if cell is None:
        return "–"
    speed = [format_ratio(cell.time)] if cell.time is not None and word(cell) in ("ok", "inaccurate") else []
    why = [visible(cell.degenerate)] if cell.degenerate else []
    predicted = [] if cell.evidence == "measured" else [cell.evidence]
    return " · ".join([outcome(cell), *why, *speed, *predicted])


def outcome(cell: MatrixCell) -> str:
    """``✅ 1.2e-03``: its sign and its error, or why there is none."""
    state = word(cell)
    sign = "➖" if state == "ok" and not _gains(cell) else _SIGNS.get(state, "❌")
    if cell.status == "error" and cell.gaps:
        more = f" +{len(cell.gaps) - 1}" if len(cell.gaps) > 1 else ""
        return visible(f"{sign} no {short_op(cell.gaps[0])}{more}")
    if cell.status == "error" and cell.first_gap:
        return visible(f"{sign} {cell.first_gap_kind}: {short_op(cell.first_gap)}")
    if state not in ("ok", "inaccurate"):
        return f"{sign} {state}"
    return f"{sign} {cell.rel_l2:.1e}" if cell.rel_l2 is not None else f"{sign} ∞"


def recommended(row: MatrixRow) -> str:
    """``half``; with a remark if that run cannot be judged."""
    advice = row.recommended or "fp32"
    runs = (advice, advice.removesuffix(" (predicted)"))
    doubtful = [cell for cell in row.cells if cell.degenerate and cell.precision in runs]
    return visible(f"{advice} ({CANNOT_BE_JUDGED})" if doubtful else advice)


def _gains(cell: MatrixCell) -> bool:
    """Whether it is faster or smaller than fp32."""
    return (cell.time or 1.0) <= 1 / TOLD or (cell.memory or 1.0) <= SMALLER


class Names:
    """The names of rows: the target, the options that not all rows share, and the device if not all rows have the same."""

    def __init__(self, matrix: Matrix) -> None:
        self._common = len(_common_options(matrix))
        self._one_device = len({row.device for row in matrix.rows}) == 1

    def parts(self, row: MatrixRow) -> tuple[str, str]:
        """``timm:vit_tiny``, and what follows it: values of a configuration, options, ``on cuda``."""
        target, comma, values = row.target.partition(",")
        own = [shlex.join(row.options[self._common :])] if row.options[self._common :] else []
        device = [f"on {row.device}"] if row.device and not self._one_device else []
        return visible(target), visible(" ".join([comma + values, *own, *device]))

    def name(self, row: MatrixRow) -> str:
        """Both on one line."""
        target, more = self.parts(row)
        return f"{target}{more}" if more.startswith((",", " ")) or not more else f"{target} {more}"


# -- Markdown


_FIRST_COLUMNS = ("model", "weights", "parameters")


def _row(row: MatrixRow, columns: list[str], names: Names, linked: bool) -> list[str]:
    name = names.name(row)
    if row.state == "failed":
        return [code(name), "", "", *([""] * len(columns)), f"❌ {escape(shorten(visible(row.reason or ''), 160))}"]
    found = cells(row)
    shown = [escape(describe(found.get(column))) for column in columns]
    link = f"[{escape(name)}](models/{row.slug}.md)" if linked else escape(name)
    return [link, WEIGHTS[row.weights], format_count(row.parameters or 0), *shown, escape(recommended(row))]


def _legend() -> str:
    return (
        "✅ passes and is faster or smaller than fp32, with its error and time · ➖ passes · ⚠️ error over tolerance · ❔ cannot be "
        "judged: its output is all zeros, too small for the format, or holds nothing to compare · ❌ fails, with the first op that "
        "has no kernel and the number of further ones, or with another reason · error: relative L2 error of the output against "
        "fp32 · ×: time relative to fp32, timed while other work may have run"
    )


def about_predictions(matrix: Matrix) -> str:
    """What ``predicted`` means in a matrix that has such cells."""
    if all(cell.evidence == "measured" for row in matrix.rows for cell in row.cells):
        return ""
    return " · predicted: emulated on a CPU, nothing ran on that device"


def _head(matrix: Matrix) -> list[str]:
    return ["  \n".join(map(escape, machines(matrix)))] if matrix.rows else ["No models."]


def machines(matrix: Matrix) -> list[str]:
    """Where the models were scanned, and with which options."""
    options = shared_options(matrix)
    return [*map(_machine, _one_of_each(matrix)), *([f"scanned with {options}"] if options else [])]


def _one_of_each(matrix: Matrix) -> list[MatrixRow]:
    found = {_machine(row): row for row in matrix.rows if row.state == "scanned"}
    return list(found.values())


def shared_options(matrix: Matrix) -> str:
    """The ``scan`` options that all rows start with."""
    return visible(shlex.join(_common_options(matrix)))


def _common_options(matrix: Matrix) -> list[str]:
    lists = [row.options for row in matrix.rows]
    common = [words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))]
    following = [words[len(common)] for words in lists if len(words) > len(common)]
    if common and common[-1].startswith("-") and any(not word.startswith("-") for word in following):
        common.pop()  # an option whose value differs
    return common


def _device(row: MatrixRow) -> str:
    return row.cells[0].device if row.cells else ""


def _machine(row: MatrixRow) -> str:
    env = row.environment
    parts = [
        f"torch {env.get('torch', '?')}",
        *(f"{package} {env[package]}" for package in ("torchvision", "timm", "transformers") if package in env),
        f"{_device(row)}: {env.get('device_name', '?')}",
        f"{env.get('threads', '?')} thread{'' if env.get('threads') == '1' else 's'}",
    ]
    return visible(" · ".join(parts))


def _totals(matrix: Matrix, columns: list[str]) -> str:
    rows = []
    for column in columns:
        found = counted(matrix, column)
        rows.append([escape(column), *(str(found[name] or "") for name in WORDS)])
    failed = sum(row.state == "failed" for row in matrix.rows)
    note = f"\n\n{failed} of {len(matrix.rows)} models could not be scanned; their rows show why." if failed else ""
    return table(rows, ["precision", *WORDS], "l" + "r" * len(WORDS)) + note


def counted(matrix: Matrix, column: str) -> Counter[str]:
    """How many cells of a column have each of :data:`WORDS`."""
    return Counter(word(cell) for row in matrix.rows for name, cell in cells(row).items() if name == column)


def missing_ops(matrix: Matrix) -> list[tuple[str, str, int]]:
    """The ops without a kernel in most models, with the precision and the number of models."""
    found = Counter((op, column) for row in matrix.rows for column, cell in cells(row).items() for op in cell.gaps)
    return [(visible(op), column, number) for (op, column), number in found.most_common(_MOST_OPS)]


def _missing(matrix: Matrix) -> list[list[str]]:
    return [[code(op), escape(column), str(number)] for op, column, number in missing_ops(matrix)]
