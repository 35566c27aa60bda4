"""Which modules to keep in fp32 where no precision passes as it is: a simple search, every answer a plain run.

Suspects come from what the scan knows, the likeliest first; the search keeps 0, 1, 2, 4, … of them in fp32 until a
run passes, then gives back what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from lowprec_check.results import Run

TRIALS = 24
"""Plain runs at the most, per base."""

BASES = ("autocast-bf16", "bfloat16", "autocast-fp16", "half")
"""The order in which bases are tried: the range of bf16 forgives more."""

Trial = Callable[[str, tuple[str, ...]], Run]
"""Runs a base with modules kept in fp32, plain part only."""


def search(runs: Sequence[Run], trial: Trial) -> Run | None:
    """The first base that passes with some modules kept in fp32, as a ``plan`` run; ``None`` if none does."""
    by_name = {run.precision: run for run in runs}
    for base in BASES:
        run = by_name.get(base)
        if run is not None and run.status in ("error", "inaccurate", "nonfinite", "crashed"):
            found = _search_base(run, trial)
            if found is not None:
                return found
    return None


def _search_base(run: Run, trial: Trial) -> Run | None:
    certain, likely = suspects(run)
    attempts = _Attempts(run.precision, trial)
    for count in _growing(len(likely)):
        keep = _without_nested([*certain, *likely[:count]])
        if not keep:
            continue
        found = attempts.passes(keep)
        if found is not None:
            return msgspec.structs.replace(_shrink(keep, found, attempts), precision="plan", base=run.precision)
        if attempts.left <= 0:
            return None
    return None


def _growing(most: int) -> Iterator[int]:
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


class _Attempts:
    def __init__(self, base: str, trial: Trial) -> None:
        self.base, self.trial, self.left = base, trial, TRIALS

    def passes(self, keep: list[str]) -> Run | None:
        """The run if it passed; a trial that raises has failed, that is all."""
        if self.left <= 0:
            return None
        self.left -= 1
        run = self.trial(self.base, tuple(keep))
        return run if run.status == "ok" and _is_low(run) else None


def _is_low(run: Run) -> bool:
    """Whether anything was computed in low precision: an output that is fp32's bit for bit is fp32."""
    return run.output_is_zero or run.output_error is None or run.output_error.rel_l2 != 0.0


def _shrink(keep: list[str], found: Run, attempts: _Attempts) -> Run:
    """Give back modules one by one, the least suspect first, as long as the rest passes."""
    for module in reversed(list(keep)):
        rest = [name for name in keep if name != module]
        smaller = attempts.passes(rest) if rest else None
        if smaller is not None:
            keep, found = rest, smaller
    return found


def suspects(run: Run) -> tuple[list[str], list[str]]:
    """Modules that must be to blame (gaps, exceptions, NaN and Inf), and those that may be, worst first.

    The root is never among them: to keep it in fp32 is to run in fp32.
    """
    certain = [gap.module for gap in run.gaps]
    certain += [row.module for row in run.op_calls.rows() if row.introduced_inf or row.introduced_nan]
    if run.exception is not None and run.exception.module:
        certain.append(run.exception.module)
    blame: dict[str, float] = {}
    for row in run.op_calls.rows():
        grown = (row.accumulated_error or 0.0) - (row.input_error or 0.0)
        blame[row.module] = max(blame.get(row.module, 0.0), row.local_error or 0.0, grown)
    certain = [module for module in dict.fromkeys(certain) if module]
    likely = [module for module in sorted(blame, key=lambda name: -blame[name]) if module and module not in certain]
    return certain, likely


def _without_nested(modules: list[str]) -> list[str]:
    """Without modules that lie inside another of the list."""
    unique = list(dict.fromkeys(module for module in modules if "<" not in module))
    return [m for m in unique if not any(m != other and m.startswith(f"{other}.") for other in unique)]
