"""Scan the examples and torchvision's classification models on one device, and check each status.

    python benchmarks/breadth.py --device cpu --size 64 --output reports/breadth-cpu

Writes OUTPUT.md (a table) and OUTPUT.json (one row per model and precision). With ``--verify`` every status is
compared with that of running the cast model without this tool; the two must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.engine.core.pytree import leaves, map_tensors
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.engine.run.isolation import isolated
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.engine.session import scan_file
from lowprec_check.errors import UsageError
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS, low_precisions
from lowprec_check.schema.scan_result import Run, ScanResult

EXAMPLES = sorted(Path(__file__).parent.parent.joinpath("examples").glob("*.py"))
SIZES = {"inception_v3": 96, "vit_h_14": 224, "swin": 64, "maxvit_t": 224, "alexnet": 64}


def classification_models() -> list[str]:
    """Names of torchvision's classification models."""
    torchvision = import_torchvision()
    return list(torchvision.models.list_models(module=torchvision.models))


def shape_for(name: str, size: int) -> str:
    """The input shape closest to ``size`` that the model accepts."""
    if name.startswith("vit_") or name == "maxvit_t":
        return "1x3x224x224"
    return f"1x3x{max(size, SIZES.get(name, size))}x{max(size, SIZES.get(name, size))}"


def by_hand(target: Target, precision: str, device: torch.device) -> str:
    """The status of running the cast model without this tool: ``ok``, ``inaccurate``, ``nonfinite`` or ``error``."""
    chosen = PRECISIONS.get(precision)
    dtype = getattr(torch, chosen.format.name)
    model = copy.deepcopy(target.model).to(device)
    args, kwargs = map_tensors((target.args, target.kwargs), lambda tensor: tensor.to(device))
    with torch.no_grad():
        torch.manual_seed(0)
        reference = model(*args, **kwargs)
        context: Any = contextlib.nullcontext()
        if chosen.kind == "cast":
            model = model.to(dtype)
            args, kwargs = map_tensors((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)
        else:
            context = torch.autocast(device.type, dtype=dtype)
        try:
            torch.manual_seed(0)
            with context:
                output = model(*args, **kwargs)
        except Exception:
            return "error"
    pairs = [(y.double(), r.double()) for (_, y), (_, r) in zip(leaves(output), leaves(reference), strict=True)]
    if not all(bool(y.isfinite().all()) for y, _ in pairs):
        return "nonfinite"
    return "ok" if all((y - r).norm() <= chosen.tolerance * r.norm() for y, r in pairs) else "inaccurate"


def checked_by_hand(target: Target, precision: str, device: str) -> str:
    """:func:`by_hand` in a separate process, so that this one never initializes the device."""
    return isolated(lambda: by_hand(target, precision, torch.device(device)), "fork", str)


def scan_one(spec: str, inputs: tuple[str, ...], options: argparse.Namespace) -> tuple[ScanResult | None, str]:
    """A result, or the reason why there is none."""
    try:
        *_, result = scan_file(
            TargetSpec(spec, inputs),
            ScanOptions(device=options.device, budget=options.budget, precisions=options.precision),
        )
    except UsageError as error:
        return None, error.message
    return conclude(result), ""


def row(spec: str, result: ScanResult, run: Run, fp32_ms: float, verified: str | None) -> dict[str, Any]:
    """One run as a flat record."""
    return {
        "model": spec,
        "precision": run.precision,
        "status": run.status,
        "by_hand": verified,
        "rel_l2": run.output_error.rel_l2 if run.output_error else None,
        "fp32_ms": round(fp32_ms, 3),
        "time_ratio": round(run.latency_ms / fp32_ms, 3) if run.latency_ms else None,
        "peak_memory_bytes": run.peak_memory_bytes,
        "gaps": sorted({gap.op for gap in run.gaps}),
        "perturbed": run.perturbed,
        "complete": run.complete,
        "ops": len(run.op_calls),
        "notes": run.notes,
        "recommended": bool(result.recommendation and result.recommendation.precision == run.precision),
    }


def collect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Scan the chosen models."""
    specs: list[tuple[str, tuple[str, ...]]] = []
    if not options.models and options.part[0] == 1:
        root = Path.cwd()
        specs += [(str(path.relative_to(root) if path.is_relative_to(root) else path), ()) for path in EXAMPLES]
    part, parts = options.part
    for name in (options.models or classification_models())[part - 1 :: parts]:
        specs.append((f"torchvision:{name}", (shape_for(name, options.size),)))
    rows = []
    for index, (spec, inputs) in enumerate(specs):
        started = time.monotonic()
        result, why = scan_one(spec, inputs, options)
        if result is None:
            print(f"[{index + 1}/{len(specs)}] {spec}: {why}", flush=True)
            rows.append({"model": spec, "precision": "fp32", "status": "error", "notes": [why]})
            continue
        fp32_ms = result.runs[0].latency_ms or float("nan")
        scanned = time.monotonic() - started
        for run in result.runs[1:]:
            checked = run.status != "timeout" and run.precision != "plan" and options.verify
            target = load_target(spec, inputs) if checked else None
            verified = checked_by_hand(target, run.precision, options.device) if target else None
            rows.append(row(spec, result, run, fp32_ms, verified))
        statuses = " ".join(f"{run.precision}={run.status}" for run in result.runs[1:])
        print(f"[{index + 1}/{len(specs)}] {spec} {scanned:.1f} s {statuses}", flush=True)
    return rows


def merged(paths: list[Path]) -> dict[str, Any]:
    """The rows of several reports, sorted by model."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = [record for part in parts for record in part["rows"]]
    order = {name: index for index, name in enumerate(PRECISIONS.names())}
    rows.sort(key=lambda record: (record["model"], order.get(record["precision"], len(order))))
    return parts[0] | {"rows": rows}


def cell(record: dict[str, Any]) -> str:
    """Status, error and time of one run."""
    if record["status"] not in ("ok", "inaccurate"):
        return str(record["status"])
    error = f"{record['rel_l2']:.0e}" if record["rel_l2"] is not None else "∞"
    ratio = f"{record['time_ratio']:.2f}×" if record["time_ratio"] else ""
    mark = "**" if record["recommended"] else ""
    return f"{mark}{record['status']} {error} {ratio}{mark}"


def render(data: dict[str, Any]) -> str:
    """The report: a table with one row per model and one column per precision."""
    rows = data["rows"]
    names = [precision.name for precision in low_precisions()]
    checked = [record for record in rows if record.get("by_hand")]
    agree = sum(record["by_hand"] == record["status"] for record in checked)
    compared = [record for record in rows if record.get("perturbed") is not None]
    lines = [
        *head("Statuses and plain runs of torchvision's classifiers", data),
        "Each cell: status, rel_l2 of the output against fp32, time divided by fp32's; bold: the recommended precision. Random weights.",
        "",
        f"- models: {len({record['model'] for record in rows})}, runs: {len(rows)}",
        f"- status equal to that of running the cast model without the tool: {agree} of {len(checked)} checked",
        f"- instrumented output equal to the plain output, bit for bit: "
        f"{sum(not record['perturbed'] for record in compared)} of {len(compared)} runs without rescued ops",
        "",
        f"| model | fp32 ms | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for record in rows:
        by_model.setdefault(record["model"], {})[record["precision"]] = record
    for model, runs in by_model.items():
        fp32 = next(iter(runs.values())).get("fp32_ms", "–")
        cells = [cell(runs[name]) if name in runs else "–" for name in names]
        lines.append(f"| {model.removeprefix('torchvision:')} | {fp32} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan, print the report, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--precision", action="append")
    parser.add_argument(
        "--models", nargs="*", help="torchvision names; default: all classification models and the examples"
    )
    parser.add_argument(
        "--part",
        type=int,
        nargs=2,
        default=(1, 1),
        metavar=("K", "N"),
        help="only every N-th model, starting at the K-th",
    )
    parser.add_argument("--merge", type=Path, nargs="*", help="merge the JSON files of several parts into one report")
    parser.add_argument("--note", default="", help="a line for the top of the report")
    parser.add_argument("--verify", action="store_true", help="check each status against running the cast model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.merge:
        data = merged(options.merge)
    else:
        how = isolated(lambda: made(options.device, options.note), "fork", dict[str, Any])
        data = {"made": how, "rows": collect(options)}
    save(options.output, data, render)


if __name__ == "__main__":
    main()
