"""The named sets of runs of ``scan --matrix``. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.memory_formats import MEMORY_FORMATS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.registry import Registry
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER


@dataclass(frozen=True, kw_only=True)
class RunMatrix:
    """A set of runs: every precision on every backend in every memory format."""

    name: str
    summary: str
    """One phrase for ``--help``."""
    precisions: Callable[[], list[str]] = PRECISIONS.names
    backends: Callable[[], list[str]] = lambda: [EAGER]
    memory_formats: Callable[[], list[str]] = lambda: [CONTIGUOUS]
    aliases: tuple[str, ...] = ()


def _built_in() -> Iterator[RunMatrix]:
    yield RunMatrix(name="default", summary="every precision, eager")
    yield RunMatrix(
        name="full",
        summary="every precision on every backend in every memory format",
        backends=BACKENDS.names,
        memory_formats=MEMORY_FORMATS.names,
    )
    yield RunMatrix(
        name="ci",
        summary="bf16 and autocast, eager and compiled",
        precisions=lambda: ["fp32", "bfloat16", "autocast-bf16", "autocast-fp16"],
        backends=lambda: [EAGER, "inductor"],
    )


RUN_MATRICES: Registry[RunMatrix] = Registry("matrix", RunMatrix, _built_in)
"""The sets of runs, the default first."""
