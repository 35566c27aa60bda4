"""Features: the core needs none of them, a new one is one folder, and the way through the core is short."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from types import FrameType
from typing import get_args

import pytest
import torch
from helpers import scan_here
from torch import Tensor, nn

from lowprec_check.core import messages
from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.target import Target
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lowprec_check"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
[INDEPENDENCE] = [contract for contract in CONTRACTS if contract["id"] == "features"]
USED_BY: dict[str, list[str]] = {}
"""By feature, those that a contract allows to import it."""
for arrow in INDEPENDENCE["ignore_imports"]:
    user, used = (name.split(".")[2] for name in arrow.split(" -> "))
    USED_BY.setdefault(used, []).append(user)
FEATURES = sorted(path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").exists())


SERVER = """
import contextlib, os, sys
import torch  # once, not in the process of each scan

for folder in map(str.strip, sys.stdin):
    fork = os.fork()
    if fork == 0:
        os.chdir(folder)
        os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, folder)
        import lowprec_check
        from lowprec_check.cli.main import main
        assert lowprec_check.__file__.startswith(folder)
        with contextlib.suppress(ImportError):
            from lowprec_check.features.printed_code import run
            run.METHOD = "fork"
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
"""Scans with the package in the folder of each line, in a fork."""


@pytest.fixture(scope="module")
def table_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """The table of runs that the package in a folder prints."""
    # As many further inputs are tried as there is time for.
    options = ("scan", str(ROOT / "examples" / "whitening.py"), "--times", "off", "--further-inputs", "0")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "100"}
    empty = tmp_path_factory.mktemp("server")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *options], cwd=empty, env=environment, text=True, stdin=PIPE, stdout=PIPE
    ) as server:

        def table(folder: Path) -> str:
            assert server.stdin is not None
            assert server.stdout is not None
            print(folder, file=server.stdin, flush=True)
            code = server.stdout.readline()
            printed = (folder / "printed").read_text(encoding="utf-8")
            assert code == "0\n", printed
            assert "failed:" not in printed
            found = re.search(r"^(precision .+?)\n\n", printed, re.MULTILINE | re.DOTALL)
            assert found is not None, printed
            return found[1]

        yield table
        server.communicate()


def copy_package(folder: Path) -> None:
    """Copy the package and its catalog, with what is compiled of it."""
    shutil.copytree(PACKAGE, folder / "lowprec_check", ignore=shutil.ignore_patterns("*-pytest-*.pyc"))
    shutil.copytree(ROOT / "catalog", folder / "catalog", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def whole_table(table_of: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of the whole package."""
    folder = tmp_path_factory.mktemp("whole")
    copy_package(folder)
    return table_of(folder)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_is_the_same_without_a_feature(
    feature: str, tmp_path: Path, table_of: Callable[[Path], str], whole_table: str
) -> None:
    copy_package(tmp_path)
    for removed in (feature, *USED_BY.get(feature, ())):
        shutil.rmtree(tmp_path / "lowprec_check" / "features" / removed)
    assert table_of(tmp_path) == whole_table


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_says_what_it_adds_and_by_which_hooks(feature: str) -> None:
    text = (PACKAGE / "features" / feature / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 12
    run = PACKAGE / "features" / feature / "run.py"
    code = run.read_text(encoding="utf-8") if run.exists() else ""
    hooks = set(re.findall(r"\n    def (\w+)\(self, (?:source|runs|batches|options|task|explained)", code)) | (
        {"measurements"} if "measurements = (" in code else set()
    )
    parts = PARTS & {path.stem for path in (PACKAGE / "features" / feature).iterdir()}
    listed = re.findall(r"^- (`.+?):", text, re.MULTILINE)
    assert {name.strip("`") for names in listed for name in names.split(", ")} == hooks & set(HOOKS) | parts


HOOKS = (
    *("mode", "measurements", "observer", "after_explanation", "after_reference", "beside", "after_run", "timed"),
    "after_runs",
)
"""The hooks of a feature, in the order of a scan."""

PARTS = {"rules", "further_backends", "measures", "statements", "advice", "report", "diff", "command"}
"""The other modules of a feature that are found by their names."""


TOY = """
from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.trace.observers import OpObserver


class Sizes(OpObserver):
    def after(self, call, row, outputs):
        row.toy_elements = sum(out.numel() for out in outputs)


def count(part):
    part.report.add(notes=[*part.report.run.notes, f"toy saw {len(part.outputs)} outputs"])


class Toy(Feature):
    place = 99
    measurements = (Measurement(99, "the toy", count),)

    def observer(self, task, allowed):
        return lambda observed: Sizes()

    def after_runs(self, batches, result, options):
        import msgspec

        model = msgspec.structs.replace(result.model, notes=[*result.model.notes, f"toy saw {len(result.runs)} runs"])
        return msgspec.structs.replace(result, model=model)


TOY = Toy()
"""

TOY_PARTS = {
    "rules.py": """
from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.schema.statements import plain


@rule("LP999", "toy", "note")
def toy(result):
    yield Finding(plain("the toy is a toy"))
""",
    "statements.py": """
from lowprec_check.analysis.statements.kinds import per_scan
from lowprec_check.schema.statements import plain


@per_scan("toy", "inputs", after="scope")
def toy(result):
    yield plain("with a toy")
""",
    "report.py": """
from lowprec_check.report.blocks import Column, Say
from lowprec_check.report.feature_parts import RunColumn, Section

TOYS = RunColumn("output error", Column("toys"), lambda run, result: "3 toys")
TOY = Section("causes", lambda result, said: [Say("A toy is beside the scan.")])
""",
}


def test_a_feature_is_one_folder_and_a_quantity_of_op_calls_one_more_line(tmp_path: Path) -> None:
    """A new folder is all that a new measurement takes, with what is found, said and shown of it.

    A saved quantity of op calls is a field besides.
    """
    copy_package(tmp_path)
    folder = tmp_path / "lowprec_check" / "features" / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "run.py").write_text(TOY)
    for part, text in TOY_PARTS.items():
        (folder / part).write_text(text)
    op_calls = tmp_path / "lowprec_check" / "schema" / "op_calls.py"
    text = op_calls.read_text(encoding="utf-8")
    field = "    nth: int = 0\n"
    assert text.count(field) == 1
    op_calls.write_text(text.replace(field, "    toy_elements: int = 0\n" + field), encoding="utf-8")
    code = "import torch, lowprec_check\nmodel, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)\n"
    code += "result = lowprec_check.scan(model, x, precisions='bfloat16', times='off', plan=False, isolation='none')\n"
    code += "print(lowprec_check.__file__, result.runs[1].notes, result.model.notes)\n"
    code += "print([d.code for d in result.diagnostics], [s.kind for s in result.statements])\n"
    code += "from lowprec_check.report.registry import FORMATS\nprint(FORMATS.get('text').render(result))\n"
    code += "saved = lowprec_check.ScanResult.from_json(result.to_json())\n"
    code += "print('elements', saved.runs[1].op_calls.toy_elements)\n"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert "toy saw 3 outputs" in done.stdout
    assert "toy saw 2 runs" in done.stdout
    assert "'LP999'" in done.stdout
    assert "'scope', 'toy'" in done.stdout
    assert "error  toys" in done.stdout
    assert "A toy is beside the scan." in done.stdout
    assert re.search(r"elements \[.*\b8\b.*\]", done.stdout), done.stdout


# -- How far it is from a scan to the model, and how little is sent between


MOST_CORE_LINES, MOST_CORE_FILES = 8_000, 40


def test_the_core_is_small_enough_to_be_read() -> None:
    files = list((PACKAGE / "core").rglob("*.py"))
    assert len(files) <= MOST_CORE_FILES
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_CORE_LINES


MOST_FRAMES, MOST_MESSAGES, MOST_TYPES = 16, 8, 7


def test_few_frames_lie_between_a_scan_and_the_forward_of_the_user(tmp_path: Path) -> None:
    log = tmp_path / "frames"

    class Logs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            names = [Path(frame.filename).name + ":" + frame.name for frame in traceback.extract_stack()]
            with log.open("a", encoding="utf-8") as file:  # a scan restores what the model changes
                file.write(" ".join(names) + "\n")
            return super().forward(x)

    scan_here(Logs(4, 4).eval(), torch.ones(2, 4), precisions="bfloat16", plan=False)
    frames = log.read_text(encoding="utf-8").splitlines()[0].split()
    start = len(frames) - 1 - frames[::-1].index("scan.py:scan")
    assert len(frames) - start - 2 <= MOST_FRAMES, frames[start:]


def test_few_kinds_of_messages_are_sent() -> None:
    assert len(get_args(messages.TaskMessage)) <= MOST_MESSAGES


IN_A_SCAN = ("lowprec_check.core.", "lowprec_check.engine.")
OF_A_RUN = {*Run.__struct_fields__, "run"}


def repeats_a_run(kind: type) -> bool:
    """Whether it is a type of values with at least two fields that a saved run has, too."""
    fields = getattr(kind, "__struct_fields__", getattr(kind, "_fields", getattr(kind, "__dataclass_fields__", ())))
    return kind.__module__.startswith("lowprec_check.") and len(OF_A_RUN.intersection(fields)) >= 2


def test_few_types_lead_from_the_options_to_a_run() -> None:
    seen: set[type] = set()

    def note(frame: FrameType, event: str, returned: object) -> None:
        if event in ("call", "return") and frame.f_globals.get("__name__", "").startswith(IN_A_SCAN):
            seen.update(map(type, (*frame.f_locals.values(), returned)))

    sys.setprofile(note)
    try:
        scan_here(nn.Linear(4, 4).eval(), torch.ones(2, 4), precisions="half", plan=False)
    finally:
        sys.setprofile(None)
    # What is scanned, and all runs together, are no types of a run.
    types = {kind for kind in seen if repeats_a_run(kind)} - {Target, ModelInfo, ScanResult}
    assert {Run, RunKey, RunTask} <= types
    assert len(types) <= MOST_TYPES, sorted(kind.__name__ for kind in types)
