"""Whole scans on an accelerator: how long they take and where, how much memory, and what the death of a worker costs.

    python benchmarks/accelerator_scans.py --device cuda --output reports/accelerator-scans
    python benchmarks/accelerator_scans.py --device cpu --cases small,llama,kill --hidden 256 --layers 2

Cases: ``small``, a small model in five rows; ``llama``, a Llama made from a configuration, with random fp32 weights; ``kill``, a model
whose op kills its process in half, so that only this row is affected. The rounds are interleaved over the isolations; a
figure is the median of the rounds. Seconds of a phase count from the message before; ``start`` is the time until a worker has the
model, ``parent`` what is not spent in a worker. Memory is polled from outside, in use before subtracted: of the device by ``nvidia-smi``,
of the CPU as the proportional set size of all processes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from report_files import head, made, save
from tabulate import tabulate

SMALL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64), nn.Softmax(-1)).eval()
inputs = torch.randn(32, 256)
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size={hidden}, intermediate_size={hidden} * 11 // 4, num_hidden_layers={layers},
    num_attention_heads=max(1, {hidden} // 128), num_key_value_heads=max(1, {hidden} // 128), vocab_size=32000, use_cache=False,
)
with torch.device("{made_on}"):
    model = LlamaForCausalLM(config).eval()
inputs = {{"input_ids": torch.randint(0, 32000, (1, {tokens}))}}
"""
KILL = """
import os, signal
import torch
from torch import nn

@torch.library.custom_op("accelerator_scans::kills", mutates_args=())
def kills(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.half:  # a blanket cast: autocast leaves weights in fp32
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()

kills(torch.ones(1), torch.ones(1))  # a first call imports, which every worker would do again

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.two(kills(self.one(x), self.one.weight))

torch.manual_seed(0)
model = Model().eval()
inputs = torch.randn(8, 64)
"""
FIVE = "bfloat16,autocast-bf16,half,autocast-fp16"
LOW = "bfloat16,half"


def main() -> None:
    """Run the cases and print their figures."""
    options = parse()
    if options.child is not None:
        run_child(options)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases.split(","):
            results += measure(case, Path(folder), options)
    save(options.output, {"made": made(options.device), "results": results}, render)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    table = tabulate([row_of(found) for found in data["results"]], "keys", tablefmt="github", disable_numparse=True)
    return "\n".join([*head("Whole scans on an accelerator", data), table, ""])


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="small,llama,kill")
    parser.add_argument("--isolations", default="shared", help="compared with each other, e.g. shared,spawn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--made-on", help="where the weights of the Llama are made; default: the device")
    parser.add_argument("--errors", default="both")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    parser.add_argument("--child", nargs=3, metavar=("FILE", "PRECISIONS", "ISOLATION"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(case: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a case with each isolation."""
    texts = {
        "small": SMALL,
        "kill": KILL,
        "llama": LLAMA.format(
            hidden=options.hidden,
            layers=options.layers,
            tokens=options.tokens,
            made_on=options.made_on or options.device,
        ),
    }
    file = folder / f"{case}_model.py"
    file.write_text(texts[case], encoding="utf-8")
    precisions = LOW if case == "llama" else FIVE
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.isolations.split(",")}
    for _ in range(options.rounds):
        for isolation, found in rounds.items():
            found.append(scan_once(file, precisions, isolation, options))
            print(case, isolation, f"{found[-1]['seconds']:.1f} s", file=sys.stderr)
    return [
        {
            "case": case,
            "isolation": isolation,
            **found[-1],
            "seconds": statistics.median(one["seconds"] for one in found),
            "all_seconds": [one["seconds"] for one in found],
        }
        for isolation, found in rounds.items()
    ]


def scan_once(file: Path, precisions: str, isolation: str, options: argparse.Namespace) -> dict[str, Any]:
    """One scan in a process of its own: its seconds, peak memory, rows and phases."""
    passed = ["--device", options.device, "--errors", options.errors]
    passed += ["--budget", str(options.budget)] if options.budget else []
    command = [sys.executable, __file__, *passed, "--child", str(file), precisions, isolation]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with polled(process.pid, options.device) as peak:
        output, _ = process.communicate()
    seconds = time.perf_counter() - started
    if process.returncode:
        return {"seconds": seconds, "failed": process.returncode}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    found["phases"]["parent"] = seconds - sum(found["phases"].values())
    return {"seconds": seconds, "peak_bytes": peak["bytes"], **found}


@contextlib.contextmanager
def polled(pid: int, device: str) -> Iterator[dict[str, int]]:
    """Poll the memory that the scan uses; the most so far is in ``bytes``."""
    peak, done = {"bytes": 0}, threading.Event()
    read = functools.partial(memory_of_processes, pid) if device == "cpu" else memory_of_device
    before = 0 if device == "cpu" else read()

    def poll() -> None:
        while not done.wait(0.1):
            peak["bytes"] = max(peak["bytes"], read() - before)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def memory_of_processes(pid: int) -> int:
    """The memory of a process and its descendants; what they share counts once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def memory_of_device() -> int:
    """The memory in use on the first device, by all processes; 0 if it is not known."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return int(output[0]) << 20 if output and output[0].isdigit() else 0


def row_of(found: dict[str, Any]) -> dict[str, str]:
    """The figures of a case as a row of the table."""
    size, peak = found.get("fp32_bytes") or 0, found.get("peak_bytes") or 0
    return {
        "case": found["case"],
        "isolation": found["isolation"],
        "seconds": f"{found['seconds']:.1f}",
        "peak GiB": f"{peak / 2**30:.2f}",
        "peak / fp32 model": f"{peak / size:.2f}" if size > 2**30 else "",
        "workers": str(found.get("workers", "")),
        "rows": " ".join(f"{name}:{status}" for name, status in found.get("rows", {}).items()) or "failed",
        "phases": " ".join(f"{name} {seconds:.1f}" for name, seconds in found.get("phases", {}).items()),
    }


# -- in the process of a scan


class Phases:
    """Seconds between the messages of workers, by what was done."""

    NAMES = (
        ("Loaded", "start"),
        ("CallStarted", "plain"),
        ("PlainResult", "plain"),
        ("Measures", "measures"),
        ("GapFound", "instrumented"),
        ("OpCallsFound", "instrumented"),
        ("Instrumented", "instrumented"),
    )

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._last = time.perf_counter()

    def passed(self, phase: str | None) -> None:
        """The time since the last call belongs to ``phase``, or to none."""
        now = time.perf_counter()
        if phase is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def watch(self) -> None:
        """Watch the messages of all jobs of this process."""
        from lowprec_check.engine.run import launcher
        from lowprec_check.engine.run.outcome import Outcome

        add, execute, names = Outcome.add, launcher.execute, dict(self.NAMES)

        def watched_add(outcome: Outcome, message: Any) -> None:
            self.passed(names.get(type(message).__name__, type(message).__name__))
            add(outcome, message)

        def watched_execute(*args: Any, **kwargs: Any) -> Outcome:
            self.passed(None)
            outcome = execute(*args, **kwargs)
            self.passed("died" if outcome.ended == "crashed" else "end")
            return outcome

        Outcome.add, launcher.execute = watched_add, watched_execute  # type: ignore[method-assign]


def run_child(options: argparse.Namespace) -> None:
    """Scan one file and print what was found as one line of JSON."""
    phases = Phases()
    from lowprec_check.engine.run.target_source import load_here
    from lowprec_check.engine.run.target_spec import TargetSpec
    from lowprec_check.engine.scan import scan_target
    from lowprec_check.schema.options import ScanOptions

    file, precisions, isolation = options.child
    phases.passed("import")
    phases.watch()
    source = load_here(TargetSpec(file), 0)
    size = sum(parameter.nbytes for parameter in source.target.model.parameters())
    phases.passed("load")
    settings = ScanOptions(
        precisions=precisions, plan=False, device=options.device, errors=options.errors, budget=options.budget
    )
    result = scan_target(source, None if isolation == "default" else isolation, settings)
    found = {
        "rows": {run.precision: run.status for run in result.runs},
        "complete": all(run.complete for run in result.runs),
        "isolation_used": result.options["isolation"],
        "workers": source.kept.started,
        "left": source.kept.left,
        "fp32_bytes": size,
        "phases": dict(phases.seconds),
    }
    sys.stdout.flush()
    os.write(1, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
