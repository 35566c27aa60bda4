"""Measure what a scan costs on large models: ``python benchmarks/scale.py``. Linux only.

Times are processor time, which other programs on the machine change less; memory needs no quiet machine.

- milliseconds per op call, over the instrumented parts of the five default runs, on a model of 20,000 tiny ops (one
  thread, median of several rounds);
- bytes of the parent's memory per op call, once a scan of the same model has returned (USS: memory of this process alone);
- peak memory of a scan of linear layers with 1 GiB of parameters, over that of a bare fp32 forward (PSS, where shared pages
  are divided among the processes, summed over the process tree);
- seconds of ``apply`` on 20,000 modules, half of them kept in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import lowprec_check
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.plan.apply import describe_modules
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.precisions import PRECISIONS

CPU = torch.device("cpu")
RUNS = ("fp32", "half", "bfloat16", "autocast-fp16", "autocast-bf16")
SAMPLE_SECONDS = 0.02


class Block(nn.Module):
    """Four tiny ops: norm, linear, activation, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class TinyOps(nn.Module):
    """About ``count`` ops on 4×16 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks, self.rounds = nn.ModuleList(Block() for _ in range(8)), count // 40

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
            x = x / x.abs().max()
        return x


def tiny(count: int) -> Target:
    """The model of tiny ops with its input."""
    torch.manual_seed(0)
    return make_target(TinyOps(count).eval(), torch.randn(4, 16))


def large(gibibytes: float) -> nn.Module:
    """Linear layers of 64 MiB each."""
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(int(gibibytes * 16)))).eval()


# -- time per op call


def instrumented(target: Target, precision: str, breadcrumb: Breadcrumb) -> tuple[float, int]:
    """Processor seconds and op calls of one instrumented part."""
    fp32 = fp32_state(target.model)
    options = Options(errors="none" if precision == "fp32" else "both", breadcrumb=breadcrumb)
    with prepared(target.model, PRECISIONS.get(precision), CPU) as ready:
        started = time.process_time()
        found = run_instrumented(ready, target.args, target.kwargs, fp32, options)
        seconds = time.process_time() - started
    assert found.complete
    assert not found.faults
    return seconds, len(found.op_calls)


def op_time(count: int, repeats: int) -> None:
    """Print the milliseconds per op call of each run and of all five."""
    target = tiny(count)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        breadcrumb = Breadcrumb.create(Path(folder) / "breadcrumb")
        rounds = [[instrumented(target, name, breadcrumb) for name in RUNS] for _ in range(repeats)]
    torch.set_num_threads(threads)
    each = [statistics.median(found[run][0] / found[run][1] * 1e3 for found in rounds) for run in range(len(RUNS))]
    total = statistics.median(sum(seconds / calls for seconds, calls in found) * 1e3 for found in rounds)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in zip(RUNS, each, strict=True))
    print(f"{'op call, five runs':<28}{total:8.3f} ms  (goal 0.3)   {rounds[0][0][1]} calls: {shown}", flush=True)


# -- memory


def in_own_process(work: Callable[[Any], None]) -> Any:
    """What ``work`` sends, run in a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender,))
    process.start()
    sent = receiver.recv()
    process.join()
    return sent


def tree_pss(root: psutil.Process) -> int:
    """Proportional bytes of a process and all below it."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += process.memory_full_info().pss
    return total


def op_memory(count: int) -> None:
    """Print the bytes of the parent's memory per op call."""

    def work(sender: Any) -> None:
        target = tiny(count)
        lowprec_check.scan(tiny(40).model, target.args[0], precisions=RUNS, plan=False)  # what the first scan loads
        gc.collect()
        before = psutil.Process().memory_full_info().uss
        result = lowprec_check.scan(target.model, target.args[0], precisions=RUNS, plan=False)
        gc.collect()
        sender.send(
            (
                (psutil.Process().memory_full_info().uss - before) / len(result.runs[0].op_calls),
                [run.status for run in result.runs],
            )
        )

    size, statuses = in_own_process(work)
    print(f"{'parent, five runs':<28}{size:8.0f} bytes per op call   {', '.join(statuses)}", flush=True)


def peak_during(work: Callable[[], Any]) -> int:
    """Peak of :func:`tree_pss` of this process during ``work``."""
    peak, ended, this = 0, threading.Event(), psutil.Process()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_SECONDS):
            peak = max(peak, tree_pss(this))

    sampler = threading.Thread(target=sample)
    sampler.start()
    work()
    ended.set()
    sampler.join()
    return peak


def peak_memory(gibibytes: float) -> None:
    """Print the peak of a scan over that of a bare forward, in all and for each run."""

    def bare(sender: Any) -> None:
        model, inputs = large(gibibytes), torch.randn(8, 4096)

        def forward() -> None:
            with torch.no_grad():
                for _ in range(5):
                    model(inputs)

        sender.send(peak_during(forward))

    def scan_of(*precisions: str) -> Callable[[Any], None]:
        def scanned(sender: Any) -> None:
            model, inputs = large(gibibytes), torch.randn(8, 4096)
            sender.send(peak_during(lambda: lowprec_check.scan(model, inputs, precisions=precisions, plan=False)))

        return scanned

    base = in_own_process(bare)
    each = {name: in_own_process(scan_of(name)) / base for name in RUNS}
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.items())
    size = f"{base / 2**30:.2f} GiB bare"
    print(f"{'peak of a scan':<28}{max(each.values()):8.2f} ×  (goal 1.8)   {size}: {shown}", flush=True)


# -- apply


def apply_time(count: int, repeats: int) -> None:
    """Print the seconds of ``apply`` for each base."""
    for base in ("bfloat16", "autocast-bf16"):
        samples = []
        for _ in range(repeats):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
            plan = Plan(
                tool="scale",
                target="scale",
                base=base,
                device="cpu",
                keep_fp32=[str(index) for index in range(0, count, 2)],
                minimal=True,
                trials=0,
                seconds=0.0,
                modules=describe_modules(model),
                code="",
            )
            started = time.process_time()
            lowprec_check.apply(model, plan)
            samples.append(time.process_time() - started)
        print(f"{f'apply, {base}':<28}{statistics.median(samples):8.2f} s  (goal 1)   {count} modules", flush=True)


def main() -> None:
    """Run all measurements, or those chosen with ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--modules", type=int, default=20_000)
    parser.add_argument("--gibibytes", type=float, default=1.0, help="Of parameters.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["time", "memory", "peak", "apply"], action="append")
    options = parser.parse_args()
    chosen = options.only or ["apply", "time", "memory", "peak"]
    if "apply" in chosen:
        apply_time(options.modules, options.repeats)
    if "time" in chosen:
        op_time(options.calls, options.repeats)
    if "memory" in chosen:
        op_memory(options.calls)
    if "peak" in chosen:
        peak_memory(options.gibibytes)


if __name__ == "__main__":
    main()
