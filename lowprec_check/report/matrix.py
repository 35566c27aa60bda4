"""The matrix of models, precisions and devices as blocks, with the ops that most often lack a kernel."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Iterator

from lowprec_check.report.blocks import (
    Block,
    Column,
    Document,
    Heading,
    Link,
    Row,
    Say,
    StatusOf,
    Table,
    cell_text,
    speed_of,
)
from lowprec_check.report.layout.html import html
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow
from lowprec_check.schema.run_key import PLAN
from lowprec_check.schema.statements import counted, short_op
from lowprec_check.schema.verdict import LOOKS, look

WEIGHTS = {"unknown": None, "random": "random", "scaled": "scaled random", "loaded": "loaded"}
"""Where the weights of a model come from, in a word."""

_MOST_OPS = 30
_HOW_TO_READ = (
    "A run that passes or is inaccurate shows the error of its output against fp32 (relative L2) and its speed against fp32, "
    "timed while other work may have run; one that fails its first op without a kernel and the number of further ones."
)
_PREDICTED = "Predicted: emulated on a CPU, nothing ran on that device."


def matrix_document(
    matrix: Matrix, title: str = "Compatibility", *, pages: str | None = ".md", note: str = ""
) -> Document:
    """The index: totals, a row per model, and on a page a row per run.

    Each model links to ``models/<slug>`` with the suffix ``pages``, unless that is ``None``. ``note`` follows the title.
    """
    columns, names = precisions(matrix), _Names(matrix)
    scanned = [row for row in matrix.rows if row.state == "scanned"]
    failed = [row for row in matrix.rows if row.state == "failed"]
    cells = [cell for row in scanned for cell in row.cells]
    missed = f"; {len(failed)} could not be" if failed else ""
    blocks: list[Block] = [Say(title, role="title"), *([Say(note, role="note")] if note else [])]
    blocks += [Say(f"{counted(len(scanned), 'model')} scanned{missed}."), *_totals(cells, columns)]
    blocks += [Say(line, role="hint") for line in _machines(matrix)]
    missing = Counter((op, column_of(cell)) for cell in cells for op in dict.fromkeys(cell.gaps))
    blocks += (
        [
            Heading("Ops without a kernel"),
            Table(
                [Column("op", "op"), Column("precision", "run"), Column("models", "number")],
                [Row([*found, number]) for found, number in missing.most_common(_MOST_OPS)],
                "ops without a kernel",
            ),
        ]
        if missing
        else []
    )
    if scanned:
        predicted = [_PREDICTED] if any(cell.evidence == "predicted" for cell in cells) else []
        blocks += [Heading("Models"), Say(" ".join([_HOW_TO_READ, *predicted]), role="hint")]
        blocks.append(_models(scanned, columns, names, pages))
        blocks += [Heading("Runs", detail="all"), _runs(scanned, names)]
    if failed:
        rows = [Row([names.of(row), row.reason or ""]) for row in failed]
        columns_of_failed = [Column("model"), Column("why it could not be scanned", "sentence")]
        blocks += [Heading("Not scanned"), Table(columns_of_failed, rows, "models that could not be scanned")]
    tool = next((found for row in matrix.rows if (found := row.made_with.get("tool"))), "")
    return Document(title, blocks, f"lowprec-check {tool}".strip())


def matrix_page(document: Document, suffix: str) -> str:
    """The index as a file, in full: ``.md`` or ``.html``."""
    return markdown(document, sys.maxsize) if suffix == ".md" else html(document)


def precisions(matrix: Matrix) -> list[str]:
    """The columns, each once, in the order of the scans; all plans share one column."""
    return list(dict.fromkeys(column_of(cell) for row in matrix.rows for cell in row.cells))


def column_of(cell: MatrixCell) -> str:
    """``plan`` of ``plan (half)``; backends have columns of their own."""
    if cell.column is not None:
        return cell.column
    return PLAN if cell.precision.startswith(f"{PLAN} (") else cell.precision


def status_of(cell: MatrixCell) -> str:
    """Its status; ``unjudged`` too if its output tells nothing."""
    return "unjudged" if cell.degenerate else cell.status


def _totals(cells: list[MatrixCell], columns: list[str]) -> Iterator[Block]:
    counts = {column: Counter(status_of(cell) for cell in cells if column_of(cell) == column) for column in columns}
    shown = [status for status in LOOKS if any(count[status] for count in counts.values())]
    if shown:
        heads = [Column("precision", "run"), *(Column(look(one).word, "number", look(one).meaning) for one in shown)]
        yield Table(heads, [Row([column, *(counts[column][one] for one in shown)]) for column in columns], "totals")


def _models(rows: list[MatrixRow], columns: list[str], names: _Names, pages: str | None) -> Table:
    heads = [Column("model", "text" if pages is None else "link"), Column("recommended", "run"), Column("weights")]
    heads += [Column("parameters", "number"), *(Column(column, "status") for column in columns)]
    shown = []
    for row in rows:
        name, cells = names.of(row), {column_of(cell): cell for cell in row.cells}
        model = name if pages is None else Link(name, f"models/{row.slug}{pages}")
        found = [_outcome(cells[column]) if column in cells else None for column in columns]
        shown.append(Row([model, _recommended(row), WEIGHTS[row.weights], row.parameters, *found]))
    return Table(heads, shown, "models", searchable=True)


def _outcome(cell: MatrixCell) -> StatusOf:
    """``1.2e-03 · 1.8 × as fast``, or why there is no error; ``1.2e-03 · predicted``."""
    status, what = status_of(cell), why(cell)
    parts = [what or look(status).word]
    if status in ("ok", "inaccurate"):
        speed = [cell_text(speed_of(1 / cell.time), "speed")] if cell.time else []
        parts = [cell_text(cell.rel_l2, "error") if cell.rel_l2 is not None else "infinite", *speed]
    return StatusOf(status, " · ".join([*parts, *([] if cell.evidence == "measured" else [cell.evidence])]))


def why(cell: MatrixCell) -> str | None:
    """Why a run fails or cannot be judged, if more than its status is known: ``no linalg_cholesky_ex +1``."""
    if cell.status == "error" and cell.gaps:
        return f"no {short_op(cell.gaps[0])}{f' +{len(cell.gaps) - 1}' if len(cell.gaps) > 1 else ''}"
    if cell.status == "error" and cell.first_gap:
        return f"{cell.first_gap_kind}: {short_op(cell.first_gap)}"
    return cell.degenerate


def _runs(rows: list[MatrixRow], names: _Names) -> Table:
    """A row per run, which pages can sort and search: by error, speed and memory, op and finding."""
    heads = [
        Column("model"),
        Column("run", "run"),
        Column("status", "status"),
        Column("error", "error"),
        Column("speed", "speed"),
        Column("memory", "ratio", "Peak memory relative to fp32."),
        Column("ops without a kernel", "sentence"),
        Column("findings", "sentence"),
        Column("why", "sentence"),
    ]
    shown = []
    for row in rows:
        for cell in row.cells:
            speed = speed_of(1 / cell.time) if cell.time else None
            codes = ", ".join(dict.fromkeys([*cell.codes, *row.codes]))
            gaps = ", ".join(map(short_op, cell.gaps))
            figures = [cell.rel_l2, speed, cell.memory]
            shown.append(Row([names.of(row), cell.precision, status_of(cell), *figures, gaps, codes, why(cell) or ""]))
    return Table(heads, shown, "runs", headings=2, searchable=True, detail="all")


def _recommended(row: MatrixRow) -> str:
    """``half``; with a remark if that run cannot be judged."""
    advice = row.recommended or "fp32"
    runs = (advice, advice.removesuffix(" (predicted)"))
    doubtful = any(cell.degenerate and cell.precision in runs for cell in row.cells)
    return f"{advice} ({look('unjudged').word})" if doubtful else advice


class _Names:
    """The names of rows: the target, the options that not all rows share, and the device if not all rows have the same."""

    def __init__(self, matrix: Matrix) -> None:
        self._common = len(_common_options(matrix))
        self._one_device = len({row.device for row in matrix.rows}) == 1

    def of(self, row: MatrixRow) -> str:
        """``timm:vit_tiny --train on cuda``."""
        own = [shlex.join(row.options[self._common :])] if row.options[self._common :] else []
        device = [f"on {row.device}"] if row.device and not self._one_device else []
        return " ".join([row.target, *own, *device])


def _machines(matrix: Matrix) -> list[str]:
    """Where the models were scanned, and with which options."""
    options = shlex.join(_common_options(matrix))
    return [
        *dict.fromkeys(_machine(row) for row in matrix.rows if row.state == "scanned"),
        *([f"scanned with {options}"] if options else []),
    ]


def _common_options(matrix: Matrix) -> list[str]:
    lists = [row.options for row in matrix.rows]
    common = [words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))]
    following = [words[len(common)] for words in lists if len(words) > len(common)]
    if common and common[-1].startswith("-") and any(not word.startswith("-") for word in following):
        common.pop()  # an option whose value differs
    return common


def _machine(row: MatrixRow) -> str:
    env = row.environment
    parts = [
        f"torch {env.get('torch', '?')}",
        *(f"{package} {env[package]}" for package in ("torchvision", "timm", "transformers") if package in env),
        f"{row.cells[0].device if row.cells else '?'}: {env.get('device_name', '?')}",
        f"{env.get('threads', '?')} thread{'' if env.get('threads') == '1' else 's'}",
    ]
    return " · ".join(parts)
