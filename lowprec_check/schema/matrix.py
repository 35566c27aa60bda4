"""The matrix model × precision × device that ``compat`` fills: its rows, saved and read back. Never imports torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct, decode, encode
from lowprec_check.schema.scan_result import Evidence, GapKind, Status

SCHEMA = 1


class Request(NamedTuple):
    """One model to scan on one device."""

    target: str
    options: tuple[str, ...] = ()
    """Further options of ``scan``."""
    device: str | None = None
    slug: str = ""
    """A file name for it, unlike any other of the same list."""


def named(requests: Iterable[Request]) -> list[Request]:
    """Each request once, with a slug: the target and the device; where two share that, a digest of the options too."""
    plain = {request: _plain(request) for request in requests}
    taken = Counter(plain.values())
    return [
        request._replace(slug=name if taken[name] == 1 else f"{name}-{_digest(request)}")
        for request, name in plain.items()
    ]


def _plain(request: Request) -> str:
    name = re.sub(r"[^A-Za-z0-9._]+", "-", request.target).strip("-.")[-80:] or "model"
    return f"{name}-{request.device.replace(':', '')}" if request.device else name


def _digest(request: Request) -> str:
    text = "\0".join([request.target, *request.options])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:6]


class Cell(Struct, frozen=True, kw_only=True):
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


class Row(Struct, frozen=True, kw_only=True):
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
    cells: list[Cell] = []
    recommended: str | None = None

    @property
    def key(self) -> Request:
        """What was asked for."""
        return Request(self.target, tuple(self.options), self.device, self.slug)


class Matrix(Struct, frozen=True, kw_only=True):
    """All rows, in the order in which they were asked for."""

    schema: int = SCHEMA
    rows: list[Row] = []


def load(path: Path) -> Matrix:
    """Read a saved matrix, empty where there is none; raises :class:`UsageError` for a file that is something else."""
    try:
        return decode(path.read_bytes(), Matrix, SCHEMA)
    except FileNotFoundError:
        return Matrix()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a matrix that this version reads: {error}.", "Remove it, or give another -o."
        ) from None


def save(matrix: Matrix, path: Path) -> None:
    """Write it in one step: an interruption leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(encode(matrix, indent=1))
    beside.replace(path)
