"""Compare the plan search with the same search without predicted errors: trials, time and the size of the plan.

    pip install hypothesis   # tests/generated.py imports it
    python benchmarks/plan_search.py

The seconds do not include the analyzed run at the start.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared import head, made, parser_of, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.target_source import TargetSource, load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.features.plan.planner import plan_target
from lowprec_check.schema.options import PlanOptions

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
    yield planted("resnet50", "fc")
    yield planted("resnet50", "layer1.2.conv1", "layer3.0.downsample.0", "layer4.1.conv2")
    yield planted("densenet121", "features.denseblock3.denselayer7.conv1")
    yield Case(
        "examples/t5_feed_forward.py", load_spec(TargetSpec("examples/t5_feed_forward.py"), 0), "fp16", "autocast"
    )
    spade = load_spec(TargetSpec("examples/spade_decoder.py"), 0)
    yield Case("examples/spade_decoder.py without dot", spade, without_kernel=("aten.dot:bfloat16",))
    for name in ("mobilenet_v2", "mnasnet0_5", "efficientnet_b0"):
        target = load_spec(TargetSpec(f"torchvision:{name}", ("1x3x64x64",)), 0)
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


def plan_search(case: Case, *, predict: bool = True) -> Result:
    """The result of ``lowprec-check plan``."""
    choice: dict[str, Any] = {"dtype": case.dtype, "base": case.base}
    options = PlanOptions(without_kernel=case.without_kernel, predict=predict, **choice)
    found = plan_target(TargetSource(case.target), "fork", options)
    [attempt] = found.attempts
    minimal = found.plan is not None and found.plan.minimal
    figures = (attempt.first_pass, attempt.predicted, attempt.proven, minimal)
    return Result(attempt.trials, attempt.seconds, attempt.kept, *figures)


def row_of(case: Case) -> dict[str, Any]:
    """Both searches of one model."""
    leaves = sum(not list(module.children()) for module in case.target.model.modules())
    found = {"planned": plan_search(case)._asdict(), "without": plan_search(case, predict=False)._asdict()}
    return {"model": case.name, "leaves": leaves, **found}


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    heads = ["model", "leaves", "first", "all", "kept", "predicted", "proven", "1-minimal", "s", "without predictions"]
    table = []
    for row in data["models"]:
        new, old = row["planned"], row["without"]
        errors = ("–" if error is None else f"{error:.1e}" for error in (new["predicted"], new["proven"]))
        kept = "none passes" if old["kept"] is None else f"{old['kept']} kept"
        cells = [new["first"] or "–", new["trials"], "–" if new["kept"] is None else new["kept"], *errors]
        cells += ["yes" if new["minimal"] else "no", f"{new['seconds']:.1f}"]
        table.append([row["model"], row["leaves"], *cells, f"{old['trials']} · {kept} · {old['seconds']:.1f} s"])
    both = [(row["planned"], row["without"]) for row in data["models"]]
    medians = (statistics.median(found["trials"] for found in column) for column in zip(*both, strict=True))
    generated = data["generated"]
    trials = (*generated["trials"], *generated["trials without"])
    lines = [
        *head("Plan search with and without predicted errors", data),
        "first: the number of the trial that first passed. all: trials, with those that look for fewer modules. "
        "predicted: the error that the",
        "error budget predicted for the plan before it was tried. proven: what the plain run then gave.",
        "",
        tabulate(table, heads, tablefmt="github", disable_numparse=True),
        "",
        "- median of all trials: {:g}, without predictions {:g}".format(*medians),
        f"- generated models with one planted fault that need a plan: {generated['need a plan']}; trials, "
        "median and largest: {:g} and {}, without predictions {:g} and {}".format(*trials),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search, and save the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--generated", type=int, default=60, help="How many generated models to try.")
    options = parser.parse_args()
    found = [(plan_search(case), plan_search(case, predict=False)) for case in generated_cases(options.generated)]
    totals, rows = totals_of(found), []
    for case in cases():
        rows.append(row_of(case))
        print(rows[-1], file=sys.stderr, flush=True)
    save(options.output, {"made": made(), "models": rows, "generated": totals}, render)


def totals_of(found: list[tuple[Result, Result]]) -> dict[str, Any]:
    """What the searches of generated models cost."""
    needed = [(new, old) for new, old in found if new.kept]
    trials, without = ([one.trials for one in column] for column in zip(*needed, strict=True))
    return {
        "need a plan": len(needed),
        "trials": [statistics.median(trials), max(trials)],
        "trials without": [statistics.median(without), max(without)],
    }


if __name__ == "__main__":
    main()
