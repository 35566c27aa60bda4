"""Trials and time of the plan search against what people do by hand, on the same models.

    python benchmarks/plan_search.py [--output reports/plan-search]

*bisection*: the shortest prefix of the leaves, in the order of execution, that passes in fp32, then as much of its beginning given back
as passes. *greedy*: all leaves in fp32, given back one by one. A trial is the same plain run for all three; the seconds of lowprec-check
leave out the explained run that it starts from, as those of the others leave out what tells a person that the model fails.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.analysis.minimize import ModuleTree
from lowprec_check.engine.load import load_seeded
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_zoo import import_torchvision
from lowprec_check.engine.plan.planner import PlanOptions, plan_target
from lowprec_check.engine.plan.trials import called_modules
from lowprec_check.engine.run.target_runs import RunOptions, TargetRuns, open_runs

PRECISION = {("bf16", "cast"): "bfloat16", ("bf16", "autocast"): "autocast-bf16", ("fp16", "autocast"): "autocast-fp16"}


class Case(NamedTuple):
    """A model that fails, and the base to start from."""

    name: str
    target: Target
    dtype: str = "bf16"
    base: str = "cast"
    without_kernel: tuple[str, ...] = ()


class Result(NamedTuple):
    """What a way to search took and found."""

    trials: int
    seconds: float
    kept: int | None


def with_bad_layers(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """``model`` with named layers whose result drowns in bf16 (8 bits) and not in fp32: (y + 2048) − 2048."""

    def cancelling(layer: nn.Module, x: Tensor) -> Tensor:
        return (type(layer).__base__.forward(layer, x) + 2048) - 2048

    for name in names:
        layer = model.get_submodule(name)
        layer.__class__ = type(f"Cancelling{type(layer).__name__}", (type(layer),), {"forward": cancelling})
    return model


def cases() -> Iterator[Case]:
    """Real sizes with planted faults, and the examples that fail."""
    torchvision, _ = import_torchvision()
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def planted(name: str, *bad: str) -> Case:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval()
        return Case(f"{name}, bad: {', '.join(bad)}", make_target(with_bad_layers(model, bad), image))

    yield planted("resnet50", "layer1.0.conv2")
    yield planted("resnet50", "layer3.4.bn2")
    yield planted("resnet50", "fc")
    yield planted("resnet50", "layer1.2.conv1", "layer3.0.downsample.0", "layer4.1.conv2")
    yield planted("densenet121", "features.denseblock3.denselayer7.conv1")
    yield planted("vgg16_bn", "features.10", "classifier.3")
    yield Case("examples/t5_feed_forward.py", load_seeded("examples/t5_feed_forward.py", (), 0), "fp16", "autocast")
    spade = load_seeded("examples/spade_decoder.py", (), 0)
    yield Case("examples/spade_decoder.py without dot", spade, without_kernel=("aten.dot:bfloat16",))


class Counted:
    """Plain runs, each keep once."""

    def __init__(self, session: TargetRuns, precision: str, tree: ModuleTree) -> None:
        self.session, self.precision, self.tree = session, precision, tree
        self.known: dict[tuple[str, ...], bool] = {}

    def __call__(self, keep: Sequence[str]) -> bool:
        """Whether it passes."""
        normal = self.tree.normalized(keep)
        if normal not in self.known:
            run = self.session.run(self.precision, keep_fp32=normal, measured=False, instrumented=False)
            self.known[normal] = run.status == "ok"
        return self.known[normal]


def bisection(leaves: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> int | None:
    """Modules kept by bisecting the end, then the beginning, of one stretch."""
    if not passes(leaves):
        return None
    low, high = 0, len(leaves)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(leaves[:middle]) else (middle, high)
    low, end = 0, high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(leaves[middle:end]) else (low, middle)
    return end - low


def greedy(leaves: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> int | None:
    """Modules kept after each leaf was offered back."""
    if not passes(leaves):
        return None
    kept = list(leaves)
    for leaf in leaves:
        rest = [other for other in kept if other != leaf]
        if passes(rest):
            kept = rest
    return len(kept)


def by_hand(case: Case, way: Callable[..., int | None]) -> tuple[Result, int]:
    """The result of a way, and how many leaves there are."""
    options = RunOptions(without_kernel=case.without_kernel)
    with open_runs(case.target, lambda: case.target, options, "fork") as session:
        fp32 = session.reference()
        tree = ModuleTree(called_modules(case.target.model, [fp32]))
        leaves = [path for path in tree.types if not tree.children(path)]
        passes = Counted(session, PRECISION[case.dtype, case.base], tree)
        started = time.perf_counter()
        kept = way(leaves, passes)
        return Result(len(passes.known), time.perf_counter() - started, kept), len(leaves)


def ours(case: Case) -> Result:
    """What ``lowprec-check plan`` takes."""
    choice: dict[str, Any] = {"dtype": case.dtype, "base": case.base}
    found = plan_target(
        case.target, lambda: case.target, "fork", PlanOptions(without_kernel=case.without_kernel, **choice)
    )
    [attempt] = found.attempts
    return Result(attempt.trials, attempt.seconds, attempt.kept)


def main() -> None:
    """Measure, print, and write the table where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Stem of the .md to write.")
    parser.add_argument("--without-greedy", action="store_true", help="Spare the longest part.")
    options = parser.parse_args()
    rows, trials = [], []
    for case in cases():
        mine = ours(case)
        bisected, leaves = by_hand(case, bisection)
        one_by_one = by_hand(case, greedy)[0] if not options.without_greedy else Result(leaves + 1, math.nan, None)
        results = (mine, bisected, one_by_one)
        trials.append([result.trials for result in results])
        rows.append([case.name, leaves, *(_cell(result) for result in results), f"{3 * math.log2(leaves) + 10:.0f}"])
        print(rows[-1], flush=True)
    medians = [statistics.median(column) for column in zip(*trials, strict=True)]
    rows.append(["**median of trials**", "", *medians, ""])
    head = ["model", "leaves", "lowprec-check", "bisection", "greedy", "3 log2(leaves) + 10"]
    table = tabulate(rows, head, tablefmt="github")
    print(table)
    if options.output is not None:
        note = f"Trials, modules kept, seconds; torch {torch.__version__}. `python benchmarks/plan_search.py`"
        options.output.with_suffix(".md").write_text(f"# Plan search\n\n{note}\n\n{table}\n", encoding="utf-8")


def _cell(result: Result) -> str:
    kept = "none passes" if result.kept is None else f"{result.kept} kept"
    return f"{result.trials} · {kept} · {result.seconds:.1f} s"


if __name__ == "__main__":
    main()
