"""What a prediction rests on."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, Said, per_scan
from lowprec_check.catalog.versions import release_of
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import chained, plain, say, say_if


@per_scan("prediction", "prediction", evidence="predicted", after="note", detail="more")
def prediction(result: ScanResult) -> Iterator[Made]:
    """That nothing ran on the device, and how many ops the catalog knows for it."""
    device = result.prediction
    if device is None:
        return
    missing, policy = "the 16-bit kernels of the CPU were emulated", ""
    if device.name != "cpu":
        missing = f"nothing ran on {device.name}"
    elif device.torch != release_of(str(result.environment["torch"])):
        missing = f"nothing ran with torch {device.torch}"
    if device.autocast != device.torch:
        policy = f"; its autocast policy: torch {device.autocast}"
    words = "Predicted: {missing:text}. Its kernels: {kernels:text}{policy:text}"
    head = say(words, missing=missing, kernels=device.kernels, policy=policy)
    # How many of the ops in 16 bits the catalog knows, if any ran to their end.
    assumed = sorted({op for run in result.runs for op in run.assumed_ops})
    known = {op for run in result.runs for op in run.known_ops} - {*assumed}
    statuses = {run.status for run in result.runs if run.is_low}
    if known or assumed:
        knows = "the catalog knows {known:number} of {total:count op} in 16 bits"
        covered = say(knows, known=len(known), total=len(known) + len(assumed))
    elif not statuses.isdisjoint(("timeout", "crashed")):
        covered = plain("which ops run in 16 bits is not known, since a run did not end")
    elif "skipped" in statuses:
        covered = plain("which ops run in 16 bits is not known, since a run was skipped")
    elif any(low.mark in dtypes for low in LOW_FORMATS for run in result.runs for dtypes in run.op_calls.dtypes):
        # Casts and moves of values are alike on all devices.
        covered = plain("no op in 16 bits needs to be in the catalog")
    else:
        covered = plain("no op ran in 16 bits")
    others = say_if(assumed, ", the others are assumed to run: {ops:ops}", ops=assumed)
    yield Said(chained(head, chained(covered, others, between=""), between="; "), "warn")


@per_scan("assumed-kernels", "prediction", evidence="predicted", after="note", place=1)
def assumed_kernels(result: ScanResult) -> Iterator[Made]:
    """The ops whose kernels are only assumed, which may change the verdict."""
    assumed = sorted({op for run in result.runs for op in run.assumed_ops})
    if result.prediction is not None and assumed:
        words = "Not known whether these ops run in 16 bits on {device:text}, which is assumed: {ops:ops}"
        yield Said(say(words, device=result.prediction.name, ops=assumed), "warn")
