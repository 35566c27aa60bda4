"""A relative L2 error over several tensors."""

from __future__ import annotations

import math

from torch import Tensor


class SquaredError:
    """Adds up ‖y − r‖² and ‖r‖² in fp64 over pairs of tensors."""

    def __init__(self) -> None:
        self._error = self._reference = 0.0
        self._pairs = 0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        wide = reference.double()
        self._error += float((value.double() - wide).square().sum())
        self._reference += float(wide.square().sum())
        self._pairs += 1

    @property
    def rel_l2(self) -> float | None:
        """The square root of the sum of ‖y − r‖² over that of ‖r‖²; 0/0 is 0; ``None`` if there was no pair, or it is infinite or NaN."""
        if not self._pairs:
            return None
        if self._reference:
            found = math.sqrt(self._error / self._reference) if self._error >= 0 else math.nan
        else:
            found = 0.0 if not self._error else math.inf
        return found if math.isfinite(found) else None
