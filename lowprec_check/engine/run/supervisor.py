"""A job in a process of its own: budget, crash, hang, partial results.

Where the platform can fork, the worker shares the loaded model with its parent (copy on write) and starts in
milliseconds. The work runs in a fresh thread of the forked process: an OpenMP runtime keeps its pool of threads per
thread, and the one that the parent may have used does not survive a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from lowprec_check.engine.core.breadcrumb import Crumb, Position
from lowprec_check.engine.core.source_location import is_users, show_line
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, run_job

Isolation = Literal["fork", "spawn", "none"]
Load = Callable[[], Target]
"""Gives the target inside the worker: what was loaded already (fork), or a fresh load (spawn)."""

T = TypeVar("T")

OnProgress = Callable[[Position | None], None]


class WorkerError(Exception):
    """The tool itself failed inside a worker; the text is its traceback."""


@dataclasses.dataclass
class Outcome:
    """All that came back from a worker, and how it ended."""

    messages: dict[str, Any] = dataclasses.field(default_factory=dict)
    gaps: list[Any] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    """Where the tool failed after the plain run."""
    ended: Literal["done", "crashed", "timeout", "stuck"] = "done"
    """``stuck``: one op took longer than ``op_limit``."""
    reason: str | None = None
    position: Position | None = None
    """Where it was when it died."""


def best_isolation(*, can_spawn: bool) -> Isolation:
    """Fork where that is safe (no accelerator in use by this process), else spawn, else none."""
    if hasattr(os, "fork") and sys.platform.startswith("linux") and not accelerator_in_use():
        return "fork"
    return "spawn" if can_spawn else "none"


def accelerator_in_use() -> bool:
    """Whether this process holds a context on an accelerator, which no fork survives."""
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())


def execute(
    job: Job, load: Load, isolation: Isolation, *, on_progress: OnProgress | None = None, op_limit: float = math.inf
) -> Outcome:
    """Run ``job``; each part has ``job.budget`` seconds, and ``op_limit`` is for one op where slow ones are set aside.

    Raises :class:`WorkerError` if the tool itself failed.
    """
    crumb = Crumb.create(job.crumb_path)
    if isolation == "none":
        return _in_process(job, load)
    context = multiprocessing.get_context(isolation)
    receiver, sender = context.Pipe(duplex=False)
    log = Path(job.workdir) / "stderr"
    process = context.Process(target=_main, args=(job, load, sender, str(log)), daemon=True)  # type: ignore[attr-defined]
    _flush()
    process.start()
    sender.close()
    outcome = Outcome()
    try:
        _watch(job, process, receiver, crumb, outcome, on_progress, op_limit)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        receiver.close()
    if outcome.ended == "crashed":
        outcome.reason = _died_of(process.exitcode, log)
    if "failed" in outcome.messages:
        raise WorkerError(outcome.messages["failed"])
    return outcome


def _in_process(job: Job, load: Load) -> Outcome:
    outcome = Outcome()
    run_job(job, load(), functools.partial(_store, outcome))
    return outcome


def _store(outcome: Outcome, kind: str, content: Any) -> None:
    if kind == "gap":
        outcome.gaps.append(content)
    elif kind == "fault":
        outcome.faults.append(content)
    else:
        outcome.messages[kind] = content


def _watch(
    job: Job,
    process: Any,
    receiver: Any,
    crumb: Crumb,
    outcome: Outcome,
    on_progress: OnProgress | None,
    op_limit: float,
) -> None:
    deadline = time.monotonic() + job.budget
    while True:
        multiprocessing.connection.wait([receiver, process.sentinel], timeout=0.1)
        alive = process.is_alive()
        for kind, content in _messages(receiver):
            _store(outcome, kind, content)
            if kind in ("plain", "measured"):
                deadline = time.monotonic() + job.budget
        if "done" in outcome.messages or "failed" in outcome.messages:
            return
        position = outcome.position = crumb.read()
        if not alive:
            outcome.ended = "crashed"
            return
        if on_progress is not None:
            on_progress(position)
        if time.monotonic() > deadline:
            outcome.ended = "timeout"
            return
        if _sets_slow_ops_aside(job, outcome) and _seconds_in_op(position) > op_limit:
            outcome.ended = "stuck"
            return


def _seconds_in_op(position: Position | None) -> float:
    return time.time() - position.started if position is not None and position.in_op else 0.0


def _sets_slow_ops_aside(job: Job, outcome: Outcome) -> bool:
    plain = outcome.messages.get("plain")
    return job.measure_once or (plain is not None and plain.status == "error")


def _messages(receiver: Any) -> Iterator[tuple[str, Any]]:
    """What has arrived; ends quietly where the other side is gone."""
    with contextlib.suppress(EOFError, OSError):
        while receiver.poll():
            yield receiver.recv()


def _died_of(exitcode: int | None, log: Path) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the process died of {name}{hint}{_last_line(log)}"
    return f"the process ended with exit code {exitcode}{_last_line(log)}"


def _last_line(log: Path) -> str:
    """The user's line at the head of the dump that ``faulthandler`` left, if there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in log.read_text(errors="replace").splitlines():
            if line.lstrip().startswith('File "'):
                filename = line.split('"')[1]
                if is_users(filename):
                    return f" at {show_line(filename, int(line.split('line ')[1].split(' ')[0]))}"
    return ""


def isolated(function: Callable[[], T], isolation: Isolation) -> T:
    """What ``function`` returns or raises, from a forked process where one can be had: it may wake a device."""
    if isolation != "fork":
        return function()
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(function, sender), daemon=True)
    _flush()
    process.start()
    sender.close()
    try:
        raised, value = receiver.recv()
    except EOFError:
        return function()
    finally:
        process.join()
        receiver.close()
    if raised:
        raise value
    return value  # type: ignore[no-any-return]


# -- inside the worker


def _in_fresh_thread(function: Callable[[], None]) -> None:
    """Run ``function`` in a thread that has no pool of OpenMP threads yet: the forking thread's is gone."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


def _answer(function: Callable[[], Any], sender: Any) -> None:
    def answer() -> None:
        try:
            sender.send((False, function()))
        except Exception as error:
            sender.send((True, error))

    _in_fresh_thread(answer)
    os._exit(0)


def _main(job: Job, load: Load, sender: Any, log: str) -> None:
    os.dup2(2, 1)  # what the model prints must not mix with a report
    with open(log, "w") as file:
        faulthandler.enable(file)
        _be_the_one_to_kill()
        _in_fresh_thread(lambda: _work(job, load, sender))
        _flush()
        os._exit(0)  # no exit handlers of the parent's


def _work(job: Job, load: Load, sender: Any) -> None:
    def send(kind: str, content: Any) -> None:
        sender.send((kind, content))

    try:
        run_job(job, load(), send)
        send("done", None)
    except BaseException:
        with contextlib.suppress(Exception):
            send("failed", traceback.format_exc())


def _be_the_one_to_kill() -> None:
    """Ask Linux to kill this process, not its parent, when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
