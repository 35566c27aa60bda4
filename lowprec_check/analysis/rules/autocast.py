"""LP4xx: casts that autocast makes again and again, and those that it does not make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, runs_under_autocast, runs_with_ops
from lowprec_check.analysis.run_summary import is_cast
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import chained, say, say_if


@rule("LP401", "cast-churn", "note")
def cast_churn(result: ScanResult) -> Iterator[Finding]:
    """Autocast casts the same tensor back and forth.

    Observed: casts repeat, or undo, an earlier cast of the same tensor. Autocast caches the casts
    of weights, not those of activations, so each costs time and memory. One finding counts those of
    the whole model and names the line with the most.

    Usual causes: a tensor that several ops use, each cast on its own; ops that autocast runs in
    fp32 between ops that it runs in 16 bits.

    What to do: nothing if the run is fast enough. Otherwise group the ops that run in fp32 inside
    `torch.autocast(device, enabled=False)`, or cast the tensor once before its uses:

        # before: autocast casts x twice
        y = self.first(x) + self.second(x)
        # after
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self.first(x) + self.second(x)
    """
    for run in runs_with_ops(result):
        if not run.is_autocast:
            continue
        cast = "aten._to_copy.default"
        casts = [row for row in run.op_calls.rows() if row.op == cast and row.is_forward]
        lines = Counter(row.source for row in casts if row.recast)
        if lines:
            [(source, most)], count = lines.most_common(1), lines.total()
            again = "{casts:of cast} repeated or undid an earlier cast of the same tensor"
            here = say_if(len(lines) > 1, "{here:number} of them here", here=most)
            message = chained(say(again, casts=[count, len(casts)]), here)
            yield Finding(message, run, "", cast, source, calls=count)


@rule("LP402", "vacuous-autocast", "note")
def vacuous_autocast(result: ScanResult) -> Iterator[Finding]:
    """The op runs under autocast on fp32 inputs, and fails when the whole model is cast.

    Observed: the op has no kernel for this dtype when the whole model is cast, and runs under
    autocast on inputs that are fp32 already. Ops of which the catalog has measured that autocast
    runs them on 16-bit inputs too are left out.

    Usual causes: the op comes before the first layer that autocast runs in 16 bits, such as a
    linear layer.

    What to do: nothing for this model. If the model changes and such a layer comes before the op,
    the op may fail; cast its input to be safe:

        # before
        y = nn.functional.interpolate(x, size=4, mode="bilinear", antialias=True)
        # after
        y = nn.functional.interpolate(x.float(), size=4, mode="bilinear", antialias=True)
    """
    runs = [run for run in low_runs(result) if run.base is None]
    for autocast in runs:
        if not autocast.is_autocast or autocast.status != "ok":
            continue
        for cast in runs:
            if not is_cast(cast) or (cast.format, cast.backend) != (autocast.format, autocast.backend):
                continue
            # Ops that fail in the cast, and run here on inputs that autocast did not cast.
            missing = (gap for gap in cast.gaps if gap.kind == "missing-kernel")
            gaps = {gap.place for gap in missing if not runs_under_autocast(gap, autocast, result)}
            rows = [row for row in autocast.op_calls.rows() if row.place in gaps and row.dtypes.startswith("f32")]
            message = say("it runs here on fp32 inputs; in {other:text} it fails", other=cast.key.label)
            # An error that the inputs bring along shows that they come from an op in 16 bits.
            for place, count in Counter(row.place for row in rows if not row.accumulated_error).items():
                yield Finding(message, autocast, *place, help="call it on x.float() to be safe", calls=count)
