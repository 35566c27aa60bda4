"""Properties of the instrumented run, on generated models: it changes no output, finds all gaps, restores state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import run_bare
from generated import Chain, Step, build, chains, chains_with_gaps, inputs
from helpers import DEFAULT, LOW, gap_ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fix_and_rerun
from torch import Tensor, nn

from lowprec_check.core.trace.execution import Emulation
from lowprec_check.core.trace.ops import dtype_flow
from lowprec_check.schema.precisions import BF16, FP16, FP32
from lowprec_check.torchkit.pytree import leaves

many = settings(max_examples=25, deadline=None)


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for (_, x), (_, y) in pairs)


@many
@given(kinds=chains, precision=st.sampled_from(LOW), training=st.booleans())
def test_the_instruments_do_not_change_the_output(kinds: list[type[Step]], precision: str, training: bool) -> None:
    plain, found = run(build(kinds, training=training), (inputs(),), precision)
    assert plain.status in ("ok", "inaccurate")
    assert found.complete
    assert not found.gaps
    assert found.perturbed is False


@pytest.mark.slow
@many
@given(kinds=chains_with_gaps, precision=st.sampled_from(LOW))
def test_status_is_that_of_the_bare_model(kinds: list[type[Step]], precision: str) -> None:
    plain, _ = run(build(kinds), (inputs(),), precision)
    output = raised = None
    try:
        output = run_bare(build(kinds), (inputs(),), precision)
    except Exception as error:
        raised = type(error).__name__
    if output is None:
        assert plain.status == "error"
        assert plain.exception is not None
        assert plain.exception.type == raised
        return
    reference = run_bare(build(kinds), (inputs(),), "fp32")
    error = float((output.double() - reference.double()).norm() / reference.double().norm())
    tolerance = 5e-2 if "bf" in precision else 1e-2
    assert plain.status == ("ok" if error <= tolerance else "inaccurate")
    assert plain.output_error is not None
    assert plain.output_error.rel_l2 == pytest.approx(error, rel=1e-6)


@many
@given(kinds=chains_with_gaps, precision=st.sampled_from(("half", "bfloat16")))
def test_one_pass_finds_the_gaps_of_repeated_fixing_and_rerunning(kinds: list[type[Step]], precision: str) -> None:
    _, found = run(build(kinds), (inputs(),), precision)
    assert found.complete, found.stopped_by
    assert gap_ops(found) == fix_and_rerun(lambda: build(kinds), inputs(), precision)


@pytest.mark.slow
@many
@given(kinds=chains, precision=st.sampled_from(LOW), wide=st.sampled_from((torch.float32, torch.float64)))
def test_lockstep_reference_equals_the_model_in_the_wide_dtype(
    kinds: list[type[Step]], precision: str, wide: torch.dtype
) -> None:
    """If no decision depends on rounding, the accumulated error of the output is the difference of two bare runs."""
    kinds = [kind for kind in kinds if kind.__name__ not in ("Select", "Indexed")]
    if not kinds:
        return
    _, found = run(build(kinds), (inputs(),), precision, options=DEFAULT._replace(wide=wide))
    low = run_bare(build(kinds), (inputs(),), precision).double()
    reference = run_bare(build(kinds).to(wide), (inputs().to(wide),), "fp32").double()
    assert found.lockstep_error is not None
    expected = float((low - reference).norm() / reference.norm())
    assert found.lockstep_error.rel_l2 == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("errors", ["both", "accumulated", "none"])
def test_only_the_requested_errors_are_recorded(errors: Any) -> None:
    model = build([type_of("Residual"), type_of("Norm")])
    _, found = run(model, (inputs(),), "bfloat16", options=DEFAULT._replace(errors=errors))
    columns = found.op_calls
    assert any(columns.local_error) == (errors == "both")
    assert any(columns.accumulated_error) == (errors != "none")
    assert "aten.addmm.default" in columns.op


def type_of(name: str) -> type[Step]:
    import generated

    kind: type[Step] = getattr(generated, name)
    return kind


class Tied(nn.Module):
    """A shared module, tied weights, a dropout in training, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.dropout(self.first(x))
        return {"out": self.second(self.first(x)), "pair": (x, [x + 1])}


@pytest.mark.parametrize("precision", LOW)
def test_dropout_follows_the_low_precision_run(precision: str) -> None:
    plain, found = run(Tied().train(), (inputs(),), precision)
    assert plain.random
    assert found.perturbed is False
    assert found.lockstep_error is not None
    assert found.lockstep_error.rel_l2 is not None
    assert found.lockstep_error.rel_l2 < 0.05


def test_complex_and_integer_tensors_are_recorded() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            wave = torch.polar(torch.ones(8), torch.arange(8.0))
            turned = torch.view_as_real(wave * x.float()).sum(-1).to(x.dtype) * self.scale
            return turned[ids], ids + 1

    _, found = run(Mixed(), (inputs(), torch.tensor([1, 2])), "bfloat16")
    assert found.complete
    assert found.perturbed is False


@pytest.mark.parametrize("name", ["encoder", "lstm", "conv", "attention"])
def test_fast_paths_are_kept(name: str) -> None:
    """Modules that check for hooks and modes before they use their fused path."""
    torch.manual_seed(0)
    models: dict[str, tuple[nn.Module, Tensor]] = {
        "encoder": (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
            ),
            torch.randn(2, 5, 16),
        ),
        "lstm": (nn.LSTM(8, 8, 2), torch.randn(5, 2, 8)),
        "conv": (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2)),
            torch.randn(2, 3, 9, 9),
        ),
        "attention": (AttentionOnly(), torch.randn(2, 5, 16)),
    }
    model, x = models[name]
    _, found = run(model.eval(), (x,), "bfloat16")
    assert found.complete
    assert found.perturbed is False
    if name == "encoder":
        assert "aten._transformer_encoder_layer_fwd.default" in found.op_calls.op


class AttentionOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Mismatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.ones(4, 8)) + self.linear(x)[:4]


def test_a_dtype_mismatch_is_not_a_missing_kernel() -> None:
    plain, found = run(Mismatch(), (inputs(),), "half")
    assert plain.status == "error"
    assert [(gap.kind, gap.module) for gap in found.gaps] == [("dtype-mismatch", "linear")]
    assert found.complete


class BesideFloat64(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        square = x[:, :4] + torch.eye(4, dtype=x.dtype)
        right = x if x.dtype == torch.float32 else x.double()
        return self.linear(torch.linalg.solve(square, right).float())


def test_a_mismatch_with_fp64_of_an_op_without_kernel_hides_no_other_gap() -> None:
    _, found = run(BesideFloat64(), (inputs()[:4],), "half")
    assert [(gap.kind, gap.op) for gap in found.gaps] == [
        ("dtype-mismatch", "aten._linalg_solve_ex.default"),
        ("dtype-mismatch", "aten.addmm.default"),
    ]
    assert found.complete


class FailsBothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.dtype == torch.half:
            return x @ torch.ones(3, 3, dtype=x.dtype)
        return x


def test_an_error_of_the_model_itself_is_raised() -> None:
    _, found = run(FailsBothWays(), (inputs(),), "half")
    assert not found.gaps
    assert not found.complete
    assert found.stopped_by is not None
    assert "cannot be multiplied" in found.stopped_by.message


def test_a_numeric_failure_continues_with_the_reference() -> None:
    class NearlySingular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            gram = x[:4, :4] @ x[:4, :4].T * 0 + 1 + self.eye * 1e-4
            return torch.linalg.cholesky(gram).sum() + torch.quantile(x, 0.5)

    plain, found = run(NearlySingular(), (inputs(),), "bfloat16")
    assert plain.status == "error"
    assert found.complete
    assert {"numeric-failure", "unsupported-dtype"} <= {gap.kind for gap in found.gaps}


def test_every_call_has_source_and_module() -> None:
    _, found = run(build([type_of("Norm"), type_of("Select")]), (inputs(),), "half")
    assert len(found.op_calls) > 3
    for row in found.op_calls.rows():
        assert row.source is not None
        assert row.source.split(":")[0].endswith("generated.py")
        assert row.module.startswith("steps.")


def test_dtypes_are_shown_by_the_marks_of_their_formats() -> None:
    tensors = {known.mark: torch.ones(1, dtype=getattr(torch, known.name)) for known in (FP16, BF16, FP32)}
    for mark, tensor in tensors.items():
        assert dtype_flow([tensor], [torch.ones(1).double(), torch.ones(1).int()]) == f"{mark}→f64"
    assert dtype_flow(list(tensors.values()), []) == "bf16+f16+f32→"


def test_uncalled_modules_are_named_by_their_root() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(8, 8)
            self.unused = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.by_weight = nn.Linear(8, 8)
            self.idle = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.used(x), self.by_weight.weight)

    _, found = run(Partly(), (inputs(),), "half")
    assert found.uncalled_modules == ["unused"]


def test_twins_are_freed_with_their_storage() -> None:
    from lowprec_check.core.trace.twins import Twins

    twins = Twins()
    low = torch.randn(4).half()
    twins.set_reference(low, torch.randn(4))
    view = low[1:]
    del low
    assert len(twins.by_storage) == 1
    assert twins.reference_of(view).shape == (3,)
    del view
    assert not twins.by_storage


@pytest.mark.parametrize("precision", LOW)
def test_model_hooks_and_global_state_are_restored(precision: str) -> None:
    model = build([type_of(n) for n in ("BatchNorm", "BufferWrite", "Residual", "Quantile")], training=True)
    handle = model.steps[0].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    x = inputs()
    kept = x.clone()
    torch.manual_seed(7)
    rng = torch.get_rng_state()
    run(model, (x,), precision)
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.equal(x, kept)
    assert model.training
    assert len(model.steps[0]._forward_hooks) == 1
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    handle.remove()
    assert isinstance(model, Chain)
    from torch.nn.modules import module as module_globals

    assert not module_globals._global_forward_hooks
    assert not module_globals._global_forward_pre_hooks


def test_a_cast_that_was_slow_once_still_casts() -> None:
    """On a busy machine a cast may seem too slow; were it emulated in fp32, nothing would run in low precision."""
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    emulation = Emulation({"aten._to_copy.default": "it took 3 s"})
    plain, _ = run(model, (x,), "autocast-bf16", budget=True)
    _, explained = run(model, (x,), "autocast-bf16", options=DEFAULT._replace(emulation=emulation), budget=True)
    assert explained.budget is not None
    assert plain.output_error is not None
    assert explained.budget.measured == pytest.approx(plain.output_error.rel_l2)
    assert plain.output_error.rel_l2
    assert {call.dtypes for call in explained.op_calls.rows() if "addmm" in call.op} == {"bf16→bf16"}


def test_the_local_error_of_an_emulated_op_is_that_of_rounding() -> None:
    """It is computed in fp32 once for both; only where local errors are wanted."""
    model, x = torch.nn.Linear(64, 64), torch.randn(16, 64)
    emulation = Emulation({"aten.addmm.default": "it took 3 s"})
    _, both = run(model, (x,), "half", options=DEFAULT._replace(emulation=emulation))
    [row] = (call for call in both.op_calls.rows() if "addmm" in call.op)
    half = copy.deepcopy(model).half()
    exact = torch.nn.functional.linear(x.half().float(), half.weight.float(), half.bias.float()).detach()
    rounding = (exact.half().float() - exact).norm() / exact.norm()
    assert row.outcome == "emulated"
    assert row.local_error == pytest.approx(float(rounding), rel=1e-4)
    _, accumulated = run(model, (x,), "half", options=DEFAULT._replace(emulation=emulation, errors="accumulated"))
    [row] = (call for call in accumulated.op_calls.rows() if "addmm" in call.op)
    assert (row.outcome, row.local_error) == ("emulated", None)
    assert row.accumulated_error
