"""Runs the command in a process of its own, under odd circumstances."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT = 20_000
"""Bytes of a file under the limit of file sizes."""
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Needed under such a limit: Python before 3.12.8 keeps a partly written .pyc (gh-126606), and later imports fail."""


class Ended(NamedTuple):
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_command(how: str, arguments: list[str], folder: Path) -> Ended:
    """Run the command in ``folder``: ``plain``; in ``ascii``; with standard output ``closed``, ``full``, ``read-only``,
    or ``gone`` with its reader; under a ``limit`` of file sizes; or ``nowhere``, in a folder that was removed.
    """
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    prepare: dict[str, Callable[[], object]] = {
        "closed": lambda: os.close(1),
        "limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    }
    if how == "limit":
        environment |= NO_BYTECODE
    if how == "ascii":
        environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    if how in ("full", "read-only"):
        options["stdout"] = os.open("/dev/full", os.O_WRONLY if how == "full" else os.O_RDONLY)
    if how == "gone":
        reader, options["stdout"] = os.pipe()
        os.close(reader)
    if how == "nowhere":
        folder = folder / "removed"
        folder.mkdir()
        prepare["nowhere"] = folder.rmdir
    code = "from lowprec_check.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        preexec_fn=prepare.get(how),
        check=False,
        timeout=300,
        **options,
    )
    if options["stdout"] != subprocess.PIPE:
        os.close(options["stdout"])
    return Ended(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())
