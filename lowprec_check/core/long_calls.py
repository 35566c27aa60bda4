"""What a scan does of a model whose calls are long: how often it is called, and for how long."""

from __future__ import annotations

from lowprec_check.process import system
from lowprec_check.schema.statements import counted

MOST_SECONDS = 480.0
"""How long such a scan may take, unless its runs need more calls than fit."""
LEAST_CALLS = 3
"""Calls of each run: a plain one, and one op by op, beside which the reference computes too."""
PLAIN_SHARE, EXPLAIN_SHARE = 0.45, 0.55
"""The parts of a run's time that its plain call and its instrumented part may take."""


class LongCalls:
    """Divides the time of a scan among its runs in lower precision."""

    def __init__(self, started: float, call_seconds: float, runs: int) -> None:
        """``started``: when the scan began, by :func:`time.monotonic`; fp32 has been called."""
        self._call, self._left = call_seconds, runs
        self._most = max(MOST_SECONDS, call_seconds * (2 + LEAST_CALLS * runs))
        self._end = started + self._most

    @property
    def notice(self) -> str:
        """What to expect, before the runs begin."""
        minutes = counted(round(self._most / 60), "minute")
        return (
            f"A call takes {self._call:.0f} s: each precision is called once, and once op by op. "
            f"The scan takes at most {minutes}."
        )

    def begin_run(self) -> str | None:
        """Why no further run is made; ``None`` if there is time."""
        self._left -= 1
        if system.monotonic() < self._end:
            return None
        return f"the {self._most / 60:.0f} minutes of this scan are over: a call takes {self._call:.0f} s"

    @property
    def plain_seconds(self) -> float:
        """For the plain part of the run that began."""
        return PLAIN_SHARE * self._run_seconds

    @property
    def explain_seconds(self) -> float:
        """For its instrumented part."""
        return EXPLAIN_SHARE * self._run_seconds

    @property
    def _run_seconds(self) -> float:
        """Runs to come keep time for their calls."""
        reserved = LEAST_CALLS * self._call * max(0, self._left)
        return max(LEAST_CALLS * self._call, self._end - system.monotonic() - reserved)
