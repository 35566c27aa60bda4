"""Renders every report in reports/ from the JSON beside it, and the examples in the README: ``python tools/committed_reports.py``.

A test checks that they are up to date. Measurements are made anew by the commands that ``reports/README.md`` lists.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lowprec_check.report.layout.markdown import markdown
from lowprec_check.report.matrix import matrix_document
from lowprec_check.report.registry import format_of, render
from lowprec_check.schema.matrix import load
from lowprec_check.schema.scan_result import ScanResult

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # where this is run as a script

from tools.catalog_report import catalog_document  # noqa: E402

REPORTS = ROOT / "reports"
Render = Callable[[Path], str]
"""Makes a report of the JSON beside it."""


def scan_text(path: Path) -> str:
    """A saved scan as the command prints it."""
    return render(ScanResult.load(path), "text")


def index(path: Path) -> str:
    """The index of a matrix, without links to pages of single models, which are not in git."""
    return markdown(matrix_document(load(path), TITLES[path.parent.name], pages=None))


def by_benchmark(name: str, path: Path) -> str:
    """What the function ``MODULE:FUNCTION`` of a benchmark makes of the data."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))  # behind the tests, which have a module of the same name
    module, _, function = name.partition(":")
    text: str = getattr(importlib.import_module(module), function or "render")(
        json.loads(path.read_text(encoding="utf-8"))
    )
    return text


class Report(NamedTuple):
    """Reports that answer one question."""

    paths: str
    """In ``reports/``, with spaces between them; a folder has a report for each JSON in it."""
    question: str
    render: Render | str
    """Or the name of a benchmark."""

    def files(self) -> Iterator[tuple[Path, Path]]:
        """The reports and their JSON."""
        for path in self.paths.split():
            if path.endswith("/"):
                yield from ((saved.with_suffix(".txt"), saved) for saved in sorted((REPORTS / path).glob("*.json")))
            else:
                saved = REPORTS / path
                yield saved, saved.with_name("matrix.json") if self.render is index else saved.with_suffix(".json")

    def text(self, saved: Path) -> str:
        """A report."""
        return by_benchmark(self.render, saved) if isinstance(self.render, str) else self.render(saved)


TITLES = {
    "torchvision": "torchvision in 16 bits on a CPU",
    "torchvision-cuda": "torchvision in 16 bits on an NVIDIA H200",
}
"""Of the matrices."""


def _compat(folder: str, device: str, jobs: int) -> str:
    lists = "lowprec-check compat --from-file benchmarks/zoo/torchvision.txt"
    options = '--scan-options "--no-plan --errors none"'
    return f"{lists} -o reports/{folder} --device {device} --jobs {jobs} {options}"


_EXAMPLES = "python benchmarks/example_scans.py --only"
_ON_CPU = ("2.13.0+cpu", "AMD EPYC, 2 cores")
_XEON = "Xeon with AMX and avx512_fp16"
_AT_ONCE = "Small inputs, random weights; several scans at once, so times are approximate."
_CATALOG = ("python tools/committed_reports.py", "from catalog/", "2.1 to 2.15", "those of the catalog", "")
MADE = {
    "scans/": (f"{_EXAMPLES} scans/", "2026-11-29", *_ON_CPU, ""),
    "training/": (f"{_EXAMPLES} training/", "2026-11-22", *_ON_CPU, "train_classifier and train_gan: 2026-11-24."),
    "torchvision/index.md": (_compat("torchvision", "cpu", 4), "2026-11-22", "2.11.0+cu130", _XEON, _AT_ONCE),
    "torchvision-cuda/index.md": (
        _compat("torchvision-cuda", "cuda", 14),
        "2026-11-21",
        "2.11.0+cu130",
        "NVIDIA H200",
        _AT_ONCE,
    ),
    "op-support.md": _CATALOG,
    "op-support.html": _CATALOG,
}
"""Command, date, torch, machine and note of reports whose JSON does not have them."""

PARTS = {
    "What scans find": [
        Report("scans/", "What does a scan say of the examples and of ResNet-50?", scan_text),
        Report("training/", "What does a scan say of training?", scan_text),
        Report(
            "torchvision/index.md torchvision-cuda/index.md",
            "Which models of torchvision run in 16 bits, how accurate and how fast?",
            index,
        ),
        Report(
            "backends-deploy.md backends-cpu.md backends-amx.md backends-cuda.md",
            "How fast, accurate and large are models on every backend?",
            "backend_table",
        ),
        Report(
            "op-support.md op-support.html",
            "Which operators run in half and bfloat16, by device and version of torch?",
            lambda path: format_of(path).lay_out(catalog_document()),
        ),
    ],
    "Whether it is right": [
        Report("statements.md", "Is every sentence and figure of every report that of the saved JSON?", "statements"),
        Report(
            "verdict-breadth.md verdict-breadth-cuda.md",
            "Is the status of a scan that of plain calls, on real architectures?",
            "verdict_breadth",
        ),
        Report(
            "breadth-cuda.md", "The same for torchvision's classifiers; do the instruments change outputs?", "breadth"
        ),
        Report(
            "step-runs.md",
            "Are statuses and gaps of generated models those of plain runs, fixed op by op?",
            "step_runs",
        ),
        Report(
            "module-errors.md",
            "Are the errors of modules those that hooks on fp64 and 16-bit models find?",
            "module_errors",
        ),
        Report(
            "error-budget.md error-budget-cuda.md",
            "Do error budgets predict the error, and what keeping a module in fp32 removes?",
            "error_budget",
        ),
        Report(
            "ablation-truth.md", "Are shares of modules what goes with them in fp32, in plain torch?", "ablation_truth"
        ),
        Report(
            "what-if.md what-if-cuda.md what-if-cuda-full.md",
            "Are the errors that `--what-if` predicts those of emulated layers, and of the hardware?",
            "what_if",
        ),
        Report(
            "training-breadth-cpu.md training-breadth-cuda.md",
            "Are the losses of scans of training those of plain loops?",
            "training_breadth",
        ),
        Report(
            "training-truth.md",
            "Do scans of 8 steps have the figures of plain loops, and do their verdicts hold after 300 steps?",
            "training_truth",
        ),
        Report(
            "scaled-weights.md", "Which errors have initial weights, and those that a scan scales?", "scaled_weights"
        ),
        Report(
            "whole-scans.md whole-scans-bf16.md whole-scans-amx.md whole-scans-cuda.md",
            "How long does one wait for the first row of a scan and for its end, and where does the time go?",
            "whole_scans",
        ),
        Report(
            "gpu-speed.md",
            "Are the times of an idle GPU those of other tools, and what does the op-by-op analysis cost there?",
            "gpu_speed",
        ),
        Report(
            "streamed.md streamed-large.md streamed-cuda.md",
            "Does `--stream` find what a scan with the weights in memory finds, and what do 7, 13 and 69 billion parameters take?",
            "streamed",
        ),
        Report("planted-values.md", "Which overflows and underflows does a scan blame?", "planted_values"),
        Report(
            "margin.md", "Does the interval for the share of inputs that fail hold it, and what does it cost?", "margin"
        ),
        Report(
            "backend-faults.md",
            "Which faults of backends does a scan find, and how often does it blame a healthy backend?",
            "backend_faults",
        ),
        Report("backend-faults-cuda.md", "The same of healthy backends on an H200.", "backend_faults"),
        Report("fastest-row.md", "Is the row that a scan recommends the fastest that passes?", "fastest_row"),
        Report("process-memory.md", "Is the memory of a row that of a fresh process that serves it?", "process_memory"),
        Report("kills.md", "What do commands leave that are killed?", "kills"),
        Report("mutated-files.md", "How do commands end that read broken files?", "mutated_files"),
        Report("fixes.md", "How many models with planted faults does `fix` fix, and how long does it take?", "fixes"),
        Report(
            "script-fixes.md", "How many training scripts with a planted fault does `fix --train` fix?", "script_fixes"
        ),
        Report("plan-search.md", "How many trials does a plan take, with and without predicted errors?", "plan_search"),
        Report("plans-cuda.md", "For how many models that fail is there a plan, and does it hold?", "plan_breadth"),
        Report("catalog-replay.md", "Is the support of aten ops in the catalog that of bare calls?", "catalog_replay"),
        Report(
            "prediction/h200-models.md prediction/h200-classifiers.md prediction/h200-unseen.md",
            "Does a GPU do what is predicted for it, on real architectures?",
            "prediction_fidelity",
        ),
        Report(
            "prediction/h200-ops.md", "The same for every sample of every operator", "prediction_on_device:render_ops"
        ),
        Report("prediction/torchvision-cuda.md", "The same with another release of torch", "prediction_fidelity"),
        Report("prediction/models-cpu.md", "Does a CPU do what is predicted for it?", "prediction_fidelity"),
        Report(
            "plugin-on-suites.md plugin-on-suites-cuda.md",
            "Does the pytest plugin change tests of other projects, are its cells right, and what does it cost?",
            "plugin_on_suites",
        ),
    ],
    "What it costs": [
        Report("instrument-cost-cuda.md", "What time and memory does the op-by-op analysis take?", "instrument_cost"),
        Report("training-cost-cpu.md training-cost-cuda.md", "The same for steps of training", "training_cost"),
        Report(
            "accelerator-scans.md",
            "How long does a scan on a GPU take, and what does a killed worker cost?",
            "accelerator_scans",
        ),
        Report("large-models.md", "How much memory does a scan of a large model take?", "large_models"),
        Report("op-watching.md", "What does it cost to see every operator of a test?", "op_watching"),
    ],
}
DATA = {"prediction/h200-details.json.gz"}
"""Data that reports are made from by their commands: every op call and message of the H200."""


def files() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Every report, and what renders it."""
    for report in (report for part in PARTS.values() for report in part):
        for path, saved in report.files():
            yield path, partial(report.text, path if path.stem == "op-support" else saved)
    yield REPORTS / "README.md", readme
    yield ROOT / "README.md", partial(with_examples, ROOT / "README.md")


def with_examples(path: Path) -> str:
    """A document, with what the commands in it print: of scans, the saved ones."""

    def printed(found: re.Match[str]) -> str:
        command = found[1].split()
        if command[0] == "scan":
            text = scan_text(REPORTS / "scans" / f"{Path(command[1]).stem}.json")
        else:
            text = subprocess.run(
                [sys.executable, "-m", "lowprec_check", *command],
                stdout=subprocess.PIPE,
                check=True,
                env=os.environ | {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"},
            ).stdout.decode("utf-8")
        return f"```\n$ lowprec-check {found[1]}\n{text.strip()}\n```"

    examples = r"^```\n\$ lowprec-check ((?:scan examples/|op ).*)\n(?s:.*?)^```$"
    return re.sub(examples, printed, path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def made_by(path: str) -> tuple[str, str, str, str, str]:
    """Command, date, versions, machine and note of a report."""
    if path in MADE:
        command, date, torch, machine, note = MADE[path]
        return command, date, f"lowprec-check 0.2.0, torch {torch}", machine, note
    made = json.loads((REPORTS / path).with_suffix(".json").read_text(encoding="utf-8"))["made"]
    versions = f"lowprec-check {made['lowprec-check']}, torch {made['torch']}"
    return made["command"], made["date"], versions, made["machine"], made["note"]


def readme() -> str:
    """The list of the reports: question, command, date and versions of each."""
    lines = [
        "# Reports",
        "",
        "Generated by `python tools/committed_reports.py`, as every report here: each is rendered from the JSON beside it, and a test renders it",
        "again. The commands measure anew.",
    ]
    for title, reports in PARTS.items():
        lines += ["", f"## {title}"]
        for report in reports:
            lines += ["", f"**{report.question}**", ""]
            for path in report.paths.split():
                command, date, versions, machine, note = made_by(path)
                lines.append(f"- [{path}]({path}): `{command}` ({date}, {versions}, {machine}). {note}".rstrip())
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all reports that changed."""
    for path, rendered in files():
        text = rendered()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
