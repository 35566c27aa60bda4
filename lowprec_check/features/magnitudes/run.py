"""Adds to a run the histogram of the values that the ops of each module give in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.observers import End, MakeObserver, OpObserver, Pass
from lowprec_check.core.trace.ops import COPIES
from lowprec_check.features.magnitudes.histograms import MagnitudeSamples
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float


class MagnitudeObserver(OpObserver):
    """Counts the reference's values of each op of a forward pass."""

    def __init__(self, observed: Pass) -> None:
        self._twins, self._samples = observed.lockstep.twins, MagnitudeSamples()

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Count those of the first output, unless the op gives no new ones."""
        traits = call.traits
        repeats = traits.casts or traits.packet in COPIES or traits.packet == "aten::copy_"
        if call.phase not in (None, "forward") or repeats or not outputs or not is_float(outputs[0]):
            return
        if not traits.moves or any(map(is_float, call.inputs)):
            self._samples.add(call.module, self._twins.reference_of(outputs[0]))

    def finish(self, end: End) -> Mapping[str, Any]:
        """The histograms."""
        return {"magnitudes": self._samples.result()}


class Magnitudes(Feature):
    """Histograms of magnitudes."""

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """Always."""
        return MagnitudeObserver


MAGNITUDES = Magnitudes()
