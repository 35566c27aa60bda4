"""A backend must do what the model does in eager mode: on other inputs, to its inputs and buffers, in its dtypes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from conftest import Register
from helpers import runs_here, scan_here
from shared_result import latency, shared_result
from shared_result import run as a_run
from torch import Tensor, nn

from lowprec_check import Backend, Run, ScanResult
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.run_summary import passes_all
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import why
from lowprec_check.analysis.suspects import suspects
from lowprec_check.compat.scan_process import Request, row_of
from lowprec_check.core import target_runs
from lowprec_check.engine.model.input_draws import changed_inputs
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.target import make_target
from lowprec_check.report.registry import render
from lowprec_check.schema.axes import project_of
from lowprec_check.schema.backend_checks import BackendCheck, CompilerRemark
from lowprec_check.schema.findings import Gap
from lowprec_check.schema.op_calls import to_columns
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.torchkit.compiled import forget_compiled, graph_breaks
from lowprec_check.torchkit.devices import rounds_to_tf32

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two layers, and what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, y: Tensor) -> Tensor:
        return y.relu()


class Planted(Backend):
    """Calls the model, and does something else too."""

    name, summary = "planted", "planted"

    def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
        self._call = call

    def prepare(self, model: Any, example: Any) -> Any:
        return lambda x: self._call(model, x)


def scanned(model: nn.Module, backends: str, inputs: Any = X, **more: Any) -> ScanResult:
    options: dict[str, Any] = {"precisions": "fp32", "plan": False, "errors": "none", "further_inputs": 0}
    return scan_here(model.eval(), inputs, backends=backends, **options | more)


def planted(register: Register, call: Callable[[nn.Module, Tensor], Any], **more: Any) -> tuple[Run, ScanResult]:
    register(Planted(call))
    result = scanned(Net(), "eager,planted", **more)
    return result.run("fp32", "planted"), result


def codes(result: ScanResult, backend: str) -> list[tuple[str, str]]:
    return [(d.code, d.severity) for d in result.diagnostics if d.backend == backend]


# -- other inputs


def at_mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x if x.mean() > X.mean() - 0.2 * X.std() else x - 1)


def for_rows(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(x[: len(X)]), model(x[len(X) :]) + 1])


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    row = int((x - X[3]).square().sum(-1).argmin())
    return y if row == 3 else y.roll(1, 0)


def clipped(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.clamp(-4, 4))


@pytest.mark.parametrize(
    ("call", "change"),
    [
        (for_rows, "larger-batch"),
        (in_place, "negated"),
        (clipped, "scaled"),
        (lambda m, x: m(x.abs() * X.sign()), "negated"),
    ],
)
def test_a_backend_that_is_right_on_one_input_fails(register: Register, call: Any, change: str) -> None:
    run, result = planted(register, call)
    assert (run.status, run.failed_input) == ("inaccurate", change)
    assert run.output_error is not None
    changed = dict(changed_inputs(make_target(Net(), X), 0))[change][0][0]  # type: ignore[index]
    model = Net().eval()
    with torch.no_grad():
        expected = (call(model, changed) - model(changed)).norm() / model(changed).norm()
    assert run.output_error.rel_l2 == pytest.approx(float(expected), rel=1e-3)
    assert result.recommendation is None
    assert ("LP301", "error") in codes(result, "planted")
    assert "compared with eager mode" in render(result, "text")


def test_a_result_of_the_call_before_is_found(register: Register) -> None:
    kept: list[Tensor] = []

    def stale(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(model(x))
        return kept[-2] if len(kept) > 1 else kept[-1]

    run, _ = planted(register, stale)
    assert (run.status, run.failed_input) == ("inaccurate", "negated")


def test_an_exception_on_other_values_fails_and_one_on_another_shape_does_not(register: Register) -> None:
    def only_positive_sums(model: nn.Module, x: Tensor) -> Tensor:
        if x.sum() * X.sum() < 0:
            raise ValueError("not compiled for this")
        return model(x)

    run, _ = planted(register, only_positive_sums)
    assert (run.status, run.failed_input) == ("error", "negated")
    assert run.exception is not None
    assert run.exception.message == "not compiled for this"

    def only_its_shape(model: nn.Module, x: Tensor) -> Tensor:
        if x.shape != X.shape:
            raise ValueError("bound to its shape")
        return model(x)

    run, _ = planted(register, only_its_shape)
    assert run.status == "ok"
    assert run.backend_check is not None
    assert [(its.change, its.status) for its in run.backend_check.inputs][-1] == ("larger-batch", "error")


def test_a_crash_on_changed_inputs_is_the_status(register: Register) -> None:
    def dies(model: nn.Module, x: Tensor) -> Tensor:
        if x.sum() * X.sum() < 0:
            os.abort()
        return model(x)

    run, _ = planted(register, dies, isolation="fork")
    assert (run.status, run.failed_input) == ("crashed", "negated")


class Branch(Net):
    def between(self, y: Tensor) -> Tensor:
        return y.relu() if y.sum() > 0 else y.abs()


class Number(Net):
    def between(self, y: Tensor) -> Tensor:
        return y * (1 + int(y.abs().sum().item()) % 7)


class Array(Net):
    def between(self, y: Tensor) -> Tensor:
        return y / float(y.detach().float().numpy().max())


@pytest.mark.parametrize("model", [Branch, Number, Array])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_a_trace_of_code_that_depends_on_data_fails_with_the_warning_of_its_line(model: Any, precision: str) -> None:
    result = scanned(model(), "eager,jit", precisions=f"fp32,{precision}")
    run = result.run(precision, "jit")
    assert (run.status, run.failed_input is not None) == ("inaccurate", True)
    assert result.recommendation is None or result.recommendation.backend == "eager"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.trace(model().eval(), X, check_trace=False)
    expected = [f":{w.lineno}" for w in caught if "TracerWarning" in w.category.__name__ and w.filename == __file__]
    found = [d for d in result.diagnostics if d.code == "LP309" and d.precision == precision]
    assert expected
    assert {d.source and f":{d.source.rpartition(':')[2]}" for d in found} == set(expected)
    assert all(d.severity == "warning" for d in found)
    [wrong] = [d for d in result.diagnostics if d.code == "LP301" and d.precision == precision]
    assert wrong.help is not None
    assert "LP309" in wrong.help
    assert "plan" not in wrong.help


# -- healthy rows


class Draws(Net):
    def between(self, y: Tensor) -> Tensor:
        return nn.functional.dropout(y, 0.3, training=True)


class Chaotic(Net):
    """Magnifies rounding errors until nothing is left of the result."""

    def between(self, y: Tensor) -> Tensor:
        y = y.sigmoid()
        for _ in range(12):
            y = 3.9 * y * (1 - y)
        return y


class Sorted(Net):
    """Fails on most changed inputs, and gives NaN on negated ones."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(X):
            raise ValueError("made for one batch size")
        return super().forward((x - X.min()).sqrt())


@pytest.mark.parametrize("model", [Net, Draws, Chaotic, Sorted])
def test_healthy_backends_pass(model: Any, register: Register) -> None:
    register(Planted(lambda model, x: model(x.clone())))
    result = scanned(model(), "eager,jit,planted", precisions="fp32,bfloat16,autocast-bf16")
    for run in result.runs:
        if run.backend != "eager":
            eager = result.run(run.precision)
            assert (run.status, run.failed_input) == (eager.status, None), run.key.label
            severe = [code for code, severity in codes(result, run.backend) if severity != "note" and code != "LP301"]
            assert severe == [], run.key.label
            if run.status == "ok":
                assert run.backend_check is not None
                assert len(run.backend_check.inputs) >= (2 if model is Sorted else 5)


def test_eager_rows_are_not_checked() -> None:
    result = scanned(Net(), "eager", precisions="bfloat16")
    assert [run.backend_check for run in result.runs] == [None, None]


def test_changed_inputs_are_those_of_the_target_with_one_change() -> None:
    mask, ids = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[5, 3, 9], [4, 8, 2]])
    x = torch.randn(2, 3)
    found = dict(changed_inputs(make_target(nn.Identity(), (x, mask, ids)), 0))
    assert list(found) == ["negated", "scaled", "reversed", "resampled", "larger-batch"]
    tensors = {name: args for name, (args, _) in found.items()}
    assert torch.equal(tensors["negated"][0], -x)
    assert torch.equal(tensors["scaled"][0], 4 * x)
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(tensors["reversed"], (x, mask, ids), strict=True))
    assert torch.equal(tensors["larger-batch"][2], ids[[0, 1, 0]])
    for name in ("negated", "scaled"):
        assert torch.equal(tensors[name][1], mask)
        assert torch.equal(tensors[name][2], ids)


# -- inputs, buffers and dtypes


def overwrites(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    x.zero_()
    return y


def counts_in_a_buffer(model: nn.Module, x: Tensor) -> Tensor:
    model.seen.add_(1)  # type: ignore[operator]
    return model(x)


@pytest.mark.parametrize(("call", "changed"), [(overwrites, "input 0"), (counts_in_a_buffer, "buffer seen")])
def test_a_backend_that_changes_what_eager_mode_leaves_does_not_pass(
    register: Register, call: Any, changed: str
) -> None:
    run, result = planted(register, call)
    assert run.backend_check is not None
    assert run.backend_check.changed == [changed]
    assert not passes_all(run, result.runs)
    assert result.recommendation is None
    assert codes(result, "planted") == [("LP308", "error")]


def test_another_dtype_is_a_finding(register: Register) -> None:
    run, result = planted(register, lambda model, x: model(x).double())
    assert run.backend_check is not None
    assert (run.status, run.backend_check.dtypes) == ("ok", [("float32", "float64")])
    assert codes(result, "planted") == [("LP308", "warning")]


def test_other_random_numbers_are_no_verdict(register: Register) -> None:
    own = torch.Generator()
    register(Planted(lambda model, x: model(x) * torch.rand(4, generator=own)))
    run = scanned(Draws(), "planted").runs[-1]
    assert (run.status, run.output_error) == ("unjudged", None)
    assert any("draws other random numbers" in note for note in run.notes)


# -- fp32 on a backend, and where faults are reported


INFO = ModelInfo(name="Net", parameters=1, inputs=["(8, 16)"], modules=3, training=False)


def test_fp32_on_a_backend_is_recommended_if_it_is_faster() -> None:
    reference = a_run("fp32", "ok", latency_ms=10.0)
    slow = a_run("bfloat16", "ok", latency=latency(10.0, 1.0))
    for ratio, expected in ((2.0, ("fp32", "jit")), (0.5, ("bfloat16", "eager"))):
        best = recommend(
            [reference, slow, a_run("fp32", "ok", backend="jit", latency=latency(10 / ratio, ratio))], INFO
        )
        assert best is not None
        assert (best.precision, best.backend) == expected


def test_fp32_on_a_backend_that_is_not_known_to_be_faster_is_not_used(register: Register) -> None:
    _, result = planted(register, lambda model, x: model(x).double())
    assert result.recommendation is not None
    assert result.recommendation.stay_in_fp32
    assert verdict(result) == "Stay in eager fp32: fp32 · planted was not measured to be faster"


def test_only_what_is_calibrated_is_to_be_calibrated_on_other_data() -> None:
    for backend, calibrated in (("int8", True), ("int8-smoothquant", True), ("int8-dynamic", False)):
        failed = a_run("fp32", "inaccurate", backend=backend, rel_l2=0.5, tolerance=0.1)
        result = conclude(msgspec.structs.replace(shared_result(), runs=[a_run("fp32", "ok"), failed]))
        advice = [d.help or "" for d in result.diagnostics if (d.code, d.backend) == ("LP301", backend)]
        assert ["calibrate on data" in text for text in advice] == [calibrated]


def test_an_error_that_knows_what_to_do_says_so() -> None:
    raised = ExceptionInfo(
        type="UsageError", message="The model is in training mode.", hint="Call model.eval() in your file."
    )
    for hint, advice in ((raised.hint, raised.hint), (None, "use the eager backend, or fix this exception")):
        failed = a_run("fp32", "error", backend="int8", exception=msgspec.structs.replace(raised, hint=hint))
        [found] = [
            d
            for d in conclude(msgspec.structs.replace(shared_result(), runs=[a_run("fp32", "ok"), failed])).diagnostics
            if d.code == "LP108"
        ]
        assert found.help == advice


def test_a_backend_without_code_prints_none(register: Register) -> None:
    _, result = planted(register, lambda model, x: model(x))
    assert result.recommendation is not None
    assert result.recommendation.code.splitlines() == [
        "# the project of planted gives no code to paste for the backend planted: see its documentation"
    ]


def test_faults_are_reported_to_their_project() -> None:
    assert [project_of(name) for name in ("jit", "inductor", "inductor-freeze")] == 3 * ["pytorch/pytorch"]
    assert project_of("int8") == "pytorch/ao"
    assert project_of("ipex") == "intel/intel-extension-for-pytorch"


# -- torch.compile: what it failed on, and graph breaks


@torch.library.custom_op("backend_check::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("this fake kernel is broken")


class Broken(Net):
    def between(self, y: Tensor) -> Tensor:
        return twice(y)


def test_a_failure_to_compile_names_its_innermost_cause() -> None:
    with pytest.raises(RuntimeError, match="this fake kernel is broken") as caught, torch.no_grad():
        torch.compile(Broken().eval(), backend="eager")(X)
    found = describe_error(caught.value, Broken())
    assert (found.type, found.message) == ("ValueError", "this fake kernel is broken")
    assert found.source is not None
    assert "test_backend_check.py" in found.source


def test_graph_breaks_have_their_line_and_reason() -> None:
    forget_compiled()
    with torch.no_grad():
        torch.compile(Number().eval(), backend="eager")(X)
    found = graph_breaks()
    forget_compiled()
    [(text, line)] = set(found)  # that of the function, and that of its caller, in which it was inlined before
    assert "item" in text
    assert line is not None
    assert "test_backend_check.py" in line
    assert graph_breaks() == []


def test_graph_breaks_are_said_where_eager_mode_fails(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    class Inverse(Net):
        def between(self, y: Tensor) -> Tensor:
            return torch.linalg.inv(y[:8, :8]).new_zeros(8, 16)

    monkeypatch.setattr(
        "lowprec_check.features.backend_checks.run.graph_breaks", lambda: [("control flow", "a.py:3")] * 2
    )  # compiled twice
    register(Planted(lambda model, x: model.float()(x.float()).half()))
    result = scanned(Inverse(), "eager,planted", precisions="half")
    assert result.run("half").status == "error"
    run = result.run("half", "planted")
    assert run.status == "ok"
    assert run.backend_check is not None
    assert [(remark.text, remark.count) for remark in run.backend_check.remarks] == [("control flow", 1)]


def test_graph_breaks_are_counted_in_the_table() -> None:
    remarks = [CompilerRemark(kind="graph-break", text="control flow", source="a.py:3", count=2)]
    run = a_run("fp32", "ok", backend="inductor", backend_check=BackendCheck(remarks=remarks))
    found = ScanResult(tool="t", target="t", model=INFO, environment={}, runs=[a_run("fp32", "ok"), run])
    said = [its.text for its in statements(found) if its.kind == "compiler-remarks"]
    assert said == ["2 graph breaks (LP310)"]


def test_fp32_may_have_the_error_of_tf32_where_a_device_rounds_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN does so by default: eager mode and a compiler choose other kernels and differ by 1e-3; both are right."""
    cuda, convolution, product = torch.device("cuda"), "aten.convolution.default", "aten.addmm.default"
    for allowed in ((True, False), (False, True), (False, False)):
        with monkeypatch.context() as settings:
            settings.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=allowed[0]))
            matmul = SimpleNamespace(allow_tf32=allowed[1])
            settings.setattr(torch.backends, "cuda", SimpleNamespace(matmul=matmul))
            assert [rounds_to_tf32(cuda, [op]) for op in (convolution, product, "aten.relu.default")] == [
                *allowed,
                False,
            ]
            assert rounds_to_tf32(cuda, [convolution, product]) == any(allowed)
            assert not rounds_to_tf32(torch.device("cpu"), [convolution, product])

    def rounds(device: torch.device, ops: set[str]) -> bool:
        return bool(ops)

    monkeypatch.setattr(target_runs, "rounds_to_tf32", rounds)
    with runs_here(Net(), X) as runs:
        assert runs.tolerance("fp32", "jit") == 1e-3
        runs.reference()
        assert [runs.tolerance(name, "jit") for name in ("fp32", "half", "bfloat16")] == [1e-2, 1e-2, 5e-2]
    with runs_here(Net(), X, tolerance=1e-4) as runs:
        runs.reference()
        assert runs.tolerance("fp32", "jit") == 1e-4


# -- what libraries do and say


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y + self.calls


class Replaces(Counts):
    def between(self, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return y + self.calls


class Remembers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def between(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y + self.calls


class Rewrites(Counts):
    def between(self, y: Tensor) -> Tensor:
        self.calls.copy_(torch.zeros(()))
        return y + self.calls


@pytest.mark.parametrize("kind", [Counts, Replaces, Remembers])
def test_a_trace_of_a_model_with_state_is_not_blamed_on_torch(kind: type[Net]) -> None:
    result = scanned(kind(), "eager,jit")
    assert result.run("fp32", "jit").status == "inaccurate"
    [mismatch] = [found for found in result.diagnostics if found.code == "LP301"]
    assert "tracing calls the model, which changes" in (mismatch.help or "")
    assert "calls" in (mismatch.help or "")
    assert "report" not in (mismatch.help or "")
    assert not [found for found in result.diagnostics if found.code == "LP309"]  # no compiler has warned


@pytest.mark.parametrize("kind", [Net, Rewrites])
def test_a_traced_model_without_state_has_no_remark(kind: type[Net]) -> None:
    check = scanned(kind(), "eager,jit").run("fp32", "jit").backend_check
    assert check is not None
    assert check.remarks == []


def test_an_op_between_casts_is_not_why_a_run_fails() -> None:
    gap = Gap(
        op="aten.relu.default",
        layer="backend",
        kind="missing-kernel",
        module="",
        source="net.py:1",
        dtypes=["float16"],
        message="ONNX Runtime has no fp16 kernel on the CPU: it computes this op in fp32, between two casts",
        rescued=False,
    )
    failed = ExceptionInfo(type="RuntimeException", message="MLFloat16 is not supported with ScatterElements")
    run = a_run("half", "error", backend="onnxruntime", gaps=[gap], exception=failed, op_calls=to_columns([]))
    assert why(run).text == "RuntimeException: MLFloat16 is not supported with ScatterElements"
    result = conclude(msgspec.structs.replace(shared_result(""), runs=[a_run("fp32", "reference"), run]))
    assert codes(result, "onnxruntime") == [("LP101", "note"), ("LP108", "error")]
    assert suspects(run).certain == []
    (cell,) = row_of(result, Request("net.py"), 1.0, {}).cells
    assert cell.first_gap is None


def test_a_program_of_torch_export_is_in_no_training_mode() -> None:
    program = torch.export.export(Net().eval(), (X,)).module()
    assert program.training
    target = make_target(program, X)
    assert not [note for note in target.notes if "training mode" in note]
    assert [note for note in make_target(Net().train(), X).notes if "training mode" in note]


class DrawsInHalf(nn.Module):
    """Draws random numbers in half only, and is called as code that rounds otherwise than eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.rand_like(y) if y.dtype == torch.half else y


def test_a_run_whose_verdict_is_withdrawn_keeps_its_time() -> None:
    def rounds_otherwise(graph: Callable[..., Any], _: Any) -> Callable[..., Any]:
        return lambda *args: [out * 1.01 for out in graph(*args)]

    compiled = torch.compile(DrawsInHalf().eval(), backend=rounds_otherwise)
    run = scan_here(compiled, torch.ones(2, 8), precisions="half", plan=False, times="on").run("half")
    assert (run.status, run.random, run.compiled) == ("unjudged", True, True)
    assert run.latency_ms is not None
    assert run.setup_seconds is not None
