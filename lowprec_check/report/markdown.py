"""Pieces of Markdown for the reports of coverage and matrices; those made of blocks are laid out by :mod:`~lowprec_check.report.layout.markdown`."""

from __future__ import annotations

from collections.abc import Iterable

from lowprec_check.report.layout.markdown import LONGEST, code, escape, fold, table

__all__ = ["LONGEST", "code", "escape", "fitting", "fold", "table"]


def fitting(sizes: Iterable[int], room: int, *, between: int = 0) -> int:
    """How many of the first items fit into ``room``, with separators of size ``between``."""
    kept = total = 0
    for size in sizes:
        if total + size > room:
            break
        kept, total = kept + 1, total + size + between
    return kept
