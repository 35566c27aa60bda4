"""What a worker does: gets the target, runs the model as its task says, sends the results."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable

import msgspec
import torch

from lowprec_check.core.explanation import explain
from lowprec_check.core.messages import (
    PartFailed,
    Receive,
    Reporter,
    Send,
    Started,
    TaskAnswer,
    TaskMessage,
    encode,
)
from lowprec_check.core.preparation import on_device
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.streamed_weights import reads_forgotten
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.process.function_worker import Channel, Ended
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.torchkit.compiled import own_compiled_code
from lowprec_check.torchkit.devices import why_broken
from lowprec_check.torchkit.leftovers import Leftovers
from lowprec_check.torchkit.place_log import note_model, packages_of


def work(task: ModelTask, target: Target, send: Send, receive: Receive) -> None:
    """Do ``task``; ``receive`` waits for what the parent sends. The model is restored."""
    task.mode.begin(target, send)
    device = torch.device(task.device)
    with own_compiled_code(autocast=task.uses_autocast), on_device(target, device), reads_forgotten(target.model):
        if not isinstance(task, RunTask):
            task.do(target, send, receive)
            return
        report = Reporter(task.so_far or task.begun(), send)
        if task.so_far is None:
            task.mode.run(task, target, report)
        else:
            explain(task, target, report)
        task.mode.finish(report)


# -- The process, for one task or several

QUESTION = b""
"""Asks a finished worker for its leftovers; it sends nothing in between, so no message is lost."""


def do_task(task: ModelTask, load: Callable[[], Target], channel: Channel) -> None:
    """All that a worker does that is started for one task."""
    _do(task, load, Sender(task, channel))


def serve(load: Callable[[], Target], channel: Channel) -> None:
    """Do the tasks that come, until nothing more comes; report each one's leftovers if asked."""
    loaded: _Loaded | None = None

    def target_for(task: ModelTask) -> Target:
        nonlocal loaded
        loaded = loaded or _Loaded(load(), task)
        return loaded.target

    left: list[str] = []
    while (data := channel.receive()) is not None:
        if data == QUESTION:
            channel(encode(TaskAnswer.of(left)))
            continue
        task: ModelTask = pickle.loads(data)
        send = Sender(task, channel)
        _do(task, functools.partial(target_for, task), send)
        left = loaded.left_by(send) if loaded is not None else []


class Sender:
    """Sends the messages about ``task``."""

    def __init__(self, task: ModelTask, channel: Channel) -> None:
        self.task, self.channel = task, channel
        self.so_far: RunSoFar | None = None

    def __call__(self, message: TaskMessage) -> None:
        """Send a message."""
        if isinstance(message, RunSoFar):
            self.so_far = message
        self.channel(encode(message))


def _do(task: ModelTask, load: Callable[[], Target], send: Sender) -> None:
    """A device that the model broke is the model's failure, not the tool's."""

    def load_and_work() -> None:
        target = load()
        send(Started(seconds=task.part_budget))
        note_model(task.files.log, packages_of(target.model))
        try:
            work(task, target, send, send.channel.receive)
        except Exception as error:
            broken = why_broken()
            if broken is None:
                raise
            is_judged = send.so_far is not None and send.so_far.is_judged
            if isinstance(task, RunTask) and task.so_far is None and not is_judged:
                so_far = task.begun().with_fields(status="error", exception=describe_error(error, target.model))
                send(msgspec.structs.replace(so_far, is_judged=True))
            send(PartFailed(f"the device cannot be used any more in this process: {broken}"))

    note_model(task.files.log)
    ended = Ended.after(load_and_work)
    with contextlib.suppress(Exception):
        send(ended)


class _Loaded:
    """The target of a shared worker, on the device of the tasks, and the state of its process."""

    def __init__(self, target: Target, task: ModelTask) -> None:
        self.target = target
        device = torch.device(task.device)
        if device.type != "cpu":
            try:
                target.model.to(device)
            except torch.OutOfMemoryError as error:
                raise UsageError(
                    f"The fp32 model does not fit on {device}: {first_line(message_of(error))}",
                    "Free its memory, use --stream if the weights are in .safetensors files, or choose another "
                    "--device.",
                ) from None
        self._leftovers = Leftovers(target.model)

    def left_by(self, send: Sender) -> list[str]:
        """What the task of ``send`` left behind; if nothing, the process can do another task."""
        broken, task = why_broken(), send.task
        if broken is not None:
            return [broken]
        if BACKENDS.get(task.backend).changes_process:
            return [f"the backend {task.backend}"]
        if task.changes_process:
            return [f"the task {type(task).__name__}"]
        if send.so_far is not None and send.so_far.changes_parameters:
            return ["values of parameters"]
        return self._leftovers.found(parameters=not task.changes_parameters)
