"""What commands print: on narrow terminals, in ASCII, folded notes, the installed torch first."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import ROOT, Call
from helpers import screen_of
from hypothesis import given
from hypothesis import strategies as st
from shared_result import run, shared_result

from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.catalog import versions
from lowprec_check.features.plan.report import plan_document
from lowprec_check.report.blocks import Document, Pairs
from lowprec_check.report.foreign_text import TRANSLITERATE, transliterated
from lowprec_check.report.layout.text import Screen, print_table
from lowprec_check.report.layout.text import text as document_text
from lowprec_check.schema.scan_result import ScanResult

RESULT = shared_result()
WITH_METRIC = msgspec.structs.replace(
    RESULT, runs=[msgspec.structs.replace(one, metric=0.75 + n / 100) for n, one in enumerate(RESULT.runs)]
)


def words(shown: str) -> list[str]:
    return shown.split()


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    path = tmp_path / "scan.json"
    WITH_METRIC.save(path)
    return path


# -- narrow terminals


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 100, 200])
def test_the_screen_of_a_scan_fits_and_drops_nothing(width: int) -> None:
    first = screen_of(WITH_METRIC, width=width).splitlines()
    assert max(len(line) for line in first if "model" not in line) <= width
    shown = screen_of(WITH_METRIC, width=width, verbose=True)
    widest = screen_of(WITH_METRIC, width=200, verbose=True)
    code = {line for line in shown.splitlines() if line.startswith("    ") and "model" in line}
    assert max(len(line) for line in shown.splitlines() if line not in code) <= width
    table = next(part for part in widest.split("\n\n") if part.startswith("Runs\n"))
    for row in table.splitlines()[2:]:
        why = row.rpartition("  ")[2]
        cells = [cell for cell in re.split("  +", row) if cell != "–"]
        assert " ".join(words(why)) in " ".join(words(shown)), why
        assert all(cell in " ".join(words(shown)) for cell in cells if cell != why), cells
    for line in (
        "Use half with 2 of 6 modules in fp32",
        "LP107 crash",
        "killed by signal 11",
        "Only the forward pass was run",
    ):
        assert line in " ".join(words(shown))


def test_the_reason_of_a_failure_is_below_its_row_if_there_is_no_room() -> None:
    lines = screen_of(RESULT, width=70, verbose=True).splitlines()
    [half] = [number for number, line in enumerate(lines) if line.startswith("half  ")]
    assert lines[half].split() == ["half", "fails", "–", "–", "0.50", "×"]
    assert lines[half + 1] == "    2 of 5 ops have no kernel: linalg_cholesky_ex, torch.quantile"
    lines = screen_of(RESULT, width=40, verbose=True).splitlines()
    half = lines.index("half")
    assert lines[half + 1 : half + 4] == [
        "    status fails · memory 0.50 ×",
        "    2 of 5 ops have no kernel:",
        "    linalg_cholesky_ex, torch.quantile",
    ]


COMMANDS = [
    ["report", "SCAN"],
    ["report", "SCAN", "-v"],
    ["op", "special.i1"],
    ["op", "conv2d"],
    ["diff", "SCAN", str(ROOT / "reports" / "scans" / "whitening.json"), "-f", "text"],
    ["catalog", "diff", "2.8", "2.13"],
    ["catalog", "gaps", "--device", "xpu"],
    ["explain"],
    ["explain", "LP301"],
    ["explain", "LP103"],
    ["env"],
]


@pytest.mark.parametrize("columns", [40, 72])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_screen_fits(
    arguments: list[str], columns: int, scan: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = call(*(str(scan) if argument == "SCAN" else argument for argument in arguments))
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("    ") and "https://" not in line]
    assert lines
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    monkeypatch.setenv("COLUMNS", "400")
    wide = call(*(str(scan) if argument == "SCAN" else argument for argument in arguments))
    missing = set(words(re.sub(r"[·–]|\n *", " ", wide.stdout))) - set(words(re.sub(r"[·–]", " ", done.stdout)))
    heads = {
        "why",
        "what",
        "severity",
        "runs",
        "finding",
        "changed",
        "finds",
        "code",
        "name",
        "run",
        "modes",
        "dtype",
        "from",
    }  # of sentences, of what names a row, and of empty columns
    assert not {word for word in missing - heads if word not in done.stdout.replace("\n", "").replace(" ", "")}


def test_the_screen_of_a_plan_fits() -> None:
    from lowprec_check.schema.plan import Attempt, Planning

    attempts = [
        Attempt(
            base="autocast-bf16",
            status="inaccurate",
            why="",
            rel_l2=0.3,
            kept=12,
            speedup=1.5,
            trials=20,
            outcome="o " * 40,
        ),
        Attempt(base="half", status="error", why="", trials=0, outcome="not searched: another base passes"),
    ]
    planning = Planning(target="net.py", model="Net", device="cpu", attempts=attempts, plan=RESULT.plan)
    for width in (40, 60, 100):
        shown = document_text(plan_document(planning), width=width)
        assert max(len(line) for line in shown.splitlines() if "model" not in line) <= width
        joined = " ".join(words(shown))
        assert all(part in joined for part in ("3.0e-01", "12", "1.5 × as fast", "20", "another base passes"))


def test_a_plan_names_its_backend() -> None:
    from lowprec_check.schema.plan import Planning

    assert RESULT.plan is not None
    plan = msgspec.structs.replace(RESULT.plan, backend="inductor")
    planning = Planning(target="net.py", model="Net", device="cpu", attempts=[], plan=plan)
    assert f"{plan.base} · inductor passes with" in document_text(plan_document(planning))


def test_a_table_of_other_backends_is_of_runs() -> None:
    eager = msgspec.structs.replace(RESULT, runs=[run for run in RESULT.runs if run.backend == "eager"])
    for result, head in ((RESULT, "run "), (eager, "precision ")):
        assert any(line.startswith(head) and "status" in line for line in screen_of(result).splitlines())


def test_a_pipe_has_100_columns(scan: Path, call: Call) -> None:
    assert call("report", scan).stdout == screen_of(WITH_METRIC, width=100)


cell = st.text("ab -", max_size=30).map(str.strip)


@given(
    rows=st.lists(st.tuples(cell, cell, cell, cell), max_size=4),
    width=st.integers(40, 120),
    sentences=st.booleans(),
    heading=st.integers(1, 2),
)
def test_a_table_of_any_width_has_every_word(
    rows: list[tuple[str, ...]], width: int, sentences: bool, heading: int
) -> None:
    printed, cells = Screen(width, color=False), [[[(value, "")] for value in row] for row in rows]
    print_table(printed, ["one", "two", "three", "why"], cells, sentences=sentences, heading=heading, right=["two"])
    assert max(map(len, printed.text.splitlines()), default=0) <= width
    shown = printed.text.replace("\n", "").replace(" ", "")
    for row in rows:
        assert all(part in shown for value in row for part in value.split())


# -- encodings


ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("environment", [ASCII, C_LOCALE], ids=["PYTHONIOENCODING", "LC_ALL"])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["op", "special.i1"], "since <=2.8"),
        (["report", "SCAN"], "1.4 x as fast"),
        (["report", "SCAN", "-f", "md"], "[ok] ok"),
        (["report", "SCAN", "-f", "concise"], "-> call it on x.float()"),
        (["report", "SCAN", "-f", "github"], "::error file=net.py,line=23"),
        (["diff", "SCAN", "SCAN", "-f", "text"], "No difference"),
        (["explain", "LP301"], "||y - r||2 / ||r||2"),
        (["report", "missing\u2264.json"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_ascii_locale(arguments: list[str], shown: str, environment: dict[str, str], scan: Path) -> None:
    command = [sys.executable, "-m", "lowprec_check", *(str(scan) if word == "SCAN" else word for word in arguments)]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | environment, cwd=ROOT)
    assert (done.stdout + done.stderr).isascii()
    assert b"Traceback" not in done.stderr
    assert b"\\u" not in done.stdout
    assert shown in done.stdout.decode()
    assert done.returncode == (2 if "missing\u2264.json" in arguments else 0)


@pytest.mark.parametrize("format", ["json", "sarif", "junit", "html"])
def test_documents_are_utf8_in_any_locale(format: str, tmp_path: Path) -> None:
    path = tmp_path / "scan.json"
    model = msgspec.structs.replace(RESULT.model, name="Zo\xeb \u2264 \u0444")
    msgspec.structs.replace(RESULT, model=model).save(path)
    command = [sys.executable, "-m", "lowprec_check", "report", str(path), "-f", format]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | ASCII)
    assert "Zo\xeb \u2264 \u0444" in done.stdout.decode()
    if format == "json":
        assert ScanResult.from_json(done.stdout).model.name == "Zo\xeb \u2264 \u0444"


def characters_of_the_package() -> set[str]:
    """Those outside ASCII in all strings and templates, which may be printed."""
    found: set[str] = set()
    for path in (ROOT / "lowprec_check").rglob("*.py"):
        if path.name == "foreign_text.py":  # tables of other people's characters
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {character for character in node.value if not character.isascii()}
    return found


def test_every_character_of_ours_has_a_form_in_ascii() -> None:
    used = characters_of_the_package()
    assert {"≤", "×", "→", "·", "…", "✅"} <= used
    assert not {character for character in used if "\\" in transliterated(character)}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("≤ 5 × · – → …", "<= 5 x - - -> ..."),
        ("since ≤2.8   no", "since <=2.8  no"),  # the columns stay where they are
        ("≤ no", "<= no"),
        ("∞  a  b", "inf a  b"),
        ("x² ‖y‖₂ 2⁻¹¹", "x2 ||y||2 2-11"),
        ("ä \u0444", "\\xe4 \\u0444"),
        ("\u280b loading", "* loading"),
        ("⚠️ bad", "[!] bad"),
    ],
)
def test_transliteration(line: str, shown: str) -> None:
    assert " ".join(transliterated(line).split()) == " ".join(shown.split())
    assert line.encode("ascii", TRANSLITERATE).decode() == shown
    assert f"{line}\n{line}".encode("ascii", TRANSLITERATE).decode() == f"{shown}\n{shown}"


def test_what_an_encoding_has_is_kept() -> None:
    assert "≤ × ä".encode("latin-1", TRANSLITERATE) == "<= × ä".encode("latin-1")
    assert "≤ × ä".encode("utf-8", TRANSLITERATE).decode() == "≤ × ä"


def test_columns_stay_aligned_in_colour_too() -> None:
    printed = Screen(80, color=True)
    print_table(printed, ["a", "b"], [[[("since ≤2.1", "green")], [("x", "")]], [[("since 2.11", "")], [("x", "")]]])
    shown = printed.text.encode("ascii", TRANSLITERATE).decode()
    _, first, second = re.sub(r"\x1b\[\d*m", "", shown).splitlines()
    assert (first, second) == ("since <=2.1 x", "since 2.11  x")


@given(st.text())
def test_any_text_can_be_written(value: str) -> None:
    for encoding in ("ascii", "cp1252", "shift_jis", "utf-8"):
        shown = value.encode(encoding, TRANSLITERATE).decode(encoding)
        assert shown.count("\n") == value.count("\n")
        left = iter(shown)
        assert all(character in left for character in value if character.isascii() and character.isalnum())  # in order


# -- notes


def test_notes_are_counted_unless_they_are_asked_for(scan: Path, call: Call) -> None:
    first, listed = call("report", scan).stdout, call("report", scan, "-v").stdout
    assert "5 notes)" in " ".join(words(first))
    assert "LP304" not in first
    assert "13 findings: 6 errors, 2 warnings, 5 notes" in listed
    assert re.search(r"^note +LP304 decision-flip +bfloat16", listed, re.M)


def test_notes_in_a_file(scan: Path, tmp_path: Path, call: Call) -> None:
    for options, listed in (([], False), (["-v"], True)):
        assert call("report", scan, "-o", tmp_path / "r.txt", *options).returncode == 0
        assert bool(re.search(r"^note +LP304", (tmp_path / "r.txt").read_text(encoding="utf-8"), re.M)) == listed


def test_findings_that_are_not_shown_are_counted_where_they_are() -> None:
    shown = " ".join(words(screen_of(RESULT)))
    assert len(re.findall(r" LP\d+ [a-z-]+ \(", shown)) == 5
    assert "-v (conditions, 1 more finding, 5 notes)" in shown
    assert "not shown" not in " ".join(words(screen_of(RESULT, verbose=True)))


def test_without_notes_none_are_counted() -> None:
    kept = [d for d in RESULT.diagnostics if d.severity != "note"]
    assert "notes" not in screen_of(msgspec.structs.replace(RESULT, diagnostics=kept))


# -- the metric


def test_the_metric_is_a_column_if_there_is_one() -> None:
    from lowprec_check.report.registry import render

    for name in ("text", "md", "html"):
        assert "0.76" in render(WITH_METRIC, name)
        shown = render(WITH_METRIC, name)
        head = {"html": 'id="runs"', "md": "### Runs", "text": "of tolerance"}[name]
        assert "metric" in shown.partition(head)[2].partition("bfloat16")[0].rpartition("speed")[2]
        assert (
            "metric"
            not in render(RESULT, name).partition("<details><summary>Environment")[0].partition("</section>")[0]
        )
    some = msgspec.structs.replace(RESULT, runs=[run("fp32", metric=123456.7), run("half", "error")])
    rows = screen_of(some, verbose=True).partition("Runs\n")[2].splitlines()
    assert rows[0].split()[6] == "metric"
    assert rows[1].split()[2:] == ["–", "–", "1.00", "×", "1.235e+05", "8.0", "ms,", "3.0", "MiB"]
    assert rows[2].split() == ["half", "fails", "–", "≈", "fp32", "1.00", "×", "–", "it", "raised", "an", "exception"]


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_reports_say_that_only_the_forward_was_run(format: str) -> None:
    from lowprec_check.report.registry import render

    shown = screen_of(RESULT, verbose=True) if format == "text" else render(RESULT, format)
    assert shown.count("Only the forward pass was run") == 1


# -- the installed torch


def op_with(version: str | None, monkeypatch: pytest.MonkeyPatch, call: Call, *options: str) -> list[str]:
    def version_of(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(versions, "metadata_folders", list)
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    done = call("op", "special.i1", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_op_starts_with_the_installed_torch(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    lines = op_with("2.8.0+cpu", monkeypatch, call)
    assert lines[0] == "special.i1 · torch 2.8 (installed) · dispatches special_i1"
    others = lines.index("other releases: the newest of each device")
    here = [line.replace(", declared", "").split()[:3] for line in lines[2:others]]
    assert here == [
        ["cpu", "2.8", "half"],
        ["cpu", "2.8", "bfloat16"],
        ["xpu", "2.8", "half"],
        ["xpu", "2.8", "bfloat16"],
    ]
    assert ["cpu", "2.15", "half"] in [line.split()[:3] for line in lines[others:]]
    assert not [
        line
        for line in lines[others + 2 :]
        if line.split()[1:2] == ["2.8"] and "not implemented" not in line and ":" not in line
    ]


@pytest.mark.parametrize(
    ("folder", "release"),
    [
        ("torch-2.8.0+cu128.dist-info", "2.8"),
        ("Torch-2.7.1-py3.12.egg-info", "2.7"),
        ("torch_geometric-2.5.0.dist-info", "2.6"),
    ],
)
def test_the_first_torch_on_the_path_is_the_installed_one(
    folder: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (folder, "later/torch-2.6.0.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "later")])
    assert versions.installed_release() == release


def test_op_with_the_newest_torch_shows_it_once(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    lines = op_with("2.15.1", monkeypatch, call)
    rows = [line.split()[:3] for line in lines if line.startswith(("cpu ", "cuda ", "xpu ")) and ":" not in line]
    assert rows.count(["cpu", "2.15", "half"]) == rows.count(["cuda", "2.11", "half"]) == 1
    assert rows[0] == ["cpu", "2.15", "half"]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "torch is not installed"),
        ("9.1.0", "torch 9.1 (installed) is newer than the catalog"),
        ("1.13.1", "torch 1.13 (installed) is not in the catalog"),
    ],
)
def test_op_says_why_the_installed_torch_has_no_rows(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    lines = op_with(version, monkeypatch, call)
    assert lines[0] == f"special.i1 · {says} · dispatches special_i1"
    assert lines[2].split()[:3] == ["cpu", "2.15", "half"]


def test_a_chosen_release_is_the_only_one(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    lines = op_with("2.8.0", monkeypatch, call, "--torch", "2.13")
    assert lines[0] == "special.i1 · dispatches special_i1"
    assert {line.split()[1] for line in lines[2:4]} == {"2.13"}


def test_the_cells_of_the_installed_torch_are_in_the_json(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    [answer] = msgspec.json.decode("\n".join(op_with("2.8.0", monkeypatch, call, "--json")))
    assert answer["installed"] == "2.8"
    assert answer["cells"][0]["torch"] == "2.8"
    assert len({msgspec.json.encode(one) for one in answer["cells"]}) == len(answer["cells"])


# -- a result at a prompt


NASTY = "<script>alert(1)</script> & \u202e\x1b[31m {{ 1 }}"


def test_a_result_is_three_lines_at_a_prompt() -> None:
    lines = repr(RESULT).split("\n")
    assert len(lines) == 3
    assert lines[0].startswith("ScanResult: Whitening · 11.7 M parameters · input (1, 3, 224, 224) · torch 2.13.0")
    assert "half fails, autocast-fp16 NaN or Inf, half · inductor crashed" in lines[1]
    assert lines[2].startswith("Use half with 2 of 6 modules in fp32. 1.5 times as fast as fp32, 50 % less memory.")
    assert len(repr(shared_result("\n" * 50 + NASTY)).split("\n")) == 3
    nothing = msgspec.structs.replace(RESULT, runs=[], diagnostics=[], recommendation=None)
    assert len(repr(nothing).split("\n")) == 3
    assert "nothing else could be run" in repr(nothing)


def test_a_result_in_a_notebook_is_the_table() -> None:
    page = RESULT._repr_html_()
    runs = page.partition('aria-label="runs"')[2].partition("</table>")[0]
    assert runs.count("</tr>") == len(RESULT.runs) + 1
    assert "2 of 5 ops have no kernel: linalg_cholesky_ex, torch.quantile" in page
    assert "metric" not in page
    assert ">metric</th>" in WITH_METRIC._repr_html_()
    nasty = shared_result(NASTY)._repr_html_()
    assert "<script" not in nasty
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in nasty
    assert not set("\x1b\u202e") & set(nasty)


def test_a_list_of_pairs_may_be_empty() -> None:
    assert document_text(Document("Environment", [Pairs(pairs=[])])) == ""


def test_a_colored_screen_has_no_markup_of_others() -> None:
    printed = Screen(80, color=True)
    print_table(printed, ["a", "b"], [[[("[red]x[/red]", "")], [("y", "green")]]])
    assert "[red]x[/red]  \x1b[32my\x1b[0m" in printed.text


Write = Callable[..., Path]
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
inputs = torch.randn(4, 8)
def metric(model):
    return 0.5
"""


def test_scan_prints_the_format_asked_for(write: Write, call: Call, tmp_path: Path) -> None:
    path = str(write(MODEL))
    untimed = ("-p", "bfloat16", "--times", "off")
    shown = call("scan", path, *untimed, "-f", "concise", "--json", str(tmp_path / "s.json"))
    saved = ScanResult.load(tmp_path / "s.json")
    assert shown.stdout.endswith(f"{verdict(saved)}.\n")
    assert "bfloat16" in verdict(saved)
    assert saved.run("bfloat16").metric == 0.5
    assert "metric" in call("scan", path, *untimed).stdout
    assert call("scan", path, *untimed, "--format", "md").stdout.startswith("### ")
    assert call("scan", path, *untimed, "-f", "json").stdout.startswith('{"schema":1')
    for wrong in (["-f", "json", "--json", "-"], ["-f", "docx"]):
        done = call("scan", path, *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 2


def test_the_verdict_does_not_count_skipped_runs_as_tried() -> None:
    runs = [
        msgspec.structs.replace(one, status="skipped" if one.precision == "bfloat16" else "error")
        if one.is_low
        else one
        for one in RESULT.runs
        if one.base is None
    ]
    early = msgspec.structs.replace(RESULT, runs=runs, recommendation=None)
    tried = verdict(early)
    assert "bfloat16" not in tried.replace("autocast-bfloat16", "")
    assert tried.startswith("Stay in fp32: none of autocast-bf16, half")
