"""Answers of the catalog as blocks: one operator, the difference between two versions, missing operators, and the whole of it."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared_support import OnCpu, OpSupport, declared_support
from lowprec_check.catalog.measured import Sweep, history, sweep_of, sweeps
from lowprec_check.catalog.missing_ops import Gaps, MissingOp
from lowprec_check.catalog.missing_ops import gaps as find_gaps
from lowprec_check.catalog.op_lookup import OpAnswer
from lowprec_check.catalog.records import LOW, MODES, SHORT, STATES, Dtype, Mode, State, in_samples
from lowprec_check.catalog.support_cells import SupportCell
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.catalog.version_diff import Difference, OpChange, difference
from lowprec_check.report.blocks import Block, Column, Document, Heading, Row, Say, StatusOf, Table, speed_of
from lowprec_check.report.layout.html import html
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.schema.devices import catalogued, is_declared
from lowprec_check.schema.files import write_file
from lowprec_check.schema.wording import counted, some

_SHOWN_OPS = 4
"""Operators shown in full if a name matches many."""
_SHOWN = 20
"""Rows in the lists of the slowest and the least accurate operators."""
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


# -- the whole catalog


def write_reports(folder: Path) -> list[Path]:
    """Write ``op-support.md`` and ``op-support.html``; return their paths."""
    document = catalog_document()
    files = {folder / "op-support.md": markdown(document, sys.maxsize), folder / "op-support.html": html(document)}
    for path, text in files.items():
        write_file(path, text)
    return list(files)


def catalog_document() -> Document:
    """Counts by version; on a page every operator that fails somewhere; missing, gained and lost ones; the slowest and the least accurate."""
    title = "Operators of torch in half and bfloat16"
    blocks: list[Block] = [
        Say(title, role="title"),
        Say(
            "Generated by lowprec-check catalog report from the files in catalog/; docs/catalog.md explains the measurements. "
            "An operator (a function in OpInfo, each variant counted separately) runs if all of its samples run. Under autocast "
            "its inputs were low-precision, as they are after a Linear layer."
        ),
        *_counts(),
        *_history(),
    ]
    blocks.append(Heading("Missing operators"))
    for device in dict.fromkeys([*(sweep.header.device for sweep in sweeps()), *_declared()]):
        blocks += _missing(device)
    blocks.append(Heading("Changes by version"))
    blocks += _gained("cpu", [sweep.version for sweep in history("cpu")])
    for device in _declared():
        blocks += _gained(device, declared.releases(device))
    blocks.append(Heading("Speed and accuracy"))
    for sweep in {sweep.header.device: sweep for sweep in sweeps() if not sweep.header.extension}.values():
        blocks += [*_slow(sweep), *_inaccurate(sweep)]
    return Document(title, blocks)


def _declared() -> list[str]:
    """The devices with declarations."""
    return [device for device in catalogued("declared") if declared.releases(device)]


class Build:
    """A build of torch on a device: what was measured or declared for it."""

    def __init__(self, device: str, label: str, sweep: Sweep | None = None) -> None:
        """Declared if there is no ``sweep``."""
        self.device, self.label, self.sweep = device, label, sweep

    @property
    def evidence(self) -> str:
        """``measured`` or ``declared``."""
        return "measured" if self.sweep else "declared"

    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The support of an operator."""
        if self.sweep is not None:
            state = self.sweep.state(op, dtype, mode)
            return OpSupport(state) if state else None
        file = declared.load(self.device, self.label)
        return None if mode.startswith("autocast") else declared_support(op, file, dtype, mode)

    def word(self, op: str, dtype: Dtype, mode: Mode) -> str:
        """``yes``, ``in part``, ``no``, ``not even in fp32``, ``on the CPU``; ``–`` if it is not known."""
        support = self.support(op, dtype, mode)
        if support is None:
            return _WORDS[None]
        if support.state == "none":
            fp32 = self.support(op, "float32", "backward" if mode.endswith("backward") else "forward")
            return "not even in fp32" if fp32 is None or fp32.state == "none" else "no"
        return _ON_CPU[support.on_cpu] if support.state == "all" and support.on_cpu else _WORDS[support.state]

    def failures(self, op: str, dtype: Dtype) -> str:
        """How an operator fails, each way once."""
        if self.sweep is not None:
            record = self.sweep.records.get(op)
            found = [failure.of(dtype) for failure in record.failures] if record else []
            texts = [failure.message + in_samples(failure.condition) for failure in found if failure]
        else:
            supports = [self.support(op, dtype, mode) for mode in MODES[:2]]
            ways = [support.failure for support in supports if support and support.failure]
            texts = [f"{way.at}: {way.message}" if way.at else way.message for way in ways]
        return " · ".join(dict.fromkeys(texts))


def builds() -> list[Build]:
    """Every sweep, then every release with declarations."""
    measured = [Build(sweep.header.device, sweep.label, sweep) for sweep in sweeps()]
    return measured + [Build(device, release) for device in _declared() for release in declared.releases(device)]


def _counts() -> Iterator[Block]:
    yield Heading("Operators that run, by version")
    yield Say("Of the operators that run in fp32; in brackets, those of which only some samples run.", role="hint")
    if _declared():
        yield Say(
            f"The rows for {', '.join(_declared())} are declared, not measured; operators that copy tensors to the CPU and back "
            "count as running.",
            role="hint",
        )
    heads = [
        "device",
        "torch",
        "capability",
        "fp32",
        *(f"{SHORT[dtype]} {mode}" for dtype in LOW for mode in MODES[:3]),
    ]
    measured = (_count(s.header.device, s.label, s.header.capability, s.records, s.state) for s in sweeps())
    declarations = (_declared_count(d, release) for d in _declared() for release in declared.releases(d))
    yield Table([*map(Column, heads)], [*measured, *declarations], "operators by version", headings=2)


def _count(
    device: str, label: str, capability: str, ops: Iterable[str], state: Callable[[str, Dtype, Mode], State | None]
) -> Row:
    runnable = [op for op in ops if state(op, "float32", "forward") in ("all", "some")]
    row: list[str | None] = [device, label, capability, str(len(runnable))]
    for dtype in LOW:
        for mode in MODES[:3]:
            states = Counter(state(op, dtype, mode) for op in runnable)
            known = states["all"] + states["some"] + states["none"]
            row.append(f"{states['all']} of {known} ({states['some']})" if known else None)
    return Row(row)


def _declared_count(device: str, release: str) -> Row:
    file = declared.load(device, release)

    def state(op: str, dtype: Dtype, mode: Mode) -> State | None:
        support = None if mode.startswith("autocast") else declared_support(op, file, dtype, mode)
        return support and support.state

    return _count(device, release, "declared", sweep_of("cpu", release).records, state)


def _history() -> Iterator[Block]:
    """A row per operator, dtype and device in which it does not always run, and the names of those that do."""
    yield Heading("Every operator, device and version", detail="all")
    yield Say(
        "What the first release of a device did, and what changed from which release on. No: no sample runs, but some do in fp32. In "
        "part: some samples run. Operators that run in every mode and release are not listed.",
        role="hint",
        detail="all",
    )
    by_device: dict[str, list[Build]] = {}
    for build in builds():
        is_extended = build.sweep is not None and build.sweep.header.extension
        name = f"{build.device} + {build.sweep.header.extension}" if is_extended and build.sweep else build.device
        by_device.setdefault(name, []).append(build)
    ops = sorted(
        {op for build in builds() if build.sweep for op, record in build.sweep.records.items() if record.samples[0]}
    )
    rows = [
        row
        for op in ops
        for dtype in LOW
        for name, of in by_device.items()
        if (row := _history_row(op, dtype, name, of))
    ]
    columns = [Column("operator"), Column("dtype"), Column("device"), *map(Column, MODES), Column("why", "sentence")]
    yield Table(columns, rows, "operators", headings=3, searchable=True, detail="all")


def _history_row(op: str, dtype: Dtype, device: str, builds: Sequence[Build]) -> Row | None:
    modes = [[(build.label.partition(" ")[0], build.word(op, dtype, mode)) for build in builds] for mode in MODES]
    if not {word for words in modes for _, word in words} - {"yes", "not even in fp32", _WORDS[None]}:
        return None
    why = builds[-1].failures(op, dtype)
    return Row([op, SHORT[dtype], device, *map(_over_time, modes), f"{builds[-1].label}: {why}" if why else ""])


def _over_time(words: Sequence[tuple[str, str]]) -> str | None:
    """``no, from 2.3 in part, from 2.4 yes``; nothing of releases for which it is not known."""
    known = [pair for pair in words if pair[1] != _WORDS[None]]
    first = [next(group) for _, group in itertools.groupby(known, lambda pair: pair[1])]
    parts = [f"from {release} {word}" if (release, word) != words[0] else word for release, word in first]
    return ", ".join(parts) or None


def _missing(device: str) -> Iterator[Block]:
    found = {dtype: find_gaps(device, dtype) for dtype in LOW}
    newest = next(iter(found.values()))
    yield Heading(f"Missing on {device}, torch {newest.torch} ({newest.evidence})", 3)
    if is_declared(device):
        text = f"These are declarations, not measurements; catalog/declared-{device}.jsonl names the source of each."
        yield Say(text, role="hint")
    states: dict[str, dict[Dtype, str]] = {}
    why: dict[str, str] = {}
    for dtype, of_dtype in found.items():
        for missing in of_dtype.missing:
            modes = [f"{mode}: {_WORDS[state]}" for mode, state in missing.states.items() if state in ("some", "none")]
            states.setdefault(missing.op, {})[dtype] = ", ".join(modes)
            at = f"{missing.at}: " if is_declared(device) and missing.at else ""
            why.setdefault(missing.op, f"{at}{missing.message}{in_samples(missing.condition)}")
    rows = [Row([op, *(of.get(dtype) for dtype in LOW), why[op]]) for op, of in sorted(states.items())]
    columns = [Column("operator"), *(Column(SHORT[dtype]) for dtype in LOW), Column("why", "sentence")]
    yield Table(columns, rows, f"missing on {device}", searchable=True)


def _gained(device: str, versions: Sequence[str]) -> Iterator[Block]:
    yield Heading(f"Gained and lost by version on {device}{' (declared)' if is_declared(device) else ''}", 3)
    for before, after in itertools.pairwise(versions):
        found = difference(before, after, device)
        parts = []
        for word, changes in (
            ("gained", [change for change in found.gained if change.before != change.after]),
            ("lost", [change for change in found.lost if change.before != change.after]),
            ("less on the CPU", [change for change in found.gained if change.before == change.after]),
            ("more on the CPU", [change for change in found.lost if change.before == change.after]),
        ):
            for dtype in LOW:
                ops = sorted({change.op for change in changes if change.dtype == dtype})
                if ops:
                    parts.append(f"{word} in {SHORT[dtype]}: {', '.join(ops)}")
        yield Say("; ".join(parts) or "nothing", role="item", lead=found.after)


def _slow(sweep: Sweep) -> Iterator[Block]:
    yield Heading(f"Slowest relative to fp32: {sweep.header.device}, torch {sweep.label} on {sweep.header.hardware}", 3)
    features = ", ".join(sweep.header.features) or "none"
    yield Say(f"Forward call of the largest sample, in one thread. CPU features: {features}.", role="hint")
    found = [
        (ratios[0], op, dtype, times.float32_us[0])
        for op, times in sweep.times.items()
        for dtype, ratios in times.slower.items()
        if ratios[0] is not None
    ]
    slowest = sorted(found, key=lambda row: (-row[0], row[1]))[:_SHOWN]
    rows = [Row([op, SHORT[dtype], speed_of(1 / ratio), f"{base:g} µs"]) for ratio, op, dtype, base in slowest]
    columns = [Column("operator"), Column("dtype"), Column("speed", "speed"), Column("time in fp32")]
    yield Table(columns, rows, "slowest operators")


def _inaccurate(sweep: Sweep) -> Iterator[Block]:
    yield Heading(f"Least accurate: {sweep.header.device}, torch {sweep.label}", 3)
    yield Say(
        "Error of the output in units in the last place (ulp) of the dtype; a kernel that computes exactly and rounds once has at "
        "most 0.5.",
        role="hint",
    )
    found = [
        (ulp[0].median, ulp[0].max, op, dtype)
        for op, record in sweep.records.items()
        for dtype, ulp in record.ulp.items()
        if dtype != "float32" and ulp[0] is not None and ulp[0].median is not None
    ]
    worst = sorted(found, key=lambda row: (-row[0], row[2]))[:_SHOWN]
    rows = [
        Row([op, SHORT[dtype], median, "inf" if most is None else f"{most:g}"]) for median, most, op, dtype in worst
    ]
    yield Table(
        [Column("operator"), Column("dtype"), Column("median", "figure"), Column("max")],
        rows,
        "least accurate operators",
    )
