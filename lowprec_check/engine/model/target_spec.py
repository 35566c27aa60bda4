"""How the user names a target; does not import torch, so that a command can use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.engine.model.user_module import Rewrite

_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")

_DTYPES = (
    *("float", "double", "half", "short", "int", "long", "float16", "float32", "float64", "bfloat16", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex32", "complex64", "complex128", "chalf", "cfloat", "cdouble"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


class InputShape(NamedTuple):
    """One tensor to make."""

    text: str
    name: str | None
    sizes: list[int]
    dtype: str


def input_shapes(specs: Iterable[str]) -> list[InputShape]:
    """The tensors in specs like ``1x3x224x224``, ``1x128:int64``, ``mask=1x128:bool``; raises
    :class:`UsageError` for others, or if only some have names.
    """
    shapes = []
    for spec in (part for text in specs for part in text.split(",")):
        match = _SHAPE.fullmatch(spec.strip())
        if match is None or match["dtype"] not in (None, *_DTYPES):
            raise UsageError(f"Cannot parse --inputs {spec!r}.", "Examples: 1x3x224x224, 1x128:int64, mask=1x128:bool.")
        sizes = []
        if match["shape"] != "scalar":
            sizes = [int(size) for size in match["shape"].split("x")]
        shapes.append(InputShape(spec, match["name"], sizes, match["dtype"] or "float32"))
    if len({shape.name is None for shape in shapes}) > 1:
        raise UsageError("--inputs mixes tensors with and without a name.", "Name all of them or none.")
    return shapes


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
