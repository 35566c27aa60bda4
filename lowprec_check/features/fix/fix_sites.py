"""Where a run fails in the user's source: the expressions that its findings are about."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lowprec_check.analysis.error_shares import CAST_INPUT, trusted_budget
from lowprec_check.analysis.rules.accuracy import JUMP
from lowprec_check.analysis.run_summary import error_of, failing_gaps
from lowprec_check.errors import message_of
from lowprec_check.features.fix.scene import Site
from lowprec_check.features.fix.seen_values import SeenValue
from lowprec_check.features.fix.source_text import Edit, SourceText, Span, edited, lines_of, moved
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.fixing import LeftAlone
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Diagnostic, Run
from lowprec_check.schema.statements import short_op

MOST_SITES = 12  # expressions of one run that are looked at
STEPS_BEFORE = 3  # from an op that magnifies an error back to where that is made
LEAST_SHARE = 0.03  # an op that causes a smaller part of the error is not looked at


def fails(run: Run) -> bool:
    """Whether a patch is due for ``run``."""
    further = run.further_inputs
    counts = run.is_low and run.backend == "eager" and run.base is None and run.evidence == "measured"
    return counts and (run.status not in ("ok", "unjudged", "skipped") or bool(further and further.failed))


def passing(runs: Iterable[Run]) -> tuple[str, ...]:
    """The low precisions that pass as they are, in eager mode: no patch may break them."""
    eager = [run for run in runs if run.is_low and run.backend == "eager" and run.base is None]
    failing = {run.precision for run in eager if fails(run)}
    return tuple(dict.fromkeys(run.precision for run in eager if run.status == "ok" and run.precision not in failing))


_RANKS = {"ok": 0.0, "unjudged": 0.0, "skipped": 0.0, "inaccurate": 1.0, "nonfinite": 2.0}


def distance_of(runs: Iterable[Run]) -> tuple[float, float]:
    """How far runs are from passing, and the sum of their errors; less is better."""
    rank, error = 0.0, 0.0
    for run in runs:
        rank += _RANKS.get(run.status, 3.0)
        # a run that fails on some inputs only is half as bad
        if run.further_inputs is not None and run.further_inputs.tried:
            rank += 0.5 * run.further_inputs.failed / run.further_inputs.tried
        if run.status != "ok":
            error += min(error_of(run), 1e3)
    return rank, error


class Culprit(NamedTuple):
    """An op call that may be why a run fails."""

    row: OpCall
    mismatch: bool = False
    number: float | None = None


class PatchedFile:
    """A file of the user's with changes: finds the expressions of the original in it."""

    def __init__(self, source: SourceText, edits: Iterable[Edit] = ()) -> None:
        self.source, self.edits = source, list(edits)
        self.text = edited(source.text, self.edits)
        self._lines = lines_of(self.text)
        self.nodes: dict[Span, ast.expr] = {moved(span, self.edits): node for span, node in source.nodes.items()}

    def at(self, span: str) -> ast.AST | None:
        """The expression or augmented assignment at ``25:17-25:55`` in the changed text."""
        start, end = self._span(span)
        if (start, end) in self.nodes:
            return self.nodes[start, end]
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.AugAssign) and moved(self.source.span(node), self.edits) == (start, end):
                return node
        # a method on a line of its own starts there, not where the expression does
        ending = [node for span, node in self.nodes.items() if span[1] == end and span[0] <= start]
        calls = [node for node in ending if isinstance(node, ast.Call)]
        if calls:
            return max(calls, key=lambda node: self.source.span(node)[0])
        inside = [each for each in self.nodes if start <= each[0] and each[1] <= end]
        if not inside:  # a cast behind the last line of an expression
            last = max((each[1] for each in self.nodes if each[1] <= start), default=None)
            inside = [each for each in self.nodes if each[1] == last]
        if not inside or not self.edits:
            return None
        largest = self.nodes[max(inside, key=lambda each: each[1] - each[0])]
        return self.source.around(largest, ast.AugAssign) or largest

    def original_line(self, line: int) -> int:
        """The number that a line of the changed text has in the original."""
        start = self._lines.starts[line - 1]
        behind = [(span[0], node) for span, node in self.nodes.items() if span[0] >= start]
        if behind:
            return min(behind, key=lambda each: each[0])[1].lineno
        return line

    def by_node(self, places: Mapping[str, SeenValue]) -> dict[ast.AST, SeenValue]:
        """What the original's expressions gave, by their places in the changed text."""
        nodes = ((self.nodes.get(self._span(place)), seen) for place, seen in places.items())
        return {node: seen for node, seen in nodes if node is not None}

    def _span(self, span: str) -> Span:
        start, end = (self._lines.offset(*map(int, part.split(":"))) for part in span.split("-"))
        return start, end


class OwnFiles:
    """The files of the user's own that a scan names, found again and parsed once each."""

    def __init__(self, target: str) -> None:
        self._folder = Path(target.partition(":")[0]).parent
        self._known: dict[Path, SourceText | str] = {}

    def find(self, shown: str) -> SourceText | str:
        """The file that reports call ``shown``, or why it is left alone."""
        if shown.startswith("<"):
            return "the code is made at run time"
        path = next((p for p in (Path(shown), self._folder / shown) if p.is_file()), None)
        if path is None:
            return "its file is not found"
        path = path.resolve()
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            return "the file is in an installed package"
        # by its path, as reports may name one file in two ways
        if path not in self._known:
            try:
                self._known[path] = SourceText(path)
            except (OSError, SyntaxError, ValueError) as error:
                self._known[path] = f"its file cannot be parsed: {message_of(error)}"
        return self._known[path]


def culprits(run: Run) -> list[Culprit]:
    """The op calls that may be why ``run`` fails, in the order in which they ran."""
    rows, found = [row for row in run.op_calls.rows() if row.is_forward], list[Culprit]()
    if run.status in ("error", "crashed", "timeout") and failing_gaps(run):
        # the gaps, at each of the op calls that shows one; what fails above dispatch has none
        for gap in failing_gaps(run):
            calls = [row for row in rows if row.place == gap.place and row.outcome != "ok"]
            calls = calls or [OpCall(gap.op, gap.module, gap.source, caller=gap.caller)]
            is_mismatch = gap.kind == "dtype-mismatch"
            found += [Culprit(row, is_mismatch, gap.constant) for row in calls if gap.phase == "forward"]
        return found
    found = [Culprit(row, number=row.vanished) for row in rows if row.vanished is not None or row.flushes]
    if run.status in ("nonfinite", "error", "crashed", "timeout"):  # of what raises without a gap, no op is to blame
        found += [Culprit(row) for row in rows if row.gives_nonfinite]
    else:
        shares = [row for row in rows if (row.share or 0.0) >= LEAST_SHARE or row.gives_nonfinite]
        if not shares:
            shares = sorted(rows, key=lambda row: row.local_error or 0.0, reverse=True)[:4]
        found += [Culprit(row) for row in shares]
        if trusted_budget(run) is None:
            found += [Culprit(row) for row in before_amplifiers(run)]
        listed = run.budget.shares if run.budget is not None else []
        rounded = [share for share in listed if share.op == CAST_INPUT and share.share >= LEAST_SHARE]
        found += [Culprit(OpCall(CAST_INPUT)) for _ in rounded]
        # of too many places, those with the largest shares, and constants
        if len({each.row.exact_place for each in found}) > MOST_SITES:
            found.sort(key=lambda each: (each.row.share or 0.0) + (each.number is not None), reverse=True)
    position = {id(row): index for index, row in enumerate(rows)}
    return sorted(found[: 40 * MOST_SITES], key=lambda each: position.get(id(each.row), -1))


def before_amplifiers(run: Run) -> list[OpCall]:
    """The op calls whose rounding an op magnifies beyond the tolerance, as sin does a phase's."""
    rows, found = list(run.op_calls.rows()), set[int]()
    for index, row in enumerate(rows):
        grown = max(run.relative_tolerance or 0.0, JUMP * (row.input_error or 0.0))
        if row.is_forward and row.input_error and row.input_error < 1.0 and (row.accumulated_error or 0.0) > grown:
            last = {index}
            for _ in range(STEPS_BEFORE):
                last = {writer - back for writer in last for back in rows[writer].reads if back}
                found |= last
    return [rows[index] for index in sorted(found) if rows[index].is_forward]


class Sites:
    """The expressions that runs point at, by file; the scan may be of a patched source."""

    def __init__(
        self,
        files: OwnFiles,
        patched: Mapping[Path, PatchedFile],
        device: str,
        without_cast: Collection[str] = (),
    ) -> None:
        """``without_cast``: precisions that were tried with inputs in fp32, and fail."""
        self._without_cast = without_cast
        self.files, self._patched, self._device = files, patched, device_type(device)
        self.found: dict[ast.AST, Site] = {}
        self.left_alone: dict[tuple[str | None, str], LeftAlone] = {}

    def add(self, run: Run, diagnostics: Iterable[Diagnostic]) -> None:
        """Add those of ``run``."""
        about = [each for each in diagnostics if each.is_about(run)]
        new = set[ast.AST]()
        for culprit in culprits(run):
            row = culprit.row
            codes = {each.code for each in about if (each.op, each.source) == (row.op, row.source)}
            node = self.located(row, tried_inputs=run.precision in self._without_cast)
            if isinstance(node, str):
                op = short_op(row.op)
                left_alone = LeftAlone(source=row.source, op=op, reason=node, codes=tuple(sorted(codes)))
                self.left_alone.setdefault((row.source, op), left_alone)
                continue
            source, expression = node
            if expression not in new and len(new) >= MOST_SITES:
                continue
            new.add(expression)
            site = self.found.setdefault(expression, Site(source, expression, row.op, device=self._device))
            site.precisions.add(run.precision)
            site.codes |= codes
            site.mismatch |= culprit.mismatch
            site.numbers |= {culprit.number} - {None}  # type: ignore[arg-type]

    def located(self, row: OpCall, *, tried_inputs: bool = False) -> tuple[SourceText, ast.AST] | str:
        """The expression that calls an op, or why it is left alone; ``tried_inputs``: inputs were
        tried in fp32 in vain.
        """
        if row.op.startswith(CAST_INPUT):
            # rounding is relative: no scale changes it
            is_out_of_range = row.gives_nonfinite or row.flushes
            if tried_inputs:
                tried = "inputs in fp32 alone do not make it pass"
                return f"the input is cast before the model runs; {tried}{', so scale it first' * is_out_of_range}"
            scaled = ", or scale it before the cast" * is_out_of_range
            return f"the input is cast before the model runs: pass it in fp32{scaled}"
        if not row.source:
            return "no line of the user's own code calls it"
        if row.caller is not None:  # the user's own line that leads to it is not the op's
            return "the line is in an installed package"
        shown, _, number = row.source.rpartition(":")
        source = self.files.find(shown)
        if isinstance(source, str):
            return source
        # a scan of a patched source has places in the changed text
        patched = self._patched.get(source.path) or PatchedFile(source)
        node = patched.at(row.span) if row.span else _by_name(source, patched.original_line(int(number)), row.op)
        if node is None:
            return f"{short_op(row.op)} is not one expression of that line"
        if isinstance(node, str):
            return node
        # TorchScript reads the source of a function or class itself
        scripted = source.around(node, (ast.FunctionDef, ast.ClassDef))
        while scripted is not None:
            if any("script" in ast.unparse(d) for d in getattr(scripted, "decorator_list", [])):
                return "TorchScript compiles it"
            scripted = source.around(source.parents[scripted], (ast.FunctionDef, ast.ClassDef))
        return source, node


_SIGNS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
    "mm": ast.MatMult,
    "bmm": ast.MatMult,
    "matmul": ast.MatMult,
    "mv": ast.MatMult,
    "dot": ast.MatMult,
}


def _by_name(source: SourceText, line: int, op: str) -> ast.AST | str | None:
    """The one expression at a line that may be the op: Python 3.10 gives only the line."""
    name = op.split(".")[1 if op.startswith("aten.") else -1].strip("_")
    statements = [n for n in ast.walk(source.tree) if isinstance(n, ast.stmt)]
    statements = [n for n in statements if n.lineno <= line <= (n.end_lineno or 0)]
    if not statements:
        return None
    # the innermost, of those that start last the shortest
    statement = max(statements, key=lambda each: (each.lineno, -(each.end_lineno or 0)))
    sign = _SIGNS.get(name)
    inside: list[ast.AST] = [n for n in ast.walk(statement) if isinstance(n, (ast.Call, ast.BinOp))]
    calls = [n for n in inside if isinstance(n, ast.Call)]
    names = (name, name.rpartition("_")[2])
    named: list[ast.AST] = [n for n in calls if ast.unparse(n.func).rpartition(".")[2].strip("_") in names]
    if sign is not None:
        operations = [n for n in (*inside, statement) if isinstance(n, (ast.BinOp, ast.AugAssign))]
        named += [n for n in operations if isinstance(n.op, sign)]
    if len(named) > 1:
        return f"several calls of {short_op(op)} in one line"
    if named:
        return named[0]
    if len(calls) == 1:
        return calls[0]
    return None
