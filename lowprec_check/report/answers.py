"""Answers without a scan, as blocks: operators of the catalog, the hardware, the manual."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lowprec_check.catalog.answers import Difference, Gaps, OpAnswer
from lowprec_check.catalog.records import SHORT, STATES, Mode, OnCpu, State, SupportCell, in_samples
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
    cell_text,
    speed_of,
)
from lowprec_check.schema.axes import is_declared
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.statements import counted, fill, some

if TYPE_CHECKING:
    from lowprec_check.analysis.rules.registry import Rule

_SHOWN_OPS = 4
"""Operators shown in full if a name matches many."""
_GROUPS: tuple[tuple[Mode, ...], ...] = (("forward",), ("backward",), ("autocast", "autocast-backward"))
_ON_CPU: dict[OnCpu, str] = {"wholly": "on the CPU", "partly": "partly on the CPU"}
_LOOKS: dict[State | None, str] = {"all": "ok", "some": "inaccurate", "none": "error", None: "skipped"}
"""The status whose colour a state has."""
_WORDS: dict[State | None, str] = {"all": "yes", "some": "in part", "none": "no", None: "–"}


# -- one operator


def answers_document(answers: Sequence[OpAnswer]) -> Document:
    """A table per operator (devices × dtypes × modes), then its failures and reported issues."""
    blocks: list[Block] = []
    if dispatching := answers[0].dispatching:
        text = f"{dispatching} is not an operator in the catalog; these operators dispatch it:"
        blocks.append(Say(text, "warn", "note"))
    for answer in answers[:_SHOWN_OPS]:
        here = [cell for cell in answer.cells if cell.torch == answer.installed and not cell.extension]
        others = [cell for cell in answer.cells if cell not in here]
        blocks.append(Heading(" · ".join(_head(answer, is_here=bool(here)))))
        if answer.note:
            blocks.append(Say(answer.note, "warn", "note"))
        tables = [_support_table(cells) for cells in (here, others) if cells]
        blocks += tables[:1]
        if len(tables) > 1:
            blocks += [Say("other releases: the newest of each device", role="hint"), tables[1]]
        if answer is answers[0]:
            blocks += [Say(line, role="hint") for line in _legend(tables)]
        # why dtypes do not apply, then each failure once, with the first of its often many cells
        failing: dict[str, list[str]] = {}
        unfit = [cell for cell in answer.cells if cell.not_applicable]
        lines = [f"{SHORT[cell.dtype]} does not apply: {cell.not_applicable}" for cell in unfit]
        for cell in answer.cells:
            if failure := cell.failure:
                text = f"{failure.kind}{fill(' in {}', failure.at)}: {failure.message}{in_samples(failure.condition)}"
                failing.setdefault(text, []).append(f"{cell.device} {cell.torch} {SHORT[cell.dtype]} {cell.mode}")
        lines += [f"{some(places, 1)}: {text}" for text, places in failing.items()]
        blocks += [Say(line, role="hint") for line in dict.fromkeys(lines)]
        for issue in answer.issues:
            fixed, where = fill(" (fixed in {})", issue.fixed), fill(" for {}", ", ".join(issue.devices))
            blocks += [Say(f"reported{where}: {issue.title}{fixed}"), Say(issue.link, role="hint")]
    if len(answers) > _SHOWN_OPS:
        blocks.append(Say(f"Also: {', '.join(answer.op for answer in answers[_SHOWN_OPS:])}"))
    for device, versions in answers[0].elsewhere.items():
        evidence = "declared" if is_declared(device) else "measured"
        span = " to ".join(dict.fromkeys((versions[0], versions[-1])))
        blocks.append(Say(f"{device}: {evidence} only for torch {span}", role="hint"))
    return Document(answers[0].op, blocks)


def _support_table(cells: Sequence[SupportCell]) -> Table:
    """A row per device, release and dtype."""
    cells_by_row: dict[tuple[str, str, str], list[SupportCell]] = {}
    for cell in cells:
        device, version = cell.device, cell.torch
        if cell.evidence != "measured":
            device = f"{device}, {cell.evidence}"
        if cell.extension:
            version = f"{version} ipex"
        cells_by_row.setdefault((device, version, SHORT[cell.dtype]), []).append(cell)
    rows = []
    for key, of_row in cells_by_row.items():
        modes = [_support([cell for cell in of_row if cell.mode in group]) for group in _GROUPS]
        error = next((cell.error for cell in of_row if cell.error is not None and cell.mode == "forward"), None)
        ulp = error and f"{_ulp_figure(error.median)}…{_ulp_figure(error.max)}"
        slower = next((cell.slower for cell in of_row if cell.slower), None)
        rows.append(Row([*key, *modes, ulp, slower and speed_of(1 / slower)]))
    columns = [Column(name) for name in ("device", "torch", "dtype")]
    columns += [Column(group[0], "status") for group in _GROUPS]
    return Table([*columns, Column("ulp"), Column("speed", "speed")], rows, headings=3)


def _ulp_figure(value: float | None) -> str:
    if value is None:
        return "inf"
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _legend(tables: Sequence[Table]) -> Iterator[str]:
    """Explains the marks that occur in the tables, in at most three lines."""
    texts: dict[str, set[str]] = {}
    for table in tables:
        for at, column in enumerate(table.columns):
            texts.setdefault(column.name, set()).update(cell_text(row.cells[at], column.type) for row in table.rows)
    cells = " ".join(text for name in (*(group[0] for group in _GROUPS), "ulp", "speed") for text in texts[name])
    marks = {
        "since": "since 2.2: all samples run from torch 2.2 on",
        "≤": "≤: or earlier",
        " of ": "6 of 10: only these run",
        "–": "–: not known",
    }
    if any(mark in cells for mark in marks):
        yield "; ".join(text for mark, text in marks.items() if mark in cells)
    if texts["ulp"] - {"–"}:
        yield "ulp: median…largest error in units in the last place; correct rounding gives at most 0.5"
    how = []
    if texts["speed"] - {"–"}:
        how.append("speed: largest sample against fp32, one thread")
    if any("declared" in device for device in texts["device"]):
        how.append("declared: read in torch's sources, not run")
    if how:
        yield "; ".join(how)


def _head(answer: OpAnswer, *, is_here: bool) -> Iterator[str]:
    """The operator, whether the catalog covers the installed torch, what it dispatches."""
    yield answer.op
    if answer.installed == "":
        yield "torch is not installed"
    elif answer.installed:
        missing = ""
        if not is_here:
            newest = max((version_key(cell.torch) for cell in answer.cells), default=())
            relation = "newer than" if version_key(answer.installed) > newest else "not in"
            devices = {cell.device for cell in answer.cells}
            missing = f" is {relation} the catalog{fill(' of {}', len(devices) == 1 and devices.pop())}"
        yield f"torch {answer.installed} (installed){missing}"
    yield f"dispatches {some(answer.aten, 4)}"


def _support(cells: list[SupportCell]) -> StatusOf | None:
    """The worst of the cells; under autocast, forward and backward share a column."""
    with_state = [cell for cell in cells if cell.state is not None]
    if not with_state:
        return StatusOf("skipped", "n/a") if any(cell.not_applicable for cell in cells) else None
    cell = min(with_state, key=lambda cell: STATES.index(cell.state or "all"))
    # both run from the release on that the later one needs
    for other in with_state:
        if cell.state == "all" and other.failed_before and _since(other) > _since(cell):
            cell = other
    words = _WORDS[cell.state]
    if cell.state == "all" and cell.on_cpu == "wholly":
        words = "on the CPU"
    elif cell.state == "all" and cell.on_cpu:
        words = f"{cell.at} on the CPU"
    elif cell.state == "all":
        words = f"since {'≤' if cell.since_oldest else ''}{cell.since}"
    elif cell.state == "some" and cell.samples:
        words = f"{cell.passed} of {cell.samples}"
    return StatusOf(_LOOKS[cell.state], words + fill(", from {}", cell.fixed_in))


def _since(cell: SupportCell) -> tuple[object, ...]:
    return version_key(cell.since or "")


# -- the difference between two versions


def difference_document(found: Difference) -> Document:
    """The gains, then the losses."""
    title = f"{found.device} · torch {found.before} to {found.after} · {found.evidence}"
    blocks: list[Block] = [Say(title, role="title")]
    columns = [Column("operator"), Column("dtype"), Column("before", "status"), Column("after", "status")]
    columns.append(Column("modes", "sentence"))
    for name, changes in (("gained", found.gained), ("lost", found.lost)):
        blocks.append(Say(f"{name}: {counted(len({change.op for change in changes}), 'operator')}"))
        rows = []
        for change in changes:
            states = ((change.before, change.before_on_cpu), (change.after, change.after_on_cpu))
            cells = [
                StatusOf(_LOOKS[state], f"{state}, {_ON_CPU[on_cpu]}" if on_cpu else state) for state, on_cpu in states
            ]
            rows.append(Row([change.op, SHORT[change.dtype], *cells, ", ".join(change.modes)]))
        if rows:
            blocks.append(Table(columns, rows, name, headings=2))
    # what only one release has data for is neither gained nor lost
    for version, ops in ((found.before, found.only_before), (found.after, found.only_after)):
        if ops:
            blocks.append(Say(f"measured in {version} only: {', '.join(ops)}", role="hint"))
    return Document(title, blocks)


# -- missing operators


def gaps_document(found: Gaps) -> Document:
    """One line per operator, with the reason and the release that fixes it."""
    dtype, is_measured = SHORT[found.dtype], found.evidence == "measured"
    title = f"{found.device} · torch {found.torch} · {dtype} · {found.evidence}"
    share = f"{len(found.missing)} of {found.runnable} operators that run in fp32"
    groups = _GROUPS if is_measured else _GROUPS[:2]
    rows = []
    for missing in found.missing:
        of_groups = ([missing.states.get(mode) for mode in group] for group in groups)
        worst = (next((state for state in STATES if state in states), None) for states in of_groups)
        shown = [StatusOf(_LOOKS[state], state) if state else None for state in worst]
        why = f"{missing.kind}{fill(' in {}', missing.at)}{in_samples(missing.condition)}"
        if not is_measured:
            # a declaration names the failing op only where the catalog calls it otherwise
            name = missing.op.rpartition("nn.functional.")[2].replace(".", "_")
            why = missing.message or ""
            if missing.at and missing.at.strip("_") != name:
                why = f"{missing.at}: {why}"
        rows.append(Row([missing.op, *shown, missing.fixed_in, why]))
    columns = [Column("operator"), *(Column(group[0], "status") for group in groups), Column("from")]
    table = Table([*columns, Column("why", "sentence")], rows, "missing operators")
    blocks: list[Block] = [Say(title, role="title"), Say(f"{share} fail in {dtype}, at least for some inputs"), table]
    for_complex = f"{dtype} does not apply to {len(found.not_applicable)} more, which take complex numbers"
    on_cpu = f"{len(found.on_cpu)} more run, but copy tensors to the CPU and back"
    for ops, what in ((found.not_applicable, for_complex), (found.on_cpu, on_cpu)):
        if ops:
            blocks += [Heading(what), Say(", ".join(ops))]
    return Document(title, blocks)


# -- the hardware


def environment_document(environment: dict[str, Any]) -> Document:
    """Names with their values."""
    features = ", ".join(environment["cpu_features"]) or "none known"
    threads = f"{environment['threads']} of {environment['cores']} cores"
    words = {True: "yes", False: "no", None: "unknown"}
    # the extension is built for one release of torch
    ipex = f"{environment['ipex']}: not compatible with this torch, do not import it"
    if environment["ipex"] is None:
        ipex = "not installed"
    elif environment["ipex_fits"]:
        ipex = f"{environment['ipex']}: compatible with this torch{fill('; {}', environment['ipex_limit'])}"
    rows = [
        ("torch", environment["torch"]),
        ("python", environment["python"]),
        ("platform", environment["platform"]),
        ("device", f"{environment['device']} ({environment['device_name']})"),
        *((f"{low.short} accelerated", words[environment[f"{low.short}_accelerated"]]) for low in LOW_FORMATS),
        ("autocast dtype", environment["default_autocast"]),
        ("CPU", f"{environment['cpu_capability']}; {features}; {threads}"),
        ("accelerators", ", ".join(environment["accelerators"]) or "none"),
        ("torchvision", environment["torchvision"] or "not installed"),
        ("Intel extension", ipex),
    ]
    return Document("Environment", [Pairs([(name, str(value)) for name, value in rows])])


# -- diagnostics


def list_document(rules: Iterable[Rule]) -> Document:
    """A row per diagnostic: code, name, severity, summary."""
    columns = [Column("code"), Column("name"), Column("severity", "severity"), Column("what it finds", "sentence")]
    rows = [Row([rule.code, rule.name, rule.severity, rule.summary]) for rule in sorted(rules)]
    return Document("Diagnostics", [Table(columns, rows, headings=2)])
