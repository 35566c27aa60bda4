"""Whole scans in worker processes: crashes, hangs, budgets, recommendations, and restored state."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call, Mlp, run_bare
from generated import Overflow, Project, build, inputs
from helpers import run_printed, scan_here
from torch import Tensor, nn

import lowprec_check
from lowprec_check import UsageError, scan
from lowprec_check.schema.scan_result import ScanResult

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Misbehaves(nn.Module):
    """Works in fp32; in fp16 it fails as ``what`` names."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.dtype == torch.half:
            self.misbehave()
        return self.linear(x)

    def misbehave(self) -> None:
        if self.what == "exit":
            os._exit(7)
        if self.what == "kill":
            signal.raise_signal(signal.SIGSEGV)
        if self.what == "hang":
            time.sleep(60)
        if self.what == "sys.exit":
            sys.exit(5)
        if self.what == "memory":
            torch.empty(1 << 46)


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("exit", "crashed", "exit code 7"),
        ("kill", "crashed", "SIGSEGV"),
        pytest.param("hang", "timeout", "budget of 1 s", marks=pytest.mark.slow),
        ("sys.exit", "error", None),
        ("memory", "error", None),
    ],
)
def test_a_failing_run_affects_only_its_own_row(what: str, status: str, reason: str | None) -> None:
    budget = 1.0 if what == "hang" else None
    options: dict[str, Any] = {"precisions": ["half", "bfloat16"], "times": "off", "further_inputs": 0}
    result = scan(Misbehaves(what), X, budget=budget, **options)
    bad, other = result.run("half"), result.run("bfloat16")
    assert bad.status == status
    assert other.status == "ok"
    assert result.recommendation is not None
    assert result.recommendation.precision == "bfloat16"
    if reason:
        assert reason in (bad.reason or "")


ODD_OP = """
import signal, time
import torch
from torch import nn

library = torch.library.Library("odd", "DEF")
library.define("op(Tensor x) -> Tensor")

def op(x):
    if x.dtype == torch.half:
        {in_half}
    return x * 2

library.impl("op", op, "CompositeExplicitAutograd")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        {forward}

model = Model().eval()
inputs = torch.randn(4, 8)
"""


@pytest.mark.slow
def test_a_crash_names_the_op_and_the_rest_is_scanned(tmp_path: Path, call: Call) -> None:
    """An op that kills its process is emulated, and the gaps after it are found."""
    script = tmp_path / "deadly.py"
    forward = "return torch.quantile(torch.ops.odd.op(self.linear(x)), 0.5)"
    script.write_text(ODD_OP.format(in_half="signal.raise_signal(signal.SIGSEGV)", forward=forward))
    result = scan_file(call, script, "-p", "half", "--times", "off")
    half = result.run("half")
    assert half.status == "crashed"
    assert "odd.op.default" in (half.reason or "")
    assert {(gap.op, gap.kind) for gap in half.gaps} == {
        ("odd.op.default", "crash"),
        ("torch.quantile", "unsupported-dtype"),
    }
    assert "LP107" in {d.code for d in result.diagnostics}


@pytest.mark.slow
def test_a_slow_kernel_is_measured_once_and_emulated(tmp_path: Path, call: Call) -> None:
    script = tmp_path / "slow.py"
    forward = "for _ in range(20): x = torch.ops.odd.op(self.linear(x))\n        return x"
    script.write_text(ODD_OP.format(in_half="time.sleep(0.12)", forward=forward))
    result = scan_file(call, script, "-p", "half", "--budget", "2", "--no-plan", "--further-inputs", "0")
    half = result.run("half")
    assert half.status == "timeout"
    assert half.complete
    outcomes = [row.outcome for row in half.op_calls.rows() if row.op == "odd.op.default"]
    assert outcomes == ["ok"] + ["emulated"] * 19
    assert {"LP106", "LP903"} <= {d.code for d in result.diagnostics}


def scan_file(call: Call, path: Path, *options: str) -> ScanResult:
    output = path.with_suffix(".json")
    done = call("scan", path, "--json", output, "--fail-on", "never", *options)
    assert done.returncode == 0, done.stderr
    return ScanResult.load(output)


def test_a_model_that_passes_in_every_precision(mlp: Mlp) -> None:
    result = scan(mlp, X)
    assert [run.precision for run in result.runs] == ["fp32", "bfloat16", "autocast-bf16", "half", "autocast-fp16"]
    assert all(run.status == "ok" and run.complete and not run.gaps for run in result.runs)
    assert all(run.perturbed is False for run in result.runs)
    assert result.recommendation is not None
    assert result.recommendation.evidence == "measured"
    assert result.run("half").peak_memory_bytes is not None
    assert result.run("half").peak_memory_bytes < result.run("fp32").peak_memory_bytes  # type: ignore[operator]
    assert result == ScanResult.from_json(result.to_json())


def test_model_inputs_and_global_state_are_unchanged(mlp: Mlp) -> None:
    before = {name: value.clone() for name, value in mlp.state_dict().items()}
    kept, rng = X.clone(), torch.get_rng_state()
    for isolation in ("fork", "none"):
        scan(mlp, X, precisions=["half"], isolation=isolation)  # type: ignore[arg-type]
        assert torch.equal(X, kept)
        assert torch.equal(rng, torch.get_rng_state())
        assert all(torch.equal(value, before[name]) for name, value in mlp.state_dict().items())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_fork_works_after_this_process_used_its_threads() -> None:
    big = torch.randn(600, 600)
    assert torch.isfinite(big @ big).all()
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU())
    assert scan(model, big, precisions=["bfloat16"]).run("bfloat16").status == "ok"


def test_if_all_precisions_fail_modules_are_kept_in_fp32() -> None:
    model = build([Project, Overflow, Project])
    result = scan_here(model, inputs(), precisions=["half", "autocast-fp16"])
    assert result.run("half").status == "nonfinite"
    advice = result.recommendation
    assert advice is not None
    assert advice.keep_fp32 == ["steps.1"]
    assert result.run("plan").status == "ok"


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-fp16", "autocast-bf16", "plan"])
def test_the_pasted_code_has_the_measured_error(precision: str) -> None:
    model = build([Project, Overflow, Project]) if precision == "plan" else build([Project, Project])
    x = inputs()
    wanted = ["autocast-fp16", "half"] if precision == "plan" else [precision]
    result = scan_here(model, x, precisions=wanted)
    assert result.recommendation is not None
    space: dict[str, Any] = {"model": model, "inputs": x}
    reference = run_bare(model, (x,), "fp32")
    exec(result.recommendation.code, space)
    output = space["output"].double()
    error = float((output - reference.double()).norm() / reference.double().norm())
    assert error == pytest.approx(result.recommendation.rel_l2, rel=1e-6)


def test_a_loss_is_part_of_the_model() -> None:
    def loss(output: Tensor) -> Tensor:
        return torch.quantile(output, 0.5)

    result = scan_here(Mlp(), X, precisions=["half"], loss=loss)
    assert result.run("half").status == "error"
    assert [gap.op for gap in result.run("half").gaps] == ["torch.quantile"]
    assert result.run("fp32").loss is not None


def test_a_metric_is_measured_in_each_precision(mlp: Mlp) -> None:
    result = scan_here(mlp, X, precisions=["bfloat16"], metric=lambda model: float(model(X).float().mean()))
    fp32, low = result.run("fp32").metric, result.run("bfloat16").metric
    assert fp32 is not None
    assert low == pytest.approx(fp32, abs=0.05)
    assert low != fp32


def test_a_nondeterministic_reference_is_reported() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + time.perf_counter() % 1 * 1e-5

    result = scan(Counts(), X, precisions=["bfloat16"])
    assert "LP902" in {d.code for d in result.diagnostics}


def test_an_output_of_zeros_is_noted(mlp: Mlp) -> None:
    with torch.no_grad():
        mlp.layers[2].weight.zero_()
        mlp.layers[2].bias.zero_()
    assert any("all zeros" in note for note in scan_here(mlp, X, precisions=["half"]).model.notes)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Linear(4, 4), torch.randn(2, 3), "fails in fp32"),
        (nn.Linear(4, 4, device="meta"), torch.randn(2, 4), "meta device"),
        (nn.Identity(), torch.arange(4), "no floating-point parameters"),
        ("a string", torch.randn(2), "not torch.nn.Module"),
    ],
)
def test_message_for_a_model_that_cannot_be_scanned(model: Any, x: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scan(model, x)


def test_nonfinite_values_in_fp32_are_located() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(-self.linear(x).abs())

    with pytest.raises(UsageError, match=r"NaN or Inf, first produced by aten.log.default at .*test_scan.py:\d+"):
        scan(Log(), X)


def test_unknown_names_are_errors(mlp: Mlp) -> None:
    with pytest.raises(UsageError, match="Unknown precision 'fp8'"):
        scan(mlp, X, precisions=["fp8"])
    with pytest.raises(UsageError, match="Unknown device"):
        scan(mlp, X, device="toaster")
    if not torch.backends.mps.is_available():
        with pytest.raises(UsageError, match="not available"):
            scan(mlp, X, device="mps")
    with pytest.raises(UsageError, match=r"no op aten\.frobnicate"):
        scan(mlp, X, without_kernel=("aten.frobnicate:half",))


def test_a_complex_result_is_where_nan_begins() -> None:
    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zero = torch.complex(x - x, x - x)
            infinite = torch.complex(x, x) / zero
            return infinite.abs() * 0

    with pytest.raises(UsageError, match=r"first produced by aten\.div\.Tensor"):
        scan(Complex(), torch.ones(3), device="cpu")


def test_public_names_are_imported_lazily() -> None:
    assert lowprec_check.scan is scan
    with pytest.raises(AttributeError):
        lowprec_check.nothing  # noqa: B018


def test_autocast_is_recommended_over_a_cast_if_kernels_are_missing() -> None:
    from test_faults import SpectralNet

    torch.manual_seed(0)
    result = scan_here(SpectralNet().eval(), X, without_kernel=("aten.dot:half",))
    assert result.run("half").status == "error"
    assert {(gap.op, gap.module) for gap in result.run("half").gaps} == {
        ("aten.dot.default", "first"),
        ("aten.dot.default", "second"),
    }
    assert result.recommendation is not None
    assert result.recommendation.precision.startswith("autocast")


FORMS = [
    ("model = Net()", "inputs = X"),
    ("model = Net", "def inputs():\n    return (X,)"),
    ("def make_model():\n    return Net()", "inputs = {'x': X}"),
    ("something = Net()", "inputs = [X]"),
]


@pytest.mark.parametrize(("model", "given"), FORMS)
@pytest.mark.parametrize("precision", ["half", "autocast-bf16"])
def test_pasted_code_works_in_the_file(tmp_path: Path, model: str, given: str, precision: str, call: Call) -> None:
    """For every form of model and inputs, the file runs with the pasted code at its end."""
    head = "import torch\nX = torch.ones(1, 8)\n" + textwrap.dedent(
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 4)

            def forward(self, x):
                assert x.shape == (1, 8)
                return self.linear(x)

        """
    )
    path = tmp_path / "formed.py"
    path.write_text(f"{head}{model}\n{given}\n")
    saved = tmp_path / "scan.json"
    assert (
        call("scan", path, "-p", precision, "--times", "off", "--further-inputs", "0", "--json", saved).returncode == 0
    )
    advice = ScanResult.load(saved).recommendation
    assert advice is not None
    space: dict[str, Any] = {}
    exec(path.read_text(), space)
    space = run_printed(advice.code, space)
    assert space["output"].dtype == (torch.half if precision == "half" else torch.bfloat16)


def test_gradients_and_unusual_state_are_unchanged() -> None:
    """A gradient, a counter in a plain tensor, a cache in an object, complex and sparse buffers."""

    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.position = torch.zeros(1)
            self.cache = Cache()
            self.register_buffer("turn", torch.polar(torch.ones(8), torch.arange(8.0)))
            self.register_buffer("sparse", torch.eye(8).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            self.position += 1
            self.cache.seen.append(x)
            turned = torch.view_as_real(self.turn * x.float()).sum(-1).to(x.dtype)
            return self.linear(turned) * self.position.to(x.dtype) * len(self.cache.seen)

    model = Odd()
    model(X).sum().backward()
    model.position.zero_()
    model.cache.seen.clear()
    gradient, cache = model.linear.weight.grad, model.cache
    assert gradient is not None
    kept = gradient.clone()
    for isolation in ("fork", "none"):
        result = scan(model, X, precisions=["half", "bfloat16"], isolation=isolation)  # type: ignore[arg-type]
        assert [run.status for run in result.runs] == ["ok", "ok", "ok"]
        assert all(run.perturbed is False for run in result.runs[1:])
        assert not {"LP902", "LP905"} & {d.code for d in result.diagnostics}
        assert model.cache is cache
        assert not cache.seen
        assert float(model.position) == 0
        assert model.linear.weight.grad is gradient
        assert torch.equal(gradient, kept)


def test_a_fused_layer_is_recorded_in_the_precision_it_runs_in() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    run = scan_here(layer, torch.randn(2, 3, 8), precisions=["autocast-bf16"]).run("autocast-bf16")
    assert run.perturbed is False
    assert any(row.accumulated_error for row in run.op_calls.rows())


def test_an_error_that_the_model_handles_is_a_note() -> None:
    class Handles(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)[:4, :4]
            try:
                return torch.linalg.inv(y)
            except RuntimeError:
                return torch.linalg.inv(y.float()).to(y.dtype)

    result = scan_here(Handles(), X, precisions=["bfloat16"], tolerance=1.0)
    assert result.run("bfloat16").status == "ok"
    assert [d.severity for d in result.diagnostics if d.code == "LP101"] == ["note"]


def test_outputs_without_tensors() -> None:
    class Score(Mlp):
        def forward(self, x: Tensor) -> float:  # type: ignore[override]
            return super().forward(x).sum().item()

    class Nothing(Mlp):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    score = scan_here(Score(), X, precisions=["bfloat16"]).run("bfloat16")
    assert score.status == "ok"
    assert score.output_error is not None
    assert score.output_error.rel_l2
    nothing = scan_here(Nothing(), X, precisions=["bfloat16"]).run("bfloat16")
    assert nothing.status == "ok"
    assert nothing.compared_module


def test_models_in_other_dtypes_are_scanned_as_fp32_with_a_note() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        result = scan_here(Mlp().to(dtype), X.to(dtype), precisions=["half", "autocast-fp16"])
        assert result.run("half").output_error.rel_l2  # type: ignore[union-attr]
        assert any(str(dtype)[6:] in note for note in result.model.notes)


def test_nondeterministic_models_are_errors() -> None:
    class Nondeterministic(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0 ** (int.from_bytes(os.urandom(2), "big") / 1000)  # 1 to 5e19

    with pytest.raises(UsageError, match="too much for a reference"):
        scan(Nondeterministic(), X)


@pytest.mark.parametrize("device", ["cuda:banana", "xpu:", "cuda:7x", "cuda:07", "cuda:٣", "tpu"])
def test_a_device_that_cannot_be_is_an_error(mlp: Mlp, device: str) -> None:
    with pytest.raises(UsageError, match="Unknown device"):
        scan(mlp, torch.randn(4, 16), device=device)


def test_inputs_that_a_function_makes_are_made_in_the_code_to_paste() -> None:
    def inputs(batch: int) -> Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))

    model = nn.Linear(8, 8).eval()
    result = scan_here(model, inputs, precisions="half")
    assert result.recommendation is not None
    names: dict[str, Any] = {"model": model, "inputs": inputs}
    exec(result.recommendation.code, names)
    assert names["output"].dtype == torch.half


def test_a_metric_that_is_no_number_is_said(mlp: Mlp) -> None:
    result = scan_here(mlp, torch.randn(4, 8), precisions="half", metric=lambda model: float("nan"))
    assert [run.metric for run in result.runs] == [None, None]
    assert all("metric(model) returned nan: it is left out" in run.notes for run in result.runs)
