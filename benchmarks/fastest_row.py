"""Is the recommended row the fastest? Scans of small models, half of them under load, against an independent interleaved timing.

    python benchmarks/fastest_row.py --output reports/fastest-row

Each row that passes and the fp32 model are called in turns by plain torch in one process, 40 rounds, the fastest of five calls each; the ratio of two rows
is the median over the rounds. A recommendation is right if no passing row is more than 5 % faster. Scans that are in the output already are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from in_processes import in_processes
from report_files import head, made, save
from tabulate import tabulate
from torch import nn

import lowprec_check
from lowprec_check.analysis.speed import speed

NEAR, ROUNDS, CALLS, CORES = 1.05, 40, 5, 2


def model_of(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A small model and its input."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, kind = draw.choice((64, 128, 256)), seed % 3
    if kind == 0:
        layers = [each for _ in range(draw.randint(2, 5)) for each in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers).eval(), torch.randn(draw.choice((8, 64)), width)
    if kind == 1:
        channels = width // 4
        layers = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()).eval(), torch.randn(2, 3, 32, 32)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 32, width)


def caller(model: nn.Module, inputs: torch.Tensor, precision: str, backend: str) -> Any:
    """A function that calls the row."""
    model, dtype = copy.deepcopy(model), getattr(torch, precision, None)
    if dtype is not None:
        model, inputs = model.to(dtype), inputs.to(dtype)
    autocast = {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.half}.get(precision)

    def context() -> Any:
        return torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)

    served: Any = model
    with torch.no_grad(), context():
        if backend == "jit":
            torch.set_autocast_cache_enabled(False)
            served = torch.jit.freeze(torch.jit.trace(model, inputs, check_trace=False, strict=False))
        elif backend == "inductor":
            served = torch.compile(model)

    def call() -> float:
        with torch.no_grad(), context():
            started = time.perf_counter()
            served(inputs)
            return time.perf_counter() - started

    for _ in range(5):
        call()
    return call


def burn() -> None:
    """Use a core."""
    while True:
        sum(range(10_000))


def scanned(number: int) -> dict[str, Any]:
    """A scan, and how much faster than its recommendation the fastest passing row is."""
    seed, loaded = number // 2, bool(number % 2)
    torch.set_num_threads(CORES)
    model, inputs = model_of(seed)
    backends = ["eager", "jit", *(["inductor"] if seed % 10 == 0 else [])]
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(1 + seed % 2 if loaded else 0)]
    for burner in burners:
        burner.start()
    try:
        result = lowprec_check.scan(
            model,
            inputs,
            precisions="half,bfloat16,autocast-bf16",
            backends=backends,
            plan=False,
            errors="none",
            further_inputs=0,
            device="cpu",
        )
    finally:
        for burner in burners:
            burner.kill()
    best = result.recommendation
    rows = [(run.precision, run.backend) for run in result.runs if run.is_low and run.status == "ok"]
    if best is None or (best.precision, best.backend) not in rows:
        return {"seed": seed, "loaded": loaded, "recommended": None}
    calls = {row: caller(model, inputs, *row) for row in rows}
    seconds: dict[Any, list[float]] = {row: [] for row in rows}
    for turn in range(ROUNDS):
        for row in rows if turn % 2 else rows[::-1]:
            seconds[row].append(min(calls[row]() for _ in range(CALLS)))
    mine = seconds[(best.precision, best.backend)]
    behind = {
        " · ".join(row): statistics.median(one / other for one, other in zip(mine, each, strict=True))
        for row, each in seconds.items()
    }
    return {
        "seed": seed,
        "loaded": loaded,
        "recommended": f"{best.precision} · {best.backend}",
        "speeds": {
            f"{run.precision} · {run.backend}": [found.low, found.ratio, found.high]
            for run in result.runs
            if (run.precision, run.backend) in rows
            for found in [speed(run, result.runs)]
        },
        "waited": result.timing_conditions.waited if result.timing_conditions else None,
        "fastest": max(behind, key=lambda row: behind[row]),
        "behind": max(behind.values()),
    }


def render(data: dict[str, Any]) -> str:
    """The report."""
    judged = [each for each in data["scans"] if each["recommended"]]
    right = [each for each in judged if each["behind"] <= NEAR]
    loaded = [each for each in judged if each["loaded"]]
    rows = [
        [each["seed"], "yes" if each["loaded"] else "", each["recommended"], each["fastest"], f"{each['behind']:.2f}"]
        for each in judged
    ]
    lines = [
        *head("Is the recommended row the fastest?", data),
        "Half of the scans ran beside one or two further processes that use a core each. Both timings are of calls in turns, so that a busy machine slows all rows.",
        "",
        f"**Of {len(judged)} scans, {len(right)} recommend a row within 5 % of the fastest that passes** "
        f"({sum(each in right for each in loaded)} of {len(loaded)} under load). {len(data['scans']) - len(judged)} recommend none that was timed.",
        "",
        tabulate(
            rows, ["model", "load", "recommended", "fastest", "times as fast"], tablefmt="pipe", disable_numparse=True
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan until the time is up, and save after each scan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scans", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help=f"how many at a time, each on {CORES} cores of its own")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no scan starts later")
    options = parser.parse_args()
    saved = options.output.with_suffix(".json")
    found: list[dict[str, Any]] = json.loads(saved.read_text(encoding="utf-8"))["scans"] if saved.exists() else []
    known = {2 * each["seed"] + each["loaded"] for each in found}
    left = [number for number in range(options.scans) if number not in known]
    for number, each in in_processes(scanned, left, options.jobs, options.seconds, cores=CORES):
        print(number, each, flush=True)
        if not isinstance(each, Exception):
            found = sorted([*found, each], key=lambda scan: (scan["seed"], scan["loaded"]))
            save(options.output, {"made": made(), "scans": found}, render)


if __name__ == "__main__":
    main()
