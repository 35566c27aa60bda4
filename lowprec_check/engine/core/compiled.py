"""Models that were compiled or exported, or compile parts of themselves. Never imports Dynamo,
which takes a second.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from lowprec_check.engine.core.installation import minor_version
from lowprec_check.engine.core.source_location import is_user_code, show_line


def compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "utils"):
        return int(dynamo.utils.counters["frames"]["ok"])
    return 0


def graph_breaks() -> list[tuple[str, str | None]]:
    """The reason and the line of each graph break since compiled code was forgotten last."""
    dynamo = sys.modules.get("torch._dynamo")
    found: list[tuple[str, str | None]] = []
    for its in getattr(getattr(dynamo, "utils", None), "graph_break_reasons", ()):
        if its.graph_break:
            lines = [
                show_line(frame.filename, frame.lineno or 0) for frame in its.user_stack if is_user_code(frame.filename)
            ]
            what, _, rest = its.reason.partition("\n")
            explained = next(
                (line.partition(":")[2].strip() for line in rest.splitlines() if "Explanation:" in line), what
            )
            text = "control flow depends on data" if what.startswith("generic_jump") else explained
            found.append((text.rstrip("."), lines[-1] if lines else None))
    return found


def in_training_mode(model: torch.nn.Module) -> bool:
    """Whether ``model`` is in training mode, which a program of torch.export claims whatever it was
    exported from.
    """
    is_exported = isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)
    return model.training and not is_exported


def compiled_code_in_eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a model in eager mode, because Dynamo would trace the modes."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def keep_dynamo_out(code: types.CodeType) -> None:
    """Let Dynamo never compile a function with this code nor what it calls, as
    ``torch._disable_dynamo``, but without a wrapper.

    It is needed where code that Dynamo compiled calls the handler of a mode, as ``torch.cond``
    does. Before torch 2.7 it does nothing.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


AUTOCAST_IN_KEY = (2, 13)
"""Since this release, torch's files of compiled graphs are keyed on the dtype of autocast; before,
2.8 and 2.11 used the graph of bf16 for fp16.
"""


@contextlib.contextmanager
def own_compiled_code(*, autocast: bool) -> Iterator[None]:
    """Compile without the code of other runs: that in memory, and under ``autocast`` that on disk
    if its dtype is unknown.
    """
    forget_compiled()
    release = minor_version(torch.__version__)
    if not autocast or (release is not None and release >= AUTOCAST_IN_KEY):
        yield
        return
    from torch._functorch import config

    settings: Any = config
    before, settings.enable_autograd_cache = settings.enable_autograd_cache, False
    try:
        yield
    finally:
        settings.enable_autograd_cache = before


def forget_compiled() -> None:
    """Drop compiled code, so that a model in another precision does not reach the limit of
    recompilations.

    If nothing was compiled there is none: a reset would import inductor where there is a GPU, which
    takes seconds.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset") and dynamo.utils.counters["frames"]:
        dynamo.reset()
