"""The memory formats by name. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowprec_check.schema.registry import Registry
from lowprec_check.schema.run_key import CONTIGUOUS, MemoryFormat


@dataclass(frozen=True)
class NamedFormat:
    """A memory format of torch."""

    name: MemoryFormat
    aliases: tuple[str, ...] = ()


def _built_in() -> Iterator[NamedFormat]:
    yield NamedFormat(CONTIGUOUS, ("nchw", "contiguous_format"))
    yield NamedFormat("channels_last", ("nhwc",))


MEMORY_FORMATS: Registry[NamedFormat] = Registry("memory format", NamedFormat, _built_in)
"""All memory formats, torch's default first."""
