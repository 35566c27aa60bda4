"""Texts that are not ours (messages, file names, module names) may hold anything and prevent nothing."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from conftest import Call, call_process
from helpers import run
from hypothesis import given
from hypothesis import strategies as st
from shared_result import shared_result
from torch import Tensor, nn

from lowprec_check.analysis.baseline import fingerprint
from lowprec_check.compat.scan_process import Request, failed_row, read_list, request_of, with_slugs
from lowprec_check.engine.model.user_code import call_user_code
from lowprec_check.errors import (
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    UsageError,
    encodable,
    first_line,
    message_of,
    traceback_of,
    type_name,
)
from lowprec_check.schema.base import encode
from lowprec_check.schema.matrix import Matrix, load, save
from lowprec_check.schema.scan_result import Diagnostic, ScanResult

ANY_TEXT = st.text(st.integers(0, sys.maxunicode).map(chr), max_size=20)
"""Lone surrogates included."""


class Hostile(Exception):
    """Calls ``action`` when it is converted to a text."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def __str__(self) -> str:
        return self.action()  # type: ignore[return-value]


class Text(str):
    """A subclass of ``str`` whose own methods fail."""

    __slots__ = ()
    __len__ = __getitem__ = encode = __format__ = __add__ = None  # type: ignore[assignment]


def raising(error: BaseException) -> Hostile:
    def fail() -> str:
        raise error

    return Hostile(fail)


def recurse() -> str:
    return recurse()


# -- the functions


@given(ANY_TEXT)
def test_any_text_becomes_encodable(text: str) -> None:
    assert encodable(text).encode().decode() == encodable(text)
    assert encodable(encodable(text)) == encodable(text)
    assert not any("\ud800" <= character <= "\udfff" for character in encodable(text))


@given(st.text(max_size=50))
def test_valid_text_is_unchanged(text: str) -> None:
    assert encodable(text) == text == message_of(ValueError(text))


@given(ANY_TEXT, st.integers(0, 3 * LONGEST_MESSAGE))
def test_a_message_is_encodable_and_short(text: str, times: int) -> None:
    message = message_of(ValueError(text * times))
    assert len(message.encode(errors="strict").decode()) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raising(ValueError("no")), "<Hostile, whose str() raises ValueError>"),
        (raising(SystemExit(3)), "<Hostile, whose str() raises SystemExit>"),
        (raising(raising(ValueError())), "<Hostile, whose str() raises Hostile>"),
        (Hostile(recurse), "<Hostile, whose str() raises RecursionError>"),
        (Hostile(lambda: 3), "<Hostile, whose str() raises TypeError>"),
        (Hostile(lambda: Text("a\udc80b")), "a\\udc80b"),
        (OSError(2, "No such file", os.fsdecode(b"m\xff.bin")), "[Errno 2] No such file: 'm\\udcff.bin'"),
    ],
)
def test_no_exception_prevents_its_message(error: BaseException, message: str) -> None:
    assert type(message_of(error)) is str
    assert message_of(error) == message


@pytest.mark.parametrize("line", ["x", "x\n"])
def test_a_huge_message_is_not_copied(line: str) -> None:
    text = line * (100_000_000 // len(line))  # not as a parameter, or each fork of the test process has it too
    error = ValueError(text)
    tracemalloc.start()
    message = message_of(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(message), message.count("…"), message[-1]) == (LONGEST_MESSAGE, 1, text[-1])
    assert peak < 100_000


def test_a_metaclass_does_not_choose_the_name() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:
            raise ValueError

    assert type_name(Meta("Real", (Exception,), {})()) == "Real"


@pytest.mark.parametrize("error", [raising(SystemExit()), ValueError("\udc80"), ValueError("x" * 100_000)])
def test_a_traceback_is_encodable_and_short(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    text = traceback_of(caught.value)
    assert len(text.encode()) <= LONGEST_TRACEBACK + 10
    assert text.startswith("Traceback")


@given(st.dictionaries(ANY_TEXT, ANY_TEXT | st.lists(ANY_TEXT)))
def test_any_text_is_saved_and_read(value: dict[str, object]) -> None:
    read = msgspec.json.decode(encode(value))
    assert set(read) == set(map(encodable, value))


# -- models


class Raises(nn.Module):
    """Raises ``error`` in half only."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(4, 4), error

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.half:
            raise self.error
        return self.linear(x)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("\udc80 \udcff"), "\\udc80 \\udcff"),
        (raising(KeyError()), "<Hostile, whose str() raises KeyError>"),
        (ValueError("x" * 1_000_000), f"{'x' * (LONGEST_MESSAGE // 2 - 1)}…{'x' * (LONGEST_MESSAGE // 2)}"),
    ],
)
def test_the_exception_of_a_model_is_its_status(error: Exception, message: str) -> None:
    plain, found = run(Raises(error), (torch.ones(1, 4),), "half")
    assert plain.status == "error"
    assert plain.exception is not None
    assert found.stopped_by is not None
    assert (plain.exception.message, found.stopped_by.message) == (message, message)
    assert (plain.exception.type, plain.failed_call) == (type(error).__name__, None)


FILE = """
import torch
from torch import nn

class Odd(Exception):
    def __str__(self):
        raise OSError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a\\udc80", nn.Linear(4, 4))

    def forward(self, x):
        y = self._modules["a\\udc80"](x)
        if ERROR is not None and y.dtype in DTYPES:
            raise ERROR
        return y

DTYPES, ERROR = (torch.half,), None
model, inputs = Net().eval(), torch.randn(2, 4)
"""
NAME = os.fsdecode(b"m\xff.py")
SHOWN = "m\\udcff.py"


def edited(**values: str) -> str:
    return FILE + "".join(f"{name} = {value}\n" for name, value in values.items())


@pytest.mark.parametrize(
    ("error", "message"), [("ValueError('\\udc80')", "ValueError: \\udc80"), ("Odd()", "Odd: <Odd, whose")]
)
def test_a_model_that_fails_everywhere_is_the_users_to_fix(
    error: str, message: str, write: Callable[..., Path], call: Call
) -> None:
    path = write(edited(ERROR=error, DTYPES="(torch.float32,)"))
    done = call("scan", path, "-p", "half", "--times", "off", "--no-plan")
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("text", ["raise Odd()", "raise ValueError('\\udc80')", "raise ValueError('x' * 10**8)"])
def test_a_file_that_cannot_be_loaded_is_the_users_to_fix(text: str, write: Callable[..., Path], call: Call) -> None:
    done = call("scan", write(f"{FILE}\n{text}\n"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 3 * LONGEST_MESSAGE


def test_a_syntax_error_with_odd_attributes_is_the_users_to_fix() -> None:
    def fail() -> None:
        raise SyntaxError(raising(ValueError()), ("\udc80.py", 3, 1, "x" * 100_000))

    with pytest.raises(UsageError, match="whose str") as caught:
        call_user_code("model", fail)
    assert "\\udc80.py:3" in caught.value.message
    assert len(str(caught.value).encode()) < 2 * LONGEST_MESSAGE + 100


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in a file whose name is not UTF-8, and its scan in all formats."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / NAME).write_text(edited(ERROR="OSError(2, '\\udc80')"), encoding="utf-8")
    reports = [word for suffix in ("md", "html", "sarif", "xml") for word in ("--report", str(folder / f"r.{suffix}"))]
    done = call_process(
        "scan",
        folder / NAME,
        "-p",
        "half,bfloat16",
        "--times",
        "off",
        "--json",
        folder / "s.json",
        *reports,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "m\\udcff.py" in done.stdout
    return folder


@pytest.mark.slow
def test_a_file_name_that_is_not_utf8_is_scanned_and_saved(scanned: Path) -> None:
    result = ScanResult.load(scanned / "s.json")
    assert result.target == str(scanned / SHOWN)
    assert [run.status for run in result.runs] == ["ok", "error", "ok"]
    half = result.run("half")
    assert half.exception is not None
    assert (half.exception.message, half.exception.source) == ("[Errno 2] \\udc80", f"{SHOWN}:17")
    assert half.stopped_by is not None
    assert half.stopped_by.message == "[Errno 2] \\udc80"
    assert result.run("bfloat16").complete
    assert "a\\udc80" in result.run("bfloat16").called_modules


@pytest.mark.slow
def test_every_report_of_it_is_valid(scanned: Path, call: Call) -> None:
    assert SHOWN in (scanned / "r.md").read_text(encoding="utf-8").replace("\\\\", "\\")
    assert SHOWN in (scanned / "r.html").read_text(encoding="utf-8")
    assert json.loads((scanned / "r.sarif").read_text(encoding="utf-8"))["runs"]
    assert ElementTree.parse(scanned / "r.xml").getroot().tag == "testsuites"
    assert call("report", scanned / "s.json", "-f", "json").returncode == 0
    assert call("diff", scanned / "s.json", scanned / "s.json", "-f", "md").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_it_is_printed_on_any_stream(scanned: Path, encoding: str) -> None:
    """``--json -`` too, and an error whose message names the file."""
    environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
    shown = call_process("report", scanned / "s.json", env=environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    missing = call_process("scan", scanned / os.fsdecode(b"no\xff.py"), env=environment)
    assert missing.returncode == 2
    assert "no\\udcff.py" in missing.stderr


@pytest.mark.slow
def test_a_plan_names_it(write: Callable[..., Path], call: Call) -> None:
    path = write(edited(DTYPES="()"), NAME)
    done = call("plan", path, "--json", "--search-seconds", "1")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["target"].endswith(SHOWN)


def test_a_fingerprint_is_that_of_the_saved_finding() -> None:
    found = Diagnostic(code="LP101", name="n", severity="error", module="a\udc80", source="m\udcff.py:3", message="m")
    saved = msgspec.json.decode(encode(found), type=Diagnostic)
    assert fingerprint(saved) == fingerprint(found)
    assert fingerprint(msgspec.structs.replace(found, module="a\udc81")) != fingerprint(found)


# -- compat


def test_a_list_may_name_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"m\xff.py --seed 1  # \xe9\nn.py\n")
    assert read_list(tmp_path / "list") == [Request(NAME, ("--seed", "1")), Request("n.py")]
    (tmp_path / "list").write_text("m.py", encoding="utf-16")
    with pytest.raises(UsageError, match="null byte"):
        read_list(tmp_path / "list")


def test_its_row_is_that_of_the_request_after_saving(tmp_path: Path) -> None:
    requests = with_slugs([Request(NAME, ("--inputs", "\udcfe")), Request(os.fsdecode(b"m\xfe.py"))])
    assert len({request.slug for request in requests}) == 2
    save(Matrix(rows=[failed_row(request, "why \udcff", 1.0, {}) for request in requests]), tmp_path / "matrix.json")
    assert [request_of(row) for row in load(tmp_path / "matrix.json").rows] == requests


@pytest.mark.slow
def test_compat_goes_through_a_list_with_odd_models(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(edited(), encoding="utf-8")
    (tmp_path / "odd.py").write_text(edited(ERROR="Odd()"), encoding="utf-8")
    (tmp_path / "list").write_bytes(b"".join(os.fsencode(tmp_path / name) + b"\n" for name in ("odd.py", NAME)))
    command = ("compat", "--from-file", tmp_path / "list", "-o", tmp_path / "out", "-p", "half")
    command += ("--scan-options", "--times off --errors none --no-plan")
    done = call_process(*command)
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "out" / "matrix.json").rows
    assert [(Path(row.target).name, row.state) for row in rows] == [
        ("odd.py", "scanned"),
        (SHOWN, "scanned"),
    ]
    again = call_process(*command)
    assert (again.returncode, again.stderr) == (0, "")


# -- other


def test_a_result_with_any_text_is_saved_and_read(tmp_path: Path) -> None:
    result = msgspec.structs.replace(shared_result("\udc80"), target="\ud800", environment={"\udc80": "\udcff"})
    result.save(tmp_path / "s.json")
    assert ScanResult.load(tmp_path / "s.json").target == "\\ud800"


def test_a_manifest_names_a_test_file_that_is_not_utf8(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:backslashreplace")
    name = os.fsdecode(b"test_\xff.py")
    (project.path / name).write_text("def test_it():\n    raise ValueError\n", encoding="utf-8")
    arguments = ("-p", "no:cacheprovider", "--lowprec-manifest", "known.toml")  # pytest's cache fails on such a name
    assert project.runpytest_subprocess(*arguments, "--lowprec-update-manifest").ret == 0
    assert "udcff" in (project.path / "known.toml").read_text(encoding="utf-8")
    project.runpytest_subprocess(*arguments).assert_outcomes(xfailed=1)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Add node. "
            "Name:'add' Status Message: not with fp16",
            "Add: not with fp16",
        ),
        ("got HTTP Status Message: Not Found", "got HTTP Status Message: Not Found"),
        (
            "The following operation failed in the TorchScript interpreter.\n"
            'Traceback of TorchScript, serialized code (most recent call last):\n  File "code/net.py", line 6, in f\n'
            "RuntimeError: no kernel\n",
            "no kernel (at net.py:6)",
        ),
        (
            "The following operation failed in the TorchScript interpreter.\n"
            "/lib/site-packages/torch/nn/conv.py(560): forward\nC:\\me\\net.py(18): forward\nRuntimeError: boom",
            "boom (at net.py:18)",
        ),
        (
            "The following operation failed in the TorchScript interpreter.\n"
            "Traceback of TorchScript (most recent call last):\n"
            "/home/me/net.py(10): conv\n/lib/site-packages/torch/jit/_trace.py(1022): trace\n"
            "RuntimeError: self (Float) and source (BFloat16) must match\nException raised from x (C++ frames)\n",
            "self (Float) and source (BFloat16) must match (at net.py:10)",
        ),
        (
            "The following operation failed in the TorchScript interpreter.",
            "The following operation failed in the TorchScript interpreter.",
        ),
        ("\n one:\n  two\nthree", "one: two"),
    ],
)
def test_the_first_line_is_the_one_that_says_why(message: str, line: str) -> None:
    assert first_line(message) == line
