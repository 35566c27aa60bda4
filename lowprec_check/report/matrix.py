"""The matrix of models, precisions and devices as blocks, with the most often missing kernels."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Callable

from lowprec_check.analysis.statements.status import fails_on_further
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
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow
from lowprec_check.schema.run_key import PLAN
from lowprec_check.schema.statements import counted, error_figure, fill, short_op
from lowprec_check.schema.verdict import LOOKS, look

_MOST_OPS = 30
_HOW_TO_READ = (
    "A run that passes or is inaccurate shows the error of its output against fp32 (relative L2){}; "
    "one that fails its first op without a kernel and the number of further ones."
)
_TRAINED = (
    "Weights that are off: how far they end from those of fp32 in a training, relative to how far these have moved."
)
_FURTHER = "A run that passes on its batch but fails on further inputs is shown with their worst status."
_TIMED = " and its speed against fp32, timed while other work may have run"
_PREDICTED = "Predicted: emulated on a CPU, nothing ran on that device."


def matrix_document(matrix: Matrix, title: str = "Compatibility", *, pages: str | None = ".md") -> Document:
    """The index: totals, a row per model, and on a page a row per run.

    Each model links to ``models/<slug>`` with the suffix ``pages``, unless that is ``None``.
    """
    scanned = [row for row in matrix.rows if row.state == "scanned"]
    failed = [row for row in matrix.rows if row.state == "failed"]
    cells = [cell for row in scanned for cell in row.cells]
    columns, devices = list(dict.fromkeys(map(column_of, cells))), {row.device for row in matrix.rows}
    # the first options, as many words from the left as all rows have
    lists = [row.options for row in matrix.rows]
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))
    options = [words[0] for words in shared]
    following = [words[len(options)] for words in lists if len(words) > len(options)]
    if options and options[-1].startswith("-") and any(not word.startswith("-") for word in following):
        options.pop()  # an option whose value differs

    def name_of(row: MatrixRow) -> str:
        """``timm:vit_tiny --train on cuda``: its own options, and its device if they differ."""
        device = fill("on {}", len(devices) > 1 and row.device)
        return " ".join(filter(None, (row.target, shlex.join(row.options[len(options) :]), device)))

    blocks: list[Block] = [Say(title, role="title")]
    # one model may be scanned with several options
    targets = len({row.target for row in scanned})
    times = ""
    if targets != len(scanned):
        times = f" in {counted(len(scanned), 'scan')}"
    missed = fill("; {} could not be", len(failed))
    blocks.append(Say(f"{counted(targets, 'model')} scanned{times}{missed}."))
    # a row per precision, a column per status that occurs
    counts = {column: Counter(status_of(cell) for cell in cells if column_of(cell) == column) for column in columns}
    statuses = [status for status in LOOKS if any(count[status] for count in counts.values())]
    if statuses:
        heads = [Column("precision", "run"), *(Column(look(one).word, "number", look(one).meaning) for one in statuses)]
        rows = [Row([column, *(counts[column][one] for one in statuses)]) for column in columns]
        blocks.append(Table(heads, rows, "totals"))
    blocks += [Say(line, role="hint") for line in dict.fromkeys(map(_machine, scanned))]
    if options:
        blocks.append(Say(f"scanned with {shlex.join(options)}", role="hint"))
    # an op counts once for each scan, however often it fails in it
    missing = Counter((op, column_of(cell)) for cell in cells for op in dict.fromkeys(cell.gaps))
    if missing:
        heads = [Column("op", "op"), Column("precision", "run"), Column("scans", "number")]
        rows = [Row([op, column, number]) for (op, column), number in missing.most_common(_MOST_OPS)]
        blocks += [Heading("Ops without a kernel"), Table(heads, rows, "ops without a kernel")]
    if scanned:
        # how to read the cells: only what at least one of them shows
        notes = {
            _HOW_TO_READ.format(_TIMED if any(cell.time for cell in cells) else ""): True,
            _FURTHER: any(status_of(cell) != cell.status for cell in cells if not cell.degenerate),
            _TRAINED: any(cell.error and cell.error.endswith(" off") for cell in cells),
            _PREDICTED: any(cell.evidence == "predicted" for cell in cells),
        }
        hint = " ".join(note for note, applies in notes.items() if applies)
        blocks += [Heading("Models"), Say(hint, role="hint"), _models(scanned, columns, name_of, pages)]
        blocks += [Heading("Runs", detail="all"), _runs(scanned, name_of)]
    if failed:
        rows = [Row([name_of(row), row.reason or ""]) for row in failed]
        heads = [Column("model"), Column("why it could not be scanned", "sentence")]
        blocks += [Heading("Not scanned"), Table(heads, rows, "models that could not be scanned")]
    tool = next((found for row in matrix.rows if (found := row.made_with.get("tool"))), "")
    return Document(title, blocks, f"lowprec-check {tool}".strip(), whole=True)


def column_of(cell: MatrixCell) -> str:
    """``plan`` of ``plan (half)``; backends have columns of their own."""
    if cell.column is None and cell.precision.startswith(f"{PLAN} ("):
        return PLAN
    if cell.column is None:
        return cell.precision
    return cell.column


def status_of(cell: MatrixCell) -> str:
    """The worst status on all inputs; ``unjudged`` too if the output is degenerate."""
    if cell.degenerate:
        return "unjudged"
    statuses: list[str] = [cell.status]
    if cell.status == "ok" and cell.further_inputs:
        statuses += list(cell.further_inputs.statuses)
    return max(statuses, key=lambda status: look(status).rank)


def _models(rows: list[MatrixRow], columns: list[str], name_of: Callable[[MatrixRow], str], pages: str | None) -> Table:
    heads = [Column("model", "text" if pages is None else "link"), Column("recommended", "run"), Column("weights")]
    heads += [Column("parameters", "number"), *(Column(column, "status") for column in columns)]
    weights = {"unknown": None, "random": "random", "scaled": "scaled random", "loaded": "loaded"}
    shown = []
    for row in rows:
        # ``1.2e-03 · 1.8 × as fast``, or why there is no error; ``1.2e-03 · predicted``
        name, cells = name_of(row), dict[str, StatusOf]()
        for cell in row.cells:
            status = status_of(cell)
            parts = [why(cell) or look(status).word]
            # an error says more than a status, unless further inputs decide
            has_error = status in ("ok", "inaccurate") and status == cell.status
            if has_error:
                parts = [cell.error or error_figure(cell.rel_l2)]
            if has_error and cell.time:
                parts.append(cell_text(speed_of(1 / cell.time), "speed"))
            if cell.evidence != "measured":
                parts.append(cell.evidence)
            cells[column_of(cell)] = StatusOf(status, " · ".join(parts))
        model: str | Link = name
        if pages is not None:
            model = Link(name, f"models/{row.slug}{pages}")
        # the advice rests on nothing if the output of that run cannot be judged
        advice = row.recommended or "fp32"
        if any(cell.degenerate and cell.precision == advice.partition(" (")[0] for cell in row.cells):
            advice = f"{advice} ({look('unjudged').word})"
        shown.append(Row([model, advice, weights[row.weights], row.parameters, *map(cells.get, columns)]))
    return Table(heads, shown, "models", searchable=True)


def why(cell: MatrixCell) -> str | None:
    """Why a run fails or cannot be judged, beyond its status: ``no linalg_cholesky_ex +1``."""
    if cell.status == "error" and cell.gaps:
        return f"no {short_op(cell.gaps[0])}{fill(' +{}', len(cell.gaps) - 1)}"
    if cell.status == "error" and cell.first_gap:
        return f"{cell.first_gap_kind}: {short_op(cell.first_gap)}"
    if cell.degenerate or status_of(cell) == cell.status or cell.further_inputs is None:
        return cell.degenerate
    return fails_on_further(cell.further_inputs).text


def _runs(rows: list[MatrixRow], name_of: Callable[[MatrixRow], str]) -> Table:
    """A row per run, which pages can sort and search: by figures, op and finding."""
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
            speed = None
            if cell.time:
                speed = speed_of(1 / cell.time)
            codes = ", ".join(dict.fromkeys([*cell.codes, *row.codes]))
            gaps = ", ".join(map(short_op, cell.gaps))
            figures = [cell.rel_l2, speed, cell.memory]
            shown.append(Row([name_of(row), cell.precision, status_of(cell), *figures, gaps, codes, why(cell) or ""]))
    return Table(heads, shown, "runs", headings=2, searchable=True, detail="all")


def _machine(row: MatrixRow) -> str:
    env = row.environment
    parts = [
        f"torch {env.get('torch', '?')}",
        *(f"{package} {env[package]}" for package in ("torchvision", "timm", "transformers") if package in env),
        f"{row.cells[0].device if row.cells else '?'}: {env.get('device_name', '?')}",
        f"{env.get('threads', '?')} thread{'s' if env.get('threads') != '1' else ''}",
    ]
    return " · ".join(parts)
