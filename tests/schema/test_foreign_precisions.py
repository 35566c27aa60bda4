"""8-bit precisions registered by another package: each part of this one supports them, or says that it does not."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check import Application, FloatFormat, Precision, ScanResult, UsageError, scan
from lowprec_check.analysis.rules.registry import known_issue
from lowprec_check.catalog import find_fix, gaps, lookup
from lowprec_check.catalog.names import why_not_covered
from lowprec_check.core.trace import ops
from lowprec_check.engine.model.prepared import application_of
from lowprec_check.pytest_plugin.coverage_gate import CoverageColumn
from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec
from lowprec_check.pytest_plugin.marker import Case, cases
from lowprec_check.report.registry import render
from lowprec_check.schema import registry
from lowprec_check.schema.precisions import BF16, FP16, FP32, PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run

E4M3 = FloatFormat("float8_e4m3fn", "e4m3", "f8", 4, -6, 8, tolerance=0.2)
E5M2 = FloatFormat("float8_e5m2", "e5m2", "f8e5", 3, -14, 15, tolerance=0.3)
E4M3_UZ = FloatFormat("float8_e4m3fnuz", "e4m3uz", "f8uz", 4, -7, 7, tolerance=0.2)
E5M2_UZ = FloatFormat("float8_e5m2fnuz", "e5m2uz", "f8e5uz", 3, -15, 15, tolerance=0.3)
SEVEN_BITS = FloatFormat("float16", "fp12", "f16", 7, -14, 15, tolerance=0.2)

FP8 = Precision(name="fp8", kind="cast", format=E4M3, aliases=("f8e4",))
AUTOCAST = Precision(name="autocast-fp8", kind="autocast", format=E4M3)
STRICT = Precision(name="strict-half", kind="cast", format=SEVEN_BITS, method="half", tolerance=1e-9)
WEIGHTS = Precision(
    name="fp8-weights",
    kind="custom",
    format=E4M3,
    application=f"{__name__}:RoundedWeights",
    snippet=lambda device, keep_fp32: "round_weights(model)",
)


class RoundedWeights(Application):
    """Rounds the weights and computes in fp32."""

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Any) -> None:
        """Round them."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype).to(parameter.dtype)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The precisions are in the registry, as if a package had added them."""
    for precision in (FP8, AUTOCAST, STRICT, WEIGHTS):
        monkeypatch.setitem(PRECISIONS._items, precision.name, precision)
    ops._short_names.cache_clear()
    ops._flow.cache_clear()
    yield
    ops._short_names.cache_clear()
    ops._flow.cache_clear()


class Net(nn.Module):
    """A layer that runs in E4M3, and an op that does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """The ReLU of the layer."""
        return self.linear(x).relu()


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


# -- the limits of a format


@pytest.mark.parametrize("format", [E4M3, E5M2, E4M3_UZ, E5M2_UZ, FP16, BF16], ids=lambda found: str(found.name))
def test_limits_are_those_of_all_bit_patterns(format: FloatFormat) -> None:
    dtype = getattr(torch, format.name)
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64)
    values = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype).double()
    positive = values[(values > 0) & values.isfinite()].sort().values
    assert float(positive[-1]) == format.largest == torch.finfo(dtype).max
    assert float(positive[0]) == format.smallest_subnormal
    assert format.smallest_normal == torch.finfo(dtype).smallest_normal
    assert float(positive[positive > 1][0]) - 1 == 2 * format.roundoff
    assert bool(values.isinf().any()) == (format.specials == "ieee")


def test_the_largest_numbers() -> None:
    assert (E4M3.largest, E5M2.largest, E4M3_UZ.largest, FP16.largest) == (448, 57344, 240, 65504)
    assert FloatFormat("float8", "f", "f", 4, -6, 8, tolerance=1, specials="fn").largest == 448
    assert FP32.largest == torch.finfo(torch.float32).max


@given(st.sampled_from([E4M3, E5M2, FP16]), st.floats(-1, 1), st.integers(-30, 16))
def test_rounding_errs_by_at_most_the_roundoff(format: FloatFormat, mantissa: float, exponent: int) -> None:
    value = torch.tensor(mantissa * 2.0**exponent)
    if abs(value) <= format.largest:
        error = (value.to(getattr(torch, format.name)).double() - value.double()).abs()
        assert error <= max(format.roundoff * float(value.abs()), format.smallest_subnormal / 2)


# -- coverage and the catalog


def test_the_catalog_covers_casts_and_autocast_of_its_dtypes() -> None:
    covered = {precision.name for precision in PRECISIONS if why_not_covered(precision) is None}
    assert covered == {"fp32", "half", "bfloat16", "autocast-fp16", "autocast-bf16", "strict-half"}


@pytest.mark.parametrize("ask", [lookup, gaps, find_fix], ids=lambda ask: str(ask.__name__))
@pytest.mark.parametrize("name", ["fp8", "autocast-fp8", "f8e4", "e4m3", "torch.float8_e4m3fn"])
def test_the_catalog_says_that_it_has_no_data(ask: Callable[..., Any], name: str) -> None:
    fix: dict[str, Any] = {"op": "aten.dot.default", "device": "cpu", "torch": "2.13"}
    arguments = {lookup: {"query": "dot"}, gaps: {}, find_fix: fix}[ask]
    with pytest.raises(UsageError, match=f"The catalog has no data for {name}.\nChoose half, bfloat16 or fp32."):
        ask(**arguments, dtype=name)


def test_a_format_with_a_dtype_of_the_catalog_has_a_key_of_its_own() -> None:
    keys = [CoverageColumn(PRECISIONS.get(name), None).key for name in ("half", "strict-half", "autocast-bf16")]  # type: ignore[arg-type]
    assert keys == ["float16", "strict-half", "autocast-bf16"]


def test_an_issue_of_half_is_not_named_for_another_dtype() -> None:
    model = Net()
    result = scan(model, X, precisions="half", times="off", plan=False, isolation="none", further_inputs=0)
    message = "\"dot\" not implemented for 'Half'"

    def issue(precision: str) -> object:
        run = Run(precision=precision, device="xpu", status="error")
        return known_issue(result, "LP101", "aten.dot.default", run, message)

    assert result.torch
    assert issue("fp8") is issue("fp8-weights") is None
    older = msgspec.structs.replace(result, environment=result.environment | {"torch": "2.1.0"})
    found = known_issue(
        older, "LP101", "aten.dot.default", Run(precision="half", device="xpu", status="error"), message
    )
    assert found is not None
    assert found.dtypes == ["half"]
    fp8 = Run(precision="fp8", device="xpu", status="error")
    assert known_issue(older, "LP101", "aten.dot.default", fp8, message) is None


# -- scans


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ScanResult:
    """A scan in all of them."""
    with pytest.MonkeyPatch.context() as patched:
        for precision in (FP8, AUTOCAST, STRICT, WEIGHTS):
            patched.setitem(PRECISIONS._items, precision.name, precision)
        ops._short_names.cache_clear()
        names = ["fp8", "autocast-fp8", "fp8-weights"]
        return scan(Net(), X, precisions=names, times="off", plan=False, isolation="none")


def test_a_scan_runs_them_or_says_why_not(result: ScanResult) -> None:
    cast, autocast, weights = (result.run(name) for name in ("fp8", "autocast-fp8", "fp8-weights"))
    assert cast.status == "error"
    assert {gap.op for gap in cast.gaps} == {"aten.relu.default"}
    assert "f8" in cast.op_calls.dtypes[0]
    assert autocast.status == "skipped"
    assert autocast.reason == "torch's autocast does not support float8_e4m3fn on cpu: it would compute in fp32"
    assert (weights.status, weights.tolerance) == ("ok", 0.2)
    assert 1e-3 < (weights.rel_l2 or 0.0) < 0.1
    assert result.recommendation is not None
    assert result.recommendation.precision == "fp8-weights"


@pytest.mark.parametrize("format", ["text", "md", "html", "sarif", "junit", "json"])
def test_every_report_names_them(result: ScanResult, format: str) -> None:
    shown = str(render(result, format))
    assert "fp8-weights" in shown
    assert "torch.float16" not in shown


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_nothing_is_predicted_without_data(device: str) -> None:
    found = scan(
        Net(),
        X,
        precisions=["fp8", "autocast-fp8", "fp8-weights"],
        device=device,
        predict=True,
        times="off",
        errors="none",
        plan=False,
    )
    reasons = {run.precision: run.reason for run in found.runs if run.status == "skipped"}
    assert reasons == {
        name: f"nothing can be predicted: the catalog has no data for float8_e4m3fn, the dtype of {name}"
        for name in ("fp8", "autocast-fp8")
    }
    assert found.run("fp8-weights").status == "ok"


def test_a_dtype_that_this_torch_lacks_is_a_sentence() -> None:
    unknown = Precision(name="fp7", kind="cast", format=FloatFormat("float7", "fp7", "f7", 3, -6, 7, tolerance=1))
    with pytest.raises(UsageError, match=r"has the dtype 'float7', which torch .* lacks.\nUpgrade torch"):
        application_of(unknown)


# -- the fixture and the marker


def test_the_marker_takes_them() -> None:
    found = cases(pytest.mark.lowprec("f8e4", "fp8-weights").mark)
    assert [(case.id, case.largest_error) for case in found] == [("fp8-cpu", 0.2), ("fp8-weights-cpu", 0.2)]
    lowprec = Lowprec(Case(RunKey("fp8", "eager", "cpu"), None))
    assert lowprec.dtype == lowprec.cast(X).dtype == torch.float8_e4m3fn
    assert lowprec.allclose(lowprec.cast(X), X)
    assert not Lowprec(Case(RunKey("half", "eager", "cpu"), None)).allclose(lowprec.cast(X), X)


def test_autocast_that_torch_would_ignore_fails() -> None:
    with (
        pytest.warns(UserWarning, match="Disabling"),
        pytest.raises(UsageError, match="does not support float8_e4m3fn on cpu"),
    ):
        Lowprec().autocast("autocast-fp8")


@pytest.mark.parametrize("dtype", ["fp8", "f8e4", "e4m3", torch.float8_e4m3fn])
def test_the_fixture_finds_their_gaps(dtype: Any) -> None:
    with pytest.raises(AssertionError, match=r"Net in fp8 on cpu, torch .*: 1 gap"):
        Lowprec().assert_no_gaps(Net(), X, dtype=dtype)
    with Lowprec().record(dtype) as recording:
        X.to(torch.float8_e4m3fn).relu()
    assert [gap.op for gap in recording.gaps] == ["aten.relu.default"]


def test_the_fixture_refuses_what_is_no_cast() -> None:
    hint = r"Choose torch.half, torch.bfloat16 or torch.float8_e4m3fn.$"
    for dtype in ("fp8-weights", "autocast-fp8", "int8", "fp32", 5):
        with pytest.raises(UsageError, match=hint):
            Lowprec().record(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp8", torch.float8_e4m3fn])
def test_the_fixture_has_no_support_data(dtype: Any) -> None:
    with pytest.raises(UsageError, match=f"The catalog has no data for {dtype}.\nChoose half, bfloat16 or fp32."):
        Lowprec().assert_supported("dot", dtype=dtype)


# -- through an installed package

PACKAGE = """
from lowprec_check import Device, FloatFormat, Precision
E4M3 = FloatFormat("float8_e4m3fn", "fp8", "f8", 4, -6, 8, tolerance=0.2)
FP8 = Precision(name="fp8", kind="cast", format=E4M3)
AUTOCAST = Precision(name="autocast-fp8", kind="autocast", format=E4M3)
TPU, NPU = Device(name="tpu", catalog="measured"), Device(name="npu", catalog="declared")
"""
ENTRIES = "[lowprec_check.axes]\nfp8 = eight:FP8\nac = eight:AUTOCAST\ntpu = eight:TPU\nnpu = eight:NPU\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and a test."""
    path = tmp_path_factory.mktemp("eight")
    (path / "eight-1.0.dist-info").mkdir()
    (path / "eight-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: eight\nVersion: 1.0\n")
    (path / "eight-1.0.dist-info" / "entry_points.txt").write_text(ENTRIES)
    (path / "eight.py").write_text(PACKAGE)
    (path / "test_it.py").write_text("def test_it():\n    pass\n")
    (path / "net.py").write_text("import torch\nmodel, inputs = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)\n")
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_coverage_refuses_them(installed: Path) -> None:
    says = "the catalog has no data for float8_e4m3fn, the dtype of autocast-fp8."
    done = run(installed, "pytest", "-p", "no:cacheprovider", "-q", "--lowprec-coverage", "half,autocast-fp8")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--lowprec-coverage: {says}\nChoose from bfloat16, autocast-bf16, half, autocast-fp16." in done.stderr
    assert "measured" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("device", ["tpu", "npu"])
def test_a_device_without_data_is_refused(installed: Path, device: str) -> None:
    for arguments in (("op", "dot"), ("catalog", "gaps"), ("scan", "net.py", "-p", "half")):
        done = run(installed, "lowprec_check", *arguments, "--device", device)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), (arguments, done.stderr)
        assert device in done.stderr


@pytest.mark.slow
def test_coverage_refuses_a_device_without_data(installed: Path) -> None:
    words = ["-p", "no:cacheprovider", "-q", "--lowprec-coverage", "half", "--lowprec-device", "npu"]
    done = run(installed, "pytest", *words)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "for npu" in done.stderr or "on npu" in done.stderr


def test_an_object_that_is_no_axis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value, dist = "x", "other:X", None

        @staticmethod
        def load() -> object:
            return E4M3

    monkeypatch.setattr(registry, "_may_add", lambda: True)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry])
    with pytest.raises(UsageError, match=r"which is a FloatFormat.\nRegister a Precision, a Backend"):
        registry.added_by_packages.__wrapped__()


def test_saved_runs_keep_their_reason(result: ScanResult, tmp_path: Path) -> None:
    path = tmp_path / "scan.json"
    result.save(path)
    saved = {run["precision"]: run["status"] for run in json.loads(path.read_text())["runs"]}
    assert saved.pop("fp32") in ("reference", "ok")
    assert saved == {"fp8": "error", "autocast-fp8": "skipped", "fp8-weights": "ok"}
