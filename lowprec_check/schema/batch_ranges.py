"""What further batches of inputs show of a run: whether it passes on them, and the range of each op. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.base import Struct


class PlaceRange(Struct, frozen=True, kw_only=True):
    """The range of one op at one place, over all its calls there; each list has an item per batch, the first one first."""

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``aten.addmm.default``."""
    source: str | None = None
    """``model.py:41``."""
    dtypes: str
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    largest: list[float | None]
    """The largest finite magnitude; ``None`` if the op was not called."""
    overflows: list[int]
    """Number of values that are Inf where fp32 is finite."""
    flushed: list[float | None]
    """The largest share of fp32's non-zeros that are zero; ``None`` if it was not measured."""
    subnormal: list[float | None]
    """The largest share of them below the dtype's smallest normal number, those flushed included."""


class BatchRanges(Struct, frozen=True, kw_only=True):
    """A run on several batches; each list but ``places`` has an item per batch, the first one first."""

    statuses: list[str]
    """The status on each batch, ``ok``; the batches after one that fails are not run."""
    output_errors: list[float | None]
    """The error of the output that the status rests on; ``None`` if there is none, or if it is infinite."""
    places: list[PlaceRange] = []
    """In the order in which they were called first; empty if the run was not analyzed op by op."""
