"""What identifies a run: precision × backend × device × memory format."""

from __future__ import annotations

from typing import Literal, NamedTuple

REFERENCE = "fp32"
"""The precision that all others are compared with."""

EAGER = "eager"
"""The backend whose fp32 run is the reference."""

PLAN = "plan"
"""The precision of a run that keeps modules in fp32; ``base`` is that of the others."""

MemoryFormat = Literal["contiguous", "channels_last"]

CONTIGUOUS: MemoryFormat = "contiguous"
"""torch's default memory format."""

Phase = Literal["forward", "backward", "optimizer"]
"""The part of a step in which an op runs."""


class RunKey(NamedTuple):
    """Identifies one run of a scan."""

    precision: str
    """A name in :data:`~lowprec_check.schema.precisions.PRECISIONS`, or ``plan``."""
    backend: str = EAGER
    device: str = "cpu"
    memory_format: MemoryFormat = CONTIGUOUS

    @property
    def is_reference(self) -> bool:
        """Whether it is the run that all others are compared with."""
        return (self.precision, self.backend, self.memory_format) == (REFERENCE, EAGER, CONTIGUOUS)

    @property
    def label(self) -> str:
        """``half``, or ``half · inductor · channels_last``: without the device and defaults."""
        return qualified(self.precision, self.backend, self.memory_format)


def qualified(precision: str, backend: str, memory_format: str) -> str:
    """A precision, with the backend and the memory format unless they are the defaults."""
    extra = []
    if backend != EAGER:
        extra = [backend]
    extra += [memory_format] if memory_format != CONTIGUOUS else []
    return " · ".join([precision, *extra])
