"""Judges a model that draws random numbers: fp32 runs again with the numbers of the run that is judged."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.model.module_probe import module_output
from lowprec_check.engine.model.plain_run import judge, judged, output_tensors, run_once, with_verdict
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import PlainDone
from lowprec_check.engine.run.plain_part import PlainPart
from lowprec_check.engine.trace.draws import DrawsDiffer, ReplayDraws
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import REFERENCE

OTHER_DRAWS = "its output cannot be compared, since fp32 draws other random numbers"


def judge_with_same_draws(job: Job, target: Target, part: PlainPart, send: Send) -> None:
    """Send the verdict on the outputs of ``part`` against fp32 with the same random numbers.

    If fp32 draws in other places, a finite run is ``unjudged``, with a note.
    """
    fp32, device = PRECISIONS.get(REFERENCE), torch.device(job.device)
    with (
        prepared(
            target.model,
            fp32,
            device,
            call=target.call(target.model),
            inputs=target.inputs,
            changes_parameters=job.changes_parameters,
        ) as ready,
        compiled_code_in_eager(),
    ):
        try:
            if part.probed is None:
                references = list(_outputs(ready, job, target, part))
                part.result = judged(part.result, part.outputs, references, job.tolerance)
            else:
                with ReplayDraws(part.draws[0]):
                    reference = module_output(ready, target.args, target.kwargs, job.seed, part.probed)
                verdict = judge(part.probed.tensors, reference or [], job.tolerance)
                part.result = with_verdict(part.result, *verdict)
        except DrawsDiffer as difference:
            if part.result.status != "nonfinite":
                notes = (*part.result.notes, f"{OTHER_DRAWS} ({difference})")
                part.result = msgspec.structs.replace(part.result, status="unjudged", output_error=None, notes=notes)
    send(PlainDone(part.result))


def _outputs(ready: Prepared, job: Job, target: Target, part: PlainPart) -> Iterator[list[Tensor]]:
    """The output of each fp32 call with the random numbers of the same call of ``part``."""
    for draws in part.draws:
        with ReplayDraws(draws):
            output, _ = run_once(ready, target.args, target.kwargs, job.seed)
        yield [tensor.cpu().clone() for tensor in output_tensors(output)]
