"""Which modules of a run should stay in fp32, and why; errors that earlier ones hide."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from lowprec_check.analysis.predicted_rest import Causes, causes_of
from lowprec_check.analysis.run_summary import shorten
from lowprec_check.schema.measures import MATTERS, ErrorBudget
from lowprec_check.schema.module_paths import is_inside, module_around
from lowprec_check.schema.op_calls import PRODUCTS, OpCall
from lowprec_check.schema.plan import Blame, Constant
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.schema.statements import percent, short_op

# -- Errors that an analyzed run does not show, because earlier ones hide them
#
# If a module flushes its values to zero, later modules get zeros and add no error, although they would flush the original values too. How
# much they would add is guessed from the typical magnitude of the fp32 values; the guess only proposes modules, which a trial then tests.

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


# -- Which modules of a run should stay in fp32, and why

LEAST_CAUSE = 0.001
"""A module with a smaller share of the error is not said to cause it."""


class Suspects(NamedTuple):
    """Modules that may have to stay in fp32, by path."""

    certain: list[str]
    """Contain an op that has no kernel, raises, or turns finite values into NaN or Inf."""
    likely: list[str]
    """All with ops of their own: the largest shares of the output's error first, then those that add the most error."""
    root: bool
    """Whether such an op is in the model's own ``forward``, outside any submodule."""
    causes: Causes | None = None
    """What the error of the output comes from, if there is a budget."""
    guess: Causes | None = None
    """The same with errors that others seem to hide; ``None`` if none seems hidden."""


def suspects(run: Run) -> Suspects:
    """The suspects in ``run``."""
    failing = [gap.module for gap in run.gaps]
    failing += [row.module for row in run.op_calls.rows() if _gives_nonfinite(row)]
    if run.exception is not None and run.exception.module is not None:
        failing.append(run.exception.module)
    added: dict[str, float] = {}
    for row in run.op_calls.rows():
        added[row.module] = max(added.get(row.module, 0.0), _added_error(row))
    certain = list(dict.fromkeys(failing))
    causes = causes_of(run)
    shares = causes.shares if causes is not None else {}
    likely = sorted((path for path in added if path), key=lambda path: (-shares.get(path, 0.0), -added[path]))
    return Suspects([path for path in certain if path], likely, "" in certain, causes, guess_causes(run))


def blame(runs: Sequence[Run], keep: Sequence[str]) -> list[Blame]:
    """For each kept module the op at fault, from the first of ``runs`` that shows one; none is inside another."""
    kept = frozenset(keep)
    gaps = [_by_module(run.gaps, kept) for run in runs]
    rows = [_by_module(run.op_calls.rows(), kept) for run in runs]
    return [
        _blame(module, [(run, its[module], calls[module]) for run, its, calls in zip(runs, gaps, rows, strict=True)])
        for module in keep
    ]


Located = TypeVar("Located", Gap, OpCall)


def _by_module(found: Iterable[Located], kept: Collection[str]) -> defaultdict[str, list[Located]]:
    """The gaps or rows inside each kept module."""
    grouped: defaultdict[str, list[Located]] = defaultdict(list)
    for item in found:
        module = module_around(item.module, kept)
        if module is not None:
            grouped[module].append(item)
    return grouped


def _blame(module: str, inside: Sequence[tuple[Run, list[Gap], list[OpCall]]]) -> Blame:
    """Why ``module`` is kept; ``inside`` has each run with the gaps and rows inside the module."""
    for run, gaps, rows in inside:
        found = _first_fault(run, module, gaps, rows)
        if found is not None:
            return found
    found = _largest_cause(module, [run.budget for run, _, _ in inside if run.budget is not None])
    return found or Blame(module=module, why="needed to pass, found by trial")


def _largest_cause(module: str, budgets: Iterable[ErrorBudget]) -> Blame | None:
    """The largest share inside ``module``, from the first budget in which it matters, else from that in which it is largest."""
    shares = [[share for share in budget.shares if is_inside(share.module, module)] for budget in budgets]
    sums = [sum(share.share for share in its) for its in shares]
    index = next((index for index, total in enumerate(sums) if total >= MATTERS), None)
    if index is None:
        index = max(range(len(sums)), key=sums.__getitem__, default=None)
    if index is None or sums[index] < LEAST_CAUSE:
        return None
    largest = max(shares[index], key=lambda share: share.share)
    why = f"has {percent(sums[index])} of the error{' that is left by the others' if index else ''}"
    return Blame(module=module, why=why, op=largest.op, source=largest.source)


def at_fault(run: Run, module: str) -> Blame | None:
    """What fails inside ``module``, or the op that first gives NaN or Inf; ``""`` is the model's own ``forward``."""
    gaps = (gap for gap in run.gaps if is_inside(gap.module, module))
    return _first_fault(run, module, gaps, (row for row in run.op_calls.rows() if is_inside(row.module, module)))


def _first_fault(run: Run, module: str, gaps: Iterable[Gap], rows: Iterable[OpCall]) -> Blame | None:
    """:func:`at_fault`, for the gaps and rows inside ``module``."""
    for gap in gaps:
        return Blame(module=module, why=_reason_of(gap), op=gap.op, source=gap.source)
    raised = run.exception or run.stopped_by
    if raised is not None and raised.module is not None and is_inside(raised.module, module):
        return Blame(module=module, why=f"raises {shorten(raised.text)}", source=raised.source)
    for row in rows:
        if _gives_nonfinite(row):
            what = "overflows to Inf" if row.introduced_inf else "gives NaN"
            return Blame(module=module, why=what, op=row.op, source=row.source)
    return None


def _gives_nonfinite(row: OpCall) -> bool:
    return bool(row.introduced_inf or row.introduced_nan)


def _added_error(row: OpCall) -> float:
    """rel_l2 that the op itself adds, or by which it magnifies the error of its inputs."""
    return max(row.local_error or 0.0, (row.accumulated_error or 0.0) - (row.input_error or 0.0))


def _reason_of(gap: Gap) -> str:
    return {
        "missing-kernel": "has no kernel",
        "unsupported-dtype": "does not support the dtype",
        "no-backend-kernel": "has no kernel on this device",
        "dtype-mismatch": "gets inputs of different dtypes",
        "scalar-overflow": "has a constant that does not fit the dtype",
        "numeric-failure": "fails on rounded values",
        "crash": "crashes the process",
    }[gap.kind]


def constants(run: Run) -> list[Constant]:
    """Constants in the code that do not fit the dtype of ``run``, each with its replacement."""
    if run.basis is None:
        return []
    dtype = run.basis.format.dtype
    return [
        Constant(
            module=gap.module,
            op=gap.op,
            source=gap.source,
            value=gap.constant,
            use=f"torch.finfo({dtype}).{'max' if gap.constant and gap.constant > 0 else 'min'}",
        )
        for gap in run.gaps
        if gap.kind == "scalar-overflow"
    ]


def kept_because(found: Blame) -> str:
    """Why a plan keeps a module in fp32: ``linalg_inv_ex has no kernel (net.py:24)``."""
    what = f"{short_op(found.op)} {found.why}" if found.op else found.why
    return f"{what} ({found.source})" if found.source else what
