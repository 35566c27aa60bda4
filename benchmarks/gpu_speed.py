"""Speed on an accelerator, in one short visit: what the instruments cost, whether times can be told and are right, whole scans.

    python benchmarks/gpu_speed.py --seconds 200 --output gpu-speed
    python benchmarks/gpu_speed.py --device cpu --tiny --seconds 60        # a rehearsal

Times are those of a scan (rounds over fp32 and three ways in 16 bits), beside triton's ``do_bench`` of the same calls: once as it is,
with a cold cache before each call, and once of several calls in a row, as the larger part of a call of a tiny model is the host's. Each part
is saved as it ends, an exception costs its line alone, and what has not ended after ``--seconds`` is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from instrument_cost import _WAITS, MODELS, Bench, Logits
from report_files import head, made, save
from tabulate import tabulate
from torch import nn

from lowprec_check.analysis.speed import judged, launch_bound
from lowprec_check.engine.core.devices import synchronize
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.run.preparation import ready_for
from lowprec_check.engine.run.rounds import RoundSchedule
from lowprec_check.engine.run.tasks import ModelTask, TimeTask
from lowprec_check.engine.run.turns import time_in_place
from lowprec_check.schema.scan_result import Run

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("fp32", "bfloat16", "half", "autocast-bf16")
GOALS = {"resnet50": 8.0, "vit_b_16": 3.0, "llama-1.1b": 6.0, "llama-6.7b": 4.0}
CLOSE = 0.05
"""How far a time may be from ``do_bench``."""


def image(name: str, batch: int, size: int = 224) -> Callable[[], Target]:
    """A model of torchvision."""
    return lambda: load_target(f"torchvision:{name}", (f"{batch}x3x{size}x{size}",))


def mlp(width: int, batch: int) -> Callable[[], Target]:
    """Four layers with norms."""

    def build() -> Target:
        layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(4)]
        return make_target(nn.Sequential(*layers).eval(), torch.randn(batch, width))

    return build


def text(kind: str, batch: int, tokens: int, **config: Any) -> Callable[[], Target]:
    """A model of transformers, with random weights."""

    def build() -> Target:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**config)
        name = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind]
        model = getattr(transformers, name)(made).eval()
        ids = torch.randint(0, made.vocab_size, (batch, tokens))
        return make_target(model if kind == "Bert" else Logits(model), ids)

    return build


SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
TIMED: dict[str, Callable[[], Target]] = {
    "MLP 256, batch 32": mlp(256, 32),
    "ResNet-50, batch 1": image("resnet50", 1),
    "ResNet-50, batch 32": image("resnet50", 32),
    "BERT-base, 1 x 128": text("Bert", 1, 128),
    "ViT-B/16, batch 32": image("vit_b_16", 32),
    "MLP 4096, batch 4096": mlp(4096, 4096),
    "BERT-base, 32 x 128": text("Bert", 32, 128),
    "ResNet-18, batch 1": image("resnet18", 1),
    "ViT-B/16, batch 1": image("vit_b_16", 1),
    "BERT-tiny, 1 x 64": text("Bert", 1, 64, **SMALL),
    "MobileNetV3, batch 64": image("mobilenet_v3_small", 64),
    "GPT-2, 4 x 512": text("GPT2", 4, 512),
    "ResNet-18, batch 128": image("resnet18", 128),
    "Llama 1.1 B, 1 x 512": text(
        "Llama",
        1,
        512,
        hidden_size=2048,
        num_hidden_layers=22,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
}
TINY: dict[str, Callable[[], Target]] = {
    "MLP 16, batch 4": mlp(16, 4),
    "BERT-tiny, 1 x 8": text("Bert", 1, 8, **SMALL),
}


class Visit:
    """What was measured so far, saved after each step; the process ends when time is up."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.output, self.device = given.output, given.device
        self.deadline = time.monotonic() + given.seconds
        self.data: dict[str, Any] = {"made": {}, "instruments": [], "times": [], "scans": [], "failures": []}
        self._lock = threading.Lock()
        threading.Thread(target=self._end_in_time, daemon=True).start()
        self.data["made"] = made(given.device)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def step(self, part: str, name: str) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Add what a step gives, or why it failed."""
        started = time.monotonic()

        def add(entry: dict[str, Any]) -> None:
            self.data[part].append({"name": name, **entry, "seconds": round(time.monotonic() - started, 1)})
            print(f"{part}: {json.dumps(self.data[part][-1])[:400]}", flush=True)

        try:
            yield add
        except Exception as error:
            traceback.print_exc()
            self.data["failures"].append(f"{part}, {name}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        """Write what is known."""
        with self._lock:
            save(self.output, self.data, render)

    def _end_in_time(self) -> None:
        time.sleep(max(0.0, self.left))
        self.data["failures"].append("time was up")
        with contextlib.suppress(Exception):
            self.save()
        os._exit(0)


# -- What the instruments cost


def instruments(bench: Bench, rounds: int) -> dict[str, Any]:
    """Ratios to fp32 + bf16, with and without the error budget; waits and launches for each op."""
    found = bench.measure(["both, budget", "both"], rounds)
    return {"ops": found["ops"], "ms": found["ms"], "ratios": found["ratios"]}


def launches(bench: Bench) -> dict[str, Any]:
    """Kernels launched, and waits for the device, in a run with the error budget."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        bench.instrumented("both, budget")
    averages = found.key_averages()
    profiler = cProfile.Profile()
    bench.instrumented("both, budget", profiler.runcall)
    spent = sorted(pstats.Stats(profiler).stats.items(), key=lambda its: -its[1][2])[:25]  # type: ignore[attr-defined]
    waits = {event.key: event.count for event in averages if event.key in _WAITS or "Memcpy DtoH" in event.key}
    return {
        "ops": bench.ops,
        "kernels per op": round(sum(event.count for event in averages if "LaunchKernel" in event.key) / bench.ops, 1),
        "waits": waits,
        "functions": [
            [f"{Path(file).name}:{line} {name}", found[0], round(found[2], 4), round(found[3], 4)]
            for (file, line, name), found in spent
        ],
        "device ms": round(sum(event.self_device_time_total for event in averages) / 1e3, 1),
    }


# -- Times


def do_bench(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a call by triton, alone and in a row of several."""

    def in_a_row(count: int) -> None:
        for _ in range(count):
            call()

    if device.type == "cpu":
        started = time.perf_counter()
        in_a_row(10)
        found = (time.perf_counter() - started) * 100
        return found, found
    try:
        from triton.testing import do_bench as measured

        measured(lambda: None, warmup=1, rep=1, return_mode="median")
    except Exception as error:  # it compiles a helper, for which there may be no compiler
        print(f"triton: {error}; measured in its way", flush=True)
        measured = _as_do_bench
    alone = float(measured(call, warmup=50, rep=150, return_mode="median"))
    count = max(1, min(200, int(5.0 / max(alone, 0.01))))
    row = float(measured(functools.partial(in_a_row, count), warmup=50, rep=150, return_mode="median")) / count
    return alone, row


def _as_do_bench(call: Callable[[], Any], warmup: int, rep: int, return_mode: str) -> float:
    """What triton does: before each call it overwrites the cache, and it waits at the end."""
    assert return_mode == "median"
    cache = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    found: list[float] = []
    for milliseconds in (warmup, rep):
        until, found = time.monotonic() + milliseconds / 1e3, []
        while time.monotonic() < until or not found:
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
            for start, end in pairs:
                cache.zero_()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            found += [start.elapsed_time(end) for start, end in pairs]
    return statistics.median(found)


def timed(target: Target, device: torch.device) -> Iterator[dict[str, Any]]:
    """The times of each precision, as a scan takes them and by triton."""
    target.model.to(device)
    tasks = tuple(ModelTask(precision=name, device=device.type, files=None) for name in PRECISIONS)  # type: ignore[arg-type]
    started = time.monotonic()
    messages: list[Any] = []
    time_in_place(tasks[0].as_task(TimeTask, runs=tasks), target, messages.append)
    schedule = RoundSchedule(len(tasks))
    for message in messages:
        schedule.note(message)
    took, truth = time.monotonic() - started, []
    for task in tasks:
        with ready_for(task, target) as ready:
            args, kwargs = ready.inputs(*target.inputs)

            call = functools.partial(_in_context, ready, args, kwargs)
            call()
            synchronize(device)
            truth.append(do_bench(call, device))
    for row, (task, (alone, in_a_row)) in enumerate(zip(tasks, truth, strict=True)):
        latency = schedule.latency(row)
        if latency is None:
            yield {"precision": task.precision, "failed": schedule.failures.get(row, "not timed")}
            continue
        found = latency.speedup
        yield {
            "precision": task.precision,
            "ms": latency.median_ms,
            "quartiles": latency.quartiles_ms,
            "do_bench": alone,
            "in a row": in_a_row,
            "speedup": found and [found.low, found.median, found.high, found.rounds],
            "told": found and judged(found.median, found.low, found.high).told,
            "by do_bench": truth[0][0] / alone,
            "by rows": truth[0][1] / in_a_row,
            "host_ms": latency.host_ms,
            "device_ms": latency.device_ms,
            "launch-bound": launch_bound(Run(precision=task.precision, device="cuda", latency=latency, status="ok")),
            "rounds took": round(took, 1),
        }


def _in_context(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with ready.context():
        ready.call(*args, **kwargs)


# -- Whole scans


def scans(visit: Visit, case: str, folder: Path) -> list[dict[str, Any]]:
    """One round of a case of ``whole_scans.py``."""
    output = folder / f"whole-{case}"
    command = [sys.executable, str(ROOT / "benchmarks/whole_scans.py"), "--device", visit.device, "--cases", case]
    seconds = max(1.0, visit.left - 2)
    command += ["--rounds", "1", "--limit", str(seconds), "--output", str(output)]
    subprocess.run(command, check=True, timeout=seconds, stdout=subprocess.DEVNULL)
    found: list[dict[str, Any]] = json.loads(output.with_suffix(".json").read_bytes())["results"]
    return found


# -- The report


def near(ms: float, truth: float) -> bool:
    """Whether a time is that of ``do_bench``."""
    return abs(ms / truth - 1) <= CLOSE


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = head("Speed on an accelerator", data) if data["made"] else []
    if data["instruments"]:
        lines += [
            "Time of an instrumented bf16 run with the error budget / (plain fp32 + plain bf16 forward), medians.",
            "",
        ]
        lines += [tabulate([_instrument_row(its) for its in data["instruments"]], "keys", tablefmt="github"), ""]
    rows = [its for its in data["times"] if "ms" in its]
    low = [its for its in rows if its["speedup"]]
    if rows:
        told = sum(its["told"] != "noisy" for its in low)
        close = sum(near(its["ms"], its["do_bench"]) for its in rows)
        closer = sum(near(its["ms"], its["do_bench"]) or near(its["ms"], its["in a row"]) for its in rows)
        ratios = sum(
            near(its["speedup"][1], its["by do_bench"]) or near(its["speedup"][1], its["by rows"]) for its in low
        )
        lines += [
            f"Speeds told: {told} of {len(low)}. Times within {CLOSE:.0%} of triton's `do_bench`: {close} of {len(rows)}, or of "
            f"`do_bench` of calls in a row: {closer}; speeds: {ratios} of {len(low)}. Launch-bound: {sum(its['launch-bound'] for its in rows)}.",
            "",
            tabulate([_time_row(its) for its in rows], "keys", tablefmt="github", disable_numparse=True),
            "",
        ]
    if data["scans"]:
        keys = ("name", "plain", "start", "first row", "rows", "end", "processor", "told", "steps")
        lines += ["Whole scans, seconds.", ""]
        lines += [tabulate([{key: its[key] for key in keys} for its in data["scans"]], "keys", tablefmt="github"), ""]
    lines += [f"- {failure}" for failure in data["failures"]]
    return "\n".join([*lines, ""])


def _instrument_row(its: dict[str, Any]) -> dict[str, Any]:
    if "ratios" not in its:
        return {
            "model": its["name"],
            "op calls": its["ops"],
            "kernels per op": its["kernels per op"],
            "waits": its["waits"],
        }
    base = its["ms"]["fp32"] + its["ms"]["bfloat16"]
    return {
        "model": its["name"],
        "op calls": its["ops"],
        "fp32 + bf16, ms": f"{its['ms']['fp32']:.1f} + {its['ms']['bfloat16']:.1f}",
        "with budget": f"{its['ratios']['both, budget']:.1f}",
        "goal": GOALS.get(its["name"]),
        "without": f"{its['ratios']['both']:.1f}",
        "µs per op": f"{its['ratios']['both, budget'] * base / its['ops'] * 1e3:.0f}",
    }


def _time_row(its: dict[str, Any]) -> dict[str, str]:
    speedup = its["speedup"]
    host, device = its["host_ms"], its["device_ms"]
    return {
        "model": its["name"],
        "precision": its["precision"],
        "ms": f"{its['ms']:.3f}",
        "do_bench": f"{its['do_bench']:.3f}",
        "in a row": f"{its['in a row']:.3f}",
        "host · device": "–"
        if host is None
        else f"{host:.3f} · {device:.3f}{' launch-bound' if its['launch-bound'] else ''}",
        "speed (low – high, rounds)": f"{speedup[1]:.2f} ({speedup[0]:.2f} – {speedup[2]:.2f}, {speedup[3]})"
        if speedup
        else "–",
        "by do_bench": f"{its['by do_bench']:.2f} · {its['by rows']:.2f}",
        "told": its["told"] or "–",
    }


def main() -> None:
    """Measure part by part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--tiny", action="store_true", help="small models, for a rehearsal")
    parser.add_argument("--parts", default="instruments,times,launches,scans")
    parser.add_argument("--output", type=Path, default=Path("gpu-speed"), help="path of the report without its suffix")
    given = parser.parse_args()
    visit = Visit(given)
    device = torch.device(given.device)
    torch.set_grad_enabled(False)
    MODELS["cpu"]["tiny"] = lambda _: text("Bert", 1, 8, **SMALL)()
    costs = ["tiny"] if given.tiny else list(MODELS["cuda"])
    with torchvision_works():
        measure(visit, given, device, costs)
    print(render(visit.data))


def measure(visit: Visit, given: argparse.Namespace, device: torch.device, costs: list[str]) -> None:
    """The parts, each until its share of the time is over."""
    shares = {"instruments": 0.45, "times": 0.85, "launches": 0.9, "scans": 1.0}
    started, whole = time.monotonic(), given.seconds
    for part in given.parts.split(","):
        until = started + shares[part] * whole
        for name in {"times": TINY if given.tiny else TIMED, "scans": ["mlp", "bert", "resnet50"]}.get(part, costs):
            if time.monotonic() > until or visit.left < 5 or (part == "launches" and name == "llama-6.7b"):
                continue
            with visit.step("instruments" if part == "launches" else part, name) as add:
                if part == "instruments":
                    add(instruments(Bench(name, device), 2 if given.tiny else 3))
                elif part == "launches":
                    bench = Bench(name, device)
                    bench.plain("fp32")
                    add(launches(bench))
                elif part == "times":
                    torch.manual_seed(0)
                    for entry in timed((TINY if given.tiny else TIMED)[name](), device):
                        add(entry)
                else:
                    for entry in scans(visit, name, visit.output.parent):
                        add(entry)


if __name__ == "__main__":
    main()
