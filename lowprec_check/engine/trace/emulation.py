"""Which ops are emulated, that is computed in fp32 and rounded, because their kernel is too slow or crashes."""

from __future__ import annotations

SLOW_RATIO = 8.0
"""A kernel is slow if it takes more than this many times as long as fp32."""

SLOW_SECONDS = 0.01
"""A call up to this long is never slow: emulation would save nothing."""


Place = tuple[str, str, str | None]
"""Op, module and source line of an op call."""


class Emulation:
    """``slow`` maps op names to the reason, ``crashed`` places; ``measure_once`` adds slow kernels when they are found."""

    def __init__(
        self,
        slow: dict[str, str] | None = None,
        crashed: dict[Place, str] | None = None,
        *,
        measure_once: bool = False,
    ) -> None:
        self.slow = dict(slow or {})
        self.crashed = dict(crashed or {})
        self.measure_once = measure_once

    def includes(self, place: Place) -> bool:
        """Whether the op at ``place`` is emulated."""
        return place[0] in self.slow or place in self.crashed

    def add_timing(self, op: str, seconds: float, reference_seconds: float) -> None:
        """Record the times of one call; with ``measure_once``, a slow kernel is emulated from then on."""
        if self.measure_once and seconds > SLOW_SECONDS and seconds > SLOW_RATIO * reference_seconds:
            ratio = seconds / max(reference_seconds, 1e-9)
            self.slow[op] = (
                f"{ratio:.0f} times slower than fp32 in one call ({seconds * 1e3:.0f} ms), too slow for the budget"
            )

    def reasons(self) -> dict[str, str]:
        """The reason for each emulated op."""
        return self.slow | {op: reason for (op, _, _), reason in self.crashed.items()}
