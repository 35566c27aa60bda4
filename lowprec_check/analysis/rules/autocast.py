"""LP4xx: effects of autocast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, uses_autocast
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say


@rule("LP401", "cast-churn", "note")
def cast_churn(result: ScanResult) -> Iterator[Finding]:
    """Autocast casts the same tensor back and forth.

    Observed: casts repeat, or undo, an earlier cast of the same tensor. Autocast caches the casts of weights, not those
    of activations, so each costs time and memory. One finding counts those of the whole model and names the line with
    the most.

    Usual causes: a tensor that several ops use, each cast on its own; ops that autocast runs in fp32 between ops that
    it runs in 16 bits.

    What to do: nothing if the run is fast enough. Otherwise group the ops that run in fp32 inside
    `torch.autocast(device, enabled=False)`, or cast the tensor once before its uses:

        # before: autocast casts x twice
        y = self.first(x) + self.second(x)
        # after
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self.first(x) + self.second(x)
    """
    for run in filter(uses_autocast, low_runs(result)):
        casts = [row for row in run.op_calls.rows() if row.op == _CAST and row.is_forward]
        lines = Counter(row.source for row in casts if row.recast)
        if not lines:
            continue
        [(source, most)] = lines.most_common(1)
        count = lines.total()
        message = say("{casts:of cast} repeated or undid an earlier cast of the same tensor", casts=[count, len(casts)])
        here = say("{here:number} of them here", here=most) if len(lines) > 1 else None
        yield Finding(chained(message, here), run, "", _CAST, source, calls=count)


_CAST = "aten._to_copy.default"


@rule("LP402", "vacuous-autocast", "note")
def vacuous_autocast(result: ScanResult) -> Iterator[Finding]:
    """The op runs under autocast on fp32 inputs, and fails when the whole model is cast.

    Observed: the op has no kernel for this dtype when the whole model is cast, and runs under autocast on inputs that
    are fp32 already.

    Usual causes: the op comes before the first layer that autocast runs in 16 bits, such as a linear layer.

    What to do: nothing for this model. If the model changes and such a layer comes before the op, the op may fail;
    cast its input to be safe:

        # before
        y = torch.linalg.inv(x)
        # after
        y = torch.linalg.inv(x.float())
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
        message = say("it runs here on fp32 inputs; in {other:text} it fails", other=cast.key.label)
        yield Finding(message, autocast, module, op, source, help="call it on x.float() to be safe", calls=count)
