"""Measure the memory of a scan of large models: ``python benchmarks/large_models.py llama few``. Linux only.

Reports the peak memory of a whole scan (PSS, where shared pages are divided among the processes, summed over the process tree;
on an accelerator the memory that it reports as used) over that of a process that calls the model three times in fp32, with the
run and the part in which each peak was, next to what the scan expected.

Models: ``layers`` (linear layers of 64 MiB), ``few`` (linear layers of 256 MiB), ``pointwise`` (activations of 512 MiB, hardly
any weights), ``resnet50`` (batch 16), ``bert`` (12 layers,
batch 16, 256 tokens), ``llama`` (random weights from a config of transformers, 0.8 billion parameters),
``llama-7b`` (6.7 billion).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from report_files import head, made, save
from torch import Tensor, nn

import lowprec_check
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works

SAMPLE_SECONDS = 0.02
LLAMA = {
    "llama": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 13, "num_attention_heads": 16},
    "llama-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def linear_layers(width: int, gibibytes: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Square linear layers."""
    count = round(gibibytes * 2**30 / (4 * width * width))
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    return layers.eval(), torch.randn(8, width)


def pointwise() -> tuple[nn.Module, Tensor]:
    """Layers of 16 features, applied to 8 million points."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(16, 1)).eval(), torch.randn(8 << 20, 16)


def resnet50() -> tuple[nn.Module, Tensor]:
    """ResNet-50 with a batch of 16."""
    return load_target("torchvision:resnet50", ()).model, torch.randn(16, 3, 224, 224)


def bert() -> tuple[nn.Module, Tensor]:
    """An encoder of BERT-base's size, on the plain (not fused) path."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval(), torch.randn(16, 256, 768)


def llama(name: str, tokens: int) -> tuple[nn.Module, Tensor]:
    """A Llama-like model with random weights."""
    with torchvision_works():
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA[name], vocab_size=32000, use_cache=False)
    return LlamaForCausalLM(config).eval(), torch.randint(32000, (1, tokens))


def model_of(name: str, tokens: int) -> tuple[nn.Module, Tensor]:
    """The model and its input."""
    torch.manual_seed(0)
    if name in LLAMA:
        return llama(name, tokens)
    makers = {
        "layers": lambda: linear_layers(4096),
        "few": lambda: linear_layers(8192),
        "pointwise": pointwise,
        "resnet50": resnet50,
        "bert": bert,
    }
    return makers[name]()


class Sampler:
    """Samples the memory of this process and all below it, and keeps the peak of each step."""

    def __init__(self, device: str) -> None:
        self.step = "load"
        self.peaks: dict[str, int] = defaultdict(int)
        self._device, self._ended, self._this = torch.device(device), threading.Event(), psutil.Process()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peaks[self.step] = max(self.peaks[self.step], self._used())

    def _used(self) -> int:
        if self._device.type != "cpu":
            free, total = torch.get_device_module(self._device).mem_get_info()
            return int(total - free)
        total = 0
        for process in (self._this, *self._this.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                total += process.memory_full_info().pss
        return total

    @property
    def peak(self) -> int:
        """The largest of all."""
        return max(self.peaks.values())


def plain(options: argparse.Namespace) -> tuple[int, float]:
    """The peak of three calls in fp32, and the seconds of the last."""
    model, inputs = model_of(options.model, options.tokens)
    model, inputs = model.to(options.device), inputs.to(options.device)
    gc.collect()
    with Sampler(options.device) as sampler, torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            model(inputs)
            seconds = time.perf_counter() - started
        time.sleep(2 * SAMPLE_SECONDS)
    return sampler.peak, seconds


def scanned(options: argparse.Namespace) -> tuple[dict[str, int], float, list[Any]]:
    """The peaks of a scan, its seconds and, for each run, its status and notes."""
    model, inputs = model_of(options.model, options.tokens)
    gc.collect()
    with Sampler(options.device) as sampler:

        def on_progress(name: str, step: str) -> None:
            sampler.step = f"{name}, {'op by op' if step.startswith('op ') else step}"

        started = time.perf_counter()
        result = lowprec_check.scan(
            model,
            inputs,
            precisions=options.precision,
            device=options.device,
            errors=options.errors,
            budget_error=options.budget_error,
            budget=options.budget,
            plan=False,
            isolation=options.isolation,
            on_progress=on_progress,
        )
        seconds = time.perf_counter() - started
    rows = [
        (
            run.key.label,
            run.status,
            run.peak_memory_bytes,
            run.complete,
            [*run.notes, *([run.budget.reason] if run.budget and run.budget.reason else [])],
        )
        for run in result.runs
    ]
    return dict(sampler.peaks), seconds, rows


def in_fresh_process(work: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> Any:
    """What ``work`` returns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, options).result()


def main() -> None:
    """Measure the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=["layers", "few", "pointwise", "resnet50", "bert", *LLAMA])
    parser.add_argument("-p", "--precision", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--errors", default="both")
    parser.add_argument("--budget-error", default="auto")
    parser.add_argument("--budget", type=float, default=None)
    parser.add_argument("--isolation", default=None)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    found = []
    for name in options.models:
        options.model = name
        bare, call_seconds = in_fresh_process(plain, options)
        peaks, seconds, runs = in_fresh_process(scanned, options)
        figures = {"fp32_bytes": bare, "call_s": call_seconds, "scan_s": seconds, "peaks": peaks, "runs": runs}
        found.append({"model": name, **figures})
        save(options.output, {"made": made(options.device), "models": found}, render)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        *head("Memory of scans of large models", data),
        "Peak memory of a whole scan (all processes; pages that they share count once) over that of a process that calls the model three times in",
        "fp32. Both include Python and torch.",
        "",
        "| model | plain fp32 | scan | times as much | seconds | runs |",
        "|---|---|---|---|---|---|",
    ]
    for found in data["models"]:
        peak, bare = max(found["peaks"].values()), found["fp32_bytes"]
        runs = ", ".join(
            f"{label} {status}{'' if complete else ' (incomplete)'}" for label, status, _, complete, _ in found["runs"]
        )
        sizes = f"{bare / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB | {peak / bare:.2f} ×"
        lines.append(f"| {found['model']} | {sizes} | {found['scan_s']:.0f} | {runs} |")
    for found in data["models"]:
        lines += ["", f"## {found['model']}, by part", ""]
        lines += [f"- {part}: {size / found['fp32_bytes']:.2f} ×" for part, size in found["peaks"].items()]
        lines += [f"- {label}: {note}" for label, _, _, _, notes in found["runs"] for note in notes]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
