"""Answers that need no scan, as blocks: operators of the catalog, the hardware, the manual of diagnostics."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lowprec_check.analysis.rules.registry import Rule
from lowprec_check.catalog.answers import Difference, Gaps, MissingOp, OpAnswer, OpChange
from lowprec_check.catalog.records import SHORT, STATES, Mode, State, in_samples
from lowprec_check.catalog.support import OnCpu, SupportCell
from lowprec_check.catalog.versions import version_key
from lowprec_check.report.blocks import (
    Block,
    Column,
    Document,
    Heading,
    Pairs,
    Row,
    Say,
    StatusOf,
    Table,
    speed_of,
)
from lowprec_check.schema.axes import is_declared
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.statements import counted, some

# -- Answers of the catalog as blocks: one operator, the difference between two versions, missing operators

_SHOWN_OPS = 4
"""Operators shown in full if a name matches many."""
_GROUPS: tuple[tuple[Mode, ...], ...] = (("forward",), ("backward",), ("autocast", "autocast-backward"))
_ON_CPU: dict[OnCpu, str] = {"wholly": "on the CPU", "partly": "partly on the CPU"}
_LOOKS: dict[State | None, str] = {"all": "ok", "some": "inaccurate", "none": "error", None: "skipped"}
"""The status whose colour a state has."""
_WORDS: dict[State | None, str] = {"all": "yes", "some": "in part", "none": "no", None: "–"}


# -- one operator


def answers_document(answers: Sequence[OpAnswer]) -> Document:
    """One table per operator: devices × dtypes × modes, then its failures and the issues reported about it."""
    blocks: list[Block] = []
    if dispatching := answers[0].dispatching:
        text = f"{dispatching} is not an operator in the catalog; these operators dispatch it:"
        blocks.append(Say(text, "warn", "note"))
    for answer in answers[:_SHOWN_OPS]:
        blocks += _answer(answer)
    if len(answers) > _SHOWN_OPS:
        blocks.append(Say(f"Also: {', '.join(answer.op for answer in answers[_SHOWN_OPS:])}"))
    for device, versions in answers[0].elsewhere.items():
        evidence = "declared" if is_declared(device) else "measured"
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        blocks.append(Say(f"{device}: {evidence} only for torch {span}", role="hint"))
    return Document(answers[0].op, blocks)


def _answer(answer: OpAnswer) -> Iterator[Block]:
    here = [cell for cell in answer.cells if cell.torch == answer.installed and not cell.extension]
    others = [cell for cell in answer.cells if cell not in here]
    dispatched = f"dispatches {some(answer.aten, 4)}"
    yield Heading(" · ".join(filter(None, (answer.op, _installed(answer, here), dispatched))))
    if answer.note:
        yield Say(answer.note, "warn", "note")
    if here:
        yield _cells(here)
    if here and others:
        yield Say("other releases: the newest of each device", role="hint")
    if others:
        yield _cells(others)
    yield from (Say(line, role="hint") for line in _failures(answer.cells))
    for issue in answer.issues:
        fixed = f" (fixed in {issue.fixed})" if issue.fixed else ""
        where = f" for {', '.join(issue.devices)}" if issue.devices else ""
        yield Say(f"reported{where}: {issue.title}{fixed}")
        yield Say(issue.link, role="hint")


def _installed(answer: OpAnswer, here: Sequence[SupportCell]) -> str:
    """What the answer says about the installed torch; empty if a release was asked for."""
    if not answer.installed:
        return "torch is not installed" if answer.installed == "" else ""
    if here:
        return f"torch {answer.installed} (installed)"
    newest = max((version_key(cell.torch) for cell in answer.cells), default=())
    is_newer = version_key(answer.installed) > newest
    return f"torch {answer.installed} (installed) is {'newer than the catalog' if is_newer else 'not in the catalog'}"


def _cells(cells: Sequence[SupportCell]) -> Table:
    """A row per device, release and dtype."""
    found: dict[tuple[str, str, str], list[SupportCell]] = {}
    for cell in cells:
        device = cell.device if cell.evidence == "measured" else f"{cell.device}, {cell.evidence}"
        version = f"{cell.torch} ipex" if cell.extension else cell.torch
        found.setdefault((device, version, SHORT[cell.dtype]), []).append(cell)
    rows = []
    for key, of_row in found.items():
        modes = [_support([cell for cell in of_row if cell.mode in group]) for group in _GROUPS]
        slower = next((cell.slower for cell in of_row if cell.slower), None)
        rows.append(Row([*key, *modes, _ulp(of_row), slower and speed_of(1 / slower)]))
    columns = [Column(name) for name in ("device", "torch", "dtype")]
    columns += [Column(group[0], "status") for group in _GROUPS]
    return Table([*columns, Column("ulp"), Column("speed", "speed")], rows, headings=3)


def _support(cells: list[SupportCell]) -> StatusOf | None:
    """The worst of the cells; under autocast, forward and backward share a column."""
    known = [cell for cell in cells if cell.state is not None]
    if not known:
        return StatusOf("skipped", "n/a") if any(cell.not_applicable for cell in cells) else None
    cell = min(known, key=lambda cell: STATES.index(cell.state or "all"))
    if cell.state == "all":
        words = f"since {'≤' if cell.since_oldest else ''}{cell.since}"
        words = "on the CPU" if cell.on_cpu == "wholly" else f"{cell.at} on the CPU" if cell.on_cpu else words
    else:
        words = f"{cell.passed} of {cell.samples}" if cell.state == "some" and cell.samples else _WORDS[cell.state]
    return StatusOf(_LOOKS[cell.state], words + (f", from {cell.fixed_in}" if cell.fixed_in else ""))


def _ulp(cells: list[SupportCell]) -> str | None:
    error = next((cell.error for cell in cells if cell.error is not None and cell.mode == "forward"), None)
    return error and "…".join("inf" if value is None else f"{value:.3g}" for value in (error.median, error.max))


def _failures(cells: list[SupportCell]) -> list[str]:
    """One line per failure, with the cells it occurs in, and per reason why a dtype does not apply."""
    where: dict[str, list[str]] = {}
    reasons = dict.fromkeys(
        f"{SHORT[cell.dtype]} does not apply: {cell.not_applicable}" for cell in cells if cell.not_applicable
    )
    for cell in cells:
        if cell.failure is not None:
            at = f" in {cell.failure.at}" if cell.failure.at else ""
            text = f"{cell.failure.kind}{at}: {cell.failure.message}{in_samples(cell.failure.condition)}"
            where.setdefault(text, []).append(f"{cell.device} {cell.torch} {SHORT[cell.dtype]} {cell.mode}")
    return [*reasons, *(f"{some(places, 1)}: {text}" for text, places in where.items())]


# -- the difference between two versions


def difference_document(found: Difference) -> Document:
    """The gains, then the losses."""
    title = f"{found.device} · torch {found.before} to {found.after} · {found.evidence}"
    blocks: list[Block] = [Say(title, role="title")]
    for name, changes in (("gained", found.gained), ("lost", found.lost)):
        blocks.append(Say(f"{name}: {counted(len({change.op for change in changes}), 'operator')}"))
        blocks += [_changes(changes, name)] if changes else []
    for name, ops in ((f"only in {found.before}", found.only_before), (f"new in {found.after}", found.only_after)):
        blocks += [Say(f"{name}: {', '.join(ops)}", role="hint")] if ops else []
    return Document(title, blocks)


def _changes(changes: Sequence[OpChange], name: str) -> Table:
    rows = []
    for one in changes:
        states = ((one.before, one.before_on_cpu), (one.after, one.after_on_cpu))
        cells = [
            StatusOf(_LOOKS[state], f"{state}, {_ON_CPU[on_cpu]}" if on_cpu else state) for state, on_cpu in states
        ]
        rows.append(Row([one.op, SHORT[one.dtype], *cells, ", ".join(one.modes)]))
    columns = [Column("operator"), Column("dtype"), Column("before", "status"), Column("after", "status")]
    return Table([*columns, Column("modes", "sentence")], rows, name, headings=2)


# -- missing operators


def gaps_document(found: Gaps) -> Document:
    """One line per operator, with the reason and the release that fixes it."""
    dtype = SHORT[found.dtype]
    title = f"{found.device} · torch {found.torch} · {dtype} · {found.evidence}"
    blocks: list[Block] = [Say(title, role="title")]
    blocks.append(
        Say(
            f"{len(found.missing)} of {found.runnable} operators that run in fp32 fail in {dtype}, at least for some inputs"
        )
    )
    groups = _GROUPS if found.evidence == "measured" else _GROUPS[:2]
    rows = []
    for missing in found.missing:
        of_groups = ([missing.states.get(mode) for mode in group] for group in groups)
        worst = (next((state for state in STATES if state in states), None) for states in of_groups)
        shown = [StatusOf(_LOOKS[state], state) if state else None for state in worst]
        rows.append(
            Row([missing.op, *shown, missing.fixed_in, _why(missing, is_declared=found.evidence == "declared")])
        )
    columns = [Column("operator"), *(Column(group[0], "status") for group in groups), Column("from")]
    blocks.append(Table([*columns, Column("why", "sentence")], rows, "missing operators"))
    for ops, what in (
        (
            found.not_applicable,
            f"{dtype} does not apply to {len(found.not_applicable)} more, which take complex numbers",
        ),
        (found.on_cpu, f"{len(found.on_cpu)} more run, but copy tensors to the CPU and back"),
    ):
        blocks += [Heading(what), Say(", ".join(ops))] if ops else []
    return Document(title, blocks)


def _why(missing: MissingOp, *, is_declared: bool) -> str:
    itself = missing.at and missing.at.strip("_") == missing.op.rpartition("nn.functional.")[2].replace(".", "_")
    if is_declared:
        return ("" if itself or missing.at is None else f"{missing.at}: ") + (missing.message or "")
    where = f" in {missing.at}" if missing.at else ""
    return f"{missing.kind}{where}{in_samples(missing.condition)}"


# -- What ``lowprec-check env`` shows, as blocks

_ANSWERS = {True: "yes", False: "no", None: "unknown"}


def environment_document(environment: dict[str, Any]) -> Document:
    """Names with their values."""
    features = ", ".join(environment["cpu_features"]) or "none known"
    threads = f"{environment['threads']} of {environment['cores']} cores"
    rows = [
        ("torch", environment["torch"]),
        ("python", environment["python"]),
        ("platform", environment["platform"]),
        ("device", f"{environment['device']} ({environment['device_name']})"),
        *((f"{low.short} accelerated", _ANSWERS[environment[f"{low.short}_accelerated"]]) for low in LOW_FORMATS),
        ("autocast dtype", environment["default_autocast"]),
        ("CPU", f"{environment['cpu_capability']}; {features}; {threads}"),
        ("accelerators", ", ".join(environment["accelerators"]) or "none"),
        ("torchvision", environment["torchvision"] or "not installed"),
        ("Intel extension", _ipex(environment)),
    ]
    return Document("Environment", [Pairs([(name, str(value)) for name, value in rows])])


def _ipex(environment: dict[str, Any]) -> str:
    if environment["ipex"] is None:
        return "not installed"
    verdict = (
        "compatible with this torch" if environment["ipex_fits"] else "not compatible with this torch, do not import it"
    )
    return f"{environment['ipex']}: {verdict}"


# -- The list of diagnostics as blocks, and their manual pages as text that fits the terminal

_NO_BREAK = "\0"
"""Stands for a space at which no line may end: commands are not divided."""


def list_document(rules: Iterable[Rule]) -> Document:
    """A row per diagnostic: code, name, severity, summary."""
    columns = [Column("code"), Column("name"), Column("severity", "severity"), Column("what it finds", "sentence")]
    rows = [Row([rule.code, rule.name, rule.severity, rule.summary]) for rule in sorted(rules)]
    return Document("Diagnostics", [Table(columns, rows, headings=2)])


def render_page(rule: Rule, width: int) -> str:
    """The page of one diagnostic; paragraphs are filled, code stays as it is."""
    head = f"{rule.code} {rule.name} ({rule.severity})"
    return "\n\n".join([head, *(_filled(block, width) for block in rule.manual.split("\n\n"))])


def _filled(block: str, width: int) -> str:
    """A paragraph or a numbered list in lines of ``width`` columns."""
    if block.startswith("    "):
        return block
    unbroken = re.sub(r"`[^`]+`", lambda span: re.sub(r"\s", _NO_BREAK, span[0]), block)
    items = re.split(r"\n(?=\d+\. )", unbroken)
    indents = ["   " if re.match(r"\d+\. ", item) else "" for item in items]
    filled = (
        textwrap.fill(item, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for item, indent in zip(items, indents, strict=True)
    )
    return "\n".join(filled).replace(_NO_BREAK, " ")
