"""The recommended code runs as it is printed, in an interpreter that has only the user's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import Call
from helpers import screen_of
from shared_result import shared_result
from user_files import NET

from lowprec_check import ScanResult
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.model_info import describe_target
from lowprec_check.features.printed_code import run as printed_code
from lowprec_check.features.printed_code.run import CodeRequest, executed
from lowprec_check.schema.measures import CodeTrial
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run

SEEDED = f"{NET}torch.manual_seed(0)\n"
MODULE = f"{SEEDED}model, inputs = Net().eval(), torch.randn(4, 3)\n"
FUNCTIONS = f"{SEEDED}def model():\n    return Net().eval()\ndef inputs():\n    return torch.randn(4, 3)\n"
SCRIPT = f"""{SEEDED}
net = Net().eval()
def run(batch):
    return net(batch, scale=2.0) if batch is None else net(batch)
print(run(torch.randn(4, 3)).sum())
raise SystemExit("the script is left at the call")
"""
CALLED_AFTER = f"{MODULE}with torch.no_grad():\n    print(model(inputs))\nraise SystemExit('not imported')\n"


def code_of(path: str, precision: str) -> tuple[CodeRequest, str]:
    """The request to execute the code of a precision, and the code."""
    target = load_target(path)
    info = describe_target(target, Run(precision="fp32", device="cpu", status="ok"))
    code, in_fp32 = (snippet(RunKey(name), info) for name in (precision, "fp32"))
    load = (lambda: load_target(path)) if target.namespace is not None else None
    return CodeRequest(code, in_fp32, 0, 1e-2, folder=target.folder, load=load), code


@pytest.mark.parametrize(
    ("name", "content", "first"),
    [
        ("plain_net.py", MODULE, "from plain_net import model, inputs"),
        ("made_net.py", FUNCTIONS, "from made_net import model, inputs"),
        ("parts_of_net/inner.py", MODULE, "from parts_of_net.inner import model, inputs"),
        ("odd-name.py", MODULE, "# in odd-name.py, at its end:"),
        ("script_net.py", SCRIPT, "# in script_net.py, line 14, where `net`, made in line 12, is called:"),
        ("called_net.py", CALLED_AFTER, "# in called_net.py, after line 11:"),
    ],
)
def test_code_runs_as_printed(
    name: str, content: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.parent != tmp_path:
        (path.parent / "__init__.py").touch()
    path.write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    request, code = code_of(name, "half")
    assert first in code.splitlines()[:2]
    assert len(code.splitlines()) <= 7
    assert ("import torch" in code) == (not code.startswith("# in ")), "the file has imported it"
    trial = executed(request)
    assert (trial.status, trial.reason) == ("ran", "")
    assert trial.rel_l2 is not None
    assert 0 < trial.rel_l2 < 1e-2


def test_code_that_fails_or_does_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lost_net.py").write_text(MODULE)
    request, code = code_of(str(tmp_path / "lost_net.py"), "half")
    assert executed(request._replace(code=code.replace("lost_net", "no_net"))).reason.startswith("ModuleNotFoundError")
    other = executed(request._replace(code=f"{code}\noutput = 2 * output"))
    assert other.status == "differs"
    assert "above the tolerance of 0.01" in other.reason
    monkeypatch.delitem(sys.modules, "lost_net")  # which the code has cast
    assert executed(request._replace(code=f"{code}\noutput = output / 0")).status == "differs"


def test_a_process_that_was_copied_before_the_file_was_loaded_executes_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "copied_net.py").write_text(MODULE)
    feature = printed_code.PrintedCodeFeature()
    feature.before_loading()
    request, _ = code_of(str(tmp_path / "copied_net.py"), "half")
    check = "import sys\nassert 'copied_net' not in sys.modules\n"
    worker = feature._worker
    assert worker is not None
    try:
        trial = printed_code._answer(worker, request._replace(in_fp32=f"{check}{request.in_fp32}"), 60)
    finally:
        worker.end()
    assert (trial.status, trial.reason) == ("ran", "")


@pytest.mark.parametrize(
    ("name", "content", "loads"),
    [
        ("once_net.py", MODULE, 1),
        ("odd-once.py", MODULE, 1),
        ("package_of_net/once.py", MODULE, 2),
    ],
)
def test_a_file_runs_once_where_the_code_finds_it_by_its_name(
    name: str, content: str, loads: int, tmp_path: Path, call: Call
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.parent != tmp_path:
        (path.parent / "__init__.py").touch()
    path.write_text(f"{content}with open({str(tmp_path / 'loads')!r}, 'a') as file:\n    file.write('x')\n")
    options = ("-q", "-p", "bfloat16", "--times", "off", "--isolation", "fork", "--json", "scan.json")
    call("scan", name, *options, folder=tmp_path)
    trial = ScanResult.load(tmp_path / "scan.json").code_trial
    assert trial is not None
    assert (trial.status, trial.reason) == ("ran", "")
    assert (tmp_path / "loads").read_text() == "x" * loads


@pytest.mark.slow
def test_a_scan_executes_its_code(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed_code, "METHOD", "spawn")
    path = tmp_path / "whole_net.py"
    path.write_text(FUNCTIONS)
    call("scan", path.name, "-q", "-p", "bfloat16", "--times", "off", "--json", "scan.json", folder=tmp_path)
    result = ScanResult.load(tmp_path / "scan.json")
    assert result.code_trial is not None
    assert result.recommendation is not None
    assert (result.code_trial.status, result.code_trial.code) == ("ran", result.recommendation.code)
    program = f"{result.recommendation.code}\nprint(output.dtype)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(torch.bfloat16)), done.stderr


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("ran", "This code ran in a process of its own."),
        ("failed", "This code fails in a process of its own: why."),
        ("differs", "This code does otherwise in a process of its own: why."),
        ("not run", "This code was not executed: why."),
    ],
)
def test_reports_say_whether_code_ran(status: str, said: str) -> None:
    result = shared_result()
    assert result.recommendation is not None
    trial = CodeTrial(code=result.recommendation.code, status=status, reason="why")  # type: ignore[arg-type]
    shown = screen_of(msgspec.structs.replace(result, code_trial=trial), verbose=True)
    assert said in " ".join(shown.split())
