"""Compare scans of generated models with fixing and rerunning them, and with three plain calls.

    pip install hypothesis                                                   # tests/generated.py imports it
    python benchmarks/step_runs.py --output reports/step-runs                # 2000 step-runs, seed 0
    python benchmarks/step_runs.py --count 100 --seed 7

A model is a chain of 1 to 6 random steps of ``tests/generated.py`` and of this file: harmless ones, ops without a 16-bit
kernel, overflow, NaN, dtype mismatches, and steps whose state changes from call to call. A step-run is one chain in one
precision. One scan of the chain is compared with two things that do not use the scan:

- *gaps* (half and bfloat16): run the cast model; fix the op that failed (compute it in fp32 and cast back); run again,
  until it passes: ``tests/oracle.py``. The fixed ops must be the gaps of the scan. If an op fails in fp32 too (a solver on
  NaN), no fix exists; then the gaps must include the ops fixed so far, and the scan must end early or name the op itself;
- *status* (all precisions): the status of three plain calls in a row, as in ``verdict_breadth.py``.

Writes OUTPUT.md and OUTPUT.json with every disagreement; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report_files import head, made, save
from torch import Tensor, nn
from verdict_breadth import described, fp32_calls, in_processes, judge_plain

from lowprec_check import UsageError, scan

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
generated: Any = importlib.import_module("generated")
oracle: Any = importlib.import_module("oracle")

PRECISIONS = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")
CASTS = ("half", "bfloat16")
BATCH = 25
"""Chains per process."""
ROUNDS = 30
CHECK = "aten._linalg_check_errors.default"
"""Raises the error of the factorization before it; a scan names the factorization, as a numeric failure."""

WIDTH: int = generated.WIDTH


# -- steps with faults that tests/generated.py lacks


class Mismatch(nn.Module):
    """A linear layer on a constant that is fp32 whatever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.linear(torch.ones(len(x), WIDTH))
        return x + projected


class MismatchedProduct(nn.Module):
    """A matrix product with an fp32 matrix made in ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(WIDTH)


class Saturated(nn.Module):
    """Ends beyond fp16's largest number."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.tanh() + 2) * 60000


class Masked(nn.Module):
    """-inf in a mask, also in fp32, and a finite result: what attention does."""

    def forward(self, x: Tensor) -> Tensor:
        masked = x.masked_fill(torch.arange(WIDTH) > 5, float("-inf"))
        return x + masked.softmax(1)


class Growing(nn.Module):
    """A buffer that grows with each call: within fp16's range in the first, beyond it in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(200)
        return x.tanh() * self.scale


class Cached(nn.Module):
    """Keeps an fp32 copy of its input, which the next call of a cast model multiplies with the wrong dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mixed = x if self.past is None else x.matmul(self.past)
        self.past = torch.eye(WIDTH)
        return mixed


class Drifting(nn.Module):
    """A counter that a later call adds to: rounding shows in the second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1000.3)
        return x + self.count.fmod(1000.0)


FAULTS: list[type[nn.Module]] = [fault.make for fault in generated.FAULTS]
FAULTS += [Mismatch, MismatchedProduct, Saturated, Masked]
STATEFUL: list[type[nn.Module]] = [Growing, Cached, Drifting]
WITH_PARAMETERS: list[type[nn.Module]] = [kind for kind in generated.STEPS if list(kind().parameters())]


class Chain(NamedTuple):
    """A generated model: names of its steps, and whether it is in training mode."""

    number: int
    kinds: tuple[type[nn.Module], ...]
    training: bool

    @property
    def name(self) -> str:
        """The steps in order."""
        mode = " (training)" if self.training else ""
        return f"#{self.number} {' → '.join(kind.__name__ for kind in self.kinds)}{mode}"

    def build(self) -> nn.Module:
        """The model, with weights from seed 0."""
        model: nn.Module = generated.build(list(self.kinds), training=self.training)
        return model


def chains(count: int, seed: int) -> list[Chain]:
    """Random chains; about half of the steps have a fault. Each has parameters, without which a scan is refused."""
    draw = random.Random(seed)
    pools = (generated.STEPS, generated.GAPS, FAULTS, STATEFUL)

    def kinds() -> Iterator[type[nn.Module]]:
        length = draw.randint(1, 6)
        with_parameters = draw.randrange(length)
        for position in range(length):
            pool = draw.choices(pools, weights=(50, 30, 17, 3))[0]
            yield draw.choice(WITH_PARAMETERS if position == with_parameters else pool)

    return [Chain(number, tuple(kinds()), draw.random() < 0.2) for number in range(count)]


# -- fixing and rerunning


class Fixing(oracle._FixOps):  # type: ignore[misc]
    """Fixes the known ops, and stores the op that fails in fp32 too."""

    stuck = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception:
            self.stuck = str(func) if str(func) in self.ops else ""
            raise


class Fixed(NamedTuple):
    """The ops that had to be fixed, and the one that no fix helps."""

    ops: set[str]
    stuck: str


def fix_and_rerun(chain: Chain, precision: str) -> Fixed:
    """Like ``tests/oracle.py``, for models that cannot be fixed too."""
    low = torch.half if precision == "half" else torch.bfloat16
    fixed: set[str] = set()
    for _ in range(ROUNDS):
        dispatch, functions = Fixing(fixed, low), oracle._FixFunctions(fixed, low)
        model, x = chain.build().to(low), generated.inputs().to(low)
        torch.manual_seed(0)
        try:
            with torch.no_grad(), dispatch, functions:
                model(x)
        except Exception:
            failed = dispatch.failed or functions.failed
            if dispatch.stuck or failed in fixed or not failed:
                return Fixed(fixed, dispatch.stuck or failed or "unknown")
            fixed.add(failed)
            continue
        return Fixed(fixed, "")
    raise AssertionError(f"not fixed in {ROUNDS} rounds: {fixed}")


# -- one chain


def gap_disagreement(run: Any, fixed: Fixed) -> str:
    """What differs between the gaps of the scan and the fixed ops; empty if nothing does."""
    found = {gap.op for gap in run.gaps}
    if not fixed.stuck:
        missing, extra = sorted(fixed.ops - found), sorted(found - fixed.ops)
        parts = [f"the scan lacks {', '.join(missing)}"] if missing else []
        parts += [f"the scan adds {', '.join(extra)}"] if extra else []
        parts += [] if run.complete else ["the scan ended early"]
        return "; ".join(parts)
    missing = sorted(fixed.ops - found - {fixed.stuck})
    if missing:
        return f"{fixed.stuck} fails in fp32 too; the scan lacks {', '.join(missing)}"
    numeric = any(gap.kind == "numeric-failure" for gap in run.gaps)
    if run.complete and fixed.stuck not in found and not (fixed.stuck == CHECK and numeric):
        return f"{fixed.stuck} fails in fp32 too; the scan completed and does not name it"
    return ""


def step_runs(chain: Chain) -> list[dict[str, Any]]:
    """One row per precision."""
    start = {"chain": chain.name, "steps": [kind.__name__ for kind in chain.kinds], "training": chain.training}
    reference = fp32_calls(chain.build(), (generated.inputs(),))
    options: dict[str, Any] = {"errors": "accumulated", "plan": False, "isolation": "none", "device": "cpu"}
    try:
        result = scan(chain.build(), generated.inputs(), precisions=list(PRECISIONS), **options)
    except UsageError as error:
        result, refusal = None, described(error)
    rows = []
    for precision in PRECISIONS:
        plain = judge_plain(chain.build(), (generated.inputs(),), precision, reference)
        row = {**start, "precision": precision, "plain": plain.status, "calls": plain.calls, "apart": reference.apart}
        if result is None:
            rows.append(row | {"scan": "refused", "gaps": "", "detail": refusal, "found": [], "fixed": []})
            continue
        run = result.run(precision)
        fixed = fix_and_rerun(chain, precision) if precision in CASTS else None
        rows.append(
            row
            | {
                "scan": run.status,
                "gaps": gap_disagreement(run, fixed) if fixed is not None else "",
                "detail": plain.detail or (run.exception.message if run.exception else ""),
                "found": sorted({gap.op for gap in run.gaps}),
                "fixed": sorted(fixed.ops) if fixed is not None else [],
                "stuck": fixed.stuck if fixed is not None else "",
                "complete": run.complete,
                "notes": run.notes,
            }
        )
    return rows


def batch_rows(batch: Sequence[Chain]) -> list[dict[str, Any]]:
    """The step-runs of several chains; an exception of one chain is a row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for chain in batch:
        try:
            rows += step_runs(chain)
        except Exception as error:
            rows.append({"chain": chain.name, "precision": "–", "problem": described(error)})
    return rows


# -- the report


def disagreement(row: Mapping[str, Any]) -> str:
    """One disagreement, as a list entry."""
    parts = []
    if row["scan"] != row["plain"]:
        parts.append(f"status: scan **{row['scan']}**, plain **{row['plain']}** (calls: {', '.join(row['calls'])})")
    if row["gaps"]:
        parts.append(f"gaps: {row['gaps']}")
    detail = f" [{row['detail']}]" if row["detail"] else ""
    return f"- {row['chain']}, {row['precision']}: {'; '.join(parts)}{detail}"


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    rows, problems = data["rows"], data["problems"]
    counted = [row for row in rows if not row["apart"]]
    apart = Counter(row["apart"] for row in rows if row["apart"])
    casts = [row for row in rows if row["precision"] in CASTS and row["scan"] != "refused"]
    wrong_status = [row for row in counted if row["scan"] != row["plain"]]
    wrong_gaps = [row for row in casts if row["gaps"]]
    both = [row for row in rows if row in wrong_gaps or row in wrong_status]
    statuses = Counter(row["plain"] for row in counted)
    lines = [
        *head("Statuses and gaps of generated models", data),
        f"- step-runs: {len(rows)}, of {len({row['chain'] for row in rows})} chains",
        f"- statuses compared: {len(counted)} ({', '.join(f'{name} {n}' for name, n in sorted(statuses.items()))}); "
        f"**different: {len(wrong_status)}**",
        f"- gap sets compared: {len(casts)} ({sum(bool(row['fixed']) for row in casts)} not empty, "
        f"{sum(bool(row['stuck']) for row in casts)} that no fix helps); **different: {len(wrong_gaps)}**",
        f"- statuses not compared: {sum(apart.values())}",
        *(f"  - {count}: {reason}" for reason, count in apart.items()),
        f"- chains that ended with an exception: {len(problems)}",
        *(f"  - {problem}" for problem in problems),
        "",
        "## Disagreements",
        "",
        *([disagreement(row) for row in both] or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all chains, print the report, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="number of step-runs, rounded up to whole chains")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, each with one thread")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    chosen = chains(-(-options.count // len(PRECISIONS)), options.seed)
    batches = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for index, (batch, found, problem) in enumerate(in_processes(batch_rows, batches, options.jobs), 1):
        rows += found or []
        problems += [f"{batch[0].name} … {batch[-1].name}: {problem}"] if problem else []
        seconds = time.monotonic() - started
        print(f"[{index}/{len(batches)}] {seconds:.0f} s, {len(rows)} step-runs", file=sys.stderr)
    problems += [f"{row['chain']}: {row['problem']}" for row in rows if "problem" in row]
    rows = [row for row in rows if "problem" not in row]
    order = {chain.name: chain.number for chain in chosen}
    rows.sort(key=lambda row: (order[row["chain"]], PRECISIONS.index(row["precision"])))
    save(options.output, {"made": made(), "problems": problems, "rows": rows}, render)
    wrong = any(row["gaps"] or (row["scan"] != row["plain"] and not row["apart"]) for row in rows)
    raise SystemExit(1 if wrong or problems or not rows else 0)


if __name__ == "__main__":
    main()
