"""The files of ``--report`` for a program: pages, and SARIF with a run per model."""

from __future__ import annotations

import json
from pathlib import Path

from lowprec_check.errors import UsageError
from lowprec_check.features.programs.program_document import program_document
from lowprec_check.features.programs.program_scan import ProgramScan
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.registry import ReportFormat, format_of

_BY_MODEL = "sarif"
"""The format whose report of a program is that of each model, one after another."""


def check_format(file: Path) -> None:
    """Raise :class:`UsageError` for a file whose format has no report of a program."""
    chosen = format_of(file)
    if chosen.name != _BY_MODEL and type(chosen).lay_out is ReportFormat.lay_out:
        raise UsageError(f"{file}: a program has no report in this format.", "Give .html, .md, .txt or .sarif.")
    chosen.check_available()


def program_report(program: ProgramScan, file: Path) -> str:
    """The report in the format of ``file``."""
    chosen = format_of(file)
    if chosen.name != _BY_MODEL:
        return chosen.lay_out(program_document(program))
    log, runs = {}, []
    for model in program.models:
        if model.scan is not None:
            log = json.loads(chosen.render(model.scan))
            # Code scanning tells runs of one tool apart by it
            runs += [run | {"automationDetails": {"id": f"{visible(model.name)}/"}} for run in log["runs"]]
    if not runs:
        log = {"version": "2.1.0"}
    return json.dumps(log | {"runs": runs}, indent=2, ensure_ascii=False) + "\n"
