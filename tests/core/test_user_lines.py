"""The user's line in the traceback of a process that was killed."""

from __future__ import annotations

import importlib
import json
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowprec_check
from lowprec_check import scan
from lowprec_check.core.session import _packages_named_by
from lowprec_check.torchkit.place_log import model_line, packages_of
from lowprec_check.torchkit.source_location import show_line

OURS = f'  File "{lowprec_check.__file__}", line 1 in run'
CALL = f'  File "{lowprec_check.__file__}", line 1 in call_model'
TORCH = f'  File "{torch.__file__}", line 2 in compile'
STDLIB = f'  File "{json.__file__}", line 3 in loads'
SITE = sysconfig.get_paths()["purelib"]
INSTALLED = f'  File "{SITE}/click/core.py", line 4 in call'
LAYERS = f'  File "{SITE}/timm/layers/norm.py", line 6 in forward'
MODEL = '  File "net.py", line 5 in forward'
COMMAND = '  File "/usr/bin/lowprec-check", line 8 in <module>'

NOTE = "Model in thread 0x0000000000000001 net timm"
CURRENT = "Current thread 0x0000000000000001 (most recent call first):"
THREAD = "Thread 0x0000000000000001 (most recent call first):"
OTHER = "Thread 0x0000000000000002 (most recent call first):"


def log(*lines: str) -> str | None:
    return model_line("\n".join(lines).encode())


def line(*frames: str) -> str | None:
    return log(NOTE, CURRENT, *frames)


def test_the_innermost_line_of_the_model_is_found() -> None:
    assert line(TORCH, MODEL, TORCH, OURS, INSTALLED) == "net.py:5"
    assert line(STDLIB, MODEL, OURS) == "net.py:5"


def test_a_hook_of_ours_that_the_model_called_is_passed_over() -> None:
    assert line(OURS, MODEL, OURS, INSTALLED) == "net.py:5"
    assert line(TORCH, OURS, MODEL, TORCH, CALL, OURS, COMMAND) == "net.py:5"


def test_what_called_this_program_is_not_the_model() -> None:
    assert line(TORCH, STDLIB, OURS, INSTALLED) is None
    assert line(STDLIB, OURS, MODEL) is None
    assert line(OURS, OURS, INSTALLED, COMMAND) is None
    assert line(OURS, CALL, OURS, COMMAND) is None


def test_a_library_that_the_model_calls_is_not_the_model() -> None:
    assert line(INSTALLED, MODEL, CALL) == "net.py:5"
    assert line(INSTALLED, TORCH, CALL, OURS) is None


def test_a_package_that_the_model_is_made_of_is_the_model() -> None:
    assert line(INSTALLED, LAYERS, TORCH, MODEL, CALL) == "timm/layers/norm.py:6"


@pytest.mark.parametrize("frames", [(MODEL, TORCH, CALL), (STDLIB, TORCH, CALL)])
def test_only_the_thread_that_runs_the_model_counts(frames: tuple[str, ...]) -> None:
    expected = "net.py:5" if MODEL in frames else None
    title = "Timeout (0:00:02)!"
    assert log(NOTE, title, OTHER, LAYERS, STDLIB, "", THREAD, *frames, OURS, "") == expected
    assert log(NOTE, title, THREAD, *frames, OURS, "", OTHER, LAYERS, MODEL, OURS, "") == expected


def test_the_thread_that_crashed_counts_if_it_runs_python() -> None:
    crashed = CURRENT.replace("1 (", "3 (")
    title = "Fatal Python error: Segmentation fault"
    assert log(NOTE, title, "", crashed, LAYERS, OURS, "", THREAD, MODEL, CALL) == "timm/layers/norm.py:6"
    assert log(NOTE, title, "", crashed, "  <no Python frame>", "", THREAD, MODEL, CALL) == "net.py:5"


def test_the_last_traceback_counts() -> None:
    earlier = ("Timeout (0:00:02)!", THREAD, MODEL, CALL, "")
    assert log(NOTE, *earlier, "Timeout (0:00:02)!", THREAD, TORCH, CALL, "") is None
    assert log(NOTE, *earlier, NOTE) is None


def test_a_deep_recursion_has_a_line() -> None:
    assert line(*[MODEL] * 100, "  ...") == "net.py:5"
    assert line(*[MODEL] * 100) is None  # nothing of ours has called it


def test_the_packages_of_a_model() -> None:
    assert packages_of(nn.Sequential(nn.Linear(2, 2))) == []
    assert _packages_named_by("timm:resnet18") == ["timm"]
    assert _packages_named_by("package.module:attr") == ["package"]
    assert _packages_named_by("hf:folder") == ["transformers"]
    assert _packages_named_by("my folder/model.py") == []


LIBRARY = """
import threading

def spin(_=None):
    while True:
        sum(range(1000))

def watch(stop):
    while not stop.wait(0.01):
        sum(range(1000))

def hook(module, inputs):
    if inputs[0].dtype.itemsize == 2:
        threading.Thread(target=watch, args=(threading.Event(),), daemon=True).start()
        spin()
"""


class Spins(nn.Module):
    """Calls a library that does not return, while another thread of the library runs."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.linear, self.library = nn.Linear(8, 8), library

    def forward(self, x: Tensor) -> Tensor:
        if self.linear.weight.dtype == torch.half:
            threading.Thread(target=self.library.watch, args=(threading.Event(),), daemon=True).start()
            self.library.spin()
        return self.linear(x)


@pytest.mark.parametrize("called_by", ["the model", "torch"])
def test_a_busy_library_is_not_the_place_of_a_timeout(
    called_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "busy_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("busy_library")
    model: nn.Module = Spins(library)
    if called_by == "torch":
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
        model[1].register_forward_pre_hook(library.hook)
    run = scan(model, torch.randn(2, 8), precisions=["half"], budget=1.0, isolation="fork", times="off").run("half")
    assert run.status == "timeout"
    spin = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if ".spin()" in text)
    expected = f", at {show_line(__file__, spin)}" if called_by == "the model" else ""
    assert run.reason == f"exceeded the budget of 1 s{expected}"
