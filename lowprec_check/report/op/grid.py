"""The catalog as a self-contained page, a coloured grid of operators × versions; writes both reports."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared_support import OnCpu, OpSupport, declared_support
from lowprec_check.catalog.measured import Sweep, sweeps
from lowprec_check.catalog.records import LOW, MODES, Dtype, Mode, State, in_samples
from lowprec_check.report.op.document import render_report
from lowprec_check.report.template import fill, script_in, security_policy
from lowprec_check.schema.base import Struct
from lowprec_check.schema.devices import catalogued
from lowprec_check.schema.files import write_file

CELLS: list[tuple[Dtype, Mode]] = [(dtype, mode) for dtype in LOW for mode in MODES]
_LETTER: dict[State | None, str] = {"all": "a", "some": "s", "none": "n", None: "-"}
_ON_CPU: dict[OnCpu | None, str] = {"wholly": "f", "partly": "p", None: "a"}
NOT_IN_FP32 = "o"


class Column(NamedTuple):
    """One build of torch on one device; declared if ``sweep`` is ``None``."""

    device: str
    label: str
    sweep: Sweep | None

    def letter(self, op: str, dtype: Dtype, mode: Mode) -> str:
        """The letter of an operator's state: all, some, none, not in fp32 either, all on the CPU, all partly on the CPU, or unknown."""
        plain = MODES[MODES.index(mode) % 2]
        support, fp32 = (self.support(op, d, m) for d, m in ((dtype, mode), ("float32", plain)))
        if support is None:
            return _LETTER[None]
        if support.state == "none" and (fp32 is None or fp32.state == "none"):
            return NOT_IN_FP32
        return _ON_CPU[support.on_cpu] if support.state == "all" else _LETTER[support.state]

    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The support of an operator, measured or declared."""
        if self.sweep is not None:
            state = self.sweep.state(op, dtype, mode)
            return OpSupport(state) if state else None
        return None if mode.startswith("autocast") else declared_support(op, self._declarations, dtype, mode)

    @property
    def _declarations(self) -> declared.Release:
        return declared.load(self.device, self.label)

    def failures(self, op: str, dtype: Dtype) -> list[str]:
        """The failures of an operator, without duplicates."""
        if self.sweep is not None:
            found = [failure.of(dtype) for failure in self.sweep.records[op].failures]
            texts = [failure.message + in_samples(failure.condition) for failure in found if failure]
        else:
            supports = [declared_support(op, self._declarations, dtype, mode) for mode in MODES[:2]]
            declared_failures = [support.failure for support in supports if support and support.failure]
            texts = [
                f"{failure.at}: {failure.message}" if failure.at else failure.message for failure in declared_failures
            ]
        return list(dict.fromkeys(texts))


class Line(Struct, frozen=True):
    """One operator: for each of :data:`CELLS`, one letter per column; for each low dtype, :func:`why` it fails."""

    op: str
    states: list[str]
    why: list[str]


def columns() -> list[Column]:
    """Every sweep, then every release with declarations."""
    measured = [Column(sweep.header.device, sweep.label, sweep) for sweep in sweeps()]
    return measured + [
        Column(device, release, None) for device in catalogued("declared") for release in declared.releases(device)
    ]


def lines(shown: list[Column]) -> list[Line]:
    """Every operator with a sample that runs in some sweep and dtype."""
    measured = [column.sweep for column in shown if column.sweep]
    ops = {op for sweep in measured for op, record in sweep.records.items() if record.samples[0]}
    return [
        Line(
            op,
            ["".join(column.letter(op, dtype, mode) for column in shown) for dtype, mode in CELLS],
            [why(op, dtype, shown) for dtype in LOW],
        )
        for op in sorted(ops)
    ]


def why(op: str, dtype: Dtype, shown: list[Column]) -> str:
    """How an operator fails in the newest version of each device, without extensions: one line per device."""
    last = {c.device: c for c in shown if not c.sweep or (op in c.sweep.records and not c.sweep.header.extension)}
    found = ((f"{device} {column.label}", " · ".join(column.failures(op, dtype))) for device, column in last.items())
    return "\n".join(f"{where}: {text}" for where, text in found if text)


def render_grid() -> str:
    """The page with its style, script and data."""
    shown = columns()
    heads = [{"device": c.device, "label": c.label, "evidence": "measured" if c.sweep else "declared"} for c in shown]
    cells = [f"{dtype}/{mode}" for dtype, mode in CELLS]
    data = msgspec.json.encode({"columns": heads, "dtypes": LOW, "cells": cells, "lines": lines(shown)}).decode()
    by_evidence = {
        evidence: list(dict.fromkeys(head["device"] for head in heads if head["evidence"] == evidence))
        for evidence in ("measured", "declared")
    }
    script = script_in("op/grid.js")
    return fill(
        "op/grid.html.jinja",
        **by_evidence,
        policy=security_policy([script]),
        script=Markup(script),
        data=Markup(data.replace("<", "\\u003c")),
    )


def write_reports(folder: Path) -> list[Path]:
    """Write ``op-support.md`` and ``op-support.html``; return their paths."""
    document, page = folder / "op-support.md", folder / "op-support.html"
    write_file(document, render_report())
    write_file(page, render_grid())
    return [document, page]
