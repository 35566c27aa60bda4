"""The user's line in the traceback of a process that was killed."""

from __future__ import annotations

import json
import sysconfig

import torch

import lowprec_check
from lowprec_check.engine.run.job_worker import innermost_user_line

OURS = f'  File "{lowprec_check.__file__}", line 1 in run'
TORCH = f'  File "{torch.__file__}", line 2 in compile'
STDLIB = f'  File "{json.__file__}", line 3 in loads'
INSTALLED = f'  File "{sysconfig.get_paths()["purelib"]}/typer/main.py", line 4 in call'
MODEL = '  File "net.py", line 5 in forward'


def line(*frames: str) -> str | None:
    return innermost_user_line("\n".join(["Current thread 0x1 (most recent call first):", *frames]).encode())


def test_the_innermost_line_of_the_model_is_found() -> None:
    assert line(TORCH, MODEL, TORCH, OURS, INSTALLED) == "net.py:5"
    assert line(STDLIB, MODEL, OURS) == "net.py:5"


def test_a_hook_of_ours_that_the_model_called_is_passed_over() -> None:
    assert line(OURS, MODEL, OURS, INSTALLED) == "net.py:5"


def test_what_called_this_program_is_not_the_model() -> None:
    assert line(TORCH, STDLIB, OURS, INSTALLED) is None
    assert line(STDLIB, OURS, MODEL) is None
