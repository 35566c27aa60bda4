"""How the user names a target; does not import torch, so that a command can use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lowprec_check.engine.model.input_shapes import input_shapes
from lowprec_check.engine.model.patched_source import Rewrite
from lowprec_check.errors import UsageError

LOAD_SECONDS = 600.0
"""A process must have loaded the target by then."""
OnProgress = Callable[[str, str], None]
"""Called with the name of a run and its current step."""
NOTICE = "notice"
"""In place of the name of a run: what is said once about all runs, and stays."""


class TargetSpec(NamedTuple):
    """How the user names a target."""

    name: str
    """``mymodel.py``, ``package.module:attr``, ``torchvision:resnet50``, …"""
    inputs: tuple[str, ...] = ()
    """Shapes that replace the inputs of the target."""
    weights: Path | None = None
    """File with a state dict."""
    stream: bool = False
    """Whether weights stay in files until used; automatic if a folder's do not fit into memory."""
    arguments: tuple[str, ...] = ()
    """What a script gets as ``sys.argv[1:]``."""
    steps: int = 0
    """Steps of a script's training to observe."""
    sources: tuple[tuple[str, str], ...] = ()
    """Files of the user's that are loaded with another text, by their resolved paths."""
    rewrites: Callable[[], Rewrite] | None = None
    """Gives what changes their syntax trees when they are loaded."""

    @property
    def options(self) -> list[str]:
        """The options of a command that give it, and the arguments of a script."""
        options = [word for shape in self.inputs for word in ("--inputs", shape)]
        if self.weights is not None:
            options += ["--weights", str(self.weights)]
        if self.stream:
            options.append("--stream")
        if self.arguments:
            options += ["--", *self.arguments]
        return options

    def check(self) -> None:
        """Raise :class:`UsageError` for what is wrong in it, before anything is loaded."""
        input_shapes(self.inputs)
        if self.weights is None or self.weights.is_file():
            return
        problem = f"No such file: {self.weights}"
        if self.weights.is_dir():
            problem = f"{self.weights} is a folder"
        raise UsageError(f"{problem}.", "Give --weights the path of a saved state dict.")
