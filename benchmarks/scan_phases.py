"""Measure where the time of a whole scan goes: ``python benchmarks/scan_phases.py resnet50``. Linux only.

Prints the seconds of a scan (Python API, forked workers, no plan) over those of one plain forward in each of its precisions, in
wall-clock and in processor time, and for each row of the scan the processor seconds of each phase. ``--precision`` leaves rows
out, such as fp16 on a processor that is slow in it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import lowprec_check
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import run_once
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.run import job_worker, plain_part, work
from lowprec_check.schema.precisions import PRECISIONS

RUNS = "half,bfloat16,autocast-fp16,autocast-bf16"
CPU = torch.device("cpu")

PHASES: tuple[tuple[str, Any, str], ...] = (
    ("plain calls", plain_part.PlainPart, "run"),
    ("time", plain_part.PlainPart, "_latency"),
    ("memory", plain_part, "measure_memory"),
    ("all measures", plain_part.PlainPart, "measure"),
    ("op by op", work, "_instrument"),
    ("worker", job_worker, "run_job"),
)
"""Name, owner and attribute of the functions that are timed, where they exist. ``worker`` has them all, ``all measures`` the two before."""


def tiny() -> Target:
    """A small MLP."""
    return make_target(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10)).eval(), torch.randn(32, 64)
    )


def bert() -> Target:
    """An encoder of BERT-base's size, 64 tokens, on the plain (not fused) path."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    return make_target(model, torch.randn(1, 64, 768))


def of_torchvision(name: str, batch: int) -> Target:
    """A model of torchvision."""
    return load_target(f"torchvision:{name}", (f"{batch}x3x224x224",))


MODELS: dict[str, Callable[[int], Target]] = {
    "tiny": lambda _: tiny(),
    "bert": lambda _: bert(),
    "resnet50": functools.partial(of_torchvision, "resnet50"),
    "vit_b_16": functools.partial(of_torchvision, "vit_b_16"),
}


def processor_seconds() -> float:
    """Of this process and the children that it has waited for."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextlib.contextmanager
def timed_phases(file: int) -> Iterator[None]:
    """Write the processor seconds of each phase to ``file``, from the workers too."""
    restore = []
    for name, owner, attribute in PHASES:
        function = getattr(owner, attribute, None)
        if function is None:
            continue

        def timed(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return _function(*args, **kwargs)
            finally:
                os.write(file, f"{os.getpid()} {_name}: {time.process_time() - started}\n".encode())

        restore.append((owner, attribute, function))
        setattr(owner, attribute, timed)
    try:
        yield
    finally:
        for owner, attribute, function in restore:
            setattr(owner, attribute, function)


def forward(target: Target, precision: str) -> tuple[float, float]:
    """Wall-clock and processor seconds of one plain forward, after one that warms up."""
    with prepared(target.model, PRECISIONS.get(precision), CPU) as ready:
        run_once(ready, target.args, target.kwargs, 0)
        started, used = time.perf_counter(), time.process_time()
        run_once(ready, target.args, target.kwargs, 0)
        return time.perf_counter() - started, time.process_time() - used


def measure(options: argparse.Namespace, sender: Any) -> None:
    """Send the times of the forwards, of a scan, and of its phases."""
    target = MODELS[options.model](options.batch)
    with tempfile.TemporaryFile(buffering=0) as file, timed_phases(file.fileno()):
        started, used = time.perf_counter(), processor_seconds()
        result = lowprec_check.scan(
            target.model, target.args[0], precisions=options.precision, plan=False, isolation="fork", device="cpu"
        )
        whole = time.perf_counter() - started, processor_seconds() - used
        file.seek(0)
        phases = file.read().decode().splitlines()
    names = [run.key.precision for run in result.runs]
    # Afterwards: a scan forks, and OpenMP's threads would be in the way.
    sender.send((whole, {name: forward(target, name) for name in names}, phases))


def table(phases: list[str], names: list[str]) -> Iterator[str]:
    """A line per worker, in the order of their ends: the seconds of each phase, and the rest."""
    workers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in phases:
        process, _, rest = line.partition(" ")
        name, _, seconds = rest.partition(": ")
        workers[process][name] += float(seconds)
    yield f"  {'row':<16}{'plain calls':>12}{'time':>8}{'memory':>8}{'others':>8}{'op by op':>10}{'rest':>8}{'sum':>8}"
    labels = [*names, *[f"+{number}" for number in range(len(workers) - len(names))]]
    for label, its in zip(labels, workers.values(), strict=False):
        others = its["all measures"] - its["time"] - its["memory"]
        rest = its["worker"] - its["plain calls"] - its["all measures"] - its["op by op"]
        cells = (its["plain calls"], its["time"], its["memory"], others, its["op by op"], rest, its["worker"])
        widths = (12, 8, 8, 8, 10, 8, 8)
        shown = "".join(f"{cell:>{width}.2f}" for cell, width in zip(cells, widths, strict=True))
        yield f"  {label:<16}{shown}"


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("-p", "--precision", default=RUNS)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(options, sender))
    process.start()
    sender.close()
    whole, forwards, phases = receiver.recv()
    process.join()
    wall, processor = (sum(each[index] for each in forwards.values()) for index in (0, 1))
    print(
        f"{options.model}, batch {options.batch}: scan {whole[0]:.1f} s, processor {whole[1]:.1f} s; "
        f"{len(forwards)} forwards {wall:.3f} s, processor {processor:.3f} s: {whole[0] / wall:.0f} x, "
        f"processor {whole[1] / processor:.0f} x"
    )
    print("  forwards: " + ", ".join(f"{name} {each[1]:.3f}" for name, each in forwards.items()))
    for line in table(phases, list(forwards)):
        print(line)


if __name__ == "__main__":
    main()
