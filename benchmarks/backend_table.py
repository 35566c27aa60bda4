"""How fast, accurate and large models are on every backend, as ratios to eager fp32 in the same scan.

``python benchmarks/backend_table.py [--device cuda] [--models resnet50,bert] [--json FILE]`` prints a Markdown table for each
model, with random weights. In the environment of Intel's extension it has that extension's rows. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from lowprec_check.analysis.run_summary import error_text, memory_ratio, speedup
from lowprec_check.engine.load import TargetSpec
from lowprec_check.engine.scan_options import ScanOptions
from lowprec_check.engine.session import scan_file
from lowprec_check.engine.stack.intel_extension import extension_problem
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
        found.append("int8")
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


def row(run: Run, runs: list[Run]) -> list[str]:
    """One run as strings."""
    ratio, memory = speedup(run, runs), memory_ratio(run, runs)
    return [
        run.key.label,
        run.status if run.status != "skipped" else f"skipped: {run.reason}",
        error_text(run.output_error) if run.output_error else "–",
        f"{run.timing.median_ms:.1f}" if run.timing else "–",
        f"{ratio:.2f}" if ratio else "–",
        f"{memory:.2f}" if memory else "–",
        f"{run.setup_seconds:.0f} s" if run.setup_seconds is not None else "–",
        run.compiler.verdict if run.compiler else "–",
    ]


def main() -> None:
    """Print the tables, each as soon as it is known."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--backends")
    options.add_argument("--precisions")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    chosen = given.backends.split(",") if given.backends else backends(given.device)
    saved: dict[str, list[ScanResult]] = {}
    for model in given.models.split(","):
        saved[model] = scans(model, given.device, chosen, given.precisions)
        first = saved[model][0]
        keys = ("torch", "device_name", "cpu", "cpu_capability", "threads")
        shown = [f"{key} {first.environment[key]}" for key in keys if first.environment.get(key)]
        print(f"\n### {model} · {', '.join(first.model.inputs)} · {' · '.join(shown)}\n")
        rows = [row(run, found.runs) for found in saved[model] for run in found.runs]
        heads = ["run", "status", "error", "ms", "times as fast", "memory", "set-up", "compiler"]
        print(tabulate(rows, heads, tablefmt="pipe", disable_numparse=True))
        sys.stdout.flush()
        if given.json:
            given.json.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))


if __name__ == "__main__":
    main()
