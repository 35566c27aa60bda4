"""The base classes of saved data, and how it is read. Never imports torch.

The rule for saved files: a field that is added does not change the schema number, and older readers of that number skip
it; removing a field or changing its meaning raises the number. A reader that meets a higher number asks for an upgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from lowprec_check.errors import encodable


class Struct(msgspec.Struct, frozen=True):
    """Base of saved data: immutable; unknown fields, added by a newer version, are skipped when it is read."""


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of files written by hand: an unknown field is an error, since it may be a typing mistake."""


def encode(value: Struct | Sequence[Struct] | dict[str, Any], indent: int = 2) -> bytes:
    """Encode as indented JSON with a final newline."""
    return msgspec.json.format(encoded(value, msgspec.json.encode), indent=indent) + b"\n"


def encoded(value: Any, encoder: Callable[[Any], bytes]) -> bytes:
    r"""``encoder(value)``; a lone surrogate in a text becomes ``\udc80``, so that no text prevents saving or sending."""
    try:
        return encoder(value)
    except UnicodeEncodeError:
        return encoder(_encodable(msgspec.to_builtins(value)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Head(msgspec.Struct):
    schema: int
    tool: str = ""


Saved = TypeVar("Saved", bound=Struct)


def decode(data: bytes, kind: type[Saved], schema: int) -> Saved:
    """Decode JSON with the schema number ``schema``; raises ``ValueError`` naming the wrong key or the required version.

    The number is read first, since another number means other fields.
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
