"""Measure what seeing every operator costs, by each means that torch has: ``python benchmarks/op_watching.py [--output FILE.md]``.

Tiny ops run in a loop, on float32 and on float64, which coverage treats in another way; so the whole cost is that of the calls. In each round every means runs once, in one process with one thread;
printed are medians over the rounds of processor time, per op and as a ratio to the plain loop of the same round. The time includes
starting and ending; of profilers also reading the names of the ops, which is the least that coverage would do with their events.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from suite_plugins import Empty
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from lowprec_check.pytest_plugin.fixture.watch import Watch

OPS = 1600
LOOPS = 10
DTYPES = ("float32", "float64")


def work(dtype: torch.dtype) -> None:
    """Call four ops, one of them a view, until there are ``OPS``."""
    x, y = torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype)
    with torch.no_grad():
        for _ in range(OPS // 4):
            torch.mul(x, y)
            torch.add(x, y, alpha=2.0)
            x.sqrt()
            x.view(2, 2)


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """What ``--lowprec-coverage`` does around a test."""
    watching = Watch()
    watching.start()
    try:
        yield
    finally:
        watching.stop()
        watching.close()


@contextlib.contextmanager
def execution_trace() -> Iterator[None]:
    """The observer written in C++ that saves each op with its schema."""
    with tempfile.TemporaryDirectory() as folder:
        observer = ExecutionTraceObserver().register_callback(str(Path(folder) / "trace.json"))
        observer.start()
        try:
            yield
        finally:
            observer.stop()
            observer.unregister_callback()


@contextlib.contextmanager
def kineto() -> Iterator[None]:
    """The profiler with dtypes and overloads, whose events are read without parsing them."""
    settings = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=settings) as profiler:
        yield
    assert profiler.profiler is not None
    seen = {(event.name(), event.overload_name()) for event in profiler.profiler.kineto_results.events()}
    assert ("aten::mul", "Tensor") in seen


@contextlib.contextmanager
def legacy_profiler() -> Iterator[None]:
    """The profiler before Kineto; its events have neither overloads nor dtypes."""
    with torch.autograd.profiler.profile(use_kineto=False) as profiler:
        yield
    assert "aten::mul" in {event.name for event in profiler.function_events or []}


MEANS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "dispatch mode that does nothing": Empty,
    "coverage": watch,
    "profiler, legacy": legacy_profiler,
    "profiler, Kineto": kineto,
    "execution trace": execution_trace,
}


def microseconds(means: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype) -> float:
    """Processor time per op, in µs, of loops in one context, with its start and its end."""
    started = time.process_time()
    with means():
        for _ in range(LOOPS):
            work(dtype)
    return (time.process_time() - started) / OPS / LOOPS * 1e6


def main() -> None:
    """Measure all means in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {dtype: [] for dtype in DTYPES} for name in MEANS}
    for _ in range(given.rounds):
        for name, means in MEANS.items():
            for dtype, taken in found[name].items():
                taken.append(microseconds(means, getattr(torch, dtype)))
    save(given.output, {"made": made(note=f"One thread, medians of {given.rounds} rounds."), "us": found}, render)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    found = data["us"]
    heads = [text for dtype in found["plain"] for text in (f"{dtype}: µs an op", "× plain")]
    lines = [
        *head("What it costs to see every operator", data),
        f"| means | {' | '.join(heads)} |",
        "|---|---|---|---|---|",
    ]
    for name, by_dtype in found.items():
        cells = []
        for dtype, times in by_dtype.items():
            ratio = statistics.median(there / here for here, there in zip(found["plain"][dtype], times, strict=True))
            cells += [f"{statistics.median(times):.2f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
