"""Plans are compared with plain runs of the planned model, and with exhaustive search."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import EXAMPLES, ROOT, run_bare
from generated import FAULTS, GAPS, STEPS, Fault, Norm, Overflow, Project, Quantile, Residual, build, inputs
from helpers import scan_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowprec_check import Plan, UsageError, apply, find_plan, render
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource, load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.features.plan.apply import describe_modules
from lowprec_check.features.plan.command import plan_file
from lowprec_check.features.plan.planner import plan_target
from lowprec_check.features.plan.report import plan_document
from lowprec_check.features.plan.trials import Limits
from lowprec_check.report.layout.text import text
from lowprec_check.schema.options import PlanOptions
from lowprec_check.schema.plan import Planning
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo

Write = Callable[..., Path]
BASES = {
    "half": ("fp16", "cast"),
    "bfloat16": ("bf16", "cast"),
    "autocast-fp16": ("fp16", "autocast"),
    "autocast-bf16": ("bf16", "autocast"),
}


def plan_of(model: nn.Module, base: str, keep: Sequence[str], untied: Sequence[str] = ()) -> Plan:
    """A plan made without a search."""
    call = ModelInfo(name="Model", parameters=0, inputs=[], modules=0, training=False, call="model(inputs)")
    return Plan(
        tool="a test",
        target="a test",
        base=base,
        device="cpu",
        keep_fp32=list(keep),
        untied=list(untied),
        minimal=False,
        trials=0,
        seconds=0.0,
        modules=describe_modules(model),
        code=snippet(RunKey(base), call, keep, untied),
    )


def applied_output(model: nn.Module, x: Any, plan: Plan) -> Any:
    """The output of a copy of the model with the plan applied."""
    torch.manual_seed(0)
    with torch.no_grad():
        return apply(copy.deepcopy(model), plan)(x)


def passes(model: nn.Module, x: Tensor, plan: Plan, keep: Sequence[str]) -> bool:
    """Whether the model with ``keep`` in fp32 passes, by a run without the tool."""
    reference = run_bare(copy.deepcopy(model), (x,), "fp32").double()
    try:
        output = applied_output(model, x, msgspec.structs.replace(plan, keep_fp32=list(keep))).double()
    except Exception:
        return False
    low = torch.float16 if plan.base in ("half", "autocast-fp16") else torch.bfloat16
    return bool((output - reference).norm() <= {torch.float16: 1e-2, torch.bfloat16: 5e-2}[low] * reference.norm())


# -- the search, checked by plain runs


@pytest.mark.parametrize("seed", range(25))
def test_plans_pass_are_minimal_and_no_larger_than_needed(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [Project, *(rng.choice([*STEPS, *[Project] * 6]) for _ in range(rng.randint(1, 4)))]
    for _ in range(rng.randint(1, 3)):
        kinds.insert(rng.randint(0, len(kinds)), rng.choice([*(fault.make for fault in FAULTS), *GAPS]))
    base = rng.choice(list(BASES))
    model, x = build(kinds), inputs()
    dtype, kind = BASES[base]
    planning = find_plan(model, x, dtype=dtype, base=kind, isolation="none")
    leaves = [name for name, module in model.named_modules() if name and not list(module.children())]
    plan = planning.plan
    if plan is None:
        everything = plan_of(model, base, [])
        assert not any(passes(model, x, everything, keep) for keep in (leaves, ["steps"], *([leaf] for leaf in leaves)))
        return
    kept = plan.keep_fp32
    assert plan.minimal
    assert passes(model, x, plan, kept)
    for given_back in kept:
        assert not passes(model, x, plan, [name for name in kept if name != given_back])
    assert len(leaves) <= 12
    for count in range(len(kept) - 1):
        assert not any(passes(model, x, plan, keep) for keep in itertools.combinations(leaves, count))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([*STEPS, *[Project] * 6]), min_size=1, max_size=6),
    st.sampled_from(FAULTS),
    st.integers(0, 5),
    st.data(),
)
def test_plans_by_prediction_are_no_larger_and_take_few_trials(
    kinds: list[type[nn.Module]], fault: Fault, place: int, data: st.DataObject
) -> None:
    kinds = [Project, *kinds]
    kinds.insert(1 + place % len(kinds), fault.make)
    dtype, base = BASES[data.draw(st.sampled_from(fault.precisions))]
    predicted, without = (planned(build(kinds), dtype, base, predict=predict) for predict in (True, False))
    assert (predicted.plan is None) == (without.plan is None)
    if predicted.plan is not None and without.plan is not None:
        assert len(predicted.plan.keep_fp32) <= len(without.plan.keep_fp32)
        assert predicted.plan.minimal


def test_the_median_of_trials_is_two_for_one_planted_fault() -> None:
    trials = []
    for seed in range(12):
        rng = random.Random(seed)
        kinds = [Project, *(rng.choice([*STEPS, *[Project] * 6]) for _ in range(rng.randint(1, 6)))]
        fault = rng.choice(FAULTS)
        kinds.insert(rng.randint(1, len(kinds)), fault.make)
        [attempt] = planned(build(kinds), *BASES[rng.choice(fault.precisions)]).attempts
        if attempt.kept:
            trials.append(attempt.trials)
    assert len(trials) >= 5
    assert statistics.median(trials) <= 2


def planned(model: nn.Module, dtype: str, base: str, *, predict: bool = True) -> Planning:
    """The plan for one base, with or without the error budget."""
    options = PlanOptions(dtype=dtype, base=base, predict=predict)
    return plan_target(TargetSource(make_target(model, inputs())), "none", options)


def test_several_faults_are_found_in_one_trial_and_the_error_is_as_predicted() -> None:
    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 32) - 32

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), Coarse() if index % 2 == 0 else nn.Identity()) for index in range(6)]
    planning = find_plan(nn.Sequential(*layers).eval(), inputs(64), dtype="bf16", base="cast", isolation="none")
    plan, [attempt] = planning.plan, planning.attempts
    assert plan is not None
    assert plan.keep_fp32 == ["2.1", "4.1"]
    assert plan.first_pass == 1
    assert plan.trials == 3
    assert (attempt.predicted, attempt.proven) == (plan.predicted, plan.rel_l2)
    assert plan.predicted is not None
    assert plan.rel_l2 is not None
    assert plan.predicted / 2 <= plan.rel_l2 <= 2 * plan.predicted
    assert f"The error is {plan.rel_l2:.1e}, the tolerance 5e-02; {plan.predicted:.1e} was predicted" in " ".join(
        text(plan_document(planning)).split()
    )
    assert all("% of the error" in blame.why for blame in plan.blame)
    assert 90 <= sum(float(blame.why.split()[1]) for blame in plan.blame) <= 101


@pytest.mark.parametrize(
    ("example", "dtype"),
    [
        pytest.param(
            path,
            dtype,
            id=f"{dtype}-{path.stem}",
            marks=[pytest.mark.slow] if path.stem == "fourier_mixer" else [],
        )
        for dtype in ("bf16", "fp16")
        for path in EXAMPLES
        # The decoder has a test of its own. ResNet-50 needs no plan, and trains for 12 s to say so.
        if path.stem not in ("spade_decoder", "cifar_resnet50")
    ],
)
def test_every_example_gets_a_plan_or_a_reason_and_its_code_equals_apply(
    example: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    spec = str(example.relative_to(ROOT))
    for base in ("autocast", "cast"):
        *_, planning = plan_file(TargetSpec(spec), PlanOptions(dtype=dtype, base=base))
        if planning.plan is None:
            assert "no plan" in planning.attempts[0].outcome
            assert "(" in planning.attempts[0].outcome
            continue
        check_code_equals_apply(spec, planning.plan)


@pytest.mark.slow
def test_spade_decoder_without_a_dot_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = "examples/spade_decoder.py"
    *_, planning = plan_file(
        TargetSpec(spec), PlanOptions(dtype="bf16", base="cast", without_kernel=("aten.dot:bfloat16",))
    )
    assert planning.plan is not None
    assert planning.plan.minimal
    assert len(planning.plan.keep_fp32) == 10
    assert {blame.op for blame in planning.plan.blame} == {"aten.dot.default"}
    check_code_equals_apply(spec, planning.plan)


def check_code_equals_apply(spec: str, plan: Plan) -> None:
    target = load_spec(TargetSpec(spec), 0)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = apply(target.model, plan)(*target.args, **target.kwargs)
    space = {name: value for name, value in vars(load_file(spec)).items() if not name.startswith("__")}
    torch.manual_seed(0)
    exec(plan.code, space)
    assert torch.equal(space["output"], expected)
    assert space["output"].dtype == expected.dtype


def load_file(spec: str) -> Any:
    import runpy
    import types

    module = types.ModuleType("example")
    vars(module).update(runpy.run_path(spec))
    return module


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([*STEPS, Residual, Quantile]), min_size=1, max_size=5),
    st.sampled_from(list(BASES)),
    st.randoms(use_true_random=False),
)
def test_the_pasted_code_equals_apply(kinds: list[Any], base: str, rng: random.Random) -> None:
    model, x = build([Project, *kinds]), inputs()
    steps = [f"steps.{index}" for index in range(len(kinds) + 1)]
    plan = plan_of(model, base, [name for name in steps if rng.random() < 0.5])
    space: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    try:
        expected = applied_output(model, x, plan)
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):
            exec(plan.code, space)
        return
    torch.manual_seed(0)
    exec(plan.code, space)
    assert torch.equal(space["output"], expected)


def test_equal_layers_of_a_transformer_off_its_fused_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        model.layers[1].linear2.weight *= 1e6
        model.layers[1].linear2.bias *= 1e6
    x = torch.randn(2, 4, 16)
    plan = find_plan(model, x, dtype="fp16", base="autocast", isolation="none").plan
    assert plan is not None
    assert plan.keep_fp32
    assert passes(model, x, plan, plan.keep_fp32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_a_torchvision_model_gets_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end_after(20, monkeypatch)
    import_torchvision()
    spec = TargetSpec(f"torchvision:{name}", ("1x3x32x32",))
    *_, planning = plan_file(spec, PlanOptions(dtype="fp16", base="autocast"))
    plan = planning.plan
    assert plan is not None
    target = load_spec(spec, 0)
    assert passes(target.model, target.args[0], plan, plan.keep_fp32)
    assert plan.minimal or plan.unconfirmed or plan.stopped == "after 20 trials"


# -- objectives


class Scale(nn.Module):
    """Adds and subtracts so much that bf16 loses all of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 4096) - 4096


def lossy(*bad: int, length: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), Scale() if index in bad else nn.Identity()) for index in range(length)]
    return nn.Sequential(*layers).eval()


def test_a_metric_replaces_the_tolerance() -> None:
    x = inputs()
    model = lossy(1)
    generous = find_plan(model, x, dtype="bf16", base="cast", metric=lambda m: 1.0, isolation="none")
    assert generous.plan is not None
    assert generous.plan.keep_fp32 == []
    reference = run_bare(copy.deepcopy(model), (x,), "fp32")
    exact = find_plan(
        model, x, dtype="bf16", base="cast", metric=closeness(x, reference), max_drop=0.1, isolation="none"
    )
    assert exact.plan is not None
    assert exact.plan.keep_fp32 == ["1.1"]
    assert exact.plan.fp32_metric == pytest.approx(0.0, abs=1e-6)
    assert exact.plan.metric == pytest.approx(0.0, abs=0.1)
    assert exact.plan.tolerance is None


def test_a_metric_gets_a_model_of_the_same_class() -> None:
    class Noisy(nn.Sequential):
        def predict(self, x: Tensor) -> Tensor:
            return self(x).float()

    x, seen = inputs(), []

    def metric(model: Noisy) -> float:
        model.eval()
        seen.append((type(model).__name__, next(model.parameters()).dtype))
        return float(torch.equal(model.predict(x), model.predict(x)))

    model = Noisy(*lossy(1), nn.Dropout(0.5)).train()
    planning = find_plan(model, x, dtype="bf16", base="cast", metric=metric, isolation="none")
    assert planning.plan is not None
    assert planning.plan.fp32_metric == 1.0
    assert ("Noisy", torch.bfloat16) in seen
    assert model.training


@pytest.mark.parametrize("wrong", [lambda model: float("nan"), lambda model: 1 / 0], ids=["nan", "raises"])
def test_a_metric_that_fails_in_fp32_is_an_error(wrong: Callable[[nn.Module], float]) -> None:
    with pytest.raises(UsageError, match=r"metric of the fp32 model"):
        find_plan(lossy(1), inputs(), dtype="bf16", base="cast", metric=wrong)


def closeness(x: Tensor, reference: Tensor) -> Callable[[nn.Module], float]:
    return lambda model: -float((model(x).float() - reference).norm() / reference.norm())


def test_every_batch_must_pass() -> None:
    class OnlyLarge(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs().max() > 50, (x + 4096) - 4096, x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), OnlyLarge(), nn.Linear(8, 8)).eval()

    def batch(number: int = 0) -> Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * (1 if number != 1 else 100)

    one = find_plan(model, batch, dtype="bf16", base="cast", tolerance=2e-2, isolation="none")
    two = find_plan(model, batch, dtype="bf16", base="cast", tolerance=2e-2, batches=2, isolation="none")
    assert one.plan is not None
    assert two.plan is not None
    assert one.plan.keep_fp32 == []
    assert two.plan.batches == 2
    assert two.plan.keep_fp32 == ["1"]


class ScaledDown(nn.Linear):
    """Its outputs overflow in half for large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float() / 1e4


class TwoInputs(nn.Module):
    """Batch 0 overflows in ``a``, batch 1 in ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = ScaledDown(16, 16), ScaledDown(16, 16)
        with torch.no_grad():
            self.a.weight.mul_(50)
            self.b.weight.mul_(50)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.a(x) / 1e3 + self.b(z) / 1e3


def test_an_ablation_passes_only_on_all_batches_and_a_plan_names_them() -> None:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, z = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(number))
        return (x * 5e3, z) if number == 0 else (x, z * 5e3)

    torch.manual_seed(0)
    result = scan_here(TwoInputs().eval(), batch, precisions="half", batches=2)
    ablation, plan = result.run("half").ablation, result.run("plan")
    assert ablation is not None
    assert (ablation.keep_fp32, ablation.status) == (["a"], "nonfinite")
    assert plan.batches is not None
    assert (plan.keep_fp32, plan.batch_count, plan.batches.places) == (["a", "b"], 2, [])
    assert "on each of 2 batches of inputs" in render(result, "markdown")


def test_equal_batches_are_rejected() -> None:
    with pytest.raises(UsageError, match="same values for batch 1 as for batch 0"):
        find_plan(lossy(), lambda: torch.ones(2, 8), batches=2)
    with pytest.raises(UsageError, match="only one batch"):
        find_plan(lossy(), torch.ones(2, 8), batches=2)


def end_after(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End searches after so many trials per base."""
    monkeypatch.setattr("lowprec_check.features.plan.planner.Limits", functools.partial(Limits, max_trials=trials))


def test_a_stopped_search_returns_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs()
    model = lossy(0, 2, 4, length=6)
    whole = find_plan(model, x, dtype="bf16", base="cast", isolation="none")
    end_after(3, monkeypatch)
    stopped = find_plan(model, x, dtype="bf16", base="cast", isolation="none")
    assert whole.plan is not None
    assert whole.plan.keep_fp32 == ["0.1", "2.1", "4.1"]
    assert stopped.attempts[0].trials <= 3
    assert stopped.plan is not None
    assert not stopped.plan.minimal
    assert stopped.plan.stopped == "after 3 trials"
    assert passes(model, x, stopped.plan, stopped.plan.keep_fp32)
    end_after(1, monkeypatch)
    first = find_plan(model, x, dtype="bf16", base="cast", isolation="none").plan
    assert first is not None
    assert not first.minimal
    assert passes(model, x, first, first.keep_fp32)
    reference = run_bare(copy.deepcopy(model), (x,), "fp32")
    unpredicted = closeness(x, reference)
    assert (
        find_plan(model, x, dtype="bf16", base="cast", metric=unpredicted, max_drop=0.1, isolation="none").plan is None
    )


def test_no_search_if_a_base_passes(tmp_path: Path) -> None:
    analyzed = tmp_path / "analyzed"

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build([Project, Norm])

        def forward(self, x: Tensor) -> Tensor:
            if _get_current_dispatch_mode() is not None:
                with analyzed.open("a") as file:
                    print(next(self.parameters()).dtype, file=file)
            found: Tensor = self.inner(x)
            return found

    planning = find_plan(Watched(), inputs())
    assert planning.plan is not None
    assert planning.plan.keep_fp32 == []
    assert {attempt.trials for attempt in planning.attempts} == {0}
    assert set(analyzed.read_text().split()) == {"torch.float32"}  # not those that pass


def test_constants_that_do_not_fit_are_reported_with_their_replacement() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).masked_fill(x > 1, -1e9).clamp(max=1e6).softmax(-1)

    model = nn.Sequential(nn.Linear(8, 8), Masked()).eval()
    planning = find_plan(model, inputs(), dtype="fp16", base="cast", isolation="none")
    found = {(constant.value, constant.use) for constant in planning.attempts[0].constants}
    assert found == {(-1e9, "torch.finfo(torch.float16).min"), (1e6, "torch.finfo(torch.float16).max")}
    assert planning.plan is not None
    assert planning.plan.keep_fp32 == ["1"]
    assert planning.plan.blame[0].why == "has a constant that does not fit the dtype"


def test_the_failing_op_is_named_with_its_line() -> None:
    plan = find_plan(build([Project, Overflow, Project]), inputs(), dtype="fp16", base="cast", isolation="none").plan
    assert plan is not None
    [blame] = plan.blame
    assert (blame.module, blame.op, blame.why) == ("steps.1", "aten.mul.Tensor", "overflows to Inf")
    assert blame.source is not None
    assert "generated.py:" in blame.source


def test_a_plan_is_found_even_if_everything_in_fp32_fails() -> None:
    @dataclasses.dataclass
    class Value:
        x: Tensor

    class Open(nn.Linear):
        def forward(self, value: Value) -> Tensor:  # type: ignore[override]
            return super().forward(value.x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.open = Tiny(), Open(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.open(Value(self.small(x).reciprocal()))

    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sigmoid() + 1) * 1e-9 * 1e9

    torch.manual_seed(0)
    model = Root().eval()
    plan = find_plan(model, inputs(), dtype="fp16", base="cast", isolation="none").plan
    assert plan is not None
    assert plan.keep_fp32 == ["small"]


class Tied(nn.Module):
    """Half overflows in the head, whose weight is that of the embedding."""

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 300).pow(2) / 1e5

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layer, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), self.Head(16, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.layer(self.emb(index)).mean(1))


def test_a_plan_with_copies_of_tied_weights_is_trained() -> None:
    torch.manual_seed(0)
    result = scan_here(Tied(), torch.arange(32).reshape(4, 8) % 16, precisions=["half"], train=True, plan=True)
    assert result.plan is not None  # after trials with the head alone in fp32
    assert all(run.training is not None for run in result.runs)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_of_a_frozen_weight_is_frozen(frozen: bool) -> None:
    model = Tied()
    model.emb.weight.requires_grad_(not frozen)
    code = snippet(
        RunKey("half"),
        ModelInfo(name="Tied", parameters=1, inputs=[], modules=4, training=False),
        ["head"],
        ["head.weight"],
    )
    space = {"model": model, "inputs": torch.arange(32).reshape(4, 8) % 16}
    exec(code.partition("with torch.no_grad()")[0], space)
    assert model.head.weight.dtype == torch.float32
    assert model.head.weight.requires_grad != frozen


def test_a_model_without_submodules_has_none_to_keep() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e4).pow(2) / 1e8

    planning = find_plan(Own(), inputs(), dtype="fp16", base="cast", isolation="none")
    assert planning.attempts[0].outcome == "no plan: no submodule is called, so none can be kept in fp32"
    plan = plan_of(Own(), "half", [])
    with torch.no_grad():
        assert apply(Own(), plan)(inputs()).dtype == torch.half


class Sink(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + 4096) - 4096


def test_a_scan_shows_what_its_search_found() -> None:
    model = nn.Sequential(Sink(8, 8), Sink(8, 8), Sink(8, 8)).eval()
    result = scan_here(model, inputs(), precisions=["bfloat16"], further_inputs=0)
    assert [(its.base, its.kept) for its in result.attempts] == [("bfloat16", None)]
    said = [its.text for its in result.statements if its.kind == "no-plan"]
    longer = "; lowprec-check plan TARGET searches longer"
    assert said == [f"{result.attempts[0].outcome} ({result.attempts[0].trials} trials){longer}"]
    assert "after 3 modules failed in low precision" in said[0]
    whole = scan_here(model, inputs(), precisions=["bfloat16"], further_inputs=0, plan=True)
    said = [its.text for its in whole.statements if its.kind == "no-plan"]
    assert said == [f"{whole.attempts[0].outcome} ({whole.attempts[0].trials} trials)"]
    helps = [its.help for its in whole.diagnostics if its.code == "LP301"]
    metric = "define metric(model) and judge by it: lowprec-check plan TARGET --metric"
    assert helps == [f"if the model tolerates the error, {metric}"]
    searched = msgspec.structs.replace(result, attempts=[])
    assert not [its for its in statements(searched) if its.kind == "no-plan"]


def test_all_ops_in_fp32_is_not_a_plan() -> None:
    model = nn.Sequential(Sink(8, 8), Sink(8, 8), Sink(8, 8)).eval()
    planning = find_plan(model, inputs(), dtype="bf16", base="cast", isolation="none")
    assert planning.plan is None
    tried = "passes with every op in fp32, fails with one module in low precision (tried: 2, 1, 0)"
    assert planning.attempts[0].outcome == f"no plan: {tried}"


def test_the_pasted_code_keeps_unusual_module_names_and_the_users_variables() -> None:
    names = [f'block-number "{index}" of the \\ stack' for index in range(12)]
    model = nn.Sequential(collections.OrderedDict((name, nn.Linear(8, 8)) for name in names))
    for base in BASES:
        plan = plan_of(model, base, names[::2])
        space: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": inputs(), "cast": 1, "state": 2, "kept": 3}
        exec(plan.code, space)
        assert torch.equal(space["output"], applied_output(model, inputs(), plan))
        assert (space["cast"], space["state"], space["kept"]) == (1, 2, 3)


@pytest.mark.parametrize("base", BASES)
def test_a_double_model_is_planned_and_pasted_as_its_user_has_it(base: str) -> None:
    dtype, kind = BASES[base]
    model, x = lossy(1).double(), inputs().double()
    plan = find_plan(model, x, dtype=dtype, base=kind, isolation="none").plan
    assert plan is not None
    space: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    exec(plan.code, space)
    if kind == "cast":
        expected = applied_output(model.float(), x.float(), plan)
    else:
        with torch.no_grad(), torch.autocast("cpu", dtype=space["torch"].half if dtype == "fp16" else torch.bfloat16):
            expected = model(x)
    assert torch.equal(space["output"], expected)


def test_autocast_keeps_modules_in_fp32_whose_weights_are_given_in_16_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16(), nn.Linear(8, 4))
    plan = plan_of(model, "autocast-bf16", ["1.0"])
    space: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": inputs()}
    exec(plan.code, space)
    with torch.no_grad():
        first = model[0].bfloat16()(inputs().bfloat16())
        kept = nn.functional.linear(first.float(), model[1][0].weight.float(), model[1][0].bias.float())
        expected = model[2].bfloat16()(model[1][1](kept.bfloat16()))
    assert torch.equal(space["output"], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "Unknown precision 'fp8'"),
        ({"dtype": "fp32"}, "No plan can start from fp32"),
        ({"base": "amp"}, "Unknown base 'amp'"),
        ({"dtype": "amp-fp16", "base": "cast"}, "No precision is both amp-fp16 and cast"),
        ({"batches": 0}, "batches is 0"),
        ({"max_drop": 0.1}, "needs a metric"),
        ({"metric": lambda model: 1.0, "tolerance": 0.1}, "Both a metric and a tolerance"),
    ],
)
def test_invalid_options_are_rejected(mlp: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_plan(mlp, torch.randn(2, 8), **options)


# -- applying


@pytest.mark.parametrize("base", BASES)
def test_an_applied_plan_survives_copies_and_leaves_the_state_dict(base: str, mlp: nn.Module) -> None:
    x = torch.randn(4, 8)
    keys = list(mlp.state_dict())
    exact = mlp.layers[2].weight.detach().clone()
    model = apply(mlp, plan_of(mlp, base, ["layers.2"]))
    assert list(model.state_dict()) == keys
    assert torch.equal(model.layers[2].weight, exact)
    with torch.no_grad():
        before = model(x)
        clone = copy.deepcopy(model)
        assert torch.equal(clone(x), before)
        clone.layers[2].weight.zero_()
        assert torch.equal(model(x), before)
        assert not torch.equal(clone(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_an_applied_plan_compiles_in_one_graph(base: str, mlp: nn.Module) -> None:
    x = torch.randn(4, 8)
    model = apply(mlp, plan_of(mlp, base, ["layers.2"]))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[torch.distributed.ProcessGroup]:
    """A group of this process alone. It must outlive the models: DDP's reducer holds the GIL while it frees the group
    and waits for threads that may need it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    assert group is not None
    yield group
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("base", ["bfloat16", "autocast-bf16"])
def test_an_applied_plan_works_under_ddp(base: str, mlp: nn.Module) -> None:
    x = torch.randn(4, 8)
    model = apply(mlp, plan_of(mlp, base, ["layers.2"]))
    wrapped = nn.parallel.DistributedDataParallel(model)
    output = wrapped(x)
    assert torch.equal(output, model(x))
    output.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_autocast_state_is_restored_after_an_exception(mlp: nn.Module) -> None:
    model = apply(mlp, plan_of(mlp, "autocast-bf16", ["layers.2"]))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(4, 3))
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        model(torch.randn(4, 8))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_weights_shared_with_a_cast_module_are_copied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last.weight = self.first.weight
            self.sink = Scale()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.sink(self.first(x)))

    torch.manual_seed(0)
    model, x = Tied().eval(), inputs()
    plan = plan_of(model, "bfloat16", ["last"], ["last.weight"])
    planned = apply(copy.deepcopy(model), plan)
    assert planned.first.weight.dtype == torch.bfloat16
    assert torch.equal(planned.last.weight, model.last.weight)
    assert torch.isfinite(planned(x)).all()
    assert model.last.weight is model.first.weight
    space: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": x}
    exec(plan.code, space)
    assert torch.equal(space["output"], planned(x))


def test_a_plan_for_another_model_is_rejected_and_names_the_module(mlp: nn.Module) -> None:
    plan = plan_of(mlp, "half", ["layers.2"])
    other = copy.deepcopy(mlp)
    other.layers[2] = nn.Linear(16, 10)
    with pytest.raises(UsageError, match=r"'layers.2' is Linear\(10x16, 10\), in the plan Linear\(4x16, 4\)"):
        apply(other, plan)
    other.layers.append(nn.ReLU())
    with pytest.raises(UsageError, match=r"'layers.3' is new"):
        apply(other, plan)
    del other.layers[3], other.layers[2]
    with pytest.raises(UsageError, match=r"'layers.2' is missing"):
        apply(other, plan)
    with pytest.raises(UsageError, match="float16 parameters"):
        apply(copy.deepcopy(mlp).half(), plan)
    with pytest.raises(UsageError, match=r"The plan is for 'cuda', but the model is on cpu"):
        apply(copy.deepcopy(mlp), msgspec.structs.replace(plan, device="cuda"))
    with pytest.raises(UsageError, match=r"'layers\.2' twice"):
        apply(copy.deepcopy(mlp), msgspec.structs.replace(plan, keep_fp32=["layers", "layers.2"]))
    with pytest.raises(UsageError, match="unties"):
        apply(copy.deepcopy(mlp), msgspec.structs.replace(plan, untied=["nowhere.weight"]))
    with pytest.raises(UsageError, match="wrapped"):
        apply(nn.DataParallel(mlp), plan)
    apply(mlp, plan_of(mlp, "autocast-fp16", []))
    with pytest.raises(UsageError, match="already has a plan"):
        apply(mlp, plan)


def test_saved_plans_load_strictly(mlp: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = plan_of(mlp, "half", ["layers.2"])
    plan.save(path)
    assert Plan.load(path) == plan
    text = path.read_text()
    for wrong, message in (
        (text[:100], "not a plan"),
        (text.replace('"base"', '"bass"'), "base|bass"),
        (text.replace('"schema": 1', '"schema": 2'), "schema 2"),
        (text.replace('"base": "half"', '"base": "fp8"'), "base"),
        (text.replace('"trials": 0', '"trials": "none"'), "trials"),
        ("", "not a plan"),
    ):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=message):
            Plan.load(path)
    path.write_text(text.replace('"keep_fp32": [\n  "layers.2"', '"keep_fp32": [\n  "layers.7"'))
    with pytest.raises(UsageError, match=r"layers\.7"):
        apply(mlp, path)
    with pytest.raises(UsageError, match="Cannot read"):
        apply(mlp, tmp_path / "nothing.json")


def test_a_planning_round_trips_through_json(mlp: nn.Module) -> None:
    planning = find_plan(mlp, torch.randn(4, 8))
    assert msgspec.json.decode(planning.to_json(), type=Planning) == planning
