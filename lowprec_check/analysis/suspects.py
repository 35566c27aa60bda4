"""Which modules of a run should stay in fp32, and why; errors that earlier ones hide."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lowprec_check.analysis.error_shares import harmful_trials, trusted_budget
from lowprec_check.analysis.predicted_error import Causes
from lowprec_check.analysis.run_summary import failing_gaps, shorten
from lowprec_check.schema.measures import MATTERS, Share
from lowprec_check.schema.module_paths import is_inside, module_around
from lowprec_check.schema.op_calls import PRODUCTS, OpCall
from lowprec_check.schema.plan import Blame, Constant
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.schema.statements import error_figure, fill, percent, short_op

LEAST_CAUSE = 0.001  # a module with a smaller share of the error is not said to cause it
_LEAST_GUESS = 1e-3  # smaller relative errors of an op are not guessed

_REASONS = {
    "missing-kernel": "has no kernel",
    "unsupported-dtype": "does not support the dtype",
    "no-backend-kernel": "has no kernel on this device",
    "dtype-mismatch": "gets inputs of different dtypes",
    "scalar-overflow": "has a constant that does not fit the dtype",
    "numeric-failure": "fails on rounded values",
    "crash": "crashes the process",
}
"""Why a module with a gap is kept, by its kind."""


class Suspects(NamedTuple):
    """Modules that may have to stay in fp32, by path."""

    certain: list[str]
    """Contain an op without a kernel, that raises, or whose NaN or Inf reaches the output."""
    likely: list[str]
    """All with own ops: the largest error shares first, then those that add the most error."""
    root: bool  # whether such an op is in the model's own `forward`, outside any submodule
    causes: Causes | None = None  # what the error of the output comes from, if there is a budget
    guess: Causes | None = None
    """The same with errors that others seem to hide; ``None`` if none seems hidden."""
    lowering: frozenset[str] = frozenset()
    """Those that compute in low precision on any input; empty if that is not known."""


def suspects(run: Run) -> Suspects:
    """The suspects in ``run``."""
    failing = [gap.module for gap in failing_gaps(run)]
    failing += [row.module for row in run.op_calls.rows() if row.spoils_output]
    if run.exception is not None and run.exception.module is not None:
        failing.append(run.exception.module)
    added: dict[str, float] = {}
    for row in run.op_calls.rows():  # what the op itself adds, or by which it magnifies the error of its inputs
        adds = max(row.local_error or 0.0, (row.accumulated_error or 0.0) - (row.input_error or 0.0))
        added[row.module] = max(added.get(row.module, 0.0), adds)
    certain = list(dict.fromkeys(failing))
    causes = causes_of(run)
    shares: Mapping[str, float] = {}
    guess = None
    if causes is not None:
        shares, guess = causes.shares, _with_hidden(causes, run)
    likely = sorted((path for path in added if path), key=lambda path: (-shares.get(path, 0.0), -added[path]))
    lowering = frozenset(row.module for row in run.op_calls.rows() if _lowers(row, run))
    return Suspects([path for path in certain if path], likely, "" in certain, causes, guess, lowering)


def _lowers(row: OpCall, run: Run) -> bool:
    """Whether an op runs in low precision on any input; autocast does so for products only."""
    is_low = run.format is not None and run.format.mark in re.split("[+→]", row.dtypes)
    return is_low and (not run.is_autocast or PRODUCTS.search(row.op) is not None)


def causes_of(run: Run) -> Causes | None:
    """The causes of the output's error; ``None`` without a budget that explains most of it."""
    budget, error = trusted_budget(run), run.rel_l2
    if budget is None:
        return None
    if error is None or not math.isfinite(error):
        error = budget.measured
    shares: dict[str, float] = defaultdict(float)
    for share in budget.shares:
        shares[share.module] += abs(share.share)
    shares[""] += abs(budget.others)
    # shares of either sign count as what they may cause
    total = math.fsum(shares.values())
    if not error or not total or not math.isfinite(error):
        return None
    return Causes(error, {module: share / total for module, share in shares.items()})


def _with_hidden(causes: Causes, run: Run) -> Causes | None:
    """``causes`` with guesses of errors that earlier ones hide; ``None`` if none seems hidden.

    If a module flushes its values to zero, later modules get zeros and add no error, although they
    would flush the original values too. How much they would add is guessed from the typical
    magnitude of the fp32 values, less what was measured; the guess only proposes modules, which a
    trial then tests.
    """
    hidden: dict[str, float] = defaultdict(float)
    if run.format is None or not run.format.underflows:
        return None
    for row in run.op_calls.rows():
        if row.rms and _lowers(row, run):
            guessed = min(1.0, run.format.smallest_subnormal / math.sqrt(12) / row.rms)
            if guessed >= max(_LEAST_GUESS, 2 * (row.local_error or 0.0)):
                hidden[row.module] += guessed**2
    if not hidden:
        return None
    shares = _by_producer(run) if run.is_autocast else dict(causes.shares)
    for module, square in hidden.items():
        shares[module] = shares.get(module, 0.0) + square / causes.error**2
    return Causes(causes.error, shares)


def _by_producer(run: Run) -> dict[str, float]:
    """Shares under autocast, where roundings between modules are due to the last product before."""
    assert run.budget is not None
    # an op rounds its result only if its inputs come from an op in 16 bits
    places: dict[tuple[str, str | None], list[tuple[OpCall, str]]] = defaultdict(list)
    producer = ""
    for row in run.op_calls.rows():
        if PRODUCTS.search(row.op):
            producer = row.module
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


# -- Why modules are kept

BY_TRIAL = "needed to pass, found by trial"
"""Why a module is kept that no analyzed run has shown a reason for."""


def blame(runs: Sequence[Run], keep: Sequence[str], untried: Collection[str] = ()) -> list[Blame]:
    """For each module of ``keep`` (none inside another) why, from the first run that shows it."""
    kept = frozenset(keep)
    of_runs = [(run, _by_module(failing_gaps(run), kept), _by_module(run.op_calls.rows(), kept)) for run in runs]
    blames = []
    for module in keep:
        faults = (_first_fault(run, module, gaps[module], rows[module]) for run, gaps, rows in of_runs)
        fault = next(filter(None, faults), None) or _out_of_range(module, runs) or _largest_cause(module, runs)
        fault = fault or _quantized(module, runs)
        # else nothing is known against it but that the model fails without it
        by_trial = BY_TRIAL
        if module in untried:
            by_trial = "kept where the search ended; not tried without it"
        blames.append(fault or Blame(module=module, why=by_trial))
    return blames


Located = TypeVar("Located", Gap, OpCall)


def _by_module(found: Iterable[Located], kept: Collection[str]) -> defaultdict[str, list[Located]]:
    grouped: defaultdict[str, list[Located]] = defaultdict(list)
    for item in found:
        module = module_around(item.module, kept)
        if module is not None:
            grouped[module].append(item)
    return grouped


def _quantized(module: str, runs: Sequence[Run]) -> Blame | None:
    """The error of a layer that is quantized, by itself."""
    layers = (layer for run in runs for layer in run.layer_errors if layer.module == module and layer.local)
    layer = next(layers, None)
    if layer is None:
        return None
    return Blame(module=module, op=layer.op, why=f"has an error of {error_figure(layer.local)} if it is quantized")


def _out_of_range(module: str, runs: Sequence[Run]) -> Blame | None:
    """The op inside ``module`` whose values out of range alone make the output of fp32 wrong."""
    trials = (trial for run in runs for trial in harmful_trials(run) if is_inside(trial.module, module))
    trial = next(trials, None)
    if trial is None:
        return None
    why = "overflows to Inf" if trial.becomes == "Inf" else "rounds values to zero"
    return Blame(module=module, why=why, op=trial.op, source=trial.source)


def _largest_cause(module: str, runs: Sequence[Run]) -> Blame | None:
    """The largest share inside ``module``, from the first budget in which it matters."""
    shares: list[list[Share]] = []
    for run in runs:
        budget, inside = trusted_budget(run), list[Share]()
        # an error that is tolerated is not why the module is needed, if ops fail too
        limit = run.relative_tolerance if failing_gaps(run) else None
        if budget is not None and (limit is None or budget.measured is None or not budget.measured <= limit):
            inside = [share for share in budget.shares if is_inside(share.module, module)]
        shares.append(inside)
    sums = [sum(share.share for share in inside) for inside in shares]
    largest = max(range(len(sums)), key=sums.__getitem__, default=None)
    index = next((index for index, total in enumerate(sums) if total >= MATTERS), largest)
    # nor is a small share, then
    least = MATTERS if any(map(failing_gaps, runs)) else LEAST_CAUSE
    if index is None or sums[index] < least:
        return None
    cause = max(shares[index], key=lambda share: share.share)
    share = percent(sums[index]) if sums[index] < 1 else "all"  # more where others cancel a part
    why = f"has {share} of the error{' that is left by the others' if index else ''}"
    if cause.share > sums[index] - MATTERS:
        return Blame(module=module, why=why, op=cause.op, source=cause.source)
    at = fill(" at {}", cause.source)
    return Blame(module=module, why=f"{why}, {percent(cause.share)} from {short_op(cause.op)}{at}")


def at_fault(run: Run, module: str) -> Blame | None:
    """The fault, or first NaN or Inf, inside ``module``; ``""``: the model's own ``forward``."""
    gaps = (gap for gap in failing_gaps(run) if is_inside(gap.module, module))
    return _first_fault(run, module, gaps, (row for row in run.op_calls.rows() if is_inside(row.module, module)))


def _first_fault(run: Run, module: str, gaps: Iterable[Gap], rows: Iterable[OpCall]) -> Blame | None:
    """:func:`at_fault`, for the gaps and rows inside ``module``."""
    for gap in gaps:
        return Blame(module=module, why=_REASONS[gap.kind], op=gap.op, source=gap.source)
    raised = run.exception or run.stopped_by
    if raised is not None and raised.module is not None and is_inside(raised.module, module):
        return Blame(module=module, why=f"raises {shorten(raised.text)}", source=raised.source)
    for row in rows:
        if row.spoils_output:
            what = "overflows to Inf" if row.introduced_inf else "gives NaN"
            return Blame(module=module, why=what, op=row.op, source=row.source)
    return None


def constants(run: Run) -> list[Constant]:
    """Constants in the code that do not fit the dtype of ``run``, each with its replacement."""
    if run.format is None:
        return []
    found = []
    for gap in (gap for gap in run.gaps if gap.kind == "scalar-overflow"):
        limit = "max" if gap.constant and gap.constant > 0 else "min"
        use = f"torch.finfo({run.format.dtype}).{limit}"
        found.append(Constant(module=gap.module, op=gap.op, source=gap.source, value=gap.constant, use=use))
    return found


def kept_because(found: Blame) -> str:
    """Why a plan keeps a module in fp32: ``linalg_inv_ex has no kernel (net.py:24)``."""
    op = fill("{} ", found.op and short_op(found.op))
    return f"{op}{found.why}{fill(' ({})', found.source)}"
