"""What happened when printed code was executed."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct


class CodeTrial(Struct, frozen=True, kw_only=True):
    """An execution of the recommended code, in a fresh interpreter."""

    code: str
    """The code."""
    status: Literal["ran", "differs", "failed", "not run"]
    """``differs``: its output is not that of the run that it is for."""
    reason: str = ""
    """Why it is not ``ran``: the error, or what kept it from being executed."""
    rel_l2: float | None = None
    """The error of its output against the same code in fp32."""
    seconds: float | None = None
    """What it added to the scan."""
