"""What is wrong with a call is said before the target is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Call

LOADED = "the file was loaded"
TARGET = f"""
import sys
print({LOADED!r}, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(TARGET)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", ["scan", "plan", "fix"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--inputs", "foo"], "Cannot parse --inputs 'foo'"),
        (["--inputs", "1x3:float17"], "Cannot parse --inputs '1x3:float17'"),
        (["--inputs", "1x3,mask=1x3"], "with and without a name"),
        (["--weights", "none.pt"], "No such file: none.pt"),
        (["--weights", "folder"], "folder is a folder"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--without-kernel", "foo"], "names no kernel"),
    ],
)
def test_values_are_checked(command: str, options: list[str], said: str, folder: Path, call: Call) -> None:
    done = call(command, "model.py", *options, folder=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert LOADED not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scan", "model.py", "--report", "folder/none/page.html"], "Cannot write"),
        (["scan", "model.py", "--report", "folder"], "Cannot write"),
        (["scan", "model.py", "--report", "page.docx"], "Cannot tell the report format"),
        (["scan", "model.py", "--json", "folder"], "Cannot write"),
        (["scan", "model.py", "--save-plan", "folder"], "Cannot write"),
        (["scan", "model.py", "--baseline", "folder", "--update-baseline"], "Cannot write"),
        (["scan", "model.py", "--baseline", "none.json"], "Cannot read the baseline"),
        (["scan", "model.py", "--torch", "2.13"], "No device is named"),
        (["plan", "model.py", "--save-plan", "folder"], "Cannot write"),
        (["fix", "model.py", "--json", "folder"], "Cannot write"),
        (["fix", "model.py", "--report", "folder/none/page.html"], "Cannot write"),
        (["fix", "folder/none/model.py", "--apply"], "Cannot write"),
        (["compat", "model.py", "--report", "model.py"], "Cannot create"),
        (["compat", "model.py", "--report", "reports", "--device", "gpu"], "Unknown device"),
    ],
)
def test_files_to_write_are_checked(arguments: list[str], said: str, folder: Path, call: Call) -> None:
    done = call(*arguments, folder=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert LOADED not in done.stderr


@pytest.mark.parametrize(
    ("call_of_old", "new"),
    [
        ("plan model.py --inputs-from 2", "--batches"),
        ("plan model.py --save plan.json", "--save-plan"),
        ("plan model.py --budget 5", "--search-seconds"),
        ("fix model.py --budget 5", "--search-seconds"),
        ("report scan.json --output page.html", "--report"),
        ("diff old.json new.json --output page.html", "--report"),
        ("compat model.py --output reports", "--report"),
    ],
)
def test_an_option_of_another_name_is_said(call_of_old: str, new: str, folder: Path, call: Call) -> None:
    done = call(*call_of_old.split(), folder=folder)
    old = next(word for word in call_of_old.split() if word.startswith("--"))
    assert done.returncode == 2
    assert re.search(f"No such option:? '?{old}", done.stderr)
    assert f"Use {new}." in done.stderr
    assert LOADED not in done.stderr
