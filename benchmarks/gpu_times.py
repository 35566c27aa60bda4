"""Are the times of a scan on a GPU right, the device's own too? 20 models, most of them limited by their host.

    python benchmarks/gpu_times.py --output gpu-times     # 8 minutes at most on an H200, torch 2.11
    python benchmarks/gpu_times.py --only LSTM

For each model, fp32 and bfloat16 are timed in the rounds of a scan. Then each is called by triton's ``do_bench``, alone
and in a row, and replayed as a captured CUDA graph, which needs nothing of the host.

- ``call``: bfloat16's time over fp32's as a scan tells it, beside the nearer of both ways of ``do_bench``.
- ``GPU``: the same of the device alone, beside the replayed graphs.

Models that the machine lacks packages for, that cannot be captured, or that time did not suffice for, are named.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from shared import described, head, made, parser_of, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.analysis.speed import in_rounds, told_on_device, waits_for_host
from lowprec_check.core.mode import Mode
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.features.times.rounds import RoundSchedule, TurnFailed, TurnTimed
from lowprec_check.features.times.turns import TimeTask
from lowprec_check.torchkit.devices import synchronize

PRECISIONS = ("fp32", "bfloat16")
CLOSE = 0.05
"""How far a time may be from that of ``do_bench``, relative to it."""


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
Make = Callable[[], Target]


class TrainingStep(nn.Module):
    """A step of SGD as a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = self.model(x).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()


class Recurrent(nn.Module):
    """An LSTM or a GRU, which returns its states at each step."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int) -> None:
        super().__init__()
        self.layers = kind(64, 128, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


def of(model: nn.Module, *sizes: int) -> Target:
    """A model on random inputs."""
    return make_target(model.eval(), torch.randn(*sizes))


def encoder(layers: int, width: int, batch: int, tokens: int) -> Target:
    """Layers of torch's transformer, without its fast path, as they are trained."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return make_target(
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(batch, tokens, width)
    )


def gpt2(tokens: int) -> Target:
    """GPT-2 of 6 layers with random weights."""
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)).eval()
    return make_target(Logits(model), torch.randint(0, 50257, (1, tokens)))


def convolutions() -> nn.Module:
    """Twelve small convolutions with norms."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(12)]
    return nn.Sequential(*blocks)


def training_step() -> Target:
    """A step of ResNet-18 on four images."""
    target = image("resnet18", 4)
    return make_target(TrainingStep(target.model.train()), *target.inputs[0])


MODELS: dict[str, Make] = {
    "MLP 64, batch 8": lambda: mlp(64, 8),
    "MLP 512, batch 64": lambda: mlp(512, 64),
    "12 convolutions 32": lambda: of(convolutions(), 1, 32, 32, 32),
    "LSTM 2 x 128": lambda: of(Recurrent(nn.LSTM, 2), 4, 32, 64),
    "GRU 2 x 128": lambda: of(Recurrent(nn.GRU, 2), 4, 32, 64),
    "encoder 4 x 256": lambda: encoder(4, 256, 2, 32),
    "encoder 12 x 512": lambda: encoder(12, 512, 1, 64),
    "BERT-tiny, 1 x 64": lambda: text("Bert", 1, 64, **SMALL),
    "BERT-base, 1 x 32": lambda: text("Bert", 1, 32),
    "GPT-2 6 layers, 1 x 32": lambda: gpt2(32),
    "ResNet-18, batch 1": lambda: image("resnet18", 1),
    "ResNet-18, training step": training_step,
    "MobileNet-V3, batch 1": lambda: image("mobilenet_v3_small", 1),
    "ShuffleNet-V2, batch 1": lambda: image("shufflenet_v2_x1_0", 1),
    "EfficientNet-B0, batch 1": lambda: image("efficientnet_b0", 1),
    "DenseNet-121, batch 1": lambda: image("densenet121", 1),
    "ResNet-50, batch 32": lambda: image("resnet50", 32),
    "ViT-B/16, batch 16": lambda: image("vit_b_16", 16),
    "MLP 4096, batch 1024": lambda: mlp(4096, 1024),
    "Llama 1.1 B, 1 x 512": lambda: text("Llama", 1, 512, **LLAMA),
}


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


def _in_context(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with ready.context():
        ready.call(*args, **kwargs)


def graph_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a replay of the captured call: the median of 30, each of enough replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / count

    replay(10)
    # The host launches the next replay while the device is at one.
    count = max(2, min(100, int(5.0 / max(replay(5), 0.01))))
    return statistics.median(replay(count) for _ in range(30))


def measured(make: Make, device: torch.device) -> dict[str, Any]:
    """One row: what a scan tells of a model, and what is true."""
    torch.manual_seed(0)
    target = make()
    target.model.to(device)
    trains = isinstance(target.model, TrainingStep)
    tasks = tuple(
        ModelTask(precision=name, device=device.type, files=None, mode=Mode(), changes_parameters=trains)  # type: ignore[arg-type]
        for name in PRECISIONS
    )
    messages: list[Any] = []
    tasks[0].as_task(TimeTask, runs=tasks).do(target, messages.append, lambda: None)
    schedule = RoundSchedule(len(tasks))
    for message in messages:
        schedule.note(message.read(TurnTimed | TurnFailed))
    if schedule.failures:
        raise RuntimeError(f"not timed: {schedule.failures}")
    fp32, low = schedule.latency(0), schedule.latency(1)
    assert fp32 is not None
    assert low is not None
    assert low.speedup is not None
    alone, rows, graphs, why = [], [], [], ""
    for task in tasks:
        with task.mode.ready(task, target) as ready:
            args, kwargs = ready.inputs(*target.inputs)
            call = functools.partial(_in_context, ready, args, kwargs)
            call()
            synchronize(device)
            of_call, in_a_row = do_bench(call, device)
            alone.append(of_call)
            rows.append(in_a_row)
            if device.type == "cuda":
                try:
                    graphs.append(graph_ms(call))
                except Exception as error:
                    why = described(error)
                    torch.cuda.synchronize()
    truths = [alone[1] / alone[0], rows[1] / rows[0]]
    call_ratio = 1 / low.speedup.median
    row: dict[str, Any] = {
        "host limits": ", ".join(
            name for name, latency in zip(PRECISIONS, (fp32, low), strict=True) if waits_for_host(latency)
        ),
        "ms": f"{fp32.median_ms:.3f}, {low.median_ms:.3f}",
        "do_bench ms": f"{alone[0]:.3f}, {alone[1]:.3f}",
        "told": in_rounds(low.speedup).told,
        "call": call_ratio,
        "by do_bench": min(truths, key=lambda truth: abs(call_ratio / truth - 1)),
        "GPU": low.device_speedup and 1 / low.device_speedup.median,
        "GPU told": told_on_device(low) is not None,
        "by graphs": graphs[1] / graphs[0] if len(graphs) == len(PRECISIONS) else None,
        "GPU ms": f"{fp32.device_ms or 0:.3f}, {low.device_ms or 0:.3f}",
        "graph ms": ", ".join(f"{milliseconds:.3f}" for milliseconds in graphs) or why,
        "rounds": low.speedup.rounds,
    }
    row["call error"] = error_of(row["call"], row["by do_bench"])
    row["GPU error"] = error_of(row["GPU"], row["by graphs"])
    return row


def error_of(figure: float | None, truth: float | None) -> str:
    """How far a figure is from the truth, in percent."""
    if not figure or not truth:
        return "–"
    return f"{figure / truth - 1:+.1%}"


def near(figure: float, *truths: float) -> bool:
    """Whether a figure is close to one of the others."""
    return any(abs(figure / truth - 1) <= CLOSE for truth in truths)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines, rows = head("Times of scans on a GPU, and of its device alone", data), data["rows"]
    bound = [row for row in rows if "bfloat16" in row["host limits"]]
    with_graph = [row for row in rows if row["GPU"] and row["by graphs"]]
    calls = sum(near(row["call"], row["by do_bench"]) for row in rows)
    devices = sum(near(row["GPU"], row["by graphs"]) for row in with_graph)
    untold = [row["model"] for row in rows if row["told"] == "noisy" and not row["GPU told"]]
    lines += [
        f"{len(rows)} models, {len(bound)} of them limited by the host in bfloat16. Ratios within 5 %:",
        f"of calls {calls} of {len(rows)}, of the GPU alone {devices} of {len(with_graph)}.",
        f"Neither told: {', '.join(untold) or 'none'}.",
        "",
        tabulate(rows, "keys", tablefmt="github", floatfmt=".3f"),
        "",
    ]
    return "\n".join([*lines, *(f"- {left_out}" for left_out in data["left out"]), ""])


def main() -> None:
    """Measure model by model, and save after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=440.0, help="no model begins later")
    parser.add_argument("--only", default="", help="models whose name contains this")
    arguments = parser.parse_args()
    data: dict[str, Any] = {"made": made(arguments.device), "rows": [], "left out": []}
    torch.set_grad_enabled(False)
    started = time.monotonic()
    with torchvision_works():
        for name, make in MODELS.items():
            if arguments.only not in name:
                continue
            if time.monotonic() - started > arguments.seconds:
                data["left out"].append(f"{name}: no time left")
                continue
            try:
                row = measured(make, torch.device(arguments.device))
                data["rows"].append({"model": name, **row})
            except Exception as error:
                data["left out"].append(f"{name}: {described(error)}")
            print(name, data["rows"][-1:], data["left out"][-1:], file=sys.stderr, flush=True)
            gc.collect()
            if arguments.output is not None:
                save(arguments.output, data, render)
    save(arguments.output, data, render)


if __name__ == "__main__":
    main()
