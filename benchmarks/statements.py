"""Hold every sentence and figure of saved results against their JSON: ``python benchmarks/statements.py FOLDER... --output reports/statements``.

Each result is concluded by the current program. Then, from its raw JSON and without the code that made the sentences
(statement_predicates.py, finding_predicates.py):

- every statement holds for each run that it names, and its text shows the figures of each, ranges included;
- so does every finding, and every message that several findings share; advice names only what passed in the same scan;
- every cell of the tables is the value of the JSON that its column says;
- all formats show the same verdict, the same words of status and the same statements, and no figure that none of these explains.

Writes OUTPUT.json and OUTPUT.md. Exits with 1 if anything is false.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from finding_predicates import FINDINGS, false_advice
from report_files import head, made, save
from statement_predicates import (
    BETWEEN,
    CLAIMS,
    Case,
    Raw,
    is_reference,
    label,
    lost_kinds,
    misread,
    problems,
    same,
    total,
)

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.analysis.statements.kinds import kinds
from lowprec_check.report.blocks import Column, Fold, Row, Say, Table, cell_text
from lowprec_check.report.page_blocks import scan_page
from lowprec_check.report.registry import FORMATS
from lowprec_check.report.scan_document import scan_document
from lowprec_check.schema.precisions import formats
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.verdict import look

CLAIMS |= FINDINGS
DOCUMENTS = ("text", "md", "html")
"""Formats that show statements and cells."""


class False_(NamedTuple):
    """Something false."""

    kind: str
    what: str
    """The sentence, or the cell."""
    wrong: str


Checked = Iterator[tuple[str, list[False_]]]
"""A kind for each thing that was checked, with what is false about it."""


def checked(result: ScanResult) -> Checked:
    """Everything that the reports of ``result``, which is concluded, say."""
    raw: Raw = json.loads(result.to_json())
    yield from _statements(raw)
    yield from _findings(raw, result)
    yield from _cells(raw, result)
    yield from _formats(raw, result)


# -- statements and findings


def _statements(raw: Raw) -> Checked:
    runs = {label(run): run for run in raw["runs"]}
    for its in raw["statements"]:
        wrong = misread(its["template"], its["figures"], its["text"])
        for name, figures in zip(its["runs"] or [None], its["figures"], strict=True):
            found = problems(its["kind"], its["template"], figures, Case(raw, runs[name] if name else None))
            wrong += [f"{name or 'scan'}: {one}" for one in found]
        wrong += _contradicted(raw, its)
        yield its["kind"], [False_(its["kind"], its["text"], one) for one in wrong]


def _contradicted(raw: Raw, its: Raw) -> list[str]:
    """A verdict and what it rests on that do not agree."""
    if its["kind"] != "gain" or not raw["statements"]:
        return []
    verdict = next(one["text"] for one in raw["statements"] if one["kind"] == "verdict")
    pairs = (
        ("saves no memory", "saves "),
        ("is slower", "as fast as fp32 ("),
        ("is not faster", "times as fast as fp32 ("),
    )
    return [f"the verdict says {said!r}" for said, other in pairs if said in verdict and other in its["text"]]


def _findings(raw: Raw, result: ScanResult) -> Checked:
    keys = ("precision", "backend", "memory_format")
    runs = {tuple(run[key] for key in keys): run for run in raw["runs"]}
    for d in raw["diagnostics"]:
        run = runs.get(tuple(d[key] for key in keys))
        case, template = Case(raw, run, d), d["template"] or "{text:text}"
        wrong = [] if not d["template"] else misread(template, [d["figures"]], d["message"])
        wrong += problems(d["code"], template, d["figures"] if d["template"] else {"text": d["message"]}, case)
        wrong += false_advice(case, d["help"])
        yield (
            d["code"],
            [False_(d["code"], f"{label(run) if run else 'scan'}: {d['message']} → {d['help']}", one) for one in wrong],
        )
    found = groups(result.diagnostics)
    for d in result.diagnostics:
        its = [
            one
            for group in found
            for one in group.messages
            if (group.code, group.op) == (d.code, d.op) and (one.severity, one.help) == (d.severity, d.help)
        ]
        shown = any(
            (not d.run_label or d.run_label in one.runs)
            and not misread(d.sentence.template, [d.sentence.figures], one.text)
            for one in its
        )
        yield (
            f"{d.code} shown",
            [] if shown or d.accepted else [False_(f"{d.code} shown", d.message, "in no message of its group")],
        )
    for group in found:
        for message in group.messages:
            mine = [
                d
                for d in result.diagnostics
                if (d.code, d.op, d.severity, d.help) == (group.code, group.op, message.severity, message.help)
            ]
            true = {d.run_label for d in mine if not misread(d.sentence.template, [d.sentence.figures], message.text)}
            wrong = sorted({*message.runs} - true)
            yield (
                f"{group.code} joined",
                [False_(f"{group.code} joined", message.full, f"not true of {name}") for name in wrong],
            )


# -- cells


def _cells(raw: Raw, result: ScanResult) -> Checked:
    numbers = set(_numbers({key: value for key, value in raw.items() if key not in ("statements", "diagnostics")}))
    runs = {label(run): run for run in raw["runs"]}
    for table in _tables(scan_page(result).blocks):
        head = ""
        for row in table.rows:
            head = row.cells[0] if not row.depth else head  # of the lines of code: their file
            for column, value in zip(table.columns, row.cells, strict=True):
                if value is None and table.name not in ("runs", "times"):
                    continue
                known = _cell(table, column, row, head, runs, raw)
                if known is not None:
                    right, expected = _cell_is(value, known()), known()
                elif isinstance(value, (int, float)) and not isinstance(value, bool) and table.name != "findings":
                    right, expected = _explained(value, row, table, raw, numbers), "a number of the JSON"
                else:
                    continue
                kind = f"cell {re.sub(r' of .*|:.*', '', re.sub(r'[0-9]+', 'N', table.name))} · {column.name.rpartition(': ')[2]}"
                yield (
                    kind,
                    []
                    if right
                    else [False_(kind, f"{row.cells[0]}, {column.name}: {value!r}", f"expected {expected!r}")],
                )


def _tables(blocks: Any) -> Iterator[Table]:
    for block in blocks:
        if isinstance(block, Table):
            yield block
            yield from _tables(inner for row in block.rows for inner in row.below)
        elif isinstance(block, Fold):
            yield from _tables(block.blocks)


def _cell(
    table: Table, column: Column, row: Row, head: str, runs: dict[str, Raw], raw: Raw
) -> Callable[[], Any] | None:
    """What a cell must hold; ``None`` if it is enough that its number is in the JSON."""
    first = row.cells[0]
    short = re.fullmatch(r"(.+?):? (worst error|share(?: of the error)?|error)", column.name)
    name, figure = (short[1], _FIGURES.get(short[2], short[2])) if short and short[1] in runs else ("", column.name)
    if table.name in ("runs", "times"):
        known = _RUNS.get(column.name)
        return None if known is None or first not in runs else lambda: known(Case(raw, runs[first]))
    if table.name.startswith("operators of "):
        case = Case(raw, runs[table.name.removeprefix("operators of ")])
        return _sum(case, figure, list(case.rows(op=first)), [gap for gap in case.run["gaps"] if gap["op"] == first])
    if table.name == "modules" and column.name == "calls without a kernel":
        return lambda: max(
            sum(gap["calls"] for gap in run["gaps"] if _is_inside(gap["module"], first)) for run in runs.values()
        )
    if table.name in ("modules", "lines of code") and name in runs:
        case = Case(raw, runs[name])
        if figure == "share of the error":
            return lambda: (
                sum(
                    (its["share"] or 0.0)
                    - (its.get("leaving") or 0.0)  # a line's share is without the rounding of results
                    for its in case.rows(source=f"{head}:{first}")
                )
                if table.name == "lines of code"
                else sum(
                    share for part, share, _ in case.shares() if _is_inside("" if part == BETWEEN else part, first)
                )
            )
        phases = (None,) if case.setup is None else ("forward", "backward", "optimizer")
        rows = (
            list(case.rows(source=f"{head}:{first}"))
            if table.name == "lines of code"
            else [its for phase in phases for its in case.rows(phase=phase) if _is_inside(its["module"], first)]
        )
        return _sum(case, figure, rows, [])
    return None


_FIGURES = {"share": "share of the error", "error": "worst error"}
"""Heads of columns in short."""


def _is_inside(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(f"{above}.")


def _sum(case: Case, figure: str, rows: list[Raw], gaps: list[Raw]) -> Callable[[], Any] | None:
    """A figure of some op calls together."""
    lost = sum(its["introduced_inf"] + its["introduced_nan"] for its in rows)
    worst = (
        None
        if lost
        else max((its["accumulated_error"] for its in rows if its["accumulated_error"] is not None), default=None)
    )
    known: dict[str, Any] = {
        "calls": len(rows),
        "share of the error": sum(its["share"] or 0.0 for its in rows),
        "worst error": (worst, None if case.run["status"] == "ok" else case.run["tolerance"]),
        "worst of the op itself": max(
            (its["local_error"] for its in rows if its["local_error"] is not None), default=None
        ),
        "without a kernel": sum(gap["calls"] for gap in gaps),
        "repeated casts": sum(its["recast"] for its in rows),
        "Inf or NaN": lost,
    }
    return (lambda: known[figure]) if figure in known else None


def _status(c: Case) -> str:
    odd = next(
        (
            its
            for its in c.result["statements"]
            if its["kind"] == "failure" and label(c.run) in its["runs"] and its["text"].startswith("cannot be judged")
        ),
        None,
    )
    return "reference" if is_reference(c.run) and c.run["status"] == "ok" else "unjudged" if odd else c.run["status"]


def _error(c: Case) -> Any:
    found = c.run["output_error"]
    return None if is_reference(c.run) or found is None else ((c.error, c.run["tolerance"]))


def _speed(c: Case) -> Any:
    told, ratio = c.speed()
    return None if is_reference(c.run) or told == "unknown" else (told, ratio)


def _latency(*path: str | int) -> Callable[[Case], Any]:
    def value(c: Case) -> Any:
        found = c.run["latency"]
        for key in path:
            found = found and found[key]
        return found

    return value


_RUNS: dict[str, Callable[[Case], Any]] = {
    "status": _status,
    "output error": _error,
    "speed": _speed,
    "memory": lambda c: c.memory(),
    "p99": lambda c: c.run["timing"] and c.run["timing"]["p99_ms"],
    "metric": lambda c: c.run["metric"],
    "lost updates": lambda c: c.first.get("lost_updates"),
    "median": _latency("median_ms"),
    "first quartile": _latency("quartiles_ms", 0),
    "third quartile": _latency("quartiles_ms", 1),
    "calls": _latency("samples"),
    "rounds": _latency("speedup", "rounds"),
}
"""What the columns of the tables with a row per run show."""


def _cell_is(value: Any, expected: Any) -> bool:
    return (
        same(list(value[:2]), list(expected))
        if isinstance(value, tuple) and isinstance(expected, tuple)
        else same(value, expected)
    )


def _explained(value: float, row: Row, table: Table, raw: Raw, numbers: set[float]) -> bool:
    """Whether a number is one of the JSON, or a sum or a ratio that its table is about."""
    if value in numbers or round(value, 9) in numbers:
        return True
    if table.name == "lost updates":
        case = Case(raw, next(run for run in raw["runs"] if label(run) == row.cells[0]))
        its = lost_kinds(case).get(row.cells[1], [])
        sums = [len(its), sum(one["elements"] for one in its), total(its), total(its, "decay_lost")]
        return any(same(value, one) for one in sums)
    if "at the ends of the range of" in table.name:
        cells = dict(zip((column.name for column in table.columns), row.cells, strict=True))
        module, op, line, largest = map(cells.get, ("module", "op", "line", "largest"))
        lost = [
            sum(its["introduced_inf"] for its in Case(raw, run).rows(module=module, op=op, source=line))
            for run in raw["runs"]
        ]
        return value in lost or any(largest is not None and same(value, largest / known.largest) for known in formats())
    if table.name.startswith("Shares of the squared output error"):
        name = table.name.partition(": ")[2]
        case = Case(raw, next(run for run in raw["runs"] if label(run) == name))
        budget, sums = case.budget, {part: share for part, share, _ in case.shares()}
        listed = [its.cells[0] for its in table.rows if its.cells[0] in sums]
        sums["choices that differ from fp32"] = budget["decisions"]
        sums["not explained"] = budget["unexplained"] - budget["decisions"]
        sums["other modules"] = 1 - sum(sums[part] for part in listed) - budget["unexplained"]
        return same(value, sums.get(row.cells[0]))
    return False


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, (int, float)):
        yield value
        yield round(value, 9)


# -- formats

_NUMBER = re.compile(r"(?<![\w.])−?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


def rendered(result: ScanResult) -> dict[str, str]:
    """Each format as plain text, without markup and code to paste."""
    from lowprec_check.report.layout import text as layout
    from lowprec_check.report.scan_document import text as notebook

    shown = {"text": layout.text(scan_document(result), width=20_000, detail="more"), "notebook": notebook(result)}
    shown |= {name: FORMATS.get(name).render(result) for name in ("md", "html", "sarif", "junit", "github", "concise")}
    shown["md"] = (
        re.sub(r"\\([\\`*_\[\]<>#~&$|])", r"\1", re.sub(r"```.*?```", "", shown["md"], flags=re.S))
        .replace("`", "")
        .replace("**", "")
    )
    page = re.sub(r"(?s)<(script|style|pre|svg|template)\b.*?</\1>", " ", shown["html"])
    shown["html"] = html.unescape(re.sub(r"<[^>]+>", " ", page))
    shown["junit"] = html.unescape(shown["junit"])
    return {name: re.sub(r"\s+", " ", text) for name, text in shown.items()}


def _formats(raw: Raw, result: ScanResult) -> Checked:
    shown = rendered(result)
    verdict = next(its["text"] for its in raw["statements"] if its["kind"] == "verdict")
    for name, text in shown.items():
        kind = f"format {name}"
        wrong = [] if _plain(verdict) in _plain(text) else [False_(kind, verdict, "another verdict, or none")]
        others = {
            found
            for found in re.findall(r"(?:Use|Stay in) [^.:;\"]*", text)
            if found.startswith(("Use half", "Use bf", "Use autocast", "Stay in"))
        }
        wrong += [
            False_(kind, found, f"the verdict is {verdict}") for found in others if _plain(found) not in _plain(verdict)
        ]
        yield kind, wrong
    documents = {name: _plain(shown[name]) for name in DOCUMENTS}
    for run in raw["runs"]:
        word = look(_status(Case(raw, run))).word
        for name, text in {name: shown[name] for name in documents}.items():
            found = re.search(rf"{re.escape(label(run))}\W+(?:\w[\w ]*\W+)?{re.escape(word)}", text)
            yield "status word", [] if found else [False_("status word", f"{name}: {label(run)}", f"not {word!r}")]
    for its in raw["statements"]:
        text = _plain(its["text"])[:150]
        where = [name for name, whole in documents.items() if text in whole]
        missing = sorted(set(documents) - {*where})
        hidden = not where or (its["kind"] in ("failure", "margin") and len(text) > 120)
        yield (
            "statement in formats",
            []
            if hidden or not missing
            else [False_("statement in formats", its["text"], f"in {where}, not in {missing}")],
        )
    known = _known_numbers(raw, result)
    for name in documents:
        unknown = Counter(token for token in _NUMBER.findall(shown[name]) if token not in known)
        yield (
            f"numbers of {name}",
            [
                False_(f"numbers of {name}", token, f"×{count}, not of a statement, a finding or a cell")
                for token, count in unknown.items()
            ],
        )


def _plain(text: str) -> str:
    return re.sub(r"\W+", "", text).lower()


def _known_numbers(raw: Raw, result: ScanResult) -> set[str]:
    """The number tokens of statements, findings, cells, and texts of the JSON."""
    texts = [*_texts(raw), *_shown(scan_page(result).blocks)]
    texts += [message.full for group in groups(result.diagnostics) for message in group.messages]
    texts += [group.where for group in groups(result.diagnostics)]
    return {token for text in texts for token in _NUMBER.findall(text)}


def _shown(blocks: Any) -> Iterator[str]:
    """The texts of cells and of what stands beside tables."""
    for block in blocks:
        if isinstance(block, Fold):
            yield block.title
            yield from _shown(block.blocks)
        elif isinstance(block, Say):
            yield block.text
        elif isinstance(block, Table):
            yield from (column.meaning for column in block.columns)
            yield from (
                "" if value is None else cell_text(value, column.type)
                for row in block.rows
                for value, column in zip(row.cells, block.columns, strict=True)
            )
            yield from (row.module.rpartition(".")[2] for row in block.rows if row.module)  # as a tree shows it
            yield from _shown(inner for row in block.rows for inner in row.below)
            yield f"{block.name} {len(block.rows)} {block.left_out:,} {len(block.rows) + block.left_out:,}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner) if key != "op_calls" else _texts(set(inner["source"]))
    elif isinstance(value, (list, set)):
        for inner in value:
            yield from _texts(inner)
    elif value is not None:
        yield str(value)


# -- all results


def _results(folders: list[Path]) -> Iterator[tuple[Path, ScanResult]]:
    for path in sorted(
        {path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.json"))}
    ):
        try:
            yield path, ScanResult.load(path)
        except ValueError as error:
            if '"runs"' in path.read_text(errors="replace")[:5000]:
                print(f"{path}: {error}", file=sys.stderr)


def main() -> int:
    """Check all saved results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--most", type=int, default=10, help="false things of one kind that are printed")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    false: dict[str, list[tuple[str, False_]]] = defaultdict(list)
    sorts: Counter[str] = Counter()
    missing = [kind for kind in (*kinds(), *rules()) if kind not in CLAIMS]
    false["no predicate"] += [("", False_("no predicate", kind, "")) for kind in missing]
    for path, result in _results(args.folders):
        sorts[_sort(path, result)] += 1
        for kind, wrong in checked(conclude(result)):
            counts[kind] += 1
            false[kind] += [(path.name, one) for one in wrong]
    data = {
        "made": made(
            note="The folders hold saved scans of a CPU and of an H200; benchmarks/saved_results.py makes them."
        )
        | {"command": "python benchmarks/statements.py FOLDER... --output reports/statements"},
        "results": dict(sorts.most_common()),
        "checked": dict(sorted(counts.items())),
        "false": {kind: [[name, *one] for name, one in found] for kind, found in sorted(false.items()) if found},
    }
    save(args.output, data, render)
    for kind, found in data["false"].items():
        for name, _, what, wrong in found[: args.most]:
            print(f"\n{kind}: {name}\n  {what[:500]}\n  {wrong[:500]}")
    return int(any(false.values()))


def render(data: Mapping[str, Any]) -> str:
    """The report: how many results, and what was checked of them."""
    results, checked_of, false = data["results"], data["checked"], data["false"]
    sums = sum(checked_of.values()), sum(map(len, false.values()))
    return "\n".join(
        [
            *head("Every sentence and figure against the saved JSON", data),
            f"{sum(results.values())} results: {', '.join(f'{count} {name}' for name, count in results.items())}.",
            "",
            f"**{sums[0]:,} checked, {sums[1]} false.**",
            "",
            "| kind | checked | false |",
            "|:--|--:|--:|",
            *(
                f"| {kind} | {checked_of.get(kind, 0):,} | {len(false.get(kind, ()))} |"
                for kind in sorted({*checked_of, *false})
            ),
            "",
        ]
    )


def _sort(path: Path, result: ScanResult) -> str:
    """What a result is of."""
    sort = path.name.partition("-")[0] if path.name.partition("-")[1] else "other"
    made = "predicted" if result.prediction else "trained" if result.training else "scanned"
    return f"{sort} ({made}, {'cuda' if 'cuda' in {run.device.partition(':')[0] for run in result.runs} else 'cpu'})"


if __name__ == "__main__":
    sys.exit(main())
