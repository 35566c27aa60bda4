"""What a worker process does: gets the target, works on a task, sends what it finds, and at last how the task ended.

A shared worker does one task after another. After the results of each are sent, it checks itself, so that what fails then
costs no row.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import pickle
import warnings
from collections.abc import Callable

import torch

from lowprec_check.engine.core.compiled import own_compiled_code
from lowprec_check.engine.core.devices import check_accelerators
from lowprec_check.engine.model.plain_run import PlainResult, describe_error
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.leftovers import Leftovers
from lowprec_check.engine.run.messages import CallStarted, Checked, Loaded, PartFailed, Send, TaskMessage, encode
from lowprec_check.engine.run.place_log import note_model, packages_of
from lowprec_check.engine.run.preparation import on_device
from lowprec_check.engine.run.run_model import predict_formats, run_model, train_with_extension
from lowprec_check.engine.run.tasks import (
    ExplainTask,
    ExtensionTask,
    InstanceTask,
    ModelTask,
    RunTask,
    TimeTask,
    TurnsTask,
    WhatIfTask,
)
from lowprec_check.engine.run.turns import Receive, time_in_place, time_instance, time_turns
from lowprec_check.engine.stand_in.stand_in_process import become_stand_in, check_process
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.process.function_worker import Channel, Ended
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.op_calls import FALLBACK_WARNING

QUESTION = b""
"""Asks a worker that has finished a task what that left behind. It sends nothing between the two, so that no message is lost."""


def work(task: ModelTask, target: Target, send: Send, receive: Receive) -> None:
    """Do ``task``; ``receive`` waits for what the parent sends meanwhile. Afterwards the model is restored.

    A task that predicts makes its process the stand-in for the device, which can do nothing else afterwards.
    """
    check_process(task.predicted)
    if task.predicted is not None:
        become_stand_in(task.predicted)
        # The plain part, which has filters of its own, collects them.
        warnings.filterwarnings("ignore", message=FALLBACK_WARNING)
    with own_compiled_code(autocast=task.uses_autocast), on_device(target, torch.device(task.device)):
        match task:
            case RunTask() | ExplainTask():
                run_model(task, target, send)
            case WhatIfTask():
                predict_formats(task, target, send)
            case ExtensionTask():
                train_with_extension(task, target, send)
            case TimeTask():
                time_in_place(task, target, send)
            case TurnsTask():
                time_turns(task, target, send, receive)
            case InstanceTask():
                time_instance(task, target, send, receive)


def do_task(task: ModelTask, load: Callable[[], Target], channel: Channel) -> None:
    """All that a worker does that is started for one task."""
    _do(task, load, Sender(task, channel))


def serve(load: Callable[[], Target], channel: Channel) -> None:
    """Do the tasks that come, until nothing more comes; after each, look for what it left behind, and say so if asked."""
    loaded: _Loaded | None = None

    def target_for(task: ModelTask) -> Target:
        nonlocal loaded
        loaded = loaded or _Loaded(load(), task)
        return loaded.target

    left: list[str] = []
    while (data := channel.receive()) is not None:
        if data == QUESTION:
            channel(encode(Checked(left)))
            continue
        task: ModelTask = pickle.loads(data)
        send = Sender(task, channel)
        _do(task, functools.partial(target_for, task), send)
        left = loaded.left_by(send) if loaded is not None else []


class Sender:
    """Sends the messages about ``task``; logs where the plain part is, shortly before its process is killed."""

    def __init__(self, task: ModelTask, channel: Channel) -> None:
        self.task, self.channel = task, channel
        self._logs_place = isinstance(task, RunTask)
        self.plain: PlainResult | None = None
        """The last verdict that was sent."""

    def __call__(self, message: TaskMessage) -> None:
        """Send a message."""
        budget = self.task.call_budget
        if isinstance(message, PlainResult):
            self.plain, self._logs_place = message, False  # further calls are timed
            faulthandler.cancel_dump_traceback_later()
        elif isinstance(message, CallStarted) and self._logs_place:
            faulthandler.dump_traceback_later(max(budget - 0.5, budget / 2), file=self.task.files.log)
        self.channel(encode(message))


def _do(task: ModelTask, load: Callable[[], Target], send: Sender) -> None:
    """A device that the model broke is the model's failure, not the tool's."""

    def load_and_work() -> None:
        target = load()
        send(Loaded())
        note_model(task.files.log, packages_of(target.model))
        try:
            work(task, target, send, send.channel.receive)
        except Exception as error:
            broken = _why_broken()
            if broken is None:
                raise
            if isinstance(task, RunTask) and send.plain is None:
                send(PlainResult(status="error", exception=describe_error(error, target.model)))
            send(PartFailed(f"the device cannot be used any more in this process: {broken}"))

    note_model(task.files.log)
    try:
        ended = Ended.after(load_and_work)
        with contextlib.suppress(Exception):
            send(ended)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _why_broken() -> str | None:
    """Why an accelerator cannot be used any more in this process; ``None`` if all can be."""
    try:
        check_accelerators()
    except Exception as error:
        return message_of(error).partition("\n")[0]
    return None


class _Loaded:
    """The target of a shared worker, on the device of the tasks, and the state of the process with it."""

    def __init__(self, target: Target, task: ModelTask) -> None:
        self.target = target
        device = torch.device(task.device)
        if device.type != "cpu":
            try:
                target.model.to(device)
            except torch.OutOfMemoryError as error:
                raise UsageError(
                    f"The fp32 model does not fit on {device}: {first_line(message_of(error))}",
                    "Free its memory, or choose another device with --device.",
                ) from None
        self._leftovers = Leftovers(target.model)

    def left_by(self, send: Sender) -> list[str]:
        """What the task of ``send`` left behind; the process can be used for another one if there is nothing."""
        broken, task = _why_broken(), send.task
        if broken is not None:
            return [broken]
        if BACKENDS.get(task.backend).changes_process:
            return [f"the backend {task.backend}"]
        if isinstance(task, ExtensionTask):
            return ["Intel's extension"]
        if send.plain is not None and send.plain.changes_parameters:
            return ["values of parameters"]
        return self._leftovers.found(parameters=not task.changes_parameters)
