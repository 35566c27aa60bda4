"""Judges a model that draws random numbers: fp32 runs again with the numbers of the run that is judged."""

from __future__ import annotations

import msgspec
import torch

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.model.plain_run import judge, output_tensors, run_once, with_verdict
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import PlainDone
from lowprec_check.engine.run.plain_part import PlainPart
from lowprec_check.engine.trace.draws import DrawsDiffer, ReplayDraws
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import REFERENCE

OTHER_DRAWS = "compared with an fp32 run that drew other random numbers"


def judge_with_same_draws(job: Job, target: Target, part: PlainPart, send: Send) -> None:
    """Send the verdict on the first output of ``part`` against fp32 with the same random numbers.

    If fp32 draws in other places, the verdict stays, with a note.
    """
    fp32 = PRECISIONS.get(REFERENCE)
    with (
        prepared(
            target.model,
            fp32,
            torch.device(job.device),
            call=target.call(target.model),
            changes_parameters=job.changes_parameters,
        ) as ready,
        compiled_code_in_eager(),
    ):
        try:
            with ReplayDraws(part.draws):
                output, _ = run_once(ready, target.args, target.kwargs, job.seed)
        except DrawsDiffer as difference:
            notes = (*part.result.notes, f"{OTHER_DRAWS}: {difference}")
            part.result = msgspec.structs.replace(part.result, notes=notes)
        else:
            reference = [tensor.cpu() for tensor in output_tensors(output)]
            part.result = with_verdict(part.result, *judge(part.outputs[0], reference, job.tolerance))
    send(PlainDone(part.result))
