"""Which ops are computed in fp32 and rounded, because their kernel is too slow or kills the process."""

from __future__ import annotations

SLOW_RATIO = 8.0
"""A kernel this many times slower than fp32 is worth emulating."""

SLOW_SECONDS = 0.01


class Emulation:
    """``slow`` and ``crashed`` map op names to the reason; with ``measure_once``, slow kernels join as they show."""

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

    def wants(self, op: str) -> bool:
        """Whether ``op`` is to be emulated."""
        return op in self.slow or op in self.crashed

    def timed(self, op: str, seconds: float, reference_seconds: float) -> None:
        """Take note of one measured call; a slow kernel is emulated from now on."""
        if self.measure_once and seconds > SLOW_SECONDS and seconds > SLOW_RATIO * reference_seconds:
            ratio = seconds / max(reference_seconds, 1e-9)
            self.slow[op] = (
                f"{ratio:.0f} times slower than fp32 in one call ({seconds * 1e3:.0f} ms), too slow for the budget"
            )

    def reasons(self) -> dict[str, str]:
        """Op to reason, for all that is emulated."""
        return self.slow | self.crashed
