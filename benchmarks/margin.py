"""Check that the interval for the share of inputs that fail holds it, and what further inputs cost.

    python benchmarks/margin.py --output reports/margin                     # 40 models, and whole scans in pairs
    python benchmarks/margin.py --models 5 --pairs 0

The independent numbers: 500 further inputs, drawn by a generator of their own, on which the model runs in fp32 and cast to
16 bits in plain torch; the share of those whose rel_l2 exceeds the tolerance. The numbers of this package: a scan that is
given a function, with a tolerance at which the given input is at 50 to 100 % of it. The models are generated from a seed:
chains of linear layers or convolutions, activations and norms, with few outputs, so that the error varies from input to input.

Times: whole scans by the command, with further inputs and without, in interleaved pairs: the processor time of all processes of the
scan, the least of each kind, which depends least on what else the machine does. Exits with 1 if fewer than 95 % of the intervals hold
the share, or the ratio of a target is over 1.1.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from torch import Tensor, nn

from lowprec_check import scan

FURTHER, PRECISIONS = 500, {"half": torch.half, "bfloat16": torch.bfloat16}
LEAST_HELD, MOST_TIME = 0.95, 1.1
ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("examples/whitening.py", "examples/t5_feed_forward.py", "torchvision:resnet18")


def generated(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A model and the shape of its input."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, images = draw.choice((8, 16, 32, 64)), draw.random() < 0.3
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        layers.append(nn.Conv2d(width, width, 3, padding=1) if images else nn.Linear(width, width))
        layers.append(draw.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU))())
        if draw.random() < 0.4:
            layers.append(nn.GroupNorm(1, width) if images else nn.LayerNorm(width))
    if images:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers.append(nn.Linear(width, draw.choice((1, 1, 2, 4))))
    shape = (draw.choice((1, 2)), width, *((6, 6) if images else ()))
    return nn.Sequential(*layers).eval(), shape


def errors(model: nn.Module, inputs: list[Tensor], dtype: torch.dtype) -> list[float]:
    """rel_l2 of the output in ``dtype`` against fp32, for each input, in plain torch."""
    with torch.no_grad():
        exact = [model(x).double() for x in inputs]
        low = model.to(dtype)
        found = [float((low(x.to(dtype)).double() - y).norm() / y.norm()) for x, y in zip(inputs, exact, strict=True)]
    return found


def row(seed: int) -> dict[str, Any]:
    """One model: what the scan says, and the share of fresh inputs that fail."""
    name = random.Random(-seed - 1).choice(sorted(PRECISIONS))
    model, shape = generated(seed)
    torch.manual_seed(seed)
    given = torch.randn(shape)
    [error] = errors(generated(seed)[0], [given], PRECISIONS[name])
    tolerance = error / random.Random(seed + 1).uniform(0.5, 1.0)

    def inputs(batch: int = 0) -> Tensor:
        return torch.randn(shape) if batch else given

    run = scan(
        model, inputs, precisions=[name], tolerance=tolerance, times="off", errors="none", plan=False, seed=seed
    ).run(name)
    generator = torch.Generator().manual_seed(10_000 + seed)
    fresh = [torch.randn(shape, generator=generator) for _ in range(FURTHER)]
    failed = sum(error > tolerance for error in errors(generated(seed)[0], fresh, PRECISIONS[name]))
    found = run.further_inputs
    assert found is not None, run.status
    return {
        "seed": seed,
        "precision": name,
        "part": error / tolerance,
        "tried": found.tried,
        "failed": found.failed,
        "low": found.low,
        "high": found.high,
        "share": failed / FURTHER,
        "held": found.low <= failed / FURTHER <= found.high,
    }


def seconds(target: str, *options: str) -> float:
    """Processor time of a whole scan by the command, that of its workers included."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    with tempfile.TemporaryDirectory() as folder:
        before = spent()
        command = [sys.executable, "-m", "lowprec_check", "scan", target, "--json", f"{folder}/scan.json", *options]
        subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
        return spent() - before


def pairs(target: str, number: int) -> dict[str, Any]:
    """Scans with further inputs and without, each first in every second pair."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for index in range(number):
        for name in ("with", "without") if index % 2 else ("without", "with"):
            found[name].append(seconds(target, *(["--further-inputs", "0"] if name == "without" else [])))
    ratio = min(found["with"]) / min(found["without"])
    print(f"{target}: {ratio:.3f}", file=sys.stderr)
    return {"target": target, **found, "ratio": ratio}


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    rows, times = data["rows"], data["times"]
    held, tried = sum(row["held"] for row in rows), [row["tried"] for row in rows]
    lines = [
        *head("Further inputs: do the intervals hold, and what do they cost?", data),
        f"- models near their tolerance: {len(rows)}",
        f"- **intervals that hold the share of {FURTHER} fresh inputs that fail: {held} ({held / len(rows):.1%})**",
        f"- further inputs tried by a scan: {min(tried)} to {max(tried)}, {statistics.median(tried):g} in the median",
        f"- width of the interval: {statistics.median(row['high'] - row['low'] for row in rows):.2f} in the median",
        f"- runs that pass here and fail on a further input: {sum(row['failed'] > 0 for row in rows)}",
        "",
        "## Models",
        "",
        "| model | precision | given input, part of its tolerance | tried | failed | interval | share of fresh inputs | held |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = f"{row['low']:.3f} – {row['high']:.3f}"
        about = f"{row['seed']} | {row['precision']} | {row['part']:.0%} | {row['tried']} | {row['failed']}"
        lines.append(f"| {about} | {interval} | {row['share']:.3f} | {'yes' if row['held'] else 'no'} |")
    if times:
        lines += [
            "",
            "## Time of a whole scan",
            "",
            "| target | pairs | least processor seconds without | with | ratio |",
            "|---|---|---|---|---|",
        ]
    for entry in times:
        a, b = min(entry["without"]), min(entry["with"])
        lines.append(f"| {entry['target']} | {len(entry['with'])} | {a:.1f} | {b:.1f} | {entry['ratio']:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan all models, then time scans in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of whole scans of each target")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="targets whose scans are timed")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(options.models):
        rows.append(row(seed))
        print(rows[-1], file=sys.stderr)
    times = [pairs(target, options.pairs) for target in options.targets] if options.pairs else []
    save(options.output, {"made": made(), "rows": rows, "times": times}, render)
    held = sum(row["held"] for row in rows) / len(rows)
    raise SystemExit(1 if held < LEAST_HELD or any(entry["ratio"] > MOST_TIME for entry in times) else 0)


if __name__ == "__main__":
    main()
