"""Compare scans of training scripts with the scripts themselves: figures of 8 steps, and what becomes of 300.

    python benchmarks/training_truth.py                     # all scripts
    python benchmarks/training_truth.py --only lightning --minutes 10 --jobs 16

The steps of each of ``training_scripts.py`` are observed by a scan; then the script is run as it is rewritten for each
precision:

- *figures*: the losses of fp32 and of the first way of each precision are those of the script with the same seeds, and
  the weights end as far from those of fp32;
- *recommended*: after 300 steps, the mean of the last 30 losses of the recommended way is within the 99.5 % prediction
  interval of eight fp32 runs with other initial weights, batches and random draws;
- *false errors*: a run with an error LP507 or LP502 whose first way ends in that interval;
- *missed*: the first way of ``bfloat16`` passes the scan and ends outside;
- *left*: a script made no step after those that were observed, and the files that it writes to are as they were before.

Gradients that are accumulated over several backward passes are added up in another order than in the scan, and
Lightning turns off autocast's cache of casts: losses may differ by twice the roundoff of the precision.

Runs on the CPU alone. Saves after each script, and stops after ``--minutes``; the same command resumes.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import math
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from shared import head, in_processes, made, parser_of, save, saved
from torch import Tensor
from training_scripts import SCRIPTS, WRITTEN_FOR, rewritten, train

from lowprec_check.core.scan import scan_target
from lowprec_check.engine.model.target_source import load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run, ScanResult

SHORT, LONG, LAST, SEEDS = 8, 300, 30, 8
QUANTILE = 4.03
"""The 99.75 % quantile of Student's t with seven degrees of freedom."""

LOW = ("bfloat16", "autocast-bf16", "half", "autocast-fp16")
JUDGED = ("LP507", "LP502")
SECONDS = 900
"""For a script."""


# -- a script, run plainly


class Trained(NamedTuple):
    """What a script gave: the loss before each step and after the last, and the weights, first and last."""

    losses: list[float]
    first: Tensor
    last: Tensor

    @property
    def moved(self) -> Tensor:
        """How far the weights moved."""
        return self.last - self.first


def flat(tensors: list[Any]) -> Tensor:
    """All values, in fp64."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def run_script(
    text: str, draws: bool, seed: int, steps: int, precision: str = "fp32", way: str = "plain", scale: float = 65536.0
) -> Trained:
    """Run the script, which ``draws`` numbers; raises :class:`NotWrittenError` if its framework lacks the way."""
    if way != "plain" and ("loss.backward()" not in text or "scale" not in way or "master" in way):
        raise NotWrittenError(way)
    text = rewritten(text, precision, scale if "scale" in way else None)
    text = re.sub(r"(torch\.manual_seed\(|seed_everything\(|set_seed\(|\bseed=)0", rf"\g<1>{seed}", text)
    losses, weights = train(text, steps, draws=draws and steps == SHORT)
    half = len(weights) // 2
    return Trained(losses, flat(weights[:half]), flat(weights[half:]))


class NotWrittenError(Exception):
    """A way to train that cannot be written into the script."""


KEPT = {"ckpt.pt": "a checkpoint of last week", "log.csv": "the losses of last week"}


# -- one script


def scanned(text: str) -> ScanResult:
    """A scan of the script in the current folder, whose first steps are observed."""
    path = Path("train.py").absolute()
    path.write_text(text, encoding="utf-8")
    options = ScanOptions(train=True, steps=SHORT, device="cpu", times="off", errors="none", plan=False)
    return scan_target(load_here(TargetSpec(str(path), steps=SHORT), 0), "none", options)


Loop = Callable[..., Trained]
"""Called with the seed, the number of steps, the precision, the way and the loss scale."""


def figures(train: Loop, result: ScanResult, *, exact: bool) -> list[dict[str, Any]]:
    """For fp32 and each precision, whether the losses and the distance of the scan are those of the script."""
    base, rows = train(0, SHORT), []
    for run in result.runs:
        way = run.training.ways[0] if run.training is not None and run.training.ways else None
        if way is None or way.status == "error":
            continue
        try:
            mine = base if run.is_reference else train(0, SHORT, run.precision, way.name, way.initial_scale or 65536.0)
        except NotWrittenError:
            continue
        if way.skipped_steps or (not exact and way.status == "nonfinite"):
            continue  # a scan repeats a step that is skipped; what explodes magnifies the order of a sum
        rounding = 0.0 if exact else 1e-5 if run.is_reference else 2 * PRECISIONS.get(run.precision).format.roundoff
        found = [math.nan if loss is None else loss for loss in way.losses]
        same = len(found) - len(mine.losses) in (0, 1) and all(
            abs(a - b) <= rounding * abs(b) or (not math.isfinite(a) and not math.isfinite(b))
            for a, b in zip(found, mine.losses, strict=False)
        )
        row: dict[str, Any] = {"precision": run.precision, "losses": same}
        if not same:
            row["detail"] = f"{found} in the scan, {mine.losses} in the script"
        if exact and way.distances and not run.is_reference and math.isfinite(mine.losses[-1]):
            distance = float((mine.moved - base.moved).norm() / base.moved.norm())
            row["distance"] = abs(distance - way.distances[-1]) <= 1e-3 * distance
            if not row["distance"]:
                row["detail"] = f"{way.distances[-1]:.4g} in the scan, {distance:.4g} in the script"
        rows.append(row)
    return rows


def end_of(trained: Trained) -> float:
    """The mean of the last losses; NaN if training ended early."""
    return math.nan if not math.isfinite(trained.losses[-1]) else statistics.fmean(trained.losses[:LONG][-LAST:])


def compare(name: str) -> dict[str, Any]:
    """One script, in a folder of its own, which becomes the current one."""
    started, sys.argv = time.monotonic(), ["train.py"]
    sys.stdout = io.StringIO()
    os.chdir(tempfile.mkdtemp())
    for file, content in KEPT.items():
        Path(file).write_text(content, encoding="utf-8")
    text = SCRIPTS[name]
    train: Loop = functools.partial(run_script, text, "dropout" in name)
    result = scanned(rewritten(text, *WRITTEN_FOR.get(name, ("fp32",))))
    setup, best = result.training, result.recommendation
    assert setup is not None, [(run.status, run.exception, run.notes) for run in result.runs]
    seconds = time.monotonic() - started
    row: dict[str, Any] = {"scan_seconds": round(seconds, 1), "varied": setup.varied}
    assert setup.script, "its steps were not observed"
    log = Path("steps.log")
    made = len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else None
    kept = all(Path(file).read_text(encoding="utf-8") == content for file, content in KEPT.items())
    row["left"] = kept and made in (None, SHORT - 1)
    row["statuses"] = {run.precision: run.status for run in result.runs}
    exact = "accumul" not in name
    row["figures"] = figures(train, result, exact=exact)
    ends = [end_of(train(seed, LONG)) for seed in range(1, SEEDS + 1)]
    half = QUANTILE * statistics.stdev(ends) * math.sqrt(1 + 1 / SEEDS)
    low, high = statistics.fmean(ends) - half, statistics.fmean(ends) + half

    def judged(precision: str, way: str, scale: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"precision": precision, "way": way}
        try:
            end = end_of(train(0, LONG, precision, way, scale or 65536.0))
        except NotWrittenError:
            return found
        except Exception as error:
            return found | {"raises": f"{type(error).__name__}: {error}"[:200], "inside": False, "in_range": False}
        return found | {
            "end": end if math.isfinite(end) else None,
            "inside": low <= end <= high,
            "in_range": min(ends) <= end <= max(ends),
        }

    row["ends"], row["interval"], row["fp32"] = ends, [low, high], judged("fp32", "plain")
    if best is not None and best.precision != "fp32":
        run = result.run(best.precision)
        way = run.training.way(best.way or "plain") if run.training is not None else None
        name = "master-weights" if best.way == "split-weights" else best.way or "plain"  # they hold the same values
        row["recommended"] = judged(best.precision, name, way.initial_scale if way is not None else None)
    row["errors"] = [
        judged(run.precision, first_way(run)) | {"codes": codes}
        for run in result.runs
        if (codes := error_codes(result, run))
    ]
    if row["statuses"].get("bfloat16") == "ok":
        row["bfloat16"] = judged("bfloat16", "plain")
    return row | {"seconds": round(time.monotonic() - started, 1)}


def first_way(run: Run) -> str:
    """The way whose status is that of the run."""
    return run.training.ways[0].name if run.training is not None and run.training.ways else "plain"


def error_codes(result: ScanResult, run: Run) -> list[str]:
    """The codes of errors about how it trains."""
    return sorted(
        {
            found.code
            for found in result.diagnostics
            if found.code in JUDGED and found.severity == "error" and found.precision == run.precision
        }
    )


def main() -> None:
    """Compare the scripts, and save after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--jobs", type=int, default=1, help="how many scripts at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=240.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    names = [name for name in SCRIPTS if not options.only or any(part in name for part in options.only)]
    rows, problems = saved(options.output, "setups"), list[str]()
    known = {row["setup"] for row in rows}
    data: dict[str, Any] = {"made": made(), "total": len(names)}
    data |= {"problems": problems, "setups": rows}
    with torchvision_works():
        importlib.import_module("lightning")
        left = [name for name in names if name not in known]
        for name, found, problem in in_processes(compare, left, options.jobs, 60 * options.minutes, SECONDS):
            if problem:
                problems.append(f"{name}: {problem}")
            else:
                rows.append({"setup": name} | found)
            print(f"[{len(rows) + len(problems)}/{len(names)}] {name}: {problem or found}", file=sys.stderr, flush=True)
            if options.output is not None:
                save(options.output, data, render)
    print("\n".join(totals(data)), flush=True)


# -- the report


def totals(data: dict[str, Any]) -> list[str]:
    """The ratios."""
    rows = data["setups"]
    cells = [cell for row in rows for cell in row["figures"]]
    distances = [cell for cell in cells if "distance" in cell]
    advised = [row["recommended"] for row in rows if "inside" in row.get("recommended", ())]
    errors = [(row["setup"], found) for row in rows for found in row["errors"]]
    false = [(name, found) for name, found in errors if found.get("inside")]
    passed = [row["bfloat16"] for row in rows if "bfloat16" in row]
    left = [row["left"] for row in rows if "left" in row]
    runs = sum(len(row["statuses"]) - 1 for row in rows)
    return [
        f"- scripts: {len(rows)} of {data['total']}, {len(data['problems'])} failed",
        f"- left in the step that was asked for, with all files as they were: {sum(left)} of {len(left)}",
        f"- losses equal those of the script: {sum(cell['losses'] for cell in cells)} of {len(cells)} runs",
        "- distances of the weights equal those of the script: "
        f"{sum(cell['distance'] for cell in distances)} of {len(distances)}",
        f"- **recommended way inside the interval of eight seeds after {LONG} steps: "
        f"{sum(each['inside'] for each in advised)} of {len(advised)}** (between the smallest and the largest of them: "
        f"{sum(each['in_range'] for each in advised)}; fp32 from seed 0: {sum(row['fp32']['inside'] for row in rows)} "
        f"of {len(rows)} inside, {sum(row['fp32']['in_range'] for row in rows)} between)",
        f"- **false errors LP507 and LP502: {len(false)}**, of {len(errors)} errors in {runs} runs"
        + "".join(f"; {name} {found['precision']} ({', '.join(found['codes'])})" for name, found in false),
        "- `bfloat16` as it is passes the scan and ends outside: "
        f"{sum(not each['inside'] for each in passed)} of {len(passed)}",
    ]


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    return "\n".join(
        [
            *head("Scans of training scripts against the scripts", data),
            f"Scans of {SHORT} steps; the mean of the last {LAST} losses after {LONG} steps, "
            "against the 99.5 % prediction interval of eight fp32 runs",
            "with other initial weights, batches and random draws.",
            "",
            *totals(data),
            *(f"  - {problem}" for problem in data["problems"]),
            "",
        ]
    )


if __name__ == "__main__":
    main()
