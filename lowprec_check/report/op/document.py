"""The catalog as a document: counts by version, what is missing and why, what was gained, what is slow, what is inexact."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from tabulate import tabulate

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared_support import declared_support
from lowprec_check.catalog.measured import Sweep, history, sweep_of, sweeps
from lowprec_check.catalog.missing_ops import gaps
from lowprec_check.catalog.records import LOW, MODES, SHORT, Dtype, Mode, State, in_samples
from lowprec_check.catalog.version_diff import difference
from lowprec_check.schema.devices import catalogued, is_declared

_StateOf = Callable[[str, Dtype, Mode], State | None]
SHOWN = 20
"""Rows of the lists of the slowest and the least exact."""


def render_report() -> str:
    """The whole document, in markdown."""
    parts = [
        "# Operators in half and bfloat16",
        "",
        "Made by `lowprec-check catalog report` from the files in `catalog/`; docs/catalog.md says how they are measured. "
        "The same as a coloured grid of operators × versions: [op-support.html](op-support.html).",
        "",
        "An operator (a function that OpInfo describes, variants apart) *runs* where all of its samples do. Under autocast its "
        "inputs were low-precision, as they are behind a Linear.",
        "",
        *_counts(),
    ]
    for device in dict.fromkeys(sweep.header.device for sweep in sweeps()):
        parts += _missing(device)
    for device in _declared():
        parts += _missing(device)
    parts += _gained("cpu", [sweep.version for sweep in history("cpu")])
    for device in _declared():
        parts += _gained(device, declared.releases(device))
    for sweep in {sweep.header.device: sweep for sweep in sweeps() if not sweep.header.extension}.values():
        parts += [*_slow(sweep), *_inexact(sweep)]
    return "\n".join(parts).rstrip() + "\n"


def _declared() -> list[str]:
    """The devices with declarations."""
    return [device for device in catalogued("declared") if declared.releases(device)]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [str(tabulate(list(rows), headers=head, tablefmt="github", disable_numparse=True)), ""]


def _counts() -> Iterator[str]:
    yield "## Operators that run, by version"
    yield ""
    yield "Of those that run in fp32; in brackets those of which some samples do. On XPU as declared, not measured; those that run "
    yield "there by being copied to the CPU, wholly or in part, count as running."
    yield ""
    head = ["device", "torch", "capability", "fp32", *(f"{SHORT[dtype]} {mode}" for dtype in LOW for mode in MODES[:3])]
    measured = (_count(s.header.device, s.label, s.header.capability, s.records, s.state) for s in sweeps())
    declarations = (_declared_count(d, release) for d in _declared() for release in declared.releases(d))
    yield from _table(head, [*measured, *declarations])


def _count(device: str, label: str, capability: str, ops: Iterable[str], state: _StateOf) -> list[object]:
    runnable = [op for op in ops if state(op, "float32", "forward") in ("all", "some")]
    row: list[object] = [device, label, capability, len(runnable)]
    for dtype in LOW:
        for mode in MODES[:3]:
            states = Counter(state(op, dtype, mode) for op in runnable)
            known = states["all"] + states["some"] + states["none"]
            row.append(f"{states['all']} of {known} ({states['some']})" if known else "–")
    return row


def _declared_count(device: str, release: str) -> list[object]:
    file = declared.load(device, release)

    def state(op: str, dtype: Dtype, mode: Mode) -> State | None:
        support = None if mode.startswith("autocast") else declared_support(op, file, dtype, mode)
        return support and support.state

    return _count(device, release, "declared", sweep_of("cpu", release).records, state)


def _missing(device: str) -> Iterator[str]:
    found = {dtype: gaps(device, dtype) for dtype in LOW}
    newest = next(iter(found.values()))
    yield f"## Missing on {device}, torch {newest.torch} ({newest.evidence})"
    yield ""
    if is_declared(device):
        yield "Declared is not measured: docs/declared-xpu.md names the sources and what they cannot know."
        yield ""
    rows: dict[str, dict[Dtype, list[str]]] = {}
    why: dict[str, str] = {}
    for dtype, of_dtype in found.items():
        for missing in of_dtype.missing:
            states = [f"{mode}: {state}" for mode, state in missing.states.items() if state in ("some", "none")]
            rows.setdefault(missing.op, {})[dtype] = states
            raised = (
                f"`{missing.at}`: {missing.message}" if is_declared(device) and missing.at else f"`{missing.message}`"
            )
            why.setdefault(missing.op, raised + in_samples(missing.condition))
    yield from _table(
        ["operator", *(SHORT[dtype] for dtype in LOW), "why"],
        (
            [op, *(", ".join(of[dtype]) if dtype in of else "–" for dtype in LOW), why[op]]
            for op, of in sorted(rows.items())
        ),
    )


def _gained(device: str, versions: Sequence[str]) -> Iterator[str]:
    yield f"## What versions gained and lost on {device}{', as declared' if is_declared(device) else ''}"
    yield ""
    for before, after in itertools.pairwise(versions):
        found = difference(before, after, device)
        said = []
        for word, changes in (
            ("gained", [change for change in found.gained if change.before != change.after]),
            ("lost", [change for change in found.lost if change.before != change.after]),
            ("less on the CPU", [change for change in found.gained if change.before == change.after]),
            ("more on the CPU", [change for change in found.lost if change.before == change.after]),
        ):
            for dtype in LOW:
                ops = sorted({change.op for change in changes if change.dtype == dtype})
                if ops:
                    said.append(f"{word} in {SHORT[dtype]}: {', '.join(ops)}")
        yield f"- **{found.after}**: {'; '.join(said) or 'nothing'}"
    yield ""


def _slow(sweep: Sweep) -> Iterator[str]:
    yield f"## Slowest against fp32: {sweep.header.device}, torch {sweep.label} on {sweep.header.hardware}"
    yield ""
    yield f"Forward, of the largest sample, in one thread. CPU features: {', '.join(sweep.header.features) or 'none'}."
    yield ""
    found = [
        (ratios[0], op, dtype, times.float32_us[0])
        for op, times in sweep.times.items()
        for dtype, ratios in times.slower.items()
        if ratios[0] is not None
    ]
    slowest = sorted(found, key=lambda row: (-row[0], row[1]))[:SHOWN]
    rows = ([op, SHORT[dtype], f"{ratio:.2g} ×", f"{base:g} µs"] for ratio, op, dtype, base in slowest)
    yield from _table(["operator", "dtype", "time", "fp32"], rows)


def _inexact(sweep: Sweep) -> Iterator[str]:
    yield f"## Least exact: {sweep.header.device}, torch {sweep.label}"
    yield ""
    yield "Median error of the output in units in the last place of the dtype; an exact kernel that rounds once has up to 0.5."
    yield ""
    found = [
        (ulp[0].median, ulp[0].max, op, dtype)
        for op, record in sweep.records.items()
        for dtype, ulp in record.ulp.items()
        if dtype != "float32" and ulp[0] is not None and ulp[0].median is not None
    ]
    worst = sorted(found, key=lambda row: (-row[0], row[2]))[:SHOWN]
    rows = (
        [op, SHORT[dtype], f"{median:g}", "inf" if most is None else f"{most:g}"] for median, most, op, dtype in worst
    )
    yield from _table(["operator", "dtype", "median", "max"], rows)
