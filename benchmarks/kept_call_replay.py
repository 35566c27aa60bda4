"""Compares what coverage concludes from one call of an op with the catalog: python benchmarks/kept_call_replay.py.

The aten ops that the samples of OpInfo dispatch in fp32 are kept as coverage keeps those that the catalog does not know, and tried
in half and in bfloat16 in coverage's own process (about a minute). Prints the counts and every difference.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from catalog_replay import computes_with_floats, fills_an_output

from lowprec_check.catalog.aten import AtenCatalog, AtenSupport
from lowprec_check.catalog.records import LOW
from lowprec_check.engine.core.dispatch_mode import DispatchMode, run_op
from lowprec_check.engine.sweep.calls import Caller
from lowprec_check.engine.sweep.samples import load_operators, samples_of, seed_all
from lowprec_check.engine.trace.ops import traits
from lowprec_check.pytest_plugin import replayed_calls
from lowprec_check.pytest_plugin.fixture.kept_calls import CallKeeper
from lowprec_check.pytest_plugin.replayed_calls import ReplayTask, replay_calls, with_answer

SAMPLES = 2


class KeepingMode(DispatchMode):
    """Keeps the first call of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = CallKeeper(lambda: 0)

    def handle(self, func: Any, args: Any, kwargs: Any, keys: Any) -> Any:
        """Keep a call that computes with floating numbers."""
        op = traits(func)
        counts = not (op.view or op.skipped) and computes_with_floats(args, kwargs)
        if counts and fills_an_output(func, args, kwargs):
            self.keep(op.name, func, args, kwargs)
        return run_op(func, args, kwargs, keys)


def kept() -> CallKeeper:
    """A call of each op that the samples dispatch."""
    mode = KeepingMode()
    for name, operator in load_operators().items():
        caller = Caller(operator, "cpu")
        seed_all(name)
        samples = []
        with contextlib.suppress(Exception):
            samples = [sample for sample in samples_of(operator, "cpu", SAMPLES) if sample.floating()]
        for sample in samples:
            for how in ("forward", "backward"):
                with contextlib.suppress(Exception), mode:
                    caller.run(sample.cast(torch.float32, grad=how == "backward"), torch.float32, how)
    return mode.keep


def main() -> None:
    """Keep, try, compare and print."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    replayed_calls.ALL_SECONDS = 300.0
    calls = kept().calls
    print(
        len(calls),
        "ops;",
        *(f"{number} not kept: {why}" for why, number in Counter(c.why_not for c in calls.values()).items() if why),
    )
    tasks = [ReplayTask(op=op, dtype=d, device="cpu", call=c.data) for op, c in calls.items() for d in LOW if c.data]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answers = replay_calls(tasks, Path(folder))
    print(f"{len(answers)} of {len(tasks)} calls answered in {time.monotonic() - started:.1f} s")
    catalogs = {dtype: AtenCatalog("cpu", dtype, torch.__version__) for dtype in LOW}
    counts: Counter[tuple[str, str, str]] = Counter()
    for (op, dtype), answer in sorted(answers.items()):
        known, found = catalogs[dtype].of(op).state, with_answer(op, AtenSupport(state=None), answer)
        counts[dtype, str(known), str(found.state)] += 1
        if known in ("all", "none") and found.state != known:
            print("differs:", op, dtype, known, found.state, found.message)
    for key, number in sorted(counts.items()):
        print("{}: catalog {}, tried {}:".format(*key), number)


if __name__ == "__main__":
    main()
