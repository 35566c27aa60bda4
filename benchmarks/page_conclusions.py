"""Hold what the page of a scan concludes against plain runs and ablations, on 23 models.

    pip install -e '.[bench]' -c constraints.txt
    OMP_NUM_THREADS=1 python benchmarks/page_conclusions.py --output reports/page-conclusions
    python benchmarks/page_conclusions.py --only transformers:bert --scans /tmp/scans     # keeps the scans, and uses those that are there

Each model is scanned by the command, with default options; the lights and causes come from the saved JSON. They are compared with

* **runs, right**: three plain calls in each precision: which ones raise, which ones pass, the errors, the color of the light;
* **worth**: fp32 and the recommended way called in turns: a claim has the same direction; memory is that of the scan;
* **do this**: the printed code, run as pasted: it gives the error claimed;
* **gaps**: a plain call in which each function that raises is repeated in fp32: the same messages at the same lines;
* **first NaN or Inf**: hooks on all modules: the same module;
* **ablations, plans**: the same modules kept in fp32 by other code: the same status, rel_l2 within 5 %;
* **shares**: the submodule with the largest share, if at least 20 %, kept in fp32: the error left is √(1 − share) of that before, within a
  factor of 1.5; **share removed**: so is what it removes of the error, or less where another tensor of the output keeps its error.

Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from page_cases import PageCase, page_cases
from page_checks import ROOT, Check, environment, examine
from tabulate import tabulate
from verdict_breadth import cases, in_processes, write

from lowprec_check import ScanResult
from lowprec_check.report.html.causes import run_causes
from lowprec_check.report.lights import lights

MEASURED = ("worth: interval of the scan", "share")
"""What is counted and not demanded: two measurements of times on a busy machine, and what shares predict to first order."""

LIMITS = (
    "- *worth: interval of the scan*, *share* and *share removed* are counted, not demanded: times were measured twice on a busy machine, and",
    "  shares predict to first order.",
    "- *worth: not known* holds by the interval of the scan alone: it contains 1, or there is none. No plain timing can show that a time cannot",
    "  be told; on a quiet machine fewer are grey.",
    "- Memory is that of the scan; nothing else measures it here.",
    "- Plans are compared if a scan finds one. By default a scan searches only if no precision passes.",
    "- Shares are compared for runs whose output can be judged.",
)


def scanned(path: Path) -> ScanResult:
    """The saved result of the command, made if it is not there."""
    saved = path.with_suffix(".json")
    if not saved.exists():
        command = [sys.executable, "-m", "lowprec_check", "scan", str(path), "--json", str(saved), "--fail-on", "never"]
        subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=True)
    return ScanResult.load(saved)


def kind_of(check: Check) -> str:
    """``runs``, ``right``, …: what a conclusion is about, without the precision."""
    about = check.about
    if about.startswith("worth: "):
        return "worth: direction of the time" if about.split()[1] in ("faster", "slower", "same") else about
    return about.partition(":")[0].partition(",")[0]


def is_demanded(check: Check) -> bool:
    """Whether page and experiment have to agree."""
    return not check.about.startswith(MEASURED)


def examined(case: PageCase, folder: Path) -> tuple[list[Check], list[str]]:
    """The checks of one model, and what its page says."""
    path = case.path(folder)
    result = scanned(path)
    checks, problem = [], ""
    for _, found, its_problem in in_processes(lambda _: examine(case, result, path), [None], 1):
        checks, problem = found or [], its_problem
    if problem:
        checks.append(Check(case.name, "experiments", "", problem, False))
    said = [f"{light.sign} {light.answer}" for light in lights(result)]
    for cause in run_causes(result):
        if cause.fails:
            said.append(" ".join([f"{cause.label}: {cause.text.rstrip('.…')}.", *cause.proofs]))
    return checks, said


def listed(check: Check) -> str:
    """A check as an entry of a list."""
    note = f" — {check.note}" if check.note else ""
    return f"- {check.model}, {check.about}: page **{check.page}**, plain **{check.plain}**{note}"


def markdown(checks: Sequence[Check], said: Mapping[str, Sequence[str]], seconds: float, *, kept: bool) -> str:
    """The report: totals first."""
    kinds: dict[str, list[Check]] = defaultdict(list)
    for check in checks:
        kinds[kind_of(check)].append(check)
    demanded = [check for check in checks if is_demanded(check)]
    different = [check for check in demanded if not check.agrees]
    lines = [
        f"# Conclusions of the page and plain experiments, torch {torch.__version__}",
        "",
        f"- models: {len(said)}; conclusions: {len(demanded)}; **different: {len(different)}**",
        f"- minutes: {seconds / 60:.0f}{' without the scans, which were kept from before' if kept else ''}",
        "",
        tabulate(
            [[kind, len(its), sum(check.agrees for check in its)] for kind, its in kinds.items()],
            ["conclusion", "number", "as in the experiment"],
            tablefmt="github",
        ),
        "",
        *LIMITS,
    ]
    for title, its in (
        ("Different", different),
        ("Outside the interval of the scan", [check for check in kinds[MEASURED[0]] if not check.agrees]),
        ("Shares: error before → predicted (share of the module), and measured; ✕: not within 1.5", kinds["share"]),
        ("Shares: what is removed, if not within 1.5", [check for check in kinds["share removed"] if not check.agrees]),
        ("Ablations and plans", kinds["ablation"] + kinds["plan"]),
        (
            "Times",
            [
                check
                for check in checks
                if check.about.startswith("worth: ") and " – " in check.plain and check.about != MEASURED[0]
            ],
        ),
    ):
        shown = [f"{listed(check)}{'' if check.agrees else ' ✕'}" for check in its]
        lines += ["", f"## {title}", "", *(shown or ["None."])]
    lines += ["", "## What the pages say", ""]
    for name, sentences in said.items():
        lines += [f"### {name}", "", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Scan and examine all models, print the report, and write it; exit 1 if a conclusion is not that of the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models with this prefix")
    parser.add_argument("--scans", type=Path, help="folder in which scans are kept, and from which they are taken")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    checks: list[Check] = []
    said: dict[str, list[str]] = {}
    chosen = [case for case in page_cases() if not options.only or case.name.startswith(tuple(options.only))]
    cases()  # imports their libraries once, before the processes are forked
    kept = options.scans is not None and any(options.scans.glob("*.json"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.scans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            found, said[case.name] = examined(case, folder)
            checks += found
            different = [check for check in found if is_demanded(check) and not check.agrees]
            passed = f"{len(found) - len(different)} of {len(found)}"
            print(
                f"{time.monotonic() - started:.0f} s {case.name} {passed}",
                *map(listed, different),
                sep="\n",
                file=sys.stderr,
            )
            text = markdown(checks, said, time.monotonic() - started, kept=kept)
    data = {"torch": torch.__version__, "checks": [check._asdict() for check in checks], "said": said}
    write(options.output, text, data)
    raise SystemExit(1 if any(is_demanded(check) and not check.agrees for check in checks) else 0)


if __name__ == "__main__":
    main()
