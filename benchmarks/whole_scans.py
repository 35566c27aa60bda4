"""Whole scans, as a user waits for them: seconds to the first row and to the end, and where they go.

    python benchmarks/whole_scans.py --rounds 5 --output whole-scans
    python benchmarks/whole_scans.py --device cuda --cases mlp,bert
    python benchmarks/whole_scans.py --cases mlp,resnet50 --checkouts ../old,.   # two checkouts in turns

Each scan is the command ``lowprec-check scan`` in a process of its own, and a figure is the median of the rounds. The
cost that cannot be avoided is measured beside it: a process that imports torch, loads the model and calls it five times
in fp32 and in each precision that the hardware accelerates. ``processor`` is the processor time of the command and all
its processes, which other programs change less. The first row is that of the first precision after fp32. Steps are
shown as progress; those of a run are ``op by op`` while an op runs under the instruments.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import ROOT, head, made, parser_of, save
from tabulate import tabulate

MLP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 10)).eval()
inputs = torch.randn(32, 64)
"""
BERT = """
import torch
from transformers import BertConfig, BertModel

torch.manual_seed(0)
model = BertModel(BertConfig()).eval()
inputs = {"input_ids": torch.randint(0, 30000, (1, 128))}
"""
CASES: dict[str, tuple[str, ...]] = {
    "mlp": (MLP,),
    "resnet50": ("torchvision:resnet50", "--inputs", "1x3x224x224"),
    "bert": (BERT,),
    "spade": ("examples/spade_decoder.py",),
    "detector": ("torchvision:fasterrcnn_resnet50_fpn",),
}
"""The target of each scan, or the text of its file, and further options."""

WATCHED = """
import json, os, sys, time
started, path = float(sys.argv[1]), sys.argv[2]
found = {"events": [], "rows": []}
now = lambda: round(time.monotonic() - started, 3)

from lowprec_check.cli.progress import Progress
step, done = Progress.step, Progress.done

def watched_step(self, run, doing):
    found["events"].append([now(), run, doing])
    step(self, run, doing)

def watched_done(self, result):
    found["rows"].append([now(), len(result.runs)])
    done(self, result)

Progress.step, Progress.done = watched_step, watched_done
sys.argv = ["lowprec-check", *sys.argv[3:]]
from lowprec_check.__main__ import main
parent = os.getpid()
try:
    main()
finally:
    if os.getpid() == parent:
        with open(path, "w") as file:
            json.dump(found, file)
"""
"""A process that is the command, and notes when it shows progress and rows."""

PLAIN = """
import sys
from lowprec_check.engine.model.target_source import load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
import torch

_, name, device, *inputs = sys.argv
target = load_spec(TargetSpec(name, tuple(inputs)), 0)
move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value
args, kwargs = torch.utils._pytree.tree_map(move, (target.args, target.kwargs))
model = target.model.to(device)
wait = getattr(torch, device).synchronize

def call(model, dtype, autocast):
    casts = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point() and not autocast
    cast = lambda value: value.to(dtype) if casts(value) else value
    given, named = torch.utils._pytree.tree_map(cast, (args, kwargs))
    with torch.no_grad(), torch.autocast(device, dtype=dtype if autocast else torch.bfloat16, enabled=autocast):
        model(*given, **named)
    wait()

def accelerated(kind):
    return device != "cpu" or getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", bool)()

rows = [(torch.float32, False)]
rows += [(torch.bfloat16, True), (torch.bfloat16, False)] * accelerated("bf16")
rows += [(torch.float16, True), (torch.float16, False)] * accelerated("fp16")
for dtype, autocast in rows:
    model.float() if autocast else model.to(dtype)
    try:
        for _ in range(5):
            call(model, dtype, autocast)
    except Exception:
        pass
"""


def main() -> None:
    """Run the cases and print their figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a scan is ended")
    parser.add_argument("--checkouts", default=str(ROOT), help="folders of checkouts that are compared, with commas")
    given = parser.parse_args()
    cases = given.cases.split(",")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in cases:
            try:
                found = measured(name, Path(folder), given)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                print(f"{name}: {error}", flush=True)
                continue
            results += found
            print(tabulate(found, "keys"), flush=True)
    save(given.output, {"made": made(given.device), "results": results}, render)


def measured(name: str, folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a case, for each checkout."""
    target, *options = CASES[name]
    if "\n" in target:
        path = folder / f"{name}.py"
        path.write_text(target, encoding="utf-8")
        target = str(path)
    elif target.endswith(".py"):
        target = str(ROOT / target)
    shapes = options[1:2] if options[:1] == ["--inputs"] else []
    checkouts = [Path(each).resolve() for each in given.checkouts.split(",")]
    plain, scans = [], {checkout: [] for checkout in checkouts}
    for _ in range(given.rounds):
        plain.append(plain_seconds([target, given.device, *shapes]))
        for checkout in checkouts:
            command = ["scan", target, *options, "--device", given.device, "--fail-on", "never"]
            scans[checkout].append(scanned(checkout, command, folder, given.limit))
    normal = statistics.median(plain)
    return [
        {
            "case": name,
            "checkout": checkout.name,
            "plain": round(normal, 2),
            **{
                key: round(statistics.median(found[key] for found in rounds), 2)
                for key in ("start", "first row", "rows", "end", "processor")
            },
            "ratio": round(statistics.median(found["end"] for found in rounds) / normal, 2),
            "status": rounds[-1]["status"],
            "steps": rounds[-1]["steps"],
        }
        for checkout, rounds in scans.items()
    ]


def plain_seconds(arguments: list[str]) -> float:
    """Seconds to import torch, load the model and call it five times in each accelerated precision."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", PLAIN, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def scanned(checkout: Path, command: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """What one scan with the code of ``checkout`` took, in seconds."""
    events, saved = folder / "events.json", folder / "scan.json"
    saved.unlink(missing_ok=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [
        sys.executable,
        "-c",
        WATCHED,
        str(started),
        str(events),
        "--no-settings",
        *command,
        "--json",
        str(saved),
    ]
    ended = subprocess.Popen(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), *sys.path[1:]])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = ended.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        ended.send_signal(2)  # it saves what is known
        _, said = ended.communicate()
    end, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not saved.exists():
        raise subprocess.CalledProcessError(ended.returncode, ["lowprec-check", *command[6:]], stderr=said)
    found, result = json.loads(events.read_bytes()), json.loads(saved.read_bytes())
    rows = found["rows"]
    return {
        "start": rows[0][0],
        "first row": next((at for at, count in rows if count > 1), end),
        "rows": next((at for at, count in rows if count == rows[-1][1]), end),
        "end": end,
        "processor": (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        "status": {run["precision"]: run["status"] for run in result["runs"]},
        "steps": steps(found["events"], end),
    }


def steps(events: list[Any], end: float) -> dict[str, float]:
    """Seconds by run and step, the longest first; it starts before the first event and prints after the last."""
    spent: collections.Counter[str] = collections.Counter()
    at, now = 0.0, "start"
    for moment, run, doing in [*events, [end, "", ""]]:
        spent[now] += moment - at
        step = doing.rpartition(" · ")[2]  # without the verdict so far
        at, now = moment, f"{Path(run).name}: {'op by op' if step.startswith('op ') else step.partition(':')[0]}"
        if run == "times":
            now = "times"
        if doing.startswith("trial "):
            now = "plan: trials"
    return {name: round(seconds, 1) for name, seconds in spent.most_common() if seconds >= 0.05}


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    columns = {
        "plain": "load and 5 calls, s",
        "start": "fp32, s",
        "first row": "first row, s",
        "rows": "all rows, s",
        "end": "end, s",
    }
    columns |= {"processor": "processor, s", "ratio": "end / load and calls"}
    several = len({found["checkout"] for found in data["results"]}) > 1
    rows = [
        {"scan": found["case"]}
        | ({"checkout": found["checkout"]} if several else {})
        | {title: found[key] for key, title in columns.items()}
        | {"where": ", ".join(f"{name} {seconds}" for name, seconds in list(found["steps"].items())[:6])}
        for found in data["results"]
    ]
    return "\n".join([*head("Whole scans", data), tabulate(rows, "keys", tablefmt="github", disable_numparse=True), ""])


if __name__ == "__main__":
    main()
