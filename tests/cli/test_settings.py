"""Settings in pyproject.toml, the groups of options in the help, and shell completion."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from conftest import Call

from lowprec_check import ScanResult
from lowprec_check.cli.app import app
from lowprec_check.cli.options import OTHER_COMMANDS
from lowprec_check.schema.options import OUTPUT, RUN, THOROUGH, WHERE

MODEL = "import torch\nmodel = torch.nn.Linear(3, 2).eval()\ninputs = torch.ones(4, 3)\n"


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """A project with a model and these settings."""

    def write(settings: str) -> Path:
        (tmp_path / "pyproject.toml").write_text(settings, encoding="utf-8")
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / "model.py").write_text(MODEL, encoding="utf-8")
        return tmp_path

    return write


SETTINGS = """
[tool.lowprec-check]
precision = ["half", "amp-fp16"]
device = "cpu"
quiet = true

[tool.lowprec-check.scan]
json = "reports/scan.json"
fail-on = "never"
tolerance = 1e-9

[tool.lowprec-check.catalog.gaps]
dtype = "bf16"
"""


@pytest.mark.slow
def test_settings_are_defaults_relative_to_their_file(project: Callable[[str], Path], call: Call) -> None:
    root = project(SETTINGS)
    (root / "reports").mkdir()
    done = call("scan", "model.py", folder=root / "models")
    assert done.returncode == 0, done.stderr
    result = ScanResult.load(root / "reports" / "scan.json")
    assert [run.precision for run in result.runs if run.base is None] == ["fp32", "half", "autocast-fp16"]
    assert result.options["tolerance"] == 1e-9
    done = call("scan", "model.py", "-p", "half", "--tolerance", "0.1", folder=root / "models")
    assert [run.status for run in ScanResult.load(root / "reports" / "scan.json").runs] == ["ok", "ok"]
    done = call("--no-settings", "scan", "model.py", "-p", "bf16", "-q", folder=root / "models")
    assert [run.precision for run in ScanResult.load(root / "reports" / "scan.json").runs] == ["fp32", "half"]


def test_settings_of_nested_commands(project: Callable[[str], Path], call: Call) -> None:
    root = project(SETTINGS)
    with_settings, as_asked, without = (
        call(*options, folder=root).stdout
        for options in (
            ("catalog", "gaps"),
            ("catalog", "gaps", "--dtype", "half"),
            ("--no-settings", "catalog", "gaps", "--dtype", "bf16"),
        )
    )
    assert with_settings == without
    assert with_settings != as_asked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[tool.lowprec-check]\nprecison = 'half'", "unknown key 'precison'.\nDid you mean precision?"),
        ("[tool.lowprec-check.scna]\nbudget = 1", "unknown key 'scna'.\nDid you mean scan?"),
        ("[tool.lowprec-check.scan]\nengine = 'dask'", "[tool.lowprec-check.scan] has the unknown key 'engine'"),
        ("[tool.lowprec-check.scan]\nbudget = 'soon'", "[tool.lowprec-check.scan] budget: "),
        ("[tool.lowprec-check.scan]\ndevice = ['cpu']", "[tool.lowprec-check.scan] device: one value is expected"),
        ("[tool.lowprec-check]\nerrors = 'all'", "[tool.lowprec-check] errors: "),
        ("[tool]\nlowprec-check = 3", "is not a table"),
        ("[tool.lowprec-check", "pyproject.toml: "),
    ],
)
def test_wrong_settings(project: Callable[[str], Path], call: Call, settings: str, message: str) -> None:
    done = call("env", folder=project(settings))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert call("--no-settings", "explain", folder=project(settings)).returncode == 0


def test_a_project_without_settings(project: Callable[[str], Path], call: Call) -> None:
    assert call("explain", folder=project("[project]\nname = 'x'\n")).returncode == 0


# -- The help: options in groups, the less usual ones in --help-all

GROUPS = [RUN, WHERE, THOROUGH, OUTPUT]


def options_by_group(shown: str) -> dict[str, list[str]]:
    """The long options that a help lists under each heading."""
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        heading, option = re.match(r"(\w[\w ]+):$", line), re.match(r"  (?:-\w, )?(--[\w-]+)", line)
        if heading is not None:
            found[heading[1]] = []
        elif option is not None:
            found[[*found][-1]].append(option[1])
    found.pop("Arguments")
    return found


@pytest.fixture
def narrow(call: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: call(*arguments).stdout


def test_the_help_of_scan_fits_two_screens(narrow: Callable[..., str]) -> None:
    lines = narrow("scan", "--help").splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    assert lines[-1].endswith("scan --help-all")
    listed = options_by_group("\n".join(lines))
    assert list(listed) == GROUPS
    assert sum(map(len, listed.values())) <= 25


@pytest.mark.parametrize("command", ["scan", "plan", "fix"])
def test_every_option_is_in_one_group_of_the_whole_help(command: str, narrow: Callable[..., str]) -> None:
    short, whole = (options_by_group(narrow(command, option)) for option in ("--help", "--help-all"))
    parameters = app.commands[command].params
    flags = [parameter.opts for parameter in parameters if parameter.param_type_name == "option"]
    names = ["--help", *(next(flag for flag in opts if flag.startswith("--")) for opts in flags)]
    names += [other.option for other in OTHER_COMMANDS.get(command, [])]
    assert sorted(itertools.chain(*whole.values())) == sorted(names)
    assert set(whole) <= {*GROUPS}
    for group, options in short.items():
        assert set(options) <= set(whole[group])
    assert "--seed" not in itertools.chain(*short.values())


def test_details_are_in_the_whole_help_only(narrow: Callable[..., str]) -> None:
    short, whole = (" ".join(narrow("scan", option).split()) for option in ("--help", "--help-all"))
    for words in (
        "int8-dynamic (torchao",
        "Repeatable or comma-separated",
        "LP205 reports",
        "All runs are called in turns",
    ):
        assert words not in short, words
        assert words in whole, words
    assert "All options:" not in whole


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lowprec-check sc", ["scan"]),
        ("lowprec-check scan --prec", ["--precision"]),
        ("lowprec-check scan --memory-f", ["--memory-format"]),
        ("lowprec-check scan model.py -p auto", ["autocast-bf16", "autocast-fp16"]),
        ("lowprec-check scan model.py --device x", ["xpu"]),
        ("lowprec-check explain LP10", ["LP101", "LP102"]),
        ("lowprec-check report scan.json --format ju", ["junit"]),
        ("lowprec-check op dot --device x", ["xpu"]),
    ],
)
def test_completion_in_bash(line: str, expected: list[str]) -> None:
    words = line.split(" ")
    environment = {"_LOWPREC_CHECK_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv[0] = 'lowprec-check'; from lowprec_check.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert {f"plain,{word}" for word in expected} <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("command", ["scan", "compat", "report"])
def test_completion_of_files_is_left_to_the_shell(command: str) -> None:
    context = click.Context(app)
    arguments = [part for part in app.get_command(context, command).params if part.param_type_name == "argument"]
    assert [item.type for item in arguments[0].shell_complete(context, "my")] == ["file"]


def test_a_key_of_the_table_applies_where_its_value_is_accepted(project: Callable[[str], Path], call: Call) -> None:
    """``json`` is a file for scan and a flag for env; ``plan`` is an option of scan and a command."""
    root = project("[tool.lowprec-check]\njson = 'scan.json'\nplan = false\nprecision = ['half']\n")
    done = call("env", folder=root)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("{")
    root = project("[tool.lowprec-check]\njson = true\n")
    assert call("env", folder=root).stdout.startswith("{")
