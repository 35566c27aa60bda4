"""Compare the plan search with two simple searches on the same models: trials and time.

    python benchmarks/plan_search.py [--output reports/plan-search]

*bisection*: find the shortest prefix of the leaf modules, in order of execution, that passes if kept in fp32; then remove
as many modules from its start as possible. *greedy*: keep all leaf modules in fp32, then remove them one by one. A trial is
the same plain run for all three. The seconds of lowprec-check do not include the instrumented run that it starts from.
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
from lowprec_check.engine.load import TargetSpec
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_zoo import import_torchvision
from lowprec_check.engine.plan.planner import PlanOptions, plan_target
from lowprec_check.engine.plan.trials import called_modules
from lowprec_check.engine.run.target_runs import RunOptions, TargetRuns, open_runs

PRECISION = {("bf16", "cast"): "bfloat16", ("bf16", "autocast"): "autocast-bf16", ("fp16", "autocast"): "autocast-fp16"}


class Case(NamedTuple):
    """A model that fails, and the dtype and base of the plan."""

    name: str
    target: Target
    dtype: str = "bf16"
    base: str = "cast"
    without_kernel: tuple[str, ...] = ()


class Result(NamedTuple):
    """The cost and the result of one search."""

    trials: int
    seconds: float
    kept: int | None


def with_bad_layers(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """``model`` with layers whose result is lost in bf16 (8 bits) and not in fp32: (y + 2048) − 2048."""

    def cancelling(layer: nn.Module, x: Tensor) -> Tensor:
        return (type(layer).__base__.forward(layer, x) + 2048) - 2048

    for name in names:
        layer = model.get_submodule(name)
        layer.__class__ = type(f"Cancelling{type(layer).__name__}", (type(layer),), {"forward": cancelling})
    return model


def cases() -> Iterator[Case]:
    """Models of real size with planted faults, and the examples that fail."""
    torchvision = import_torchvision()
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
    yield Case("examples/t5_feed_forward.py", TargetSpec("examples/t5_feed_forward.py").load(0), "fp16", "autocast")
    spade = TargetSpec("examples/spade_decoder.py").load(0)
    yield Case("examples/spade_decoder.py without dot", spade, without_kernel=("aten.dot:bfloat16",))


class Counted:
    """Runs trials and counts them; each set of kept modules is run once."""

    def __init__(self, session: TargetRuns, precision: str, tree: ModuleTree) -> None:
        self.session, self.precision, self.tree = session, precision, tree
        self.known: dict[tuple[str, ...], bool] = {}

    def __call__(self, keep_fp32: Sequence[str]) -> bool:
        """Whether the model passes with these modules in fp32."""
        normal = self.tree.normalized(keep_fp32)
        if normal not in self.known:
            run = self.session.run(self.precision, keep_fp32=normal, measured=False, instrumented=False)
            self.known[normal] = run.status == "ok"
        return self.known[normal]


def bisection(leaves: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> int | None:
    """Number of modules kept, found by bisecting the end, then the start, of one range."""
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
    """Number of modules kept after trying to remove each leaf."""
    if not passes(leaves):
        return None
    kept = list(leaves)
    for leaf in leaves:
        rest = [other for other in kept if other != leaf]
        if passes(rest):
            kept = rest
    return len(kept)


def run_search(case: Case, search: Callable[..., int | None]) -> tuple[Result, int]:
    """The result of a search, and the number of leaf modules."""
    options = RunOptions(without_kernel=case.without_kernel)
    with open_runs(case.target, lambda: case.target, options, "fork") as session:
        fp32 = session.reference()
        tree = ModuleTree(called_modules(case.target.model, [fp32]))
        leaves = [path for path in tree.types if not tree.children(path)]
        passes = Counted(session, PRECISION[case.dtype, case.base], tree)
        started = time.perf_counter()
        kept = search(leaves, passes)
        return Result(len(passes.known), time.perf_counter() - started, kept), len(leaves)


def plan_search(case: Case) -> Result:
    """The result of ``lowprec-check plan``."""
    choice: dict[str, Any] = {"dtype": case.dtype, "base": case.base}
    found = plan_target(
        case.target, lambda: case.target, "fork", PlanOptions(without_kernel=case.without_kernel, **choice)
    )
    [attempt] = found.attempts
    return Result(attempt.trials, attempt.seconds, attempt.kept)


def main() -> None:
    """Measure, print the table, and write it if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Stem of the .md to write.")
    parser.add_argument("--without-greedy", action="store_true", help="Skip the greedy search, which takes longest.")
    options = parser.parse_args()
    rows, trials = [], []
    for case in cases():
        planned = plan_search(case)
        bisected, leaves = run_search(case, bisection)
        one_by_one = run_search(case, greedy)[0] if not options.without_greedy else Result(leaves + 1, math.nan, None)
        results = (planned, bisected, one_by_one)
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
