"""Measure what the instruments cost: ``python benchmarks/instrument_cost.py [--device cuda] [--output FILE]``.

For each model: time of an instrumented bf16 run / (plain fp32 forward + plain bf16 forward), the medians of interleaved
rounds, for four settings: both errors, both with the error budget, only accumulated errors, none. And the peak of memory
during the instrumented run / that of the fp32 forward, weights included. ``--profile`` adds the most expensive parts of one
instrumented run, by ``cProfile`` and ``torch.profiler``, and how often it waited for the device.

Models on a GPU: ResNet-50 and ViT-B/16 with batch 32, Llama-like models of 1.1 and 6.7 billion random weights with 512
tokens. On a CPU: ResNet-50 and ViT-B/16 with batch 4, a 12-layer encoder of BERT's size.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.engine.core.devices import peak_allocated
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.schema.precisions import PRECISIONS

SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"errors": "both"},
    "both, budget": {"errors": "both", "budget": True},
    "accumulated": {"errors": "accumulated"},
    "none": {"errors": "none"},
}
"""Options of the instrumented part."""

GOALS = {"cpu": {"both": 2.0, "accumulated": 1.3}, "cuda": {}}
GOALS_OF_MODELS = {"resnet50": 3.0, "vit_b_16": 3.0, "llama-1.1b": 6.0, "llama-6.7b": 6.0}
"""For both errors on a GPU."""

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


class BertLike(nn.Module):
    """A 12-layer encoder of BERT-base's size over token ids, on the plain (not fused) path."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embed(ids))


class Logits(nn.Module):
    """A causal language model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def vision(name: str, batch: int) -> Callable[[torch.device], Target]:
    """A model of torchvision with random weights."""

    def build(device: torch.device) -> Target:
        target = load_target(f"torchvision:{name}", (f"{batch}x3x224x224",))
        for module in target.model.modules():  # a head of zeros has no output to explain
            if isinstance(module, nn.Linear) and not module.weight.any():
                nn.init.normal_(module.weight, std=0.02)
        target.model.to(device)
        return target

    return build


def llama(width: int, depth: int, inner: int, key_heads: int) -> Callable[[torch.device], Target]:
    """A Llama-like model of random weights, 512 tokens."""

    def build(device: torch.device) -> Target:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=width,
            num_hidden_layers=depth,
            intermediate_size=inner,
            num_attention_heads=32,
            num_key_value_heads=key_heads,
        )
        with device:
            model = Logits(LlamaForCausalLM(config)).eval()
            return make_target(model, torch.randint(0, config.vocab_size, (1, 512)))

    return build


def bert(device: torch.device) -> Target:
    """The 12-layer encoder, batch 4, 128 tokens."""
    torch.manual_seed(0)
    with device:
        return make_target(BertLike().eval(), torch.randint(0, 1000, (4, 128)))


MODELS: dict[str, dict[str, Callable[[torch.device], Target]]] = {
    "cpu": {"resnet50": vision("resnet50", 4), "vit_b_16": vision("vit_b_16", 4), "bert-like": bert},
    "cuda": {
        "resnet50": vision("resnet50", 32),
        "vit_b_16": vision("vit_b_16", 32),
        "llama-1.1b": llama(2048, 22, 5632, 4),
        "llama-6.7b": llama(4096, 32, 11008, 32),
    },
}


class Bench:
    """One model on one device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.target = MODELS["cpu" if device.type == "cpu" else "cuda"][name](device)
        self.fp32_outputs: list[Tensor] = []
        self.ops = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def plain(self, precision: str) -> float:
        """Seconds of one plain forward."""
        with prepared(self.target.model, PRECISIONS.get(precision), self.device) as ready:
            output, seconds = run_once(ready, self.target.args, self.target.kwargs, 0)
            if precision == "fp32":
                self.fp32_outputs = output_tensors(output)
        return seconds

    def instrumented(self, setting: str, around: Callable[[Callable[[], Any]], Any] | None = None) -> float:
        """Seconds of one instrumented bf16 run; ``around`` may call it in its own way."""
        fp32 = fp32_state(self.target.model)
        options = Options(**SETTINGS[setting], fp32_outputs=self.fp32_outputs)
        with prepared(self.target.model, PRECISIONS.get("bfloat16"), self.device) as ready:

            def work() -> Any:
                found = run_instrumented(ready, self.target.args, self.target.kwargs, fp32, options)
                self.synchronize()
                return found

            self.synchronize()
            started = time.perf_counter()
            found = work() if around is None else around(work)
            seconds = time.perf_counter() - started
        if found is not None:
            assert found.complete, found.exception
            assert not found.faults, found.faults
            assert found.budget is None or found.budget.reason is None, found.budget
            self.ops = len(found.op_calls)
        return seconds

    def measure(self, settings: list[str], rounds: int) -> dict[str, Any]:
        """Ratios of ``rounds`` interleaved rounds."""
        samples: dict[str, list[float]] = {name: [] for name in ("fp32", "bfloat16", *settings)}
        for count in range(rounds + 1):
            seconds = {precision: self.plain(precision) for precision in ("fp32", "bfloat16")}
            seconds |= {setting: self.instrumented(setting) for setting in settings}
            for name, its in seconds.items() if count else ():  # the first round warms up
                samples[name].append(its)
        base = [a + b for a, b in zip(samples["fp32"], samples["bfloat16"], strict=True)]
        ratios = {
            setting: statistics.median(a / b for a, b in zip(samples[setting], base, strict=True))
            for setting in settings
        }
        return {
            "model": self.name,
            "ops": self.ops,
            "ms": {name: statistics.median(its) * 1e3 for name, its in samples.items()},
            "ratios": ratios,
            "us_per_op": {
                name: (statistics.median(samples[name]) - statistics.median(base)) / self.ops * 1e6 for name in settings
            },
        }

    def memory(self, settings: list[str]) -> dict[str, float]:
        """Peak of memory of the instrumented run / that of the fp32 forward; both with the weights that are held anyway."""
        fp32 = self._peak(lambda: self.plain("fp32"))
        return {name: self._peak(lambda name=name: self.instrumented(name)) / fp32 for name in settings}

    def _peak(self, work: Callable[[], Any]) -> int:
        gc.collect()
        if self.device.type == "cpu":
            weights = sum(tensor.nbytes for tensor in self.target.model.state_dict().values())
            return weights + peak_allocated(work)
        module = torch.get_device_module(self.device)
        module.empty_cache()
        module.reset_peak_memory_stats()
        work()
        return module.max_memory_allocated()

    def profile(self, setting: str) -> None:
        """Print the most expensive functions and ops of one run."""
        profiler = cProfile.Profile()
        self.instrumented(setting, profiler.runcall)
        print(f"\n== {self.name}, {setting}: functions of Python by own time")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as found:
            self.instrumented(setting)
        averages = found.key_averages()
        for key in ("self_cpu_time_total", "self_device_time_total")[: len(activities)]:
            print(f"== {self.name}, {setting}: {key}")
            print(averages.table(sort_by=key, row_limit=20, max_name_column_width=70))
        waits = {event.key: event.count for event in averages if event.key in _WAITS or "Memcpy DtoH" in event.key}
        launches = sum(event.count for event in averages if "LaunchKernel" in event.key)
        print(f"== waits: {waits}; kernel launches: {launches}, {launches / max(1, self.ops):.1f} per op call")


def goal(device: str, model: str, setting: str) -> float | None:
    """The largest ratio that is wanted."""
    if device == "cpu":
        return GOALS["cpu"].get(setting)
    return GOALS_OF_MODELS.get(model) if setting == "both" else None


def render(data: dict[str, Any]) -> str:
    """The report."""
    found, device = data["models"], data["device"]
    settings = list(found[0]["ratios"])
    body = []
    for its in found:
        cells = []
        for setting in settings:
            wanted = goal(device, its["model"], setting)
            cells.append(f"{its['ratios'][setting]:.2f}" + (f" (goal {wanted:.1f})" if wanted else ""))
        per_op = its["us_per_op"].get("both")
        body.append(
            [
                its["model"],
                its["ops"],
                f"{its['ms']['fp32']:.0f} + {its['ms']['bfloat16']:.0f}",
                *cells,
                "" if per_op is None else f"{per_op:.0f}",
                *(f"{ratio:.2f}" for ratio in its["memory"].values()),
            ]
        )
    columns = ["model", "op calls", "fp32 + bf16, ms", *settings, "µs per op more, both"]
    columns += [f"memory, {setting}" for setting in found[0]["memory"]]
    table = tabulate(body, columns, tablefmt="github")
    about = """Time of an instrumented bf16 run / (plain fp32 + plain bf16 forward), medians of the ratios of interleaved rounds; peak of
memory / that of the fp32 forward, weights included."""
    return "\n".join([*head("What the instruments cost", data), about, "", table, ""])


def main() -> None:
    """Measure the chosen models, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append", help="only this one; may be repeated")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--profile", action="store_true", help="profile one run of the first setting")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    device = torch.device(options.device)
    kind = "cpu" if device.type == "cpu" else "cuda"
    settings = options.setting or list(SETTINGS)
    found = []
    for name in options.model or MODELS[kind]:
        bench = Bench(name, device)
        its = bench.measure(settings, options.rounds)
        its["memory"] = {} if options.no_memory else bench.memory(settings)
        found.append(its)
        shown = "  ".join(f"{key}: {ratio:.2f}" for key, ratio in its["ratios"].items())
        print(f"{name:<12} {shown}  memory: { {k: round(v, 2) for k, v in its['memory'].items()} }", flush=True)
        if options.profile:
            bench.profile(settings[0])
        del bench
        gc.collect()
    save(options.output, {"made": made(options.device), "device": kind, "models": found}, render)


if __name__ == "__main__":
    main()
