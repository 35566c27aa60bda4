"""Measure the overhead of the instruments, as medians of ratios: ``python benchmarks/scan_overhead.py``.

- time of an instrumented bf16 run / (plain fp32 + plain bf16 forward): ResNet-50, ViT-B/16 (batch 4, 224²), a 12-layer
  encoder;
- peak memory of the instrumented run / that of the fp32 forward (resident set, each in its own process);
- overhead per op on a model of tiny ops, for growing numbers of ops;
- time of ``lowprec-check --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import run_once
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.schema.precisions import PRECISIONS

CPU = torch.device("cpu")


class BertLike(nn.Module):
    """A 12-layer encoder of BERT-base's size over token ids, on the plain (not fused) path."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embed(ids))


class TinyOps(nn.Module):
    """``count`` additions on 16 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x + self.weight
        return x


def resnet() -> Target:
    """ResNet-50, batch 4."""
    return load_target("torchvision:resnet50", ("4x3x224x224",))


def vit() -> Target:
    """ViT-B/16, batch 4."""
    return load_target("torchvision:vit_b_16", ("4x3x224x224",))


def bert() -> Target:
    """The 12-layer encoder, batch 4, 128 tokens."""
    torch.manual_seed(0)
    return make_target(BertLike().eval(), torch.randint(0, 1000, (4, 128)))


TARGETS: dict[str, Callable[[], Target]] = {"resnet50": resnet, "vit_b_16": vit, "bert-like, 12 layers": bert}


def plain(target: Target, precision: str) -> float:
    """Seconds of one plain forward."""
    with prepared(target.model, PRECISIONS.get(precision), CPU) as ready:
        return run_once(ready, target.args, target.kwargs, 0)[1]


def instrumented(target: Target, precision: str, errors: Any) -> float:
    """Seconds of one instrumented run."""
    fp32 = fp32_state(target.model)
    with prepared(target.model, PRECISIONS.get(precision), CPU) as ready:
        started = time.perf_counter()
        found = run_instrumented(ready, target.args, target.kwargs, fp32, Options(errors=errors))
        seconds = time.perf_counter() - started
    assert found.complete
    assert not found.faults
    return seconds


def overhead(name: str, repeats: int) -> None:
    """Print the two ratios for one model."""
    target = TARGETS[name]()
    both, accumulated = [], []
    plain(target, "fp32"), plain(target, "bfloat16"), instrumented(target, "bfloat16", "both")
    for _ in range(repeats):
        base = plain(target, "fp32") + plain(target, "bfloat16")
        both.append(instrumented(target, "bfloat16", "both") / base)
        accumulated.append(instrumented(target, "bfloat16", "accumulated") / base)
    print(f"{name:<24}{statistics.median(both):8.2f} ×  (goal 2.0){statistics.median(accumulated):8.2f} ×  (goal 1.3)")


def resident_growth(name: str, work: Callable[[Target], Any], sender: Any) -> None:
    """Send the growth of the resident set in bytes: its peak during ``work`` minus its size before the model was loaded."""

    def read(key: str) -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

    before = read("VmRSS")
    target = TARGETS[name]()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    work(target)
    sender.send(read("VmHWM") - before)


def memory(name: str) -> None:
    """Print the ratio of the peak memories for one model."""
    peaks = []
    for work in (
        lambda target: plain(target, "fp32"),
        lambda target: instrumented(target, "bfloat16", "both"),
    ):
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=resident_growth, args=(name, work, sender))
        process.start()
        peaks.append(receiver.recv())
        process.join()
    print(f"{name:<24}{peaks[1] / peaks[0]:8.2f} ×  (goal 2.5)   {peaks[0] >> 20} MiB in fp32")


def tiny_ops(repeats: int) -> None:
    """Print the microseconds per op added to the plain run, for growing numbers of ops."""
    for count in (5_000, 20_000, 40_000):
        target = make_target(TinyOps(count).eval(), torch.ones(16))
        extra = []
        for _ in range(repeats):
            bare = plain(target, "bfloat16")
            extra.append((instrumented(target, "bfloat16", "both") - bare) / count * 1e6)
        print(f"{count:>6} tiny ops{'':10}{statistics.median(extra):8.1f} µs per op  (goal 100)")


def help_time(repeats: int) -> None:
    """Print the time of ``--help`` and whether it imported torch."""
    command = [sys.executable, "-m", "lowprec_check", "--help"]
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80"})
        samples.append(time.perf_counter() - started)
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", *command[1:]], capture_output=True, text=True, check=True
    )
    imported = any(line.rpartition("|")[2].strip() == "torch" for line in shown.stderr.splitlines())
    print(f"{'--help':<24}{statistics.median(samples):8.2f} s  (goal 0.3)   torch imported: {imported}")


def main() -> None:
    """Run all measurements, or those chosen with ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["overhead", "memory", "tiny", "help"], action="append")
    options = parser.parse_args()
    chosen = options.only or ["help", "memory", "tiny", "overhead"]
    if "help" in chosen:
        help_time(options.repeats)
    if "memory" in chosen:
        print("\npeak memory of an instrumented bf16 run / fp32 forward")
        for name in TARGETS:
            memory(name)
    if "tiny" in chosen:
        print("\noverhead per op, with all errors recorded")
        tiny_ops(options.repeats)
    if "overhead" in chosen:
        print("\ntime of an instrumented bf16 run / (plain fp32 + plain bf16): both errors, accumulated only")
        for name in TARGETS:
            overhead(name, options.repeats)


if __name__ == "__main__":
    main()
