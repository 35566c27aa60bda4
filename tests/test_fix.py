"""``lowprec-check fix``: the patch, its proof, and what is written."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
import torch
from conftest import Call

from lowprec_check.analysis.fixes.source_text import Edit, SourceText, edited, moved
from lowprec_check.schema.fixing import Fixing

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
"""
TAIL = """

def model():
    torch.manual_seed(0)
    return Net().eval()


inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
"""


def write(folder: Path, body: str, head: str = HEAD, tail: str = TAIL) -> Path:
    file = folder / "net.py"
    lines = "".join(f"        {line}\n" if line else "\n" for line in dedent(body).strip().splitlines())
    file.write_text(head + lines + tail, encoding="utf-8")
    return file


def fixed(call: Call, file: Path, *options: str) -> Fixing:
    done = call("fix", file, "-q", "-f", "json", "--budget", "300", *(options or ("-p", "half")), folder=file.parent)
    assert done.returncode in (0, 1), done.stderr
    return msgspec.json.decode(done.stdout, type=Fixing)


# -- Positions in the text


def test_every_expression_can_be_wrapped_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(
        "def f(ä, b):\r\n    # (\r\n    y = ( (ä + b) ).pow(2)  # )\r\n    return g((ä), (b * 2), x=(ä))\r\n".encode()
    )
    source = SourceText(file)
    for span, node in source.nodes.items():
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            continue
        start, end = source.outer(node)
        edits = [Edit(start, start, "h(", start - end), Edit(end, end, ")", end - start)]
        text = edited(source.text, edits)
        ast.parse(text)
        first, last = moved(span, edits)
        assert text[first:last] == source.segment(node)
        assert text.replace("h(", "", 1).count("\r\n") == 4


# -- What is fixed, and how


CASES = {
    "constant": ("h = self.fc(x)\nreturn h.masked_fill(torch.arange(8) > 3, -1e9).softmax(-1)", "torch.finfo(h.dtype).min"),
    "named constant": ("h = self.fc(x)\nbig = 1e9\nreturn torch.clamp(h, max=big)  # as it was", "min(big, torch.finfo(h.dtype).max)"),
    "eps": ("h = self.fc(x) * 0\nreturn self.fc(x) + h / (h.norm(dim=-1, keepdim=True) + 1e-8)", "max(1e-8, torch.finfo("),
    "default eps": ("h = self.fc(x) * 0\nreturn self.fc(x) + F.normalize(h, dim=-1)", "eps=max(1e-12, torch.finfo(h.dtype).tiny)"),
    "overflow": ("h = self.fc(x) * 400\nreturn h / h.pow(2).mean(-1, keepdim=True).sqrt()", "h.float().pow(2)"),
    "kernel": ("h = self.fc(x)\nreturn torch.linalg.qr(h.T @ h)[1]", ".to(h.dtype)"),
    "factory": ("h = self.fc(x)\nw = torch.eye(8)\nreturn h @ w", "torch.eye(8, dtype=x.dtype)"),
    "in place": ("h = self.fc(x) * 300\nh *= h\nreturn h.mean(-1, keepdim=True).sqrt() + self.fc(x)", "h = (h.float() * h.float())"),
    "scale": ("h = self.fc(x) * 400\nreturn (h @ h.T) / 4096", "2**-"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_fixed_and_proven(call: Call, tmp_path: Path, case: str) -> None:
    body, expected = CASES[case]
    file = write(tmp_path, body)
    before = file.read_bytes()
    found = fixed(call, file)
    assert found.due
    assert found.passes
    assert expected in found.diff
    assert found.outputs_equal
    assert [(its.precision, its.after) for its in found.proven] == [("half", "ok")]
    assert file.read_bytes() == before


@pytest.mark.slow
def test_the_patch_is_applied_and_the_plain_model_passes(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path, "h = self.fc(x)\nreturn h.masked_fill(torch.arange(8) > 3, -1e9).softmax(-1)  # kept")
    assert call("fix", file, "-q", "-p", "half", "--check", folder=tmp_path).returncode == 1
    done = call("fix", file, "-q", "-p", "half", "--apply", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# kept" in file.read_text()
    space: dict[str, object] = {}
    exec(file.read_text(), space)
    net, x = space["model"](), space["inputs"]  # type: ignore[operator]
    with torch.no_grad():
        assert torch.allclose(net(x), net.half()(x.half()).float(), atol=1e-2)  # type: ignore[attr-defined]
    done = call("fix", file, "-q", "-p", "half", "--check", folder=tmp_path)
    assert done.returncode == 0
    assert "Nothing to fix" in done.stdout


@pytest.mark.slow
def test_a_file_with_changes_that_are_not_committed_is_not_written(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path, "h = self.fc(x)\nreturn h.masked_fill(torch.arange(8) > 3, -1e9).softmax(-1)")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = file.read_bytes()
    done = call("fix", file, "-q", "-p", "half", "--apply", folder=tmp_path)
    assert done.returncode == 2
    assert "not committed" in done.stderr
    assert file.read_bytes() == before
    assert call("fix", file, "-q", "-p", "half", "--apply", "--allow-dirty", folder=tmp_path).returncode == 0
    assert file.read_bytes() != before


@pytest.mark.slow
def test_what_is_compiled_from_text_is_left_alone(call: Call, tmp_path: Path) -> None:
    made = 'exec("def big(h):\\n    return h.masked_fill(torch.arange(8) > 3, -1e9)")\n'
    file = write(tmp_path, "return big(self.fc(x)).softmax(-1)", tail=TAIL + made)
    found = fixed(call, file)
    assert not found.due
    assert not found.passes
    assert found.left_alone
