"""How well a scan predicts the runs of a device: predicts on the CPU, compares with the device.

    python benchmarks/prediction_fidelity.py --device cpu --output reports/prediction/models-cpu
    python benchmarks/prediction_fidelity.py --torch 2.11 --measured reports/breadth-cuda.json --output reports/prediction/torchvision-cuda

Compares the status and the output error of every run, and, where the device is here, the dtypes of each op, in order. Without
the device, ``--measured`` names figures that ``benchmarks/breadth.py --verify`` measured on it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from breadth import EXAMPLES, classification_models, shape_for
from report_files import head, made, save
from verdict_breadth import PRECISIONS, Case, cases, in_processes

from lowprec_check import ScanResult, scan
from lowprec_check.engine.core.devices import is_available
from lowprec_check.engine.model.load_target import load_target

State = dict[str, Any]


# -- models


class Outcome(NamedTuple):
    """One run, predicted or measured."""

    status: str
    rel_l2: float | None
    gaps: list[str] | None
    """``None`` if unknown."""
    ops: list[tuple[str, str]]
    """Each op call: its name and its dtypes; empty if unknown."""
    detail: str = ""


Outcomes = dict[str, dict[str, Outcome]]
"""By model and precision."""

MOVING = (
    "aten.t.",
    "aten.view",
    "aten.transpose",
    "aten._to_copy",
    "aten.clone",
    "aten.copy_",
    "aten.detach",
    "aten.lift_fresh",
)


def outcomes_of(result: ScanResult) -> dict[str, Outcome]:
    """The runs of a scan by precision."""
    found = {}
    for run in result.runs[1:]:
        ops = [(row.op, row.dtypes) for row in run.op_calls.rows() if not row.op.startswith(MOVING)]
        error = run.output_error.rel_l2 if run.output_error else None
        detail = run.reason or (run.exception.text[:200] if run.exception else "")
        found[run.precision] = Outcome(run.status, error, sorted({gap.op for gap in run.gaps}), ops, detail)
    return found


def predicted_case(case: Case, options: argparse.Namespace) -> dict[str, Outcome]:
    """In a fork: the predictions for one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = case.build()
    return outcomes_of(scan(model, inputs, predict=True, torch_version=options.torch, device=options.device, **SCAN))


def measured_case(case: Case, options: argparse.Namespace) -> dict[str, Outcome]:
    """The same model on the device itself."""
    model, inputs = case.build()
    return outcomes_of(scan(model, inputs, device=options.device, **SCAN))


SCAN: dict[str, Any] = {
    "precisions": list(PRECISIONS),
    "errors": "none",
    "plan": False,
    "times": "off",
    "budget": 300.0,
}


def breadth_cases() -> list[Case]:
    """The models of ``benchmarks/breadth.py``, as it names them."""

    def load(spec: str, inputs: tuple[str, ...]) -> tuple[Any, Any]:
        target = load_target(spec, inputs)
        return target.model, target.kwargs or target.args

    torchvision = [(f"torchvision:{name}", (shape_for(name, 64),)) for name in classification_models()]
    examples = [(f"examples/{path.name}", ()) for path in EXAMPLES]
    return [Case(spec, functools.partial(load, spec, inputs)) for spec, inputs in (*examples, *torchvision)]


def read_measured(path: Path) -> Outcomes:
    """Rows of ``breadth.py``, measured before."""
    found: Outcomes = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["precision"] in PRECISIONS:
            its = Outcome(row["by_hand"] or row["status"], row["rel_l2"], row["gaps"], [])
            found.setdefault(row["model"], {})[row["precision"]] = its
    return found


ON_GPU = {
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.cudnn_grid_sampler.default": "aten.grid_sampler_2d.default",
    "aten._cudnn_rnn.default": "aten.mkldnn_rnn_layer.default",
}
"""Ops of cuDNN, and those that a CPU runs in their place."""


def same_path(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Where two runs took the same path: the op, and its dtypes in both."""
    names = [[ON_GPU.get(op, op) for op, _ in ops] for ops in (one, other)]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    for block in matcher.get_matching_blocks():
        for (op, dtypes), (_, others) in zip(
            one[block.a : block.a + block.size], other[block.b : block.b + block.size], strict=True
        ):
            yield op, dtypes, others


def factor(predicted: float, measured: float) -> float:
    """By how much two errors differ, at least 1; errors of less than 1e-7 are rounding of fp32."""
    low, high = sorted((max(predicted, 1e-7), max(measured, 1e-7)))
    return high / low


WHERE = {"under autocast": ("autocast",), "in half and bfloat16": ("half", "bfloat16")}
"""Precisions of which the dtypes are counted together."""


def comparison(predicted: Outcomes, measured: Outcomes) -> dict[str, Any]:
    """What the report is rendered from: the runs that are in both, and how often the dtypes of their ops agree."""
    runs: dict[str, Any] = {}
    dtypes = {where: {"calls": 0, "same_path": 0, "equal": 0, "causes": Counter[str]()} for where in WHERE}
    for model, of_model in predicted.items():
        for precision, found in of_model.items():
            truth = measured.get(model, {}).get(precision)
            if truth is None:
                continue
            row = {"predicted": list(found[:3]), "measured": list(truth[:3]), "detail": found.detail[:120]}
            runs.setdefault(model, {})[precision] = row
            where = next(where for where, starts in WHERE.items() if precision.startswith(starts))
            if found.ops and truth.ops:
                _count(dtypes[where], found.ops, truth.ops)
    return {"runs": runs, "dtypes": dtypes}


def _count(counts: dict[str, Any], found: list[tuple[str, str]], truth: list[tuple[str, str]]) -> None:
    counts["calls"] += len(truth)
    for op, mine, theirs in same_path(found, truth):
        counts["same_path"] += 1
        counts["equal"] += mine == theirs
        if mine != theirs:
            counts["causes"][f"{op}: predicted {mine}, measured {theirs}"] += 1


def render(data: dict[str, Any]) -> str:
    """The report on models."""
    pairs = [
        (f"{model}, {precision}", *row["predicted"], *row["measured"], row["detail"])
        for model, of_model in data["runs"].items()
        for precision, row in of_model.items()
    ]
    status = [(name, mine, theirs) for name, mine, _, _, theirs, _, _, _ in pairs]
    equal = sum(mine == theirs for _, mine, theirs in status)
    severe = sum(_coarse(mine) == _coarse(theirs) for _, mine, theirs in status)
    errors = [
        (name, factor(mine, theirs), mine, theirs)
        for name, _, mine, _, _, theirs, _, _ in pairs
        if mine is not None and theirs  # an output of zeros has no relative error
    ]
    within = sum(row[1] <= 3 for row in errors)
    gaps = [
        (name, mine, theirs) for name, _, _, mine, _, _, theirs, _ in pairs if theirs is not None and (mine or theirs)
    ]
    lines = [
        *head("Predicted and measured runs", data),
        f"Predicted on a CPU {data['predicted']}. Measured: {data['measured']}.",
        "",
        f"- models: {len(data['runs'])}, runs: {len(pairs)}",
        f"- status (ok, inaccurate, nonfinite, error) equal: **{equal} of {len(pairs)}** ({_share(equal, len(pairs))}); ok and inaccurate "
        f"as one: {severe} ({_share(severe, len(pairs))})",
        f"- rel_l2 of the output within a factor of 3: **{within} of {len(errors)}** ({_share(within, len(errors))})"
        + (f"; median factor {statistics.median(row[1] for row in errors):.2f}" if errors else ""),
        f"- runs with gaps, measured or predicted: {len(gaps)}; the same ops: {sum(mine == theirs for _, mine, theirs in gaps)}",
    ]
    for where, counts in data["dtypes"].items():
        if counts["same_path"]:
            share = f"{counts['equal'] / counts['same_path']:.2%}"
            lines.append(
                f"- op calls {where} on the same path: {counts['same_path']} of {counts['calls']} measured; dtypes equal: **{counts['equal']}** ({share})"
            )
            causes = Counter(counts["causes"]).most_common(20)
            lines += [f"  - {count} × {cause}" for cause, count in causes]
        else:
            lines.append(f"- dtypes of op calls {where}: not compared, the op calls of the device are not known")
    other = [
        f"- {name}: predicted **{mine}**{_error(error)}, measured **{theirs}**{_error(truth)} {detail}".rstrip()
        for name, mine, error, _, theirs, truth, _, detail in pairs
        if mine != theirs
    ]
    far = [f"- {name}: predicted {mine:.1e}, measured {theirs:.1e}" for name, by, mine, theirs in errors if by > 3]
    parts = {
        "Other status": other,
        "Errors that differ by more than a factor of 3": far,
        "Other gaps": [
            f"- {name}: predicted {mine}, measured {theirs}" for name, mine, theirs in gaps if mine != theirs
        ],
        "Not compared": [f"- {entry}" for entry in data.get("not_compared", ())],
    }
    for title, entries in parts.items():
        if entries:
            lines += ["", f"## {title}", "", *entries]
    return "\n".join(lines) + "\n"


def _coarse(status: str) -> str:
    return "ok" if status == "inaccurate" else status


def _share(some: int, of: int) -> str:
    return f"{some / of:.1%}" if of else "–"


def _error(error: float | None) -> str:
    return f" ({error:.1e})" if error is not None else ""


# -- the command


def compare_models(options: argparse.Namespace) -> None:
    """Predict, measure or read what was measured, and report."""
    measured = read_measured(options.measured) if options.measured else {}
    chosen = [case for case in breadth_cases() if case.name in measured] if measured else cases(options.only)[0]
    wanted = [case for case in chosen if not options.only or case.name.startswith(tuple(options.only))][: options.limit]
    predicted: Outcomes = {}
    started = time.monotonic()
    work = functools.partial(predicted_case, options=options)
    for case, found, problem in in_processes(work, wanted, options.jobs):
        print(f"{time.monotonic() - started:.0f} s {case.name} {problem}", file=sys.stderr, flush=True)
        predicted |= {case.name: found} if found else {}
    if not options.measured:
        for case in wanted:
            with contextlib.suppress(Exception):
                measured[case.name] = measured_case(case, options)
    how = made("cpu" if options.measured else options.device)
    about = {
        "predicted": f"for {options.device} with torch {torch.__version__}{f', as torch {options.torch}' * bool(options.torch)}",
        "measured": f"`{options.measured}`" if options.measured else f"on this machine, torch {torch.__version__}",
    }
    save(options.output, {"made": how, **about, **comparison(predicted, measured)}, render)


def main() -> None:
    """Compare the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", help="release to predict for; default: the installed one")
    parser.add_argument("--measured", type=Path, help="figures measured on the device before")
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models with this prefix")
    parser.add_argument("--limit", type=int, help="only the first N models")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    if options.measured is None and not is_available(options.device):
        parser.error(f"{options.device} is not here: name figures that were measured on it by --measured")
    compare_models(options)


if __name__ == "__main__":
    main()
