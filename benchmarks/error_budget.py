"""Compare the error budget with what is measured, on models of four libraries with random weights.

    pip install -e '.[bench]' -c constraints.txt
    python benchmarks/error_budget.py --output reports/error-budget          # all models
    python benchmarks/error_budget.py --limit 5 --ablations 1
    python benchmarks/error_budget.py --only torchvision:resnet18 --cost

* **Prediction**: the error of the output that the budget predicts, over the one that the plain run measures, for each run that
  completes with a rel_l2 under 0.3.
* **Ablation**: the module with the largest share is kept in fp32 (its submodules included), and the model is run again,
  without instruments. The share predicts the error that is left, √(1 − share) of the error before, but not less than that of the
  tensor of the output with the next largest error. Compared are the
  reductions. One run per model, of the precision that comes next in turn.
* **Warnings**: how many warnings and errors about numerics (LP2xx, LP3xx) a run that passes has.
* **Cost** (``--cost``): the seconds of the instrumented parts with a budget less those without, over those of the fp32 forward
  with a backward of all parameters, in the same process; medians of 3.

Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from breadth import classification_models, shape_for
from report_files import head, made, save
from tabulate import tabulate
from verdict_breadth import PRECISIONS, Case, arguments, cases, in_processes, in_this_process, noise

from lowprec_check import UsageError, scan
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.engine.run.target_runs import RunOptions, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.process import Isolation
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.scan_result import Run, ScanResult

LARGEST = 0.3
"""Runs with a larger rel_l2 are not counted: errors are no longer small."""

LARGE_EFFECT = 0.85
"""Ablations that leave at most this part of the error are counted apart too: other roundings change as well, by chance."""

SAMPLES = 3


def classifiers() -> Iterator[Case]:
    """Every classification model of torchvision."""
    models = import_torchvision().models
    for name in classification_models():
        shape = tuple(map(int, shape_for(name, 64).split("x")))
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield Case(
            f"classifier:{name}",
            lambda name=name, shape=shape, options=options: (  # type: ignore[misc]
                models.get_model(name, weights=None, **options),
                (noise(*shape),),
            ),
        )


def chosen_cases(only: Sequence[str]) -> tuple[list[Case], list[str]]:
    """The models, each once; those whose names start with a prefix in ``only``, if there is one."""
    found, missing = cases(only) if not only or any(not name.startswith("classifier") for name in only) else ([], [])
    wanted = [case for case in classifiers() if not only or case.name.startswith(tuple(only))]
    return wanted + found, missing


def row_of(case: Case, run: Run, result: ScanResult) -> dict[str, Any]:
    """One run."""
    budget = run.budget
    mine = [d for d in result.diagnostics if d.is_about(run) and d.code.startswith(("LP2", "LP3"))]
    return {
        "model": case.name,
        "precision": run.precision,
        "status": run.status,
        "rel_l2": run.output_error.rel_l2 if run.output_error else None,
        "random": run.random,
        "warnings": sum(d.severity != "note" for d in mine),
        "notes": sum(d.severity == "note" for d in mine),
        "predicted": budget.predicted if budget else None,
        "measured": budget.measured if budget else None,
        "unexplained": budget.unexplained if budget else None,
        "decisions": budget.decisions if budget else None,
        "blocked": budget.blocked if budget else [],
        "reason": budget.reason if budget else "no budget",
        "output_rms": budget.output_rms if budget else None,
        "top": [[share.module, share.op, round(share.share, 4)] for share in budget.shares[:3]] if budget else [],
    }


def top_module(run: Run) -> tuple[str, float] | None:
    """The submodule with the largest share of its own, and the share of all inside; ``None`` without a budget."""
    if run.budget is None or not run.budget.known:
        return None
    own: dict[str, float] = defaultdict(float)
    for share in run.budget.shares:
        if share.module in run.called_modules:
            own[share.module] += share.share
    best = max(own, key=own.__getitem__, default=None)
    if best is None:
        return None
    return best, math.fsum(share.share for share in run.budget.shares if is_inside(share.module, best))


def ablation(case: Case, result: ScanResult, precision: str, device: str) -> dict[str, Any] | None:
    """The error with the top module in fp32, as predicted and as measured; ``None`` if the run does not count."""
    run = result.run(precision)
    found = top_module(run)
    error = run.output_error.rel_l2 if run.output_error else None
    if found is None or not error or error > LARGEST or run.random:
        return None
    model, inputs = case.build()
    isolation: Isolation = "fork" if device == "cpu" else "none"
    with open_runs(TargetSource(make_target(model, inputs)), RunOptions(device=device, budget=300), isolation) as runs:
        runs.reference()
        kept = runs.run(precision, keep_fp32=(found[0],), measured=False, instrumented=False)
    after = kept.output_error.rel_l2 if kept.output_error else None
    if after is None:
        return None
    predicted = max(error * math.sqrt(max(0.0, 1 - found[1])), run.budget.next_error or 0.0 if run.budget else 0.0)
    return {
        "model": case.name,
        "precision": precision,
        "module": found[0],
        "share": found[1],
        "before": error,
        "after": after,
        "predicted": predicted,
        "reduction": error - after,
        "predicted_reduction": error - predicted,
    }


def cost(case: Case, device: str) -> dict[str, Any]:
    """Seconds of scans with and without a budget, and of an fp32 forward with gradients."""
    model, inputs = case.build()

    def seconds(**options: Any) -> float:
        started = time.perf_counter()
        scan(model, inputs, precisions=list(PRECISIONS), plan=False, device=device, isolation="none", **options)
        return time.perf_counter() - started

    def with_gradients() -> float:
        started = time.perf_counter()
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        floating = [tensor for _, tensor in leaves(out) if tensor.is_floating_point() and tensor.requires_grad]
        torch.autograd.backward(floating, [torch.ones_like(tensor) for tensor in floating])
        return time.perf_counter() - started

    rounds = [(seconds(), seconds(budget_error="off"), with_gradients()) for _ in range(SAMPLES)]
    more = statistics.median(on - off for on, off, _ in rounds)
    gradients = statistics.median(its for *_, its in rounds)
    return {
        "model": case.name,
        "more_s": more,
        "off_s": statistics.median(off for _, off, _ in rounds),
        "gradients_s": gradients,
    }


def examine(
    case: Case, device: str = "cpu", number: int = 0, with_cost: bool = False, largest: float = math.inf
) -> dict[str, Any]:
    """All that is measured about one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = case.build()
    started = time.perf_counter()
    if sum(parameter.numel() for parameter in model.parameters()) > largest:
        return {"rows": [], "refused": f"{case.name}: left out, more than {largest:.0e} parameters"}
    try:
        result = scan(model, inputs, precisions=list(PRECISIONS), plan=False, budget=300, device=device)
    except UsageError as error:
        return {"rows": [], "refused": f"{case.name}: {error}"}
    found: dict[str, Any] = {"seconds": time.perf_counter() - started}
    found["rows"] = [row_of(case, result.run(precision), result) for precision in PRECISIONS]
    del model, inputs
    turns = [PRECISIONS[(number + shift) % len(PRECISIONS)] for shift in range(len(PRECISIONS))]
    tried = (ablation(case, result, precision, device) for precision in turns)
    found["ablation"] = next((one for one in tried if one is not None), None)
    if with_cost:
        found["cost"] = cost(case, device)
    return found


# -- the report


def within(ratios: Sequence[float], factor: float) -> str:
    """``95 % (19 of 20)`` of the ratios are within the factor."""
    inside = sum(1 / factor <= ratio <= factor for ratio in ratios)
    return f"{inside / max(1, len(ratios)):.1%} ({inside} of {len(ratios)})"


def ratio_of(row: Mapping[str, Any]) -> float | None:
    """Predicted over measured error; ``None`` if the run does not count."""
    completes = row["rel_l2"] and row["rel_l2"] < LARGEST and not row["random"]
    if not completes:
        return None
    return (row["predicted"] or 0.0) / row["rel_l2"]


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    rows, ablations = data["rows"], data["ablations"]
    ratios = {(row["model"], row["precision"]): ratio_of(row) for row in rows}
    counted = [ratio for ratio in ratios.values() if ratio is not None]
    passing = [row["warnings"] for row in rows if row["status"] == "ok"]
    lines = [
        *head("Predicted and measured errors of outputs", data),
        f"- models: {len({row['model'] for row in rows})}, runs: {len(rows)}; that complete with rel_l2 under {LARGEST}: {len(counted)}",
        f"- predicted / measured within [0.5, 2]: **{within(counted, 2)}**",
        f"- within [0.67, 1.5]: **{within(counted, 1.5)}**; median {statistics.median(counted or [0]):.3f}",
        f"- warnings about numerics in a run that passes: median {statistics.median(passing or [0])}, most {max(passing, default=0)}",
    ]
    effects = [one["predicted_reduction"] / one["reduction"] if one["reduction"] > 0 else 0.0 for one in ablations]
    lines.append(
        f"- ablations: {len(ablations)}; reduction as predicted within a factor of 1.5: **{within(effects, 1.5)}**"
    )
    large = [
        effect
        for effect, one in zip(effects, ablations, strict=True)
        if one["predicted"] <= LARGE_EFFECT * one["before"]
    ]
    lines.append(f"- of these, predicted to remove at least {1 - LARGE_EFFECT:.0%}: **{within(large, 1.5)}**")
    for one in data["costs"]:
        lines.append(
            f"- cost, {one['model']}: {one['more_s']:.2f} s more than {one['off_s']:.2f} s, "
            f"{one['more_s'] / one['gradients_s']:.1f} fp32 forwards with gradients"
        )
    table: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        ratio = ratios[row["model"], row["precision"]]
        shown = (
            f"{ratio:.2f} ({row['rel_l2']:.1e})"
            if ratio is not None
            else f"{row['status']}: {row['reason'] or 'not counted'}"
        )
        table[row["model"]].append(shown)
    lines += ["", "## Predicted / measured (measured)", ""]
    lines.append(tabulate([[name, *cells] for name, cells in table.items()], ["model", *PRECISIONS], tablefmt="github"))
    lines += [
        "",
        "## Ablations",
        "",
        "The module with the largest share in fp32: errors before, after, and predicted.",
        "",
    ]
    body = [
        [
            a["model"],
            a["precision"],
            a["module"],
            f"{a['share']:.0%}",
            f"{a['before']:.2e}",
            f"{a['after']:.2e}",
            f"{a['predicted']:.2e}",
        ]
        for a in ablations
    ]
    lines.append(
        tabulate(body, ["model", "precision", "module", "share", "before", "after", "predicted"], tablefmt="github")
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine all models, print the report, and write it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; a GPU is used in one process")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no other model after this time")
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out models with more parameters")
    parser.add_argument("--cost", action="store_true", help="also measure what budgets cost")
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes that are forked cannot use a pool of threads
    chosen, missing = chosen_cases(options.only)
    chosen = chosen[: options.limit]
    numbers = {case.name: number for number, case in enumerate(chosen)}
    started = time.monotonic()

    def work(case: Case) -> dict[str, Any]:
        return examine(case, options.device, numbers[case.name], options.cost, options.largest)

    found: dict[str, dict[str, Any]] = {}
    problems = [f"skipped: {library}" for library in missing]
    examined = (
        in_processes(work, chosen, options.jobs)
        if options.device == "cpu"
        else in_this_process(functools.partial(work), chosen)
    )
    for index, (case, its, problem) in enumerate(examined, 1):
        if time.monotonic() - started > options.seconds:
            break
        problems += (
            [problem and f"{case.name}: {problem}", its and its.get("refused")]
            if problem or (its and "refused" in its)
            else []
        )
        found[case.name] = its or {"rows": []}
        ratios = [ratio_of(row) for row in found[case.name]["rows"]]
        shown = " ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        print(
            f"[{index}/{len(chosen)}] {time.monotonic() - started:.0f} s {case.name} {problem or shown}",
            file=sys.stderr,
        )
        ordered = [found[name] for name in numbers if name in found]
        rows = [row for its in ordered for row in its["rows"]]
        ablations = [its["ablation"] for its in ordered if its.get("ablation")]
        costs = [its["cost"] for its in ordered if its.get("cost")]
        found_problems = [problem for problem in problems if problem]
        figures = {"rows": rows, "ablations": ablations, "costs": costs}
        save(options.output, {"made": made(options.device), "problems": found_problems, **figures}, render)
    print("\n".join(found_problems))


if __name__ == "__main__":
    main()
