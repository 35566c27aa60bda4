"""Compare the shares of modules with what becomes of the error when plain torch keeps each module in fp32.

    pip install -e '.[zoo]' -c constraints.txt
    python benchmarks/ablation_truth.py     # 200 generated models, and those of two libraries
    python benchmarks/ablation_truth.py --generated 20 --seed 1 --only generated

Each model is analyzed in half, bfloat16 and under autocast to both. The truth uses none of this package's code: a copy
of the model, cast or under autocast, with one module in fp32 whose inputs are widened and whose outputs are narrowed
again (autocast: which runs without autocast); the share of a module is 1 - (error with it in fp32 / error)², of the
tensor of the output with the largest error.

* **Shares**: every module with a share over 0.1, by either; they agree if they differ by at most 0.12.
* **Main causes**: the module named first, and the best single module with ops of its own, not larger nor around it.
* **Disproved**: modules named as causes (a share of at least 0.2) without which the error is as before.

Writes OUTPUT.md and OUTPUT.json; exits with 1 if a goal is missed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from shared import ROOT, head, in_processes, made, save
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from verdict_breadth import (
    PRECISIONS,
    Case,
    Inputs,
    arguments,
    cases,
    copied,
    dtype_of,
    is_floating,
    leaf_error,
    seed_all,
    tensors_in,
)

from lowprec_check.analysis.error_shares import main_causes, trusted_budget
from lowprec_check.core.machine import Machine
from lowprec_check.core.target_runs import open_runs
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run

sys.path.insert(0, str(ROOT / "tests"))
from generated import STEPS, LossyCast, Project, build, inputs

FAR, COUNTED, NEAR = 0.12, 0.1, 0.03
"""Shares that differ by more are far; smaller ones are not compared; causes that differ by less are equally good."""

COLUMNS = ["model", "precision", "module", "share", "ablation", "difference", "spread", "measured"]

MOST_MODULES = 10
"""Of a large model, the modules with the largest shares are kept in fp32, and as many others."""


# -- the truth: plain torch


def widened(value: Any, low: torch.dtype) -> Any:
    """Tensors in ``low`` in fp32."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype == low else t, value)


def narrowed(value: Any, low: torch.dtype) -> Any:
    """Tensors in fp32 in ``low``."""
    return tree_map_only(Tensor, lambda t: t.to(low) if t.dtype == torch.float32 else t, value)


def in_precision(model: nn.Module, precision: str, keep: str | None) -> nn.Module:
    """A copy of ``model`` in the precision, with the module ``keep`` in fp32."""
    model, low = copy.deepcopy(model), dtype_of(precision)
    kept = None if keep is None else model.get_submodule(keep)
    if precision.startswith("autocast"):
        if kept is not None:
            inner = kept.forward

            def without_autocast(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = widened((args, kwargs), low)
                with torch.autocast("cpu", enabled=False):
                    return inner(*args, **kwargs)

            kept.forward = without_autocast  # type: ignore[method-assign]
        return model
    exact = [] if kept is None else [(m, copy.deepcopy(dict(m._parameters)), dict(m._buffers)) for m in kept.modules()]
    exact = [(m, ps, {name: b.clone() for name, b in bs.items() if b is not None}) for m, ps, bs in exact]
    model.half() if low == torch.half else model.bfloat16()
    for module, parameters, buffers in exact:
        for name, parameter in parameters.items():
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
        for name, buffer in buffers.items():
            module._buffers[name] = buffer
    if kept is not None:
        kept.register_forward_pre_hook(lambda _m, args, kwargs: widened((args, kwargs), low), with_kwargs=True)
        kept.register_forward_hook(lambda _m, _args, output: narrowed(output, low))
    return model


def output_of(model: nn.Module, inputs: Inputs, precision: str, keep: str | None = None) -> list[Tensor]:
    """The floating tensors of the output."""
    if precision != "fp32":
        model = in_precision(model, precision, keep)
    given = copied(inputs, dtype_of(precision) if precision in ("half", "bfloat16") else None)
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    under = contextlib.nullcontext()
    if precision.startswith("autocast"):
        under = torch.autocast("cpu", dtype=dtype_of(precision))  # type: ignore[assignment]
    seed_all()
    with torch.no_grad(), under:
        return [tensor.clone() for tensor in tensors_in(model(*args, **kwargs)) if is_floating(tensor)]


class Truth:
    """Errors of one model in one precision, with a module in fp32."""

    def __init__(self, model: nn.Module, inputs: Inputs, precision: str, reference: Sequence[Tensor]) -> None:
        self._model, self._inputs, self._precision, self._reference = model, inputs, precision, reference
        errors = self._errors(None)
        self.index = max(range(len(errors)), key=errors.__getitem__)
        self.error, self.values = errors[self.index], reference[self.index].numel()

    def _errors(self, keep: str | None) -> list[float]:
        found = output_of(self._model, self._inputs, self._precision, keep)
        return [leaf_error(low, exact) for low, exact in zip(found, self._reference, strict=True)]

    @functools.cache  # noqa: B019
    def share(self, keep: str) -> float:
        """What part of the squared error goes; NaN if the model cannot run so."""
        try:
            return 1.0 - (self._errors(keep)[self.index] / self.error) ** 2
        except Exception:
            return math.nan


# -- one model


def generated(number: int, seed: int) -> list[Case]:
    """Chains of random steps of ``tests/generated.py``, some with a planted fault."""

    def make(index: int) -> tuple[nn.Module, Inputs]:
        draw = random.Random(seed * 10_000 + index)
        kinds = [Project, *(draw.choice([*STEPS, *[Project] * 6]) for _ in range(draw.randint(2, 8)))]
        if draw.random() < 0.5:
            kinds.insert(draw.randint(1, len(kinds)), LossyCast)
        return build(kinds), (inputs(64),)

    return [Case(f"generated-{seed}.{index}", functools.partial(make, index)) for index in range(number)]


def analyzed(model: nn.Module, inputs: Inputs) -> Iterator[tuple[str, Run]]:
    """The analyzed run of each precision."""
    source = TargetSource(make_target(model, inputs))
    with open_runs(source, ScanOptions(budget=300), Machine(environment={"device": "cpu"}), "none") as runs:
        runs.reference()
        for precision in PRECISIONS:
            yield precision, runs.run(precision, measured=False)


def share_of(run: Run, module: str) -> float:
    """What its budget says goes if the module is kept in fp32."""
    assert run.budget is not None
    return next((its.told for its in run.budget.modules if its.module == module), 0.0)


def examined(case: Case) -> list[dict[str, Any]]:
    """One row per precision."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = case.build()
    reference = output_of(model, inputs, "fp32")
    rows = []
    for precision, run in analyzed(copy.deepcopy(model), copied(inputs, None)):
        row: dict[str, Any] = {"model": case.name, "precision": precision, "status": run.status}
        budget = trusted_budget(run)
        if run.random or budget is None or not budget.measured or run.keep_fp32 or run.rel_l2 is None:
            why = run.budget.reason or "first order explains too little" if run.budget else "no budget"
            rows.append(row | {"why": "random" if run.random else why})
            continue
        truth = Truth(model, inputs, precision, reference)
        if not math.isclose(truth.error, run.rel_l2, rel_tol=1e-3):
            rows.append(row | {"why": f"plain torch has the error {truth.error:.3e}, the run {run.rel_l2:.3e}"})
            continue
        rows.append(row | compared(run, truth, model))
    return rows


def compared(run: Run, truth: Truth, model: nn.Module) -> dict[str, Any]:
    """The shares of its modules, by both; the main cause and the best single module."""
    called = [path for path in run.called_modules if path]
    ordered = sorted(called, key=lambda path: -abs(share_of(run, path)))
    tried = ordered[:MOST_MODULES] + ordered[MOST_MODULES :: max(1, len(ordered) // MOST_MODULES)]
    assert run.budget is not None
    measured = {its.module for its in run.budget.modules if its.measured is not None}
    pairs = [(path, share_of(run, path), truth.share(path)) for path in dict.fromkeys(tried)]
    shares = [
        [path, round(s, 4), round(t, 4), path in measured]
        for path, s, t in pairs
        if not math.isnan(t) and max(s, t) > COUNTED
    ]
    row: dict[str, Any] = {"error": run.rel_l2, "shares": shares, "modules": len(called), "values": truth.values}
    row["spread"] = round(run.budget.spread, 4)
    causes = [part for part in main_causes(run, 3) if part.name in called]
    if causes and not math.isnan(truth.share(causes[0].name)):
        name = causes[0].name
        own = {op.module for op in run.op_calls.rows()}
        size = leaves_of(model, name)
        others = {
            path: t
            for path, _, t in pairs
            if path in own and not math.isnan(t) and leaves_of(model, path) <= size and not name.startswith(f"{path}.")
        }
        best = max(others, key=others.__getitem__, default=name)
        row |= {"cause": [name, round(causes[0].share, 4), round(truth.share(name), 4)]}
        row |= {"best": [best, round(others.get(best, truth.share(name)), 4)]}
        row["named"] = [
            [part.name, round(part.by_itself or part.share, 4), round(truth.share(part.name), 4)] for part in causes
        ]
    return row


def leaves_of(model: nn.Module, path: str) -> int:
    """The number of modules in it without others inside."""
    return sum(not any(module.children()) for module in model.get_submodule(path).modules())


# -- the report


class Summary(NamedTuple):
    """Totals of one kind of precision."""

    kind: str
    shares: int
    near: int
    causes: int
    best: int
    disproved: int

    @property
    def passes(self) -> bool:
        """Whether the goals are reached."""
        return self.near >= 0.95 * self.shares and self.best >= 0.98 * self.causes and not self.disproved


def summary(rows: Sequence[Mapping[str, Any]], kind: str) -> Summary:
    """The totals of casts, or of autocast."""
    mine = [row for row in rows if row["precision"].startswith("autocast") == (kind == "autocast") and "shares" in row]
    shares = [share for row in mine for share in row["shares"]]
    causes = [row for row in mine if "cause" in row]
    return Summary(
        kind,
        len(shares),
        sum(abs(said - true) <= FAR for _, said, true, _ in shares),
        len(causes),
        sum(row["cause"][2] >= row["best"][1] - NEAR for row in causes),
        sum(said >= 0.2 and true <= 0.02 for row in causes for _, said, true in row["named"]),
    )


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    rows = data["rows"]
    totals = [summary(rows, kind) for kind in ("cast", "autocast")]
    skipped = [row for row in rows if "why" in row]
    lines = [
        *head("Shares of modules and what plain torch shows", data),
        f"- models: {len({row['model'] for row in rows})}, runs: {len(rows)}, "
        f"of which {len(skipped)} have no shares to compare",
    ]
    for total in totals:
        near, best = total.near / max(1, total.shares), total.best / max(1, total.causes)
        lines += [
            f"- {total.kind}: shares over {COUNTED} within {FAR} of the ablation: **{near:.1%}** "
            f"({total.near} of {total.shares})",
            f"- {total.kind}: main cause is the best single module, or within {NEAR} of it: **{best:.1%}** "
            f"({total.best} of {total.causes})",
            f"- {total.kind}: named causes that their ablation disproves: **{total.disproved}**",
        ]
    far = [
        [row["model"], row["precision"], name or "–", said, true, round(said - true, 3), row["spread"], measured]
        for row in rows
        for name, said, true, measured in row.get("shares", [])
        if abs(said - true) > FAR
    ]
    far.sort(key=lambda entry: -abs(entry[5]))
    lines += ["", "## Shares that are far from their ablation", ""]
    lines.append(tabulate(far, COLUMNS, tablefmt="github"))
    lines += [f"- {problem}" for problem in data["problems"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine all models, print the report, and write it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--generated", type=int, default=200, help="number of generated models")
    parser.add_argument("--seed", type=int, default=0, help="from which models are generated")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then; what is finished is saved")
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes that are forked cannot use a pool of threads
    chosen = [] if options.only and "generated" not in options.only else generated(options.generated, options.seed)
    only = [prefix for prefix in options.only if prefix != "generated"]
    if only or not options.only:
        real, _ = cases(only)
        unfit = ("training", "labels", "codes", "tokens", "keeps")
        real = [case for case in real if not any(word in case.name for word in unfit)][: options.limit]
        every = 5  # both kinds, however early it ends
        for index, case in enumerate(real):
            chosen.insert(min(len(chosen), index * (every + 1)), case)
    started, found, problems = time.monotonic(), {}, []
    for index, (case, rows, problem) in enumerate(in_processes(examined, chosen, options.jobs, options.seconds), 1):
        problems += [f"{case.name}: {problem}"] if problem else []
        found[case.name] = rows or []
        far = sum(abs(s - t) > FAR for row in rows or [] for _, s, t, _ in row.get("shares", []))
        seconds = time.monotonic() - started
        print(f"[{index}/{len(chosen)}] {seconds:.0f} s {case.name} {problem or far}", file=sys.stderr)
        data = {
            "made": made(),
            "problems": problems,
            "rows": [row for its in chosen for row in found.get(its.name, [])],
        }
        if index == len(chosen) or options.output is not None:
            save(options.output, data, render)
    raise SystemExit(0 if all(summary(data["rows"], kind).passes for kind in ("cast", "autocast")) else 1)


if __name__ == "__main__":
    main()
