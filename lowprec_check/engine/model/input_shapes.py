"""The shapes that ``--inputs`` names; does not import torch, so that a command can check them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lowprec_check.errors import UsageError

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
