"""How long ``lowprec.assert_supported`` takes: the first name of a test session, and each further one; for one checkout, or two.

    python benchmarks/assert_supported.py NEW [OLD]

NEW and OLD are checkouts; their names are measured in turns, each session in a process of its own, with one thread. Printed are medians of
seconds and of processor time (of the process and all that it starts), and with OLD the ratios. It runs where psutil finds child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

NAMES = (
    "dot", "linalg.inv", "softmax", "fft.rfft", "cdist", "mm", "nn.functional.layer_norm", "cumsum", "nn.functional.conv2d",
    "nn.functional.gelu", "sort", "linalg.svd",
)  # fmt: skip

SESSION = """
import json, os, resource, sys, time
import psutil, torch
from lowprec_check.pytest_plugin.op_support import support_of

def processor_seconds():
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in ended)
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total

found = []
for name in sys.argv[1:]:
    started, before = time.perf_counter(), processor_seconds()
    support = support_of(name, "float16", "cpu", backward=True)
    assert support.evidence == "measured here"
    states = [(state.op, state.mode, state.state, state.passed, state.samples) for state in support.states]
    found.append((time.perf_counter() - started, processor_seconds() - before, states))
print(json.dumps(found))
"""


def session(checkout: str, names: list[str]) -> list[Any]:
    """Seconds, processor seconds and states of each name, in one process."""
    environment = os.environ | {"PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SESSION, *names]
    return json.loads(
        subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT")
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--names", nargs="+", default=[*NAMES])
    options = parser.parse_args()
    options.checkouts = [os.path.abspath(checkout) for checkout in options.checkouts]
    measured: dict[str, list[list[Any]]] = {checkout: [] for checkout in options.checkouts}
    for number in range(options.sessions):
        names = options.names[number:] + options.names[:number]  # another one first
        for checkout in options.checkouts:
            measured[checkout].append(session(checkout, names))
    if len({json.dumps([[states for *_, states in one] for one in sessions]) for sessions in measured.values()}) > 1:
        print("The results differ.")
    rows: dict[str, list[float]] = {}
    for sessions in measured.values():
        for what, chosen in (("first name", slice(0, 1)), ("further names", slice(1, None))):
            taken = [one for found in sessions for one in found[chosen]]
            rows.setdefault(f"{what}, seconds", []).append(statistics.median(seconds for seconds, *_ in taken))
            rows.setdefault(f"{what}, processor", []).append(statistics.median(cpu for _, cpu, _ in taken))
    print(f"{'':28}" + "".join(f"{os.path.basename(name):>20}" for name in measured))
    for what, values in rows.items():
        ratio = f"  {values[1] / values[0]:.1f} times" if len(values) == 2 else ""
        print(f"{what:28}" + "".join(f"{value:20.2f}" for value in values) + ratio)


if __name__ == "__main__":
    main()
