"""How an output was judged by what it means: tokens, boxes, masks, pictures."""

from __future__ import annotations

from lowprec_check.schema.base import Struct


class Meaning(Struct, frozen=True, kw_only=True):
    """What a measure says of an output, compared with that of fp32."""

    measure: str
    """Its name: ``boxes``."""
    figures: dict[str, float]
    """Its figures by name: shares from 0 to 1, differences and divergences in their own units."""
    decides: bool = False
    """Whether the status rests on it; else on rel_l2."""
    cannot_tell: str = ""
    """Why its figures mean nothing here; empty if they do."""
    why: str = ""
    """What it was chosen by: the class of the output, ``--judge``."""
    text: str = ""
    """The figures in words."""
    shown: str = ""
    """The figure that decides: ``tokens 99.2 %``, ``boxes iou 93 %``."""
    examples: list[str] = []
    """What differs, at most three."""
    loss: float = 0.0
    """1 minus the share that is equal, or the difference, of the figure that decides."""
    limit: float = 0.0
    """The largest ``loss`` that passes."""
    used: float = 0.0
    """``loss`` / ``limit``, at most 1e9."""
    tolerance: float | None = None
    """That of relative errors, which the limit replaces if the measure decides."""
