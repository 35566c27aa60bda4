"""The base of everything that is saved, and how it is read back. Never imports torch.

The rule for saved files: a field that is added does not change the schema number, and older readers of that number skip
it; a field that is removed or changes its meaning raises the number. A reader that meets a higher number says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec


class Struct(msgspec.Struct, frozen=True):
    """Base of everything saved: immutable; fields that a newer version added are skipped when it is read."""


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what people write by hand: an unknown field is an error, since it may be a typing mistake."""


def encode(value: Struct | Sequence[Struct] | dict[str, Any], indent: int = 2) -> bytes:
    """Encode as indented JSON that ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


class _Head(msgspec.Struct):
    schema: int
    tool: str = ""


Saved = TypeVar("Saved", bound=Struct)


def decode(data: bytes, kind: type[Saved], schema: int) -> Saved:
    """Decode JSON of a known schema number; raises ``ValueError`` that names the key or the version that is needed.

    The number is read first: another one has other fields.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema == schema:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    saved_by = f"saved by {head.tool or 'another version of lowprec-check'}"
    if head.schema > schema:
        raise ValueError(f"{saved_by} with schema {head.schema}; upgrade lowprec-check, which reads schema {schema}")
    raise ValueError(f"{saved_by} with schema {head.schema}, which is too old; this version reads schema {schema}")
