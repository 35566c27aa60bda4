"""A worker that runs a Python function in a forked or spawned process. Never imports torch.

A forked worker shares the memory of its parent (copy on write) and starts in milliseconds. The function runs in a new
thread of the worker: OpenMP keeps one pool of threads per calling thread, and a pool that the parent has used does not
survive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from lowprec_check.process.base_worker import BATCH, Decode, Message, Worker
from lowprec_check.process.breadcrumb import Breadcrumb

SendBytes = Callable[[bytes], None]
Task = Callable[[SendBytes], None]
"""The function to run. It must catch its own exceptions, and be picklable for a spawned process."""


class FunctionWorker(Worker[Message]):
    """A child process that runs ``task`` and sends each message as bytes through a pipe."""

    def __init__(
        self,
        task: Task,
        decode: Decode[Message],
        *,
        method: Literal["fork", "spawn"],
        log: Path | None = None,
        breadcrumb: Breadcrumb | None = None,
    ) -> None:
        """``log`` is the file for the traceback that ``faulthandler`` writes when a signal kills the worker."""
        super().__init__(breadcrumb)
        self._decode = decode
        context = multiprocessing.get_context(method)
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(task, sender, log), daemon=True)  # type: ignore[attr-defined]
        self._at_end = False
        _flush()
        self._process.start()
        sender.close()

    def waitables(self) -> list[int | Connection]:
        """Return the pipe, while it is open, and the process sentinel."""
        pipe = [] if self._at_end else [self._receiver]
        return [*pipe, self._process.sentinel]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        received: list[Message] = []
        try:
            while len(received) < BATCH and not self._at_end and self._receiver.poll():
                received.append(self._decode(self._receiver.recv_bytes()))
        except (EOFError, OSError):
            self._at_end = True
        return received

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; ``None`` while it runs."""
        code: int | None = self._process.exitcode
        return code

    def end(self) -> None:
        """Kill the process if it still runs, and wait until it has ended."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._receiver.close()
        self._at_end = True


# -- inside the worker


def _main(task: Task, sender: Connection, log: Path | None) -> None:
    os.dup2(2, 1)  # what the model prints must not end up in a report on stdout
    with open(log or os.devnull, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        _prefer_for_oom_kill()
        thread = threading.Thread(target=task, args=(sender.send_bytes,), daemon=True)
        thread.start()
        thread.join()
        _flush()
        os._exit(0)  # without the exit handlers of the parent


def _prefer_for_oom_kill() -> None:
    """Make Linux kill this process instead of its parent if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
