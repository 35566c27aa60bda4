"""Judges a model that draws random numbers: fp32 runs again with the numbers of the run that is judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.model.plain_run import judge, judged, module_output, output_tensors, run_once, with_verdict
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.run.job import Send
from lowprec_check.engine.run.messages import PlainDone
from lowprec_check.engine.run.plain_part import OTHER_DRAWS, PlainPart, without_verdict
from lowprec_check.engine.trace.plain_modes import Draw, DrawsDiffer, ReplayDraws


def judge_with_same_draws(ready: Prepared, part: PlainPart, send: Send) -> None:
    """Send the verdict on the outputs of ``part`` against the fp32 model ``ready`` with the same random numbers.

    If fp32 draws in other places, a finite run is ``unjudged``, with a note.
    """
    call, tolerance = (ready, part.target.args, part.target.kwargs, part.job.seed), part.job.tolerance
    try:
        with compiled_code_in_eager():
            if part.probed is None:
                references = [_output(call, draws) for draws in part.draws]
                part.result = judged(part.result, part.outputs, references, tolerance)
            else:
                with ReplayDraws(part.draws[0]):
                    reference = module_output(*call, part.probed)
                part.result = with_verdict(part.result, *judge(part.probed.tensors, reference or [], tolerance))
    except DrawsDiffer as difference:
        if part.result.status != "nonfinite":
            part.result = without_verdict(part.result, f"{OTHER_DRAWS} ({difference})")
    send(PlainDone(part.result))


def _output(call: tuple[Prepared, Any, Any, int], draws: Sequence[Draw]) -> list[Tensor]:
    """The output of one fp32 call with the random numbers ``draws``."""
    with ReplayDraws(draws):
        output, _ = run_once(*call)
    return [tensor.cpu().clone() for tensor in output_tensors(output)]
