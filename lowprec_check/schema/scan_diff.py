"""What differs between two scans, as it is saved."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import Evidence

Kind = Literal["status", "gap", "error", "speed", "memory", "run", "recommendation"]
Direction = Literal["worse", "better", "other"]


class ScanChange(Struct, frozen=True, kw_only=True):
    """One difference."""

    kind: Kind
    direction: Direction
    run: str
    """Precision and backend, as reports name it; empty for the whole scan."""
    what: str
    old: str | None = None
    new: str | None = None
    ratio: float | None = None
    """New over old, for figures."""


class RunPair(Struct, frozen=True, kw_only=True):
    """One run in both results; fields are ``None`` if a result lacks it."""

    run: str
    old_status: str | None = None
    new_status: str | None = None
    old_error: float | None = None
    new_error: float | None = None
    old_time: float | None = None
    """Times fp32's latency, in the same result."""
    new_time: float | None = None
    old_memory: float | None = None
    new_memory: float | None = None


class DiffSide(Struct, frozen=True, kw_only=True):
    """Where one of the two results comes from."""

    target: str
    model: str
    tool: str
    torch: str
    device: str
    evidence: Evidence = "measured"


class ScanDiff(Struct, frozen=True, kw_only=True):
    """All differences; ``warnings`` lists differing conditions, which make comparison hard."""

    schema: int = 1
    old: DiffSide
    new: DiffSide
    warnings: list[str] = []
    runs: list[RunPair] = []
    changes: list[ScanChange] = []
    regressions: int = 0
    improvements: int = 0
