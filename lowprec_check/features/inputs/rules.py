"""LP307: runs that pass, but fail on other inputs."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.recommend import action
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import CALIBRATE, OTHER_RANGES, recommended_instead, search_advice
from lowprec_check.analysis.run_summary import fails_elsewhere
from lowprec_check.analysis.statements.status import fails_on_further
from lowprec_check.schema.axes import calibrates
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import chained, plain, say, say_if


@rule("LP307", "input-dependent", "warning", timed=True)
def input_dependent(result: ScanResult) -> Iterator[Finding]:
    """The run passes on the inputs of the scan, and fails on others like them.

    Observed: a run that passes was tried on further inputs, each compared with fp32 on the same
    input. On some of them the error exceeds the tolerance, the output has NaN or Inf where that of
    fp32 is finite, or the run raises an exception or crashes. The status stays that of the inputs
    of the scan; the run is not recommended.

    The further inputs are drawn anew, if `inputs` is a function, or are the next batches of a
    loader. Else they have resampled values: each tensor draws from its own, with replacement, while
    masks and integers in order stay. How many are tried depends on the time of a call; the interval
    is that of Clopper and Pearson for the share that fails.

    Usual causes: an error near the tolerance, which some inputs exceed; values that overflow on
    some inputs; decisions (argmax, top-k, comparisons) between values that are almost equal.

    What to do: use a precision that passes on all inputs that it was tried on. If none does, find
    the modules to keep in fp32 with inputs on which the run fails: `lowprec-check plan
    --batches 8`. Resampled values may be unlike yours, so let `inputs` return real ones:

        # before
        inputs = torch.randn(8, 16)
        # after
        def inputs(batch=0):
            return torch.randn(8, 16, generator=torch.Generator().manual_seed(batch))
    """
    for run in low_runs(result):
        further = fails_elsewhere(run)
        if further is None:
            continue
        least = say_if(further.low >= 0.01, "at least {low:share} and ", low=further.low)  # else it would be "< 1 %"
        most = say("at most {high:share} of such inputs fail (95 % confidence)", high=further.high)
        message = chained(fails_on_further(further), chained(least, most, between=""))
        # Inputs that were made up prove less than the user's own.
        best = recommended_instead(run, result)
        if further.kind == "resampled":
            search = "check it on inputs of yours: make `inputs` a function of the batch number"
        elif run.is_quantized:
            search = CALIBRATE if calibrates(run.backend) else OTHER_RANGES
        else:
            search = search_advice(run, result, best, further.first_failed or 1)
        advice = plain(search)
        if best is not None:
            passes = f"{best.elsewhere} passes on every input tried"
            if action(result) == "use":
                passes = f"use {best.elsewhere}, which passes on every input tried"
            advice = plain(f"{passes}; or {search}")
        yield Finding(message, run=run, help=advice)
