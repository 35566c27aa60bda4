"""Tries a run that passes on the other batches of a scan, and on further inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.messages import Started
from lowprec_check.core.plain_part import Fp32Outputs, PlainPart
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.features.inputs.further_calls import (
    KEPT,
    FurtherCalls,
    checked_on,
    run_references,
    with_input,
    with_interval,
)
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.scan_result import Run


def try_further_inputs(part: PlainPart) -> None:
    """In the fp32 run, save further inputs; in others that pass, call the model on them."""
    task, so_far = part.task, part.report.so_far
    if task.further_inputs == 0 or not task.measured or so_far.run.status != "ok":
        return

    def start(number: int, tried: InputsTried) -> None:
        """If the worker ends now, the run fails on this input."""
        ends = {}
        for status in ("crashed", "timeout"):
            fails = with_interval(with_input(tried, status, math.inf, number), looks=2)
            ends[status] = msgspec.structs.replace(part.report.run, further_inputs=fails)
        part.report.send(Started(seconds=task.part_budget, if_crashed=ends["crashed"], if_late=ends["timeout"]))

    probe = part.probed
    if task.saves_reference:
        probe = Fp32Outputs.load(task.files).probe
    calls = FurtherCalls(task, part.target, part.ready, part.rewind, so_far, probe)
    if not task.saves_reference:
        part.report.add(further_inputs=calls.tried(start))
        return
    self_error, distance = so_far.self_error, 0.0
    if self_error is not None:
        distance = math.inf if self_error.distance is None else self_error.distance
    calls.keep(distance)


class Inputs(Feature):
    """Other batches, and further inputs."""

    place = 10
    keeps = (KEPT,)
    measurements = (Measurement(20, "trying further inputs", try_further_inputs),)

    def after_reference(self, batches: Sequence[TargetRuns], fp32: Run) -> None:
        """Run fp32 on the other batches."""
        run_references(batches[1:], fp32)

    def after_run(self, batches: Sequence[TargetRuns], run: Run) -> Run:
        """``run`` with what the other batches show."""
        return checked_on(batches[1:], run)


INPUTS = Inputs()
