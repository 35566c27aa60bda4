"""Runs the odd calls of ``tests/odd_calls.py`` as users do, and writes what each prints into a report for readers.

python benchmarks/odd_calls.py reports/odd-calls.md
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from odd_calls import CALLS, LOADING, OPTIONS, OTHERS, RUNNING, STREAMS, TARGETS, OddCall, make_files  # noqa: E402
from odd_processes import run_command  # noqa: E402

SECTIONS = {
    "Targets": TARGETS,
    "Files while they are loaded": LOADING,
    "Models while they run": RUNNING,
    "Options": OPTIONS,
    "Other commands": OTHERS,
    "Streams": STREAMS,
}
LONGEST = 16
"""Lines shown of each call."""


def main() -> None:
    """Run all calls; exit 1 if one does not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    wrong, parts = 0, []
    for title, calls in SECTIONS.items():
        parts.append(f"## {title}")
        for odd in calls:
            text, passed = show(odd)
            wrong += not passed
            parts.append(text)
            print("." if passed else "F", end="", flush=True)
    head = f"# Odd calls\n\n`python benchmarks/odd_calls.py {options.report}`: {len(CALLS)} calls, {wrong} end in another way than `tests/odd_calls.py` says.\n"
    options.report.write_text("\n\n".join([head, *parts]) + "\n", encoding="utf-8")
    print(f"\n{head.splitlines()[-1]}")
    sys.exit(1 if wrong else 0)


def show(odd: OddCall) -> tuple[str, bool]:
    """The call, its files and what it prints; whether it ended as it should."""
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), odd.files)
        done = run_command(odd.own_process or "plain", shlex.split(odd.arguments), Path(folder))
    passed = done.returncode == odd.exit_code and odd.shows in " ".join((done.stdout + done.stderr).split())
    how = {"": "", "plain": ""}.get(odd.own_process, f" ({odd.own_process})")
    files = [f"{name}: {content!r}" for name, content in odd.files.items()]
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    more = [f"… {len(lines) - LONGEST} more lines"] if len(lines) > LONGEST else []
    block = "\n".join(
        [*files, f"$ lowprec-check {odd.arguments}", *lines[:LONGEST], *more, f"[exit {done.returncode}]"]
    )
    verdict = "" if passed else "\n\nWRONG"
    return f"````{how}\n{block}\n````{verdict}", passed


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
