"""The file in which the fp32 run keeps, for the other runs, what they are compared with."""

from __future__ import annotations

import os
from typing import IO, Any

import torch

from lowprec_check.engine.run.job import Job
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import clear_shared


def write_reference(job: Job, content: dict[str, Any]) -> None:
    """Write tensors and plain values; raises :class:`UsageError` if memory, or a limit of it, is too small."""
    clear_shared(job.files.reference)
    try:
        with _opened(job, "wb") as file:
            torch.save(content, file)
    except OSError as error:
        raise UsageError(
            f"The fp32 output cannot be kept for the comparison: {error.strerror}.",
            "Free some memory, or raise the limit of file sizes (ulimit -f).",
        ) from None


def read_reference(job: Job) -> dict[str, Any]:
    """Read what :func:`write_reference` wrote."""
    with _opened(job, "rb") as file:
        content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


def _opened(job: Job, mode: str) -> IO[bytes]:
    """The file, from its start."""
    file: IO[bytes] = os.fdopen(os.dup(job.files.reference), mode)
    file.seek(0)
    return file
