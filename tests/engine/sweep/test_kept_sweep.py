"""The worker that measures single operators: kept for the next one, replaced if it dies, gone with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from conftest import HEARS_SIGNALS, PLUGIN, ROOT

from lowprec_check.catalog.records import DTYPES, MODES, Failure
from lowprec_check.engine.sweep import kept_sweep
from lowprec_check.engine.sweep.kept_sweep import BriefSweep
from lowprec_check.errors import UsageError
from tools.operator_sweep.__main__ import build

pytestmark = pytest.mark.slow
ODD = "killing_worker"


@pytest.fixture(autouse=True, scope="module")
def own_operators() -> Iterator[None]:
    """Workers find the module ``killing_worker``. One test leaves its worker to the next; they end with the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
        yield
    end_all()


def end_all() -> None:
    for key in [*kept_sweep._kept]:
        kept_sweep._end(key)


def measured(*ops: str) -> BriefSweep:
    return kept_sweep.measure_briefly("cpu", [*ops], worker=ODD, call_seconds=6)


def worker_pid() -> int:
    [worker] = kept_sweep._kept[os.getpid(), "cpu", ODD].queue.workers
    return worker._group.pid


def test_one_worker_measures_several_operators_and_is_replaced_if_it_dies() -> None:
    end_all()
    with pytest.raises(UsageError, match="no operator 'nosuch'"):  # before the worker has started
        measured("nosuch")
    kept_sweep.start_early("cpu", worker=ODD, call_seconds=6)
    early = worker_pid()
    os.kill(early, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(early)], 0.5)  # it stays a zombie until it is replaced
    assert measured("prints").records[0].state("float16", "backward") == "all"
    first = worker_pid()
    assert measured("refuses_large").records[0].state("float16", "forward") == "some"
    assert worker_pid() == first
    with pytest.raises(UsageError, match="no operator 'nosuch'"):
        measured("nosuch")
    crash = measured("dies").records[0].failure("float16", "forward")
    assert crash is not None
    assert (crash.kind, crash.type) == ("crash", "SIGSEGV")
    second = worker_pid()
    assert second != first
    os.kill(second, signal.SIGKILL)  # while it waits for the next operator
    assert measured("prints").records[0].state("float16", "forward") == "all"
    assert worker_pid() != second
    assert not psutil.pid_exists(second)


def test_a_worker_that_was_started_early_measures_and_a_fork_has_its_own() -> None:
    end_all()
    kept_sweep.start_early("cpu", worker=ODD, call_seconds=6)
    first = worker_pid()
    kept_sweep.start_early("cpu", worker=ODD, call_seconds=6)
    time.sleep(1)  # it may say hello before anyone asks
    assert measured("prints").records[0].state("float16", "forward") == "all"
    assert worker_pid() == first
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kept_sweep._end((os.getppid(), "cpu", ODD))  # as at its exit
            found = measured("prints").records[0].state("float16", "forward")
            code = 0 if found == "all" and worker_pid() != first else 1
            kept_sweep._end((os.getpid(), "cpu", ODD))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert measured("refuses_large").records[0].state("float16", "forward") == "some"
    assert worker_pid() == first


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"], ids=["exit", "killed"])
def test_the_worker_ends_with_its_process(end: str) -> None:
    code = (
        "import os\nfrom lowprec_check.engine.sweep import kept_sweep as k\n"
        f"k.measure_briefly('cpu', ['prints'], worker={ODD!r})\n[sweep] = k._kept.values()\n"
        f"print(sweep.queue.workers[0]._group.pid, sweep.queue.folder, flush=True)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid, folder = done.stdout.split()
    for _ in range(100):
        if not psutil.pid_exists(int(pid)) and not os.path.exists(folder):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(int(pid))
    assert not os.path.exists(folder)


SUITE = """
import time
def test_first(lowprec):
    open("ready", "w").close()
    time.sleep(60)
def test_second(lowprec):
    lowprec.assert_supported("dot")
"""


def test_an_interrupted_session_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    tmp_path.joinpath("test_suite.py").write_text(SUITE)
    run = f"{HEARS_SIGNALS}import sys, pytest; sys.exit(pytest.console_main())"
    command = [sys.executable, "-c", run, "-p", PLUGIN, "-p", "no:cacheprovider"]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as session:
        try:
            while session.poll() is None and not tmp_path.joinpath("ready").exists():
                time.sleep(0.1)
            started = psutil.Process(session.pid).children(recursive=True)
            assert any(kept_sweep.WORKER in " ".join(process.cmdline()) for process in started)  # for the second test
            assert [*folder.glob("lowprec-*")]
            session.send_signal(signal.SIGINT)
            assert session.wait(60) == pytest.ExitCode.INTERRUPTED
        finally:
            session.kill()
    psutil.wait_procs(started, 10)
    assert not any(process.is_running() for process in started)
    assert [*folder.iterdir()] == []


def without_cells(failure: Failure | None) -> Failure | None:
    """A failure without the cells that it is common to, which a brief measurement may not have."""
    return failure and msgspec.structs.replace(failure, cells=[])


def test_a_brief_measurement_agrees_with_a_full_one() -> None:
    ops = ["cdist", "special.i1"]
    brief, full = kept_sweep.measure_briefly("cpu", ops), build("cpu", jobs=1, only=ops)
    assert [record.op for record in brief.records] == [record.op for record in full.records] == sorted(ops)
    for one, other in zip(brief.records, full.records, strict=True):
        assert one.samples == other.samples
        for dtype in DTYPES:
            for mode in MODES[:2]:
                assert one.state(dtype, mode) == other.state(dtype, mode)
                assert one.count(dtype, mode) == other.count(dtype, mode)
                assert without_cells(one.failure(dtype, mode)) == without_cells(other.failure(dtype, mode))
