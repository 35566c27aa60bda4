"""How fast, accurate and large models are on every backend, as ratios to eager fp32 in the same scan.

``python benchmarks/backend_table.py [--device cuda] [--models resnet50,bert] [--output FILE]`` makes a Markdown table for each
model, with random weights. In the environment of Intel's extension it has that extension's rows. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from report_files import head, made, save
from tabulate import tabulate

from lowprec_check.analysis.run_summary import memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.engine.core.installation import extension_problem
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.engine.session import scan_file
from lowprec_check.report.blocks import SpeedOf, speed_of, speed_text
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run, ScanResult

MODELS = {
    "resnet50": TargetSpec("torchvision:resnet50", ("1x3x224x224",)),
    "mobilenet_v3": TargetSpec("torchvision:mobilenet_v3_large", ("1x3x224x224",)),
    "vit_b_16": TargetSpec("torchvision:vit_b_16", ("1x3x224x224",)),
    "bert": TargetSpec("transformers:bert", ("input_ids=1x128:int64",)),
}
CONVOLUTIONAL = ("resnet50", "mobilenet_v3")
PRECISIONS = "fp32,bfloat16,autocast-bf16"
ON_CUDA = "fp32,bfloat16,autocast-bf16,half,autocast-fp16"


def backends(device: str) -> list[str]:
    """Those that run on this machine."""
    found = ["eager", "inductor", "inductor-freeze", "jit"]
    if device == "cpu":
        found += ["int8", "int8-weight-only", "int8-dynamic", "openvino", "onnxruntime"]
        found += ["ipex", "ipex-jit", "ipex-compile"] if extension_problem() is None else []
    return found


def scans(model: str, device: str, chosen: list[str], precisions: str | None) -> list[ScanResult]:
    """One scan in the default memory format; for convolutions, one in channels_last."""
    precisions = precisions or (PRECISIONS if device == "cpu" else ON_CUDA)
    given: dict[str, Any] = {"precisions": precisions, "device": device, "errors": "none", "plan": False}
    options = [ScanOptions(**given, backends=chosen, scenario="offline")]
    if model in CONVOLUTIONAL:
        last = [name for name in chosen if name in ("eager", "inductor-freeze", "ipex-jit")]
        options.append(ScanOptions(**given, backends=last, memory_formats="channels_last", scenario="offline"))
    return [list(scan_file(MODELS[model], option))[-1] for option in options]


def row(run: Run, runs: list[Run]) -> dict[str, Any]:
    """The figures of one run."""
    return {
        "run": run.key.label,
        "status": run.status if run.status != "skipped" else f"skipped: {run.reason}",
        "error": run.output_error.rel_l2 if run.output_error else None,
        "ms": run.timing.median_ms if run.timing else None,
        "speed": speed(run, runs).ratio,
        "memory": memory_ratio(run, runs),
        "setup_s": run.setup_seconds,
        "compiler": run.compiler.verdict if run.compiler else None,
    }


FIGURES = {"error": "{:.1e}", "ms": "{:.1f}", "memory": "{:.2f} ×", "setup_s": "{:.0f} s"}
ABOUT = (
    "A row is a run of its own; ms is the median of 3 seconds of calls (`--scenario offline`), speed and memory are those of the eager fp32 run",
    "of the same scan as 1, compiler is the verdict of [LP306](../docs/backends.md#is-the-compiler-to-blame). Where another fp32 row follows, it is",
    "the reference of the rows below it. Random weights, batch 1.",
)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [*head("Models on every backend", data), *ABOUT]
    for model in data["models"]:
        rows = [[cell(key, value) for key, value in found.items()] for found in model["rows"]]
        heads = ["run", "status", "error", "ms", "speed", "memory", "set-up", "compiler"]
        table = tabulate(rows, heads, tablefmt="pipe", disable_numparse=True)
        lines += ["", f"## {model['model']} · {model['inputs']}", "", table]
    return "\n".join(lines) + "\n"


def cell(key: str, value: Any) -> str:
    """A figure as text; a speed as times as fast or slower."""
    if value is None:
        return "–"
    if key == "speed":
        return "1" if value == 1 else speed_text(speed_of(value) or SpeedOf("unknown"))
    return FIGURES.get(key, "{}").format(value)


def main() -> None:
    """Scan the models, and save the tables after each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--backends")
    options.add_argument("--precisions")
    options.add_argument("--output", type=Path, help="path of the report without its suffix")
    given = options.parse_args()
    chosen = given.backends.split(",") if given.backends else backends(given.device)
    models: list[dict[str, Any]] = []
    for model in given.models.split(","):
        found = scans(model, given.device, chosen, given.precisions)
        rows = [row(run, result.runs) for result in found for run in result.runs]
        models.append({"model": model, "inputs": ", ".join(found[0].model.inputs), "rows": rows})
        save(given.output, {"made": made(given.device), "models": models}, render)


if __name__ == "__main__":
    main()
