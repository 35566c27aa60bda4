"""Checks torch releases before a release: by default the oldest and the newest that ``pyproject.toml`` allows.

``python tools/releases.py [VERSION ...]``. For each, the package is installed in a temporary environment with that
torch (a CUDA build takes 7 GB of disk, two minutes), and the main commands are run on the examples as a user runs them.
What each must print is checked; a step that takes more than ten minutes has failed. Prints a line for each step, and
exits with 1 if one fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 600
"""The limit of a step."""

TEST = """
import torch
from whitening import inputs, model

def test_support(lowprec):
    lowprec.assert_no_gaps(torch.nn.Linear(4, 4), torch.ones(2, 4), dtype=torch.bfloat16)

def test_model(lowprec):
    lowprec.check(model(), inputs(), precision="autocast-bf16")
"""


class Step(NamedTuple):
    """A command of a user's, and how to tell that it did its work."""

    name: str
    arguments: list[str]
    """Of ``python``, in a folder with the examples."""
    holds: Callable[[Path, str], bool]
    """Whether the folder and what was printed are as they must be."""


def statuses(folder: Path) -> dict[str, str]:
    """The status of each run of the saved scan."""
    runs = json.loads((folder / "scan.json").read_text())["runs"]
    return {run["precision"]: run["status"] for run in runs}


COMMAND = ["-m", "lowprec_check"]
STEPS = [
    Step(
        "scan",
        [*COMMAND, "scan", "whitening.py", "--json", "scan.json"],
        lambda folder, _: (
            statuses(folder)
            == {
                "fp32": "ok",
                "half": "error",
                "bfloat16": "error",
                "autocast-fp16": "ok",
                "autocast-bf16": "ok",
            }
        ),
    ),
    Step("fix", [*COMMAND, "fix", "whitening.py", "-p", "half"], lambda _, text: "4 changes, half passes" in text),
    Step(
        "plan",
        [*COMMAND, "plan", "t5_feed_forward.py", "-p", "half", "--save-plan", "plan.json"],
        lambda folder, _: bool(json.loads((folder / "plan.json").read_text())["keep_fp32"]),
    ),
    Step(
        "train",
        [*COMMAND, "scan", "train_classifier.py", "--train", "-p", "autocast-bf16", "--json", "scan.json"],
        lambda folder, _: statuses(folder) == {"fp32": "ok", "autocast-bf16": "ok"},
    ),
    Step(
        "plugin",
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_models.py"],
        lambda _, text: "2 passed" in text,
    ),
]


def supported() -> list[str]:
    """The oldest release of torch that is allowed, and the newest."""
    bounds = re.search(r'"torch>=([\d.]+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert bounds is not None
    return [f"{bounds[1]}.0", f"{bounds[2]}.{int(bounds[3]) - 1}.*"]


def attempt(name: str, command: list[str | Path], folder: Path, holds: Callable[[Path, str], bool]) -> bool:
    """Run a step; print how long it took, and what it printed if it failed."""
    started, text = time.monotonic(), ""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        text = done.stdout
        passed = done.returncode in (0, 1) and holds(folder, text)
    except subprocess.TimeoutExpired:
        text, passed = f"not done after {SECONDS} s", False
    except (OSError, ValueError, KeyError) as error:  # what should have been written
        text, passed = f"{text}\n{type(error).__name__}: {error}", False
    print(f"  {'ok    ' if passed else 'FAILED'} {name:8} {time.monotonic() - started:5.0f} s", flush=True)
    if not passed:
        print("\n".join(f"    {line}" for line in text.splitlines()[-30:]), flush=True)
    return passed


def check(version: str) -> bool:
    """Whether every step passes with a release of torch."""
    print(f"torch {version}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = folder / "environment" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
        install: list[str | Path] = [python, "-m", "pip", "install", "-q", f"torch=={version}", "numpy", "pytest", ROOT]
        if not attempt("install", install, folder, lambda *_: python.exists()):
            return False
        for example in (ROOT / "examples").glob("*.py"):
            (folder / example.name).write_bytes(example.read_bytes())
        (folder / "test_models.py").write_text(TEST)
        passed = [attempt(step.name, [python, *step.arguments], folder, step.holds) for step in STEPS]
        return all(passed)


if __name__ == "__main__":
    PASSED = [check(version) for version in sys.argv[1:] or supported()]
    sys.exit(not all(PASSED))
