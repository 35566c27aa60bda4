"""The catalog as a page that needs nothing else: operators × versions, coloured. And where both reports are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.fares import Fare, OnCpu, declared_fare
from lowprec_check.catalog.measured import Sweep, sweep_of, sweeps
from lowprec_check.catalog.records import LOW, MODES, Dtype, Mode, OpRecord, State, in_samples
from lowprec_check.renderers.support_report import render_report
from lowprec_check.structs import Struct

CELLS: list[tuple[Dtype, Mode]] = [(dtype, mode) for dtype in LOW for mode in MODES]
_LETTER: dict[State | None, str] = {"all": "a", "some": "s", "none": "n", None: "-"}
_ON_CPU: dict[OnCpu | None, str] = {"wholly": "f", "partly": "p", None: "a"}
NOT_IN_FP32 = "o"


class Column(NamedTuple):
    """One build of torch on one device; ``sweep`` where it was measured, else it is declared."""

    device: str
    label: str
    sweep: Sweep | None

    def letter(self, op: str, described: OpRecord | None, dtype: Dtype, mode: Mode) -> str:
        """How an operator fares there: all, some, none, not in fp32 either, wholly or partly on the CPU, or unknown.

        What is declared is of the operator as it is ``described`` by the newest sweep of the CPU.
        """
        plain = MODES[MODES.index(mode) % 2]
        fare, fp32 = (self._fare(op, described, d, m) for d, m in ((dtype, mode), ("float32", plain)))
        if fare is None:
            return _LETTER[None]
        if fare.state == "none" and (fp32 is None or fp32.state == "none"):
            return NOT_IN_FP32
        return _ON_CPU[fare.on_cpu] if fare.state == "all" else _LETTER[fare.state]

    def _fare(self, op: str, described: OpRecord | None, dtype: Dtype, mode: Mode) -> Fare | None:
        if self.sweep is not None:
            state = self.sweep.state(op, dtype, mode)
            return Fare(state) if state else None
        if described is None or mode.startswith("autocast"):
            return None
        return declared_fare(described, self.label, dtype, mode)


class Line(Struct, frozen=True):
    """One operator: for each of :data:`CELLS` a letter a column; for each low dtype :func:`why` it fails."""

    op: str
    states: list[str]
    why: list[str]


def columns() -> list[Column]:
    """Every sweep, then every release declared for XPU."""
    measured = [Column(sweep.header.device, sweep.label, sweep) for sweep in sweeps()]
    return measured + [Column("xpu", release, None) for release in declared.releases()]


def lines(shown: list[Column]) -> list[Line]:
    """Every operator of which a sample runs in one of the sweeps, in any dtype."""
    measured, on_cpu = [column.sweep for column in shown if column.sweep], sweep_of("cpu").records
    ops = {op for sweep in measured for op, record in sweep.records.items() if record.samples[0]}
    return [
        Line(
            op,
            ["".join(column.letter(op, on_cpu.get(op), dtype, mode) for column in shown) for dtype, mode in CELLS],
            [why(op, dtype, measured) for dtype in LOW],
        )
        for op in sorted(ops)
    ]


def why(op: str, dtype: Dtype, measured: Sequence[Sweep]) -> str:
    """How it fails in the last sweep of each device that has it, extensions apart: a line a device."""
    last = {sweep.header.device: sweep for sweep in measured if op in sweep.records and not sweep.header.extension}
    told = []
    for device, sweep in last.items():
        failures = [failure for whole in sweep.records[op].failures if (failure := whole.of(dtype))]
        said = dict.fromkeys(failure.message + in_samples(failure.condition) for failure in failures)
        if said:
            told.append(f"{device} {sweep.release}: {' · '.join(said)}")
    return "\n".join(told)


def render_grid() -> str:
    """The page, with style, script and data inside."""
    shown = columns()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    heads = [{"device": c.device, "label": c.label, "evidence": "measured" if c.sweep else "declared"} for c in shown]
    cells = [f"{dtype}/{mode}" for dtype, mode in CELLS]
    data = msgspec.json.encode({"columns": heads, "dtypes": LOW, "cells": cells, "lines": lines(shown)}).decode()
    return environment.get_template("grid.html.jinja").render(data=data.replace("<", "\\u003c"))


def write_reports(folder: Path) -> list[Path]:
    """Write ``op-support.md`` and ``op-support.html``; return their paths."""
    document, page = folder / "op-support.md", folder / "op-support.html"
    document.write_text(render_report(), encoding="utf-8")
    page.write_text(render_grid(), encoding="utf-8")
    return [document, page]
