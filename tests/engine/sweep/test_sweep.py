"""The sweep: its results are correct, and an operator that kills its process affects no other."""

from __future__ import annotations

import os
from pathlib import Path

import bare
import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lowprec_check.catalog.measured import Sweep, read_sweeps, sweep_of
from lowprec_check.catalog.records import LOW, MODES, Dtype, Failure, in_samples
from lowprec_check.engine.sweep.failures import Raised, condition, kind_of, merged
from lowprec_check.errors import UsageError
from tools.catalog_files import MeasuredSweep
from tools.operator_sweep.__main__ import build
from tools.operator_sweep.ulp import summary, ulp_errors

# -- the catalog agrees with direct calls


def installed_sweep() -> Sweep:
    """The shipped sweep of this torch; skips if it was measured on another kind of CPU."""
    try:
        sweep = sweep_of("cpu", torch.__version__)
    except UsageError as error:
        pytest.skip(str(error))
    here = torch.backends.cpu.get_cpu_capability().lower()
    if sweep.header.torch != torch.__version__.partition("+")[0] or sweep.header.capability != here:
        pytest.skip(f"measured with torch {sweep.header.torch} on {sweep.header.capability}, here is {here}")
    return sweep


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_catalog_agrees_with_direct_calls_of_random_ops(data: st.DataObject) -> None:
    sweep = installed_sweep()
    op = data.draw(st.sampled_from(sorted(sweep.records)))
    dtype, mode = data.draw(st.sampled_from(LOW)), data.draw(st.sampled_from(MODES))
    state = sweep.state(op, dtype, mode)
    assume(state is not None)
    found = bare.truth(op, getattr(torch, dtype), mode)
    assert state != "all" or all(found), (op, dtype, mode, found)
    assert state != "none" or not any(found), (op, dtype, mode, found)


@pytest.mark.parametrize(
    ("op", "dtype", "mode", "state"),
    [
        ("dot", "float16", "forward", "all"),
        ("linalg.svd", "float16", "forward", "none"),
        ("linalg.svd", "float16", "autocast", "all"),
        ("fft.rfft", "bfloat16", "forward", "none"),
        ("cdist", "float16", "forward", "some"),
        ("special.i1", "float16", "forward", "all"),
        ("special.i1", "float16", "backward", "none"),
        ("nn.functional.pdist", "float16", "backward", "none"),
    ],
)
def test_known_support_states(op: str, dtype: str, mode: str, state: str) -> None:
    assert installed_sweep().state(op, dtype, mode) == state  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "op",
    [
        "cdist",
        "cholesky_inverse",
        "fft.rfft",
        "linalg.inv",
        "linalg.pinv",
        "linalg.svd",
        "nn.functional.pdist",
        "quantile",
        "signal.windows.bartlett",
        "special.zeta",
        "linalg.eigvals",
    ],
)
def test_a_message_is_that_of_torch_for_the_dtype(op: str, dtype: Dtype) -> None:
    failure = installed_sweep().records[op].failure(dtype, "forward")
    assert failure is not None
    assert all(cell.startswith(f"{dtype}/") for cell in failure.cells)
    assert failure.message in bare.messages(op, getattr(torch, dtype))


@pytest.mark.slow
def test_a_new_sweep_agrees_with_the_catalog(tmp_path: Path) -> None:
    shipped, only = installed_sweep(), ["dot", "cdist", "special.i1", "nn.functional.dropout"]
    first, second = (build("cpu", jobs=jobs, only=only) for jobs in (1, 2))
    assert first.records == second.records
    for record in first.records:
        there = shipped.records[record.op]
        assert (record.samples, record.passed, record.aten) == (there.samples, there.passed, there.aten)
        assert [(f.cells, f.kind, f.at) for f in record.failures] == [(f.cells, f.kind, f.at) for f in there.failures]
    assert "p=2.0" in str(next(record for record in first.records if record.op == "cdist").failures[0].condition)
    saved = [first.save(folder) for folder in (tmp_path / "a", tmp_path / "b") if not folder.mkdir()]  # type: ignore[func-returns-value]
    assert saved[0][0].read_bytes() == saved[1][0].read_bytes()
    assert read_sweeps(saved[0][0])[0].records["dot"] == first.records[1]


# -- workers that die


@pytest.fixture(scope="module")
def deadly() -> MeasuredSweep:
    """A sweep of the operators of `killing_worker`."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), before])
    try:
        return build("cpu", jobs=2, worker="killing_full_worker", call_seconds=1.5)
    finally:
        os.environ["PYTHONPATH"] = before


@pytest.mark.slow
def test_a_worker_that_dies_affects_only_its_operator(deadly: MeasuredSweep) -> None:
    records = {record.op: record for record in deadly.records}
    assert list(records) == ["always_dies", "dies", "hangs", "prints", "refuses_large"]
    assert records["prints"].failures == []
    assert records["prints"].state("float16", "backward") == "all"
    crash = records["dies"].failure("float16", "forward")
    assert crash is not None
    assert (crash.kind, crash.type) == ("crash", "SIGSEGV")
    assert records["dies"].state("float16", "forward") == "none"
    assert records["dies"].state("float32", "forward") == "all"
    assert records["dies"].state("bfloat16", "backward") == "all"


@pytest.mark.slow
def test_an_operator_that_always_kills_is_given_up(deadly: MeasuredSweep) -> None:
    record = deadly.records[0]
    assert record.note is not None
    assert "exit code 3 in float32/forward" in record.note
    assert {failure.kind for failure in record.failures} == {"crash"}
    assert record.state("float32", "forward") == "none"


@pytest.mark.slow
def test_a_call_that_hangs_is_a_timeout(deadly: MeasuredSweep) -> None:
    hanging = next(record for record in deadly.records if record.op == "hangs")
    failure = hanging.failure("bfloat16", "forward")
    assert failure is not None
    assert failure.kind == "timeout"
    assert hanging.state("float16", "backward") == "all"


@pytest.mark.slow
def test_a_failure_that_depends_on_size_has_a_condition(deadly: MeasuredSweep) -> None:
    record = next(record for record in deadly.records if record.op == "refuses_large")
    assert record.state("float16", "forward") == "some"
    failure = record.failure("float16", "forward")
    assert failure is not None
    assert failure.condition is not None
    assert failure.condition.startswith("fails from largest size")


@pytest.mark.slow
def test_an_unavailable_device_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.raises(UsageError, match="not available"):
        build("cuda", jobs=1)


# -- kinds and conditions of failures


def test_kinds_of_failures() -> None:
    assert kind_of(Raised("RuntimeError", "x without overflow"), "fill", fails_in_fp32=False) == "scalar-overflow"
    assert kind_of(Raised("RuntimeError", "\"dot\" not implemented for 'Half'"), None, fails_in_fp32=False) == (
        "missing-kernel"
    )
    assert kind_of(Raised("RuntimeError", "Unsupported dtype Half"), None, fails_in_fp32=False) == "unsupported-dtype"
    assert kind_of(Raised("RuntimeError", "expected scalar type Float but found Half"), "mm", fails_in_fp32=False) == (
        "dtype-mismatch"
    )
    could_not = Raised("NotImplementedError", "Could not run 'aten::x' with arguments from the 'XPU' backend.")
    assert kind_of(could_not, "x", fails_in_fp32=True) == "no-backend-kernel"
    assert kind_of(Raised("SIGSEGV", "died", died=True), None, fails_in_fp32=False) == "crash"


values = st.one_of(st.booleans(), st.integers(0, 3), st.sampled_from(["a", "b"]), st.none())
samples = st.lists(st.fixed_dictionaries({"p": values, "largest size": st.integers(1, 40)}), min_size=1, max_size=6)


@given(passed=samples, failed=samples)
def test_a_condition_separates_failing_from_passing_samples(
    passed: list[dict[str, object]], failed: list[dict[str, object]]
) -> None:
    text = condition(passed, failed)
    if text is not None and " p" in text and " and " not in text and "from" not in text:
        assert {repr(sample["p"]) for sample in passed}.isdisjoint(repr(sample["p"]) for sample in failed)
    if text is not None and text.startswith("fails from largest size"):
        bound = int(text.split()[4])
        assert all((sample["largest size"] >= bound) == (sample in failed) for sample in (*passed, *failed))  # type: ignore[operator]
    assert condition(failed, passed) is None or text is None or condition(failed, passed) != text or passed == failed


def test_of_equally_good_properties_a_flag_is_named() -> None:
    sizes = {"all sizes powers of two": True, "largest size": 2}
    failed = [{"lower": 0.0, "training": True} | sizes, {"lower": 0.0, "training": True} | sizes]
    passed = [{"lower": 0.1, "training": False} | sizes, {"lower": 0.2} | sizes]
    assert condition(passed, failed) == "fails where training"
    odd = {"all sizes powers of two": False, "largest size": 2}
    assert condition([{"k": 1} | sizes], [{"k": 2} | odd]) == "fails from k 2 (runs up to 1)"  # arguments before sizes


def test_a_condition_is_shown_as_limited_to_the_samples() -> None:
    assert in_samples("fails where p=2.0") == "; in the measured samples it fails where p=2.0"
    assert in_samples(None) == ""


def raising(cell: str, message: str) -> Failure:
    return Failure(cells=[cell], type="RuntimeError", kind="missing-kernel", message=message)


def test_failures_that_differ_only_in_the_name_of_their_dtype_are_merged() -> None:
    messages = ("\"dot\" not implemented for 'Half'", "\"dot\" not implemented for 'BFloat16'")
    [dot] = merged([raising("float16/forward", messages[0]), raising("bfloat16/forward", messages[1])])
    assert dot.of("float16") == raising("float16/forward", messages[0])
    assert dot.of("bfloat16") == raising("bfloat16/forward", messages[1])
    assert dot.of("float32") is None
    cases = ("expected Half but found Float", "expected Float but found BFloat16"), ("only Half", "only Half")
    for half, bfloat16 in cases:  # they differ in more than the name of their own dtype
        assert len(merged([raising("float16/forward", half), raising("bfloat16/forward", bfloat16)])) == 2


words = st.sampled_from(
    ["Half", "BFloat16", "Float", "c10::", "torch.", "float16", "bfloat16", "float32", "float", " "]
)


@given(templates=st.lists(st.lists(words).map("".join), min_size=2, max_size=2))
def test_merged_failures_can_be_separated_again(templates: list[str]) -> None:
    failures = [raising("float16/forward", templates[0]), raising("bfloat16/forward", templates[1])]
    found = merged(failures)
    assert [whole.of(dtype) for whole in found for dtype in LOW if whole.of(dtype)] == failures


@settings(max_examples=25)
@given(
    values=st.lists(st.floats(1, 64, width=32), min_size=1, max_size=20),
    steps=st.integers(-3, 3),
    low=st.sampled_from([torch.half, torch.bfloat16]),
)
def test_ulp_error_is_the_number_of_steps(values: list[float], steps: int, low: torch.dtype) -> None:
    exact = torch.tensor(values, dtype=torch.float64).to(low)
    moved = exact
    for _ in range(abs(steps)):
        moved = torch.nextafter(moved, torch.full_like(moved, float("inf") if steps > 0 else -float("inf")))
    errors = ulp_errors(moved, exact.double(), low)
    same_binade = torch.frexp(moved.double()).exponent == torch.frexp(exact.double()).exponent
    assert torch.equal(errors[same_binade], torch.full_like(errors[same_binade], abs(steps)))


def test_ulp_error_of_nonfinite_values() -> None:
    reference = torch.tensor([1e6, 1.0, float("inf"), 0.0], dtype=torch.float64)
    rounded = reference.to(torch.half)
    assert ulp_errors(rounded, reference, torch.half).tolist() == [0.0, 0.0, 0.0, 0.0]
    nan = torch.tensor([1.0, float("nan"), 1.0, 0.0], dtype=torch.half)
    errors = ulp_errors(nan, reference, torch.half)
    assert errors.isinf().tolist() == [True, True, True, False]
    found = summary([errors])
    assert found is not None
    assert found.max is None
    assert summary([]) is None
