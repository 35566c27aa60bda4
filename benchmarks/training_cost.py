"""Measure what the instruments cost in training: ``python benchmarks/training_cost.py [--device cuda] [--rounds 5] [--markdown FILE]``.

Time of an instrumented step (forward, loss, backward, optimizer) / (plain fp32 step + plain step in low precision), the medians
of interleaved rounds, with both errors of each op, accumulated errors only, and none. The goal with both is 2.5.

``--scan FILE`` measures instead what a whole scan of 8 steps costs: time and processor time of ``lowprec-check scan FILE --train --steps 8`` / those
of one process that loads the file once and trains as many steps in each way of each precision, in a plain loop. The goal is 3.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.training import make_optimizer
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.train.steps import TrainingStep, with_step
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.ways_to_train import ways_of

GOAL = 2.5
ERRORS = ("both", "accumulated", "none")
LOW = ("bfloat16", "autocast-bf16")


class Classifier(nn.Module):
    """A transformer of four layers over token embeddings, and a head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(1))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the convolutional network."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def resnet() -> Target:
    """ResNet-18, 8 images of 112 × 112, SGD with momentum."""
    loaded = load_target("torchvision:resnet18", ("8x3x112x112",))
    return make_target(loaded.model.train(), loaded.args[0], optimizer=sgd)


def transformer() -> Target:
    """Four layers of width 256, 8 sequences of 128 tokens, AdamW."""
    torch.manual_seed(0)
    return make_target(Classifier(), torch.randint(0, 1000, (8, 128)))


MODELS: dict[str, Callable[[], Target]] = {"resnet18": resnet, "transformer": transformer}


class Bench:
    """Steps of one model on one device."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target, self.device = target, device
        target.model.to(device)

    def step(self, precision: str, errors: str | None = None) -> float:
        """Seconds of one step, instrumented if ``errors`` are given. The optimizer is made before."""
        fp32 = fp32_state(self.target.model)
        known = PRECISIONS.get(precision)
        with prepared(self.target.model, known, self.device, changes_parameters=True) as ready, torch.enable_grad():
            step = TrainingStep(self.target, ready, ways_of(known, 1)[0])
            stepping = with_step(ready, step)
            inputs, named = ready.inputs(self.target.args, self.target.kwargs)
            if errors is None:
                return self._timed(lambda: step(*inputs, **named))
            options = Options(errors=errors, step=step, changes_parameters=True)  # type: ignore[arg-type]
            given = self.target.args, self.target.kwargs
            found: list[Any] = []
            seconds = self._timed(lambda: found.append(run_instrumented(stepping, *given, fp32, options)))
            assert found[0].complete, found[0].exception
            return seconds

    def _timed(self, work: Callable[[], Any]) -> float:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def ratios(self, precision: str, rounds: int) -> dict[str, float]:
        """The median ratio for each kind of errors."""
        samples: dict[str, list[float]] = {errors: [] for errors in ERRORS}
        for number in range(rounds + 1):
            base = self.step("fp32") + self.step(precision)
            for errors, its in samples.items():
                seconds = self.step(precision, errors)
                if number:  # the first round warms up
                    its.append(seconds / base)
        return {errors: statistics.median(its) for errors, its in samples.items()}


# -- a whole scan

STEPS, SCAN_GOAL = 8, 3.0


def train_in_each_way(file: str) -> None:
    """Train the model of a file on the CPU in each way that a scan tries, in plain loops."""
    target = load_target(file)
    assert target.loss is not None
    batches = [target.batch(number).args for number in range(STEPS)]
    for name in ("fp32", "bfloat16", "autocast-bf16", "half", "autocast-fp16"):
        precision = PRECISIONS.get(name)
        dtype = getattr(torch, precision.format.name)
        for way in ways_of(precision, STEPS)[: 1 if name == "fp32" else None]:
            model = copy.deepcopy(target.model).to(dtype if precision.kind == "cast" else torch.float32)
            scaler = None if way.scale is None else torch.amp.GradScaler("cpu", init_scale=way.scale)
            updates = way.updates(model, lambda parameters: make_optimizer(target.optimizer, list(parameters)), scaler)
            average = target.average(model) if target.average is not None else None
            with contextlib.suppress(ValueError), contextlib.ExitStack() as around:  # a scaler of 16-bit weights
                context = torch.autocast("cpu", dtype=dtype, enabled=precision.kind == "autocast")
                if way.one_context:
                    around.enter_context(context)
                for batch in batches:
                    updates.zero_grad()
                    with contextlib.nullcontext() if way.one_context else context:
                        loss = target.loss(model(*batch), *batch)
                    updates.backward(loss)
                    updates.step()
                    if average is not None:
                        average.update_parameters(model)


def resources(command: list[str]) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a program and all that it starts."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seconds, after = time.perf_counter() - started, os.times()
    used = [getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system")]
    return seconds, sum(used)


def scan_cost(file: str, rounds: int) -> dict[str, Any]:
    """The samples of both, taken in turn."""
    found: dict[str, Any] = {"file": file, "scan": [], "plain": []}
    for _ in range(rounds):
        found["plain"].append(resources([__file__, "--plain", file]))
        found["scan"].append(resources(["-m", "lowprec_check", "scan", file, "--train", "--steps", str(STEPS)]))
    return found


def main() -> None:
    """Measure all models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    parser.add_argument("--scan", help="file to scan as a whole, on the CPU")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        train_in_each_way(options.plain)
        return
    if options.scan:
        found = scan_cost(options.scan, options.rounds)
        save(options.output, {"made": made(), "rows": [], "scan": found}, render)
        return
    rows: list[dict[str, Any]] = []
    for name, build in MODELS.items():
        bench = Bench(build(), torch.device(options.device))
        for precision in LOW:
            ratios = bench.ratios(precision, options.rounds)
            rows.append({"model": name, "precision": precision, "ratios": ratios})
            save(options.output, {"made": made(options.device), "rows": rows}, render)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    if "scan" in data:
        lines = _scan_lines(data["scan"])
    else:
        about = (
            "Time of an instrumented step / (plain fp32 step + plain step in low precision), medians of interleaved rounds, for each kind\n"
            f"of errors. The goal with both errors is {GOAL}."
        )
        rows = [[row["model"], row["precision"], *(f"{row['ratios'][e]:.2f}" for e in ERRORS)] for row in data["rows"]]
        lines = [about, "", tabulate(rows, ["model", "precision", *ERRORS], tablefmt="github", disable_numparse=True)]
    return "\n".join([*head("What the instruments cost in training", data), *lines, ""])


def _scan_lines(found: dict[str, Any]) -> list[str]:
    rows = []
    for index, what in enumerate(("time", "processor time")):
        scan, plain = ([sample[index] for sample in found[name]] for name in ("scan", "plain"))
        ratios = [a / b for a, b in zip(scan, plain, strict=True)]
        rows.append([what, *(f"{statistics.median(each):.1f} s" for each in (scan, plain))])
        rows[-1].append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")
    return [
        f"`scan {found['file']} --train --steps {STEPS}`, and one process that loads the file once and trains {STEPS} steps in each of the same",
        f"ways in plain loops; medians of {len(found['scan'])} rounds in turn, ratios of the rounds. The goal is {SCAN_GOAL:g}.",
        "",
        tabulate(rows, ["", "scan", "plain", "scan / plain"], tablefmt="github", disable_numparse=True),
    ]


if __name__ == "__main__":
    main()
