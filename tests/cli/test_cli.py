"""The command line: exit codes, output streams, messages, and which commands import torch."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EXAMPLES, ROOT, Call, SharedScan, call_process

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.cli.app import COMMANDS, app
from lowprec_check.cli.progress import Progress, progress
from lowprec_check.errors import UsageError
from lowprec_check.process import system
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.torchkit.isolation import isolated

Write = Callable[..., Path]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        print("the model prints")
        return {body}

torch.manual_seed(0)
model = Net().eval()
inputs = torch.randn(4, 8)
"""


FAST = ("--times", "off", "--no-plan", "--further-inputs", "0")


def test_exit_codes(write: Write, call: Call) -> None:
    sound = str(write(MODEL.format(body="self.linear(x)"), "sound.py"))
    gap = str(write(MODEL.format(body="torch.quantile(self.linear(x), 0.5, dim=0)"), "gap.py"))
    never = str(write(MODEL.format(body="torch.quantile(self.linear(x).to(torch.bfloat16), 0.5)"), "never.py"))
    assert call("scan", *FAST, sound, "-p", "half").returncode == 0
    assert call("scan", *FAST, sound, "-p", "half", "--fail-on", "error").returncode == 0
    assert call("scan", *FAST, gap, "-p", "half", "-p", "autocast-bf16").returncode == 0
    assert call("scan", *FAST, gap, "-p", "half", "-p", "autocast-bf16", "--fail-on", "error").returncode == 1
    assert call("scan", *FAST, gap, "-p", "half").returncode == 1
    assert call("scan", *FAST, gap, "-p", "half", "--fail-on", "never").returncode == 0
    assert call("scan", never).returncode == 2


def test_json_has_the_documented_keys(write: Write, call: Call) -> None:
    path = write(MODEL.format(body="torch.quantile(self.linear(x), 0.5, dim=0)"))
    output = path.with_suffix(".json")
    call("scan", str(path), "--times", "off", "--json", str(output))
    saved = json.loads(output.read_text())
    assert saved["schema"] == 1
    assert {"tool", "target", "environment", "runs", "diagnostics", "recommendation"} <= set(saved)
    assert {"torch", "python", "device", "cpu_capability"} <= set(saved["environment"])
    half = next(run for run in saved["runs"] if run["precision"] == "half")
    assert {"backend", "device", "evidence", "status", "exception", "output_error", "latency_ms"} <= set(half)
    assert {"peak_memory_bytes", "gaps", "op_calls", "uncalled_modules"} <= set(half)
    assert half["exception"]["type"] == "RuntimeError"
    assert {
        "op", "layer", "kind", "phase", "module", "source", "dtypes", "message", "calls", "rescued",
    } <= set(half["gaps"][0])  # fmt: skip
    assert half["gaps"][0]["source"].endswith("mymodel.py:12")
    assert set(saved["diagnostics"][0]) >= {
        "code",
        "name",
        "severity",
        "precision",
        "module",
        "op",
        "source",
        "message",
    }
    assert set(saved["recommendation"]) >= {
        "precision", "backend", "keep_fp32", "evidence", "reason", "code", "speedup", "rel_l2",
    }  # fmt: skip


def test_select_and_ignore(write: Write, call: Call) -> None:
    path = str(write(MODEL.format(body="torch.quantile(self.linear(x), 0.5, dim=0)")))

    def codes(*options: str) -> set[str]:
        done = call("scan", path, "-p", "half", "--json", "-", *FAST, *options)
        return {diagnostic["code"] for diagnostic in json.loads(done.stdout)["diagnostics"]}

    assert "LP102" in codes()
    assert codes("--select", "LP102") == {"LP102"}
    assert codes("--select", "LP2") == set()
    assert "LP102" not in codes("--ignore", "LP1")


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[] if path.stem == "whitening" else pytest.mark.slow) for path in EXAMPLES],
)
def test_every_example_gets_a_recommendation(example: Path, shared_scan: SharedScan) -> None:
    done = shared_scan(example.relative_to(ROOT)).done
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(Use|Stay in fp32|[\w-]+ passes)", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 104
    busy = re.compile(
        "other programs|used the others$|were taken"
    )  # up to three lines, of a scan beside other programs
    assert sum(not busy.search(line) for line in done.stdout.splitlines()) < 60


def test_explain_knows_every_code(call: Call) -> None:
    listed = call("explain").stdout
    assert sum(line.startswith("LP") for line in listed.splitlines()) == len(rules()) > 20
    for code, rule in rules().items():
        for name in (code.lower(), rule.name):
            done = call("explain", name)
            assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{code} {rule.name} ({rule.severity})")
            assert " ".join(rule.manual.split()) in " ".join(done.stdout.split())
        assert len(rule.manual) > 80
        assert rule.summary.endswith(".")
        assert f"{code}  {rule.name} " in listed
    assert call("explain", "LP999").returncode == 2
    assert "Did you mean missing-kernel?" in call("explain", "missing-kernl").stderr


def test_env_shows_the_machine(call: Call) -> None:
    assert "bf16 accelerated" in call("env").stdout
    assert json.loads(call("env", "--json").stdout)["device"] == "cpu"


SAVED = str(ROOT / "reports" / "scans" / "whitening.json")

QUICK = [
    ["--help"],
    ["scan", "--help"],
    ["compat", "--help"],
    ["explain", "LP101"],
    ["--version"],
    ["op", "dot"],
    ["catalog", "diff", "2.8", "2.13"],
    ["catalog", "gaps", "--device", "xpu"],
    ["report", SAVED],
    ["report", SAVED, "--format", "html"],
    ["diff", SAVED, SAVED],
]


def test_a_checkout_that_is_not_installed_has_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(package: str, version: Callable[[str], str] = importlib.metadata.version) -> str:
        if package == "lowprec-check":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with pytest.raises(SystemExit) as ended:
        app(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "lowprec-check 0+unknown\n"
    assert importlib.import_module("shared").made()["lowprec-check"] == "0+unknown"


HEAVY = {"torch", "numpy", "pydantic", "typer", "asyncio", "multiprocessing", "psutil", "pygments", "rich.console"}
"""What takes a part of a second to import, and nothing that answers at once has a use for."""


def imported_by(*arguments: str) -> set[str]:
    """The modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "lowprec_check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("arguments", QUICK, ids=lambda arguments: " ".join(map(os.path.basename, arguments)))
def test_quick_answers_import_nothing_heavy(arguments: list[str]) -> None:
    imported = imported_by(*arguments)
    assert not imported & HEAVY
    assert "lowprec_check.cli" in imported


@pytest.mark.parametrize(
    ("arguments", "most", "unneeded"),
    [
        ("--help", 10, "msgspec rich importlib.metadata dataclasses lowprec_check.schema"),
        ("op dot", 36, "lowprec_check.analysis.rules lowprec_check.schema.options importlib.metadata"),
        ("catalog gaps", 36, "lowprec_check.analysis.rules lowprec_check.schema.options lowprec_check.engine"),
        ("scan --help", 60, "rich lowprec_check.analysis.rules lowprec_check.catalog.answers lowprec_check.core"),
        ("explain LP101", 92, "lowprec_check.core lowprec_check.analysis.conclusion lowprec_check.report.charts"),
    ],
)
def test_start_imports_only_what_answers(arguments: str, most: int, unneeded: str) -> None:
    """Counted and by name, since times differ from machine to machine."""
    imported = imported_by("--no-settings", *arguments.split())
    ours = sorted(name for name in imported if name.startswith("lowprec_check"))
    assert len(ours) <= most, ours
    assert not imported & {*unneeded.split()}


def test_the_help_names_the_module_and_the_purpose_of_each_command() -> None:
    for module, _ in COMMANDS.values():
        importlib.import_module(f"lowprec_check.{module}")
    for name, (_, line) in COMMANDS.items():
        assert len(line) <= 68, name
        assert (app.commands[name].help or "").split()[:4] == line.split()[:4], name


DROWNING = """
import torch
from torch import nn

class Sink(nn.Module):
    def forward(self, x):
        return (x + 4096) - 4096

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Sink(), nn.Linear(8, 8)).eval()

def inputs(batch=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
"""


def test_plan_saves_a_plan_for_apply(write: Write, tmp_path: Path, call: Call) -> None:
    path, saved = write(DROWNING), tmp_path / "plan.json"
    done = call("plan", str(path), "--dtype", "bf16", "--base", "cast", "--batches", "2", "--save-plan", str(saved))
    assert done.returncode == 0, done.stderr
    assert "with 1 of 3 modules in fp32" in done.stdout
    assert "without it the model fails" in " ".join(done.stdout.split())
    assert "each of 2 batches" in " ".join(done.stdout.split())
    assert "model.get_submodule" in done.stdout
    plan = Plan.load(saved)
    assert plan.keep_fp32 == ["1"]
    assert plan.minimal


def test_plan_shows_why_no_plan_passes(write: Write, call: Call) -> None:
    path = write(MODEL.format(body="self.linear(x) + 1e6"))
    done = call("plan", str(path), "--dtype", "fp16", "--base", "cast")
    assert done.returncode == 1
    assert "No plan passes" in done.stdout
    assert "model's own forward" in " ".join(done.stdout.split())
    assert "mymodel.py:12" in done.stdout


def test_plan_prints_json_on_request(write: Write, call: Call) -> None:
    done = call("plan", str(write(DROWNING)), "--dtype", "bf16", "--base", "cast", "--json")
    assert json.loads(done.stdout)["plan"]["keep_fp32"] == ["1"]


def test_scan_can_search_and_save_a_plan(write: Write, tmp_path: Path, call: Call) -> None:
    path, saved = str(write(DROWNING)), tmp_path / "plan.json"
    done = call("scan", path, "-p", "bfloat16", "--times", "off", "--plan", "--save-plan", str(saved))
    assert "plan (bfloat16)" in done.stdout
    assert Plan.load(saved).keep_fp32 == ["1"]
    without = call(
        "scan", path, "-p", "bfloat16", "--times", "off", "--no-plan", "--save-plan", str(tmp_path / "none.json")
    )
    assert without.returncode == 1
    assert "nothing saved" in without.stderr
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric",), "defines no metric"),
        (("--batches", "2"), "only one batch"),
        (("--save-plan", "no/such/folder/plan.json"), "Cannot write"),
    ],
)
def test_plan_reports_usage_errors(write: Write, arguments: tuple[str, ...], message: str, call: Call) -> None:
    done = call("plan", str(write(MODEL.format(body="self.linear(x)"))), *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_update_baseline_does_not_overwrite_other_files(write: Write, tmp_path: Path, call: Call) -> None:
    path, other = str(write(MODEL.format(body="self.linear(x)"))), tmp_path / "other.json"
    other.write_text('{"schema": 1, "tool": "something else"}')
    done = call("scan", path, "-p", "bfloat16", "--times", "off", "--baseline", str(other), "--update-baseline")
    assert done.returncode == 2
    assert "is not a baseline" in done.stderr
    assert "something else" in other.read_text()


def test_output_to_a_stream_without_unicode_does_not_fail() -> None:
    command = [sys.executable, "-m", "lowprec_check", "op", "dot"]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert b"since" in done.stdout


def test_the_verdict_names_the_precisions_tried(write: Write, call: Call) -> None:
    path = str(write(MODEL.format(body="torch.quantile(self.linear(x), 0.5, dim=0)")))
    done = call("scan", path, "-p", "half", *FAST)
    assert "Stay in fp32: half did not pass here." in done.stdout


# -- control characters of other people


EVIL, VISIBLE = "\x1b]0;pwned\x07\x1b[2J\u202e", "\\x1b]0;pwned\\x07\\x1b[2J\\u202e"


@pytest.mark.parametrize(
    "saved",
    [
        {"schema": 9, "tool": EVIL},
        {"schema": 1, "tool": "", "findings": [{EVIL: 1}]},
        {"schema": 1, "tool": "", "target": "", "model": {"name": 1}, EVIL: 1},
    ],
)
def test_keys_and_values_of_foreign_files(saved: dict[str, object], tmp_path: Path, call: Call) -> None:
    path = tmp_path / f"{EVIL}.json"
    path.write_text(json.dumps(saved))
    model = tmp_path / "model.py"
    model.write_text("")
    for arguments in (("report", path), ("diff", path, path), ("scan", model, "--baseline", path)):
        done = call(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert VISIBLE in done.stderr
        assert not set("\x1b\x07\u202e") & set(done.stderr)
    assert done.stderr.count("\n") == 2


def test_messages_of_the_model(write: Write, tmp_path: Path, call: Call) -> None:
    path = write(f"raise ValueError({EVIL!r})", f"{EVIL}.py")
    for arguments in (("scan", path), ("compat", path, "-o", tmp_path / "out")):
        done = call(*arguments)
        assert VISIBLE in done.stderr
        assert not set("\x1b\x07\u202e") & set(done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [("report", f"--{EVIL}"), (EVIL,), ("scan", "x", "--errors", EVIL), ("report", EVIL), ("scan", EVIL), ("op", EVIL)],
)
def test_arguments_in_messages(arguments: tuple[str, ...], call: Call) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert "pwned" in done.stderr
    assert not set("\x1b\x07\u202e") & set(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scan", "m.py", "--output", "x"), "No such option --output. Use --report."),
        (("plan", "m.py", "--budget", "3"), "No such option --budget. Use --search-seconds."),
        (("scan", "m.py", "--steps", "x"), "'x' is not a valid integer."),
        (("scan", "m.py", "--budget", "x"), "'x' is not a valid number."),
    ],
)
def test_what_is_wrong_with_an_option(arguments: tuple[str, ...], message: str, call: Call) -> None:
    done = call(*arguments)
    assert (done.returncode, done.stderr.rstrip().removesuffix(message)[-1:]) == (2, " "), done.stderr
    assert "Did you mean" not in done.stderr


def test_a_bug_is_a_sentence_and_a_file(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(result: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr("lowprec_check.cli.report.load_result", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = call("report", SAVED)
    [saved] = tmp_path.iterdir()
    assert done.returncode == 3
    assert re.sub(r":\d+:", ":1:", done.stderr) == (
        f"lowprec-check failed at lowprec_check/cli/report.py:1: RuntimeError: {VISIBLE}\n"
        f"Please report this bug with the traceback in {saved}\n"
    )
    assert saved.read_text().startswith("Traceback (most recent call last):")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *_, **__: os.stat(tmp_path / "gone"))
    done = call("report", SAVED)
    assert done.returncode == 3
    assert "Its traceback could not be saved: No such file or directory." in done.stderr


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 400), "Cannot use x…x: File name too long."),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "Cannot use the current folder: No such file"),
        (OSError(errno.EMFILE, "Too many open files"), "The system refuses what this command needs: Too many open"),
        (RecursionError("maximum depth"), "has a value that is nested too deeply or contains itself."),
    ],
)
def test_what_the_system_refuses_is_the_users_to_fix(
    error: Exception, shown: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it shows first, also in a worker."""

    def fail(*_: object) -> None:
        raise error

    with pytest.raises(UsageError) as caught:
        isolated(fail, "fork", dict)
    monkeypatch.setattr("lowprec_check.cli.report.load_result", fail)
    done = call("report", SAVED)
    assert done.returncode == 2
    for text in (caught.value.message, done.stderr.splitlines()[0].removeprefix("error: ")):
        assert shown in re.sub("x+", "x", text)


class Terminal(io.StringIO):
    """A terminal that remembers what it shows."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(quiet=False) as shown_progress:
        shown_progress.step(f"{EVIL}[bold]", "loading")
    with progress(quiet=False) as shown_progress:
        shown_progress.step(EVIL, "[red]")
    shown = terminal.getvalue()
    assert f"{VISIBLE}[bold] · loading · 0:00" in shown
    assert f"{VISIBLE} · [red]" in shown
    assert shown.count(VISIBLE) >= 2
    assert not [word for word in ("\x07", "\x1b[2J", "\u202e") if word in shown]


def test_the_rows_so_far_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known, without times; the report shows them again, so they do not stay."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    model = ModelInfo(name="Net", parameters=1, inputs=[], modules=1, training=False)
    runs = [
        Run(precision="fp32", device="cpu", status="ok", latency_ms=6.0),
        Run(precision="half", device="cpu", status="nonfinite"),
        Run(precision="bfloat16", device="cpu", status="ok", latency_ms=3.0),
    ]
    result = ScanResult(tool="t", target="t", model=model, environment={}, options={}, runs=runs)
    with progress(quiet=False) as shown:
        shown.step("half", "plain run")
        assert "NaN or Inf" not in terminal.getvalue()
        shown.done(result, 3)
        shown.step("bfloat16", "times")
    rows = terminal.getvalue()
    assert "NaN or Inf" in rows
    assert "bfloat16" in rows
    assert "times as fast" not in rows
    assert "bfloat16 · times" in rows
    assert rows.rstrip().endswith("\x1b[2K")  # what was shown is erased


def test_progress_names_the_run_of_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(system, "monotonic", lambda: now)
    lines: list[str] = []
    shown = Progress(lines.append)
    shown.step("model.py", "loading")
    fp32 = Run(precision="fp32", device="cpu", status="ok")
    model = ModelInfo(name="Net", parameters=1, inputs=[], modules=1, training=False)
    runs = [fp32]
    for seconds, name in ((5.0, "bfloat16"), (10.0, "half")):
        now += seconds
        result = ScanResult(tool="t", target="t", model=model, environment={}, options={}, runs=list(runs))
        shown.done(result, 4)
        shown.step(name, "plain run")
        runs.append(Run(precision=name, device="cpu", status="ok"))
    now += 4
    shown.step("half", "op 3: aten.mm.default")
    assert lines == [
        "model.py · loading · 0:00",
        "run 2 of 4 · bfloat16 · plain run · 0:05",
        "run 3 of 4 · half · plain run · 0:15",
        "run 3 of 4 · half · op 3: aten.mm.default · 0:19",
    ]


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(system, "monotonic", lambda: now)
    with progress(quiet=False) as shown:
        for _ in range(100):
            now += 1.0
            shown.step("half", "plain run")
    with progress(quiet=True) as shown:
        shown.step("half", "plain run")
    assert capsys.readouterr().err.splitlines() == [f"half · plain run · {clock}" for clock in ("0:30", "1:00", "1:30")]


PRINTS = """
import atexit, os, subprocess
import torch
from torch import nn
class Prints(nn.Linear):
    def forward(self, x):
        os.write(1, b"from a call\\n")
        subprocess.run(["echo", "from a process"])
        return super().forward(x)
os.write(1, b"from the import\\n")
atexit.register(print, "at exit")
model = Prints(4, 4).eval()
inputs = torch.ones(2, 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["-", "/dev/stdout"])
def test_standard_output_holds_the_result_only(tmp_path: Path, where: str) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    done = call_process("scan", tmp_path / "prints.py", "-p", "bfloat16", *FAST, "--json", where)
    assert done.returncode == 0
    screen, _, result = done.stdout.rstrip().rpartition("\n")
    saved = ScanResult.from_json(result.encode())
    assert (saved.run("bfloat16").status, saved.target) == ("ok", str(tmp_path / "prints.py"))
    assert "\x1b" not in screen
    assert bool(screen) == (where != "-")
    assert "from a" not in screen
    for text in ("from a call", "from a process", "from the import", "at exit"):
        assert text in done.stderr


def test_a_closed_or_full_stream_does_not_change_the_exit_code(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lowprec_check"
    for line, code in (
        (f"{command} explain LP101 >&-", 0),
        (f"{command} report missing.json 2>/dev/full", 2),
        (f"{command} explain LP101 >/dev/full", 2),
    ):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr
