"""Observe training scripts as published, and compare with what they do; perhaps train them in low precision.

    python benchmarks/public_training.py CHECKOUTS
    python benchmarks/public_training.py CHECKOUTS --steps 300 --seeds 3 --only nanogpt

``public_training.toml`` lists the scripts; ``CHECKOUTS/OWNER+NAME`` is a repository, with the data that is stubbed.
Modules that stand for missing packages and data sets are found by PYTHONPATH.

- *observed*: the losses of the first three steps are those of the plain script, added up over the backward passes;
- *refused*: the scan ends with the reason that is shown, to be judged by reading the script;
- *wrong*: other losses, a crash, or no answer within ``--limit`` seconds.

With ``--steps N`` each script also trains in fp32 and under autocast to bfloat16 (around all but ``backward()``) from
the same seeds. The table has the mean of the last tenth of the losses of each seed; *as fp32* means that the mean
under autocast is in the range of those of fp32, widened by its width on both sides.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import runpy
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomllib

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from shared import head, in_processes, made, parser_of, save
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError

FIRST = 3
"""Steps that are compared."""


class _EndOfRun(BaseException):
    """As many steps are made as are wanted."""


def enter(entry: dict[str, Any], checkouts: Path) -> str:
    """Go to the folder of the script, as a user would; returns the name of the script."""
    root = checkouts.resolve() / entry["repository"].replace("/", "+")
    sys.path[:0] = [str(root), str(root / entry.get("folder", ""))]
    os.chdir(root / entry.get("folder", ""))
    sys.argv = [entry["script"], *entry.get("arguments", "").split()]
    sys.stdout = sys.stderr = io.StringIO()
    return str(entry["script"])


def plain_losses(checkouts: Path, steps: int, seed: int, low: bool, entry: dict[str, Any]) -> list[float]:
    """The losses of the script itself, before each step of an optimizer: the sum of its backward passes."""
    script = enter(entry, checkouts)
    losses, waiting, optimizers = list[float](), list[float](), set[int]()
    backward, seeded = torch.autograd.backward, torch.manual_seed

    @functools.wraps(backward)
    def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        waiting.append(sum(float(loss.detach().sum()) for loss in ([tensors] if torch.is_tensor(tensors) else tensors)))
        with torch.autocast("cpu", enabled=False):
            return backward(tensors, *args, **kwargs)

    def after_step(optimizer: Any, *_: Any) -> None:
        torch.clear_autocast_cache()  # the weights have changed
        optimizers.add(id(optimizer))
        if waiting:
            losses.append(sum(waiting))
            waiting.clear()
        if len(losses) >= steps * len(optimizers):
            raise _EndOfRun

    torch.autograd.backward = noted
    torch.manual_seed = lambda value: seeded(int(value) + 1000 * seed)
    register_optimizer_step_post_hook(after_step)
    random.seed(seed)
    torch.manual_seed(0)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=low)
    with torchvision_works(), autocast, contextlib.suppress(_EndOfRun, SystemExit):
        runpy.run_path(script, run_name="__main__")
    return losses


def observe(checkouts: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """What a scan observes of the script, or why it refuses it."""
    try:
        step = load_target(enter(entry, checkouts), arguments=tuple(sys.argv[1:]), steps=FIRST).observed
    except UsageError as problem:
        return {"says": str(problem)}
    if step is None:
        return {"says": "no gradients"}
    return {"says": step.loss.words, "losses": list(step.losses), "optimizers": list(step.optimizers)}


def verdict(observed: dict[str, Any], plain: Sequence[float]) -> str:
    """``observed``, ``refused`` or ``wrong``."""
    if "losses" not in observed:
        return "refused" if "says" in observed else "wrong"
    count = max(len(observed["optimizers"]), 1)  # the loss of a step is the sum of those of all
    wanted = [sum(plain[start : start + count]) for start in range(0, len(plain), count)]
    pairs = zip(observed["losses"], wanted, strict=False)
    return "observed" if all(abs(a - b) <= 1e-5 * max(abs(b), 1e-3) for a, b in pairs) else "wrong"


def ends_of(ask: Callable[..., Any], checkouts: Path, steps: int, seeds: int) -> dict[str, Any]:
    """The mean of the last losses for each seed, in fp32 and under autocast."""
    ends: dict[str, list[float]] = {}
    for name in ("fp32", "autocast-bf16"):
        runs = [ask(functools.partial(plain_losses, checkouts, steps, seed, name != "fp32")) for seed in range(seeds)]
        ends[name] = [statistics.fmean(run[-max(len(run) // 10, 1) :]) for run in runs if isinstance(run, list)]
    low, high = min(ends["fp32"], default=0.0), max(ends["fp32"], default=0.0)
    mean = statistics.fmean(ends["autocast-bf16"] or [float("nan")])
    return {**ends, "as fp32": 2 * low - high <= mean <= 2 * high - low}


def render(data: dict[str, Any]) -> str:
    """The report."""
    lines = [*head("Training scripts as published", data), "| script | result | what it says | at the end |"]
    lines.append("|---|---|---|---|")
    for name, row in data["rows"].items():
        says = str(row.get("says") or row.get("problem")).splitlines()[0]
        lines.append(f"| {name} | {row['verdict']} | {says} | {row.get('ends', '')} |")
    verdicts = [row["verdict"] for row in data["rows"].values()]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("observed", "refused", "wrong"))
    return "\n".join([*lines, "", counts, ""])


def main() -> None:
    """Run all scripts, each in a process of its own."""
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="part of the names of scripts")
    parser.add_argument("--steps", type=int, default=0, help="how many to train for, also under autocast")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each run of a script")
    args = parser.parse_args()
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    rows: dict[str, Any] = {}

    def answer(entry: dict[str, Any], work: Callable[[Any], Any]) -> Any:
        ((_, result, problem),) = in_processes(work, [entry], 1, limit=args.limit)
        return result or {"problem": problem or "no step"}

    for name, entry in entries.items():
        if args.only in name:
            ask = functools.partial(answer, entry)
            row = ask(functools.partial(observe, args.checkouts))
            plain = ask(functools.partial(plain_losses, args.checkouts, FIRST, 0, False))
            rows[name] = {**row, "verdict": verdict(row, plain)}
            if args.steps and rows[name]["verdict"] == "observed":
                rows[name]["ends"] = ends_of(ask, args.checkouts, args.steps, args.seeds)
    save(args.output, {"made": made(), "rows": rows}, render)


if __name__ == "__main__":
    main()
