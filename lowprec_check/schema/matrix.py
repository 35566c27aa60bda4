"""The matrix of models, precisions and devices that ``compat`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encode, write_file
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.scan_result import Evidence, GapKind, WeightsOrigin
from lowprec_check.schema.verdict import Status

SCHEMA = 1


class MatrixCell(Struct, frozen=True, kw_only=True):
    """One run of one model."""

    precision: str
    """The name of the run in reports, with the backend if it is not eager."""
    column: str | None = None
    """The name without the base of a plan; ``None`` in older files: the name."""
    device: str
    status: Status
    evidence: Evidence = "measured"
    degenerate: str | None = None
    """Why the output cannot be judged, whatever the status; ``None`` if it can, or in old files."""
    further_inputs: InputsTried | None = None
    """How a run that passes does on further inputs; ``None`` also in older files."""
    rel_l2: float | None = None
    """Error of the output; of integers, the share that differs."""
    error: str | None = None
    """The same in words, if it is no relative L2 or of training; ``None`` also in old files."""
    time: float | None = None
    """Latency relative to fp32."""
    memory: float | None = None
    """Peak memory relative to fp32."""
    gaps: list[str] = []
    """Ops without a kernel, each once."""
    first_gap: str | None = None
    first_gap_kind: GapKind | None = None
    first_gap_source: str | None = None
    codes: list[str] = []
    """Codes of the findings about this run, each once; empty in older files."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a predicted cell with a time or memory."""
        if self.evidence == "predicted" and (self.time is not None or self.memory is not None):
            raise ValueError("a predicted run has no time and no memory: they would be those of another device")


class MatrixRow(Struct, frozen=True, kw_only=True):
    """One model on one device, scanned or not."""

    target: str
    options: list[str] = []
    device: str | None = None
    """The device requested; the cells name the device used."""
    slug: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.)[A-Za-z0-9._-]+\Z")]
    """The name of its files, without suffix: it must not lead out of the folder."""
    made_with: dict[str, str] = {}
    state: Literal["scanned", "failed"]
    reason: str | None = None
    """Why it could not be scanned."""
    seconds: float
    model: str | None = None
    parameters: int | None = None
    weights: WeightsOrigin = "unknown"
    """Where the values of the weights come from; ``unknown`` also in older files."""
    codes: list[str] = []
    """Codes of the findings about the model as a whole, each once; empty in older files."""
    inputs: list[str] = []
    environment: dict[str, str] = {}
    cells: list[MatrixCell] = []
    recommended: str | None = None


class Matrix(Struct, frozen=True, kw_only=True):
    """All rows, in the order in which they were requested."""

    schema: int = SCHEMA
    rows: list[MatrixRow]
    """Without a default, so that another file with a schema number is not overwritten."""


def load(path: Path) -> Matrix:
    """Read a saved matrix, empty without a file; raises :class:`UsageError` for another file."""
    try:
        return decode(path.read_bytes(), Matrix, SCHEMA)
    except FileNotFoundError:
        return Matrix(rows=[])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a matrix that this version can read: {error}.",
            "Delete it, or choose another folder with -o.",
        ) from None


def save(matrix: Matrix, path: Path) -> None:
    """Write ``matrix``; raises :class:`UsageError` if that fails."""
    write_file(path, encode(matrix, indent=1))
