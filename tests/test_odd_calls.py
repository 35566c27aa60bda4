"""Every odd call ends in a sentence and the documented exit code, never in a traceback of this program."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Call, Done
from odd_calls import CALLS, OddCall, make_files


@pytest.mark.slow
@pytest.mark.parametrize("odd", CALLS, ids=[f"{number}-{odd.name}" for number, odd in enumerate(CALLS)])
def test_odd_call(odd: OddCall, tmp_path: Path, call: Call) -> None:
    make_files(tmp_path, odd.files)
    arguments = shlex.split(odd.arguments)
    done = (
        in_own_process(odd.own_process, arguments, tmp_path) if odd.own_process else call(*arguments, folder=tmp_path)
    )
    printed = done.stdout + done.stderr
    assert done.returncode == odd.exit_code, printed
    assert odd.shows in " ".join(printed.split()), printed
    assert "Traceback" not in printed
    assert all((tmp_path / name).stat().st_size for name in odd.saves)
    if odd.exit_code == 2 and odd.own_process != "plain":
        assert done.stderr.strip()
        assert not done.stdout or odd.own_process


def in_own_process(how: str, arguments: list[str], folder: Path) -> Done:
    """Run the command with another standard output, in ASCII, in no folder, or under a limit of file sizes."""
    options: dict[str, Any] = {"cwd": folder, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    prepare: dict[str, Callable[[], object]] = {
        "closed": lambda: os.close(1),
        "limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    }
    if how == "ascii":
        environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    if how in ("full", "read-only"):
        options["stdout"] = os.open("/dev/full", os.O_WRONLY if how == "full" else os.O_RDONLY)
    if how == "gone":
        reader, options["stdout"] = os.pipe()
        os.close(reader)
    if how == "nowhere":
        options["cwd"] = folder / "removed"
        options["cwd"].mkdir()
        prepare["nowhere"] = options["cwd"].rmdir
    code = "from lowprec_check.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, env=environment, preexec_fn=prepare.get(how), **options
    )
    return Done(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())
