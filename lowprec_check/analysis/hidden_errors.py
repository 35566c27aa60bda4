"""Errors that an analyzed run does not show, because earlier ones hide them.

If a module flushes its values to zero, later modules get zeros and add no error, although they would flush the original values too. How
much they would add is guessed from the typical magnitude of the fp32 values; the guess only proposes modules, which a trial then tests.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from lowprec_check.analysis.predicted_rest import Causes, causes_of
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.op_calls import PRODUCTS, OpCall
from lowprec_check.schema.scan_result import Run

_LEAST = 1e-3
"""Smaller relative errors of an op are not guessed."""


def guess_causes(run: Run) -> Causes | None:
    """The causes of the error in ``run``, with guesses of hidden errors; ``None`` if none seems hidden or there is no budget."""
    causes = causes_of(run)
    hidden = _hidden(run)
    if causes is None or not hidden:
        return None
    shares = dict(causes.shares) if not _is_autocast(run) else _by_producer(run)
    for module, square in hidden.items():
        shares[module] = shares.get(module, 0.0) + square / causes.error**2
    return Causes(causes.error, shares)


def _is_autocast(run: Run) -> bool:
    return run.basis is not None and run.basis.kind == "autocast"


def _hidden(run: Run) -> dict[str, float]:
    """By module, the squared relative errors of its ops that are too small for the dtype, less those that were measured."""
    found: dict[str, float] = defaultdict(float)
    if run.basis is None or not run.basis.format.underflows:
        return found
    step, mark = run.basis.format.smallest_subnormal, run.basis.format.mark
    for row in run.op_calls.rows():
        if (
            not row.rms
            or mark not in re.split("[+→]", row.dtypes)
            or (_is_autocast(run) and not PRODUCTS.search(row.op))
        ):
            continue
        guessed = min(1.0, step / math.sqrt(12) / row.rms)
        if guessed >= max(_LEAST, 2 * (row.local_error or 0.0)):
            found[row.module] += guessed**2
    return found


def _by_producer(run: Run) -> dict[str, float]:
    """The shares of modules under autocast, where an op rounds its result only if its inputs come from one that runs in 16 bits:
    the rounding between modules counts for the module of the last such op before it.
    """
    assert run.budget is not None
    places: dict[tuple[str, str | None], list[tuple[OpCall, str]]] = defaultdict(list)
    for row, producer in _with_producers(run):
        places[row.op, row.source].append((row, producer))
    shares: dict[str, float] = defaultdict(float)
    for share in run.budget.shares:
        parts = [
            (abs(row.share), producer)
            for row, producer in places[share.op, share.source]
            if share.rounding and row.share and (not share.module or is_inside(row.module, share.module))
        ]
        total = math.fsum(part for part, _ in parts)
        for part, producer in parts:
            shares[producer] += abs(share.share) * part / total
        if not parts:
            shares[share.module] += abs(share.share)
    return shares


def _with_producers(run: Run) -> Iterator[tuple[OpCall, str]]:
    """Each row with the module of the last op before it that autocast runs in 16 bits."""
    producer = ""
    for row in run.op_calls.rows():
        if PRODUCTS.search(row.op):
            producer = row.module
        yield row, producer
