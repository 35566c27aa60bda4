"""The catalog as a page that needs nothing else: operators × versions, coloured. And where both reports are written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jinja2
import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.fares import declared_fare
from lowprec_check.catalog.measured import Sweep, sweep_of, sweeps
from lowprec_check.catalog.records import LOW, MODES, Dtype, Mode, OpRecord, State
from lowprec_check.renderers.support_report import render_report
from lowprec_check.structs import Struct

CELLS: list[tuple[Dtype, Mode]] = [(dtype, mode) for dtype in LOW for mode in MODES]
_LETTER: dict[State | None, str] = {"all": "a", "some": "s", "none": "n", None: "-"}


class Column(NamedTuple):
    """One build of torch on one device; ``sweep`` where it was measured, else it is declared."""

    device: str
    label: str
    sweep: Sweep | None

    def letter(self, record: OpRecord, dtype: Dtype, mode: Mode) -> str:
        """How an operator fares there: all, some, none, by a fallback to the CPU, or unknown."""
        if self.sweep is not None:
            return _LETTER[self.sweep.state(record.op, dtype, mode)]
        if mode.startswith("autocast"):
            return _LETTER[None]
        fare = declared_fare(record.op, self.label, dtype, mode)
        return "f" if fare and fare.state == "all" and fare.on_cpu else _LETTER[fare and fare.state]


class Line(Struct, frozen=True):
    """One operator: for each of :data:`CELLS` a letter a column, and why it fails where it was last measured."""

    op: str
    states: list[str]
    why: str


def columns() -> list[Column]:
    """Every sweep, then every release declared for XPU."""
    measured = [Column(sweep.header.device, sweep.label, sweep) for sweep in sweeps()]
    return measured + [Column("xpu", release, None) for release in declared.releases()]


def lines(shown: list[Column]) -> list[Line]:
    """Every operator that runs in fp32 on one of the devices."""
    newest = sweep_of("cpu")
    records: dict[str, OpRecord] = {}
    for column in shown:
        records |= dict(column.sweep.records) if column.sweep else {}
    records |= dict(newest.records)
    return [_line(record, shown) for _, record in sorted(records.items()) if record.samples[0]]


def _line(record: OpRecord, shown: list[Column]) -> Line:
    states = ["".join(column.letter(record, dtype, mode) for column in shown) for dtype, mode in CELLS]
    said = dict.fromkeys(f.message + (f"; {f.condition}" if f.condition else "") for f in record.failures)
    return Line(record.op, states, " · ".join(said))


def render_grid() -> str:
    """The page, with style, script and data inside."""
    shown = columns()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    heads = [{"device": c.device, "label": c.label, "evidence": "measured" if c.sweep else "declared"} for c in shown]
    data = (
        msgspec.json.encode({"columns": heads, "cells": [f"{d}/{m}" for d, m in CELLS], "lines": lines(shown)})
        .decode()
        .replace("<", "\\u003c")
    )
    return environment.get_template("grid.html.jinja").render(data=data)


def write_reports(folder: Path) -> list[Path]:
    """Write ``op-support.md`` and ``op-support.html``; return their paths."""
    document, page = folder / "op-support.md", folder / "op-support.html"
    document.write_text(render_report(), encoding="utf-8")
    page.write_text(render_grid(), encoding="utf-8")
    return [document, page]
