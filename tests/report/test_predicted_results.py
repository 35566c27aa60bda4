"""A predicted result never looks measured: it cannot hold times, and every format says that it is predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from helpers import screen_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from predicted_result import BASIS, DEVICE, FALLBACK, a_prediction, predicted_result
from shared_result import op_calls, shared_result

from lowprec_check.analysis.diff import diff_scans
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.statements.kinds import said
from lowprec_check.compat.scan_process import Request, row_of
from lowprec_check.features.plan.report import plan_document
from lowprec_check.report import scan_document as notebook
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.report.layout.text import text
from lowprec_check.report.matrix import matrix_document
from lowprec_check.report.registry import FORMATS, format_of, render
from lowprec_check.schema.matrix import Matrix, MatrixCell
from lowprec_check.schema.measures import Latency, Timing, TimingConditions
from lowprec_check.schema.op_calls import OpCall, OpCalls, fallback_of, to_columns
from lowprec_check.schema.plan import Plan, Planning
from lowprec_check.schema.precisions import low_precisions
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ErrorStats

RESULT = predicted_result()
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIMES: dict[str, Any] = {
    "latency_ms": 1.5,
    "latency": Latency(median_ms=1.0, quartiles_ms=(0.9, 1.1), samples=9),
    "peak_memory_bytes": 1 << 20,
    "timing": Timing(
        scenario="offline", instances=1, cores=1, median_ms=1.0, p99_ms=2.0, batch=1, throughput=1.0, calls=9
    ),
    "setup_seconds": 0.25,
    "op_calls": op_calls(4),
}
TEXT_FORMATS = ("text", "md", "html", "sarif", "junit", "github", "concise")
TIME = re.compile(r"\d [µnm]?s\b|\d ×|times (as )?(fast|slow)|\b[KM]iB of memory|saves \d")


def plan(**more: Any) -> Plan:
    fields: dict[str, Any] = {
        "tool": "lowprec-check 0.1.0",
        "target": "net.py",
        "base": "half",
        "device": "xpu",
        "evidence": "predicted",
        "keep_fp32": ["head"],
        "minimal": True,
        "trials": 3,
        "seconds": 1.0,
        "tolerance": 1e-2,
        "rel_l2": 2e-3,
        "predicted": 3e-3,
        "modules": {"": "Net", "head": "Linear"},
        "code": "model = model.half()",
    }
    return Plan(**fields | more)


# -- what cannot exist


@pytest.mark.parametrize("name", TIMES)
def test_a_predicted_run_has_no_times_and_no_memory(name: str) -> None:
    given_value = {name: TIMES[name]}
    with pytest.raises(ValueError, match="no times and no memory"):
        Run(precision="half", device="xpu", status="ok", evidence="predicted", **given_value)
    with pytest.raises(ValueError, match="no times and no memory"):
        msgspec.structs.replace(RESULT.runs[2], **given_value)
    measured = Run(precision="half", device="xpu", status="ok", **given_value)
    with pytest.raises(ValueError, match="no times and no memory"):
        msgspec.structs.replace(measured, evidence="predicted")
    saved = msgspec.to_builtins(measured) | {"evidence": "predicted"}
    with pytest.raises(msgspec.ValidationError, match="no times and no memory"):
        msgspec.convert(saved, Run)


def test_a_file_with_a_time_in_a_prediction_cannot_be_read() -> None:
    saved = json.loads(RESULT.to_json())
    saved["runs"][2]["latency_ms"] = 1.0
    with pytest.raises(ValueError, match="no times and no memory"):
        ScanResult.from_json(json.dumps(saved).encode())


def test_a_result_does_not_mix_measured_and_predicted_runs() -> None:
    measured = shared_result()
    for changes in (
        {"prediction": None},
        {"runs": [*RESULT.runs, measured.runs[1]]},
        {"recommendation": measured.recommendation},
        {"plan": measured.plan},
        {"timing_conditions": TimingConditions()},
    ):
        with pytest.raises(ValueError, match=r"mixed|has no times"):
            msgspec.structs.replace(RESULT, **changes)
    with pytest.raises(ValueError, match="mixed"):
        msgspec.structs.replace(measured, runs=[*measured.runs, RESULT.runs[1]])


def test_predicted_advice_plans_and_cells_promise_no_gain() -> None:
    advice = RESULT.recommendation
    assert advice is not None
    for changes in ({"speedup": 2.0}, {"worth": "faster"}, {"gain": "saves 50 %"}, {"stay_in_fp32": True}):
        with pytest.raises(ValueError, match="says nothing about times"):
            msgspec.structs.replace(advice, **changes)
    for name in ("latency_ms", "speedup", "peak_memory_bytes"):
        with pytest.raises(ValueError, match="no times and no memory"):
            plan(**{name: 1})
    with pytest.raises(ValueError, match="no time and no memory"):
        MatrixCell(precision="half", device="xpu", status="ok", evidence="predicted", time=1.0)


# -- what is saved


def test_json_keeps_the_evidence() -> None:
    again = ScanResult.from_json(render(RESULT, "json").encode())
    assert again == RESULT
    assert {run.evidence for run in again.runs} == {"predicted"}
    assert again.prediction == DEVICE
    assert again.recommendation is not None
    assert again.recommendation.evidence == "predicted"


def test_an_older_file_is_measured() -> None:
    saved = json.loads(shared_result().to_json())
    del saved["prediction"]
    for run in saved["runs"]:
        del run["evidence"], run["known_ops"], run["assumed_ops"]
    for found in saved["diagnostics"]:
        del found["rests_on"]
    del saved["plan"]["evidence"]
    again = ScanResult.from_json(json.dumps(saved).encode())
    assert again == shared_result()
    assert (again.evidence, again.torch) == ("measured", "2.13.0+cpu")


def test_a_plan_keeps_its_evidence(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()
    saved = json.loads((tmp_path / "plan.json").read_text())
    del saved["evidence"]
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert Plan.load(tmp_path / "plan.json").evidence == "measured"


# -- what is shown


def prediction_text(result: ScanResult) -> str:
    """What a prediction says of itself."""
    return said(result, "prediction")


def prediction_in_brief(result: ScanResult) -> str:
    """``Predicted: nothing ran on xpu.``"""
    return prediction_text(result).partition(". ")[0] + "."


def shown_parts(result: ScanResult, format: str) -> str:
    """What a format shows of the result, without the tool's parts: scripts, styles and the manual of the rules."""
    shown = render(result, format)
    if format == "html":
        shown = re.sub(r"(?s)<details[^>]*><summary>What LP\d+ means.*?</details>", "", shown)
        return re.sub(r"(?s)<(script|style).*?</\1>", "", shown)
    if format == "sarif":
        log = json.loads(shown)
        for rule in log["runs"][0]["tool"]["driver"]["rules"]:
            for name in ("shortDescription", "fullDescription", "help"):
                del rule[name]
        return json.dumps(log, ensure_ascii=False)
    return shown


def without_basis(shown: str) -> str:
    """``shown`` without what the prediction rests on: the catalog was measured."""
    for basis in (BASIS, DEVICE.kernels):
        for form in (basis, basis.replace("_", "\\_")):
            pattern = r"\s+".join(map(re.escape, form.split()))  # the text report wraps lines
            shown = re.sub(pattern, "the catalog", shown)
    return shown


@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_no_format_shows_a_prediction_as_measured(format: str) -> None:
    shown = without_basis(shown_parts(RESULT, format))
    assert "measured" not in shown.lower()
    assert not TIME.search(shown), TIME.search(shown)
    in_brief = "xpu, predicted on a CPU" if format == "text" else prediction_in_brief(RESULT)
    assert in_brief in re.sub(r"\s+", " ", shown)


def test_all_formats_are_covered() -> None:
    assert {*TEXT_FORMATS, "json"} == {*FORMATS.names()}


statuses = st.sampled_from(["ok", "inaccurate", "nonfinite", "error", "crashed", "timeout", "unjudged", "skipped"])
errors = st.one_of(st.none(), st.floats(min_value=0, max_value=1e3))


@st.composite
def predictions(draw: st.DrawFn) -> ScanResult:
    """A concluded prediction with runs of any status."""
    from lowprec_check.analysis.conclusion import conclude

    runs = [RESULT.runs[0]]
    for precision in low_precisions():
        status, error = draw(statuses), draw(errors)
        found = None if error is None else ErrorStats(rel_l2=error, max_abs=1.0, cosine=None, sqnr_db=None)
        known = draw(st.lists(st.sampled_from(["mm", "relu", "svd"]), max_size=2, unique=True))
        more: dict[str, Any] = {"output_error": found, "known_ops": known, "reason": draw(st.sampled_from([None, "x"]))}
        runs.append(msgspec.structs.replace(a_prediction(precision.name, status), **more))
    changes: dict[str, Any] = {"runs": runs, "diagnostics": [], "recommendation": None}
    options = RESULT.options | {"prefer": draw(st.sampled_from(["speed", "memory", "accuracy"]))}
    return conclude(msgspec.structs.replace(RESULT, options=options, **changes))


@FEW
@given(predictions())
def test_each_run_is_shown_as_predicted(result: ScanResult) -> None:
    for shape in ("text", "md", "html", "junit"):
        shown = without_basis(shown_parts(result, shape))
        assert "measured" not in shown.lower()
        assert not TIME.search(shown), TIME.search(shown)
        # the first screen says once that all runs are predicted
        if shape == "text":
            assert "xpu, predicted on a CPU" in " ".join(shown.split())
            continue
        for run in result.runs:
            assert f"{run.precision} · predicted" in shown
    for shape in ("sarif", "github", "concise"):
        shown = without_basis(shown_parts(result, shape))
        assert "measured" not in shown.lower()
        assert prediction_in_brief(result) in shown
    advice = result.recommendation
    if advice is not None:
        assert advice.evidence == "predicted"
        assert not advice.stay_in_fp32
        assert advice.worth == "unknown"
        reason = advice.reason.lower()
        assert "predicted" in reason or "runs, but" in reason
        assert "faster" not in advice.reason


def test_the_head_says_what_is_predicted_and_how_sure_it_is() -> None:
    lines = screen_of(RESULT, width=300).splitlines()
    assert lines[0].endswith(" · torch 2.3 · xpu, predicted on a CPU")
    assert lines[1] == "Not known whether these ops run in 16 bits on xpu, which is assumed: aminmax"
    assert (
        "Predicted: nothing ran on xpu. Its kernels: measured on xpu (a test), torch 2.3; "
        "its autocast policy: torch 2.6; the catalog knows 3 of 4 ops in 16 bits, the others are assumed to run: "
        "aminmax"
    ) in screen_of(RESULT, width=300, verbose=True).splitlines()
    assert prediction_text(shared_result()) == ""


def test_ops_of_a_run_that_did_not_end_are_not_known() -> None:
    for status in ("timeout", "crashed"):
        run = msgspec.structs.replace(a_prediction("half"), known_ops=[], assumed_ops=[], status=status)
        text = prediction_text(msgspec.structs.replace(RESULT, runs=[run], recommendation=None))
        assert text.endswith("; which ops run in 16 bits is not known, since a run did not end")


@pytest.mark.parametrize(
    ("known", "assumed", "text"),
    [
        ([], [], "no op ran in 16 bits"),
        (["mm"], [], "the catalog knows 1 of 1 op in 16 bits"),
        (["mm", "relu"], [], "the catalog knows 2 of 2 ops in 16 bits"),
        ([], ["mm"], "the catalog knows 0 of 1 op in 16 bits, the others are assumed to run: mm"),
        (["mm", "x"], ["mm"], "the catalog knows 1 of 2 ops in 16 bits, the others are assumed to run: mm"),
        (
            [],
            list("abcdefg"),
            "the catalog knows 0 of 7 ops in 16 bits, the others are assumed to run: a, b, c, d and 3 more",
        ),
    ],
)
def test_the_share_of_ops_that_are_known(known: list[str], assumed: list[str], text: str) -> None:
    run = msgspec.structs.replace(a_prediction("half"), known_ops=known, assumed_ops=assumed)
    result = msgspec.structs.replace(RESULT, runs=[run], recommendation=None)
    assert prediction_text(result).endswith(f"; {text}")


def test_casts_and_moves_in_16_bits_are_ops_that_ran() -> None:
    run = msgspec.structs.replace(a_prediction("half"), known_ops=[], assumed_ops=[])
    cast = to_columns([OpCall("cast input", dtypes="f32→f16")])
    result = msgspec.structs.replace(RESULT, runs=[msgspec.structs.replace(run, op_calls=cast)], recommendation=None)
    assert prediction_text(result).endswith("; no op in 16 bits needs to be in the catalog")


@pytest.mark.parametrize(
    ("torch", "head", "brief"),
    [
        ("2.6", "torch 2.6 · cpu, predicted with torch 2.13", "Predicted: nothing ran with torch 2.6."),
        ("2.13", "torch 2.13 · cpu, predicted", "Predicted: the 16-bit kernels of the CPU were emulated."),
    ],
)
def test_another_torch_on_a_cpu(torch: str, head: str, brief: str) -> None:
    device = msgspec.structs.replace(DEVICE, name="cpu", torch=torch)
    result = msgspec.structs.replace(RESULT, prediction=device)
    assert screen_of(result, width=300).splitlines()[0].endswith(f" · {head}")
    lines = screen_of(result, width=300, verbose=True).splitlines()
    assert lines[1] == head
    assert any(line.startswith(brief) for line in lines)


def test_the_advice_is_a_prediction() -> None:
    advice = RESULT.recommendation
    assert advice is not None
    assert advice.evidence == "predicted"
    assert advice.reason.startswith("Predicted to pass on 1 of 1 input, at 9 % of the tolerance. Error 4.7e-03")
    assert 'torch.autocast("xpu", dtype=torch.bfloat16)' in advice.code
    failed = [msgspec.structs.replace(run, status="error") if not run.is_reference else run for run in RESULT.runs]
    none = msgspec.structs.replace(RESULT, runs=failed, recommendation=None)
    assert "Stay in fp32: no low precision is predicted to pass." in render(none, "text")


@pytest.mark.parametrize(
    ("device", "torch", "imported"),
    [("xpu", "2.3", True), ("xpu", "2.4.1+xpu", True), ("xpu", "2.5", False), ("xpu", "2.13", False),
     ("xpu", "", False), ("cuda", "2.3", False), ("cpu", "2.3", False)],
)  # fmt: skip
def test_intels_extension_is_imported_where_torch_has_no_xpu(device: str, torch: str, imported: bool) -> None:
    code = snippet(RunKey("half", device=device), RESULT.model, torch_version=torch)
    assert ("import intel_extension_for_pytorch" in code) is imported
    compile(code, "pasted", "exec")


def test_findings_name_the_row_of_the_catalog() -> None:
    lacking = next(found for found in RESULT.diagnostics if found.code == "LP101")
    assert lacking.rests_on == BASIS
    assert f"predicted from: {BASIS}" in " ".join(screen_of(RESULT, width=300, verbose=True).split())
    for shape in ("md", "html", "sarif", "junit"):
        assert BASIS in render(RESULT, shape).replace("\\_", "_"), shape
    properties = json.loads(render(RESULT, "sarif"))["runs"][0]["results"]
    assert BASIS in {found["properties"].get("predictedFrom") for found in properties}
    assert all(found.rests_on is None for found in shared_result().diagnostics)


def test_a_fallback_has_its_cost() -> None:
    known, unknown = [found for found in RESULT.diagnostics if found.code == "LP105"][::-1]
    assert fallback_of(FALLBACK) == ("aten.gelu.default", 2048)
    assert fallback_of("Aten Op fallback from XPU to CPU happens.") is None
    each = "runs on the CPU: each call waits for the device, copies its inputs (2 KiB) to the CPU, and its result back"
    assert (known.precision, known.message, known.calls) == ("autocast-bf16", f"{each}; 2 calls, 4 KiB in all", 2)
    assert (known.op, known.source) == ("aten.gelu.default", "net.py:22")
    assert unknown.precision == "fp32"  # its calls are those of a run that was analyzed
    assert unknown.message.startswith(f"{each}; ")
    runs = [msgspec.structs.replace(run, op_calls=OpCalls()) for run in RESULT.runs]
    bare = [found for found in diagnose(msgspec.structs.replace(RESULT, runs=runs)) if found.code == "LP105"]
    assert [(found.message, found.module, found.calls) for found in bare] == [(each, None, 1)] * 2
    assert known.rests_on == "measured on xpu (a test), torch 2.3: aten.gelu.default falls back to the CPU"


def test_junit_has_no_seconds() -> None:
    suite = ElementTree.fromstring(render(RESULT, "junit"))[0]
    assert suite.get("time") is None
    cases = suite.findall("testcase")
    assert all(case.get("time") is None for case in cases)
    assert all("· predicted on xpu" in str(case.get("name")) for case in cases[:-1]), "the last is the verdict"
    names = {entry.get("name"): entry.get("value") for entry in suite.iter("property")}
    assert names["prediction"] == prediction_text(RESULT)


def test_advice_names_a_command_that_can_predict() -> None:
    for shape in ("text", "md", "html", "sarif"):
        shown = screen_of(RESULT, verbose=True) if shape == "text" else shown_parts(RESULT, shape)
        shown = re.sub(r"\s+", " ", shown)
        assert re.search("lowprec-check scan .*--plan", shown)
        assert "lowprec-check plan" not in shown


def test_a_notebook_says_so() -> None:
    for shown in (notebook.text(RESULT), notebook.html(RESULT)):
        assert "torch 2.3 · xpu, predicted on a CPU" in shown
        assert "measured" not in without_basis(shown)
    assert "is assumed: aminmax" in notebook.html(RESULT)


def test_a_plan_says_so() -> None:
    planning = Planning(target="net.py", model="Net", device="xpu", attempts=[], plan=plan())
    shown = re.sub(r"\s+", " ", text(plan_document(planning)))
    assert "The error is predicted to be 2.0e-03, the tolerance 1e-02; nothing ran on xpu" in shown
    assert "measured" not in shown


@pytest.mark.parametrize("reverse", [False, True])
def test_a_difference_between_measured_and_predicted_says_so(reverse: bool) -> None:
    old, new = (RESULT, shared_result()) if reverse else (shared_result(), RESULT)
    found = diff_scans(old, new)
    assert found.warnings[0].startswith("evidence: ")
    assert "predicted for xpu, torch 2.3" in found.warnings[0]
    assert found.changes
    assert all(change.what.endswith(f"({old.evidence} before, {new.evidence} now)") for change in found.changes)
    assert not {"speed", "memory"} & {change.kind for change in found.changes}
    for shown in (FORMATS.get(name).render_diff(found) for name in ("text", "md", "html")):
        assert "predicted for xpu" in re.sub(r"\s+", " ", shown)
    same = diff_scans(RESULT, RESULT)
    assert (same.warnings, same.changes) == ([], [])


def test_the_matrix_says_so() -> None:
    row = row_of(RESULT, Request("net.py", (), "xpu", "net"), 1.0, {})
    assert {cell.evidence for cell in row.cells} == {"predicted"}
    assert row.environment["torch"] == "2.3"
    assert row.recommended == "autocast-bf16 (predicted)"
    for suffix in (".md", ".html"):
        shown = format_of(Path(suffix)).lay_out(matrix_document(Matrix(rows=[row])))
        assert "4.7e-03 · predicted" in shown
        assert "nothing ran on that device" in shown
    measured = row_of(shared_result(), Request("net.py", (), "cpu", "net"), 1.0, {})
    assert "nothing ran" not in markdown(matrix_document(Matrix(rows=[measured])))


GOLDENS = {"text": "predicted.txt", "md": "predicted.md"}


@pytest.mark.parametrize(("format", "name"), GOLDENS.items())
def test_goldens(format: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, render(RESULT, format))


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", "a | b", "line\nbreak", "x" * 5000, ""])
def test_hostile_strings_are_rendered(nasty: str) -> None:
    for shape in TEXT_FORMATS:
        assert render(predicted_result(nasty), shape)
