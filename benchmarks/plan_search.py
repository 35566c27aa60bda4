"""Compare plans by prediction with the search without predictions, and with two simple searches: trials and time.

    pip install hypothesis   # tests/generated.py imports it
    python benchmarks/plan_search.py [--simple] [--output reports/plan-search]

*first* is the number of the trial that first passed, *all* counts the trials that look for fewer modules too. *predicted* is the error
that the error budget predicted for the plan before it was tried, *proven* what the plain run then gave. *without* is the search of
lowprec-check without the error budget. With ``--simple``, *bisection*: find the shortest prefix of the leaf modules, in order of
execution, that passes if kept in fp32; then remove as many modules from its start as possible. *greedy*: keep all leaf modules in
fp32, then remove them one by one. A trial is the same plain run for all. The seconds do not include the analyzed run at the start.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.analysis.module_tree import ModuleTree
from lowprec_check.engine.load import TargetSpec
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.torchvision_zoo import import_torchvision
from lowprec_check.engine.plan.planner import PlanOptions, plan_target
from lowprec_check.engine.plan.trials import called_modules
from lowprec_check.engine.run.target_runs import RunOptions, TargetRuns, open_runs
from lowprec_check.engine.run.target_source import TargetSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from generated import FAULTS, STEPS, Project, build, inputs

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
    first: int | None = None
    predicted: float | None = None
    proven: float | None = None
    minimal: bool = False


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
    for name in ("mobilenet_v2", "mnasnet0_5", "efficientnet_b0"):
        target = TargetSpec(f"torchvision:{name}", ("1x3x64x64",)).load(0)
        yield Case(f"{name}, random weights", target, "fp16", "autocast")


def generated_cases(count: int) -> Iterator[Case]:
    """Chains of random steps with one planted fault, run in a precision that the fault is for."""
    bases = {"half": ("fp16", "cast"), "bfloat16": ("bf16", "cast")}
    for seed in range(count):
        rng = random.Random(seed)
        kinds = [Project, *(rng.choice([*STEPS, *[Project] * 6]) for _ in range(rng.randint(1, 8)))]
        fault = rng.choice(FAULTS)
        kinds.insert(rng.randint(1, len(kinds)), fault.make)
        yield Case(f"generated {seed}", make_target(build(kinds), inputs()), *bases[rng.choice(fault.precisions)])


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


def run_search(case: Case, search: Callable[..., int | None]) -> Result:
    """The result of a search."""
    options = RunOptions(without_kernel=case.without_kernel)
    with open_runs(TargetSource(case.target), options, "fork") as session:
        tree = ModuleTree(called_modules(case.target.model, [session.reference()]))
        passes = Counted(session, PRECISION[case.dtype, case.base], tree)
        started = time.perf_counter()
        kept = search(_leaves(tree), passes)
        return Result(len(passes.known), time.perf_counter() - started, kept)


def _leaves(tree: ModuleTree) -> list[str]:
    return [path for path in tree.types if not tree.children(path)]


def plan_search(case: Case, *, predict: bool = True) -> Result:
    """The result of ``lowprec-check plan``."""
    choice: dict[str, Any] = {"dtype": case.dtype, "base": case.base, "max_trials": 1000}
    options = PlanOptions(without_kernel=case.without_kernel, predict=predict, **choice)
    found = plan_target(TargetSource(case.target), "fork", options)
    [attempt] = found.attempts
    minimal = found.plan is not None and found.plan.minimal
    figures = (attempt.first_pass, attempt.predicted, attempt.proven, minimal)
    return Result(attempt.trials, attempt.seconds, attempt.kept, *figures)


HEAD = ["model", "leaves", "first", "all", "kept", "predicted", "proven", "1-minimal", "s"]


def row_of(case: Case, searches: Sequence[Callable[..., int | None]]) -> tuple[list[object], list[Result]]:
    """The cells of one model, and the results of each search."""
    planned, without = plan_search(case), plan_search(case, predict=False)
    simple = [run_search(case, search) for search in searches]
    leaves = sum(not list(module.children()) for module in case.target.model.modules())
    errors = ("–" if error is None else f"{error:.1e}" for error in (planned.predicted, planned.proven))
    minimal = "yes" if planned.minimal else "no"
    figures = [planned.first or "–", planned.trials, "–" if planned.kept is None else planned.kept, *errors, minimal]
    cells = [case.name, leaves, *figures, f"{planned.seconds:.1f}", *map(_cell, [without, *simple])]
    return cells, [planned, without, *simple]


def generated_lines(count: int) -> list[str]:
    """What the searches of generated models with one planted fault cost."""
    found = [(plan_search(case), plan_search(case, predict=False)) for case in generated_cases(count)]
    planned = [(new, old) for new, old in found if new.kept]
    return [
        f"- generated models with one planted fault that need a plan: {len(planned)}; trials, median and largest: "
        f"{statistics.median(new.trials for new, _ in planned):g} and {max(new.trials for new, _ in planned)}, "
        f"without predictions {statistics.median(old.trials for _, old in planned):g} and "
        f"{max(old.trials for _, old in planned)}",
        f"- of these, plans larger than without predictions: {sum((new.kept or 0) > (old.kept or 0) for new, old in planned)}, "
        f"smaller: {sum((new.kept or 0) < (old.kept or 0) for new, old in planned)}",
        f"- models for which only one of the two searches finds a plan: {sum(bool(new.kept) != bool(old.kept) for new, old in found)}",
    ]


def main() -> None:
    """Measure, print the table, and write it if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Stem of the .md to write.")
    parser.add_argument("--simple", action="store_true", help="Compare with bisection and the greedy search too.")
    parser.add_argument("--generated", type=int, default=60, help="How many generated models to try.")
    options = parser.parse_args()
    names = ["without", *(["bisection", "greedy"] if options.simple else [])]
    rows, results = [], []
    for case in cases():
        cells, found = row_of(case, [bisection, greedy] if options.simple else [])
        rows.append(cells)
        results.append(found)
        print(cells, flush=True)
    first = statistics.median(found[0].first or math.inf for found in results)
    medians = [statistics.median(result.trials for result in column) for column in zip(*results, strict=True)]
    rows.append(["**median of trials**", "", first, medians[0], *[""] * 5, *medians[1:]])
    table = tabulate(rows, [*HEAD, *names], tablefmt="github", disable_numparse=True)
    lines = generated_lines(options.generated)
    print(table, *lines, sep="\n")
    if options.output is not None:
        about = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
        note = f"{about}\n\nTorch {torch.__version__}; made by `python benchmarks/plan_search.py`."
        text = "\n\n".join([f"# Plan search\n\n{note}", table, "\n".join(lines)])
        options.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def _cell(result: Result) -> str:
    kept = "none passes" if result.kept is None else f"{result.kept} kept"
    return f"{result.trials} · {kept} · {result.seconds:.1f} s"


if __name__ == "__main__":
    main()
