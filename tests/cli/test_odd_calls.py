"""Every odd call ends in a sentence and the documented exit code, never in a traceback of this program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import Call
from odd_calls import CALLS, OddCall, make_files
from odd_processes import run_command


@pytest.mark.slow
@pytest.mark.parametrize("odd", CALLS, ids=[f"{number}-{odd.name}" for number, odd in enumerate(CALLS)])
def test_odd_call(odd: OddCall, tmp_path: Path, call: Call) -> None:
    make_files(tmp_path, odd.files)
    arguments = shlex.split(odd.arguments)
    done = run_command(odd.own_process, arguments, tmp_path) if odd.own_process else call(*arguments, folder=tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode == odd.exit_code, printed
    assert odd.shows in " ".join(printed.split()), printed
    assert "Traceback" not in printed
    assert all((tmp_path / name).stat().st_size for name in odd.saves)
    if odd.exit_code == 2 and odd.own_process != "plain":
        assert done.stderr.strip()
        assert not done.stdout or odd.own_process
