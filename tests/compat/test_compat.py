"""Scanning many models: each has its own row, interrupted calls resume, and a cluster works too."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import Call
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import gap as gap_of
from shared_result import run, shared_result

from lowprec_check.compat.report_folder import ReportFolder
from lowprec_check.compat.runner import _with_imports, map_unordered, scan_all
from lowprec_check.compat.scan_process import (
    Request,
    ScanLimits,
    ScanOutcome,
    expand_requests,
    failed_row,
    read_list,
    row_of,
    with_slugs,
)
from lowprec_check.errors import UsageError
from lowprec_check.report.matrix import matrix_document
from lowprec_check.report.registry import format_of
from lowprec_check.report.registry import write as write_report
from lowprec_check.schema import matrix
from lowprec_check.schema.matrix import Matrix, MatrixRow
from lowprec_check.schema.scan_result import ScanResult

RESULT = shared_result()
Write = Callable[..., Path]

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return {body}
{extra}
torch.manual_seed(0)
model = Net().eval()
inputs = torch.randn(4, 8)
"""

FAST = ("-p", "half", "--errors", "none", "--times", "off", "--no-plan")


@pytest.fixture
def sound(write: Write) -> str:
    return str(write(MODEL.format(body="self.linear(x)", extra=""), "sound.py"))


@pytest.fixture
def gap(write: Write) -> str:
    return str(write(MODEL.format(body="torch.quantile(self.linear(x), 0.5)", extra=""), "gap.py"))


def requests_of(*targets: str) -> list[Request]:
    return expand_requests([Request(target) for target in targets], FAST, [])


def states(found: Matrix) -> list[str]:
    return [row.state for row in found.rows]


def test_it_resumes_after_an_interruption(sound: str, gap: str, scans: Scans, tmp_path: Path) -> None:
    folder, wanted = tmp_path / "out", requests_of(sound, gap)
    seen: list[str] = []

    def stop_after_one(done: int, of: int, row: MatrixRow, result: ScanResult | None) -> None:
        seen.append(row.target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_all(wanted, folder, on_row=stop_after_one)
    assert [row.target for row in matrix.load(folder / "matrix.json").rows] == [sound]
    found = scan_all(wanted, folder, on_row=lambda done, of, row, result: seen.append(f"{done}/{of} {row.target}"))
    assert seen == [sound, f"2/2 {gap}"]
    assert states(found) == ["scanned", "scanned"]
    assert scan_all(wanted, folder, on_row=lambda *_: pytest.fail("all is done")) == found
    assert scans == [sound, gap]


def test_a_model_without_scan_and_page_is_scanned_again(sound: str, scans: Scans, tmp_path: Path) -> None:
    folder, wanted = tmp_path / "out", requests_of(sound)
    found = scan_all(wanted, folder)
    (folder / "scans" / f"{found.rows[0].slug}.json").unlink()
    again_result: list[ScanResult] = []
    again = scan_all(wanted, folder, on_row=lambda done, of, row, result: again_result.append(result))
    assert scans == [sound, sound]
    assert again_result == [RESULT]
    (folder / "models").mkdir()
    for suffix in (".md", ".html"):
        write_report(again_result[0], folder / "models" / f"{again.rows[0].slug}{suffix}")
    (folder / "scans" / f"{found.rows[0].slug}.json").unlink()
    scan_all(wanted, folder, on_row=lambda *_: pytest.fail("all is done"))


def test_failed_models_are_scanned_again(
    sound: str, scans: Scans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = tmp_path / "out", requests_of(sound)
    with monkeypatch.context() as patch:
        patch.setattr("lowprec_check.compat.runner.scan_one", lambda it, limits: ScanOutcome(it, b"", "no", 1.0))
        assert states(scan_all(wanted, folder)) == ["failed"]
    assert states(scan_all(wanted, folder)) == ["scanned"]


def test_an_edited_file_is_scanned_again(sound: str, gap: str, scans: Scans, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    scan_all(requests_of(f"{sound}:model", gap), folder)
    Path(sound).write_text(Path(gap).read_text())
    seen: list[str] = []
    found = scan_all(
        requests_of(f"{sound}:model"), folder, on_row=lambda done, of, row, result: seen.append(row.target)
    )
    assert seen == [f"{sound}:model"]
    assert scans == [f"{sound}:model", gap, f"{sound}:model"]
    assert [row.target for row in found.rows] == [f"{sound}:model", gap]


def test_a_longer_list_keeps_the_rows_of_the_shorter(sound: str, scans: Scans, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    scan_all(requests_of(sound), folder)
    both = with_slugs([Request(sound, FAST), Request(sound, (*FAST, "--seed", "1"))])
    assert [len(row.options) for row in scan_all(both, folder).rows] == [len(FAST), len(FAST) + 2]


def test_other_options_or_versions_are_scanned_again(sound: str, scans: Scans, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    found = scan_all(requests_of(sound), folder)
    other = expand_requests([Request(sound)], (*FAST, "--seed", "1"), [])
    again = scan_all(other, folder)
    assert [row.options[-1] for row in again.rows] == ["1"]
    data = json.loads((folder / "matrix.json").read_text())
    data["rows"][0]["made_with"]["torch"] = "1.0"
    (folder / "matrix.json").write_text(json.dumps(data))
    assert scan_all(other, folder).rows[0].made_with == found.rows[0].made_with
    assert scans == [sound] * 3


def test_the_files_that_a_target_imports(tmp_path: Path) -> None:
    inside = {
        "proj/pkg/__init__.py": "",
        "proj/pkg/models/__init__.py": "from ..layers import deep",
        "proj/pkg/models/net.py": "import pkg.other\nfrom . import near",
        "proj/pkg/models/near.py": "",
        "proj/pkg/layers/__init__.py": "from .deep import x",
        "proj/pkg/layers/deep.py": "def broken(:",
        "proj/pkg/other.py": "import torch",
    }
    for name, text in inside.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "proj" / "pkg" / "unused.py").touch()
    found = _with_imports(tmp_path / "proj" / "pkg" / "models" / "net.py")
    assert {path.relative_to(tmp_path).as_posix() for path in found} == {*inside}
    deep = tmp_path / "deep.py"
    deep.write_text("x = " + "+".join(["1"] * 50_000))
    assert _with_imports(deep) == [deep]


def test_a_failed_row_of_another_list_does_not_fail(sound: str, scans: Scans, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "out"
    scan_all(requests_of(sound), folder)
    data = json.loads((folder / "matrix.json").read_text())
    data["rows"][0] |= {"state": "failed", "reason": "no"}
    (folder / "matrix.json").write_text(json.dumps(data))
    done = call("compat", "other.py", "-o", folder, "-q")
    assert (done.returncode, "2 rows (1 of earlier runs), 0 could not" in done.stdout) == (0, True)


def test_a_failed_row_that_was_not_asked_for_is_kept(sound: str, scans: Scans, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    scan_all(requests_of(sound), folder)
    data = json.loads((folder / "matrix.json").read_text())
    data["rows"][0] |= {"state": "failed", "reason": "no"}
    (folder / "matrix.json").write_text(json.dumps(data))
    other = requests_of("other.py")
    for _ in range(2):
        found = scan_all(other, folder)
        assert [row.state for row in found.rows] == ["scanned", "failed"]


def test_changed_weights_and_imported_modules_are_scanned_again(scans: Scans, tmp_path: Path) -> None:
    weights, inner, other = tmp_path / "weights.pt", tmp_path / "net" / "scale.py", tmp_path / "unused.py"
    inner.parent.mkdir()
    (tmp_path / "net" / "__init__.py").write_text("from .scale import SCALE\n")
    model = tmp_path / "model.py"
    model.write_text("import net\n")
    wanted = expand_requests([Request(str(model))], (*FAST, f"--weights={weights}", "--keep", "x" * 300), [])
    for path in (weights, inner, other, inner, weights):
        path.write_text(path.read_text() + "# \n" if path.exists() else "SCALE = 1\n")
        scan_all(wanted, tmp_path / "out")
    assert len(scans) == 4  # ``unused`` is not read


@pytest.mark.slow
def test_a_cluster_of_two_workers(sound: str, write: Write, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    raises = str(write("raise ValueError('no weights here')", "raises.py"))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        engine = f"dask://{cluster.scheduler_address.partition('://')[2]}"
        found = scan_all(requests_of(sound, raises), tmp_path / "out", engine=engine)
    assert states(found) == ["scanned", "failed"]
    assert [cell.status for row in found.rows for cell in row.cells] == ["ok"]


@pytest.mark.parametrize("engine", ["slurm://x", "ray", "local", "dask://127.0.0.1:1"])
def test_unknown_or_unreachable_engines_are_errors(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("lowprec_check.compat.runner._CONNECT_SECONDS", 0.5)
    with pytest.raises(UsageError):
        scan_all(requests_of("nothing.py"), tmp_path, engine=engine)


def test_a_list_has_options_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# zoo\ntorchvision:resnet18 --inputs 1x3x64x64  # small\n\n'my model.py'\n")
    assert read_list(path) == [
        Request("torchvision:resnet18", ("--inputs", "1x3x64x64")),
        Request("my model.py"),
    ]
    path.write_text("a.py 'open")
    with pytest.raises(UsageError, match=r"list.txt:1"):
        read_list(path)
    with pytest.raises(UsageError):
        read_list(tmp_path / "none.txt")


def test_slugs_are_unique_file_names() -> None:
    wanted = with_slugs(
        [
            Request("torchvision:resnet18"),
            Request("torchvision:resnet18", device="cuda:0"),
            Request("a/b.py"),
            Request("a-b.py"),
            Request("a/b.py", ("--seed", "1")),
            Request("../../etc/passwd"),
            Request("/" * 300),
            Request("a.py" + "." * 40 + "b" * 40 + ".c"),
            Request("x.py", device="../../x"),
        ]
    )
    slugs = [request.slug for request in wanted]
    assert slugs[:2] == ["torchvision-resnet18", "torchvision-resnet18-cuda0"]
    assert len(set(slugs)) == len(slugs)
    assert all(re.fullmatch(r"[\w.-]{1,100}", slug) and not slug.startswith(".") for slug in slugs)


@pytest.mark.parametrize("data", ["{", "[]", '{"schema": 1}', '{"schema": 9}', '{"rows": [{"target": 1}]}', '{"x": 1}'])
def test_a_folder_with_an_invalid_matrix_is_an_error(data: str, tmp_path: Path) -> None:
    (tmp_path / "matrix.json").write_text(data)
    with pytest.raises(UsageError, match=r"matrix\.json"):
        scan_all([], tmp_path)


# -- the pages


def matrix_of(*texts: str) -> Matrix:
    rows = [
        row_of(shared_result(text), Request(text or "net.py", slug=f"m{i}"), 3.0, {"tool": "0.1.0"})
        for i, text in enumerate(texts)
    ]
    failed = failed_row(Request(texts[0] or "x", slug="f"), texts[0] or "no such file", 1.0, {})
    return Matrix(rows=[*rows, failed])


def index(found: Matrix, suffix: str = ".md") -> str:
    return format_of(Path(suffix)).lay_out(matrix_document(found, pages=suffix))


def test_the_index_has_totals_status_error_speed_and_first_gap() -> None:
    found = matrix_of("")
    shown = index(found)
    assert shown.splitlines()[2] == "1 model scanned; 1 could not be."
    row = next(line for line in shown.splitlines() if "[net.py](models/m0.md)" in line)
    assert "❌ 3.1e-01 · 1.2 × as fast" in row
    assert "❌ no linalg\\_cholesky\\_ex +1" in row
    assert "half + 2 in fp32" in row
    assert re.search(r"^\| x +\| no such file +\|$", shown, re.M)
    rows = [
        msgspec.structs.replace(row, options=["--budget", "4", "--inputs", *own])
        for row, own in zip(found.rows, (["1x3"], ["1x4"]), strict=True)
    ]
    mixed = index(Matrix(rows=rows))
    assert "scanned with --budget 4*\n" in mixed
    assert "[net.py --inputs 1x3](models/m0.md)" in mixed
    assert re.search(r"`torch.quantile` +\| half +\| +1 \|", shown)


def test_a_scalar_overflow_is_not_counted_as_a_missing_kernel() -> None:
    overflow = gap_of("aten.masked_fill.Scalar", kind="scalar-overflow")
    result = msgspec.structs.replace(RESULT, runs=[run("fp32"), run("half", "error", gaps=[overflow])])
    shown = index(Matrix(rows=[row_of(result, Request("net.py", slug="n"), 1.0, {})]))
    assert "❌ scalar-overflow: masked\\_fill" in shown
    assert "Ops without a kernel" not in shown


@settings(deadline=None, max_examples=25)
@given(
    st.one_of(st.text(max_size=200), st.sampled_from(["<script>alert(1)</script>", "a|b\n|c", "x" * 10_000, "@me #1"]))
)
def test_any_text_is_escaped_in_the_index(nasty: str) -> None:
    found = matrix_of(nasty)
    tables = [line for line in index(found).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables}) == 4  # a number of columns for each table
    page = index(found, ".html")
    assert "<script>alert" not in page
    assert page.count("<script") == 1


# -- the command


@pytest.mark.slow
def test_the_command_writes_a_report_in_which_a_failing_model_affects_only_its_own_row(
    sound: str, gap: str, write: Write, tmp_path: Path, call: Call
) -> None:
    raises = str(write("raise ValueError('no weights here')", "raises.py"))
    dies = str(write("import os; os._exit(7)", "dies.py"))
    killed = str(write("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed.py"))
    listed, folder = tmp_path / "list.txt", tmp_path / "out"
    listed.write_text(f"{raises}\n{gap}\n{dies}\n{killed}\n")
    options = ("-p", "half", "--scan-options", shlex.join(FAST[2:]), "--jobs", "2")
    done = call("compat", sound, "--from-file", listed, "-o", folder, *options)
    assert done.returncode == 1
    assert "5 rows, 3 could not be scanned" in done.stdout
    assert "[5/5]" in done.stderr
    found = matrix.load(folder / "matrix.json")
    assert states(found) == ["scanned", "failed", "scanned", "failed", "failed"]
    assert [row.reason for row in found.rows if row.state == "failed"] == [
        "ValueError at raises.py:1: no weights here",
        f"{dies} cannot be loaded: the process ended with exit code 7 at dies.py:1.",
        f"{killed} cannot be loaded: the process was killed by SIGKILL.",
    ]
    first, second = (row.cells[0] for row in found.rows if row.state == "scanned")
    assert (first.precision, first.status, first.first_gap) == ("half", "ok", None)
    assert (second.status, second.first_gap, second.first_gap_source) == ("error", "torch.quantile", "gap.py:9")
    assert ScanResult.load(folder / "scans" / f"{found.rows[0].slug}.json").target == sound
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    slugs = [row.slug for row in found.rows if row.state == "scanned"]
    wanted = {f"models/{slug}{suffix}" for slug in slugs for suffix in (".md", ".html")}
    assert names == wanted | {f"scans/{slug}.json" for slug in slugs} | {"index.md", "index.html", "matrix.json"}
    links = re.findall(r"\]\(([^)]+)\)", (folder / "index.md").read_text())
    assert links
    assert not [link for link in links if not (folder / link).exists()]


def test_nothing_to_scan_is_a_usage_error(tmp_path: Path, call: Call) -> None:
    done = call("compat", "-o", tmp_path)
    assert (done.returncode, "nothing to scan" in done.stderr) == (2, True)


# -- the folder: what is incomplete, removed, locked or not ours


Scans = list[str]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    """Replace the scan of a model by a saved result; the list has the targets scanned."""
    scanned: Scans = []

    def scan_one(request: Request, limits: ScanLimits) -> ScanOutcome:
        scanned.append(request.target)
        return ScanOutcome(request, RESULT.to_json(), None, 1.0)

    monkeypatch.setattr("lowprec_check.compat.runner.scan_one", scan_one)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return scanned


@pytest.mark.parametrize("suffix", [".md", ".html"])
@pytest.mark.parametrize("kept", [0, 100])
def test_an_incomplete_page_is_made_again(suffix: str, kept: int, scans: Scans, tmp_path: Path, call: Call) -> None:
    command = ("compat", "a.py", "-o", tmp_path, "-q")
    assert call(*command).returncode == 0
    page = tmp_path / "models" / f"a.py{suffix}"
    complete = page.read_bytes()
    page.write_bytes(complete[:kept])
    assert call(*command).returncode == 0
    assert (page.read_bytes(), scans) == (complete, ["a.py"])
    page.write_bytes(complete[:kept])
    (tmp_path / "scans" / "a.py.json").unlink()
    assert call(*command).returncode == 0
    assert (page.read_bytes(), scans) == (complete, ["a.py", "a.py"])


@pytest.mark.parametrize("kept", [0, 100, -2])
def test_an_incomplete_scan_is_scanned_again(kept: int, scans: Scans, tmp_path: Path, call: Call) -> None:
    command = ("compat", "a.py", "-o", tmp_path, "-q")
    call(*command)
    saved = tmp_path / "scans" / "a.py.json"
    saved.write_bytes(saved.read_bytes()[:kept])
    assert call(*command).returncode == 0
    assert (saved.read_bytes(), scans) == (RESULT.to_json(), ["a.py", "a.py"])


def test_a_second_run_on_the_same_folder_is_an_error(scans: Scans, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with ReportFolder(folder) as first:
        done = call("compat", "a.py", "-o", folder)
        assert (done.returncode, scans) == (2, [])
        assert done.stderr.startswith(f"error: Another compat run is writing to {folder}.\nWait")
        shutil.rmtree(folder)
        first.index(Matrix(rows=[]))  # made again by the first run, it is locked again
        assert call("compat", "a.py", "-o", folder).returncode == 2
    assert call("compat", "a.py", "-o", folder).returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html",
        "index.md",
        "matrix.json",
        "models",
        "scans",
    ]


def test_a_folder_removed_midway_is_made_again(
    scans: Scans, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"

    def remove_before_the_second(request: Request, limits: ScanLimits) -> ScanOutcome:
        if scans == ["a.py"]:
            shutil.rmtree(folder)
        scans.append(request.target)
        return ScanOutcome(request, RESULT.to_json(), None, 1.0)

    monkeypatch.setattr("lowprec_check.compat.runner.scan_one", remove_before_the_second)
    command = ("compat", "a.py", "b.py", "c.py", "-o", folder, "-q")
    done = call(*command)
    assert done.returncode == 1
    assert done.stderr.startswith("warning: No page could be written for a.py: the saved scans were removed.\n")
    assert [row.target for row in matrix.load(folder / "matrix.json").rows] == ["a.py", "b.py", "c.py"]
    assert "[c.py](models/c.py.md)" in (folder / "index.md").read_text()
    assert call(*command).returncode == 0
    assert scans == ["a.py", "b.py", "c.py", "a.py"]
    assert (folder / "models" / "a.py.md").exists()


def test_a_full_disk_stops_the_run_with_a_sentence(
    scans: Scans, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    call("compat", "a.py", "-o", tmp_path, "-q")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = call("compat", "a.py", "b.py", "-o", tmp_path, "-q")
    assert (done.returncode, "No space left on device." in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert call("compat", "a.py", "b.py", "-o", tmp_path, "-q").returncode == 0
    assert scans == ["a.py", "b.py", "b.py"]


@pytest.mark.parametrize("created", [0, 1], ids=["from the start", "later"])
def test_no_usable_temporary_folder(created: int, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = tempfile.TemporaryFile, list[int]()

    def temporary_file() -> object:
        calls.append(1)
        if len(calls) <= created:
            return make()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    done = call("compat", "a.py", "b.py", "-o", tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", make)  # pytest needs it
    sentence = "Cannot create a temporary file: No space left on device."
    if not created:
        assert (done.returncode, done.stderr.startswith(f"error: {sentence}\nSet TMPDIR")) == (2, True)
    else:
        assert done.returncode == 1
        assert [row.reason for row in matrix.load(tmp_path / "matrix.json").rows] == [sentence] * 2


@pytest.mark.parametrize("slug", ["../../x", "a/b", "..", ".x", "", "a\n", "a\0", "é"])
def test_names_of_files_in_a_matrix_do_not_leave_the_folder(
    slug: str, scans: Scans, tmp_path: Path, call: Call
) -> None:
    found = failed_row(Request("a.py", slug="a.py"), "", 1.0, {})
    encoded = msgspec.json.encode(Matrix(rows=[found]))
    (tmp_path / "matrix.json").write_bytes(encoded)
    assert matrix.load(tmp_path / "matrix.json").rows == [found]
    changed = encoded.replace(b'"slug":"a.py"', b'"slug":' + json.dumps(slug).encode())
    (tmp_path / "matrix.json").write_bytes(changed)
    done = call("compat", "b.py", "-o", tmp_path)
    assert (done.returncode, "is not a matrix" in done.stderr, scans) == (2, True, [])
    assert (tmp_path / "matrix.json").read_bytes() == changed


# -- calls that fail


def test_a_call_that_raises_does_not_lose_the_others() -> None:
    found = map_unordered(eval, ["'a'", "1/0", "'b'"], 2, None, on_error=lambda i, e: type(e).__name__, stop=int)
    assert sorted(found) == ["ZeroDivisionError", "a", "b"]


def test_calls_in_threads_end_with_the_iteration() -> None:
    ended, started, stops = threading.Event(), list[int](), list[bool]()

    def call(item: int) -> int:
        started.append(item)
        assert item == 0 or ended.wait(60)
        return item

    def stop() -> None:
        stops.append(bool(stops))
        if stops[-1]:  # the first time came before the call could be ended
            ended.set()

    results = map_unordered(call, [*range(9)], 2, None, on_error=lambda i, e: -1, stop=stop)
    assert next(results) == 0
    results.close()
    assert ended.is_set()
    assert sorted(started) in ([0, 1], [0, 1, 2])


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:Port \d+ is already in use:UserWarning")
def test_a_call_that_kills_its_dask_worker_is_an_error_of_that_call_alone() -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    items = ["'a'", "__import__('os')._exit(1)", "1/0", "'b'"]
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
    ):
        engine = f"dask://{cluster.scheduler_address.partition('://')[2]}"
        found = list(map_unordered(eval, items, 1, engine, on_error=lambda i, e: f"{i}: {type(e).__name__}", stop=int))
    assert sorted(found) == [
        "1/0: ZeroDivisionError",
        "__import__('os')._exit(1): KilledWorker",
        "a",
        "b",
    ]
