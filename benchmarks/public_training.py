"""Observe training scripts as published, and compare with what they do: ``benchmarks/public_training.toml`` lists them.

    python benchmarks/public_training.py CHECKOUTS --steps 300

``CHECKOUTS/OWNER+NAME`` is a repository, with the data that is stubbed; PYTHONPATH has what stands for packages. A
script is *observed* if the losses of its first steps are those of the plain script, *refused* with the reason that is
shown, *not compared* if it steps no optimizer of torch, else *wrong*. With ``--steps N`` each also trains in fp32
and under autocast to bfloat16 (around all but
``backward()``) from three seeds. Shown is the mean of the last tenth of the losses of each; they are *as in fp32* if
their mean is in the range of those of fp32, widened by its width on both sides.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy
import torch
from shared import head, in_processes, made, parser_of, save
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError

FIRST, SEEDS = 3, 3


class _EndOfRun(BaseException): ...


def enter(entry: dict[str, Any], checkouts: Path) -> str:
    """Go to the folder of the script, as a user would, and seed it when it starts; returns its name."""

    def seed(event: str, arguments: Any) -> None:
        name = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
        if Path(name).name == Path(entry["script"]).name:
            random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

    sys.addaudithook(seed)
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
    return {"says": "no gradients"} if step is None else {"says": step.loss.words, "losses": list(step.losses)}


def verdict(observed: dict[str, Any], plain: Any) -> str:
    """``observed``, ``refused`` or ``wrong``."""
    if "losses" not in observed:
        return "refused" if "says" in observed else "wrong"
    if not isinstance(plain, list):
        return "not compared"
    # The loss of a step is the sum of those of all its optimizers, which may make several each
    start = 0
    for loss in observed["losses"]:
        sums = [sum(plain[start:end]) for end in range(start + 1, len(plain) + 1)]
        ends = [index for index, total in enumerate(sums) if abs(total - loss) <= 1e-5 * max(abs(loss), 1e-3)]
        if not ends:
            return "wrong"
        start += ends[0] + 1
    return "observed"


def words(fp32: list[float], low: list[float]) -> str:
    """Whether autocast trains like fp32."""
    if not fp32 or not low:
        return "does not train under autocast" if fp32 else "not trained within the limit"
    least, most = min(fp32), max(fp32)
    is_alike = 2 * least - most <= statistics.fmean(low) <= 2 * most - least
    return "as in fp32" if is_alike else "other than in fp32"


def render(data: dict[str, Any]) -> str:
    """The report."""
    lines = head("Training scripts as published", data)
    lines += ["| script | result | what it says | fp32 | autocast-bf16 |", "|---|---|---|---|---|"]
    for name, row in data["rows"].items():
        says = str(row.get("says") or row.get("problem")).splitlines()[0]
        low, wide = ("".join(f"{end:.4g} " for end in row.get(key, [])) for key in ("low", "fp32"))
        lines.append(f"| {name} | {row['verdict']} | {says} | {wide} | {low} {row.get('words', '')} |")
    verdicts = [row["verdict"] for row in data["rows"].values()]
    verdicts += [row["words"] for row in data["rows"].values() if row.get("words")]
    return "\n".join([*lines, "", ", ".join(f"{verdicts.count(kind)} {kind}" for kind in sorted(set(verdicts))), ""])


def main() -> None:
    """Run all scripts, each in a process of its own."""
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="part of the names of scripts")
    parser.add_argument("--steps", type=int, default=0, help="how many to train for, also under autocast")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each run of a script")
    args = parser.parse_args()
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    del entries["commits"]  # of the checkouts
    rows: dict[str, Any] = {}

    def answer(entry: dict[str, Any], work: Callable[..., Any], *given: Any) -> Any:
        part = functools.partial(work, args.checkouts, *given)
        ((_, result, problem),) = in_processes(part, [entry], 1, limit=args.limit)
        return result or {"problem": problem or "no step"}

    for name, entry in entries.items():
        if args.only in name:
            row = answer(entry, observe)
            row["verdict"] = verdict(row, answer(entry, plain_losses, 3 * FIRST, 0, False))
            if args.steps and row["verdict"] == "observed":
                for key in ("fp32", "low"):
                    runs = [answer(entry, plain_losses, args.steps, seed, key == "low") for seed in range(SEEDS)]
                    row[key] = [statistics.fmean(run[-args.steps // 10 :]) for run in runs if isinstance(run, list)]
                row["words"] = words(row["fp32"], row["low"])
            rows[name] = row
    save(args.output, {"made": made(), "rows": rows}, render)


if __name__ == "__main__":
    main()
