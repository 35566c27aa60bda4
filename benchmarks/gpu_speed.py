"""What the analysis op by op costs, and whether the times of a scan are right: ``--parts cost,times``.

    python benchmarks/gpu_speed.py --device cuda --output gpu-speed
    python benchmarks/gpu_speed.py --device cpu --tiny        # a rehearsal with small models
    python benchmarks/gpu_speed.py --parts cost --only resnet50

- ``cost``: time of an instrumented bf16 run / (plain fp32 forward + plain bf16 forward), medians of interleaved rounds,
  for each of ``SETTINGS``.
- ``times``: the times of a scan (rounds over fp32 and three ways in 16 bits) beside triton's ``do_bench`` of the same
  calls: with a cold cache before each, and of several in a row, as a call of a tiny model is mostly the host's.

Each part is saved as it ends, and what would start after ``--seconds`` is left out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shared import described, head, made, parser_of, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.analysis.speed import judged
from lowprec_check.core.mode import Mode
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.core.trace.observers import MakeObserver
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.features.error_budget.observer import BudgetObserver
from lowprec_check.features.magnitudes.run import MagnitudeObserver
from lowprec_check.features.times.rounds import RoundSchedule, TurnFailed, TurnTimed
from lowprec_check.features.times.turns import TimeTask
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.devices import MemoryLimit, free_memory, synchronize

SETTINGS: dict[str, Errors] = {"both": "both", "both, budget": "both", "accumulated": "accumulated"}
"""The errors that an instrumented run computes."""
TIMED_PRECISIONS = ("fp32", "bfloat16", "half", "autocast-bf16")
CLOSE = 0.05
"""How far a time may be from that of ``do_bench``, relative to it."""


# -- models


class Logits(nn.Module):
    """A causal language model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def image(name: str, batch: int) -> Target:
    """A model of torchvision with random weights, on images of 224²."""
    target = load_target(f"torchvision:{name}", (f"{batch}x3x224x224",))
    for module in target.model.modules():  # a head of zeros has no output to explain
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    return target


def mlp(width: int, batch: int) -> Target:
    """Four layers with norms."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(4)]
    return make_target(nn.Sequential(*layers).eval(), torch.randn(batch, width))


def text(kind: str, batch: int, tokens: int, **config: Any) -> Target:
    """A model of transformers with random weights."""
    import transformers

    values = getattr(transformers, f"{kind}Config")(**config)
    name = {"Bert": "BertModel", "Llama": "LlamaForCausalLM"}[kind]
    model = getattr(transformers, name)(values).eval()
    ids = torch.randint(0, values.vocab_size, (batch, tokens))
    return make_target(model if kind == "Bert" else Logits(model), ids)


SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
LLAMA: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4}
LARGE_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "num_attention_heads": 32}
Make = Callable[[], Target]
COST: dict[str, dict[str, Make]] = {
    "cuda": {
        "resnet50": lambda: image("resnet50", 32),
        "vit_b_16": lambda: image("vit_b_16", 32),
        "llama-1.1b": lambda: text("Llama", 1, 512, **LLAMA),
        "llama-6.7b": lambda: text("Llama", 1, 512, **LARGE_LLAMA),
    },
    "cpu": {
        "resnet50": lambda: image("resnet50", 4),
        "vit_b_16": lambda: image("vit_b_16", 4),
        "bert": lambda: text("Bert", 4, 128),
    },
    "tiny": {"bert-tiny": lambda: text("Bert", 1, 8, **SMALL)},
}
TIMED: dict[str, Make] = {
    "MLP 256, batch 32": lambda: mlp(256, 32),
    "ResNet-50, batch 32": lambda: image("resnet50", 32),
    "BERT-base, 1 x 128": lambda: text("Bert", 1, 128),
    "ViT-B/16, batch 32": lambda: image("vit_b_16", 32),
    "BERT-tiny, 1 x 64": lambda: text("Bert", 1, 64, **SMALL),
    "Llama 1.1 B, 1 x 512": lambda: text("Llama", 1, 512, **LLAMA),
}
TINY: dict[str, Make] = {"MLP 16, batch 4": lambda: mlp(16, 4), "BERT-tiny, 1 x 8": COST["tiny"]["bert-tiny"]}


# -- what the instruments cost


class Bench:
    """One model on one device."""

    def __init__(self, make: Make, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.target = make()
        self.target.model.to(device)
        self.fp32_outputs: list[Tensor] = []
        self.ops = 0

    def plain(self, precision: str) -> float:
        """Seconds of one plain forward."""
        with prepared(self.target.model, PRECISIONS.get(precision), self.device) as ready:
            output, seconds = run_once(ready, *ready.inputs(*self.target.inputs), 0)
            if precision == "fp32":
                self.fp32_outputs = output_tensors(output)
        return seconds

    def instrumented(self, setting: str) -> float:
        """Seconds of one instrumented bf16 run."""
        fp32 = fp32_state(self.target.model)
        observers: list[MakeObserver] = [MagnitudeObserver]
        if "budget" in setting:
            limit = MemoryLimit.half_of(free_memory(self.device))
            observers.append(
                functools.partial(BudgetObserver, limit=limit, fp32=self.fp32_outputs, autocast=False, seed=0)
            )
        options = Options(errors=SETTINGS[setting], observers=observers)
        with prepared(self.target.model, PRECISIONS.get("bfloat16"), self.device) as ready:
            args, kwargs = ready.inputs(*self.target.inputs)
            synchronize(self.device)
            started = time.perf_counter()
            begun = RunSoFar(run=Run(precision="bfloat16", device=str(self.device), status="ok"))
            traced = run_instrumented(begun, ready, args, kwargs, fp32, options)
            synchronize(self.device)
            seconds = time.perf_counter() - started
        assert traced.run.complete, traced.run.stopped_by
        assert not traced.faults, traced.faults
        self.ops = len(traced.run.op_calls)
        return seconds

    def measure(self, rounds: int) -> dict[str, Any]:
        """Ratios of ``rounds`` interleaved rounds, after one that warms up."""
        samples: dict[str, list[float]] = {name: [] for name in ("fp32", "bfloat16", *SETTINGS)}
        for number in range(rounds + 1):
            seconds = {precision: self.plain(precision) for precision in ("fp32", "bfloat16")}
            seconds |= {setting: self.instrumented(setting) for setting in SETTINGS}
            if number:
                for name, duration in seconds.items():
                    samples[name].append(duration)
        base = [a + b for a, b in zip(samples["fp32"], samples["bfloat16"], strict=True)]
        ratios = {
            setting: statistics.median(a / b for a, b in zip(samples[setting], base, strict=True))
            for setting in SETTINGS
        }
        ms = {name: statistics.median(durations) * 1e3 for name, durations in samples.items()}
        return {"ops": self.ops, "ms": ms, "ratios": ratios}


# -- times


def do_bench(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a call by triton, alone and in a row of several; on a CPU, the mean of ten."""

    def in_a_row(count: int) -> None:
        for _ in range(count):
            call()

    if device.type == "cpu":
        started = time.perf_counter()
        in_a_row(10)
        milliseconds = (time.perf_counter() - started) * 100
        return milliseconds, milliseconds
    from triton.testing import do_bench as measured

    alone = float(measured(call, warmup=50, rep=150, return_mode="median"))
    count = max(1, min(200, int(5.0 / max(alone, 0.01))))
    row = float(measured(functools.partial(in_a_row, count), warmup=50, rep=150, return_mode="median")) / count
    return alone, row


def timed(target: Target, device: torch.device) -> Iterator[dict[str, Any]]:
    """The times of each precision, as a scan takes them and by triton."""
    target.model.to(device)
    tasks = tuple(
        ModelTask(precision=name, device=device.type, files=None, mode=Mode())  # type: ignore[arg-type]
        for name in TIMED_PRECISIONS
    )
    messages: list[Any] = []
    tasks[0].as_task(TimeTask, runs=tasks).do(target, messages.append, lambda: None)
    schedule = RoundSchedule(len(tasks))
    for message in messages:
        schedule.note(message.read(TurnTimed | TurnFailed))
    truth = []
    for task in tasks:
        with task.mode.ready(task, target) as ready:
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
        speedup = latency.speedup
        yield {
            "precision": task.precision,
            "ms": latency.median_ms,
            "do_bench": alone,
            "in a row": in_a_row,
            "speedup": speedup and speedup.median,
            "told": speedup and judged(speedup.median, speedup.low, speedup.high).told,
            "by do_bench": truth[0][0] / alone,
            "by rows": truth[0][1] / in_a_row,
        }


def _in_context(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with ready.context():
        ready.call(*args, **kwargs)


# -- the report


def near(figure: float, *truths: float) -> bool:
    """Whether a figure is close to one of the others."""
    return any(abs(figure / truth - 1) <= CLOSE for truth in truths)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = head("Speed: what the analysis costs, and whether times are right", data)
    if data["cost"]:
        lines += ["Time of an instrumented bf16 run, as multiples of plain fp32 + plain bf16.", ""]
        rows = [cost_row(cost) for cost in data["cost"]]
        lines += [tabulate(rows, "keys", tablefmt="github", disable_numparse=True), ""]
    rows = [row for row in data["times"] if "ms" in row]
    low = [row for row in rows if row["speedup"]]
    if rows:
        told = sum(row["told"] != "noisy" for row in low)
        close = sum(near(row["ms"], row["do_bench"]) for row in rows)
        closer = sum(near(row["ms"], row["do_bench"], row["in a row"]) for row in rows)
        ratios = sum(near(row["speedup"], row["by do_bench"], row["by rows"]) for row in low)
        lines += [
            f"Speeds told: {told} of {len(low)}. Times within {CLOSE:.0%} of `do_bench`: {close} of {len(rows)}, or of",
            f"calls in a row: {closer}; speeds: {ratios} of {len(low)}.",
            "",
            tabulate(rows, "keys", tablefmt="github", floatfmt=".3f"),
            "",
        ]
    return "\n".join([*lines, *(f"- {failure}" for failure in data["failures"]), ""])


def cost_row(cost: dict[str, Any]) -> dict[str, str]:
    """One model in the table of costs."""
    row = {
        "model": cost["name"],
        "op calls": str(cost["ops"]),
        "fp32 + bf16, ms": f"{cost['ms']['fp32']:.1f} + {cost['ms']['bfloat16']:.1f}",
    }
    row |= {name: f"{ratio:.2f}" for name, ratio in cost["ratios"].items()}
    return row


def main() -> None:
    """Measure part by part, and save after each model."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="cost,times")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="small models, for a rehearsal")
    arguments = parser.parse_args()
    data: dict[str, Any] = {"made": made(arguments.device), "cost": [], "times": [], "failures": []}
    torch.set_grad_enabled(False)
    started = time.monotonic()
    with torchvision_works():
        for part in arguments.parts.split(","):
            for name, make in models_of(part, arguments).items():
                left = arguments.seconds - (time.monotonic() - started)
                if arguments.only not in name or left < 1:
                    continue
                try:
                    data[part] += [{"name": name, **row} for row in measured(part, make, arguments)]
                except Exception as error:
                    data["failures"].append(f"{part}, {name}: {described(error)}")
                print(part, name, data[part][-1:], data["failures"][-1:], file=sys.stderr, flush=True)
                gc.collect()
                if arguments.output is not None:
                    save(arguments.output, data, render)
    save(arguments.output, data, render)


def models_of(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The models of a part."""
    if part == "times":
        return TINY if arguments.tiny else TIMED
    if arguments.tiny:
        return COST["tiny"]
    return COST["cpu" if arguments.device == "cpu" else "cuda"]


def measured(part: str, make: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One model of a part."""
    device = torch.device(arguments.device)
    if part == "times":
        torch.manual_seed(0)
        return list(timed(make(), device))
    return [Bench(make, device).measure(arguments.rounds)]


if __name__ == "__main__":
    main()
