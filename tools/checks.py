"""Runs what CI runs: the tests, and beside them lint, format, import contracts and types; prints how long each took.

``python tools/checks.py [--all] [arguments of pytest]``, with the Python of the environment that has the extra ``test``. The slow tests take
turns: an eighth of them for each commit, all of them with ``--all``, which belongs before a release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(sys.executable).parent
STATIC = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "imports": ("lint-imports", "--no-cache", "--no-logo"),
    "types": ("mypy",),
}
TESTS = ("-n", "auto", "--dist", "worksteal", "--durations=15")
SHARES = 8
"""Turns of the slow tests."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the package: each would compile it


def share() -> list[str]:
    """The slow tests whose turn it is, by the time of the last commit; all of them where git does not know one."""
    git = shutil.which("git")
    if git is None:
        return []
    commit = subprocess.run([git, "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [f"--slow={int(commit.stdout) % SHARES}/{SHARES}"] if commit.returncode == 0 else []


def checked(name: str) -> tuple[str, float, subprocess.CompletedProcess[str]]:
    """Run one of the static checks."""
    start = time.monotonic()
    program, *arguments = STATIC[name]
    done = subprocess.run(
        [PROGRAMS / program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return name, time.monotonic() - start, done


def main() -> int:
    """The exit code: 0 if all is well, else that of the tests, or 1."""
    start = time.monotonic()
    given = [argument for argument in sys.argv[1:] if argument != "--all"]
    arguments = given or [*TESTS, *([] if "--all" in sys.argv else share())]
    print("pytest", *arguments, flush=True)
    with ThreadPoolExecutor(1) as beside:  # one after another: two cores belong to the tests
        static = [beside.submit(checked, name) for name in STATIC]
        code = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
        tests = time.monotonic() - start
        results = [future.result() for future in static]
    for name, _, done in results:
        if done.returncode:
            print(f"\n{name} failed:\n{done.stdout}{done.stderr}")
    print(f"\ntests {tests:.0f} s; beside them " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds, _ in results))
    return code or int(any(done.returncode for _, _, done in results))


if __name__ == "__main__":
    sys.exit(main())
