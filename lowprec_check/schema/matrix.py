"""The matrix model × precision × device that ``compat`` fills: its rows, saved and read back. Never imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encode
from lowprec_check.schema.scan_result import Evidence, GapKind, Status

SCHEMA = 1


class MatrixCell(Struct, frozen=True, kw_only=True):
    """One run of one model."""

    precision: str
    """As reports name it, with the backend where that is not eager."""
    device: str
    status: Status
    evidence: Evidence = "measured"
    rel_l2: float | None = None
    time: float | None = None
    """Latency over fp32's."""
    memory: float | None = None
    """Peak memory over fp32's."""
    gaps: list[str] = []
    """Ops without a kernel, each once."""
    first_gap: str | None = None
    first_gap_kind: GapKind | None = None
    first_gap_source: str | None = None


class MatrixRow(Struct, frozen=True, kw_only=True):
    """One model on one device, scanned or not."""

    target: str
    options: list[str] = []
    device: str | None = None
    """As asked for; where it ran is in the cells."""
    slug: str
    made_with: dict[str, str] = {}
    state: Literal["scanned", "failed"]
    reason: str | None = None
    """Why it could not be scanned."""
    seconds: float
    model: str | None = None
    parameters: int | None = None
    inputs: list[str] = []
    environment: dict[str, str] = {}
    cells: list[MatrixCell] = []
    recommended: str | None = None


class Matrix(Struct, frozen=True, kw_only=True):
    """All rows, in the order in which they were asked for."""

    schema: int = SCHEMA
    rows: list[MatrixRow]
    """Without a default, so that another file with a schema number is not taken for a matrix, and overwritten."""


def load(path: Path) -> Matrix:
    """Read a saved matrix, empty where there is none; raises :class:`UsageError` for a file that is something else."""
    try:
        return decode(path.read_bytes(), Matrix, SCHEMA)
    except FileNotFoundError:
        return Matrix(rows=[])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a matrix that this version reads: {error}.", "Remove it, or give another -o."
        ) from None


def save(matrix: Matrix, path: Path) -> None:
    """Write it in one step: an interruption leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(encode(matrix, indent=1))
    beside.replace(path)
