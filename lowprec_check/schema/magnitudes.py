"""The magnitudes of the values that the ops of a module give, as counts by power of two. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.base import Struct

SAMPLE = 1024
"""At most this number of values of each op output is counted, evenly spread over the tensor."""


class ModuleMagnitudes(Struct, frozen=True, kw_only=True):
    """A histogram of the fp32 reference's values in one module, its submodules not included.

    Of each op output at most :data:`SAMPLE` values; casts and copies, which give no new values, and op calls after the forward
    pass are left out. An op that no low-precision value reaches is its own reference.
    """

    module: str
    """The path of the module; empty for the model itself."""
    lowest: int = 0
    """The exponent of the first bucket: ``counts[i]`` is the number of values with 2**(lowest + i) <= magnitude < 2**(lowest + i + 1)."""
    counts: list[int] = []
    """Number of values per bucket."""
    zeros: int = 0
    """Number of values that are exactly 0."""
    nonfinite: int = 0
    """Number of values that are Inf or NaN in the reference too."""
    ops: int = 0
    """Number of op calls whose outputs were sampled."""

    @property
    def values(self) -> int:
        """The size of the sample."""
        return sum(self.counts) + self.zeros + self.nonfinite
