"""Loading targets, and the messages for wrong calls: exit code 2, one or two sentences, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Call
from user_files import NET

from lowprec_check.engine.model.inputs import parse_inputs
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.errors import UsageError

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("tail", "attribute"),
    [
        ("model = Net().eval()\ninputs = torch.randn(1, 3)", ""),
        ("def model():\n    return Net()\ndef inputs():\n    return (torch.randn(1, 3), 2.0)", ""),
        ("inputs = {'x': torch.randn(1, 3), 'scale': 2.0}", ""),
        ("def make_model():\n    return Net()\ninputs = torch.randn(1, 3)", ""),
        ("def mine():\n    return Net()\ninputs = torch.randn(1, 3)", ":mine"),
        ("inputs = torch.randn(1, 3)", ":Net"),
        ("anything = Net()\ninputs = [torch.randn(1, 3)]", ""),
    ],
)
def test_forms_of_targets(write: Write, tail: str, attribute: str) -> None:
    target = load_target(f"{write(NET + tail)}{attribute}")
    with torch.no_grad():
        assert target.call()(*target.args, **target.kwargs).shape == (1, 2)
    assert target.source is not None
    assert "mymodel.py:" in target.source


def test_a_file_can_import_its_neighbors(write: Write) -> None:
    write(NET, "pieces/net.py")
    write(
        "from .net import Net\nimport sibling\nimport torch\nmodel = Net()\ninputs = torch.randn(1, 3)", "pieces/top.py"
    )
    top = write("ok = True", "pieces/sibling.py").with_name("top.py")
    assert load_target(str(top)).kwargs == {}


def test_a_file_in_a_package_can_use_relative_imports(write: Write) -> None:
    write("", "pack/__init__.py")
    write("", "pack/sub/__init__.py")
    write(NET, "pack/net.py")
    top = write("from ..net import Net\nimport torch\nmodel = Net()\ninputs = torch.randn(1, 3)", "pack/sub/top.py")
    assert type(load_target(str(top)).model).__name__ == "Net"


def test_target_as_dotted_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(NET + "inputs = torch.randn(1, 3)", "dotted_target.py")
    monkeypatch.syspath_prepend(str(path.parent))
    assert load_target("dotted_target:Net").name == "dotted_target:Net"


def test_inputs_from_shapes(write: Write) -> None:
    path = write(NET)
    assert load_target(str(path), ("5x3",)).args[0].shape == (5, 3)
    assert load_target(str(path), ("x=5x3",)).kwargs["x"].shape == (5, 3)
    one, two, three = parse_inputs(("1x2:int64", "2:bool,3x1"))
    assert (one.dtype, two.dtype, three.shape) == (torch.int64, torch.bool, (3, 1))


def test_torchvision_model_by_name() -> None:
    target = load_target("torchvision:resnet18", ("1x3x32x32",))
    assert not target.model.training
    with pytest.raises(UsageError, match="Did you mean resnet18"):
        load_target("torchvision:resnet81")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("def broken(:\n    pass", r"Syntax error at .*mymodel\.py:1", "def broken"),
        ("import torch\n\nx = 1 / 0", r"ZeroDivisionError at .*mymodel\.py:3: division by zero", "x = 1 / 0"),
        ("import nothing_of_that_name", "ModuleNotFoundError at .*mymodel", "import nothing"),
        ("import sys\nsys.exit('no')", r"SystemExit at .*mymodel\.py:2", "sys.exit"),
        ("x = 1", "defines no model", "Define `model`"),
        (NET + "class Other(Net):\n    pass", "defines several models", "mymodel.py:Other"),
        (NET, "defines no `inputs`", "inputs = torch.randn"),
        (NET + "model = 3\ninputs = 1", "has type int, not torch.nn.Module", "Give a model"),
        (NET + "def model():\n    return 3", "returned an object of type int, not", "Return the model"),
        (
            NET + "def model():\n    raise ValueError('bad weights')",
            r"ValueError at .*mymodel\.py:\d+: bad weights",
            "raise",
        ),
        (NET + "def inputs():\n    return 1 / 0", "ZeroDivisionError", "1 / 0"),
        (NET + "inputs = torch.randn(1, 3)\nloss = 'mse'", "`loss` in .* has type str, not a function", "rename it"),
    ],
)
def test_message_for_a_wrong_file(write: Write, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_target(str(write(text)))
    if hint:
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.py", "No such file: missing.py"),
        ("no_such_package_here:model", "No module named 'no_such_package_here'"),
        ("nonsense", "neither a Python file nor"),
        ("os:nothing", "has no attribute 'nothing'"),
        ("tests/", "tests/ is a folder, not a Python file"),
    ],
)
def test_wrong_targets_are_errors(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(spec)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_read(write: Write, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(_path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    path = write(NET)
    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(UsageError, match=rf"Cannot read .*mymodel\.py: {os.strerror(number)}"):
        load_target(str(path))


@pytest.mark.parametrize("spec", ["1x", "axb", "1x3:float99", "x=1,3"])
def test_wrong_shapes_are_errors(spec: str) -> None:
    with pytest.raises(UsageError, match="--inputs"):
        parse_inputs((spec,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.py"], "No such file"),
        (["{file}", "-p", "fp8"], "Unknown precision"),
        (["{file}", "--device", "toaster"], "Unknown device"),
        (["{file}", "--device", "mps"], "is not available"),
        (["{file}", "--json", "/no/such/folder/x.json"], "Cannot write"),
        (["{file}", "--select", "XX9"], "No diagnostic code starts with"),
        (["{file}", "--without-kernel", "aten.dot"], "names no kernel to run without"),
        (["{file}", "--inputs", "7x7"], "Check that the inputs fit the model"),
        (["{file}", "--budget", "soon"], "budget"),
    ],
)
def test_wrong_calls_exit_2_without_a_traceback(write: Write, options: list[str], message: str, call: Call) -> None:
    path = write(NET + "model = Net()\ninputs = torch.randn(1, 3)")
    done = call("scan", *(option.replace("{file}", str(path)) for option in options))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


SHADOWING = """
import jinja2, markupsafe, rich, tabulate
import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        import markdown_it, rich
        return super().forward(x) * rich.ONE * markupsafe.ONE * markdown_it.ONE
model = Model(4, 4).eval()
inputs = torch.ones(2, 4)
"""


@pytest.mark.slow
def test_files_beside_the_model_do_not_replace_modules_of_this_program(tmp_path: Path) -> None:
    """A scan in fresh interpreters, and a table whose scans fork."""
    for name in ("markupsafe", "jinja2", "rich", "tabulate", "markdown_it", "random", "click", "torch_helper"):
        (tmp_path / f"{name}.py").write_text("ONE = 1\nprint('imported', __name__)\n")
    (tmp_path / "model.py").write_text(SHADOWING)
    reports = [str(tmp_path / f"report.{suffix}") for suffix in ("html", "md", "xml", "sarif")]
    options = [option for report in reports for option in ("--report", report)]
    done = run_command(
        "scan", "model.py", "-p", "bfloat16", "--times", "off", "--isolation", "spawn", *options, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "bfloat16 passes (not timed)" in done.stdout
    assert "imported markupsafe" in done.stderr
    assert "imported random" not in done.stderr
    assert all(Path(report).stat().st_size for report in reports)
    done = run_command("compat", "model.py", "-p", "bfloat16", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 row, 0 could not be scanned" in done.stdout
    assert "imported random" not in done.stderr


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As the installed script runs it: the current folder is not on the module path."""
    code = "import sys; sys.path.remove(''); from lowprec_check.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_model_that_is_made_on_an_absent_device_gets_a_hint(write: Write, call: Call) -> None:
    path = write("import torch\nmodel = torch.nn.Linear(3, 3).cuda()\ninputs = torch.randn(1, 3)")
    done = call("scan", str(path), "--device", "cuda")
    assert done.returncode == 2
    assert "on the CPU: a scan moves them" in " ".join(done.stderr.split())
