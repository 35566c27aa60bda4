"""Executes printed code in a process of its own, and compares its output with that of fp32."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.target_source import Load
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.function_worker import Channel
from lowprec_check.schema.code_trial import CodeTrial
from lowprec_check.torchkit.devices import seed_everything


class CodeRequest(NamedTuple):
    """What to execute, and what its output may be."""

    code: str
    in_fp32: str
    """The same for the fp32 run; empty for training, whose loss is looked at."""
    seed: int
    tolerance: float | None
    """Of the output's error; ``None`` if the output cannot be judged."""
    form: OutputForm = OutputForm()
    """By what it is judged."""
    folder: str | None = None
    """Where the code imports the user's module."""
    load: Load | None = None
    """Loads the script that the code belongs into; ``None`` if it stands alone."""


def wait_and_execute(channel: Channel) -> None:
    """Answer the one :class:`CodeRequest` that comes with a :class:`CodeTrial`."""
    data = channel.receive()
    if data is None:
        return
    request = pickle.loads(data)
    # What the code prints is not for the terminal.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    channel(msgspec.msgpack.encode(executed(request)))


def executed(request: CodeRequest) -> CodeTrial:
    """Whether the code runs, and its output passes."""
    try:
        names: dict[str, Any] = {}
        if request.load is not None:
            names = request.load().namespace or {}
        elif request.folder is not None:
            sys.path.insert(0, request.folder)
        # As the scan itself imports the user's files.
        with torchvision_works():
            reference = _run(request.in_fp32, names, request.seed).get("output") if request.in_fp32 else None
            # The reference keeps its values if the model changes them in place.
            expected = output_tensors(reference).mapped(Tensor.clone).as_asked(request.form)
            after = _run(request.code, names, request.seed)
    except BaseException as error:
        reason = f"{type_name(error)}: {first_line(message_of(error))}"
        return CodeTrial(code=request.code, status="failed", reason=reason)
    if not request.in_fp32:
        loss = after.get("step_loss")
        if loss is None or bool(loss.isfinite().all()):
            return CodeTrial(code=request.code, status="ran")
        return CodeTrial(code=request.code, status="differs", reason="its loss is not finite")
    status, compared = judge(output_tensors(after["output"]), expected, request.tolerance)
    trial = CodeTrial(code=request.code, status="ran", rel_l2=compared.error.rel_l2)
    if request.tolerance is None or status in ("ok", "unjudged"):
        return trial
    reason = f"the error of its output is {compared.distance:.1e}, above the tolerance of {request.tolerance:g}"
    if status == "nonfinite":
        reason = "its output has NaN or Inf"
    elif compared.error.by_meaning is not None:
        reason = compared.error.by_meaning.text
    return msgspec.structs.replace(trial, status="differs", reason=reason)


def _run(code: str, names: dict[str, Any], seed: int) -> dict[str, Any]:
    """The names after ``code``, which is executed where ``names`` are those that it can use."""
    seed_everything(seed)
    after = {"__name__": "__main__", **names}
    exec(compile(code, "<printed code>", "exec"), after)
    return after
