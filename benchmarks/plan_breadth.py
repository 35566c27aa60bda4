"""Search a plan for every torchvision classification model and precision that fails.

    python benchmarks/plan_breadth.py --from reports/breadth-cuda.json --device cuda --output reports/plans-cuda

The failing rows come from ``benchmarks/breadth.py``. Every plan is applied to a newly loaded model, which is run once
more; the plan is *proven* if the output is within the tolerance of the fp32 output.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from breadth import shape_for
from report_files import head, made, save
from tabulate import tabulate

from lowprec_check import UsageError, apply
from lowprec_check.engine.plan.planner import plan_target
from lowprec_check.engine.run.target_source import TargetSource, load_spec
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.schema.options import PlanOptions
from lowprec_check.schema.plan import Plan

KINDS = {
    "half": ("fp16", "cast"),
    "autocast-fp16": ("fp16", "autocast"),
    "bfloat16": ("bf16", "cast"),
    "autocast-bf16": ("bf16", "autocast"),
}


def failing(path: Path) -> list[tuple[str, str]]:
    """Model and precision of every row that did not pass."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [
        (row["model"], row["precision"])
        for row in rows
        if row["status"] not in ("ok", "timeout") and row["model"].startswith("torchvision:")
    ]


def plan_one(model: str, precision: str, options: dict[str, Any]) -> dict[str, Any]:
    """One row: the result of the search, and whether the plan passes on a newly loaded model."""
    torch.set_num_threads(options["threads"])
    dtype, base = KINDS[precision]
    inputs = (shape_for(model.partition(":")[2], options["size"]),)
    try:
        target = load_spec(TargetSpec(model, inputs), 0)
        isolation = "fork" if options["device"] == "cpu" else "none"
        choice: dict[str, Any] = {
            "dtype": dtype,
            "base": base,
            "device": options["device"],
            "seconds": options["seconds"],
        }
        found = plan_target(TargetSource(target), isolation, PlanOptions(**choice))
    except UsageError as error:
        return {"model": model, "base": precision, "outcome": f"no reference: {error.message}"}
    [attempt] = found.attempts
    row = {
        "model": model,
        "base": precision,
        "as it is": attempt.status,
        "trials": attempt.trials,
        "s": attempt.seconds,
    }
    row |= {"outcome": attempt.outcome, "leaves": sum(not list(m.children()) for m in target.model.modules())}
    if found.plan is not None:
        plan = found.plan
        row |= {"kept": len(plan.keep_fp32), "minimal": plan.minimal, "rel_l2": plan.rel_l2, "speed": plan.speedup}
        row["proven"] = holds(model, inputs, plan)
    return row


def holds(model: str, inputs: tuple[str, ...], plan: Plan) -> bool:
    """Whether the applied plan passes, found by running the model."""
    target = load_spec(TargetSpec(model, inputs), 0)
    target.model.to(plan.device)
    args = [tensor.to(plan.device) for tensor in target.args]
    with torch.no_grad():
        reference = target.model(*args).double()
        output = apply(target.model, plan)(*args).double()
    return bool((output - reference).norm() <= (plan.tolerance or 0.0) * reference.norm())


def main() -> None:
    """Run the searches, ``--jobs`` at once, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="JSON of benchmarks/breadth.py.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=150.0, help="Time limit of each search.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="Only models whose name contains this text.")
    parser.add_argument("--output", type=Path, required=True, help="Stem of the .md and .json to write.")
    options = parser.parse_args()
    wanted = [(model, base) for model, base in failing(options.source) if options.only in model]
    how = made(options.device)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        pending = {pool.submit(plan_one, model, base, vars(options)): (model, base) for model, base in wanted}
        rows = []
        for done in concurrent.futures.as_completed(pending):
            rows.append(done.result())
            print(json.dumps(rows[-1]), flush=True)
            save(
                options.output, {"made": how, "rows": sorted(rows, key=lambda row: (row["model"], row["base"]))}, render
            )


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    columns = ("model", "base", "as it is", "kept", "leaves", "minimal", "proven", "rel_l2", "trials", "s", "outcome")
    cells = [[_cell(row.get(column)) for column in columns] for row in data["rows"]]
    planned = [row for row in data["rows"] if "kept" in row]
    lines = [
        *head("Plans for classifiers that fail", data),
        f"- failing rows: {len(cells)}, with a plan: {len(planned)}, of these proven on a newly loaded model: "
        f"{sum(row['proven'] for row in planned)}, 1-minimal: {sum(row['minimal'] for row in planned)}",
        "",
        tabulate(cells, columns, tablefmt="github"),
        "",
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1e}" if value < 1 else f"{value:.0f}"
    return "–" if value is None else str(value).removeprefix("torchvision:")


if __name__ == "__main__":
    main()
