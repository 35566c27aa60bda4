"""Which modules of a run should stay in fp32, and why. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from lowprec_check.analysis.run_summary import percent, shorten
from lowprec_check.schema.module_paths import is_inside, module_around
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.plan import Blame, Constant
from lowprec_check.schema.scan_result import Gap, Run


class Suspects(NamedTuple):
    """Modules that may have to stay in fp32, by path."""

    certain: list[str]
    """Contain an op that has no kernel, raises, or turns finite values into NaN or Inf."""
    likely: list[str]
    """All with ops of their own, those that add the most error first."""
    root: bool
    """Whether such an op is in the model's own ``forward``, outside any submodule."""


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
    likely = sorted((path for path in added if path), key=lambda path: -added[path])
    return Suspects([path for path in certain if path], likely, "" in certain)


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
    worst = max((row for _, _, rows in inside for row in rows), key=_added_error, default=None)
    if worst is None or _added_error(worst) == 0.0:
        return Blame(module=module, why="needed to pass, found by trial")
    why = f"adds the most error ({_added_error(worst):.1e})"
    if worst.flushed:
        why = f"turns {percent(worst.flushed)} of the non-zero values into zero"
    return Blame(module=module, why=why, op=worst.op, source=worst.source)


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
