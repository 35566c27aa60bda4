"""Tests whether times, and what is recommended by them, change if other programs use the processor.

Scans models on the machine as it is, then with a busy loop on each core, and counts recommendations that differ from the one that is most frequent
without load. Then a model whose 16-bit forward does exactly twice the work of the fp32 one: how far is the speedup from 0.5?

    python benchmarks/times_under_load.py --scans 20 --markdown reports/times-under-load.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check import ScanResult, scan
from lowprec_check.analysis.speed import speed
from lowprec_check.engine.model.torchvision_ops import torchvision_works


def tiny() -> tuple[nn.Module, Any]:
    """14 µs a call."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 16)


def mlp() -> tuple[nn.Module, Any]:
    """About a millisecond."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.randn(32, 512)


def encoder() -> tuple[nn.Module, Any]:
    """A small transformer."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(4, 64, 256)


def torchvision_model(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    """An image classifier with random weights."""

    def make() -> tuple[nn.Module, Any]:
        with torchvision_works():
            import torchvision
        return getattr(torchvision.models, name)().eval(), torch.randn(1, 3, 224, 224)

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "tiny": tiny,
    "mlp": mlp,
    "encoder": encoder,
    "mobilenet_v3_small": torchvision_model("mobilenet_v3_small"),
    "resnet18": torchvision_model("resnet18"),
}


class TwiceTheWork(nn.Module):
    """In fp32 ``count`` products of fp32 matrices, in 16 bits twice as many of the same ones."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(size, size), count
        self.matrices = [torch.randn(size, size) / size**0.5]  # in a list: no cast reaches them

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        for _ in range(self.count * (1 if x.dtype == torch.float32 else 2)):
            wide @ self.matrices[0]
        return self.linear(x)


@contextlib.contextmanager
def load(loops: int) -> Iterator[None]:
    """Run ``loops`` busy loops."""
    started = multiprocessing.get_context("spawn")
    processes = [started.Process(target=_spin, daemon=True) for _ in range(loops)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # if it is killed, its loops end
        for _ in range(100_000):
            pass


def scanned(model: nn.Module, inputs: Any, precisions: list[str] | None = None) -> ScanResult:
    """A scan without the op-by-op errors, which do not affect times."""
    return scan(model, inputs, precisions=precisions, errors="none", plan=False)


def recommended(result: ScanResult) -> str:
    """What the scan recommends, and whether it says that fp32 is better."""
    chosen = result.recommendation
    return "nothing" if chosen is None else f"{'fp32, else ' if chosen.stay_in_fp32 else ''}{chosen.label}"


def speedups(result: ScanResult) -> dict[str, float | None]:
    """By precision; ``None`` if it cannot be told."""
    return {run.precision: speed(run, result.runs).told_ratio for run in result.runs[1:]}


def compare(name: str, scans: int, loops: int) -> dict[str, Any]:
    """``scans`` scans of a model with and without load."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    quiet = [scanned(model, inputs) for _ in range(scans)]
    with load(loops):
        loaded = [scanned(model, inputs) for _ in range(scans)]
    counts = Counter(map(recommended, quiet))
    usual = counts.most_common(1)[0][0]
    return {
        "model": name,
        "quiet": dict(counts),
        "loaded": dict(Counter(map(recommended, loaded))),
        "changed": sum(recommended(result) != usual for result in loaded),
        "speedups_quiet": _range(quiet),
        "speedups_loaded": _range(loaded),
        "waited": statistics.median(
            result.timing_conditions.waited or 0.0 for result in loaded if result.timing_conditions
        ),
    }


def _range(results: list[ScanResult]) -> dict[str, str]:
    found: dict[str, list[float]] = {}
    for result in results:
        for precision, speedup in speedups(result).items():
            if speedup is not None:
                found.setdefault(precision, []).append(speedup)
    return {
        precision: f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)})"
        for precision, values in found.items()
    }


def planted(scans: int, loops: int) -> list[dict[str, Any]]:
    """Speedups found where the truth is 0.5."""
    rows = []
    for size, count in ((64, 50), (256, 50), (512, 100)):
        torch.manual_seed(0)
        model = TwiceTheWork(size, count)
        for busy in (0, loops):
            with load(busy):
                results = [scanned(model, torch.randn(size, size), ["bfloat16"]) for _ in range(scans)]
            values = [found for result in results if (found := speedups(result)["bfloat16"]) is not None]
            rows.append(
                {
                    "size": size,
                    "loops": busy,
                    "found": len(values),
                    "of": scans,
                    "least": min(values, default=None),
                    "median": statistics.median(values) if values else None,
                    "most": max(values, default=None),
                }
            )
    return rows


def as_markdown(found: dict[str, Any]) -> str:
    """The report."""
    lines = [
        "# Times under load",
        "",
        f"`python benchmarks/times_under_load.py --scans {found['scans']}`: {found['cores']} cores, torch {found['torch']}; "
        f"load: {found['loops']} busy loops.",
        "",
        "Speedup over fp32: the median of the scans, the least and the largest, and in how many it could be told.",
        "",
        "| model | recommended without load | with load | changed | precision | speedup without load | with load |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["models"]:
        names = [", ".join(f"{name}: {count}" for name, count in row[key].items()) for key in ("quiet", "loaded")]
        for index, precision in enumerate(row["speedups_quiet"]):
            head = [row["model"], *names, str(row["changed"])] if index == 0 else [""] * 4
            cells = [*head, precision, row["speedups_quiet"][precision], row["speedups_loaded"].get(precision, "")]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "A forward that does exactly twice the work in 16 bits (truth: 0.50):",
        "",
        "| matrices | busy loops | told in | least | median | most |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["planted"]:
        figures = [f"{row[key]:.3f}" if row[key] is not None else "" for key in ("least", "median", "most")]
        lines.append(f"| {row['size']} | {row['loops']} | {row['found']} of {row['of']} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scans", type=int, default=20, help="scans of each model, with and without load")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas")
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)), help="busy loops")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "scans": options.scans,
        "loops": options.loops,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "models": [],
    }
    for name in filter(None, options.models.split(",")):
        found["models"].append(compare(name, options.scans, options.loops))
        print(json.dumps(found["models"][-1], indent=2), flush=True)
    found["planted"] = planted(options.scans, options.loops)
    print(as_markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(as_markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
