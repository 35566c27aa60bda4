"""Compares the derived support of aten ops with bare calls of them.

python benchmarks/catalog_replay.py [--samples N] [--only NAME …]

Each operator of OpInfo runs in fp32, forward and backward, and the aten ops that it dispatches are recorded with their
arguments. Each recorded call is made again, alone: in fp32 (calls that fail there do not count), then with its floating
arguments in half and in bfloat16; calls with empty outputs do not count, since every kernel runs on them. An op that
the catalog calls "all" must have no call that fails, "none" no call that runs, "some" both.

Each operator has a process of its own, since calls may crash.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch
from shared import head, in_processes, made, parser_of, save
from tabulate import tabulate

from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.names import overload_name
from lowprec_check.catalog.records import LOW, SHORT, Dtype
from lowprec_check.core.trace.ops import Args, Kwargs, outputs_of, tensors_in, traits
from lowprec_check.engine.sweep.operator_worker import Caller
from lowprec_check.engine.sweep.samples import load_operators, samples_of, seed_all
from lowprec_check.pytest_plugin.fixture.cast_replay import copied, try_call
from lowprec_check.torchkit.dispatch_mode import DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import is_float

SECONDS = 20
PER_SAMPLE = 2
"""Calls of an op that are kept, of each sample."""

Outcomes = dict[tuple[str, Dtype], list[str | None]]
"""By op and dtype, what each call raised."""


def computes_with_floats(args: Args, kwargs: Kwargs) -> bool:
    """Whether an argument is a real floating tensor or dtype, so that a cast changes it."""
    return any(is_float(tensor) and not tensor.is_complex() for tensor in tensors_in(args, kwargs)) or any(
        isinstance(value, torch.dtype) and value.is_floating_point for value in (*args, *kwargs.values())
    )


class KeptArguments(DispatchMode):
    """Keeps copies of the arguments of op calls, :data:`PER_SAMPLE` of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, list[Any]] = defaultdict(list)

    def handle(self, func: Any, args: Any, kwargs: Any, keys: Any) -> Any:
        """Keep a copy and run the op."""
        op = traits(func)
        wanted = not op.view and not op.skipped and len(self.calls[func]) < PER_SAMPLE
        if wanted and computes_with_floats(args, kwargs):
            self.calls[func].append(copied(func, args, kwargs))
        return run_op(func, args, kwargs, keys)


def replay(name: str, bound: int) -> list[tuple[str, Dtype, str | None]]:
    """For every call that an operator's samples make: the op, the dtype, and what it raised."""
    operator = load_operators()[name]
    caller = Caller(operator, "cpu")
    seed_all(name)
    found: list[tuple[str, Dtype, str | None]] = []
    for sample in samples_of(operator, "cpu", bound):
        if not sample.floating():
            continue
        kept = KeptArguments()
        for mode in ("forward", "backward"):
            try:
                with kept:
                    caller.run(sample.cast(torch.float32, grad=mode == "backward"), torch.float32, mode)
            except Exception:
                pass
        for func, calls in kept.calls.items():
            for args, kwargs in calls:
                if not fills_an_output(func, args, kwargs):
                    continue
                for dtype in LOW:
                    error = try_call(func, args, kwargs, getattr(torch, dtype))
                    found.append((str(func), dtype, error and error.message))
    return found


def fills_an_output(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call runs in fp32 and has an output with elements: without, kernels of any dtype run."""
    args, kwargs = copied(func, args, kwargs)
    try:
        with torch.no_grad():
            out = func(*args, **kwargs)
    except Exception:
        return False
    outputs = outputs_of(out)
    return not outputs or any(tensor.numel() for tensor in outputs)


def measure(bound: int, only: list[str], jobs: int) -> tuple[Outcomes, list[str]]:
    """By op and dtype the outcome of every call; and the operators whose process did not end well."""
    outcomes: Outcomes = defaultdict(list)
    lost = []
    torch.set_num_threads(1)
    work = functools.partial(replay, bound=bound)
    for name, calls, problem in in_processes(work, only or list(load_operators()), jobs, limit=SECONDS):
        if problem:
            lost.append(name)
        for op, dtype, error in calls or ():
            outcomes[op, dtype].append(error)
    return outcomes, lost


def compare(outcomes: Outcomes) -> list[dict[str, Any]]:
    """For each op and dtype: what the catalog derives, and what its calls show."""
    catalogs = {dtype: AtenCatalog("cpu", dtype, torch.__version__) for dtype in LOW}
    rows = []
    for (op, dtype), errors in sorted(outcomes.items()):
        support, ran = catalogs[dtype].of(op), errors.count(None)
        seen = "all" if ran == len(errors) else "some" if ran else "none"
        message = next((error for error in errors if error), None)
        row = {"op": overload_name(op), "dtype": SHORT[dtype], "catalog": support.state, "calls": seen}
        rows.append(row | {"ran": ran, "of": len(errors), "message": message, "shown_by": support.shown_by[:3]})
    return rows


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows, lost = data["rows"], data["lost"]
    differ = [row for row in rows if row["catalog"] not in (row["calls"], None)]
    unknown = [row for row in rows if row["catalog"] is None]
    counts = Counter((row["dtype"], row["catalog"] or "not known", row["calls"]) for row in rows)
    table = [(*key, number) for key, number in sorted(counts.items())]
    lines = [
        *head("The catalog's aten ops and bare calls", data),
        f"{sum(row['of'] for row in rows) // 2} calls of",
        f"{len({row['op'] for row in rows})} aten ops that the samples of OpInfo dispatch in fp32, "
        "each made again alone in half and in",
        f"bfloat16. {len(differ)} of {len(rows) - len(unknown)} derived states differ from what the calls show;",
        f"{len(unknown)} are not known to the catalog. "
        f"Operators whose process crashed or hung: {', '.join(lost) or 'none'}.",
        "",
        tabulate(table, headers=["dtype", "catalog", "calls that run", "ops"], tablefmt="github"),
    ]
    cells = [(r["op"], r["dtype"], r["catalog"], f"{r['ran']} of {r['of']}", r["message"]) for r in differ]
    lines += ["", tabulate(cells, ["op", "dtype", "catalog", "calls that run", "first failure"], tablefmt="github")]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, compare and write the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes, lost = measure(options.samples, options.only, options.jobs)
    rows = compare(outcomes)
    save(options.output, {"made": made(), "lost": lost, "rows": rows}, render)


if __name__ == "__main__":
    main()
