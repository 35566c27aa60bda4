"""LP306: a compiled output that is worse than eager's is found, one that only differs is not."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import scan_here
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check import Backend, Run, ScanResult, scan
from lowprec_check.core.plain_part import EQUAL_DRAWS
from lowprec_check.features.backend_checks.compiler_checker import CompilerChecker, Corners, Distances, distances, worst
from lowprec_check.schema.axes import BACKENDS

SLACK = 5e-3
BFLOAT16: dict[str, Any] = {"precisions": "bfloat16", "plan": False, "errors": "none", "further_inputs": 0}
"""The output of the run is checked; what else a scan does is left out."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def corners(exact: Tensor, eager: float, compiled: float) -> Corners:
    """Outputs at the given relative distances from ``exact``."""
    exact, noise = exact.double(), draw(*exact.shape, seed=1).double()
    noise *= exact.norm() / noise.norm() if noise.any() else 0
    return Corners([exact], [exact], [exact + eager * noise], [exact - compiled * noise])


def verdict(*calls: Corners) -> str:
    return worst(distances(calls), SLACK).verdict(SLACK)


@given(
    size=st.floats(1e-30, 1e30),
    eager=st.floats(1e-6, 1e-1),
    ratio=st.one_of(st.floats(0.0, 1.99), st.floats(2.01, 100.0)),
)
def test_the_verdict_is_relative_to_the_tensor(size: float, eager: float, ratio: float) -> None:
    found = verdict(corners(draw(64) * size, eager, eager * ratio))
    allowed = "harmless" if eager * ratio <= SLACK else "worse"
    if abs(eager * ratio / SLACK - 1) > 1e-6:
        assert found == ("no-worse" if ratio < 2 else allowed)


def test_zeros_for_small_values_are_worse() -> None:
    """An absolute slack of 1e-4 accepts them."""
    exact = draw(64) * 1e-4
    assert verdict(Corners([exact.double()], [exact], [exact.bfloat16()], [torch.zeros(64)])) == "worse"


def test_one_small_tensor_among_large_ones_counts() -> None:
    large, small = corners(draw(64) * 1e6, 1e-3, 1e-3), corners(draw(64) * 1e-6, 1e-3, 1e-1)
    both = Corners(*(a + b for a, b in zip(large, small, strict=True)))
    found = worst(distances([both]), SLACK)
    assert (found.index, found.verdict(SLACK)) == (1, "worse")


@pytest.mark.parametrize(
    ("eager", "compiled", "expected"),
    [
        ([1.0, 2.0], [1.0, float("nan")], "worse"),
        ([1.0, float("inf")], [1.0, float("inf")], "no-worse"),  # both overflow
        ([1.0, float("inf")], [1.0, 2.0], "no-worse"),  # only eager does
        ([0.0, 0.0], [0.0, 0.0], "no-worse"),
    ],
)
def test_values_that_are_not_finite_count(eager: list[float], compiled: list[float], expected: str) -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64) if any(eager) else torch.zeros(2).double()
    assert verdict(Corners([exact], [exact], [torch.tensor(eager)], [torch.tensor(compiled)])) == expected


def test_changed_decisions_count() -> None:
    exact = torch.arange(1000)

    def changed(count: int) -> Tensor:
        return torch.where(exact < count, exact + 1, exact)

    def found(eager: int, compiled: int) -> str:
        return verdict(Corners([exact], [exact], [changed(eager)], [changed(compiled)]))

    assert found(0, 0) == found(10, 20) == found(10, 0) == "no-worse"
    assert found(0, 1) == found(10, 22) == found(1, 4) == "harmless"
    assert found(0, 1000) == found(10, 200) == "worse"


def test_a_value_that_depends_on_the_precision_does_not_hide_the_others() -> None:
    """A mask filled with ``torch.finfo(x.dtype).min``, whose square fp64 cannot hold."""
    exact, filled = draw(64).double(), torch.zeros(64, dtype=torch.bool)
    filled[:8] = True

    def masked(values: Tensor) -> Tensor:
        return values.masked_fill(filled, torch.finfo(values.dtype).min)

    low = exact.bfloat16()
    for factor, expected in ((1.0, "no-worse"), (1.05, "worse")):
        found = Corners([masked(exact)], [masked(exact.float())], [masked(low)], [masked(low * factor)])
        assert verdict(found) == expected


def test_errors_are_taken_over_all_calls() -> None:
    """One scalar may be near fp64's by chance; over several calls it is not."""
    calls = [corners(torch.tensor([2.0]), error, 1e-2) for error in (1e-5, 1.2e-2, 0.9e-2, 1.1e-2)]
    assert verdict(calls[0]) == "worse"
    assert verdict(*calls) == "no-worse"
    assert Distances(0).error(0.0) == 0.0
    assert Distances(0).error(1.0) == float("inf")


# -- runs


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Changing(Backend):
    """Applies ``change`` to what the model returns."""

    name = "noisy"
    summary = "changes the output"

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def prepare(self, model: Any, example: Any) -> Any:
        return lambda *args: self.change(model(*args))


class Noisy(Backend):
    """Adds an error to what the model returns."""

    name = "noisy"
    summary = "adds an error"
    share = 0.0

    def prepare(self, model: Any, example: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            output = model(x)
            error = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
            return output + self.share * output.norm() / error.norm() * error

        return call


def run_with(share: float, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None) -> tuple[Run, ScanResult]:
    backend = Noisy()
    backend.share = share
    monkeypatch.setitem(BACKENDS._items, "noisy", backend)
    result = scan_here(model or Mlp().eval(), draw(4, 16), backends="noisy", **BFLOAT16)
    return result.run("bfloat16", "noisy"), result


def test_a_backend_that_adds_an_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, result = run_with(0.03, monkeypatch)
    assert run.status == "ok"  # within the tolerance of 5e-2
    assert run.compiler is not None
    assert run.compiler.verdict == "worse"
    assert run.compiler.calls == 9
    assert run.compiler.compiled_error == pytest.approx(0.03, rel=0.3)
    assert run.compiler.fp32_error is not None
    assert run.compiler.eager_error is not None
    assert run.compiler.fp32_error < 1e-5 < run.compiler.eager_error < 0.01
    found = [d for d in result.diagnostics if d.code == "LP306"]
    assert [d.backend for d in found] == ["noisy"]
    assert "against fp64 is" in found[0].message
    assert "that of eager" in found[0].message


def test_a_backend_that_adds_less_than_eager_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    run, result = run_with(0.001, monkeypatch)
    assert run.compiler is not None
    assert (run.compiler.verdict, run.compiler.exact) == ("no-worse", "fp64")
    assert not [d for d in result.diagnostics if d.code == "LP306"]


class Decides(Mlp):
    """Returns classes only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


@pytest.mark.parametrize(("change", "expected"), [(0, "no-worse"), (1, "worse")])
def test_one_decision_is_confirmed_on_other_inputs(change: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS._items, "noisy", Changing(lambda classes: (classes + change) % 8))
    result = scan_here(Decides().eval(), draw(1, 16), backends="noisy", **BFLOAT16)
    check = result.run("bfloat16", "noisy").compiler
    assert check is not None
    assert (check.verdict, check.compiled_changed) == (expected, 9 * change)
    assert [d.code for d in result.diagnostics if d.code == "LP306"] == change * ["LP306"]


def work_for(seconds: float) -> None:
    """Use the processor: a process that only waits counts as one that waits for a lost thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class In64Bits(Mlp):
    """Does ``act`` in fp64."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            self.act()
        return super().forward(x)


@pytest.mark.parametrize(
    ("act", "note"),
    [
        (lambda: work_for(60), "the budget of 4 s ended after the output was judged"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (lambda: sys.exit(3), "checking the compiler failed: SystemExit: 3"),
    ],
)
def test_what_ends_the_check_leaves_the_verdict(
    act: Callable[[], Any], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS._items, "noisy", Changing(lambda output: output))
    options = {
        "precisions": "bfloat16",
        "backends": "noisy",
        "plan": False,
        "budget": 4.0,
    }  # fp32 must keep it in a large process too
    run = scan(In64Bits(act).eval(), draw(4, 16), **options).run("bfloat16", "noisy")  # type: ignore[arg-type]
    assert (run.status, run.compiler) == ("ok", None)
    assert any(note in text for text in run.notes), run.notes
    assert run.latency_ms is not None
    assert len(run.op_calls) > 0


def test_an_exit_of_the_metric_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS._items, "noisy", Changing(lambda output: output))
    for isolation in ("fork", "none"):
        options = {**BFLOAT16, "metric": lambda _: sys.exit(3), "isolation": isolation}
        run = scan_here(Mlp().eval(), draw(4, 16), backends="noisy", **options).run("bfloat16", "noisy")
        assert run.status == "ok"
        assert "the metric failed: SystemExit: 3" in run.notes


class OnlyFp32(Mlp):
    """Cannot run in fp64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise ValueError("no fp64")
        return super().forward(x)


def test_fp32_stands_in_for_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_with(0.03, monkeypatch, OnlyFp32().eval())
    assert run.compiler is not None
    assert (run.compiler.verdict, run.compiler.exact) == ("worse", "fp32")


class Drawing(Mlp):
    """Draws random numbers, which a compiler draws otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * torch.rand(8)


def test_a_random_model_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_with(0.03, monkeypatch, Drawing().eval())
    assert run.random
    assert run.compiler is None


class Ties(nn.Module):
    """pytorch#195214: in 16 bits, inductor compares a rounded value with one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(32))

    def forward(self, x: Tensor) -> Tensor:
        z = (x * self.weight) / 7**0.5
        ties = z == z.amax(-1, keepdim=True)
        return ties / ties.sum(-1, keepdim=True)


class Gated(nn.Module):
    """pytorch#168186: differs from eager, nearer to fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.first(x) * self.second(x)).chunk(2, -1)
        return a + b


@pytest.mark.slow
def test_a_fault_of_the_compiler_is_found_and_explained() -> None:
    inside = nn.Sequential(torch.compile(Ties()), nn.Identity()).eval()
    result = scan_here(inside, draw(16, 32), **BFLOAT16)
    run = result.run("bfloat16")
    if torch.__version__ < "2.14" and run.status != "nonfinite":
        pytest.fail(f"the compiled model gives {run.status}, not NaN")
    if run.status == "nonfinite":  # the fault is in this torch
        assert run.compiler is not None
        assert (run.compiler.verdict, run.compiler.emulated) == ("worse", "no-worse")
        assert run.compiler.nonfinite == 16 * 32
        found = next(d for d in result.diagnostics if d.code == "LP306")
        assert "emulate_precision_casts = True, with which it was not worse" in (found.help or "")


@pytest.mark.slow
def test_a_fault_is_reported_even_if_there_is_no_time_to_explain_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compiled_again(checker: Any, *_: Any, bisecting: bool = False) -> str:
        if bisecting and checker.task.precision == "bfloat16":
            work_for(60)
        return "worse"

    monkeypatch.setattr(CompilerChecker, "_compiled_again", compiled_again)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the workers as well
    wrong = torch.compile(Mlp().eval(), backend=lambda graph, _: lambda *args: [out * 1.04 for out in graph(*args)])
    steps: set[str] = set()
    asked: Any = {"explain": "all", "on_progress": lambda _run, step: steps.add(step.rpartition(" · ")[2])}
    result = scan(wrong, draw(4, 16), times="off", budget=6, **BFLOAT16, **asked)
    run = result.run("bfloat16")
    assert run.status == "ok"  # the fp32 run is as wrong
    assert "bisecting the compiler" in steps
    assert run.compiler is not None
    assert (run.compiler.verdict, run.compiler.emulated, run.compiler.culprit) == ("worse", "worse", None)
    assert any("the budget of 6 s ended" in note for note in run.notes)
    assert [d.code for d in result.diagnostics if d.code == "LP306" and d.precision == "bfloat16"] == ["LP306"]
    # Nobody asked what a warning is about: neither a setting nor the pass is searched.
    quick = scan(wrong, draw(4, 16), times="off", budget=6, **BFLOAT16 | {"errors": "both"}).run("bfloat16")
    assert quick.compiler is not None
    assert (quick.compiler.verdict, quick.compiler.emulated, quick.notes) == ("worse", None, [])
    # This process keeps its folder for workers, and torch its cache, if they are made here first
    kept = [path for path in tmp_path.iterdir() if not path.name.startswith(("pymp-", "torchinductor_"))]
    assert [path for folder in kept for path in (folder.iterdir() if folder.is_dir() else [folder])] == []


@pytest.mark.slow
def test_the_pass_is_searched_if_nothing_compiles_with_emulated_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_again(*_: Any) -> str:
        raise RuntimeError("as torch 2.8 on a CPU")

    checker = "lowprec_check.features.backend_checks.compiler_checker.CompilerChecker"
    monkeypatch.setattr(f"{checker}._compiled_again", compiled_again)
    monkeypatch.setattr(f"{checker}.bisect", lambda *_: "inductor lowerings eq")
    wrong = torch.compile(Mlp().eval(), backend=lambda graph, _: lambda *args: [out * 1.04 for out in graph(*args)])
    run = scan_here(wrong, draw(4, 16), **BFLOAT16).run("bfloat16")
    assert run.compiler is not None
    assert (run.compiler.verdict, run.compiler.emulated, run.compiler.culprit) == (
        "worse",
        None,
        "inductor lowerings eq",
    )
    assert run.notes == []


@pytest.mark.slow
def test_a_compiled_model_draws_the_numbers_of_eager_mode_while_it_is_checked() -> None:
    import torch._inductor.config as inductor

    model = nn.Sequential(Mlp(), nn.Dropout(0.5)).train()
    run = scan_here(model, draw(4, 16), backends="inductor", **BFLOAT16).run("bfloat16", "inductor")
    assert (run.status, run.notes.count(EQUAL_DRAWS)) == ("ok", 1)
    assert run.backend_check is not None
    assert run.backend_check.inputs
    assert not inductor.fallback_random


@pytest.mark.slow
def test_a_compiled_result_nearer_to_fp64_is_no_fault() -> None:
    result = scan_here(torch.compile(Gated().eval()), draw(4, 32), **BFLOAT16)
    run = result.run("bfloat16")
    assert run.compiled
    assert run.compiler is not None
    assert run.compiler.verdict == "no-worse"
    assert not [d for d in result.diagnostics if d.code == "LP306"]
