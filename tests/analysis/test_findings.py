"""Findings of several runs: one sentence only if true of each, with ranges; the cause of most of the error is first."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.analysis.error_shares import module_shares, place_shares
from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.report.registry import render
from lowprec_check.schema.findings import Diagnostic, Recommendation
from lowprec_check.schema.measures import Ablation, ErrorBudget, Share
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.statements import percent, say
from lowprec_check.schema.training import Divergence, TrainingRun, TrainingSetup, TrainingWay
from lowprec_check.schema.verdict import ErrorStats

INFO = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=9, training=False, source="net.py:1")
FP32 = Run(precision="fp32", device="cpu", status="ok")


def a_run(precision: str, status: str, *rows: OpCall, error: float | None = 0.5, **more: Any) -> Run:
    stats = ErrorStats(rel_l2=error, max_abs=error, cosine=None, sqnr_db=None)
    more = {"output_error": stats, "tolerance": 0.01, "device": "cpu"} | more
    return Run(precision=precision, status=status, op_calls=to_columns(rows), **more)  # type: ignore[arg-type]


def a_result(*runs: Run, **more: Any) -> ScanResult:
    result = ScanResult(tool="t 1", target="net.py", model=INFO, environment={}, runs=[FP32, *runs], **more)
    return msgspec.structs.replace(result, diagnostics=diagnose(result))


def of(result: ScanResult, code: str) -> list[Diagnostic]:
    return [d for d in result.diagnostics if d.code == code]


def budget(*shares: Share, **more: Any) -> ErrorBudget:
    return ErrorBudget(**{"predicted": 0.5, "measured": 0.5, "unexplained": 0.0, "shares": list(shares), **more})


def lost(precision: str, part: float, help: str = "scale", **more: Any) -> Diagnostic:
    said = say("{lost:percent} of the updates are lost", lost=part)
    fields = {"code": "LP503", "name": "lost-update", "severity": "warning", "help": help}
    return Diagnostic(
        **fields | more, precision=precision, message=said.text, template=said.template, figures=said.figures
    )


# -- groups


def test_figures_that_differ_are_a_range_in_every_format() -> None:
    result = msgspec.structs.replace(a_result(), diagnostics=[lost("bfloat16", 0.218), lost("half", 0.034)])
    [group] = groups(result.diagnostics)
    [message] = group.messages
    assert (message.runs, message.text) == (["bfloat16", "half"], "3.4 – 21.8 % of the updates are lost")
    for name in ("text", "md", "html", "sarif", "concise", "github"):
        shown = " ".join(render(result, name).replace("%25", "%").split())
        assert "3.4 – 21.8 %" in shown, name
        assert "21.8 % of" not in shown.replace("3.4 – 21.8 %", ""), name


def test_other_words_are_separate_messages_with_their_runs() -> None:
    found = [lost("bfloat16", 0.2), lost("half", 0.1, help="use float16"), lost("half", 0.3, severity="note")]
    first, note = groups(found)
    assert [(its.runs, its.help) for its in first.messages] == [(["bfloat16"], "scale"), (["half"], "use float16")]
    lost_in_both = "10 – 20 % of the updates are lost → bfloat16: scale; half: use float16"
    assert first.what == lost_in_both, "advice for one run is not said of another"
    assert first.said == "10 – 20 % of the updates are lost"
    assert (note.runs, note.severity) == (["half"], "note")


def test_a_file_of_an_older_version_joins_equal_messages_only() -> None:
    old = [
        Diagnostic(code="LP202", name="u", severity="note", precision=p, message=m)
        for p, m in (("half", "a {x}"), ("bf", "b"))
    ]
    [group] = groups([*old, msgspec.structs.replace(old[0], precision="ac")])
    assert [(its.runs, its.text) for its in group.messages] == [(["half", "ac"], "a {x}"), (["bf"], "b")]


def test_what_most_of_the_error_comes_from_is_first() -> None:
    many = [lost("half", 0.1, code="LP302", op=f"aten.op{n}.default", matters=True, share=0.04) for n in range(76)]
    cause = lost("half", 0.1, code="LP304", op="torchvision.nms.default", matters=True, share=1.0)
    assert groups([*many, cause])[0].op == "torchvision.nms.default"
    mismatch = Diagnostic(code="LP301", name="output-mismatch", severity="error", precision="half", message="m")
    assert [group.code for group in groups([mismatch, *many, cause])[:2]] == ["LP304", "LP301"]
    small = msgspec.structs.replace(cause, share=0.2)
    assert groups([mismatch, small])[0].code == "LP301"
    shown = render(msgspec.structs.replace(a_result(), diagnostics=[*many, cause]), "text")
    assert "LP304" in shown


shares_of_runs = st.dictionaries(
    st.sampled_from(["half", "bfloat16", "autocast-fp16"]), st.floats(0.001, 1), min_size=1
)


@given(shares_of_runs)
def test_a_message_is_true_of_every_run_that_it_names(shares: dict[str, float]) -> None:
    [group] = groups([lost(name, share) for name, share in shares.items()])
    [message] = group.messages
    assert sorted(message.runs) == sorted(shares)
    low, high = min(shares.values()), max(shares.values())
    ends = re.match(r"(?:(.+) – )?(.+ %) of", message.text)
    assert ends is not None
    assert ends[2] == percent(high)
    assert (ends[1] or ends[2].removesuffix(" %")) == percent(low).removesuffix(" %")


# -- shares


def rounded(module: str, share: float, leaving: float, **more: Any) -> OpCall:
    return OpCall("aten.mul.Tensor", module, "net.py:3", local_error=0.1, share=share, leaving=leaving, **more)


def a_failing_run(row: OpCall, **more: Any) -> Run:
    own, leaving = (row.share or 0.0) - (row.leaving or 0.0), row.leaving or 0.0
    place = {"op": row.op, "source": row.source}
    shares = [Share(module=row.module, share=own, **place), Share(module="", share=leaving, rounding=True, **place)]
    rest = Share(module="other", op="aten.mm.default", share=1.0 - own - leaving)
    return a_run("half", "inaccurate", row, budget=budget(*shares, rest), **more)


def test_an_op_has_the_share_of_its_module() -> None:
    """Of fine.py: the rounding of what `addmm` passes to other modules is not the share of module `0`."""
    run = a_failing_run(rounded("0", 0.28, 0.16))
    module = {part.name: part.share for part in module_shares(run)}
    assert module["0"] == pytest.approx(0.12)
    assert place_shares(run)["0", "aten.mul.Tensor", "net.py:3"].share == pytest.approx(module["0"])
    [finding] = of(a_result(run), "LP302")
    told = "its share of the output error is about 12 %, that of the rounding of its result 16 %"
    assert told in finding.message


def test_fp32_is_no_advice_for_what_is_rounded_after_the_op() -> None:
    [finding] = of(a_result(a_failing_run(rounded("1", 1.0, 1.0))), "LP302")
    assert finding.message.endswith("; about 100 % of the output error is the rounding of its result")
    assert (finding.help or "").startswith("fp32 for this module alone does not help")


def test_advice_that_an_ablation_disproved_is_withdrawn() -> None:
    tried = Ablation(keep_fp32=["1"], blamed_for="share", status="inaccurate", rel_l2=0.49)
    [finding] = of(a_result(a_failing_run(rounded("1", 1.0, 0.0), ablation=tried)), "LP302")
    assert finding.message.endswith('; with "1" in fp32 the error is still 4.9e-01')
    assert "in fp32" not in (finding.help or "")
    [other] = of(a_result(a_failing_run(rounded("2", 1.0, 0.0), ablation=tried)), "LP302")
    assert "still" not in other.message, "nothing is known of this module"


def test_no_finding_says_cause_without_a_trial() -> None:
    rows = [rounded("1", 0.5, 0.0, flushed=0.5), OpCall("aten.argmax.default", "2", flips=417, compared_choices=576)]
    run = a_run("half", "inaccurate", *rows, budget=budget(decisions=0.5, unexplained=0.5))
    found = a_result(run).diagnostics
    assert {d.code for d in found} >= {"LP202", "LP302", "LP304"}
    assert not [d.message for d in found if "cause" in d.message]


# -- advice


def an_overflow(op: str = "aten.mm.default", module: str = "") -> OpCall:
    return OpCall(op, module, "net.py:3", introduced_inf=3, compared_values=8)


def test_a_logarithm_of_zero_is_no_overflow() -> None:
    found = a_result(a_run("half", "nonfinite", an_overflow("aten.log.default", "1"), error=None)).diagnostics
    assert [d.code for d in found if d.op] == ["LP207"]
    assert found[0].message.startswith("log of 0 is infinite in 3 of 8 values (37.5 %), which are finite in fp32")
    [divided] = of(a_result(a_run("half", "nonfinite", an_overflow("aten.div.Tensor"), error=None)), "LP201")
    assert "or divided by 0" in divided.message
    [power] = of(a_result(a_run("half", "nonfinite", an_overflow("aten.pow.Tensor_Scalar"), error=None)), "LP201")
    assert power.message.startswith("3 of 8 values (37.5 %) became Inf where fp32 is finite")
    assert "divided" not in power.message


def test_the_advice_is_what_was_measured() -> None:
    run = a_run("half", "nonfinite", an_overflow(module="body.0"), error=None)
    plan = a_run("plan", "ok", base="half", keep_fp32=["body.0", "head"])
    [planned] = of(a_result(run, plan), "LP201")
    assert (planned.help or "").startswith("keep body.0, head in fp32, as the plan does")
    kept = Ablation(keep_fp32=["body"], blamed_for="nonfinite", status="ok", rel_l2=3e-4)
    [tried] = of(a_result(msgspec.structs.replace(run, ablation=kept)), "LP201")
    assert (tried.help or "").startswith("keep body in fp32, with which the error is 3.0e-04 (measured)")
    [untried] = of(a_result(a_run("half", "nonfinite", an_overflow(), error=None)), "LP201")
    assert untried.help is None


def test_advice_never_names_the_run_itself() -> None:
    way = TrainingWay(
        name="plain", status="inaccurate", divergence=Divergence(step=1, what="loss", value=1.0, limit=0.1)
    )
    trained = TrainingRun(ways=[way])
    runs = [a_run(name, "inaccurate", training=trained) for name in ("bfloat16", "half")]
    best = Recommendation(precision="bfloat16", evidence="measured", reason="r", code="c")
    passes = a_run("autocast-bf16", "ok", error=1e-3)
    setup = TrainingSetup(optimizer="SGD", loss="l", steps=2)
    result = a_result(*runs, passes, recommendation=best, training=setup)
    advice = {d.precision: d.help or "" for d in of(result, "LP507")}
    assert advice["half"] == "use bfloat16"
    assert "bfloat16" not in advice["bfloat16"]


def test_a_choice_is_told_of_each_run() -> None:
    rows = {"half": (884, "half"), "bfloat16": (1393, "bfloat16")}
    runs = [
        a_run(
            name, "ok", OpCall("aten.argmax.default", "a", "net.py:2", flips=flips, compared_choices=4096), error=1e-3
        )
        for name, (flips, _) in rows.items()
    ]
    result = a_result(*runs)
    for name in ("sarif", "concise", "github"):
        assert "884 – 1,393 of 4,096 times" in render(result, name), name
    junit = render(result, "junit")
    assert "picked a different element than fp32 884 of 4,096 times" in junit
    assert "picked a different element than fp32 1,393 of 4,096 times" in junit


def test_findings_join_from_the_saved_file_alone() -> None:
    result = a_result(*[a_run(p, "ok", an_overflow(module="a"), error=1e-3) for p in ("half", "autocast-fp16")])
    again = ScanResult.from_json(json.dumps(json.loads(result.to_json())))
    assert groups(again.diagnostics) == groups(result.diagnostics)
    assert all(d.template and d.sentence.text == d.message for d in again.diagnostics)
