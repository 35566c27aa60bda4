"""Workers under supervision: one that ends, dies, hangs, floods, or overruns, and what is said of it."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lowprec_check.process.base_worker import Worker
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.command_worker import CommandWorker, LineWorker
from lowprec_check.process.exit_code import describe_exit, signal_name
from lowprec_check.process.function_worker import FunctionWorker, SendBytes
from lowprec_check.process.supervisor import Said, Seen, Supervisor

MANY = 500
"""Messages: more than are taken at once."""


def decode(data: bytes) -> int:
    return msgspec.json.decode(data, type=int)


def counts(send: SendBytes) -> None:
    for number in range(MANY):
        send(b"%d" % number)


def counts_and_dies(send: SendBytes) -> None:
    counts(send)
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(send: SendBytes) -> None:
    os._exit(7)


def hangs(send: SendBytes) -> None:
    time.sleep(600)


def floods(send: SendBytes) -> None:
    while True:
        send(b"1")


def hangs_in_an_op(path: Path, send: SendBytes) -> None:
    Breadcrumb(path).enter("aten.mm.default", "layer", "model.py:3")
    time.sleep(600)


def hangs_between_ops(path: Path, send: SendBytes) -> None:
    breadcrumb = Breadcrumb(path)
    breadcrumb.enter("aten.mm.default", "layer", None)
    breadcrumb.leave()
    time.sleep(600)


def forked(task: Callable[[SendBytes], None], breadcrumb: Breadcrumb | None = None) -> FunctionWorker[int]:
    return FunctionWorker(task, decode, method="fork", breadcrumb=breadcrumb)


def watch(worker: FunctionWorker[int] | LineWorker[int]) -> tuple[list[int], Seen[Worker[int]]]:
    """All that a worker says, and how it is gone."""
    supervisor: Supervisor[Worker[int], int] = Supervisor([worker], tick=0.02)
    heard, last = [], None
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, Said):
                heard.append(event.message)
            else:
                last = event
    assert last is not None
    assert last.state != "running"
    assert worker.exit_code is not None
    return heard, last


def test_a_worker_that_ends_is_heard_to_the_end() -> None:
    heard, gone = watch(forked(counts))
    assert heard == list(range(MANY))
    assert (gone.state, gone.exit_code, gone.position) == ("ended", 0, None)


@pytest.mark.parametrize(("task", "says"), [(counts_and_dies, MANY), (exits, 0)])
def test_a_worker_that_dies_is_heard_until_then(task: Callable[[SendBytes], None], says: int) -> None:
    heard, gone = watch(forked(task))
    assert heard == list(range(says))
    assert gone.state == "ended"
    assert gone.exit_code == (-signal.SIGSEGV if says else 7)


def test_a_worker_that_hangs_is_killed_at_its_deadline() -> None:
    worker = forked(hangs)
    worker.allow(0.3)
    heard, gone = watch(worker)
    assert (heard, gone.state, gone.exit_code) == ([], "timeout", None)
    assert worker.exit_code == -signal.SIGKILL


def test_a_worker_that_floods_does_not_stop_the_clock() -> None:
    worker = forked(floods)
    worker.allow(0.5)
    heard, gone = watch(worker)
    assert set(heard) == {1}
    assert gone.state == "timeout"


def test_an_op_past_its_limit_is_stuck_and_named(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    worker = forked(functools.partial(hangs_in_an_op, path), Breadcrumb.create(path))
    worker.op_limit = 0.2
    gone = watch(worker)[1]
    assert gone.state == "stuck"
    assert gone.position is not None
    assert (gone.position.op, gone.position.module, gone.position.source) == ("aten.mm.default", "layer", "model.py:3")


def test_time_between_ops_is_no_ops_time(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    worker = forked(functools.partial(hangs_between_ops, path), Breadcrumb.create(path))
    worker.op_limit = 0.1
    worker.allow(1.0)
    gone = watch(worker)[1]
    assert gone.state == "timeout"
    assert gone.position is not None
    assert not gone.position.in_op


def test_leaving_the_block_ends_the_workers() -> None:
    workers = [forked(hangs), forked(hangs)]
    supervisor: Supervisor[FunctionWorker[int], int] = Supervisor(workers[:1])
    supervisor.add(workers[1])
    assert [worker.exit_code for worker in workers] == [None, None]
    with pytest.raises(KeyboardInterrupt), supervisor:
        raise KeyboardInterrupt
    assert [worker.exit_code for worker in workers] == [-signal.SIGKILL] * 2


def line_worker(code: str, log: Path) -> LineWorker[int]:
    return LineWorker([sys.executable, "-c", code], decode, environment=os.environ, log=log)


def test_a_command_takes_tasks_and_answers_in_lines(tmp_path: Path) -> None:
    code = (
        "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, flush=True)\n    if line == '9\\n': sys.exit(3)"
    )
    worker = line_worker(code, tmp_path / "log")
    for task in (b"2", b"9"):
        worker.give(task)
    heard, gone = watch(worker)
    assert (heard, gone.state, gone.exit_code) == ([4, 81], "ended", 3)


def test_a_task_for_a_worker_that_is_dead_is_lost_and_its_end_is_seen(tmp_path: Path) -> None:
    worker = line_worker("raise SystemExit(3)", tmp_path / "log")
    while worker.exit_code is None:
        time.sleep(0.02)
    worker.give(b"1")
    assert watch(worker)[1].exit_code == 3


def test_a_line_may_come_in_pieces_and_errors_go_to_the_log(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "for piece in (b'12', b'3\\n4', b'\\n'):\n    os.write(1, piece)\n    time.sleep(0.1)\n"
        "sys.exit('it failed')"
    )
    heard, gone = watch(line_worker(code, tmp_path / "log"))
    assert (heard, gone.exit_code) == ([123, 4], 1)
    assert (tmp_path / "log").read_text() == "it failed\n"


def test_a_command_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(process.pid))\ntime.sleep(600)"
    )
    with (tmp_path / "out").open("wb") as out:
        worker = CommandWorker([sys.executable, "-c", code], environment=os.environ, output=out, errors=out)
        while not (child.exists() and child.read_text()):
            time.sleep(0.02)
        worker.end()
    assert worker.exit_code == -signal.SIGKILL
    assert is_gone(int(child.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended: soon after its signal, and perhaps before anyone has waited for it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("exit_code", "name", "sentence", "brief"),
    [
        (-11, "SIGSEGV", "the process died of SIGSEGV", "killed by signal 11"),
        (-42, "signal 42", "the process died of signal 42", "killed by signal 42"),
        (3, None, "the process ended with exit code 3", "exit code 3"),
    ],
)
def test_how_a_process_ended_in_words(exit_code: int, name: str | None, sentence: str, brief: str) -> None:
    assert signal_name(exit_code) == name
    assert describe_exit(exit_code) == sentence
    assert describe_exit(exit_code, brief=True) == brief


def test_a_breadcrumb_is_read_by_the_other_process_and_cut_where_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    reader, writer = Breadcrumb.create(path), Breadcrumb(path)
    assert reader.read() is None
    writer.enter("aten.mm.default", "é" * 2000, None)
    position = reader.read()
    assert position is not None
    assert (position.op, position.ops, position.source) == ("aten.mm.default", 1, None)
    assert position.seconds_in_op() >= 0
    writer.leave()
    left = reader.read()
    assert left is not None
    assert (left.in_op, left.seconds_in_op()) == (False, 0.0)
