"""What follows from an error budget: severities, causes in reports, the op to look at first. Results made by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from helpers import screen_of
from shared_result import ENVIRONMENT, budgeted_result, run

from lowprec_check.analysis.baseline import accept, baseline_of, fingerprint
from lowprec_check.analysis.diff import diff_scans
from lowprec_check.analysis.error_shares import (
    BETWEEN,
    blamed_modules,
    fails_by_error,
    line_shares,
    main_causes,
    module_shares,
    place_shares,
    trusted_budget,
)
from lowprec_check.analysis.findings import groups, tally
from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import why
from lowprec_check.report.blocks import Fold, Table
from lowprec_check.report.layout.text import text
from lowprec_check.report.registry import render
from lowprec_check.report.scan_document import scan_document
from lowprec_check.schema.measures import ErrorBudget, ModuleShare, Share
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import Diagnostic, ModelInfo, Run, ScanResult

INFO = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=9, training=False)
FP32 = run("fp32", tolerance=None)


def a_result(*runs: Run) -> ScanResult:
    result = ScanResult(tool="t 1", target="t.py", model=INFO, environment=ENVIRONMENT, runs=[FP32, *runs])
    result = msgspec.structs.replace(result, recommendation=recommend(result.runs, INFO))
    return msgspec.structs.replace(result, diagnostics=diagnose(result))


def explain_status(run: Run) -> str:
    return why(run).text


def budget_lines(result: ScanResult) -> list[str]:
    """What is said of where errors come from."""
    kinds = ("tiny-output", "shares", "unknown-cause")
    found = [its for its in statements(result) if its.kind in kinds]
    return [f"{', '.join(its.runs)}: {its.text}" for its in found]


def share_rows(result: ScanResult) -> list[tuple[str, float]]:
    """The rows of the table of shares by module, of the first run that has one."""
    folds = [
        block for block in scan_document(result).blocks if isinstance(block, Fold) and block.title.startswith("Shares")
    ]
    (table,) = folds[0].blocks if folds else (Table([], []),)
    return [(row.cells[0], row.cells[1]) for row in table.rows] if isinstance(table, Table) else []


def calls(*rows: OpCall) -> Any:
    return to_columns(rows)


def underflow(module: str, share: float | None = None, **more: Any) -> OpCall:
    """A call of which LP202 reports something."""
    return OpCall("aten.mul.Tensor", module, "net.py:3", flushed=0.5, input_flushed=0.0, share=share, **more)


def a_run(*rows: OpCall, status: str = "inaccurate", budget: ErrorBudget | None = None, **more: Any) -> Run:
    rel_l2 = None if status in ("nonfinite", "error") else 1e-3 if status == "ok" else 0.5
    return run("half", status, rel_l2, op_calls=calls(*rows), budget=with_shares_of(rows, budget), **more)


def with_shares_of(rows: Sequence[OpCall], budget: ErrorBudget | None) -> ErrorBudget | None:
    """The budget, with the shares that the op calls have: they add no rounding between modules."""
    if budget is None or not budget.known:
        return budget
    listed = list(budget.shares)
    places = dict.fromkeys((row.module, row.op, row.source) for row in rows if row.share is not None)
    for module, op, source in places:
        inside = [row.share or 0.0 for row in rows if (row.module, row.op, row.source) == (module, op, source)]
        listed.append(Share(module=module, op=op, source=source, share=sum(inside), calls=len(inside)))
    return msgspec.structs.replace(budget, shares=sorted(listed, key=lambda share: -share.share))


def a_budget(unexplained: float = 0.1, *shares: Share, **more: Any) -> ErrorBudget:
    fields: dict[str, Any] = {"predicted": 0.4, "measured": 0.5, "unexplained": unexplained, "output_rms": 1.0}
    return ErrorBudget(**fields | {"shares": list(shares)} | more)


def found(result: ScanResult, *codes: str) -> list[Diagnostic]:
    return [d for d in result.diagnostics if d.code.startswith(codes)]


NUMERICS = ("LP201", "LP202", "LP203", "LP302", "LP303", "LP304")


# -- shares by module and line


def test_shares_are_summed_by_module_and_line() -> None:
    rows = [
        OpCall("aten.mm.default", "a", "net.py:1", share=0.2),
        OpCall("aten.mm.default", "a", "net.py:1", share=0.3),
        OpCall("aten.add.Tensor", "a", "net.py:2", share=0.1),
        OpCall("aten.mm.default", "b", "net.py:1", share=-0.05),
        OpCall("aten.relu.default", "c", None, share=None),
    ]
    cast = Share(module="", op="cast input", share=0.25)
    shown = a_run(*rows, budget=a_budget(0.2, cast))
    modules = module_shares(shown)
    assert [(part.name, pytest.approx(part.share), part.calls) for part in modules] == [
        ("a", 0.6, 3), ("", 0.25, 1), ("b", -0.05, 1),
    ]  # fmt: skip
    assert (modules[0].largest.op, modules[0].largest.calls) == ("aten.mm.default", 2)
    assert [(part.name, pytest.approx(part.share)) for part in line_shares(shown)] == [
        ("net.py:1", 0.45), ("net.py:2", 0.1),
    ]  # fmt: skip


def test_without_shares_of_calls_the_listed_ones_count() -> None:
    listed = [Share(module="a", op="aten.mm.default", source="net.py:1", share=0.6, calls=4)]
    shown = a_run(OpCall("aten.mm.default", "a", "net.py:1"), budget=a_budget(0.1, *listed, others=0.3))
    assert list(place_shares(shown).values()) == listed
    assert [(name, pytest.approx(share)) for name, share in share_rows(a_result(shown))] == [
        ("a", 0.6), ("other modules", 0.3), ("not explained", 0.1),
    ]  # fmt: skip


def test_rounding_counts_in_the_module_that_holds_the_op_and_its_readers() -> None:
    rows = [
        OpCall("aten.addmm.default", "enc.0.fc", "net.py:1", share=0.75),
        OpCall("aten.add.Tensor", "enc.0", "net.py:2", share=0.1),
    ]
    listed = [
        Share(module="enc.0", op="aten.addmm.default", source="net.py:1", share=0.5, rounding=True, calls=3),
        Share(module="enc.0", op="aten.add.Tensor", source="net.py:2", share=0.1),
        Share(module="", op="aten.addmm.default", source="net.py:1", share=0.15, rounding=True),
        Share(module="", op="cast input", share=0.05),
        Share(module="enc.0.fc", op="aten.addmm.default", source="net.py:1", share=0.1),
    ]
    budget = a_budget(0.1, *listed)
    one = run("half", "inaccurate", 0.5, op_calls=calls(*rows), budget=budget)
    assert [(part.name, pytest.approx(part.share), part.calls) for part in module_shares(one)] == [
        ("enc.0", 0.6, 4), (BETWEEN, 0.15, 1), ("enc.0.fc", 0.1, 1), ("", 0.05, 1),
    ]  # fmt: skip
    assert [(part.name, part.share) for part in line_shares(one)] == [("net.py:1", 0.75), ("net.py:2", 0.1)]
    assert {place.op: place.share for place in place_shares(one).values()} == {
        "aten.addmm.default": 0.75, "aten.add.Tensor": 0.1, "cast input": 0.05,
    }  # fmt: skip
    assert budget_lines(a_result(one)) == [
        "half: shares of the error, estimated: 70 % enc.0 (rounding of addmm, net.py:1), 15 % rounding between "
        "modules, 10 % not explained"
    ]
    assert explain_status(one).endswith("; about 70 % from enc.0, about 15 % from rounding between modules")
    only = msgspec.structs.replace(one, budget=a_budget(0.2, listed[2], Share(module="a", op="b", share=0.05)))
    assert budget_lines(a_result(only)) == [
        "half: shares of the error, estimated: 15 % rounding between modules (addmm, net.py:1), 5 % a, "
        "20 % not explained"
    ]


def test_bars_add_up_and_keep_what_cancels() -> None:
    shares = {f"layers.{n}": 0.1 for n in range(10)} | {"cancels": -0.2}
    rows = [OpCall("aten.mm.default", module, share=share) for module, share in shares.items()]
    found = share_rows(a_result(a_run(*rows, budget=a_budget(0.2, decisions=0.15))))
    assert sum(share for _, share in found) == pytest.approx(1.0)
    names = ["cancels", "other modules", "choices that differ from fp32", "not explained"]
    assert [name for name, _ in found[-4:]] == names
    assert (found[-4][1], found[-1][1]) == (pytest.approx(-0.2), pytest.approx(0.05))


# -- severity


@pytest.mark.parametrize(
    ("share", "severity", "matters"), [(0.46, "warning", True), (0.03, "warning", True), (0.029, "note", False)]
)
def test_a_finding_is_a_warning_only_where_it_causes_the_error(share: float, severity: str, matters: bool) -> None:
    result = a_result(a_run(underflow("a", share), OpCall("aten.mm.default", "b", share=0.3), budget=a_budget()))
    [finding] = found(result, "LP202")
    assert (finding.severity, finding.matters, finding.share) == (severity, matters, share)
    told = "; its share of the output error is about 46 %" if share == 0.46 else None
    assert told is None or finding.message.endswith(told)
    assert ("its share" in finding.message) == matters
    assert "cause" not in finding.message, "nothing was tried"


def test_the_calls_at_a_place_count_together() -> None:
    rows = [underflow("a", 0.01)] * 4
    [finding] = found(a_result(a_run(*rows, budget=a_budget(0.96))), "LP202")
    assert finding.severity == "warning"  # first order explains too little to say that it does not matter
    assert finding.matters is None
    [finding] = found(a_result(a_run(*rows, OpCall("b", share=0.9), budget=a_budget(0.06))), "LP202")
    assert (finding.severity, finding.share, finding.calls) == ("warning", pytest.approx(0.04), 4)


def test_the_largest_share_comes_first() -> None:
    result = a_result(a_run(underflow("a", 0.1), underflow("b", 0.01), underflow("c", 0.7), budget=a_budget(0.19)))
    assert [finding.module for finding in found(result, "LP202")] == ["c", "a", "b"]


EVERY = [
    OpCall("aten.exp.default", "a", introduced_inf=3, compared_values=8),
    OpCall("aten.mul.Tensor", "a", flushed=0.5, input_flushed=0.0),
    OpCall("aten.div.Tensor", "a", introduced_nan=3, compared_values=8),
    OpCall("aten.prod.default", "a", local_error=0.3),
    OpCall("aten.sub.Tensor", "a", input_error=1e-3, accumulated_error=0.5, local_error=1e-4),
    OpCall("aten.argmax.default", "a", flips=3, compared_choices=8),
]


def test_everything_is_a_note_in_a_run_that_passes() -> None:
    for budget in (None, a_budget(0.0, Share(module="a", op="aten.mul.Tensor", share=1.0), measured=1e-3)):
        diagnostics = found(a_result(a_run(*EVERY, status="ok", budget=budget)), *NUMERICS)
        assert {d.code for d in diagnostics} == set(NUMERICS) - {"LP303"}
        assert {(d.severity, d.matters) for d in diagnostics} == {("note", False)}
        assert all(d.message.endswith("; the output passes") for d in diagnostics)


def test_without_a_budget_severities_are_those_of_the_rules_and_nothing_is_a_cause() -> None:
    for budget in (None, ErrorBudget(reason="too little memory")):
        diagnostics = found(a_result(a_run(*EVERY, budget=budget)), *NUMERICS)
        assert {d.code: d.severity for d in diagnostics} == {
            "LP201": "error", "LP202": "warning", "LP203": "error",
            "LP302": "warning", "LP303": "warning", "LP304": "note",
        }  # fmt: skip
        assert {d.matters for d in diagnostics} == {None}
        assert not any("cause" in d.message or "originate" in d.message for d in diagnostics)


def test_of_a_nonfinite_run_only_the_first_inf_or_nan_keeps_its_severity() -> None:
    rows = [*EVERY, OpCall("aten.exp.default", "b", introduced_inf=1, introduced_nan=1, compared_values=8)]
    for order in (rows, rows[::-1]):
        diagnostics = found(a_result(a_run(*order, status="nonfinite")), *NUMERICS)
        severe = {(d.code, d.module) for d in diagnostics if d.severity != "note"}
        assert severe == ({("LP201", "a")} if order is rows else {("LP201", "b"), ("LP203", "b")})
        assert {(d.code, d.module) for d in diagnostics if "the first op with Inf or NaN" in d.message} == severe
        assert {d.matters for d in diagnostics} == {None}


def test_a_constant_that_was_replaced_is_not_the_first_inf() -> None:
    rescued = OpCall("aten.masked_fill.Scalar", "a", introduced_inf=1, compared_values=8, outcome="rescued")
    [finding] = found(a_result(a_run(rescued, EVERY[0], status="nonfinite")), "LP201")
    assert (finding.severity, finding.op) == ("error", "aten.exp.default")


@pytest.mark.parametrize(("measured", "severity"), [(0.5, "warning"), (1e-3, "note")])
def test_a_run_without_a_kernel_is_judged_by_its_error_with_the_kernel_replaced(measured: float, severity: str) -> None:
    one = a_run(underflow("a", 0.9), status="error", budget=a_budget(measured=measured))
    [finding] = found(a_result(one), "LP202")
    assert finding.severity == severity
    assert fails_by_error(one) == (severity == "warning")


def test_what_a_compiler_breaks_is_not_blamed_on_an_op() -> None:
    budget = a_budget(measured=1e-3)
    assert not found(
        a_result(a_run(underflow("a", 0.9), backend="jit", budget=budget)), "LP202"
    )  # that is of eager mode
    assert "causes" not in explain_status(a_run(underflow("a", 0.9), backend="jit", budget=budget))
    [later] = found(a_result(a_run(underflow("a", 0.9), failed_call=2, budget=budget)), "LP202")
    assert (later.severity, later.matters) == ("warning", None)  # nothing is known of the second call
    assert "causes" not in later.message


def test_an_op_whose_share_is_not_known_may_matter_if_something_is_not_explained() -> None:
    for unexplained, matters in ((0.2, None), (0.01, False)):
        rows = [underflow("a", None), OpCall("aten.mm.default", "b", share=1 - unexplained)]
        [finding] = found(a_result(a_run(*rows, budget=a_budget(unexplained))), "LP202")
        assert (finding.severity, finding.matters) == ("note" if matters is False else "warning", matters)


@pytest.mark.parametrize(("before", "matters"), [(0.9, None), (0.01, False)])
def test_an_amplifier_is_a_note_that_names_the_share_of_what_it_may_magnify(
    before: float, matters: bool | None
) -> None:
    rows = [OpCall("aten.add.Tensor", "a", share=before), msgspec.structs.replace(EVERY[4], share=0.0)]
    rows.append(OpCall("aten.mm.default", "b", share=0.9 - before))
    [finding] = found(a_result(a_run(*rows, budget=a_budget(0.1))), "LP303")
    assert (finding.severity, finding.matters) == ("note", matters)
    assert finding.message.startswith("this op magnifies the relative error of its inputs from 1.0e-03 to 5.0e-01")
    assert finding.message.endswith("the share of all ops up to it in the output error is 90 %") == (matters is None)


def test_the_rounding_of_the_inputs_reaches_an_amplifier() -> None:
    rows = [msgspec.structs.replace(EVERY[4], share=0.0), OpCall("aten.mm.default", "b", share=0.1)]
    cast = Share(module="", op="cast input", share=0.8)
    [finding] = found(a_result(a_run(*rows, budget=a_budget(0.1, cast))), "LP303")
    assert finding.message.endswith("the share of all ops up to it in the output error is 80 %")


@pytest.mark.parametrize(("decisions", "severity"), [(0.3, "warning"), (0.02, "note")])
def test_choices_that_cause_the_error_are_a_warning(decisions: float, severity: str) -> None:
    pool = OpCall("aten.max_pool2d_with_indices.default", "a", flips=3, compared_choices=8)
    for rows, op in (([EVERY[5], pool], "aten.argmax.default"), ([pool], pool.op)):
        result = a_result(a_run(*rows, budget=a_budget(0.4, decisions=decisions)))
        by_op = {d.op: d for d in found(result, "LP304")}
        assert by_op[op].severity == severity
        assert by_op[op].share == (0.3 if severity == "warning" else None)
        assert ("the share of all such choices in the output error is 30 %" in by_op[op].message) == (
            severity == "warning"
        )
        assert op == pool.op or by_op[pool.op].severity == "note"


def test_choices_count_where_the_first_order_fails() -> None:
    result = a_result(a_run(EVERY[5], budget=a_budget(0.9, decisions=0.8)))
    assert [d.severity for d in found(result, "LP304")] == ["warning"]
    assert "80 % from choices (LP304)" in explain_status(result.runs[1])
    assert budget_lines(result) == [
        "half: not known: the errors of single ops, followed to the output, give 10 % of that of the run; "
        "80 % choices that differ from fp32"
    ]


def test_the_error_that_is_explained_is_that_of_the_call_that_was_analyzed() -> None:
    for failed, of in ((None, "the run"), (3, "the first call")):
        for unexplained, ratio in ((-0.6, "1.6 times"), (0.9, "10 % of")):
            budget = a_budget(unexplained, predicted=0.8, measured=0.5)
            result = a_result(a_run(status="nonfinite", budget=budget, failed_call=failed))
            assert budget_lines(result) == [
                f"half: not known: the errors of single ops, followed to the output, give {ratio} that of {of}"
            ]


def test_an_error_of_one_module_is_not_spread() -> None:
    row = OpCall("aten.mm.default", "", "net.py:1", share=1.0)
    [line] = budget_lines(a_result(a_run(row, budget=a_budget(0.0, spread=1.0))))
    assert line == "half: shares of the error, estimated to within 200 %: 100 % the model itself"


# -- what a run is said to fail for


def test_the_reason_names_the_modules_that_cause_most() -> None:
    shown = budgeted_result().run("bfloat16")
    assert explain_status(shown) == (
        "error 3.1e-01, over the tolerance 5e-02; about 46 % from head.out, about 12 % from encoder.blocks.0.norm"
    )
    assert "about 46 % from head.out" in render(budgeted_result(), "junit")
    assert "%" not in explain_status(msgspec.structs.replace(shown, budget=None))


@pytest.mark.parametrize(("unexplained", "ratio"), [(0.6, "40 % of"), (-0.6, "1.6 times"), (1.0, "0 % of")])
def test_no_cause_is_named_if_the_first_order_fails(unexplained: float, ratio: str) -> None:
    rows = [OpCall("aten.mm.default", "a", "net.py:1", share=1 - unexplained, accumulated_error=0.5)]
    shown = a_run(*rows, budget=a_budget(unexplained, predicted=0.5 * (1 - unexplained)))
    assert trusted_budget(shown) is None
    assert explain_status(shown) == "error 5.0e-01, over the tolerance 1e-02"
    [line] = budget_lines(a_result(shown))
    errors = "the errors of single ops, followed to the output"
    assert line == f"half: not known: {errors}, give {ratio} that of the run"
    assert share_rows(a_result(shown)) == []
    blamed = blamed_modules(msgspec.structs.replace(shown, called_modules=["a"]))
    assert blamed is not None
    assert (blamed.modules, blamed.blamed_for) == (("a",), "tolerance")


# -- the lines of the screen


def with_shares(name: str, status: str, **shares: float) -> Run:
    made = [OpCall("aten.addmm.default", module, "model.py:41", share=share) for module, share in shares.items()]
    rel_l2 = 1e-3 if status == "ok" else 0.5
    budget = with_shares_of(made, a_budget(1 - sum(shares.values()), measured=rel_l2))
    return run(name, status, rel_l2, op_calls=calls(*made), budget=budget)


def test_a_line_names_three_modules_and_what_is_not_explained() -> None:
    one = with_shares("half", "inaccurate", lm_head=0.46, ln_f=0.12, attn=0.09, small=0.28)
    assert budget_lines(a_result(one)) == [
        "half: shares of the error, estimated: 46 % lm_head (addmm, model.py:41), 28 % small, 12 % ln_f, "
        "5 % not explained"
    ]
    calm = msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, unexplained=-0.1))
    assert budget_lines(a_result(calm))[0].endswith(", first order predicts 10 % too much")


def tried(run: Run, spread: float = 0.0, **measured: float | None) -> Run:
    """``run`` with what plain runs showed of its modules."""
    own = {part.name: part.share for part in module_shares(run)}
    modules = [ModuleShare(module=name, share=own.get(name, 0.0), measured=its) for name, its in measured.items()]
    return msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, modules=modules, spread=spread))


def test_what_plain_runs_showed_counts_before_what_is_derived() -> None:
    one = with_shares("half", "inaccurate", a=0.5, b=0.3, c=0.15)
    both = budget_lines(a_result(tried(one, a=0.02, b=0.35, c=0.1)))
    assert both == ["half: shares of the error, measured: 35 % b (addmm, model.py:41), 10 % c"]
    assert explain_status(tried(one, a=0.02, b=0.35, c=0.1)).endswith("; 35 % from b, 10 % from c")
    mixed = budget_lines(a_result(tried(one, a=None, b=0.35, c=0.1)))[0]
    assert mixed.startswith("half: shares of the error, estimated: 50 % a (addmm, model.py:41), 35 % b, measured, 10 %")


def test_measured_shares_of_modules_together_are_no_more_than_the_error() -> None:
    one = tried(with_shares("half", "inaccurate", a=0.6, b=0.4), a=0.7, b=0.5)
    causes = main_causes(one, 3)
    assert [(part.name, pytest.approx(part.share), part.by_itself) for part in causes] == [
        ("a", 0.7, None),
        ("b", 0.3, 0.5),
    ]
    assert "70 % a (addmm, model.py:41), 50 % b (in part the same)" in budget_lines(a_result(one))[0]


def test_the_rest_of_a_module_is_what_its_named_part_does_not_have() -> None:
    """Shares of more than 100 % together: of ``b.n`` only a part goes beside ``a``."""
    one = with_shares("half", "inaccurate", **{"a": 0.875, "b.n": 0.1875, "b": 0.125})
    assert [(part.name, part.share, part.by_itself) for part in main_causes(one, 3)] == [
        ("a", 0.875, None),
        ("b.n", 0.125, 0.1875),
        ("the rest of b", 0.125, None),
    ]


@pytest.mark.parametrize(
    ("parts", "causes"),
    [
        pytest.param({"p.a": -1.5, "p.b": -1.6}, ["p"], id="each alone makes it worse"),
        pytest.param({"p.a": 0.2, "p.b": 0.1}, ["p"], id="together they are more"),
        pytest.param({"p.a": 0.5, "p.b": 0.4}, ["p.a", "p.b"], id="they explain it"),
    ],
)
def test_of_modules_whose_errors_cancel_the_one_around_them_is_named(
    parts: dict[str, float], causes: list[str]
) -> None:
    one = with_shares("autocast-fp16", "inaccurate", **{"p": 0.0, "p.a": 0.5, "p.b": 0.4, "q": 0.02})
    assert [part.name for part in main_causes(tried(one, 0.2, p=0.99, **parts), 3)] == causes
    whole = with_shares("autocast-fp16", "inaccurate", **{"p": 0.0, "p.a": 0.5, "p.b": 0.4})  # it says nothing of it
    assert "p" not in [part.name for part in main_causes(tried(whole, 0.2, p=0.99, **parts), 3)]


def test_a_share_that_may_be_chance_names_no_module() -> None:
    one = with_shares("half", "inaccurate", a=0.3, b=0.2)
    assert [part.name for part in main_causes(tried(one, 0.2, a=None, b=None), 3)] == []
    assert [part.name for part in main_causes(tried(one, 0.1, a=None, b=None), 3)] == ["a", "b"]
    assert [part.name for part in main_causes(tried(one, 0.2, a=None, b=0.2), 3)] == ["b"]
    line = budget_lines(a_result(tried(one, 0.1, a=None, b=None)))[0]
    assert line.startswith("half: shares of the error, estimated to within 20 %: 30 % a")


def test_the_table_of_shares_adds_up_where_the_first_order_predicts_too_much() -> None:
    rows = share_rows(a_result(with_shares("half", "inaccurate", a=1.2, b=0.16)))
    assert sum(share for _, share in rows) == pytest.approx(1.0)
    assert max(share for _, share in rows) < 1.0


def test_failing_runs_come_first_and_equal_answers_share_a_line() -> None:
    good = with_shares("autocast-bf16", "ok", a=0.9)
    bad = with_shares("half", "inaccurate", a=0.5, b=0.4)
    like = with_shares("bfloat16", "inaccurate", a=0.53, b=0.38)
    other = with_shares("autocast-fp16", "inaccurate", b=0.9)
    result = a_result(good, bad, like, other)
    assert [line.partition(" (")[0] for line in budget_lines(result)] == [
        "half, bfloat16: shares of the error, estimated: 50 – 53 % a",
        "autocast-fp16: shares of the error, estimated: 90 % b",
    ]


def test_runs_share_a_line_only_if_all_of_it_is_true_of_both() -> None:
    half, bf16 = with_shares("half", "inaccurate", a=0.9), with_shares("bfloat16", "inaccurate", a=0.9)
    tiny = [
        msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, output_rms=2e-7))
        for one in (half, bf16)
    ]
    lines = budget_lines(a_result(*tiny))
    assert lines == ["bfloat16: shares of the error, estimated: 90 % a (addmm, model.py:41), 10 % not explained"]


def test_an_exact_output_has_no_line() -> None:
    exact = a_run(status="ok", budget=ErrorBudget(predicted=0.0, measured=0.0, unexplained=0.0))
    assert budget_lines(a_result(exact)) == []


def test_the_ratio_of_the_errors_is_that_of_the_saved_figures() -> None:
    one = a_run(budget=a_budget(-0.64, predicted=0.82))
    [line] = budget_lines(a_result(one))
    assert line.endswith("give 1.6 times that of the run")


def test_what_a_finding_causes_is_not_cut() -> None:
    row = OpCall("aten.sub.Tensor", "a", "model.py:4", local_error=0.4, accumulated_error=0.4, share=1.0)
    shown = screen_of(a_result(a_run(row, budget=a_budget(0.0))), verbose=True)
    assert "its share of the output error is about 100 %" in " ".join(shown.split())


def test_an_error_of_many_small_parts_is_spread() -> None:
    one = with_shares("half", "inaccurate", **{f"h{n}": 0.0198 for n in range(50)})
    assert budget_lines(a_result(one)) == [
        "half: shares of the error, estimated: spread over 50 modules, the largest is 2 % h0"
    ]
    assert explain_status(one) == "error 5.0e-01, over the tolerance 1e-02"


def test_bf16_holds_tiny_outputs() -> None:
    one = msgspec.structs.replace(with_shares("bfloat16", "inaccurate", a=0.9))
    one = msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, output_rms=3e-12))
    assert budget_lines(a_result(one))[0].startswith("bfloat16: shares of the error, estimated: 90 % a (")


def test_a_failing_run_without_a_budget_has_a_reason() -> None:
    off = ErrorBudget(reason="--budget-error off")
    assert budget_lines(a_result(a_run(budget=off))) == [
        "half: where the error comes from is not known: --budget-error off"
    ]
    assert budget_lines(a_result(a_run(status="ok", budget=off))) == []
    assert budget_lines(a_result(a_run(budget=None))) == []


@pytest.mark.parametrize(
    ("changes", "suffix", "where"),
    [({"backend": "jit"}, " · jit", "in eager mode"), ({"failed_call": 2}, "", "in the first call")],
)
def test_shares_of_another_error_than_the_one_that_fails_are_marked(
    changes: dict[str, Any], suffix: str, where: str
) -> None:
    one = with_shares("half", "inaccurate", a=1.0)
    one = msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, measured=1e-3), **changes)
    [line] = budget_lines(a_result(one))
    assert (
        line
        == f"half{suffix}: shares of the error {where}, which is only 1.0e-03, estimated: 100 % a (addmm, model.py:41)"
    )
    assert "%" not in explain_status(one)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_the_lines_fit_the_screen(width: int) -> None:
    shown = text(scan_document(budgeted_result()), width=width, detail="more")
    block = shown.partition("Where the error comes from\n")[2].partition("\n\n")[0]
    assert "12 % encoder.blocks.0.norm" in " ".join(block.split())
    assert max(map(len, block.splitlines())) <= width
    assert "Where the error comes from" not in render(a_result(a_run(status="ok")), "text")


# -- reports


def test_notes_are_counted_on_the_first_screen() -> None:
    rows = [underflow(f"m{n}") for n in range(24)]
    result = a_result(a_run(*rows, status="ok"))
    assert tally(result.diagnostics) == "24 findings: 24 notes"
    shown = render(result, "text")
    assert "24 notes" in shown
    assert "LP202" not in shown
    assert "LP202 underflow" in text(scan_document(result), detail="more")
    assert render(result, "md").count("24 findings: 24 notes") == 1
    assert render(result, "html").count("24 findings: 24 notes") == 1
    assert render(result, "concise").count("LP202 note") == 1, "one line of code, one finding"


def test_findings_that_matter_are_not_merged_with_those_that_do_not() -> None:
    rows = [underflow("a", 0.5), underflow("b", 0.0), underflow("c", 0.0)]
    result = a_result(a_run(*rows, OpCall("aten.mm.default", "d", share=0.45), budget=a_budget(0.05)))
    shown = [item for item in groups(result.diagnostics) if item.code == "LP202"]
    assert [(item.severity, [place.module for place in item.places]) for item in shown] == [
        ("warning", ["a"]),
        ("note", ["b", "c"]),
    ]
    assert [item.harmless for item in shown] == [False, True]


def test_each_run_has_its_own_severity_and_figure() -> None:
    passes = run("autocast-fp16", "ok", 1e-3, op_calls=calls(underflow("a", 1.0)))
    fails = a_run(underflow("a", 0.9), budget=a_budget(0.1))
    for runs in itertools.permutations([passes, fails]):
        lines = [line for line in render(a_result(*runs), "concise").splitlines() if "LP202" in line]
        assert [line.partition(" half: ")[0] for line in lines[:1]] == ["net.py:3: LP202 warning"]
        assert "its share of the output error is about 90 %" in lines[0]
        assert lines[1].startswith("net.py:3: LP202 note autocast-fp16: ")
        [placed] = [
            its
            for its in json.loads(render(a_result(*runs), "sarif"))["runs"][0]["results"]
            if its["ruleId"] == "LP202"
        ]
        assert placed["level"] == "warning", "that of the most severe"


def test_a_healthy_network_has_no_warning() -> None:
    rows = [msgspec.structs.replace(row, module=f"layers.{n}") for n in range(20) for row in EVERY]
    result = a_result(a_run(*rows, status="ok"))
    assert len(result.diagnostics) == 20 * (len(EVERY) - 1)
    assert {d.severity for d in result.diagnostics} == {"note"}


def test_tables_show_the_shares() -> None:
    assert share_rows(budgeted_result())[:2] == [("head.out", 0.46), ("encoder.blocks.0.norm", 0.12)]


# -- baselines and differences


def test_a_budget_changes_no_fingerprint_and_no_difference() -> None:
    rows = [underflow("a", 0.001), underflow("b", 0.9)]
    without, with_budget = a_result(a_run(*rows)), a_result(a_run(*rows, budget=a_budget(0.099)))
    assert {d.severity for d in found(without, "LP202")} == {"warning"}
    assert {d.module: d.severity for d in found(with_budget, "LP202")} == {"a": "note", "b": "warning"}
    assert {fingerprint(d) for d in without.diagnostics} == {fingerprint(d) for d in with_budget.diagnostics}
    marked, stale = accept(with_budget, baseline_of(without))
    assert all(d.accepted for d in marked.diagnostics)
    assert not stale
    assert diff_scans(without, with_budget).changes == []


def test_shares_and_causes_survive_saving() -> None:
    result = budgeted_result()
    assert ScanResult.from_json(result.to_json()) == result


def test_shares_that_chance_may_explain_name_no_module() -> None:
    rows = [OpCall("aten.mm.default", name, "net.py:1", share=share) for name, share in (("a", 0.9), ("b", 0.1))]
    [line] = budget_lines(a_result(a_run(*rows, budget=a_budget(0.0, spread=1.0))))
    assert line == "half: shares of the error, estimated to within 200 %: no module stands out"


@pytest.mark.parametrize(("largest", "shown"), [(0.6, "100 % a (mm, net.py:1)"), (0.3, "100 % a")])
def test_an_op_is_named_beside_the_share_of_its_module_only_if_it_has_most_of_it(largest: float, shown: str) -> None:
    rest = (1.0 - largest) / 4
    rows = [OpCall("aten.mm.default", "a", "net.py:1", share=largest)]
    rows += [OpCall("aten.add.Tensor", "a", f"net.py:{line}", share=rest) for line in range(2, 6)]
    [line] = budget_lines(a_result(a_run(*rows, budget=a_budget(0.0), called_modules={"a": 1})))
    assert line == f"half: shares of the error, estimated: {shown}"


def test_of_modules_that_each_avoid_all_of_the_error_the_one_that_makes_it_is_named() -> None:
    """In fp32 the module before makes what follows it wide, which loses less then."""
    rows = [OpCall("aten.convolution.default", "a", share=0.01), OpCall("aten.div.Tensor", "b", share=0.98)]
    modules = [
        ModuleShare(module=name, share=its, measured=all_of_it)
        for name, its, all_of_it in (("a", 0.01, 0.999), ("b", 0.98, 0.998))
    ]
    shown = a_run(*rows, budget=a_budget(0.0, modules=modules), called_modules={"a": 1, "b": 1})
    assert [part.name for part in main_causes(shown, 3)] == ["b"]
