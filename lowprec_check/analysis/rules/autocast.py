"""LP4xx: effects of autocast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, uses_autocast
from lowprec_check.schema.scan_result import Run, ScanResult


@rule("LP401", "cast-churn", "note")
def cast_churn(result: ScanResult) -> Iterator[Finding]:
    """Autocast casts the same tensor back and forth.

    Observed: casts at this line repeat, or undo, an earlier cast of the same tensor. Autocast caches the casts of
    weights, not those of activations, so each costs time and memory.

    Usual causes: a tensor that several ops use, each cast on its own; ops that autocast runs in fp32 between ops that
    it runs in 16 bits.

    What to do: nothing if the run is fast enough. Otherwise cast the tensor once before its uses, or group the ops
    that run in fp32:

        with torch.autocast(x.device.type, enabled=False):
            y = loss_terms(x.float())
    """
    for run in low_runs(result):
        if not uses_autocast(run):
            continue
        places = Counter((row.module, row.source) for row in run.op_calls.rows() if row.recast)
        for (module, source), count in places.most_common():
            verbs = "cast repeats or undoes" if count == 1 else "casts repeat or undo"
            message = f"{count} {verbs} an earlier cast of the same tensor"
            advice = "cast the tensor once before its uses, or ignore this if the run is fast enough"
            yield Finding(message, run, module, "aten._to_copy.default", source, help=advice, calls=count)


@rule("LP402", "vacuous-autocast", "note")
def vacuous_autocast(result: ScanResult) -> Iterator[Finding]:
    """The op passes under autocast only because its inputs are fp32.

    Observed: the op has no kernel for this dtype when the whole model is cast, and runs under autocast on inputs that
    are fp32 already.

    Usual causes: the op comes before the first layer that autocast runs in 16 bits, such as a linear layer.

    What to do: nothing for this model. If the model changes and such a layer comes before the op, the op may fail;
    cast its input to be safe:

        y = torch.linalg.inv(x)            # before
        y = torch.linalg.inv(x.float())    # after
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
        message = f"passes only because its inputs are fp32: there is no kernel for {cast.precision}"
        yield Finding(message, autocast, module, op, source, help="call it on x.float() to be safe", calls=count)
