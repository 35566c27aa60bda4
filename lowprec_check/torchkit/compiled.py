"""Compiled and exported models. Never imports Dynamo, which takes a second."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowprec_check.errors import UsageError
from lowprec_check.torchkit.installation import minor_version
from lowprec_check.torchkit.source_location import is_user_code, show_line


def compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "utils"):
        return int(dynamo.utils.counters["frames"]["ok"])
    return 0


def graph_breaks() -> list[tuple[str, str | None]]:
    """The reason and the line of each graph break since compiled code was forgotten last."""
    dynamo = sys.modules.get("torch._dynamo")
    breaks: list[tuple[str, str | None]] = []
    for reason in getattr(getattr(dynamo, "utils", None), "graph_break_reasons", ()):
        if not reason.graph_break:
            continue
        summary, _, details = reason.reason.partition("\n")
        text = summary
        if summary.startswith("generic_jump"):
            text = "control flow depends on data"
        elif "Explanation:" in details:
            line_of_text = next(line for line in details.splitlines() if "Explanation:" in line)
            text = line_of_text.partition(":")[2].strip()
        lines = [show_line(at.filename, at.lineno or 0) for at in reason.user_stack if is_user_code(at.filename)]
        breaks.append((text.rstrip("."), lines[-1] if lines else None))
    return breaks


def in_training_mode(model: torch.nn.Module) -> bool:
    """Whether ``model`` is in training mode; an exported program always claims to be."""
    is_exported = isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)
    return model.training and not is_exported


def compiled_code_in_eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a model in eager mode, because Dynamo would trace the modes."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def keep_dynamo_out(code: types.CodeType) -> None:
    """Prevent Dynamo from compiling a function with this code, or what it calls: without the
    wrapper of ``torch._disable_dynamo``, for code that Dynamo compiled and that calls the handler
    of a mode, as ``torch.cond`` does. No effect before torch 2.7.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


# The first torch whose files of compiled graphs tell bf16 from fp16 autocast (2.11 does not).
AUTOCAST_IN_KEY = (2, 13)


@contextlib.contextmanager
def own_compiled_code(*, autocast: bool) -> Iterator[None]:
    """Compile without the code of other runs: in memory, and on disk if its dtype is unknown."""
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
    """Drop compiled code, so that another precision does not hit the recompilation limit."""
    dynamo = sys.modules.get("torch._dynamo")
    # Only if anything was compiled: where there is a GPU, a reset imports inductor (seconds).
    if dynamo is not None and hasattr(dynamo, "reset") and dynamo.utils.counters["frames"]:
        dynamo.reset()


def restorer_of_settings() -> Callable[[], None]:
    """Restores what backends set in the whole process: attention's fast path, and freezing."""
    fast, frozen = torch.backends.mha.get_fastpath_enabled(), _freezes()

    def restore() -> None:
        torch.backends.mha.set_fastpath_enabled(fast)
        if _freezes() != frozen:
            config: Any = sys.modules["torch._inductor.config"]
            config.freezing = frozen

    return restore


def _freezes() -> bool:
    """Whether inductor takes weights for constants."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and config.freezing


def check_in_eval_mode(model: torch.nn.Module, way: str) -> None:
    """Raise :class:`UsageError` if ``model`` is in training mode, but ``way`` is for inference."""
    if in_training_mode(model):
        raise UsageError(f"The model is in training mode; {way} is for inference.", "Call model.eval() in your file.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no log messages below errors, which some are, too: exporters and libraries
    that quantize print which kernels they cannot load, and deprecations.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
