"""Compare the accumulated error of every leaf module with forward hooks on the fp64 and the 16-bit model.

    pip install timm transformers
    python benchmarks/module_errors.py --output reports/module-errors          # 30 models, half and bfloat16
    python benchmarks/module_errors.py --only timm:convnext

The independent numbers: the model runs in fp64, and cast to 16 bits, each with a hook on every leaf module that copies
the last floating tensor of its output; rel_l2 of the two is the error of the module. Only the last call of a module
counts. The numbers of this package: a scan with ``--reference fp64``; a module's error is the accumulated error of its
last op call whose result has as many elements as the module's output.

A module is a mismatch if the two differ by more than a factor of 2 and by more than 2e-3. The scan's reference follows
the decisions of the 16-bit run (indices, booleans), the independent fp64 run does not. A mismatch after an op whose
decisions differ (``flips``) is explained by that; every other mismatch is unexplained. Writes OUTPUT.md and OUTPUT.json;
exits with 1 if a mismatch is unexplained or a scan ended early.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from report_files import head, made, save
from torch import Tensor, nn
from verdict_breadth import (
    Case,
    Inputs,
    arguments,
    cases,
    copied,
    described,
    in_processes,
    leaf_error,
    seed_all,
    tensors_in,
)

from lowprec_check import UsageError, scan
from lowprec_check.schema.op_calls import OpCall

MODELS = {
    "torchvision": (
        "resnet18",
        "shufflenet_v2_x0_5",
        "squeezenet1_1",
        "densenet121",
        "regnet_y_400mf",
        "swin_t",
        "googlenet",
        "deeplabv3_mobilenet_v3_large",
        "mobilenet_v3_small",
    ),
    "timm": (
        "convnext_atto",
        "efficientnet_lite0",
        "regnetx_002",
        "edgenext_xx_small",
        "levit_128s",
        "mixer_s32_224",
        "repvgg_a0",
        "vit_tiny_patch16_224",
        "xcit_nano_12_p16_224",
        "visformer_tiny",
    ),
    "transformers": (
        "bert",
        "gpt2",
        "llama",
        "t5",
        "segformer",
        "longformer",
        "deberta-v2",
        "mamba",
        "wav2vec2",
        "bloom",
        "whisper-encoder",
    ),
}
NAMES = {f"{library}:{name}" for library, names in MODELS.items() for name in names}
PRECISIONS = ("bfloat16", "half")
FACTOR, ABSOLUTE = 2.0, 2e-3


class Captured(NamedTuple):
    """The last floating tensor of each leaf module's output, of its last call."""

    outputs: dict[str, Tensor]
    calls: dict[str, int]


def captured(case: Case, dtype: torch.dtype) -> Captured:
    """Run a new model in ``dtype`` with a hook on every leaf module."""
    model, inputs = case.build()
    model = model.to(dtype)
    found = Captured({}, {})

    def hook_for(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            if floating:
                found.outputs[name] = floating[-1].clone()  # as it is now: a later module may change it in place
                found.calls[name] = found.calls.get(name, 0) + 1

        return keep

    for name, module in model.named_modules():
        if name and not any(module.children()):
            module.register_forward_hook(hook_for(name))
    given: Inputs = copied(inputs, dtype)
    seed_all()
    with torch.no_grad():
        model(**given) if isinstance(given, dict) else model(*given)
    return found


class Step(NamedTuple):
    """An op call of the scan, and the number of decisions that differ up to and including it."""

    call: OpCall
    flips: int


def scanned(case: Case, precision: str) -> tuple[dict[str, list[Step]], str]:
    """The op calls of each module, in order, and a reason why they are not complete."""
    model, inputs = case.build()
    options: dict[str, Any] = {"reference": "fp64", "errors": "accumulated", "plan": False, "budget": 240}
    run = scan(model, inputs, precisions=[precision], device="cpu", **options).run(precision)
    if not run.complete or run.gaps:
        stopped = f"{run.stopped_by.type}: {run.stopped_by.message}" if run.stopped_by else "; ".join(run.notes)
        return {}, f"the scan's status is {run.status}, it is not complete or has gaps ({len(run.gaps)}): {stopped}"
    found: dict[str, list[Step]] = {}
    flips = 0
    for call in run.op_calls.rows():
        flips += call.flips
        found.setdefault(call.module, []).append(Step(call, flips))
    return found, ""


def elements(shape: str) -> int:
    """The number of elements of a shape such as ``4×64``; views of the output have the same."""
    return math.prod(int(side) for side in shape.split("×") if side.isdigit())


def compared(name: str, truth: Tensor, low: Tensor, calls: int, steps: Sequence[Step]) -> dict[str, Any]:
    """One module: both errors, or the reason why they cannot be compared."""
    row: dict[str, Any] = {"module": name, "calls": calls, "shape": list(low.shape), "kind": "not compared"}
    measured = [step for step in steps if step.call.absmax is not None]
    last = next((step for step in reversed(measured) if elements(step.call.shape) == low.numel()), None)
    if last is None:
        return row | {"why": "no op has the size of its output" if measured else "no op ran in it"}
    independent = leaf_error(low, truth) if bool((low.isfinite() | ~truth.isfinite()).all()) else math.inf
    given = last.call.accumulated_error  # None: infinite
    ours = math.inf if given is None else given
    row |= {"op": last.call.op, "flips": last.flips, "ours": ours, "truth": independent}
    if ours == independent:
        return row | {"kind": "equal within 2", "factor": 1.0}
    factor = ours / independent if independent else math.inf
    far = not 1 / FACTOR <= factor <= FACTOR
    if not far:
        kind = "equal within 2"
    elif abs(ours - independent) <= ABSOLUTE:
        kind = "small"
    else:
        kind = "after flips" if last.flips else "unexplained"
    return row | {"kind": kind, "factor": factor}


def module_rows(case: Case) -> list[dict[str, Any]]:
    """All leaf modules of one model in both precisions."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        truth = captured(case, torch.double)
    except Exception as error:
        return [{"model": case.name, "precision": "–", "kind": "not run", "why": f"fp64 raises {described(error)}"}]
    rows = []
    for precision in PRECISIONS:
        start = {"model": case.name, "precision": precision}
        try:
            low = captured(case, torch.half if precision == "half" else torch.bfloat16)
            steps, problem = scanned(case, precision)
        except UsageError as error:
            rows.append({**start, "kind": "not run", "why": f"the scan ended with {described(error)}"})
            continue
        except Exception as error:
            rows.append({**start, "kind": "not run", "why": f"the plain run raises {described(error)}"})
            continue
        if problem:
            rows.append({**start, "kind": "scan incomplete", "why": problem})
            continue
        for name, output in low.outputs.items():
            if name in truth.outputs and truth.outputs[name].shape == output.shape:
                rows.append(start | compared(name, truth.outputs[name], output, low.calls[name], steps.get(name, [])))
            else:
                rows.append({**start, "module": name, "kind": "not compared", "why": "fp64 gives another shape"})
    return rows


def entry(row: Mapping[str, Any]) -> str:
    """One mismatch as a table row."""
    cells = (row["model"], row["precision"], row["module"], row["op"], f"{row['ours']:.2e}", f"{row['truth']:.2e}")
    return f"| {' | '.join(cells)} | {row['factor']:.2g} | {row['flips']} | {row['calls']} |"


HEAD = ["| model | precision | module | op | scan | hooks | factor | flips | calls |", f"|{'---|' * 9}"]


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the report is rendered from: totals by run, and the modules that are not alike."""
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if "factor" in row:
            start = {"model": row["model"], "precision": row["precision"], "modules": 0, "within 1 %": 0}
            run = runs.setdefault((row["model"], row["precision"]), start | {"largest": 0.0, "farthest": 1.0})
            run["modules"] += 1
            run["largest"] = max(run["largest"], row["truth"])
            factor = row["factor"] or 1.0
            run["within 1 %"] += bool(row["factor"]) and abs(factor - 1) <= 0.01
            if row["kind"] != "small" and abs(math.log(factor)) > abs(math.log(run["farthest"])):
                run["farthest"] = factor
    return {
        "models": len({row["model"] for row in rows}),
        "runs": list(runs.values()),
        "not compared": Counter(row["why"] for row in rows if row["kind"] == "not compared"),
        "rows": [row for row in rows if row["kind"] not in ("equal within 2", "not compared")],
    }


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    kinds = {
        kind: [row for row in data["rows"] if row["kind"] == kind]
        for kind in ("small", "after flips", "unexplained", "not run", "scan incomplete")
    }
    runs, problems = data["runs"], data["problems"]
    total = sum(run["modules"] for run in runs)
    farther = sum(len(kinds[kind]) for kind in ("small", "after flips", "unexplained"))
    reasons = ", ".join(f"{count}: {why}" for why, count in data["not compared"].items())
    lines = [
        *head("Accumulated errors of leaf modules, from scans and from hooks", data),
        f"- models: {data['models']}; runs compared: {len(runs)}",
        f"- modules compared: {total}",
        f"- within a factor of 2: {total - farther}; within 1 %: {sum(run['within 1 %'] for run in runs)}",
        f"- farther, but at most 2e-3 apart: {len(kinds['small'])}",
        f"- mismatches after an op whose decisions differ from fp64: {len(kinds['after flips'])}",
        f"- **unexplained mismatches: {len(kinds['unexplained'])}**",
        f"- modules not compared: {reasons or 'none'}",
        f"- **scans that ended early, although the model runs in fp64 and in 16 bits: {len(kinds['scan incomplete'])}**",
        *(f"  - {row['model']}, {row['precision']}: {row['why']}" for row in kinds["scan incomplete"]),
        f"- runs not compared: {len(kinds['not run']) + len(problems)}",
        *(f"  - {row['model']}, {row['precision']}: {row['why']}" for row in kinds["not run"]),
        *(f"  - {problem}" for problem in problems),
    ]
    for kind in ("unexplained", "after flips"):
        if kinds[kind]:
            lines += ["", f"## Mismatches: {kind}", "", *HEAD, *map(entry, kinds[kind])]
    lines += [
        "",
        "## Runs",
        "",
        "| model | precision | modules | largest error | farthest factor |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        figures = f"{run['modules']} | {run['largest']:.1e} | {run['farthest']:.3g}"
        lines.append(f"| {run['model']} | {run['precision']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all models, print the report, and write it."""
    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)  # processes that are forked cannot use a pool of threads
    available, missing = cases(options.only)
    chosen = [case for case in available if case.name in NAMES][: options.limit]
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    problems = [f"{name}: not installed" for name in missing if any(chosen.startswith(name) for chosen in NAMES)]
    for index, (case, found, problem) in enumerate(in_processes(module_rows, chosen, options.jobs), 1):
        rows += found or []
        problems += [f"{case.name}: {problem}"] if problem else []
        kinds = [row["kind"] for row in found or []]
        summary = problem or ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
        print(f"[{index}/{len(chosen)}] {time.monotonic() - started:.0f} s {case.name}: {summary}", file=sys.stderr)
    order = {case.name: index for index, case in enumerate(chosen)}
    rows.sort(key=lambda row: order[row["model"]])
    save(options.output, {"made": made(), "problems": problems, **summary_of(rows)}, render)
    failed = any(row["kind"] in ("unexplained", "scan incomplete") for row in rows)
    raise SystemExit(1 if failed or problems or not rows else 0)


if __name__ == "__main__":
    main()
