"""The memory of a scan: what is estimated, what is left out if it does not fit, and what the user is told."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowprec_check
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import best_of
from lowprec_check.analysis.run_summary import memory_ratio
from lowprec_check.core import memory_limits
from lowprec_check.core.memory_limits import (
    SMALL,
    ModelBytes,
    Part,
    check_weights_fit,
    gibibytes,
    why_too_large,
)
from lowprec_check.core.plain_part import _fingerprint
from lowprec_check.core.session import _rare_collections
from lowprec_check.core.tasks import OUTPUTS, open_task_files
from lowprec_check.core.trace.instrument import fp32_state, run_instrumented
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import render
from lowprec_check.schema.axes import BACKENDS, Backend, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.torchkit.devices import peak_allocated

PARTS: tuple[Part, ...] = ("plain", "none", "accumulated", "both")
BUFFERS = 8 << 20
"""Of comparisons, which read large tensors in parts, and of activations."""
SIZES = st.integers(0, 1 << 45)
MODELS = st.builds(ModelBytes, held=SIZES, cast=SIZES, largest=SIZES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()


def allocated_by(layers: nn.Module, precision: str, errors: Part, *, budget: bool = False) -> int:
    """Bytes that casting and running the model op by op allocates at its peak."""
    from helpers import DEFAULT, begun, budget_observer  # a process of a test imports this module alone

    inputs, fp32 = torch.randn(4, 2048), fp32_state(layers)
    options = DEFAULT._replace(errors=errors)
    if budget:
        observer = budget_observer([layers(inputs).detach()])
        options = options._replace(observers=(observer, *options.observers))

    def work() -> None:
        with prepared(layers, PRECISIONS.get(precision), torch.device("cpu")) as ready:
            found = run_instrumented(begun(precision), ready, (inputs,), {}, fp32, options).run
        assert found.complete
        assert found.budget is None or found.budget.known

    return peak_allocated(work)


def run_with(
    monkeypatch: pytest.MonkeyPatch, free: Callable[[], int] | int, **options: object
) -> tuple[Run, ScanResult]:
    """The bfloat16 run of a scan in which that much memory is free for it, beside the outputs that are compared."""
    monkeypatch.setattr(memory_limits, "_outputs", lambda _: 0)
    monkeypatch.setattr(memory_limits, "free_memory", lambda _: free() if callable(free) else free)
    given_options = {"precisions": "bfloat16", "plan": False, "isolation": "fork", "times": "off", **options}
    result = lowprec_check.scan(model(), torch.randn(8, 64), **given_options)  # type: ignore[arg-type]
    return result.runs[1], result


# -- the estimate


@given(MODELS, st.none() | SIZES, SIZES, st.sampled_from(PARTS))
def test_more_weights_or_activations_never_need_less(size: ModelBytes, peak: int | None, more: int, part: Part) -> None:
    need = size.beyond(part, peak)
    assert need >= size.cast
    assert size._replace(cast=size.cast + more).beyond(part, peak) >= need
    assert size._replace(largest=size.largest + more).beyond(part, peak) >= need
    if peak is not None:
        assert size.beyond(part, peak + more) >= need
        assert need >= size.beyond(part, None)
        assert size.most(peak + more) >= size.most(peak) >= SMALL


@given(MODELS, st.none() | SIZES)
def test_each_part_needs_at_least_as_much_as_the_one_that_explains_less(size: ModelBytes, peak: int | None) -> None:
    needs = [size.beyond(part, peak) for part in PARTS]
    assert needs == sorted(needs)


def test_memory_that_tensors_share_counts_once() -> None:
    tied = nn.Linear(32, 32)
    tied.other = tied.weight
    tied.register_buffer("half_of_it", tied.weight.detach()[:16])
    tied.register_buffer("steps", torch.zeros(10, dtype=torch.int64))
    assert ModelBytes.of(tied) == ModelBytes(held=4 * 33 * 32 + 80, cast=2 * 33 * 32, largest=4 * 32 * 32)


def test_a_model_in_16_bits_is_not_expected_to_shrink() -> None:
    assert ModelBytes.of(nn.Linear(32, 32, bias=False).half()) == ModelBytes(2048, 2048, 2048)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast-bf16"])
@pytest.mark.parametrize("errors", ["none", "accumulated", "both"])
def test_large_weights_take_no_more_than_estimated(precision: str, errors: Part) -> None:
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3))).eval()
    size, allocated = ModelBytes.of(layers), allocated_by(layers, precision, errors)
    assert size.cast <= allocated <= size.beyond(errors, size.held) + BUFFERS


def test_casts_of_weights_are_not_compared_for_the_shares_of_the_output_error() -> None:
    """What a cast of a weight loses counts where it is used, so nothing is computed for the cast itself."""
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3))).eval()
    size = ModelBytes.of(layers)
    allocated_by(layers, "autocast-bf16", "both", budget=True)  # allocates what is kept for all runs of the process
    assert allocated_by(layers, "autocast-bf16", "both", budget=True) <= size.beyond("both", size.held) + BUFFERS


# -- what does not fit


def test_nothing_is_left_out_if_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_with(monkeypatch, 1 << 40)
    assert run.complete
    assert run.budget is not None
    assert run.budget.known
    assert not run.notes


def test_a_run_that_does_not_fit_is_skipped_and_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    run, result = run_with(monkeypatch, 100)
    assert run.status == "skipped"
    assert run.reason is not None
    for words in ("too little memory", "free", "-p bfloat16", "smaller batch"):
        assert words in run.reason
    assert result.runs[0].status == "ok"
    assert result.recommendation is None


@pytest.mark.parametrize(("errors", "left_out"), [("accumulated", "--errors accumulated"), ("none", "--errors none")])
def test_errors_that_do_not_fit_are_left_out_with_a_note(
    errors: Part, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, result = run_with(monkeypatch, 1 << 40)
    peak = result.runs[0].peak_memory_bytes
    run, _ = run_with(monkeypatch, ModelBytes.of(model()).beyond(errors, peak))
    assert run.status == full.status
    assert run.complete
    assert run.output_error == full.output_error
    assert run.budget is None
    (note,) = run.notes
    assert left_out in note
    assert "smaller batch" in note
    calls = run.op_calls
    assert len(calls) == len(full.op_calls)
    assert all(error is None for error in calls.local_error) == (errors != "both")
    assert all(error is None for error in calls.accumulated_error) == (errors == "none")


def test_an_analysis_that_does_not_fit_at_all_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = run_with(monkeypatch, 1 << 40)
    peak = result.runs[0].peak_memory_bytes
    run, result = run_with(monkeypatch, ModelBytes.of(model()).beyond("plain", peak))
    assert run.status == "ok"
    assert not run.complete
    assert run.incomplete_because is not None
    assert "too little memory to run op by op" in run.incomplete_because
    (finding,) = [found for found in result.diagnostics if found.code == "LP905"]
    assert run.incomplete_because in finding.message


@pytest.mark.parametrize("budget_error", ["auto", "on"])
def test_shares_are_limited_unless_they_are_asked_for(budget_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "SMALL", 0)
    monkeypatch.setattr(memory_limits, "MOST_TIMES_FP32", 0.1)
    run, _ = run_with(monkeypatch, 1 << 40, budget_error=budget_error)
    assert run.complete
    if budget_error == "on":
        assert run.budget is not None
        assert run.budget.known
        assert not run.notes
    else:
        (note,) = run.notes
        assert "more than 0.1 times fp32" in note
        assert "--budget-error on" in note


def test_the_reason_for_missing_shares_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = run_with(monkeypatch, 1 << 40)
    peak = result.runs[0].peak_memory_bytes
    assert peak is not None
    size = ModelBytes.of(model())
    monkeypatch.setattr(memory_limits, "SMALL", size.held + size.beyond("both", peak) + 100)
    run, _ = run_with(monkeypatch, 1 << 40, errors="both")
    assert run.budget is not None
    assert run.budget.reason is not None
    assert "2.2 times the memory of fp32" in run.budget.reason
    assert "--budget-error on" in run.budget.reason
    assert all(error is not None for error in run.op_calls.accumulated_error)


def test_weights_that_do_not_fit_on_a_device_are_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "free_memory", lambda _: 1000)
    for device in ("cuda", "xpu"):
        with pytest.raises(UsageError, match=f"does not fit on {device}: its fp32 weights") as caught:
            check_weights_fit(model(), torch.device(device))
        assert "--device cpu" in str(caught.value.hint)
    check_weights_fit(nn.ReLU(), torch.device("cuda"))


def test_a_fresh_interpreter_needs_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ModelBytes.of(model())
    monkeypatch.setattr(memory_limits, "free_memory", lambda _: size.held - 1)
    check_weights_fit(model(), torch.device("cpu"), "fork")
    with pytest.raises(UsageError, match="again"):
        check_weights_fit(model(), torch.device("cpu"), "spawn")
    monkeypatch.setattr(memory_limits, "free_memory", lambda _: size.cast)
    with open_task_files() as files:
        assert why_too_large(model(), "cpu", "fork", None, files) is None
        assert why_too_large(model(), "cpu", "spawn", None, files) is not None
        assert why_too_large(model(), "cuda", "spawn", None, files) is None
        os.write(dict(files.of_fp32)[OUTPUTS], b"outputs")
        assert why_too_large(model(), "cpu", "fork", None, files) is not None


@given(st.integers(0, 1 << 50))
def test_sizes_are_short(count: int) -> None:
    text = gibibytes(count)
    assert text.endswith(" GiB")
    assert float(text.removesuffix(" GiB")) == pytest.approx(count / 2**30, rel=0.05, abs=1e-12)


class Allocates(nn.Module):
    """Asks for more memory than there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(1 << 50).sum()


def test_a_model_that_runs_out_of_memory_in_fp32_says_so() -> None:
    with pytest.raises(UsageError, match="fails in fp32 on cpu") as caught:
        lowprec_check.scan(Allocates(), torch.ones(2), precisions="half", isolation="fork")
    assert "Memory ran out: use a smaller batch" in str(caught.value.hint)


def test_a_killed_model_may_have_run_out_of_memory() -> None:
    class Killed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return x

    with pytest.raises(UsageError, match="SIGKILL") as caught:
        lowprec_check.scan(Killed(), torch.ones(2), precisions="half", isolation="fork")
    assert "If memory ran out" in str(caught.value.hint)


@pytest.mark.parametrize("count", [1, 7, 2_000, 300_000, 5_000_000])
def test_the_checksum_of_parameters_sees_changed_and_moved_values(count: int) -> None:
    layer = nn.ParameterList([torch.randn(count), torch.zeros(0)])
    values = layer[0].data
    before = _fingerprint(layer)
    assert _fingerprint(layer) == before
    for place in {0, count // 2, count - 1}:
        old = values[place].clone()
        values[place] += 1
        assert _fingerprint(layer) != before
        values[place] = old
    assert _fingerprint(layer) == before
    if count > 1:
        for moved in (values.flip(0), torch.cat([values[2:4], values[:2], values[4:]])):
            values.copy_(moved)
            assert _fingerprint(layer) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_the_checksum_of_parameters_sees_that_all_are_multiplied(dtype: torch.dtype) -> None:
    layer = nn.ParameterList([torch.randn(1 << 20).to(dtype)])
    before = _fingerprint(layer)
    for factor in (-1.0, 2.0, 0.5, 2.0**64):
        changed = nn.ParameterList([layer[0].data * factor])
        assert _fingerprint(changed) != before


# -- what the process of a run holds


MEBIBYTE = 1 << 20
WIDE = 2048
"""The weights of a square layer take 16 MiB in fp32."""


class Held(Backend):
    """Keeps 40 MiB that are not torch's, and a copy of the model, or the model itself."""

    summary = "holds memory"

    def __init__(self, name: str, *, copies: bool, hook: int | None = -1) -> None:
        self.name, self._copies, self._hook = name, copies, hook  # type: ignore[misc]

    def prepare(self, model: nn.Module, example: Example) -> Callable[..., Any]:
        """Call the model, or a copy of it in bfloat16."""
        called = copy.deepcopy(model).bfloat16() if self._copies else model
        kept = bytearray(os.urandom(40 * MEBIBYTE))

        def call(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = called(x.to(next(called.parameters()).dtype)).float()
            return output + 0 * len(kept)

        return call

    def memory(self, prepared: Any, measured: int | None) -> int | None:
        """As measured, or what the test says."""
        return measured if self._hook == -1 else self._hook


def scan_rows() -> ScanResult:
    """Scan a layer of 16 MiB on backends that hold memory."""
    backends = [
        Held("refers", copies=False),
        Held("copies", copies=True),
        Held("says", copies=True, hook=5),
        Held("unknown", copies=True, hook=None),
    ]
    BACKENDS._items |= {backend.name: backend for backend in backends}
    layers = nn.Sequential(nn.Linear(WIDE, WIDE)).eval()
    options: dict[str, Any] = {
        "precisions": "half",
        "plan": False,
        "times": "off",
        "further_inputs": 0,
        "errors": "none",
        "tolerance": 1.0,
        "prefer": "memory",
        "thorough": True,  # one call alone has no memory, where half is slow
    }
    return lowprec_check.scan(layers, torch.randn(4, WIDE), backends=["eager", *(b.name for b in backends)], **options)


@pytest.fixture(scope="module")
def rows() -> dict[str, Run]:
    """The runs of :func:`scan_rows` by name, in a process in which other tests have left no memory."""
    command = "import test_memory; print(test_memory.scan_rows().to_json().decode())"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True, text=True
    )
    result = ScanResult.from_json(done.stdout)
    assert result.recommendation is not None
    found = {
        run.precision if run.backend == "eager" else run.backend: run for run in result.runs if run.precision == "half"
    }
    return {**found, "fp32": result.runs[0]}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_memory_is_what_the_process_holds_with_the_prepared_model_alone(rows: dict[str, Run]) -> None:
    def mebibytes(name: str) -> float:
        return (rows[name].process_memory_bytes or 0) / MEBIBYTE

    assert mebibytes("fp32") == pytest.approx(16, abs=3)
    assert mebibytes("half") == pytest.approx(8, abs=3)
    assert mebibytes("refers") == pytest.approx(48, abs=4)  # and the model in half
    assert mebibytes("copies") == pytest.approx(48, abs=4)  # its copy instead of the model
    assert rows["copies"].peak_memory_bytes == rows["copies"].process_memory_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_a_backend_knows_its_memory_or_that_it_is_unknown(rows: dict[str, Run]) -> None:
    runs = list(rows.values())
    assert rows["says"].process_memory_bytes == 5
    assert rows["unknown"].process_memory_bytes is None
    assert rows["unknown"].peak_memory_bytes is None
    assert memory_ratio(rows["unknown"], runs) is None
    assert memory_ratio(rows["half"], runs) == pytest.approx(0.5, abs=0.15)
    best = best_of([rows["unknown"], rows["half"]], runs, {}, "memory")
    assert best is rows["half"]


def test_memory_of_processes_is_not_compared_with_memory_that_was_counted() -> None:
    figures = {"peak_memory_bytes": 64 << 20, "latency_ms": 1.0}
    fp32, eager = (Run(precision=name, device="cpu", status="ok", **figures) for name in ("fp32", "half"))
    jit = msgspec.structs.replace(eager, backend="jit")

    def measured(run: Run) -> Run:
        return msgspec.structs.replace(run, process_memory_bytes=32 << 20)

    assert memory_ratio(eager, [fp32]) == memory_ratio(measured(jit), [measured(fp32)]) == 1.0
    assert memory_ratio(eager, [measured(fp32)]) is None
    assert memory_ratio(measured(jit), [fp32]) is None


def test_a_process_that_holds_little_counts_as_four_mebibytes_and_that_is_said() -> None:
    fp32 = Run(precision="fp32", device="cpu", status="ok", process_memory_bytes=300_000)
    jit = Run(precision="half", backend="jit", device="cpu", status="ok", process_memory_bytes=128 << 20)
    info = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=1, training=False)
    result = conclude(ScanResult(tool="t", target="t", model=info, environment={}, runs=[fp32, jit]))
    shown = " ".join(render(result, "text").split())
    assert "under 4.0 MiB" in shown
    assert "at least 3100 % more memory" in shown


class _InACircle:
    def __init__(self) -> None:
        self.myself = self
        self.parts: list[list[int]] = [[] for _ in range(100)]


def test_garbage_that_a_file_makes_while_it_is_loaded_is_freed_soon() -> None:
    usual = gc.get_threshold()
    alive = weakref.WeakSet[_InACircle]()
    with _rare_collections():
        for _ in range(300):
            alive.add(_InACircle())
        assert len(alive) < 200
    assert gc.get_threshold() == usual
    try:
        with _rare_collections():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*usual)
