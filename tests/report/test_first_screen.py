"""The first screen of a scan: what to do, how sure that is, the runs, a few findings, and the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from helpers import screen_of
from predicted_result import predicted_result
from shared_result import budgeted_result, latency, run, shared_result
from training_result import training_result

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.findings import MOST, groups, headlines
from lowprec_check.report.registry import render
from lowprec_check.schema.findings import Gap
from lowprec_check.schema.measures import InputLayout, InputsTried
from lowprec_check.schema.scan_result import Diagnostic, ModelInfo, Run, ScanResult
from lowprec_check.schema.statements import join, say

TRAINED = training_result()


def concluded(*runs: Run, **options: Any) -> ScanResult:
    fp32 = run("fp32", latency_ms=10.0, latency=latency(10.0), peak_memory_bytes=8 << 20, tolerance=None)
    layout = InputLayout(kind="tensor", tensors=[""], floating=[""])
    model = ModelInfo(name="Net", parameters=1, inputs=["x (1)"], modules=3, training=False, layout=layout)
    return conclude(
        ScanResult(tool="", target="net.py", model=model, environment={}, runs=[fp32, *runs], options=options)
    )


def passing(name: str, worst: float, speedup: float = 2.0) -> Run:
    tried = InputsTried(kind="drawn", tried=16, failed=0, worst=worst, low=0.0, high=0.21)
    times = {"latency": latency(10 / speedup, speedup), "peak_memory_bytes": 4 << 20}
    return run(name, "ok", worst, tolerance=1e-2, further_inputs=tried, **times)


HEALTHY = concluded(*(passing(name, 8e-4) for name in ("bfloat16", "autocast-bf16", "half", "autocast-fp16")))


def test_a_healthy_model_takes_18_lines() -> None:
    lines = screen_of(HEALTHY).splitlines()
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 100
    assert re.match(
        r"Use \S+: 2.0 times as fast as fp32, 50 % less memory\. Passes on 17 of 17 inputs, worst 8 %", lines[1]
    )
    assert "confidence" not in screen_of(HEALTHY)
    assert "at most 21 % of such inputs fail (95 % confidence)" in " ".join(screen_of(HEALTHY, verbose=True).split())
    assert "at most 21 % of such inputs fail" in render(HEALTHY, "html")
    assert "at most 21 % of such inputs fail" in render(HEALTHY, "md")


@pytest.mark.parametrize(
    ("result", "most"),
    [
        (shared_result(), 40),
        (budgeted_result(), 40),
        (predicted_result(), 40),
        (TRAINED, 45),
    ],
    ids=["failing", "error budget", "predicted", "training"],
)
def test_a_failing_model_takes_40_lines_in_the_order_of_decisions(result: ScanResult, most: int) -> None:
    lines = screen_of(result).splitlines()
    assert len(lines) <= most
    table = next(number for number, line in enumerate(lines) if re.match(r"(precision|run) +status", line))
    beginning = r"Use |Stay in |fp32 is |\S+ passes |\S+ is predicted to pass "
    verdict = next(number for number, line in enumerate(lines) if re.match(beginning, line))
    assert verdict < table <= 14
    rows = lines[table + 1 : table + 1 + len(result.runs)]
    assert all(rows), "a line for each run"
    assert lines[table + 1 + len(result.runs)] == "" or lines[table + 1 + len(result.runs)].startswith("    ")
    assert lines[-1].startswith("More: ") or lines[-2].startswith("More: ")
    if "Findings" in lines:
        start = lines.index("Findings") + 1
        assert table < start
        items = re.split(r"^  (?=LP\d+ )", "\n".join(lines[start : lines.index("", start)]), flags=re.MULTILINE)[1:]
        assert 1 <= len(items) <= MOST
        for item in items:
            assert len([line for line in item.splitlines() if not re.match(r"\S", line) or "LP" in line]) <= 2


def test_an_explained_code_is_on_the_screen() -> None:
    for result in (shared_result(), predicted_result(), TRAINED, HEALTHY):
        shown = screen_of(result)
        explained = re.findall(r"explain (LP\d+)", shown)
        assert all(shown.count(code) > 1 for code in explained)
    assert "explain" not in screen_of(HEALTHY)


def test_an_input_near_the_limit_is_said_with_its_bound() -> None:
    near = " ".join(screen_of(concluded(passing("half", 7e-3))).split())
    assert "worst 70 % of the tolerance; at most 21 % of such inputs fail (95 % confidence)" in near
    assert "near its limit" in near


def kernel(op: str, precision: str, dtype: str, line: int) -> Gap:
    return Gap(
        op=f"aten.{op}.default",
        module="",
        source=f"net.py:{line}",
        kind="missing-kernel",
        layer="kernel",
        dtypes="f16",
        message=f"\"{op}_cpu\" not implemented for '{dtype}'",
        rescued=True,
    )


def test_one_fact_about_several_ops_and_precisions_is_one_finding() -> None:
    runs = []
    for precision, dtype in (("half", "Half"), ("bfloat16", "BFloat16")):
        gaps = [kernel("geqrf", precision, dtype, 3), kernel("qr", precision, dtype, 5)]
        runs.append(run(precision, "error", gaps=gaps, complete=True))
    result = concluded(*runs)
    found = groups(d for d in result.diagnostics if d.code == "LP101")
    assert [group.said for group in found] == [
        "\"geqrf_cpu\" not implemented for 'Half/BFloat16'",
        "\"qr_cpu\" not implemented for 'Half/BFloat16'",
    ]
    [line] = [each for each in headlines(found, None) if each.code == "LP101"]
    assert line.lead == "LP101 missing-kernel (half, bfloat16)"
    assert line.text.startswith("geqrf, qr (net.py:3, 5) → ")


def test_an_option_of_several_runs_is_said_once() -> None:
    found = groups(
        Diagnostic(
            code="LP101",
            name="missing-kernel",
            severity="error",
            message="no kernel",
            precision=precision,
            op="aten.qr.default",
            help=f"compute it in fp32 and cast back, or {otherwise}",
        )
        for precision, otherwise in (("half", "try bfloat16 " * 9), ("bfloat16", "try half " * 9))
    )
    [line] = headlines(found, None)
    assert line.text == "qr: no kernel → compute it in fp32 and cast back"


@pytest.mark.parametrize("advice", ["try this module in fp32", "keep encoder.layers.0.attention in fp32; " * 7 + "end"])
def test_a_long_finding_is_cut_behind_a_word_or_an_option(advice: str) -> None:
    finding = Diagnostic(
        code="LP201",
        name="overflow",
        severity="error",
        message=" ".join(f"word{number}" for number in range(60)),
        precision="half",
        module=".".join(["a_module"] * 12),
        help=advice,
    )
    [line] = headlines(groups([finding]), None)
    said, _, to_do = line.text.partition(" → ")
    assert len(line.lead + line.text) <= 200
    assert set(said.removesuffix(" …").split()) <= {f"{finding.module}:", finding.module, *finding.message.split()}
    assert set(to_do.split("; ")) <= set(advice.split("; "))


def test_sentences_that_differ_in_more_than_dtypes_are_not_joined() -> None:
    def joined(*texts: str) -> list[str]:
        return [each.text for each in join([(str(n), say("{error:text}", error=text)) for n, text in enumerate(texts)])]

    assert joined("no 'Half'", "no 'BFloat16'") == ["no 'Half/BFloat16'"]
    assert joined("got torch.float16 for Half", "got torch.bfloat16 for BFloat16") == [
        "got torch.float16/torch.bfloat16 for Half/BFloat16"
    ]
    assert joined("mm: no 'Half'", "bmm: no 'BFloat16'") == ["mm: no 'Half'", "bmm: no 'BFloat16'"]
    assert joined("use half", "use bfloat16") == ["use half", "use bfloat16"]
    assert joined("Halfway", "BFloat16way") == ["Halfway", "BFloat16way"]


def diagnostic(
    code: str, precision: str, op: str | None = None, severity: Any = "error", help: str = "", source: str | None = None
) -> Diagnostic:
    return Diagnostic(
        code=code,
        name="name",
        severity=severity,
        precision=precision,
        op=op,
        source=source,
        message="is wrong",
        help=help or None,
    )


def codes(found: Sequence[Diagnostic], recommended: str | None) -> list[str]:
    return [each.code for each in headlines(groups(found), recommended)]


def test_what_a_row_says_is_no_finding_beside_its_cause() -> None:
    both = [diagnostic("LP201", "half", "aten.mm.default"), diagnostic("LP301", "half")]
    assert codes(both, None) == ["LP201"]
    assert codes(both[1:], None) == ["LP301"], "it has the only advice"
    assert codes(both[1:], "bfloat16") == [], "the verdict has the advice"
    assert codes([*both, diagnostic("LP301", "bfloat16")], None) == ["LP201", "LP301"]
    assert codes([diagnostic("LP401", "half", severity="note")], None) == []


def test_what_the_verdict_says_is_no_advice_beside_it() -> None:
    def advice(help: str) -> str:
        [line] = headlines(groups([diagnostic("LP201", "half", "aten.mm.default", help=help)]), "bfloat16")
        return line.text.removeprefix("mm: is wrong")

    assert advice("bfloat16 passes") == advice("use bfloat16, which passes") == ""
    assert advice("keep a in fp32; bfloat16 passes") == " → keep a in fp32"
    assert advice("keep a in fp32, or use bfloat16, which passes") == " → keep a in fp32"
    assert advice("bfloat16 passes; keep a in fp32") == " → keep a in fp32"
    assert advice("autocast-bfloat16 passes") == " → autocast-bfloat16 passes"


def test_a_finding_without_a_module_begins_with_its_line() -> None:
    [line] = headlines(groups([diagnostic("LP905", "half", source="odd.py:13")]), None)
    assert line.text == "odd.py:13: is wrong"


def test_other_advice_is_another_finding_and_long_ones_are_two_lines() -> None:
    found = [diagnostic("LP201", "half", f"aten.op{n}.default", help=f"do {n}, or " + "x" * 300) for n in range(9)]
    result = msgspec.structs.replace(HEALTHY, diagnostics=found)
    assert len(headlines(groups(found), "half")) == 9
    lines = screen_of(result).splitlines()
    start = lines.index("Findings") + 1
    assert lines[start : start + MOST] == [f"  LP201 name (half): op{n}: is wrong → do {n}" for n in range(MOST)]
    assert "4 more findings" in lines[-1]
    unbroken = [diagnostic("LP201", "half", "aten.mm.default", help="y" * 900)]
    shown = screen_of(msgspec.structs.replace(HEALTHY, diagnostics=unbroken)).splitlines()
    assert len([line for line in shown if "LP201 name" in line or "yyy" in line]) <= 3, "a word of 900 letters"
