"""Runs what CI runs: lint, format, import contracts and types, then all tests. Prints how long each phase took.

``python tools/checks.py`` runs everything. ``python tools/checks.py --quick [FOLDER]`` is for use while you edit: the
static checks, the tests of one folder (``core/trace``) except those that scan or start a process, and three scans
with the real command. Use the Python of the environment that has the extra ``test``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(sys.executable).parent
STATIC = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "imports": ("lint-imports", "--no-cache", "--no-logo"),
    "types": ("mypy",),  # not dmypy, whose second run ends in an endless loop; mypy's cache leaves a few seconds
}
PARALLEL = ("-n", "auto", "--dist", "worksteal")

SMOKE = {
    "inference": ("examples/whitening.py",),
    "training": ("examples/train_classifier.py", "--train", "--steps", "2", "--times", "off", "-p", "autocast-bf16"),
    "prediction": ("examples/masked_attention.py", "--device", "xpu"),
}
"""Scans with the real command."""

SUPPORTED = {"fp32": "ok", "autocast-bf16": "ok"}
EXPECTED = {
    "inference": SUPPORTED | {"bfloat16": "error", "half": "error", "autocast-fp16": "ok"},
    "training": SUPPORTED,
    "prediction": SUPPORTED | {"bfloat16": "ok", "half": "error", "autocast-fp16": "error"},
}
"""The status of each of their runs."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the package: each would compile it


class Checked(NamedTuple):
    """How a check ended: its output is empty if it passed."""

    name: str
    seconds: float
    problem: str


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository's root."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def static_problem(name: str) -> str:
    """What one of the static checks says against the code."""
    program, *arguments = STATIC[name]
    done = run([PROGRAMS / program, *arguments])
    return done.stdout + done.stderr if done.returncode else ""


def smoke_problem(name: str) -> str:
    """What is wrong with one of the scans."""
    done = run([sys.executable, "-m", "lowprec_check", "scan", *SMOKE[name], "--json", "-", "-q", "--fail-on", "never"])
    if done.returncode:
        return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    found = {row["precision"]: row["status"] for row in json.loads(done.stdout)["runs"]}
    return "" if found == EXPECTED[name] else f"found {found}, expected {EXPECTED[name]}"


def check(names: Sequence[str], problem_of: Callable[[str], str], at_once: int) -> bool:
    """Run the named checks, several at once, and print what they found; whether all passed."""

    def timed(name: str) -> Checked:
        start = time.monotonic()
        problem = problem_of(name)
        return Checked(name, time.monotonic() - start, problem)

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(timed, names))
    for name, _, problem in results:
        if problem:
            print(f"\n{name} failed:\n{problem}", flush=True)
    print(", ".join(f"{name} {seconds:.0f} s" for name, seconds, _ in results), flush=True)
    return not any(problem for _, _, problem in results)


def test(*arguments: str) -> bool:
    """Run pytest and print how long it took; whether it passed."""
    start = time.monotonic()
    print("pytest", *arguments, flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
    print(f"tests {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def main() -> int:
    """The exit code: 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="static checks, smoke scans, and the tests in tests/FOLDER that neither scan nor start a process",
    )
    folder = parser.parse_args().quick
    start = time.monotonic()
    passed = check([*STATIC], static_problem, len(STATIC))
    if passed and folder is None:
        passed = test(*PARALLEL, "--durations=15")
    elif passed:
        passed = check([*SMOKE], smoke_problem, os.cpu_count() or 1)
        if passed and folder:
            passed = test(f"tests/{folder}", *PARALLEL, "--no-scans")
    print(f"all {time.monotonic() - start:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
