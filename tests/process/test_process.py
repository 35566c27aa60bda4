"""Supervised workers that end, die, hang, flood, or exceed a limit."""

from __future__ import annotations

import contextlib
import functools
import gc
import getpass
import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from conftest import ROOT

from lowprec_check.engine.model.user_code import parsing
from lowprec_check.process import function_worker, process_group, system
from lowprec_check.process.breadcrumb import Breadcrumb, open_shared, read_shared, shared_file
from lowprec_check.process.command_worker import CommandWorker, LineWorker
from lowprec_check.process.fork_lock import ForkLock
from lowprec_check.process.function_worker import _PLACE_SIGNAL, FunctionWorker, Method, SendBytes
from lowprec_check.process.process_group import GUARDIAN, PRIVATE, UNKNOWN_EXIT, start_command
from lowprec_check.process.supervisor import (
    FOREIGN_BYTES,
    MessageEvent,
    StateEvent,
    Supervisor,
    Worker,
    describe_exit,
    signal_name,
)

MANY = 500
"""More messages than are read at once."""


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


def writes_into_the_pipe(send: SendBytes) -> None:
    """As a model may that writes to all descriptors; its bytes look like the length of a message that never arrives."""
    send(b"1")
    os.write(send._connection.fileno(), b"\0\0\xff\xffgarbage")  # type: ignore[attr-defined]
    time.sleep(600)


def hangs_in_c(send: SendBytes) -> None:
    send(b"1")
    threading.Event().wait(600)


def starts_much(end: str, mark: str, send: SendBytes) -> None:
    """Starts a daemon by a double fork, and a process in a session of its own; makes a file and shared memory."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", mark])
        os._exit(0)
    os.wait()
    subprocess.Popen(["sleep", mark], start_new_session=True)
    _, name = tempfile.mkstemp()
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    while len(sleeping(mark)) < 2:
        time.sleep(0.02)
    send(f"{name} {shared.name}".encode())
    if end == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "hangs":
        time.sleep(600)


def sleeping(mark: str) -> list[int]:
    """The processes that :func:`starts_much` has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline() == ["sleep", mark] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def sends_cache(send: SendBytes) -> None:
    send(os.environ["TORCHINDUCTOR_CACHE_DIR"].encode())


def watch_texts(task: Callable[[SendBytes], None]) -> str:
    """The message of a worker."""
    events = Supervisor([FunctionWorker(task, bytes.decode, method="fork")]).events()
    [text] = [event.message for event in events if isinstance(event, MessageEvent)]
    return text


def hangs_in_an_op(path: Path, send: SendBytes) -> None:
    Breadcrumb.open(path).enter("aten.mm.default", "layer", "model.py:3")
    time.sleep(600)


def hangs_between_ops(path: Path, send: SendBytes) -> None:
    breadcrumb = Breadcrumb.open(path)
    breadcrumb.enter("aten.mm.default", "layer", None)
    breadcrumb.leave()
    time.sleep(600)


def forked(task: Callable[[SendBytes], None], breadcrumb: Breadcrumb | None = None) -> FunctionWorker[int]:
    return FunctionWorker(task, decode, method="fork", breadcrumb=breadcrumb)


def watch(worker: FunctionWorker[int] | LineWorker[int]) -> tuple[list[int], StateEvent[Worker[int]]]:
    """All messages of a worker, and its last state."""
    supervisor: Supervisor[Worker[int], int] = Supervisor([worker], tick=0.02)
    messages, last = [], None
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, MessageEvent):
                messages.append(event.message)
            else:
                last = event
    assert last is not None
    assert last.state != "running"
    assert worker.exit_code is not None
    return messages, last


def test_all_messages_of_a_worker_arrive_before_its_end() -> None:
    messages, end = watch(forked(counts))
    assert messages == list(range(MANY))
    assert (end.state, end.exit_code, end.position) == ("ended", 0, None)


@pytest.mark.parametrize(("task", "count"), [(counts_and_dies, MANY), (exits, 0)])
def test_messages_sent_before_a_crash_arrive(task: Callable[[SendBytes], None], count: int) -> None:
    messages, end = watch(forked(task))
    assert messages == list(range(count))
    assert end.state == "ended"
    assert end.exit_code == (-signal.SIGSEGV if count else 7)


def test_a_worker_that_hangs_is_killed_at_its_deadline() -> None:
    worker = forked(hangs)
    worker.set_timeout(0.3)
    messages, end = watch(worker)
    assert (messages, end.state, end.exit_code) == ([], "timeout", None)
    assert worker.exit_code == -signal.SIGKILL


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Of seconds that pass only when it is called, of which a thread of each worker waits for a core."""
    passed = {"all": 0.0, "waiting": 0.0}
    monkeypatch.setattr(system, "monotonic", lambda: passed["all"])
    monkeypatch.setattr(system.CoreWaits, "_by_thread", lambda _: {"main": 5.0, "other": passed["waiting"]})

    def tick(seconds: float, waiting: float) -> None:
        passed["all"] += seconds
        passed["waiting"] += waiting

    return tick


class Watched(Worker[int]):
    def __init__(self) -> None:
        super().__init__()
        self._group = types.SimpleNamespace(pid=0)  # type: ignore[assignment]


def test_what_a_worker_waits_for_a_core_does_not_count_against_its_deadline(
    clock: Callable[[float, float], None],
) -> None:
    worker = Watched()
    worker.set_timeout(10.0)
    clock(11.0, 9.0)
    assert not worker.is_late()
    assert worker.deadline == pytest.approx(19.0)
    clock(9.0, 0.0)
    assert worker.is_late()
    worker.set_timeout(1.0)
    clock(100.0, 99.5)  # its own threads may keep it waiting for ever
    assert worker.is_late()
    worker.puts_off = False
    worker.set_timeout(1.0)
    clock(2.0, 1.9)
    assert worker.is_late()


@pytest.mark.parametrize(("waiting", "is_stuck"), [(0.0, True), (1.0, True), (9.0, False)])
def test_what_a_worker_waits_for_a_core_does_not_count_against_the_limit_of_an_op(
    clock: Callable[[float, float], None], waiting: float, is_stuck: bool
) -> None:
    worker = Watched()
    worker.set_timeout(100.0)
    worker.op_limit = 1.0
    clock(10.0, waiting)
    position = types.SimpleNamespace(seconds_in_op=lambda: 2.0)
    assert worker.is_stuck(position) is is_stuck  # type: ignore[arg-type]


CRASH_WITH_A_LIBRARY = """
import faulthandler, os, signal
from lowprec_check.process.breadcrumb import read_shared, shared_file
from lowprec_check.process.function_worker import FunctionWorker
from lowprec_check.process.supervisor import Supervisor

faulthandler.enable()
signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # as a library may do that reports crashes itself
log = shared_file()
worker = FunctionWorker(lambda channel: os.kill(os.getpid(), signal.SIGSEGV), bytes, method="fork", log=log)
with Supervisor([worker]) as supervisor:
    list(supervisor.events())
print(read_shared(log).decode())
"""


def test_a_crash_is_logged_where_a_library_has_taken_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH_WITH_A_LIBRARY], capture_output=True, text=True, check=True)
    assert "Segmentation fault" in done.stdout
    assert "most recent call first" in done.stdout


def crashes_when_it_logs_its_place(log: int, send: SendBytes) -> None:
    send(b"1")
    signal.signal(_PLACE_SIGNAL, lambda *_: (os.write(log, b"Stack"), os.kill(os.getpid(), signal.SIGSEGV)))
    time.sleep(600)


def test_a_crash_while_the_place_is_logged_does_not_hide_that_a_limit_was_exceeded() -> None:
    """faulthandler reads frames of a thread that runs, while modules are imported for example, and may crash."""
    log = shared_file()
    worker = FunctionWorker(functools.partial(crashes_when_it_logs_its_place, log), decode, method="fork", log=log)
    worker.set_timeout(1.0)
    messages, end = watch(worker)
    os.close(log)
    assert (messages, end.state, end.exit_code) == ([1], "timeout", None)
    assert worker.exit_code == -signal.SIGSEGV


def test_readers_of_a_shared_file_do_not_move_each_other() -> None:
    """Workers that run side by side load the output of fp32 at once, and their descriptors share one position."""
    file = shared_file()
    os.write(file, b"abcdef")
    with open_shared(file) as one, open_shared(os.dup(file)) as other:
        assert (one.read(2), other.read(4), one.read(1)) == (b"ab", b"abcd", b"c")
        one.seek(-2, os.SEEK_END)
        assert (one.tell(), one.read(), other.read()) == (4, b"ef", b"ef")
    os.write(file, b"gh")  # one that writes goes on at the end
    assert read_shared(file) == b"abcdefgh"
    os.close(file)


def test_the_time_in_which_nobody_read_does_not_count() -> None:
    """A worker beside others may have waited to send meanwhile."""
    worker = forked(hangs)
    worker.set_timeout(0.3)
    worker.idle_limit = 2.0
    assert worker.idle_seconds() == 0
    time.sleep(0.6)
    worker.resume(60.0)
    assert worker.idle_seconds() == 0
    assert watch(worker)[1].state == "idle"


@pytest.mark.parametrize(("waited", "idle"), [(0.0, 1.0), (0.3, 0.0)])
def test_a_worker_whose_threads_wait_for_a_core_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, waited: float, idle: float
) -> None:
    monkeypatch.setattr(function_worker, "_processor_seconds", lambda _: 1.0)
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: waited)
    activity = function_worker.Activity(os.getpid())
    assert activity.idle_seconds(10.0) == 0.0
    assert activity.idle_seconds(11.0) == idle


def test_a_worker_that_is_not_watched_any_more_can_be_released() -> None:
    """An interrupt may come after its end was seen and before that was reported."""
    worker = forked(counts)
    supervisor: Supervisor[FunctionWorker[int], int] = Supervisor([worker])
    supervisor.release(worker)
    supervisor.release(worker)
    assert list(supervisor.events()) == []
    worker.end()


def freezes(send: SendBytes) -> None:
    send(b"%d" % (gc.get_freeze_count() > 1000))


def test_collections_of_a_fork_do_not_visit_what_it_copied() -> None:
    before = gc.get_freeze_count()  # Python 3.12 freezes some objects itself
    assert watch(forked(freezes))[0] == [1]
    assert gc.get_freeze_count() == before


def test_a_worker_that_floods_is_killed_at_its_deadline() -> None:
    worker = forked(floods)
    worker.set_timeout(0.5)
    messages, end = watch(worker)
    assert set(messages) == {1}
    assert end.state == "timeout"


def test_a_worker_whose_pipe_holds_other_bytes_is_killed() -> None:
    messages, end = watch(forked(writes_into_the_pipe))
    assert (messages, end.state, end.exit_code) == ([1], "ended", FOREIGN_BYTES)
    assert describe_exit(FOREIGN_BYTES) == "the process writes to file descriptors that it did not open"


# -- Forks of forks, with an OpenMP whose threads cannot be ended (that of torch 2.6): a new thread makes each fork


@pytest.fixture
def openmp_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ctypes", types.SimpleNamespace(CDLL=lambda path: object()))


def multiplies(send: SendBytes) -> None:
    ones = torch.ones(300, 300)
    send(b"%d" % int((ones @ ones).sum() / 300**3))


def forks_and_multiplies(send: SendBytes) -> None:
    multiplies(send)
    worker = forked(multiplies)
    worker.deadline = time.monotonic() + 60
    messages, end = watch(worker)
    assert end.exit_code == 0
    send(b"%d" % sum(messages))
    multiplies(send)


def test_a_fork_forks_where_the_threads_of_openmp_stay(openmp_without_pause: None) -> None:
    assert not process_group._release_threads()
    multiplies(bytes)
    worker = forked(forks_and_multiplies)
    worker.deadline = time.monotonic() + 60
    messages, end = watch(worker)
    assert (messages, end.state, end.exit_code) == ([1, 1, 1], "ended", 0)


def takes_locks(send: SendBytes) -> None:
    with process_group.WHOLE_PROCESS, parsing, GUARDIAN._lock:
        send(b"1")


def test_locks_of_other_threads_are_free_in_a_fork() -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with process_group.WHOLE_PROCESS, parsing, GUARDIAN._lock:
            is_held.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    pid = os.fork()
    if pid == 0:
        takes_locks(bytes)
        os._exit(7)
    for _ in range(600):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, 0)
    may_end.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_lock_that_was_held_when_its_process_forked_can_be_left() -> None:
    lock = ForkLock()
    with lock, lock:
        lock.renew()
        with lock:
            pass
    with lock, lock:
        pass


def test_a_fork_reaches_no_private_descriptor() -> None:
    reader, writer = os.pipe()
    PRIVATE.add(writer)

    def writes(send: SendBytes) -> None:
        with contextlib.suppress(OSError):
            os.write(writer, b"garbage")
        send(b"1")

    messages, _ = watch(forked(writes))
    PRIVATE.remove(writer)
    os.close(writer)
    with open(reader, "rb") as file:
        assert (messages, file.read()) == ([1], b"")


def test_an_op_that_exceeds_its_limit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    worker = forked(functools.partial(hangs_in_an_op, path), Breadcrumb.create(path))
    worker.op_limit = 0.2
    end = watch(worker)[1]
    assert end.state == "stuck"
    assert end.position is not None
    assert (end.position.op, end.position.module, end.position.source) == ("aten.mm.default", "layer", "model.py:3")


def test_time_between_ops_does_not_count_for_an_op(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    worker = forked(functools.partial(hangs_between_ops, path), Breadcrumb.create(path))
    worker.op_limit = 0.5
    worker.set_timeout(3.0)
    end = watch(worker)[1]
    assert end.state == "timeout"
    assert end.position is not None
    assert not end.position.in_op


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_limits_hold_where_user_code_stops_clocks_and_replaces_functions(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    worker: FunctionWorker[int] = FunctionWorker(hangs_in_c, decode, method=method)
    for name in ("kill", "killpg", "waitid", "waitpid", "fork"):
        monkeypatch.setattr(os, name, lambda *_: None)
    worker.set_timeout(20.0)
    receives = "first message"
    for event in Supervisor([worker], tick=0.02).events():
        if isinstance(event, MessageEvent):
            receives = event.message
            worker.set_timeout(0.3)
        else:
            last = event
    monkeypatch.undo()
    assert (receives, last.state, worker.exit_code) == (1, "timeout", -signal.SIGKILL)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the processes that a test starts have in their command line."""
    return f"6{os.getpid()}{time.time_ns() % 1000}"


@pytest.mark.parametrize("end", ["hangs", "returns", "crashes"])
def test_daemons_shared_memory_and_files_of_a_worker_end_with_it(
    end: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "_fd",
        "_pid",
    ):  # as where no other test has started Python's tracker of shared memory, which forks share
        monkeypatch.setattr(resource_tracker._resource_tracker, name, None)
    worker = FunctionWorker(functools.partial(starts_much, end, mark), lambda data: data.decode(), method="fork")
    worker.set_timeout(60.0)
    for event in Supervisor([worker], tick=0.02).events():
        if isinstance(event, MessageEvent):
            file, shared = event.message.split()
            assert Path(file).exists()
            assert Path("/dev/shm", shared).exists()
            assert len(sleeping(mark)) == 2
            worker.set_timeout(1.0)
    assert not sleeping(mark)
    assert not Path(file).parent.exists()
    assert not Path("/dev/shm", shared).exists()


def test_the_guardian_ends_daemons_too_and_removes_the_folder(mark: str, tmp_path: Path) -> None:
    code = (
        "import functools, os, sys, time\nfrom test_process import *\n"
        f"worker = FunctionWorker(functools.partial(starts_much, 'hangs', {mark!r}), bytes.decode, method='fork')\n"
        "worker.set_timeout(600.0)\n"
        "for event in Supervisor([worker]).events():\n"
        "    if isinstance(event, MessageEvent):\n"
        "        print(event.message, flush=True)\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "process")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    _, shared = done.stdout.split()
    deadline = time.monotonic() + 20
    while (
        sleeping(mark) or [*tmp_path.iterdir()] or Path("/dev/shm", shared).exists()
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (sleeping(mark), [*tmp_path.iterdir()], Path("/dev/shm", shared).exists()) == ([], [], False)


def test_workers_share_what_inductor_compiles_and_use_a_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def caches() -> set[str]:
        return {watch_texts(sends_cache) for _ in range(2)}

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [own] = caches()
    assert Path(own).name == "inductor"
    theirs = tmp_path / f"torchinductor_{getpass.getuser()}"
    theirs.mkdir()
    assert caches() == {str(theirs)}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    assert caches() == {"chosen"}


def test_leaving_the_block_kills_the_workers() -> None:
    workers = [forked(hangs), forked(hangs)]
    supervisor: Supervisor[FunctionWorker[int], int] = Supervisor(workers[:1])
    supervisor.add(workers[1])
    assert [worker.exit_code for worker in workers] == [None, None]
    with pytest.raises(KeyboardInterrupt), supervisor:
        raise KeyboardInterrupt
    assert [worker.exit_code for worker in workers] == [-signal.SIGKILL] * 2


def line_worker(code: str, log: Path) -> LineWorker[int]:
    return LineWorker([sys.executable, "-c", code], decode, environment=os.environ, log=log)


def test_a_command_reads_tasks_and_writes_messages_in_lines(tmp_path: Path) -> None:
    code = (
        "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, flush=True)\n    if line == '9\\n': sys.exit(3)"
    )
    worker = line_worker(code, tmp_path / "log")
    for task in (b"2", b"9"):
        worker.send_task(task)
    messages, end = watch(worker)
    assert (messages, end.state, end.exit_code) == ([4, 81], "ended", 3)


def test_a_task_for_a_dead_worker_is_lost_and_its_end_is_reported(tmp_path: Path) -> None:
    worker = line_worker("raise SystemExit(3)", tmp_path / "log")
    while worker.exit_code is None:
        time.sleep(0.02)
    worker.send_task(b"1")
    assert watch(worker)[1].exit_code == 3


def test_a_line_may_arrive_in_pieces_and_stderr_goes_to_the_log(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "for piece in (b'12', b'3\\n4', b'\\n'):\n    os.write(1, piece)\n    time.sleep(0.1)\n"
        "sys.exit('it failed')"
    )
    messages, end = watch(line_worker(code, tmp_path / "log"))
    assert (messages, end.exit_code) == ([123, 4], 1)
    assert (tmp_path / "log").read_text() == "it failed\n"


def test_a_command_is_killed_with_its_child_processes(tmp_path: Path) -> None:
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
    assert has_ended(int(child.read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process ends within 10 s of its signal; it may be a zombie."""
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
        (-11, "SIGSEGV", "the process was killed by SIGSEGV", "killed by signal 11"),
        (-42, "signal 42", "the process was killed by signal 42", "killed by signal 42"),
        (3, None, "the process ended with exit code 3", "exit code 3"),
    ],
)
def test_description_of_exit_codes(exit_code: int, name: str | None, sentence: str, brief: str) -> None:
    assert signal_name(exit_code) == name
    assert describe_exit(exit_code) == sentence
    assert describe_exit(exit_code, brief=True) == brief


def test_a_breadcrumb_is_read_through_another_mapping_and_long_texts_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "breadcrumb"
    reader, writer = Breadcrumb.create(path), Breadcrumb.open(path)
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


def test_a_killed_command_has_no_code_if_ended_processes_are_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        group = start_command([sys.executable, "-c", "import time; time.sleep(600)"])
        group.end()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert group.exit_code == UNKNOWN_EXIT
