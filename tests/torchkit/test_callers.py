"""The user's own line that leads into an installed package: recorded with op calls and gaps, given to findings."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Call
from shared_result import shared_result
from torch import nn

from lowprec_check.analysis.rules.registry import Callers
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.user_code import definition_line
from lowprec_check.torchkit.source_location import (
    SourceLines,
    call_model,
    own_line,
    source_lines,
    traceback_lines,
)

PACKAGE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return (self.inner(x).abs() + 300).square() / 90000 + x
"""
NET = """
import torch
from blocks_of_others import Block


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Block()

    def forward(self, x):
        y = x * 2
        return self.body(y)


torch.manual_seed(0)
model = Net()
inputs = torch.randn(4, 8)
"""


def lines_in(files: list[str], then: Any) -> Any:
    """What ``then(frame)`` returns in a call through functions of these files, each of which calls the next."""
    function = then
    for file in reversed(files):
        names: dict[str, Any] = {"inner": function, "sys": sys}
        exec(compile("def outer(frame):\n    return inner(sys._getframe())", file, "exec"), names)
        function = names["outer"]
    return function(None)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["/x/net.py"], SourceLines("net.py:2")),
        (["/x/net.py", "/v/site-packages/timm/mlp.py"], SourceLines("timm/mlp.py:2", "net.py:2")),
        (["/x/net.py", "/x/site-packages/a.py", "/x/dist-packages/b.py"], SourceLines("b.py:2", "net.py:2")),
        (["/x/net.py", "/x/site-packages/a.py", "/x/own.py"], SourceLines("own.py:2")),
        (["/x/net.py", torch.__file__], SourceLines("net.py:2")),
        (["/x/net.py", "<string>"], SourceLines("<string>:2", "net.py:2")),
        (["/x/net.py", types.__file__], SourceLines("net.py:2")),
    ],
)
def test_lines_on_the_stack(files: list[str], wanted: SourceLines) -> None:
    found = lines_in(files, source_lines)
    assert (found.source, found.caller) == (wanted.source, wanted.caller)


def test_no_line_of_the_users_is_empty_and_the_search_ends_at_the_call_of_the_model() -> None:
    names: dict[str, Any] = {"source_lines": source_lines}
    exec(compile("def run():\n    return source_lines()", "/v/site-packages/timm/mlp.py", "exec"), names)
    assert call_model(names["run"], (), {}) == SourceLines("timm/mlp.py:2", "")


def test_the_own_line_is_that_of_this_file() -> None:
    assert str(own_line(sys._getframe())).startswith("tests/torchkit/test_callers.py:")


def test_a_traceback_has_both_lines() -> None:
    def fail(_frame: Any) -> None:
        names: dict[str, Any] = {}
        exec(compile("def fail():\n    raise ValueError", "/v/site-packages/timm/mlp.py", "exec"), names)
        names["fail"]()

    try:
        fail(None)
    except ValueError as error:
        found = traceback_lines(error.__traceback__)
    assert found.source == "timm/mlp.py:2"
    assert str(found.caller).startswith("tests/torchkit/test_callers.py:")


# -- the line that makes the model


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\nmodel = 1", 2),
        ("from other import model", 1),
        ("from other import thing as model", 1),
        ("if True:\n    with open('x'):\n        model = 1", 3),
        ("try:\n    pass\nexcept ValueError:\n    model = 1", 4),
        ("a, model = 1, 2", 1),
        ("def f():\n    model = 1\nmodel: int = 2", 3),
        ("def f():\n    model = 1", None),
    ],
)
def test_definition_line(tmp_path: Path, text: str, line: int | None) -> None:
    file = tmp_path / "net.py"
    file.write_text(text)
    module = types.ModuleType("net")
    module.__file__ = str(file)
    assert definition_line(module, "model") == (None if line is None else f"net.py:{line}")


def test_the_model_of_the_api_is_made_where_it_is_scanned() -> None:
    target = make_target(nn.Linear(2, 2), torch.randn(1, 2))
    assert target.source is None
    assert str(target.caller).startswith("tests/torchkit/test_callers.py:")


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is an extra")
def test_a_model_by_name_has_no_line_of_the_users() -> None:
    target = load_target("torchvision:squeezenet1_1", ("1x3x64x64",))
    assert (target.source or "").startswith("torchvision/models/squeezenet.py:")
    assert target.caller == ""


# -- findings


def test_findings_get_the_callers_of_their_rows() -> None:
    result = shared_result()
    calls = result.run("half").op_calls
    columns = {"source": ["timm/x.py:5"] * len(calls), "caller": [*([""] * (len(calls) - 1)), "own.py:9"]}
    changed = msgspec.structs.replace(result.runs[3], op_calls=msgspec.structs.replace(calls, **columns))
    callers = Callers(msgspec.structs.replace(result, runs=[changed]))
    assert callers.of(calls.module[-1], calls.op[-1], "timm/x.py:5") == "own.py:9"
    assert callers.of("another", None, "timm/x.py:5") == "own.py:9", "the line alone, if nothing is known of the op"
    only = msgspec.structs.replace(calls, **columns | {"caller": [""] * len(calls)})
    callers = Callers(msgspec.structs.replace(result, runs=[msgspec.structs.replace(changed, op_calls=only)]))
    assert callers.of(calls.module[0], calls.op[0], "timm/x.py:5") == "net.py:12", "the line that makes the model"
    assert callers.of(None, None, "net.py:23") is None


@pytest.mark.slow
def test_a_scan_points_at_the_line_of_the_file(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "blocks_of_others.py").write_text(PACKAGE)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(packages))
    options = ["-q", "-p", "half", "--times", "off", "--no-plan", "--json", "x.json", "--report", "x.sarif"]
    assert call("scan", "net.py", *options, folder=tmp_path).returncode == 1
    half = json.loads((tmp_path / "x.json").read_text())["runs"][1]["op_calls"]
    assert {("net.py:12", None), ("blocks_of_others.py:12", "net.py:13")} <= set(
        zip(half["source"], half["caller"], strict=True)
    )
    found = json.loads((tmp_path / "x.sarif").read_text())["runs"][0]["results"]
    assert "LP201" in {entry["ruleId"] for entry in found}
    for entry in found:
        place = entry["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": "net.py", "uriBaseId": "%SRCROOT%"}
        if entry["ruleId"] == "LP201":
            assert place["region"]["startLine"] == 13
            [related] = entry["relatedLocations"]
            assert related["physicalLocation"]["artifactLocation"]["uri"] == "blocks_of_others.py"
