"""Files that the program writes: a failure leaves the old file, nothing else, and one sentence."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Call, call_process
from odd_processes import NO_BYTECODE

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import check_file, make_folder, write_file

SAVED = ROOT / "reports" / "scans" / "whitening.json"
PACKAGE = ROOT / "lowprec_check"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file.txt"
    path.parent.mkdir()
    path.write_text("old")
    return path


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(number: int) -> Any:
    def raise_error(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return raise_error


def test_a_report_that_does_not_fit_leaves_the_old_one(old: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    environment = os.environ | NO_BYTECODE
    done = call_process("report", SAVED, "-o", old, "-f", "md", preexec_fn=limit, env=environment)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: Cannot write {old}: File too large.")
    assert "Traceback" not in done.stderr
    assert (old.read_text(), listed(old.parent)) == ("old", ["file.txt"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_leaves_the_old_file(number: int, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(number))
    with pytest.raises(UsageError, match=rf"Cannot write .*: {os.strerror(number)}\."):
        write_file(old, "new")
    assert (old.read_text(), listed(old.parent)) == ("old", ["file.txt"])


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name exist on Linux only")
def test_a_kill_leaves_the_old_file_and_nothing_else(old: Path) -> None:
    program = """
import os, signal, sys
from lowprec_check.schema.base import write_file
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
write_file(sys.argv[1], "new")
"""
    done = subprocess.run([sys.executable, "-c", program, str(old)], check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (old.read_text(), listed(old.parent)) == ("old", ["file.txt"])


@pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed", "named"])
def test_the_mode_is_kept_or_follows_the_umask(unnamed: bool, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    old.chmod(0o640)
    write_file(old, "new")
    umask = os.umask(0o027)
    try:
        write_file(old.with_name("first.txt"), b"first")
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (old, old.with_name("first.txt"))]
    assert (old.read_text(), modes) == ("new", [0o640, 0o640])
    assert listed(old.parent) == ["file.txt", "first.txt"]


def test_a_file_system_without_links_to_open_files_works_too(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fail(errno.EXDEV))
    write_file(old, "new")
    assert (old.read_text(), listed(old.parent)) == ("new", ["file.txt"])


def test_a_link_stays_and_its_target_is_replaced(old: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").symlink_to("folder/file.txt")
    (tmp_path / "outer").symlink_to("inner")
    (tmp_path / "dangling").symlink_to("folder/made.txt")
    write_file(tmp_path / "outer", "new")
    write_file(tmp_path / "dangling", "made")
    assert (tmp_path / "outer").is_symlink()
    assert (tmp_path / "inner").is_symlink()
    assert (old.read_text(), old.with_name("made.txt").read_text()) == ("new", "made")


def test_devices_and_pipes_are_written_directly(tmp_path: Path) -> None:
    write_file("/dev/null", "nothing")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    fifo, found = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()))
    reader.start()
    check_file(fifo)
    write_file(fifo, "through the pipe")
    reader.join()
    assert (found, fifo.is_fifo()) == (["through the pipe"], True)
    done = call_process("report", SAVED, "-o", "/dev/stdout", "-f", "md")
    assert (done.returncode, done.stdout[:3]) == (0, "###")
    with pytest.raises(UsageError, match="No space left on device"):
        write_file("/dev/full", "new")


def test_redirected_output_goes_to_the_file_of_the_shell(tmp_path: Path) -> None:
    with (tmp_path / "out.md").open("wb") as output:
        command = [sys.executable, "-m", "lowprec_check", "report", str(SAVED), "-o", "/dev/stdout", "-f", "md"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=output)
        assert os.path.samestat(os.fstat(output.fileno()), (tmp_path / "out.md").stat())
    assert (tmp_path / "out.md").read_text().startswith("###")


@pytest.mark.parametrize("name", ["open", "rename"])
def test_a_file_in_a_folder_that_is_not_writable(name: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "open":  # a folder without write permission; as root, there is none
        monkeypatch.setattr(os, "open", fail(errno.EACCES))
    else:  # a mount point
        monkeypatch.setattr(Path, "replace", fail(errno.EBUSY))
    write_file(old, "new")
    assert (old.read_text(), listed(old.parent)) == ("new", ["file.txt"])
    with pytest.raises(UsageError, match=r"first\.txt"):
        write_file(old.with_name("first.txt"), "first")


def test_a_folder_that_is_missing_or_in_the_way(old: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot write .*gone/x: No such file or directory\."):
        write_file(old.parent / "gone" / "x", "new")
    with pytest.raises(UsageError, match=r"Is a directory\."):
        write_file(old.parent, "new")
    with pytest.raises(UsageError, match="null"):
        write_file("a\0b", "new")
    with pytest.raises(UsageError, match=r"Cannot create .*file\.txt: File exists\."):
        make_folder(old)
    make_folder(old.parent)


def test_the_check_before_the_work_changes_nothing(old: Path) -> None:
    before = old.stat()
    check_file(old)
    check_file(old.with_name("first.txt"))
    assert (old.stat(), listed(old.parent)) == (before, ["file.txt"])
    for path in (old.parent, old.parent / "gone" / "x", old / "x"):
        with pytest.raises(UsageError, match="Cannot write"):
            check_file(path)


def test_a_folder_removed_while_the_model_runs(tmp_path: Path, call: Call) -> None:
    model = tmp_path / "model.py"
    folder = tmp_path / "gone"
    model.write_text(f"""
import subprocess
import torch
subprocess.run(["rm", "-rf", {str(folder)!r}], check=True)
model = torch.nn.Linear(2, 2).eval()
inputs = torch.randn(1, 2)
""")
    folder.mkdir()
    done = call("scan", model, "-p", "half", "--errors", "none", "--json", folder / "scan.json")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"Cannot write {folder / 'scan.json'}: No such file or directory." in done.stderr


def test_only_one_module_writes_files_for_users() -> None:
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("core", "engine", "process", "torchkit")
    ]
    assert len(files) > 100
    writing = [
        path.name for path in files if any(word in path.read_text() for word in (".write_text(", ".write_bytes("))
    ]
    assert not writing
