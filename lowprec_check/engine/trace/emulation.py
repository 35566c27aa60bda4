"""Which ops are computed in fp32 and rounded, because their kernel is too slow or kills the process."""

from __future__ import annotations

SLOW_RATIO = 8.0
"""A kernel more than this many times slower than fp32 counts as slow."""

SLOW_SECONDS = 0.01
"""A call up to this long is never slow: emulating it would save nothing."""


class Emulation:
    """``slow`` and ``crashed`` map op names to the reason; with ``measure_once``, slow kernels are added as they show."""

    def __init__(
        self,
        slow: dict[str, str] | None = None,
        crashed: dict[str, str] | None = None,
        *,
        measure_once: bool = False,
    ) -> None:
        self.slow = dict(slow or {})
        self.crashed = dict(crashed or {})
        self.measure_once = measure_once

    def includes(self, op: str) -> bool:
        """Whether ``op`` is emulated."""
        return op in self.slow or op in self.crashed

    def add_timing(self, op: str, seconds: float, reference_seconds: float) -> None:
        """Record the times of one call; with ``measure_once``, a slow kernel is emulated from then on."""
        if self.measure_once and seconds > SLOW_SECONDS and seconds > SLOW_RATIO * reference_seconds:
            ratio = seconds / max(reference_seconds, 1e-9)
            self.slow[op] = (
                f"{ratio:.0f} times slower than fp32 in one call ({seconds * 1e3:.0f} ms), too slow for the budget"
            )

    def reasons(self) -> dict[str, str]:
        """Op to reason, for all that is emulated."""
        return self.slow | self.crashed
