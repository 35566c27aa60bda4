"""LP4xx: what autocast does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, uses_autocast
from lowprec_check.schema.scan_result import Run, ScanResult


@rule("LP401", "cast-churn", "note")
def cast_churn(result: ScanResult) -> Iterator[Finding]:
    """Autocast casts the same tensor back and forth.

    Casts in one module that repeat a cast already made of the same tensor, or undo it. Autocast remembers the casts
    of weights, not those of activations. What to do: cast once before the branch, or put the region of fp32 ops
    under one `autocast(enabled=False)`.
    """
    for run in low_runs(result):
        if not uses_autocast(run):
            continue
        places = Counter((row.module, row.source) for row in run.op_calls.rows() if row.recast)
        for (module, source), count in places.most_common():
            message = f"{count} {'casts repeat' if count > 1 else 'cast repeats'} or undo{'' if count > 1 else 'es'} another of the same tensor"
            yield Finding(message, run, module, "aten._to_copy.default", source, calls=count)


@rule("LP402", "vacuous-autocast", "note")
def vacuous_autocast(result: ScanResult) -> Iterator[Finding]:
    """Passes only because nothing low-precision reaches the op.

    The op has no kernel in this dtype (the blanket cast shows it) and passes under autocast because its inputs here
    are fp32 from the start. Fed by a layer that autocast runs in 16 bits, it may fail.
    """
    runs = [(run, run.basis) for run in low_runs(result) if run.base is None and run.basis is not None]
    for autocast, basis in runs:
        if basis.kind == "autocast" and autocast.status == "ok":
            for cast, other in runs:
                if (other.kind, other.format, cast.backend) == ("cast", basis.format, autocast.backend):
                    yield from _vacuous(cast, autocast)


def _vacuous(cast: Run, autocast: Run) -> Iterator[Finding]:
    gaps = {(gap.op, gap.module, gap.source) for gap in cast.gaps if gap.layer == "dispatch"}
    places: Counter[tuple[str, str, str | None]] = Counter()
    for row in autocast.op_calls.rows():
        key = (row.op, row.module, row.source)
        if key in gaps and not row.accumulated_error and row.dtypes.startswith("f32"):
            places[key] += 1
    for (op, module, source), count in places.items():
        message = f"passes only because its inputs are fp32 here; {cast.precision} has no kernel for it"
        yield Finding(message, autocast, module, op, source, calls=count)
