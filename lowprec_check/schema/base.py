"""The base of everything that is saved, and how it is read back. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything saved: immutable, and strict about keys when read back."""


def encode(value: Struct | Sequence[Struct] | dict[str, Any], indent: int = 2) -> bytes:
    """As indented JSON, a line at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


class _Head(msgspec.Struct):
    schema: int


Saved = TypeVar("Saved", bound=Struct)


def decode(data: bytes, kind: type[Saved], schema: int) -> Saved:
    """Decode strictly; raises ``ValueError`` that names the key. The schema first: a newer one has other keys."""
    try:
        found = msgspec.json.decode(data, type=_Head).schema
        if found == schema:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    whose = "a newer version wrote it: upgrade lowprec-check" if found > schema else "an older one: make it anew"
    raise ValueError(f"schema {found} is not {schema}, the one this version reads ({whose})")
