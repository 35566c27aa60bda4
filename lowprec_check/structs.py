"""The base of everything that is saved. Never imports torch."""

from __future__ import annotations

import msgspec


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything saved: immutable, and strict about keys when read back."""
