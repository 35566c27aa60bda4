"""A precision, backend, report format or way to train from another package works everywhere (CONTRIBUTING.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from lowprec_check.report.registry import render
from lowprec_check.schema.scan_result import Run, ScanResult

TOY = '''
"""The axes of another package: two precisions, a backend, a device and a report format."""

from lowprec_check import (
    Backend, Code, Device, FloatFormat, Precision, ReportFormat, WayToTrain,
)

FP12 = FloatFormat("float16", "fp12", "f16", 7, -14, 15, tolerance=0.2)


def snippet(device, keep_fp32):
    return f"import toy\\ntoy.round_weights(model, keep={list(keep_fp32)})"


ROUNDED = Precision(
    name="rounded", kind="custom", format=FP12, aliases=("toy-rounded",),
    application="toy_torch:Rounded", snippet=snippet,
)
STRICT = Precision(name="strict-half", kind="cast", format=FP12, method="half", tolerance=1e-9)


class Doubled(Backend):
    """Returns twice what the model returns, so that its error is known: 1."""

    name = "doubled"
    summary = "twice the model"

    def skip_reason(self, precision, device, memory_format):
        return "doubled cannot run autocast" if precision.kind == "autocast" else None

    def prepare(self, model, example):
        from toy_torch import doubled

        return doubled(model)

    def code(self, key, model):
        return Code(imports=["import toy_torch"], before=["model = toy_torch.doubled(model)"])


class Same(Backend):
    """Calls the model."""

    name = "same"
    summary = "the model again"

    def prepare(self, model, example):
        return model


class Halved(Same):
    """Returns half of what the model returns."""

    name = "halved"

    def prepare(self, model, example):
        return lambda *args, **kwargs: 0.5 * model(*args, **kwargs)


class Nothing(Same):
    """Returns nothing to call."""

    name = "nothing"

    def prepare(self, model, example):
        return None


class Shout(ReportFormat):
    name = "shout"
    suffixes = (".shout",)
    renders_diffs = True

    def render(self, result):
        return " ".join(run.key.label for run in result.runs).upper()

    def render_diff(self, diff):
        return f"{len(diff.changes)} CHANGES"


class Int6(Same):
    """Computes in fewer bits than the precision."""

    name = "int6"
    lowers_precision = True


BACKEND, SAME, HALVED, NOTHING, INT6 = Doubled(), Same(), Halved(), Nothing(), Int6()
FORMAT, DEVICE = Shout(), Device(name="tpu")
WAY = WayToTrain(name="toy-way", words="a way of toy", summary="nothing.", order=5, kinds=("cast",))
'''

TOY_TORCH = '''
import torch
from lowprec_check import Application


class Rounded(Application):
    """Rounds the weights to 7 bits and leaves the arithmetic alone."""

    def apply(self, model, device_type, keep_fp32):
        for name, parameter in model.named_parameters():
            if not any(name.startswith(f"{kept}.") for kept in keep_fp32):
                mantissa, exponent = torch.frexp(parameter.data)
                parameter.data = torch.ldexp((mantissa * 128).round() / 128, exponent)


def doubled(model):
    return lambda *args, **kwargs: 2 * model(*args, **kwargs)
'''

FAST = ("--times", "off", "--no-plan")
ENTRY_POINTS = """[lowprec_check.axes]
rounded = toy:ROUNDED
strict = toy:STRICT
doubled = toy:BACKEND
same = toy:SAME
halved = toy:HALVED
nothing = toy:NOTHING
int6 = toy:INT6
shout = toy:FORMAT
tpu = toy:DEVICE
toy-way = toy:WAY
"""

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
inputs = torch.randn(8, 16)
"""

NOISY = """
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x).float() + torch.rand(8, 16)

torch.manual_seed(0)
model, inputs = Noisy().eval(), torch.randn(8, 16)
"""

TEST = """
import pytest
import torch
from mymodel import model, inputs

@pytest.mark.lowprec("toy-rounded", "half")
def test_marked(lowprec):
    assert lowprec.precision in ("rounded", "half")
    lowprec.check(model, inputs)

@pytest.mark.lowprec("rounded")
def test_cast(lowprec):
    cast = lowprec.cast(model)
    assert not torch.equal(cast[0].weight, model[0].weight)
    y = cast(lowprec.cast(inputs))
    assert lowprec.allclose(y, model(inputs)) and not torch.equal(y, model(inputs))

@pytest.mark.lowprec("half", backend="doubled")
def test_on_a_backend(lowprec):
    with pytest.raises(AssertionError, match="half · doubled"):
        lowprec.check(model, inputs)
"""


SERVER = """
import json, os, sys
import torch
from lowprec_check import scan
from lowprec_check.cli.main import main
from lowprec_check.core.feature_hooks import features
from lowprec_check.features.printed_code import run

features()
run.METHOD = "fork"
for line in sys.stdin:
    fork = os.fork()
    if fork == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["lowprec-check", *json.loads(line)]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
SERVERS: dict[Path, subprocess.Popen[str]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the other package, including its metadata, and a model."""
    path = tmp_path_factory.mktemp("toy")
    info = path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    for name, text in (("toy.py", TOY), ("toy_torch.py", TOY_TORCH), ("mymodel.py", MODEL), ("test_mine.py", TEST)):
        (path / name).write_text(text, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=path, env=environment(path), text=True, stdin=PIPE, stdout=PIPE
    ) as server:
        SERVERS[path] = server
        yield path
        del SERVERS[path]
        server.communicate()


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command, in a fork of the server of the folder if there is one: a new process would import torch."""
    server = SERVERS.get(folder)
    if server is None:
        return python(folder, "-m", "lowprec_check", *arguments)
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(arguments), file=server.stdin, flush=True)
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess(arguments, code, *((folder / name).read_text() for name in ("out", "err")))


@pytest.fixture(scope="module")
def scanned(folder: Path) -> Path:
    """A scan of two precisions of the other package and a built-in one, on two backends."""
    done = call(
        folder, "scan", "mymodel.py", "-p", "toy-rounded,strict-half", "-p", "autocast-bf16",
        "--backend", "eager,doubled", "--json", "scan.json", "--fail-on", "never", *FAST,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "scan.json"


@pytest.mark.slow
def test_help_lists_what_is_registered(folder: Path) -> None:
    shown = " ".join(call(folder, "scan", "--help-all").stdout.split())
    for name in ("rounded", "strict-half", "doubled (twice the model)", "tpu", ".shout"):
        assert name in shown, name
    assert "rounded" in python(folder, "-m", "pytest", "--markers").stdout


def test_a_scan_runs_every_precision_on_every_backend(scanned: Path) -> None:
    saved = json.loads(scanned.read_text())
    found = {(run["precision"], run["backend"]): run for run in saved["runs"]}
    assert list(found) == [
        ("fp32", "eager"), ("rounded", "eager"), ("strict-half", "eager"), ("autocast-bf16", "eager"),
        ("rounded", "doubled"), ("strict-half", "doubled"), ("autocast-bf16", "doubled"),
    ]  # fmt: skip
    rounded = found["rounded", "eager"]
    assert rounded["status"] == "ok"
    assert rounded["tolerance"] == 0.2
    assert 1e-4 < rounded["output_error"]["rel_l2"] < 0.05
    assert found["strict-half", "eager"]["status"] == "inaccurate"
    doubled = found["rounded", "doubled"]
    assert doubled["status"] == "inaccurate"
    assert doubled["output_error"]["rel_l2"] == pytest.approx(1.0, abs=0.05)
    assert found["autocast-bf16", "doubled"]["status"] == "skipped"
    assert found["autocast-bf16", "doubled"]["reason"] == "doubled cannot run autocast"
    for run in saved["runs"]:
        assert (len(run["op_calls"]["op"]) >= 3) == (run["backend"] == "eager")
    assert doubled["explained_by"] == "rounded"  # the eager run beside it
    mismatch = [d for d in saved["diagnostics"] if d["code"] == "LP301" and d["backend"] == "doubled"]
    assert {d["precision"] for d in mismatch} == {"rounded", "strict-half"}


def test_a_way_to_train_follows_those_built_in(folder: Path) -> None:
    code = "from lowprec_check.schema.ways_to_train import WAYS; print(*WAYS.names()[-2:])"
    assert python(folder, "-c", code).stdout.split() == ["states-8bit-stochastic", "toy-way"]


@pytest.mark.slow
def test_a_recommended_precision_prints_its_own_snippet(folder: Path) -> None:
    done = call(folder, "scan", "mymodel.py", "-p", "rounded", "--json", "-", *FAST)
    advice = json.loads(done.stdout)["recommendation"]
    assert advice["precision"] == "rounded"
    assert "toy.round_weights(model, keep=[])" in advice["code"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["text", "html", "shout"])
def test_every_report_names_the_run(folder: Path, scanned: Path, format: str) -> None:
    done = call(folder, "report", str(scanned), "--format", format)
    assert done.returncode == 0, done.stderr
    assert ("ROUNDED · DOUBLED" in done.stdout) if format == "shout" else ("rounded" in done.stdout)
    if format != "shout":
        assert "rounded · doubled" in done.stdout


@pytest.mark.slow
def test_reports_do_not_need_the_package(scanned: Path) -> None:
    for name in ("text", "md", "html", "sarif", "junit", "json"):
        shown = render(ScanResult.load(scanned), name)
        assert ("rounded" if name in ("sarif", "json") else "rounded · doubled") in shown


def test_a_saved_run_says_whether_its_backend_lowers_precision(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "scan.json"
    done = call(
        folder, "scan", "mymodel.py", "-p", "fp32,half", "--backend", "eager,int6,same", "--times", "off", "--no-plan",
        "--json", str(saved), "--fail-on", "never",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = ScanResult.load(saved)  # without the package
    assert {run.key.label: (run.quantized, run.is_low) for run in result.runs} == {
        "fp32": (False, False), "fp32 · int6": (True, True), "fp32 · same": (False, False), "half": (False, True),
        "half · int6": (True, True), "half · same": (False, True),
    }  # fmt: skip


def test_an_older_file_asks_the_registry_whether_a_backend_lowers_precision() -> None:
    older = [Run(precision="fp32", backend=backend, device="cpu", status="ok") for backend in ("int8", "jit", "int6")]
    assert [run.is_quantized for run in older] == [True, False, False]


@pytest.mark.slow
def test_diff_compares_each_backend_separately(folder: Path, scanned: Path) -> None:
    saved = json.loads(scanned.read_text())
    changed = next(run for run in saved["runs"] if (run["precision"], run["backend"]) == ("rounded", "doubled"))
    changed["status"] = "ok"
    (folder / "other.json").write_text(json.dumps(saved))
    diff = json.loads(call(folder, "diff", str(scanned), "other.json", "-f", "json").stdout)
    assert [(change["run"], change["new"]) for change in diff["changes"]] == [("rounded · doubled", "ok")]
    assert call(folder, "diff", str(scanned), "other.json", "-f", "shout").stdout == "1 CHANGES"


@pytest.mark.slow
def test_a_baseline_accepts_findings_per_backend(folder: Path, scanned: Path) -> None:
    options = ("scan", "mymodel.py", "-p", "strict-half", "--select", "LP3", "--baseline", "known.json", *FAST)
    assert call(folder, *options, "--update-baseline", "--fail-on", "never").returncode == 0
    done = call(folder, *options, "--backend", "eager,doubled", "--json", "-", "--fail-on", "never")
    found = {d["backend"]: d["accepted"] for d in json.loads(done.stdout)["diagnostics"] if d["code"] == "LP301"}
    assert found == {"eager": True, "doubled": False}


@pytest.mark.slow
def test_a_plan_starts_from_it_and_is_applied(folder: Path) -> None:
    done = call(
        folder, "plan", "mymodel.py", "--base", "custom", "--tolerance", "0.002", "--save-plan", "plan.json", "--json"
    )
    planning = json.loads(done.stdout)
    assert [attempt["base"] for attempt in planning["attempts"]] == ["rounded"]
    plan = planning["plan"]
    assert plan["keep_fp32"]
    assert 0 < plan["rel_l2"] <= 0.002
    assert f"toy.round_weights(model, keep={plan['keep_fp32']})" in plan["code"]
    code = (
        "import mymodel, lowprec_check; "
        "print(float(lowprec_check.apply(mymodel.model, 'plan.json')(mymodel.inputs).sum()))"
    )
    applied = python(folder, "-c", code)
    assert applied.returncode == 0, applied.stderr
    on_backend = call(folder, "plan", "mymodel.py", "--dtype", "bf16", "--backend", "doubled", "--json")
    attempts = json.loads(on_backend.stdout)["attempts"]
    assert {attempt["status"] for attempt in attempts} == {"inaccurate", "skipped"}


@pytest.mark.slow
def test_the_pytest_marker_and_check_accept_them(folder: Path) -> None:
    done = python(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py", "-v")
    assert done.returncode == 0, done.stdout
    for name in (
        "test_marked[rounded-cpu]",
        "test_marked[half-cpu]",
        "test_cast[rounded-cpu]",
        "test_on_a_backend[half-doubled-cpu]",
    ):
        assert f"{name} PASSED" in done.stdout


def test_fp32_on_a_backend_is_no_low_precision(folder: Path) -> None:
    done = call(folder, "scan", "mymodel.py", "-p", "fp32,strict-half", "--backend", "eager,same", "--json", "-", *FAST)
    saved = json.loads(done.stdout)
    assert [(r["precision"], r["backend"], r["status"]) for r in saved["runs"]][2] == ("fp32", "same", "ok")
    assert saved["recommendation"] is None
    assert done.returncode == 1


def test_a_random_model_is_compared_on_a_backend(folder: Path) -> None:
    (folder / "noisy.py").write_text(NOISY)
    done = call(folder, "scan", "noisy.py", "-p", "autocast-bf16", "--backend", "eager,halved", "--json", "-", *FAST)
    runs = {run["backend"]: run for run in json.loads(done.stdout)["runs"] if run["precision"] == "autocast-bf16"}
    assert runs["eager"]["status"] == "ok"
    assert runs["halved"]["status"] == "inaccurate"
    assert runs["halved"]["output_error"]["rel_l2"] == pytest.approx(0.5, abs=0.05)


WRONG = {
    "name": (
        "Precision(name='fp16', kind='cast', format=FORMAT, method='half')",
        "the name 'fp16' belongs to lowprec-check",
    ),
    "kind": ("Precision(name='odd', kind='quantized', format=FORMAT)", "its kind 'quantized' is not"),
    "plan": ("Precision(name='plan', kind='cast', format=FORMAT, method='half')", "'plan' is the name of runs"),
    "comma": ("Precision(name='a,b', kind='cast', format=FORMAT, method='half')", "a name has letters"),
    "class": ("Precision", "which is the class Precision"),
    "dict": ("{'name': 'x'}", "which is a dict without a name"),
    "method": ("Precision(name='odd', kind='cast', format=FORMAT, method='halve')", "which torch.nn.Module lacks"),
    "summary": ("type('B', (Backend,), {'name': 'b'})()", "it has no summary"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_registration_is_one_sentence(what: str, folder: Path, tmp_path: Path) -> None:
    item, says = WRONG[what]
    info = tmp_path / "wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lowprec_check.axes]\nx = wrong:X\n")
    text = "from lowprec_check import Backend, FloatFormat, Precision\n"
    text += f"FORMAT = FloatFormat('float16', 'fp16', 'f16', 11, -14, 15, tolerance=0.1)\nX = {item}\n"
    (tmp_path / "wrong.py").write_text(text)
    (tmp_path / "mymodel.py").write_text(MODEL)
    done = call(tmp_path, "scan", "mymodel.py", "--no-plan", "-q")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_that_prepares_nothing_fails(folder: Path) -> None:
    done = call(folder, "scan", "mymodel.py", "-p", "half", "--backend", "nothing", "--json", "-", *FAST)
    saved = json.loads(done.stdout)
    run = next(run for run in saved["runs"] if run["backend"] == "nothing")
    assert run["status"] == "error"
    assert "returned NoneType, which cannot be called" in run["exception"]["message"]
    assert [d["code"] for d in saved["diagnostics"] if d["backend"] == "nothing" and not d["timed"]] == ["LP108"]
    assert saved["recommendation"] is None


def test_a_package_that_fails_to_load_is_named(folder: Path, tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lowprec_check.axes]\nx = nowhere:X\n")
    done = call(tmp_path, "scan", "--help")
    assert done.returncode == 2
    assert "broken registers 'x'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_empty_list_is_an_error(folder: Path) -> None:
    assert call(folder, "scan", "mymodel.py", "-p", "").returncode == 2


def test_a_typing_mistake_gets_a_suggestion(folder: Path) -> None:
    done = call(folder, "scan", "mymodel.py", "-p", "bflaot16")
    assert done.returncode == 2
    assert "Unknown precision 'bflaot16'" in done.stderr
    assert "Did you mean bfloat16?" in done.stderr
