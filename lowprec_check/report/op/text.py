"""Answers of the catalog as text: one operator, the difference between two versions, missing operators."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lowprec_check.catalog.declared_support import OnCpu
from lowprec_check.catalog.missing_ops import Gaps, MissingOp
from lowprec_check.catalog.op_lookup import OpAnswer
from lowprec_check.catalog.records import SHORT, STATES, Dtype, Mode, State, in_samples
from lowprec_check.catalog.support_cells import SupportCell
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.catalog.version_diff import Difference, OpChange
from lowprec_check.report.console import print_table, screen
from lowprec_check.schema.devices import is_declared

SHOWN_OPS = 4
"""Operators shown in full if a name matches many."""

_STYLE = {"all": "green", "some": "yellow", "none": "red", None: "dim"}
_ON_CPU: dict[OnCpu, str] = {"wholly": "on the CPU", "partly": "partly on the CPU"}
_GROUPS: tuple[tuple[Mode, ...], ...] = (("forward",), ("backward",), ("autocast", "autocast-backward"))


def render_answers(answers: Sequence[OpAnswer], *, width: int = 100, color: bool = False) -> str:
    """One table per operator: devices × dtypes × modes, then its failures and the issues reported about it."""
    with screen(width, color) as (console, printed):
        if dispatching := answers[0].dispatching:
            console.print(
                Text(f"{dispatching} is not an operator in the catalog; these operators dispatch it:\n", style="yellow")
            )
        for answer in answers[:SHOWN_OPS]:
            _print_answer(console, answer)
        if len(answers) > SHOWN_OPS:
            console.print(f"Also: {', '.join(answer.op for answer in answers[SHOWN_OPS:])}")
        for device, versions in answers[0].elsewhere.items():
            evidence = "declared" if is_declared(device) else "measured"
            console.print(Text(f"{device}: {evidence} only for torch {_span(versions)}", style="dim"))
    return printed.text


def _print_answer(console: Console, answer: OpAnswer) -> None:
    here = [cell for cell in answer.cells if cell.torch == answer.installed and not cell.extension]
    others = [cell for cell in answer.cells if cell not in here]
    about = " · ".join(filter(None, (_installed(answer, here), f"dispatches {_few(answer.aten)}")))
    console.print(Text.assemble((answer.op, "bold"), (" · ", "dim"), (about, "dim")))
    if answer.note:
        console.print(Text(answer.note, style="yellow"))
    if here:
        _print_cells(console, here)
    if here and others:
        console.print(Text("other releases: the newest of each device", style="dim"))
    if others:
        _print_cells(console, others)
    for line in _failures(answer.cells):
        console.print(Text(line, style="dim"))
    for issue in answer.issues:
        fixed = f" (fixed in {issue.fixed})" if issue.fixed else ""
        where = f" for {', '.join(issue.devices)}" if issue.devices else ""
        console.print(Text(f"reported{where}: {issue.title}{fixed}"))
        console.print(Text(f"  {issue.link}", style="dim"), soft_wrap=True)
    console.print()


def _installed(answer: OpAnswer, here: Sequence[SupportCell]) -> str:
    """What the answer says about the installed torch; empty if a release was asked for."""
    if not answer.installed:
        return "torch is not installed" if answer.installed == "" else ""
    if here:
        return f"torch {answer.installed} (installed)"
    newest = max((version_key(cell.torch) for cell in answer.cells), default=())
    is_newer = version_key(answer.installed) > newest
    return f"torch {answer.installed} (installed) is {'newer than the catalog' if is_newer else 'not in the catalog'}"


def _print_cells(console: Console, cells: Sequence[SupportCell]) -> None:
    """A row per device, release and dtype."""
    found: dict[tuple[str, str, Dtype], list[SupportCell]] = {}
    for cell in cells:
        version = f"{cell.torch} ipex" if cell.extension else cell.torch
        found.setdefault((cell.device, version, cell.dtype), []).append(cell)
    rows: list[list[str | Text]] = []
    for (device, torch, dtype), of_row in found.items():
        modes = [[cell for cell in of_row if cell.mode in group] for group in _GROUPS]
        figures = (_ulp(of_row), _times(of_row), _evidence(of_row))
        rows.append([device, torch, SHORT[dtype], *map(_support, modes), *figures])
    names = ["device", "torch", "dtype", *(group[0] for group in _GROUPS), "ulp", "time", "evidence"]
    print_table(console, names, rows, heading=3, gap=1)


def _support(cells: list[SupportCell]) -> Text:
    """The worst of the cells; under autocast, forward and backward share a column."""
    known = [cell for cell in cells if cell.state is not None]
    if not known:
        return Text("n/a" if any(cell.not_applicable for cell in cells) else "–", style="dim")
    cell = min(known, key=lambda cell: STATES.index(cell.state or "all"))
    if cell.state == "all":
        words = f"since {'≤' if cell.since_oldest else ''}{cell.since}"
        words = "on the CPU" if cell.on_cpu == "wholly" else f"{cell.at} on the CPU" if cell.on_cpu else words
    elif cell.state == "some":
        words = f"{cell.passed} of {cell.samples}" if cell.samples else "in part"
    else:
        words = "no"
    return Text(words + (f", from {cell.fixed_in}" if cell.fixed_in else ""), style=_STYLE[cell.state])


def _ulp(cells: list[SupportCell]) -> str:
    error = next((cell.error for cell in cells if cell.error is not None and cell.mode == "forward"), None)
    if error is None:
        return "–"
    return "…".join("inf" if value is None else _short(value) for value in (error.median, error.max))


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 or value >= 1e4 else f"{value:.0f}"


def _times(cells: list[SupportCell]) -> str:
    slower = next((cell.slower for cell in cells if cell.slower is not None), None)
    return "–" if slower is None else f"{slower:.2g} ×"


def _evidence(cells: list[SupportCell]) -> str:
    registration = next((cell.registration for cell in cells if cell.registration), None)
    return f"declared {registration}" if registration not in (None, "composite") else cells[0].evidence


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
    return [*reasons] + [
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {text}"
        for text, places in where.items()
    ]


# -- the difference between two versions


def render_difference(found: Difference, *, width: int = 100, color: bool = False) -> str:
    """The gains, then the losses."""
    with screen(width, color) as (console, printed):
        head = f"{found.device} · torch {found.before} to {found.after} · {found.evidence}"
        console.print(Text(head, style="bold"))
        for title, changes, style in (("gained", found.gained, "green"), ("lost", found.lost, "red")):
            ops = len({change.op for change in changes})
            console.print(Text(f"{title}: {ops} operator{'s' if ops != 1 else ''}", style=style))
            if changes:
                _print_changes(console, changes)
        for title, names in (
            (f"only in {found.before}", found.only_before),
            (f"new in {found.after}", found.only_after),
        ):
            if names:
                console.print(Text(f"{title}: {', '.join(names)}", style="dim"))
    return printed.text


def _print_changes(console: Console, changes: Sequence[OpChange]) -> None:
    rows: list[list[str | Text]] = []
    for change in changes:
        before, after = _state_text(change.before, change.before_on_cpu), _state_text(change.after, change.after_on_cpu)
        rows.append([change.op, SHORT[change.dtype], before, after, ", ".join(change.modes)])
    print_table(console, ["operator", "dtype", "before", "after", "modes"], rows, sentences=True, heading=2)


def _state_text(state: State, on_cpu: OnCpu | None) -> Text:
    return Text(f"{state}, {_ON_CPU[on_cpu]}" if on_cpu else state, style=_STYLE[state])


# -- missing operators


def render_gaps(found: Gaps, *, width: int = 100, color: bool = False) -> str:
    """One line per operator, with the reason and the release that fixes it."""
    with screen(width, color) as (console, printed):
        head = f"{found.device} · torch {found.torch} · {SHORT[found.dtype]} · {found.evidence}"
        console.print(Text(head, style="bold"))
        console.print(
            f"{len(found.missing)} of {found.runnable} operators that run in fp32 fail in {SHORT[found.dtype]}, at least for some inputs"
        )
        groups = _GROUPS if found.evidence == "measured" else _GROUPS[:2]
        rows: list[list[str | Text]] = []
        for missing in found.missing:
            shown = (_worst([missing.states.get(mode) for mode in group]) for group in groups)
            why = _why(missing, declared=found.evidence == "declared")
            rows.append([missing.op, *shown, missing.fixed_in or "–", why])
        print_table(console, ["operator", *(group[0] for group in groups), "from", "why"], rows, sentences=True)
        if found.not_applicable:
            what = (
                f"{SHORT[found.dtype]} does not apply to {len(found.not_applicable)} more, which take complex numbers"
            )
            console.print(f"\n{what}: {', '.join(found.not_applicable)}")
        if found.on_cpu:
            what = f"{len(found.on_cpu)} more run, but copy tensors to the CPU and back"
            console.print(f"\n{what}: {', '.join(found.on_cpu)}")
    return printed.text


def _worst(states: list[State | None]) -> Text:
    state = next((state for state in STATES if state in states), None)
    return Text(state or "–", style=_STYLE[state])


def _why(missing: MissingOp, *, declared: bool) -> str:
    itself = missing.at and missing.at.strip("_") == missing.op.rpartition("nn.functional.")[2].replace(".", "_")
    if declared:
        return ("" if itself or missing.at is None else f"{missing.at}: ") + (missing.message or "")
    where = f" in {missing.at}" if missing.at else ""
    return f"{missing.kind}{where}{in_samples(missing.condition)}"


def _span(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def _few(names: Sequence[str], shown: int = 4) -> str:
    more = f", … ({len(names)})" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
