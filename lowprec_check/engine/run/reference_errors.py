"""Message and hint of the :class:`~lowprec_check.errors.UsageError` for a model that does not work
in fp32.
"""

from __future__ import annotations

import re

from lowprec_check.engine.core.devices import says_device_is_absent
from lowprec_check.engine.core.floating_dtypes import NARROW
from lowprec_check.engine.model.inputs import describe_inputs
from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.model.streamed_weights import NOT_READ
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.outcome import Outcome
from lowprec_check.engine.run.tasks import RunTask
from lowprec_check.errors import UsageError
from lowprec_check.process.supervisor import signal_name
from lowprec_check.schema.axes import device_of

_SMALLER = "use a smaller batch or shorter inputs, or free some memory"
_CUSTOM_OP_WITHOUT_CPU = re.compile(r"Could not run '(?!aten::)([^']+)' with arguments from the '\w*CPU' backend")
_OTHER_DTYPE = re.compile(r"dtype|scalar type|Input type .* and (weight|bias) type")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory")


def check_reference(task: RunTask, outcome: Outcome, target: Target) -> PlainResult:
    """What the fp32 run found; raises :class:`UsageError` if it took too long, crashed, failed, or
    gave NaN or Inf.
    """
    plain = outcome.plain
    if plain is None and outcome.ended == "timeout":
        where = ""
        if outcome.line:
            where = f"; it was at {outcome.line}"
        raise UsageError(
            f"The model did not finish in fp32 within {task.budget:g} s{where}.",
            "Increase --budget, or use smaller inputs.",
        )
    if plain is None:
        is_killed = signal_name(outcome.exit_code) == "SIGKILL"
        first = "Run the model without this tool first: a scan needs a model that works in fp32."
        raise UsageError(
            f"The model crashed in fp32: {outcome.reason}.", f"If memory ran out: {_SMALLER}." if is_killed else first
        )
    if plain.exception is not None:
        raise UsageError(*failed_reference(plain, target, task.shown_device, predicted=task.predicted is not None))
    if plain.status == "nonfinite" and task.steps:
        raise UsageError(
            f"Training in fp32 gives NaN or Inf in step {plain.calls}, in the loss or the weights.",
            "Fix it in fp32 first: check the loss, or lower the learning rate in `optimizer`.",
        )
    if plain.status == "nonfinite":
        origin = outcome.measures.nonfinite_at if outcome.measures else None
        if origin is None:
            raise UsageError(
                "The model's fp32 output has NaN or Inf.",
                "A weight or an input already contains it; fix that first.",
            )
        op, module, source = origin
        place = ""
        if module:
            place = f" in {module}"
        line = ""
        if source:
            line = f" at {source}"
        raise UsageError(
            f"The model's fp32 output has NaN or Inf, first produced by {op}{place}{line}.", "Fix it in fp32 first."
        )
    return plain


def failed_reference(plain: PlainResult, target: Target, device: str, *, predicted: bool = False) -> tuple[str, str]:
    """The model raises an exception in fp32, or is ``predicted`` to do so on a device that is not
    here.
    """
    error = plain.exception
    assert error is not None
    place = ""
    if error.module:
        place = f" in {error.module}"
    source = ""
    if error.source:
        source = f" at {error.source}"
    shapes = ", ".join(describe_inputs(target.args, target.kwargs)) or "none"
    fails = "is predicted to fail" if predicted else "fails"
    part = _PARTS.get(error.phase or "forward", "model")
    message = f"The {part} {fails} in fp32 on {device}{place}{source}: {error.text}"
    if predicted and says_device_is_absent(error.message):
        return message, "The model names the device itself, which is not here: let it use the device of its inputs."
    custom = None
    if predicted:
        custom = _CUSTOM_OP_WITHOUT_CPU.search(error.message)
    if custom is not None:
        return message, f"A prediction runs on the CPU: register a CPU kernel of {custom[1]}."
    if _OUT_OF_MEMORY.search(f"{error.type} {error.message}"):
        return message, f"Memory ran out: {_SMALLER}."
    if device != "cpu" and error.type == "NotImplementedError":
        variable = device_of(device).fallback_variable
        if predicted:
            there = ""
            if variable:
                there = f" There, {variable}=1 runs such ops on the CPU."
            return message, f"No kernel of the op is known on {device}.{there} Scan with --device cpu to see the rest."
        fallback = ""
        if variable:
            fallback = f"set {variable}=1 to run it on the CPU, or "
        return message, f"If the op has no kernel on {device}, {fallback}scan with --device cpu."
    defaults = f"The inputs are defaults ({shapes}); give others: --inputs input_ids=1x32:int64,mask=1x32."
    fit = f"Check that the inputs fit the model. Their shapes: {shapes}."
    streamed = "Only attributes of modules are read (module.weight, not parameters()): scan it without --stream."
    if NOT_READ in error.message:
        other = streamed
    elif target.default_inputs:
        other = defaults
    else:
        other = fit
    narrow = next((name for name, its in target.model.named_parameters() if its.dtype in NARROW), None)
    if narrow is not None and _OTHER_DTYPE.search(error.message):
        other = (
            f"Some of its weights are in 16 bits as given, as {narrow} is; the reference has all in fp32. "
            "Cast the inputs of such layers with x.to(layer.weight.dtype), so that the model runs in both."
        )
    return message, _HINTS.get(part, other)


_PARTS = {"backward": "backward pass", "optimizer": "optimizer step"}
"""What a phase of training is called."""

_HINTS = {
    "backward pass": "Check that the loss depends on the parameters, and that the model can be trained without this tool.",
    "optimizer step": "Check `optimizer`, and that the model can be trained with it without this tool.",
}
