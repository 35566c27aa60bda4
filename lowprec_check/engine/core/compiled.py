"""Models that compile parts of themselves. Never imports Dynamo, which takes a second."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch


def compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return int(dynamo.utils.counters["frames"]["ok"]) if dynamo is not None and hasattr(dynamo, "utils") else 0


def compiled_code_in_eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a model in eager mode, because Dynamo would trace the modes."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Drop compiled code, so that a model in another precision does not reach the limit of recompilations."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()
