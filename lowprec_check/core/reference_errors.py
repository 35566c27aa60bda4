"""The :class:`~lowprec_check.errors.UsageError` for a model that does not work in fp32."""

from __future__ import annotations

import re

from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome
from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.inputs import describe_inputs
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError
from lowprec_check.process.supervisor import signal_name
from lowprec_check.schema.axes import device_of
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.torchkit.floating_dtypes import NARROW

_SMALLER = "use a smaller batch or shorter inputs, or free some memory"
OTHER_DTYPE = re.compile(r"dtype|scalar type|Type promoting|Input type .* and (weight|bias) type")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory")


def check_reference(task: RunTask, outcome: Outcome, target: Target) -> RunSoFar:
    """What fp32 gave; :class:`UsageError` if it was slow, crashed, failed, or gave NaN or Inf."""
    so_far, run = outcome.so_far, outcome.run
    if run is None and outcome.ended == "timeout":
        where = ""
        if outcome.line:
            where = f"; it was at {outcome.line}"
        raise UsageError(
            f"The model did not finish in fp32 within {task.budget:g} s{where}.",
            "Increase --budget, or use smaller inputs.",
        )
    if so_far is None or run is None:
        hint = "Run the model without this tool first: a scan needs a model that works in fp32."
        if signal_name(outcome.exit_code) == "SIGKILL":
            hint = f"If memory ran out: {_SMALLER}."
        raise UsageError(f"The model crashed in fp32: {outcome.reason}.", hint)
    if run.exception is not None:
        raise UsageError(*failed_reference(run.exception, target, task.mode, task.shown_device))
    task.mode.check_reference(so_far)
    if run.status == "nonfinite":
        origin = so_far.nonfinite_at
        if origin is None:
            raise UsageError(
                "The model's fp32 output has NaN or Inf.", "A weight or an input already contains it; fix that first."
            )
        op, module, source = origin
        raise UsageError(
            f"The model's fp32 output has NaN or Inf, first produced by {op}{_place(module, source)}.",
            "Fix it in fp32 first.",
        )
    return so_far


def _place(module: str | None, source: str | None) -> str:
    """`` in layers.0 at model.py:7``, as far as it is known."""
    place = ""
    if module:
        place += f" in {module}"
    if source:
        place += f" at {source}"
    return place


def failed_reference(error: ExceptionInfo, target: Target, mode: Mode, device: str) -> tuple[str, str]:
    """Message and hint for an exception in fp32."""
    part = _PARTS.get(error.phase or "forward", "model")
    message = f"The {part} {mode.fails} in fp32 on {device}{_place(error.module, error.source)}: {error.text}"
    hint = mode.failure_hint(error, device, target)
    if hint is not None:
        return message, hint
    if _OUT_OF_MEMORY.search(f"{error.type} {error.message}"):
        return message, f"Memory ran out: {_SMALLER}."
    if device != "cpu" and error.type == "NotImplementedError":
        variable, fallback = device_of(device).fallback_variable, ""
        if variable:
            fallback = f"set {variable}=1 to run it on the CPU, or "
        return message, f"If the op has no kernel on {device}, {fallback}scan with --device cpu."
    return message, _HINTS.get(part, "") or _hint_for_model(error.message, target)


def _hint_for_model(error: str, target: Target) -> str:
    """What to do about an exception with this message in the model itself."""
    narrow = next((name for name, weight in target.model.named_parameters() if weight.dtype in NARROW), None)
    if narrow is not None and OTHER_DTYPE.search(error):
        return (
            f"Some of its weights are in 16 bits as given, as {narrow} is; the reference has all in fp32. "
            "Cast the inputs of such layers with x.to(layer.weight.dtype), so that the model runs in both."
        )
    shapes = ", ".join(describe_inputs(target.args, target.kwargs)) or "none"
    if target.default_inputs:
        return f"The inputs are defaults ({shapes}); give others: --inputs input_ids=1x32:int64,mask=1x32."
    return f"Check that the inputs fit the model. Their shapes: {shapes}."


_PARTS = {"backward": "backward pass", "optimizer": "optimizer step"}
"""What a phase of training is called."""
_HINTS = {
    "backward pass": (
        "Check that the loss depends on the parameters, and that the model can be trained without this tool."
    ),
    "optimizer step": "Check `optimizer`, and that the model can be trained with it without this tool.",
}
