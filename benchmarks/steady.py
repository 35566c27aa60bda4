"""Whether a scan gives the same advice every time: idle, and beside a load of six busy processes.

    python benchmarks/steady.py --scans 20 --output steady
    python benchmarks/steady.py --scans 6 --jobs 4 --device cuda --check
    python benchmarks/steady.py --scans 3 --models mlp,cnn --against ../old   # another checkout, in turns

Each scan is the command ``lowprec-check scan`` in a process of its own. ``row`` is the share of a model's scans, idle
and loaded, that name the same row as most do; ``verdict`` the same of the whole sentence, without its figures. A model
is steady if its share of rows is at least 95 %. With ``--check``, the passing rows are then measured without
lowprec-check, on the idle machine, in rounds: the ratios of time and memory of the row that most scans advise to those
of the best row. What it is advised for (``faster``, ``smaller``, or fp32 for ``nothing``) is what must be within 5 %.
What would start after ``--seconds`` is left out. ``--jobs`` scans run at once, each on cores of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from shared import ROOT, head, made, parser_of, save
from tabulate import tabulate

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def conv(i, o, stride=1, groups=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, groups=groups), nn.BatchNorm2d(o), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


class First(nn.Module):  # the first of the outputs of a module
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Mean(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.mean(self.dim)


class Norm(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(width)), scale

    def forward(self, x):
        x = x * self.scale
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).sqrt()


def encoder(width, layers):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), layers)


images, tokens = torch.randn(4, 3, 64, 64), torch.randn(2, 64, 256)
"""
MODELS = {
    "mlp": "nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)); inputs = torch.randn(64, 256)",
    "tiny": "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)); inputs = torch.randn(2, 8)",
    "wide": "nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)); inputs = torch.randn(8, 2048)",
    "deep": "nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(24)))"
    "; inputs = torch.randn(32, 128)",
    "cnn": "nn.Sequential(conv(3, 32), conv(32, 64, 2), conv(64, 128, 2), Mean((2, 3)), nn.Linear(128, 10))"
    "; inputs = images",
    "resnet": "nn.Sequential(conv(3, 64), *(Residual(conv(64, 64), conv(64, 64)) for _ in range(4)), Mean((2, 3)))"
    "; inputs = images",
    "depthwise": "nn.Sequential(conv(3, 64), *(nn.Sequential(conv(64, 64, 1, 64), nn.Conv2d(64, 64, 1))"
    " for _ in range(4))); inputs = images",
    "decoder": "nn.Sequential(conv(3, 32, 2), conv(32, 64, 2), nn.Upsample(scale_factor=2), conv(64, 32),"
    " nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3, 1, 1)); inputs = images",
    "groupnorm": "nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, 1, 1))"
    "; inputs = images",
    "patches": "nn.Sequential(nn.Conv2d(3, 192, 8, 8), nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 192))"
    "; inputs = images",
    "audio": "nn.Sequential(nn.Conv1d(1, 64, 9, 4), nn.ReLU(), nn.Conv1d(64, 64, 9, 4))"
    "; inputs = torch.randn(4, 1, 8000)",
    "volume": "nn.Sequential(nn.Conv3d(1, 16, 3), nn.ReLU(), nn.Conv3d(16, 16, 3))"
    "; inputs = torch.randn(1, 1, 24, 24, 24)",
    "transformer": "encoder(256, 4); inputs = tokens",
    "attention": "encoder(512, 1); inputs = torch.randn(1, 128, 512)",
    "lstm": "First(nn.LSTM(256, 256, 2, batch_first=True)); inputs = tokens",
    "gru": "First(nn.GRU(256, 128, batch_first=True)); inputs = tokens",
    "embedding": "nn.Sequential(nn.Embedding(30000, 256), encoder(256, 1), nn.Linear(256, 30000))"
    "; inputs = torch.randint(0, 30000, (1, 64))",
    "bag": "nn.Sequential(nn.EmbeddingBag(50000, 128), nn.Linear(128, 64)); inputs = torch.randint(0, 50000, (64, 16))",
    "overflow": "nn.Sequential(nn.Linear(256, 256), Norm(256, 3e3), nn.Linear(256, 64)); inputs = tokens",
    "softmax": "nn.Sequential(nn.Linear(256, 1024), nn.Softmax(-1), nn.Linear(1024, 64), nn.Sigmoid())"
    "; inputs = tokens",
}
"""The model of each file and its inputs, after :data:`HEAD`."""

CLOSE = 1.05
STEADY = 0.95


class Advice(NamedTuple):
    """What a scan advises."""

    row: str
    verdict: str
    worth: str
    passing: tuple[str, ...]


def scanned(checkout: Path, file: Path, device: str, cores: Sequence[int]) -> Advice:
    """The advice of one scan with a checkout, on these cores; the row is empty if none passes."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "scan.json")
        command = [sys.executable, "-m", "lowprec_check", "--no-settings", "scan", file, "--quiet"]
        command += ["--device", device, "--json", saved]
        ended = subprocess.run(
            list(map(str, command)),
            env={**os.environ, "PYTHONPATH": str(checkout)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        if not saved.exists():
            raise RuntimeError(f"{file.name}: {ended.stderr.strip()[-500:]}")
        result = json.loads(saved.read_text(encoding="utf-8"))
    verdict = next(each["text"] for each in result["statements"] if each["kind"] == "verdict")
    best = result.get("recommendation") or {}
    passing = [run["precision"] for run in result["runs"][1:] if run["status"] == "ok"]
    figures = re.compile(r"\d[\d.,]*(?= (?:%|[KMG]iB|times|of|runs)\b|%| %)")
    return Advice(best.get("precision", ""), figures.sub("#", verdict), best.get("worth") or "", tuple(passing))


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def advice_of_scans(
    args: argparse.Namespace, files: Sequence[Path], checkouts: Sequence[Path]
) -> dict[Any, list[Advice]]:
    """The advice of all scans, by model, checkout and whether the machine was loaded."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // args.jobs)
    free = Queue[list[int]]()
    for job in range(args.jobs):
        free.put(cores[job * each :][:each] or cores)
    found: dict[Any, list[Advice]] = collections.defaultdict(list)

    def scan(file: Path, checkout: Path, loaded: bool, until: float) -> None:
        if time.monotonic() < until:
            own = free.get()
            try:
                advice = scanned(checkout, file, args.device, own)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return
            finally:
                free.put(own)
            found[file.stem, checkout, loaded].append(advice)
            print(f"{file.stem} {checkout.name} {'loaded' if loaded else 'idle'}: {advice.verdict}", file=sys.stderr)

    for loaded in (False, True):
        until = time.monotonic() + args.seconds / 2
        with load(args.load * loaded), ThreadPoolExecutor(args.jobs) as pool:
            todo = [(file, checkout) for _ in range(args.scans) for file in files for checkout in checkouts]
            for job in [pool.submit(scan, *what, loaded, until) for what in todo]:
                job.result()
    return found


def most_common(values: Sequence[Any]) -> tuple[Any, float]:
    """The most common one, and its share."""
    ((value, count),) = collections.Counter(values).most_common(1)
    return value, count / len(values)


# -- The rows, measured without lowprec-check


def measured(file: Path, passing: Sequence[str], device: str, seconds: float = 4.0) -> dict[str, tuple[float, int]]:
    """The median milliseconds of a call in each row, in turns, and the bytes at its peak."""
    import torch

    from lowprec_check.torchkit.devices import peak_allocated

    names: dict[str, Any] = {}
    exec(file.read_text(encoding="utf-8"), names)
    dtypes = {"half": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    calls: dict[str, Any] = {}
    for row in ("fp32", *passing):
        model, inputs = copy.deepcopy(names["model"]).to(device), names["inputs"].to(device)
        under, _, name = row.rpartition("-")
        if not under and row != "fp32":
            model = model.to(dtypes[row])
            inputs = inputs.to(dtypes[row]) if inputs.is_floating_point() else inputs

        def call(model: Any = model, inputs: Any = inputs, dtype: Any = under and dtypes[name]) -> None:
            with torch.no_grad(), torch.autocast(device, dtype=dtype or None, enabled=bool(dtype)):
                model(inputs)
            if device == "cuda":
                torch.cuda.synchronize()

        calls[row] = (call, sum(tensor.nbytes for tensor in (inputs, *model.state_dict().values())))
    taken: dict[str, list[float]] = {row: [] for row in calls}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken["fp32"]) < 3:
        for row, (call, _) in calls.items():
            call()
            started = time.perf_counter()
            for _ in range(3):
                call()
            taken[row].append((time.perf_counter() - started) / 3 * 1e3)
    sizes = {}
    for row, (call, size) in calls.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            sizes[row] = size + torch.cuda.max_memory_allocated() - before
        else:
            sizes[row] = size + peak_allocated(call)
    return {row: (statistics.median(times), sizes[row]) for row, times in taken.items()}


def checked(advice: Advice, rows: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """How far the advised row is from the best one in what it is advised for."""
    row = "fp32" if advice.worth == "nothing" or advice.verdict.startswith("Stay in fp32") else advice.row
    ms, memory = rows[row]
    time_ratio = ms / min(each for each, _ in rows.values())
    memory_ratio = memory / min(each for _, each in rows.values())
    by = {"": "", "unknown": "", "smaller": "memory"}.get(advice.worth, "time")
    if row == "fp32":
        by = "time"
    ratio = {"time": time_ratio, "memory": memory_ratio}.get(by, 1.0)
    return {"measured": row, "by": by, "time": time_ratio, "memory": memory_ratio, "close": ratio <= CLOSE}


# -- The report


def report_of(data: dict[str, Any]) -> str:
    """The shares per model and in total."""
    lines = head("Steady advice", data)
    for checkout, models in data["checkouts"].items():
        table, rows = [], []
        for name, model in models.items():
            check = model.get("check")
            ratios = [f"{check['measured']} by {check['by'] or '–'}", check["time"], check["memory"]] if check else []
            shares = [f"{model[which]:.0%}" for which in ("idle", "loaded", "row", "verdict")]
            table.append([name, model["scans"], *shares, model["advice"], *ratios])
            rows.append(model["row"])
        steady = sum(share >= STEADY for share in rows)
        columns = ["model", "scans", "idle", "loaded", "row", "verdict", "most scans say"]
        columns += ["checked", "time / best", "memory / best"][: len(table[0]) - len(columns)]
        lines += [f"## {checkout}", "", tabulate(table, columns, "github", floatfmt=".2f"), ""]
        lines.append(f"The same row in at least {STEADY:.0%} of scans: {steady} of {len(rows)} models.")
        same = statistics.fmean(model["verdict"] for model in models.values())
        lines.append(f"The same verdict: {same:.0%} of scans.")
        checks = [model["check"]["close"] for model in models.values() if model.get("check")]
        if checks:
            lines.append(f"Within 5 % of the best in what it is advised for: {sum(checks)} of {len(checks)} models.")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Scan, measure, report."""
    parser = parser_of(__doc__)
    parser.add_argument("--scans", type=int, default=20, help="scans of each model, idle and again beside the load")
    parser.add_argument("--models", help="names separated by commas; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--against", type=Path, action="append", default=[], help="another checkout, scanned in turns")
    parser.add_argument("--check", action="store_true", help="measure the advised rows")
    parser.add_argument("--load", type=int, default=6, help="busy processes beside the second half of the scans")
    parser.add_argument("--jobs", type=int, default=1, help="scans at once")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no scan later, half of it idle")
    args = parser.parse_args()
    checkouts = [*(path.resolve() for path in args.against), ROOT]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in args.models.split(",") if args.models else MODELS:
            files.append(Path(folder, f"{name}.py"))
            model, _, inputs = MODELS[name].rpartition("; ")
            files[-1].write_text(f"{HEAD}\nmodel = ({model}).eval()\n{inputs}\n", encoding="utf-8")
        found = advice_of_scans(args, files, checkouts)
        data: dict[str, Any] = {"made": made(args.device), "checkouts": {}}
        for checkout in checkouts:
            models = data["checkouts"][str(checkout)] = {}
            for file in files:
                idle, loaded = found[file.stem, checkout, False], found[file.stem, checkout, True]
                if not idle or not loaded:
                    continue
                row, share = most_common([each.row for each in (*idle, *loaded)])
                verdict, same = most_common([each.verdict for each in (*idle, *loaded)])
                models[file.stem] = {
                    "scans": len(idle) + len(loaded),
                    "idle": sum(each.row == row for each in idle) / len(idle),
                    "loaded": sum(each.row == row for each in loaded) / len(loaded),
                    "row": share,
                    "verdict": same,
                    "advice": verdict,
                    "verdicts": [each.verdict for each in (*idle, *loaded)],
                }
                if args.check:
                    usual = next(each for each in (*idle, *loaded) if each.verdict == verdict)
                    models[file.stem]["check"] = checked(usual, measured(file, usual.passing, args.device))
    save(args.output, data, report_of)


if __name__ == "__main__":
    main()
