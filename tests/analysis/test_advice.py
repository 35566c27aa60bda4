"""Advice fits the scan: reasons name the exception, help names no failing dtype or precision, counts have a total."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from helpers import screen_of
from shared_result import shared_result
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.run_summary import blames_backend
from lowprec_check.analysis.statements.advice import in_fp32, verdict
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import why
from lowprec_check.features.fix.fix_sites import culprits
from lowprec_check.features.plan import trials
from lowprec_check.features.plan.trials import Limits, Objective, Proposal, Proposer, best
from lowprec_check.report.registry import render
from lowprec_check.schema.backend_checks import CompilerCheck
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import Ablation, BatchRanges, InputsTried, LayerError
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.plan import Attempt
from lowprec_check.schema.scan_result import Diagnostic, Gap, ModelInfo, Run, ScanResult
from lowprec_check.schema.statements import out_of
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo

INFO = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=1, training=False)
FP32 = Run(precision="fp32", device="cpu", status="ok", latency_ms=10.0)


def a_run(precision: str, status: str = "ok", **more: Any) -> Run:
    return Run(precision=precision, device=more.pop("device", "cpu"), status=status, **more)  # type: ignore[arg-type]


def a_gap(op: str = "aten.dot.default", kind: str = "missing-kernel") -> Gap:
    layer = "dispatch" if op.startswith("aten.") else "function"
    return Gap(op=op, layer=layer, kind=kind, module="", source=None, dtypes=["float16"], message="m")  # type: ignore[arg-type]


def a_result(*runs: Run, **environment: Any) -> ScanResult:
    environment = {"torch": "2.13.0", "device": "cpu"} | environment
    return ScanResult(tool="t", target="t", model=INFO, environment=environment, runs=[FP32, *runs])


def helps(result: ScanResult, code: str, precision: str = "half") -> list[str | None]:
    return [d.help for d in diagnose(result, select=[code]) if d.precision == precision]


# -- reasons


class Raises(nn.Linear):
    def __init__(self, error: type[BaseException], *args: object) -> None:
        super().__init__(8, 8)
        self.error, self.args = error, args

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise self.error(*self.args)
        return super().forward(x)


@pytest.mark.parametrize(
    ("error", "args", "reason"),
    [
        (AssertionError, (), "AssertionError (no message)"),
        (KeyError, ("scale",), "KeyError: 'scale'"),
        (SystemExit, (3,), "SystemExit: 3"),
        (StopIteration, (), "StopIteration (no message)"),
        (ValueError, ("ends with a full stop.",), "ValueError: ends with a full stop."),
    ],
)
def test_the_type_of_the_exception_is_part_of_the_reason(
    error: type[BaseException], args: tuple[object, ...], reason: str
) -> None:
    result = scan(Raises(error, *args), torch.randn(2, 8), precisions=["half", "autocast-bf16"], plan=False)
    assert why(result.run("half")).text == reason
    assert result.recommendation is not None
    assert f"Not half: {reason}" in " ".join(render(result, "text").split())
    [stopped] = [d for d in result.diagnostics if d.code == "LP905"]
    assert stopped.message == f"later ops were not checked: {reason}"


@pytest.mark.parametrize(
    ("message", "shown"), [("", "KeyError (no message)"), (" \n", "KeyError (no message)"), ("a", "KeyError: a")]
)
def test_an_exception_as_text(message: str, shown: str) -> None:
    assert ExceptionInfo(type="KeyError", message=message).text == shown


def test_the_reason_of_a_mismatch_names_kind_and_type() -> None:
    raised = ExceptionInfo(type="RuntimeError", message="dtypes differ")
    run = a_run("half", "error", gaps=[a_gap(kind="dtype-mismatch")], exception=raised)
    assert why(run).text == "dtype-mismatch: RuntimeError: dtypes differ"


class Catches(nn.Linear):
    """Computes in fp32 what has no kernel in 16 bits."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        a = y.mT @ y + 10 * torch.eye(8, dtype=y.dtype)
        try:
            return a, torch.linalg.cholesky(a)
        except RuntimeError:
            return a, torch.linalg.cholesky(a.float()).to(a.dtype)


class CatchesAndRaises(Catches):
    """Fails of something else afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y, found = self.products(x)
        if y.dtype != torch.float32:
            raise ValueError("for fp32 only")
        return found


def test_a_gap_that_the_model_catches_is_no_reason() -> None:
    result = scan(CatchesAndRaises(8, 8), torch.randn(8, 8), precisions="half", plan=False, times="off")
    run = result.run("half")
    assert [gap.op for gap in run.gaps] == ["aten.linalg_cholesky_ex.default"]
    assert why(run).text == "ValueError: for fp32 only"
    [found] = [d for d in result.diagnostics if d.code == "LP101"]
    assert found.severity == "note"
    assert "the model catches this exception and continues" in found.message


class Returns(nn.Linear):
    """Returns what ``make`` makes of its output."""

    def __init__(self, make: Any, size: int = 8) -> None:
        torch.manual_seed(0)
        super().__init__(8, size)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


def test_nothing_passes_where_the_fp32_output_is_zero() -> None:
    result = scan(Returns(lambda y: y * 0), torch.randn(4, 8), plan=False, times="off")
    text = " ".join(render(result, "text").split())
    assert "could not be judged" in text
    assert "passes too" not in text


@pytest.mark.parametrize(("limit", "status"), [((), "inaccurate"), (("integers.equal=0",), "ok")])
def test_integers_that_differ_decide_beside_floats_that_pass(limit: tuple[str, ...], status: str) -> None:
    near = Returns(lambda y: (y * 1e-3 + 1, (y * 1e-3 + 1).argmax(-1)), 500)
    result = scan(near, torch.randn(64, 8), precisions="bfloat16", plan=False, times="off", limit=limit)
    assert result.run("bfloat16").status == status
    text = " ".join(render(result, "text").split())
    assert "of the integers" in text
    [found] = [d for d in result.diagnostics if d.code == "LP304" and "argmax" in (d.op or "")]
    assert found.matters is (True if status == "inaccurate" else None)
    assert ("but 0 % with the same choices in fp32" in found.message) == (status == "inaccurate")


def test_integers_that_differ_on_a_later_batch_count() -> None:
    """On the first batch no choice is close."""
    near = Returns(lambda y: ((y + 9) - 9, y.argmax(-1)) if len(y) == 1 else (y, (y * 1e-3 + 1).argmax(-1)), 500)

    def inputs(batch: int = 0) -> Tensor:
        return torch.randn(64 if batch else 1, 8, generator=torch.Generator().manual_seed(batch))

    result = scan(near, inputs, precisions="half", batches=2, plan=False, times="off")
    run, x = result.run("half"), inputs(1)
    assert run.output_error is not None
    assert run.batches is not None
    with torch.no_grad():
        ids = [near(x)[1], near.half()(x.half())[1]]
    assert run.output_error.mismatched == float((ids[0] != ids[1]).double().mean()) > 0
    assert run.batches.output_errors[1] == pytest.approx(run.output_error.mismatched)


def test_a_tolerance_is_shown_with_all_its_digits() -> None:
    result = scan(nn.Linear(8, 8), torch.randn(4, 8), precisions="half", tolerance=0.0149, plan=False, times="off")
    assert "tolerance 1.49e-02" in " ".join(screen_of(result, verbose=True).split())


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
def test_findings_name_the_reference(reference: str) -> None:
    model = Returns(lambda y: (y * 1000).exp().reciprocal())
    result = scan(model, torch.randn(4, 8), precisions="half", reference=reference, plan=False, times="off")  # type: ignore[arg-type]
    found = [d.message for d in result.diagnostics if d.code == "LP201"]
    assert found
    assert all(f"where {reference} is finite" in message for message in found)


class ByRows(nn.Linear):
    """Uses a layer only for many rows."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.many, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.many(y) if len(x) > 4 else y


def test_a_module_that_a_later_batch_reaches_is_covered() -> None:
    result = scan(ByRows(), lambda batch=0: torch.randn(4 + 4 * batch, 8), batches=2, plan=False, times="off")
    assert [d.module for d in result.diagnostics if d.code == "LP901"] == ["never"]
    [said] = [its.text for its in statements(result) if its.kind == "not-called"]
    assert said == "1 module whose parameters no op read: never"


@pytest.mark.parametrize(("spec", "is_met"), [("aten.linear:half", False), ("aten.addmm:half", True)])
def test_a_kernel_to_run_without_that_no_call_needs_is_said(spec: str, is_met: bool) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    result = scan(model, x, precisions="half", without_kernel=spec, plan=False, times="off")
    assert (result.run("half").status == "error") == is_met
    said = [its.text for its in statements(result) if its.kind == "not-withheld"]
    assert said == [] if is_met else [f"no call needed {spec}, which --without-kernel names"]


class CatchesOne(Catches):
    """Needs another kernel that is missing afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        a, found = self.products(x)
        return torch.linalg.inv(a) @ found


def test_only_the_gap_that_raises_is_the_reason() -> None:
    result = scan(CatchesOne(8, 8), torch.randn(8, 8), precisions="half", plan=False, times="off")
    assert why(result.run("half")).text.endswith("ops has no kernel: linalg_inv_ex")
    severities = {d.op: d.severity for d in result.diagnostics if d.code == "LP101"}
    assert severities == {"aten.linalg_cholesky_ex.default": "note", "aten.linalg_inv_ex.default": "error"}


# -- outputs of several tensors


class TwoOutputs(nn.Module):
    """Two layers with an inaccurate kernel each, or one whose reference is zero beside one that is wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 256), nn.Linear(16, 256)
        self.first, self.second = Product(), Product()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = 1 + 0.1 * torch.tanh(self.a(x)), 1 + 0.1 * torch.tanh(self.b(x))
        return self.first(u), self.second(v)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.prod(-1)


class WrongBesideZero(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (super().forward(x) + 500) - 500, x - ((x + 1024) - 1024)


def test_an_op_of_another_output_is_not_said_to_be_harmless() -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    result = scan(TwoOutputs().eval(), x, precisions="bfloat16", plan=False, times="off", further_inputs=0)
    run = result.run("bfloat16")
    assert run.budget is not None
    assert run.budget.next_error is not None
    assert run.budget.next_error > (run.tolerance or 1.0), "both outputs are wrong"
    products = {d.module: d.matters for d in result.diagnostics if d.code == "LP302" and "prod" in (d.op or "")}
    assert set(products) == {"first", "second"}
    assert False not in products.values()


def test_an_output_of_zeros_does_not_hide_one_that_is_wrong() -> None:
    torch.manual_seed(0)
    x = torch.randint(-64, 64, (8, 8)).float() / 64
    result = scan(WrongBesideZero(8, 8), x, precisions="bfloat16", plan=False, times="off", further_inputs=0)
    run = result.run("bfloat16")
    assert (run.status, run.compared_output) == ("inaccurate", "0")
    assert why(run).text.startswith("error 100 % of output 0, over the tolerance")


# -- autocast


class TwoHalves(nn.Module):
    """Autocast casts each half of a tensor once."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b, self.again = nn.Linear(8, 8), nn.Linear(8, 8), again

    def forward(self, x: Tensor) -> Tensor:
        u, v = (x * 2).chunk(2, -1)
        return self.a(u) + self.b(u if self.again else v)


@pytest.mark.parametrize("again", [True, False])
def test_casts_of_two_parts_of_a_tensor_repeat_nothing(again: bool) -> None:
    result = scan(TwoHalves(again), torch.randn(4, 16), precisions="autocast-bf16", plan=False, times="off")
    assert [d.code for d in result.diagnostics if d.code == "LP401"] == ["LP401"] * again


def test_no_release_is_named_for_a_mismatch_of_dtypes() -> None:
    model = Returns(lambda y: y @ torch.ones(8, 8))
    result = scan(model, torch.randn(4, 8), precisions="bfloat16", plan=False, times="off")
    [found] = helps(result, "LP103", "bfloat16")
    assert "torch release" not in (found or "")


class SparseSoftmax(nn.Linear):
    """Fails in 16 bits, also under autocast, which leaves sparse tensors alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.softmax(super().forward(x).to_sparse(), 1).to_dense()


def test_autocast_is_no_advice_where_it_fails_the_same_way() -> None:
    result = scan(SparseSoftmax(8, 8), torch.randn(8, 8), precisions=["half", "autocast-fp16"], plan=False)
    assert {run.status for run in result.runs[1:]} == {"error"}
    missing = [d for d in result.diagnostics if d.code == "LP101"]
    assert {d.precision for d in missing} == {"half", "autocast-fp16"}
    assert not [d for d in missing if "autocast" in (d.help or "")]


@pytest.mark.parametrize(
    ("autocast", "advice"),
    [
        ([], ""),
        ([a_run("autocast-fp16")], "; it runs under autocast"),
        ([a_run("autocast-fp16", "error", gaps=[a_gap()])], ""),
        ([a_run("autocast-fp16", "error", gaps=[a_gap("aten.inv.default")])], "; it runs under autocast"),
        (
            [a_run("autocast-fp16", "error", gaps=[a_gap()]), a_run("autocast-bf16")],
            "; it runs in autocast-bf16",
        ),
        ([a_run("autocast-fp16", "error", gaps=[a_gap("torch.fft.rfft")])], ""),
        ([a_run("autocast-fp16", "error", complete=False)], ""),
        ([a_run("autocast-fp16", "error", op_calls=to_columns([OpCall("aten.dot.default")]))], ""),
        (
            [a_run("autocast-fp16", "timeout", complete=False, op_calls=to_columns([OpCall("aten.dot.default")]))],
            "; it runs under autocast",
        ),
        ([a_run("autocast-fp16", "skipped")], ""),
    ],
)
def test_autocast_is_advised_if_the_op_runs_under_it(autocast: list[Run], advice: str) -> None:
    result = a_result(a_run("half", "error", gaps=[a_gap()]), *autocast)
    [found] = helps(result, "LP101")
    assert (found or "").removesuffix("; no torch release up to 2.15 supports it") == (
        f"compute it in fp32 and cast back{advice}"
    )
    for d in diagnose(result, select=["LP101"]):
        assert d.precision == "half" or "autocast" not in (d.help or "")


# -- what the device accelerates


def slow(precision: str, **more: Any) -> Run:
    calls = [OpCall("mylib.slow.default", time_ms=100.0, reference_ms=1.0)] * 2
    return a_run(precision, op_calls=to_columns(calls), **more)


KEEP = "try the modules with this op in fp32: lowprec-check plan t"


@pytest.mark.parametrize(
    ("runs", "bf16", "fp16", "advice"),
    [
        ([], True, False, KEEP),
        ([a_run("bfloat16")], True, False, "bfloat16 passes, and this device accelerates it"),
        ([a_run("bfloat16", "error")], True, False, KEEP),
        ([slow("bfloat16")], True, False, KEEP),
        ([], True, True, f"the device accelerates fp16, but not this op; {KEEP}"),
        ([], False, True, f"the device accelerates fp16, but not this op; {KEEP}"),
        ([], False, False, KEEP),
        ([], None, None, f"use a dtype that the device accelerates, or {KEEP}"),
    ],
)
def test_the_advice_about_a_slow_op_fits_the_head(
    runs: list[Run], bf16: bool | None, fp16: bool | None, advice: str
) -> None:
    result = a_result(slow("half"), *runs, bf16_accelerated=bf16, fp16_accelerated=fp16)
    assert helps(result, "LP106") == [advice]


def test_a_product_in_fp32_needs_autocast_to_be_off() -> None:
    for precision, op, advice in (
        ("half", "aten.mm.default", "compute it in fp32 and cast back"),
        ("autocast-fp16", "aten.dot.default", "compute it in fp32 and cast back"),
        ("autocast-fp16", "aten.mm.default", "compute it in fp32, without autocast, and cast back"),
    ):
        [found] = helps(a_result(a_run(precision, "error", gaps=[a_gap(op)])), "LP101", precision)
        assert (found or "").startswith(advice)


class Spectrum(nn.Module):
    """Gives complex numbers, which become real again."""

    def forward(self, x: Tensor) -> Tensor:
        rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 1j
        return torch.view_as_real(rotated).flatten(-2) + torch.fft.fft(x).abs().to(x.dtype)


def test_what_is_complex_is_not_cast_back() -> None:
    result = scan(Spectrum(), torch.randn(3, 8), precisions=["bfloat16"], plan=False, times="off")
    gaps = {gap.op: gap.gives_complex for gap in result.run("bfloat16").gaps}
    assert gaps == {"aten.view_as_complex.default": True, "torch.fft.fft": True}
    for code in ("LP101", "LP102"):
        [advice] = helps(result, code, "bfloat16")
        assert "cast back the real values computed from its result" in (advice or "")


def test_a_way_out_names_a_search_only_where_there_was_none() -> None:
    tried = Ablation(keep_fp32=["fc"], blamed_for="shares", status="ok", rel_l2=1e-3)
    failing = a_result(a_run("half", "inaccurate", ablation=tried))
    for plan, complete, more in ((False, True, True), (None, True, False), (True, True, False), (True, False, True)):
        result = msgspec.structs.replace(failing, options={"plan": plan}, complete=complete)
        [said] = [its.text for its in statements(result) if its.kind == "way-out"]
        search = "; lowprec-check plan t searches for the fewest modules" if more else ""
        assert said == f"passes with fc in fp32, error 1.0e-03{search}"


def test_modules_inside_those_that_a_plan_keeps_are_in_fp32_too() -> None:
    paths = ["layers", "layers.0", "layers.1", "layers.1.norm", "layers10", "head"]
    plan = shared_result("").plan
    assert plan is not None
    plan = msgspec.structs.replace(plan, modules=dict.fromkeys(["", *paths], "Linear"), keep_fp32=["layers"])
    assert in_fp32(plan, 7, plan) == "4 of 6 modules in fp32"
    two = msgspec.structs.replace(plan, keep_fp32=["layers", "head"])
    assert in_fp32(two, 7, None) == "2 of 6 modules in fp32"
    both = msgspec.structs.replace(two, keep_fp32_inputs=["timestep"])
    assert in_fp32(both, 7, None) == "timestep and 2 of 6 modules in fp32"
    assert in_fp32(msgspec.structs.replace(both, keep_fp32=[]), 7, None) == "timestep in fp32"


def test_the_inputs_of_a_run_are_its_batches_and_further_ones() -> None:
    further = InputsTried(kind="batches", tried=11, failed=0, worst=1e-3, low=0.0, high=0.3)
    each = BatchRanges(statuses=["ok"] * 4, output_errors=[1e-3] * 4)
    error = ErrorStats(rel_l2=1e-3, max_abs=1e-3, cosine=1.0, sqnr_db=None)
    one = a_run("half", further_inputs=further, batches=each, output_error=error, tolerance=1e-2)
    [said] = [its.text for its in statements(a_result(one)) if its.kind == "margin"]
    assert said.endswith("of the tolerance on 15 inputs")


@pytest.mark.parametrize(
    ("runs", "advice"),
    [
        ([], None),
        ([a_run("bfloat16", "error"), a_run("autocast-bf16")], "autocast-bf16 passes"),
        ([a_run("bfloat16", "error")], None),
    ],
)
def test_more_range_is_advised_only_where_it_passes(runs: list[Run], advice: str | None) -> None:
    overflows = to_columns([OpCall("aten.mm.default", introduced_inf=1, compared_values=8)])
    result = a_result(a_run("half", "nonfinite", op_calls=overflows), *runs)
    assert helps(result, "LP201") == [advice]
    narrow = a_result(a_run("bfloat16", "nonfinite", op_calls=overflows))
    assert helps(narrow, "LP201", "bfloat16") == [None]


@pytest.mark.parametrize(
    ("device", "advice"),
    [
        ("xpu:0", "run it on the CPU, or set PYTORCH_ENABLE_XPU_FALLBACK=1"),
        ("mps", "run it on the CPU, or set PYTORCH_ENABLE_MPS_FALLBACK=1"),
        ("cuda", "run it on the CPU"),
    ],
)
def test_a_fallback_variable_is_named_where_there_is_one(device: str, advice: str) -> None:
    run = a_run("half", "error", gaps=[a_gap(kind="no-backend-kernel")], device=device)
    assert (helps(a_result(run), "LP104")[0] or "").split(";")[0] == advice


def test_an_exception_without_a_line_is_at_none() -> None:
    failed = a_run("half", "error", exception=ExceptionInfo(type="UsageError", message="m"), op_calls=to_columns([]))
    result = msgspec.structs.replace(a_result(failed), model=msgspec.structs.replace(INFO, source="net.py:90"))
    [finding] = diagnose(result, select=["LP108"])
    assert finding.source is None


def test_autocast_that_changes_nothing_is_no_advice() -> None:
    result = scan(nn.ReLU(), torch.randn(3, 8), precisions=["autocast-bf16"], plan=False, times="off")
    assert verdict(result).startswith("Stay in fp32")


def test_a_wrong_output_is_answered_with_the_recommendation() -> None:
    wrong = a_run("half", "inaccurate", tolerance=1e-2, output_error=stats(0.5))
    search = "find the modules to keep in fp32: lowprec-check plan t"
    assert helps(a_result(wrong), "LP301") == [search]
    runs = [wrong, a_run("autocast-fp16", output_error=stats(1e-3), tolerance=1e-2)]
    assert helps(advised(a_result(*runs)), "LP301") == [f"autocast-fp16 passes; {search} -p half --base cast"]
    wrong = msgspec.structs.replace(wrong, latency_ms=9.0)
    faster = msgspec.structs.replace(runs[1], latency_ms=5.0)
    with_gain = [f"use autocast-fp16, or {search} -p half --base cast"]
    assert helps(advised(a_result(wrong, faster)), "LP301") == with_gain
    plan = a_run("plan", base="half", keep_fp32=["head"], output_error=stats(1e-3), tolerance=1e-2)
    assert helps(advised(a_result(wrong, plan)), "LP301") == ["keep the modules in fp32 that the recommendation names"]


@pytest.mark.parametrize(
    ("latency", "fp16", "says"),
    [
        (
            0.1,
            False,
            "autocast-fp16 passes (speed unclear). Its calls are too short to tell its speed, this device does not "
            "accelerate fp16.",
        ),
        (0.1, True, "autocast-fp16 passes (speed unclear). Its calls are too short to tell its speed."),
        (0.1, None, "autocast-fp16 passes (speed unclear). Its calls are too short to tell its speed."),
        (
            20.0,
            False,
            "Stay in fp32: autocast-fp16 is 2.0 times slower. This device does not accelerate fp16.",
        ),
        (
            10.0,
            False,
            "autocast-fp16 passes (about as fast as fp32). This device does not accelerate fp16.",
        ),
        (5.0, False, "Use autocast-fp16. 2.0 times as fast as fp32."),
    ],
)
def test_a_recommendation_fits_the_head(latency: float, fp16: bool | None, says: str) -> None:
    best = a_run("autocast-fp16", latency_ms=latency, output_error=stats(1e-3), tolerance=1e-2)
    result = conclude(a_result(best, fp16_accelerated=fp16, bf16_accelerated=True))
    assert result.recommendation is not None
    assert f"{verdict(result)}. {result.recommendation.reason}".startswith(f"{says} ")


def reason_of(*runs: Run, **environment: Any) -> str:
    advice = conclude(a_result(*runs, **environment)).recommendation
    assert advice is not None
    return advice.reason


def stats(rel_l2: float) -> ErrorStats:
    return ErrorStats(rel_l2=rel_l2, max_abs=1.0, cosine=1.0, sqnr_db=None)


def passing(precision: str, latency: float, error: float = 1e-3, **more: Any) -> Run:
    return a_run(precision, latency_ms=latency, output_error=stats(error), tolerance=1e-2, **more)


@pytest.mark.parametrize(
    ("runs", "label"),
    [
        ([passing("half", 8.0), passing("half", 7.9, 1e-4, backend="inductor")], "half"),
        ([passing("half", 8.0), passing("half", 7.9, 1e-4, memory_format="channels_last")], "half"),
        ([passing("half", 8.0), passing("half", 5.0, backend="inductor")], "half · inductor"),
        ([passing("half", 0.9), passing("half", 0.2, 1e-4, backend="jit")], "half"),
        ([passing("half", 7.0, 1e-4), passing("bfloat16", 0.2)], "bfloat16"),
        ([passing("fp32", 5.0, backend="jit")], "fp32 · jit"),
        ([passing("fp32", 5.0, backend="jit"), passing("half", 8.0)], "fp32 · jit"),
        ([passing("fp32", 9.9, backend="jit"), passing("half", 8.0)], "half"),
        ([passing("fp32", 5.0, backend="int8"), passing("half", 8.0)], "fp32 · int8"),
    ],
)
def test_a_backend_is_recommended_only_where_it_is_worth_its_set_up(runs: list[Run], label: str) -> None:
    advice = recommend([FP32, *runs], INFO)
    assert advice is not None
    assert advice.label == label


def test_the_reason_names_the_set_up() -> None:
    compiled = passing("half", 5.0, backend="inductor", setup_seconds=12.34)
    reason = reason_of(compiled)
    assert reason.startswith("2.0 times as fast as fp32. Passes on 1 of 1 input, at 10 % of the tolerance.")
    assert reason.endswith("Setting it up took 12.3 s.")


def test_rows_that_do_not_apply_are_no_part_of_the_reason() -> None:
    cut = ExceptionInfo(type="ValueError", message="x" * 200)
    skipped = a_run("bfloat16", "skipped", backend="int8", reason="int8 quantizes fp32 weights")
    told = conclude(a_result(passing("half", 5.0), skipped, a_run("bfloat16", "error", exception=cut)))
    assert told.recommendation is not None
    assert "int8" not in told.recommendation.reason
    assert any(statement.text.endswith("x…") for statement in told.statements), "a long text is cut"


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([a_run("half", "skipped", reason="no")], "Stay in fp32: nothing else could be run"),
        ([a_run("bfloat16", backend="mxfp8", without_kernels="a GPU")], "Stay in fp32: the rest is emulated"),
        (
            [a_run("fp32", "error", backend="jit")],
            "Stay in fp32: fp32 · jit did not pass here",
        ),
    ],
)
def test_what_was_tried_if_nothing_passes(runs: list[Run], says: str) -> None:
    assert verdict(a_result(*runs)) == says


def test_a_compiled_run_is_slow_only_if_it_takes_as_long_as_its_ops() -> None:
    calls = to_columns([OpCall(op="aten.mm.default", module="", time_ms=40.0, reference_ms=1.0, outcome="ok")] * 2)
    for backend, latency, shown in (("eager", 100.0, 1), ("jit", 100.0, 1), ("jit", 10.0, 0), ("jit", None, 0)):
        found = a_result(a_run("half", op_calls=calls, backend=backend, latency_ms=latency))
        messages = [d.message for d in diagnose(found) if d.code == "LP106"]
        assert len(messages) == shown, (backend, latency)
        assert all(message.endswith("in eager mode") == (backend == "jit") for message in messages)


def test_a_wrong_output_of_a_backend_has_advice_of_its_own() -> None:
    wrong = {"tolerance": 0.1, "output_error": stats(0.5), "lockstep_error": stats(1e-3)}
    quantized = a_result(a_run("fp32", "inaccurate", backend="int8", compiled=True, **wrong))
    [found] = [d for d in diagnose(quantized) if d.code == "LP301"]
    assert "causes it" not in found.message
    assert found.help is not None
    assert found.help.startswith("calibrate")
    [traced] = [d for d in diagnose(a_result(a_run("half", "inaccurate", backend="jit", **wrong))) if d.code == "LP301"]
    assert traced.message.endswith("; op by op in eager mode the error is 1.0e-03")
    reference = a_run("fp32", "ok")
    [plain] = [
        d
        for d in diagnose(a_result(reference, a_run("fp32", "inaccurate", backend="inductor", **wrong)))
        if d.code == "LP301"
    ]
    assert plain.help == "use eager mode, or another backend; report this to pytorch/pytorch", (
        "no advice for low precision"
    )
    check = CompilerCheck(
        verdict="worse", tensor=0, tensors=1, calls=1, exact="fp64", fp32_error=0.0, eager_error=0.0, compiled_error=0.5
    )
    run = a_run("half", "inaccurate", backend="inductor", compiler=check, **wrong)
    assert helps(a_result(run), "LP301") == ["see LP306 of this run"]


def advised(result: ScanResult) -> ScanResult:
    best: Recommendation | None = recommend(result.runs, INFO)
    assert best is not None
    return ScanResult(
        tool="t", target="t", model=INFO, environment=result.environment, runs=result.runs, recommendation=best
    )


# -- counts have a total


@pytest.mark.parametrize(
    ("number", "total", "shown"),
    [
        (417, 200_704, "417 of 200,704 values (0.2 %)"),
        (1, 1, "1 of 1 value (100 %)"),
        (0, 8, "0 of 8 values (0 %)"),
        (3, 0, "3 values"),
        (3, 2, "3 values"),
        (12_000, 0, "12,000 values"),
    ],
)
def test_a_count_has_its_total(number: int, total: int, shown: str) -> None:
    assert out_of([number, total], "value") == shown


class Overflows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * 0.0 + 1.0
        scale = torch.tensor([6e4, 1.0], dtype=y.dtype).repeat(y.shape[-1] // 2)
        return (y * scale) * 4.0


def found(result: ScanResult, code: str) -> list[Diagnostic]:
    return [d for d in result.diagnostics if d.code == code]


def test_values_that_overflow_are_counted_against_all() -> None:
    result = scan(Overflows(8, 8), torch.randn(4, 8), precisions=["half"], plan=False)
    [overflow] = found(result, "LP201")
    alone = "fp32 with Inf in only these places gives NaN or Inf in the output"
    shown = f"16 of 32 values (50 %) overflowed to Inf where fp32 is finite; {alone}"
    assert overflow.message == shown


class Recasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y + self.second(x)
        return torch.softmax(y, -1) @ x


def test_repeated_casts_are_one_note_for_the_model() -> None:
    result = scan(Recasts(), torch.randn(8, 8), precisions=["autocast-bf16"], plan=False)
    [churn] = found(result, "LP401")
    counts = re.match(
        r"(\d+) of (\d+) casts \(.*\) repeated or undid an earlier cast of the same tensor; (\d+) of them here",
        churn.message,
    )
    assert counts is not None, churn.message
    repeated, casts, here = map(int, counts.groups())
    assert repeated == sum(result.run("autocast-bf16").op_calls.recast) == churn.calls > 1
    assert casts == result.run("autocast-bf16").op_calls.op.count("aten._to_copy.default") > repeated
    assert 0 < here < repeated
    assert (churn.severity, churn.module, churn.help) == ("note", "", None)


def test_ops_without_a_kernel_are_counted_against_all() -> None:
    result = scan(SparseSoftmax(8, 8), torch.randn(8, 8), precisions=["half"], plan=False)
    run = result.run("half")
    assert why(run).text == f"1 of {len(set(run.op_calls.op))} ops has no kernel: sparse_softmax"
    assert why(a_run("half", "error", gaps=[a_gap()])).text == "1 op has no kernel: dot"


def test_calls_are_said_to_succeed_as_they_did() -> None:
    gaps = [a_gap(), a_gap(), a_gap(kind="dtype-mismatch"), a_gap("aten.linalg_cholesky_ex.default", "numeric-failure")]
    told = [
        s.text for s in statements(a_result(a_run("half", "error", gaps=gaps, complete=True))) if s.kind == "rescued"
    ]
    assert told == [
        "2 op calls failed in 16 bits, and succeeded when repeated with inputs in fp32; "
        "1 op call failed in 16 bits, and succeeded when repeated with inputs of one dtype; "
        "1 op call failed in 16 bits, and succeeded when repeated with the values that fp32 has there; "
        "with their results the model ran to its end"
    ]


class Covariance(nn.Module):
    """Positive definite only before its values are rounded to 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(16) * 1e-6 + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.matrix) @ x


def test_an_op_that_fails_on_rounded_values_needs_its_inputs_in_fp32() -> None:
    model = Covariance()
    for dtype in (torch.float16, torch.bfloat16):  # the advice for a missing kernel, followed
        with pytest.raises(RuntimeError, match="not positive-definite"):
            torch.linalg.cholesky(model.matrix.to(dtype).float())
    result = scan(model, torch.randn(16, 4), precisions=["half"], plan=False, times="off")
    [advice] = helps(result, "LP101")
    assert (advice or "").startswith("compute it and its inputs in fp32; no torch")
    assert helps(result, "LP305") == [
        "compute this op and its inputs in fp32"
    ]  # a dtype that a release adds does not help
    [amplifier] = found(result, "LP303")
    assert amplifier.message.startswith("this op magnifies the rounding of what it reads to a relative error of ")


def test_an_op_that_mixes_dtypes_in_a_cast_model_is_not_said_to_lack_a_kernel() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.float())

    result = scan(Mixed(), torch.randn(4, 8), precisions=["half", "autocast-fp16"], plan=False, times="off")
    assert [d.code for d in found(result, "LP103")] == ["LP103"]
    assert found(result, "LP402") == []


def test_errors_of_layers_are_no_cause_where_they_are_small() -> None:
    def advice(largest: float) -> str:
        layers = [LayerError(module="0", op="linear", local=largest, accumulated=largest)]
        run = a_run(
            "fp32",
            "inaccurate",
            backend="int8",
            output_error=ErrorStats(max_abs=0.3, rel_l2=0.3, cosine=0.9, sqnr_db=10.0),
            tolerance=0.1,
        )
        [found] = helps(a_result(msgspec.structs.replace(run, layer_errors=layers)), "LP301", "fp32")
        return found or ""

    assert advice(0.2) == "see the errors of its layers; docs/quantize.md lists other formats"
    assert "the limits in docs/quantize.md" in advice(0.02)


def test_what_no_line_of_the_user_calls_is_at_the_line_of_the_model_only_if_it_is_in_the_model() -> None:
    info = msgspec.structs.replace(INFO, source="net.py:7")
    for module, phase, line in (("0", None, "net.py:7"), ("<CrossEntropyLoss>", None, None), ("", "optimizer", None)):
        gap = msgspec.structs.replace(a_gap(), module=module, phase=phase)
        result = msgspec.structs.replace(a_result(a_run("half", "error", gaps=[gap])), model=info)
        assert [d.source for d in diagnose(result, select=["LP101"])] == [line]


def test_no_op_is_blamed_for_an_exception_of_the_model() -> None:
    rows = to_columns([OpCall(op="aten.addmm.default", local_error=1e-3, source="net.py:9")])
    assert culprits(a_run("half", "inaccurate", op_calls=rows))
    assert not culprits(a_run("half", "error", op_calls=rows, exception=ExceptionInfo(type="ValueError", message="no")))


@pytest.mark.parametrize(("line", "shown"), [(7, True), (9, False)])
def test_an_exception_of_the_model_that_stops_the_analysis_too_is_an_error(line: int, shown: bool) -> None:
    at = [("bad <C object at 0x7f01>", 7), ("bad <C object at 0x7f02>", line)]
    raised, by = (ExceptionInfo(type="ValueError", message=text, source=f"net.py:{number}") for text, number in at)
    run = a_run("half", "error", exception=raised, complete=False, stopped_by=by)
    found = {each.code: each.severity for each in diagnose(a_result(run), select=["LP108", "LP905"])}
    assert found == ({"LP108": "error"} if shown else {}) | {"LP905": "warning"}


def test_ops_of_eager_mode_explain_another_backend_only_if_both_fail_alike() -> None:
    calls = to_columns([OpCall(op="aten.mul.Tensor", source="net.py:9", introduced_inf=3, compared_values=8)])
    infinite = ErrorStats(rel_l2=None, max_abs=1.0, cosine=None, sqnr_db=None)
    for backend, status, shown in (
        ("eager", "inaccurate", True),
        ("onnxruntime", "nonfinite", True),
        ("onnxruntime", "inaccurate", False),
        ("onnxruntime", "ok", False),
    ):
        run = a_run("half", status, backend=backend, op_calls=calls, lockstep_error=infinite, complete=True)
        assert bool(diagnose(a_result(run), select=["LP201"])) == shown, (backend, status)


@pytest.mark.parametrize("eager_error", [1e-3, 0.5])
@pytest.mark.parametrize("fp32_status", ["ok", "inaccurate", None])
def test_a_backend_is_blamed_if_fp32_fails_there_or_ops_in_eager_mode_pass(
    eager_error: float, fp32_status: str | None
) -> None:
    found = {"backend": "jit", "tolerance": 0.05, "complete": True}
    stats = ErrorStats(rel_l2=eager_error, max_abs=1.0, cosine=1.0, sqnr_db=None)
    run = a_run("bfloat16", "inaccurate", lockstep_error=stats, **found)
    runs = [FP32, run, *([a_run("fp32", fp32_status, **found)] if fp32_status else [])]
    if fp32_status is None:
        assert not blames_backend(
            msgspec.structs.replace(run, failed_call=2), runs
        )  # eager mode was analyzed in the first
    assert blames_backend(run, runs) == (eager_error < 0.05 or fp32_status == "inaccurate")


def test_a_plan_that_keeps_a_container_is_not_smaller_than_one_that_keeps_two_of_its_modules() -> None:
    run = a_run("half", "ok", latency_ms=1.0, keep_fp32=["body"])
    attempt = Attempt(base="half", status="error", why="no", kept=10, outcome="passes")
    container = Proposal(attempt=attempt, run=run)
    two = Proposal(
        attempt=msgspec.structs.replace(attempt, kept=2),
        run=msgspec.structs.replace(run, keep_fp32=["body.a", "body.b"]),
    )
    assert best([container, two]) is two


def test_a_base_that_is_slower_than_a_plan_is_shown_on_the_batch_on_which_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(status: str, ms: float) -> Run:
        return a_run("half", status, latency_ms=ms)

    plan = Proposal(attempt=Attempt(base="bfloat16", status="ok", why="", outcome="passes"), run=timed("ok", 10.0))
    proposer = Proposer([], Objective(FP32), Limits())
    found = proposer.propose([timed("ok", 30.0), timed("inaccurate", 30.0)], best_so_far=plan).attempt
    assert (found.status, found.outcome) == (
        "inaccurate",
        "not searched: its fastest call took 3.0 times as long as the fastest with the plan found",
    )
    quantized = [a_run("bfloat16", status, backend="int8") for status in ("ok", "inaccurate")]
    for keeps, reason in (
        (True, "the errors of its layers are not known"),
        (False, "int8 quantizes modules that are kept in fp32, too"),
    ):
        monkeypatch.setattr(trials, "keeps_layers", lambda _, keeps=keeps: keeps)
        found = proposer.propose(quantized).attempt
        assert (found.status, found.outcome) == ("inaccurate", f"not searched: {reason}")


class Nearest(nn.Module):
    """Chooses a row by rounded scores, and casts what it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.rows = nn.Linear(16, 64), nn.Embedding(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.scores(x).argmax(-1)).float()


@pytest.mark.parametrize("precision", ["autocast-bf16", "bfloat16"])
def test_casts_are_no_code_that_depends_on_the_dtype(precision: str) -> None:
    torch.manual_seed(0)
    result = scan(Nearest(), torch.randn(300, 16), precisions=precision, plan=False, times="off")
    [flip] = [found for found in result.diagnostics if found.code == "LP304"]
    assert (flip.op, flip.severity) == ("aten.argmax.default", "warning")
    assert "depends on the dtype" not in (flip.help or "")


class LargeSum(nn.Module):
    """A sum in ``forward`` itself, of what a layer gives, exceeds fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * 1e5).sum(-1).square().log()


class OfLargeInputs(nn.Module):
    """Depends on differences of inputs that are far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - 3000.0)


@pytest.mark.parametrize(
    ("model", "inputs", "advice"),
    [
        (LargeSum(), torch.randn(4, 8), "find a patch, such as ops in fp32: lowprec-check fix TARGET -p half"),
        (
            OfLargeInputs(),
            torch.randn(64, 8) + 3000.0,
            "find the inputs and modules to keep in fp32: lowprec-check plan TARGET",
        ),
        (nn.Sequential(LargeSum()), torch.randn(4, 8), "find the modules to keep in fp32: lowprec-check plan TARGET"),
    ],
    ids=["own code", "input", "module"],
)
def test_a_plan_is_advised_only_where_a_module_in_fp32_may_help(model: nn.Module, inputs: Tensor, advice: str) -> None:
    result = scan(model.eval(), inputs, precisions="half", plan=False, times="off", further_inputs=0)
    [mismatch] = [found for found in result.diagnostics if found.code == "LP301"]
    assert mismatch.help == advice
