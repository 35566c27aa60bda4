"""The plugin: no effect if unused, the fixture, the marker, and the text of each failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import INSTALLED, PLUGIN, ROOT

from lowprec_check.catalog.declared import releases
from lowprec_check.catalog.measured import sweep_of
from lowprec_check.catalog.versions import installed_release
from lowprec_check.engine.sweep import kept_sweep
from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin import op_support as support
from lowprec_check.pytest_plugin.fixture import lowprec as fixture  # noqa: F401 - imported once for all projects
from lowprec_check.pytest_plugin.marker import cases, is_device_available
from lowprec_check.schema.precisions import low_precisions

NAMES = [precision.name for precision in low_precisions()]

MODEL = """
import pytest
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        x = torch.linalg.inv(x @ x.T + torch.eye(4, dtype=x.dtype))
        return torch.quantile(x, 0.5) + x

torch.manual_seed(0)
net, x = Net().eval(), torch.randn(4, 8)
"""


def texts(result: pytest.RunResult) -> str:
    """The errors of failed assertions, without the margin that pytest adds."""
    return "\n".join(line[8:].rstrip() for line in result.outlines if line[:2] == "E ")


def one(project: pytest.Pytester, body: str, **outcomes: int) -> str:
    project.makepyfile(test_one=MODEL + f"\ndef test_it(lowprec):\n    {body}\n")
    result = project.runpytest()
    result.assert_outcomes(**(outcomes or {"failed": 1}))
    return texts(result)


# -- unused


def test_unused_it_imports_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_it():
            assert "torch" not in sys.modules
            ours = {name for name in sys.modules if name.startswith("lowprec_check")}
            assert ours == {"lowprec_check", "lowprec_check.pytest_plugin", "lowprec_check.pytest_plugin.hooks"}
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.slow
def test_unused_it_changes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest, warnings, pytest

        @pytest.fixture
        def broken():
            raise OSError

        @pytest.mark.parametrize("n", [1, 2])
        def test_param(n):
            assert n == 1

        def test_broken(broken): pass
        def test_skip(): pytest.skip("why")
        def test_warns(): warnings.warn("careful")

        @pytest.mark.xfail
        def test_known(): assert 0

        class TestCase(unittest.TestCase):
            def test_u(self): self.assertEqual(1, 2)
        """
    )
    options = ("-v", "-rA", "-p", "no:cacheprovider", "--junitxml=out.xml")
    left_out = ("-p", "no:lowprec") if INSTALLED else ()
    without = pytester.runpytest_subprocess(*left_out, *options)
    xml = _timeless(Path("out.xml").read_text())
    used = pytester.runpytest_subprocess("-p", PLUGIN, *options)
    assert _timeless(used.stdout.str()) == _timeless(without.stdout.str())
    assert used.stderr.str() == without.stderr.str()
    assert used.ret == without.ret
    assert _timeless(Path("out.xml").read_text()) == xml


def _timeless(text: str) -> str:
    text = re.sub(r"lowprec-check-[^\s,]+(, )?", "", text)  # pytest lists what is installed
    text = re.sub(r"in \d+\.\d+s|time(stamp)?=\"[^\"]+\"|0x[0-9a-f]+", "", text)
    return re.sub(r"=+", "=", text)


@pytest.mark.parametrize(
    ("options", "early"),
    [((), 1), (("-k", "test_other"), 0), (("--collect-only",), 0), pytest.param(("-n1",), 0, marks=pytest.mark.slow)],
)
def test_the_worker_starts_while_other_tests_run_if_one_needs_it(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], early: int
) -> None:
    project.makepyfile(
        """
        import unittest

        def test_other(): pass

        class TestIt:
            def test_support(self, lowprec):
                if lowprec is None:
                    lowprec.assert_supported("dot")

        class TestCase(unittest.TestCase):
            def test_u(self): pass
        """
    )
    started: list[str] = []
    monkeypatch.setattr(kept_sweep, "start_early", started.append)
    assert project.runpytest(*options).ret == 0
    assert started == ["cpu"] * early


def test_help_and_markers(project: pytest.Pytester) -> None:
    helped = project.runpytest("--help").stdout.str()
    options = set(re.findall(r"--lowprec[\w-]*", helped))
    assert options == {
        "--lowprec-coverage", "--lowprec-device", "--lowprec-report", "--lowprec-format", "--lowprec-fail-on",
        "--lowprec-baseline", "--lowprec-manifest", "--lowprec-update-manifest",
    }  # fmt: skip
    keys = {option[2:].replace("-", "_") for option in options} - {"lowprec_update_manifest"}
    assert keys <= set(re.findall(r"lowprec_\w+", helped))
    markers = project.runpytest("--markers").stdout.str()
    assert all(name in markers for name in NAMES)
    assert '@pytest.mark.lowprec(*precisions, device="cpu", backend="eager", tolerance=None)' in markers


# -- the fixture


def test_check_reports_all_gaps_at_once(project: pytest.Pytester) -> None:
    text = one(project, 'lowprec.check(net, x, precision=["half", "autocast-bf16"])')
    assert "Net does not pass in half on cpu, torch" in text
    assert "2 gaps" in text
    assert re.search(r"^half +fails", text, re.M)
    assert re.search(r"^autocast-bf16 +ok", text, re.M)
    assert re.search(r"LP101 missing-kernel +half +linalg_inv_ex +the model itself, test_\w+.py:12", text)
    assert re.search(r"LP102 unsupported-dtype +half +torch.quantile +the model itself, test_\w+.py:13", text)
    assert "compute it in fp32 and cast back" in text
    assert "lowprec-check explain LP101" in text


def test_check_passes_and_returns_the_scan(project: pytest.Pytester) -> None:
    one(
        project,
        'result = lowprec.check(nn.Linear(8, 8), x, precision="bfloat16"); '
        'assert result.run("bfloat16").status == "ok"',
        passed=1,
    )


def test_check_fails_if_further_inputs_do(project: pytest.Pytester) -> None:
    model = "net = nn.Softmax(-1)\n    net.forward = lambda x: x.exp()"
    text = one(project, f"{model}\n    lowprec.check(net, lambda: torch.randn(64) * 4, seed=1, tolerance=0.2)")
    assert "further inputs" in text
    assert "does not pass in half" in text


def test_check_fails_over_the_tolerance(project: pytest.Pytester) -> None:
    text = one(project, "lowprec.check(nn.Linear(8, 8), x, tolerance=1e-9)")
    assert "Linear does not pass in half" in text
    assert "over the tolerance 1e-09" in text
    assert "LP301 output-mismatch" in text


def test_check_rejects_wrong_precisions(project: pytest.Pytester) -> None:
    assert "Unknown precision 'fp8'" in one(project, 'lowprec.check(net, x, precision="fp8")')
    assert "fp32 is the baseline" in one(project, 'lowprec.check(net, x, precision="fp32")')
    one(project, 'lowprec.check(net, x, precision="fp32", backend="jit", calibration=[x])', passed=1)
    runs = 'lowprec.check(net, x, precision="fp32", backend=(name for name in ["jit"])).runs'
    one(project, f'assert "jit" in [run.backend for run in {runs}]', passed=1)
    assert "torch.rand is not measured itself" in one(project, 'lowprec.assert_supported("torch.rand")')


def test_assertions_keep_the_model_and_the_random_state(project: pytest.Pytester) -> None:
    one(
        project,
        "layer, before = nn.Sequential(nn.Linear(8, 8), nn.Dropout()), torch.get_rng_state()\n"
        "    lowprec.check(layer, x)\n    lowprec.assert_no_gaps(layer, x)\n"
        "    assert torch.equal(before, torch.get_rng_state()) and layer[0].weight.dtype == torch.float32",
        passed=1,
    )


@pytest.mark.slow
def test_supported_is_measured_on_this_machine(project: pytest.Pytester) -> None:
    text = one(project, 'lowprec.assert_supported("aten::cdist", dtype=torch.half, backward=True)')
    assert "aten::cdist is not supported in half on cpu (run on this machine, torch" in text
    assert re.search(r"cdist  forward: runs in part, \d+ of \d+ samples", text)
    assert re.search(r"cdist  backward: runs in part, \d+ of \d+ samples", text)
    words = " ".join(word for word in text.split() if word != "E")
    assert "missing-kernel in _cdist_forward: \"cdist\" not implemented for 'Half'; in the measured samples it" in words
    one(
        project,
        'found = lowprec.assert_supported("aten::dot", dtype=torch.half, device="cpu", backward=True); '
        'assert found.evidence == "measured here" and len(found.states) == 2',
        passed=1,
    )


@pytest.mark.slow
def test_supported_needs_no_extra_for_what_the_catalog_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.joinpath("expecttest.py").write_text("raise ModuleNotFoundError('No module named expecttest')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    kept_sweep._end((os.getpid(), "cpu", kept_sweep.WORKER))
    support._measured.cache_clear()
    try:
        found = support.support_of("dot", "float16", "cpu")
        assert (found.supported, found.evidence, found.torch) == (True, "measured", installed_release())
        monkeypatch.setattr(kept_sweep, "measure_briefly", lambda *_: pytest.fail("it would import torch again"))
        assert not support.support_of("linalg.svd", "float16", "cpu").supported
        monkeypatch.setattr(support, "installed_release", lambda: "2.99")
        support._measured.cache_clear()
        with pytest.raises(UsageError, match=r"(?s)torch 2.99 on cpu.*named expecttest.*lowprec-check\[catalog\]"):
            support.support_of("dot", "bfloat16", "cpu", backward=True)
    finally:
        support._measured.cache_clear()
        support._not_measurable.clear()


def test_an_answer_from_the_catalog_says_why_nothing_was_measured(project: pytest.Pytester) -> None:
    project.makepyfile(expecttest="raise ModuleNotFoundError('No module named expecttest')")
    project.makepyfile(test_one="def test_dot(lowprec): lowprec.assert_supported('aten::dot', dtype='half')")
    result = project.runpytest_subprocess(f"--rootdir={project.path}", "-p", "no:cacheprovider")
    assert "No module named expecttest" in result.stdout.str()
    result.stdout.fnmatch_lines(
        ["1 test was answered from the catalog, not measured: * No module named expecttest. Install *"]
    )


def test_supported_is_declared_for_an_absent_xpu(project: pytest.Pytester) -> None:
    text = one(project, 'lowprec.assert_supported("cdist", dtype=torch.bfloat16, device="xpu")')
    assert (
        f"cdist is not supported in bfloat16 on xpu (from the catalog, declared, torch {releases('xpu')[0][:1]}" in text
    )
    assert "cdist  forward: runs in part" in text  # Euclidean distance is a matrix product
    one(project, 'assert lowprec.assert_supported("dot", device="xpu").evidence == "declared"', passed=1)


def test_supported_rejects_unknown_names(project: pytest.Pytester) -> None:
    text = one(project, 'lowprec.assert_supported("linalg.invv")')
    assert "The catalog has no operator 'linalg.invv'" in text
    assert "Did you mean linalg.inv" in text
    assert "Unknown device 'tpu'" in one(project, 'lowprec.assert_supported("dot", device="tpu")')
    assert "is not a dtype in the catalog" in one(project, 'lowprec.assert_supported("dot", dtype=torch.int8)')


def test_a_recording_that_was_never_entered_fails(project: pytest.Pytester) -> None:
    assert "Nothing was recorded" in one(project, "lowprec.record(torch.half).assert_no_gaps()")


def test_no_gaps_of_a_module_and_of_a_function(project: pytest.Pytester) -> None:
    text = one(project, "lowprec.assert_no_gaps(net, x, dtype=torch.half)")
    assert re.match(r"\w+: Net in half on cpu, torch [\d.]+: 2 gaps", text)
    assert re.search(r"LP101 .*linalg_inv_ex .*test_\w+.py:12", text)
    assert re.search(r"LP102 .*torch.quantile .*test_\w+.py:13", text)
    text = one(project, "lowprec.assert_no_gaps(torch.fft.rfft, x, dtype=torch.bfloat16)")
    assert re.search(r"LP102 unsupported-dtype  bfloat16  torch.fft.rfft  the model itself, test_\w+.py:19", text)
    one(project, "lowprec.assert_no_gaps(torch.mm, x, x.T)", passed=1)


def test_no_gaps_of_a_function_that_holds_a_module_is_a_wrong_call(project: pytest.Pytester) -> None:
    text = one(
        project, "layer = torch.nn.Linear(3, 3)\n    lowprec.assert_no_gaps(lambda x: layer(x), torch.ones(2, 3))"
    )
    assert "calls the module Linear, whose parameters would not be cast" in text
    text = one(
        project,
        "layer = nn.Linear(3, 3)\n    lowprec.assert_no_gaps(lambda x: layer and torch.linalg.inv(x), torch.eye(3))",
    )
    assert "LP101" in text


def test_no_gaps_shows_an_error_that_also_occurs_in_fp32(project: pytest.Pytester) -> None:
    text = one(project, "lowprec.assert_no_gaps(lambda x: torch.linalg.inv(x).view(3), torch.eye(4))")
    assert "1 gap" in text
    assert "linalg_inv_ex" in text
    assert re.search(
        r"The call stopped at test_\w+.py:19 with an error that also occurs in fp32:\n +RuntimeError: shape '\[3\]'",
        text,
    )
    assert "is not a low precision" in one(project, "lowprec.assert_no_gaps(torch.mm, x, x.T, dtype=torch.float32)")


def test_no_gaps_shows_an_error_that_occurs_only_in_half(project: pytest.Pytester) -> None:
    text = one(project, "lowprec.assert_no_gaps(lambda x: torch.special.i1(x.requires_grad_()).sum().backward(), x)")
    assert re.search(
        r"The call stopped at test_\w+.py:19 with an error that does not occur in fp32:\n +\w+Error: \"i1_b", text
    )


@pytest.mark.parametrize(
    "call",
    [
        "check(net, x[:3, :3])", 'check(net, x, device="tpu")', 'assert_supported("dott")',
        "assert_no_gaps(net, x, dtype=int)", 'assert_no_gaps(net, x, device="tpu")',
        'record(device="tpu")', "record(torch.float32)", "cast(x)",
    ],
)  # fmt: skip
def test_a_wrong_call_is_shown_at_its_line(project: pytest.Pytester, call: str) -> None:
    project.makepyfile(test_one=MODEL + f"\ndef test_it(lowprec):\n    lowprec.{call}\n")
    text = project.runpytest().stdout.str()
    assert "lowprec_check.errors.UsageError: " in text
    assert re.search(r"^test_one.py:19: UsageError$", text, re.M)
    assert "/plugin/" not in text


@pytest.mark.parametrize(
    ("call", "device"),
    [("check(net, x", "mps"), ("assert_no_gaps(net, x", "xpu"), ("record(torch.half", "xpu")],
)
def test_without_the_device_a_test_is_skipped(project: pytest.Pytester, call: str, device: str) -> None:
    project.makepyfile(test_one=MODEL + f'\ndef test_it(lowprec):\n    lowprec.{call}, device="{device}")\n')
    text = project.runpytest("-rs").stdout.str()
    assert f"SKIPPED [1] test_one.py:19: device {device} is not available" in text
    assert re.search(rf"=+ lowprec =+\n+1 test was skipped: device {device} is not available\n", text)


def test_a_check_predicts_a_device_that_is_not_available(project: pytest.Pytester) -> None:
    tests = """
def test_runs(lowprec):
    runs = [lowprec.check(torch.relu, x, name, device="xpu") for name in ("half", "bfloat16")]
    assert {run.evidence for run in runs} == {"predicted"}

def test_gap(lowprec):
    lowprec.check(torch.linalg.inv, torch.eye(4), device="xpu")

@pytest.mark.lowprec("half", device=["cpu", "xpu", "mps"])
def test_marked(lowprec): pass

@pytest.mark.skip(reason="device tpu is not available")
def test_other(): pass

def test_in_a_fixture(device): pass

@pytest.fixture
def device(lowprec): lowprec.record(device="mps")
"""
    project.makepyfile(test_one=MODEL + tests)
    result = project.runpytest()
    result.assert_outcomes(passed=2, failed=1, skipped=4)
    text = result.stdout.str()
    assert re.search(r"linalg_inv does not pass in half · predicted on xpu, torch [\d.]+: 1 gap", text)
    assert re.search(
        r"=+ lowprec =+\n+"
        r"2 tests were predicted from the catalog, not measured: device xpu is not available\n"
        r"2 tests were skipped: device mps is not available\n"
        r"1 test was skipped: device xpu is not available\n=",
        text,
    )


@pytest.mark.slow
def test_workers_send_what_was_not_measured(project: pytest.Pytester) -> None:
    project.makepyfile(test_one=MODEL + '\ndef test_it(lowprec): lowprec.check(net, x, device="mps")\n')
    assert "1 test was skipped: device mps is not available" in project.runpytest("-n1").stdout.str()


def test_all_operators_of_a_name_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []

    def measure(device: str, ops: list[str]) -> kept_sweep.BriefSweep:
        measured.append(ops)
        sweep = sweep_of(device)
        return kept_sweep.BriefSweep(sweep.header.torch, [sweep.records[op] for op in sorted(ops)])

    monkeypatch.setattr(kept_sweep, "measure_briefly", measure)
    support._measured.cache_clear()
    for backward in (False, True):
        found = support.support_of("_linalg_svd", "float16", "cpu", backward=backward)
        assert {state.op for state in found.states} == set(measured[0]) > {"linalg.svd", "linalg.cond"}
        assert found.evidence == "measured here"
    support._measured.cache_clear()
    assert len(measured) == 1


def test_record_continues_after_a_gap(project: pytest.Pytester) -> None:
    text = one(
        project,
        "with lowprec.record(dtype=torch.half) as rec:\n        y = net.half()(x.half())\n"
        "    assert y.dtype == torch.half and len(rec.gaps) == 2 and len(rec.op_calls) > 5\n    rec.assert_no_gaps()",
    )
    assert "the block in half on cpu" in text
    assert re.search(r"LP101 missing-kernel +half +linalg_inv_ex +<Net>, test_\w+.py:12", text)
    one(project, "with lowprec.record() as rec: net(x)\n    assert not rec.gaps\n    rec.assert_no_gaps()", passed=1)
    other_dtype = "with lowprec.record(dtype=torch.bfloat16) as rec: torch.rrelu(x.half(), training=True)\n"
    one(project, f"{other_dtype}    assert not rec.gaps", passed=1)


def test_program_scans_what_a_block_calls(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest, torch
        @pytest.mark.parametrize("largest", [1e-6, 1.0])
        def test_it(lowprec, largest):
            nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
            with lowprec.program("half", isolation="none") as program:
                for size in (1.0, 1e7):
                    nets[0](torch.ones(2, 4))
                    nets[1](torch.full((2, 4), largest) * size)
            assert [model.name for model in program.models] == ["nets[0]", "nets[1]"]

        def test_nothing(lowprec):
            with lowprec.program():
                torch.ones(2)
        """
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=2)
    text = texts(result)
    assert "nets[1], call 2" in text
    assert "Linear does not pass in half" in text
    assert "nets[0], call" not in text
    assert "No model was called" in text


def test_record_sees_inside_a_condition_that_imports_dynamo(project: pytest.Pytester) -> None:
    """``torch.cond`` compiles itself, and the handler of the mode is called from what was compiled."""
    project.makepyfile(
        """
        import sys, torch
        def test_block(lowprec):
            assert "torch._dynamo" not in sys.modules
            with lowprec.record("half") as recording:
                x = torch.ones(3)
                torch.cond(x.sum() > 0, lambda x: torch.dot(x, x), lambda x: x.sum(), (x,))
            assert "torch._dynamo" in sys.modules
            assert "aten.dot.default" in {row.op for row in recording.op_calls.rows()}
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=1)


def test_record_does_not_hide_errors(project: pytest.Pytester) -> None:
    text = one(project, "with lowprec.record():\n        x.view(3)")
    assert "RuntimeError: shape '[3]' is invalid" in text


# -- the marker

MARKED = """
import torch
from torch import nn
import pytest

model, x = nn.Linear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
"""


def marked(project: pytest.Pytester, marker: str, body: str = "pass", arguments: str = "lowprec") -> pytest.RunResult:
    project.makepyfile(MARKED + f"\n@pytest.mark.lowprec({marker})\ndef test_it({arguments}):\n    {body}\n")
    return project.runpytest("-v", "-rs")


def test_marker_runs_once_per_precision(project: pytest.Pytester) -> None:
    result = marked(
        project,
        ", ".join(map(repr, NAMES)),
        """cast = lowprec.cast(model)
    with lowprec.autocast():
        y = cast(lowprec.cast(x))
    assert y.dtype == lowprec.dtype
    assert (cast.weight.dtype == torch.float32) == lowprec.precision.startswith("autocast")
    assert model.weight.dtype == torch.float32 and lowprec.cast({"ids": torch.arange(3)})["ids"].dtype == torch.int64
    assert lowprec.allclose(y, model(x))
    assert not lowprec.allclose(y, model(x) * 1.5)
    assert not lowprec.allclose(y * float("nan"), model(x)) and not lowprec.allclose(y[:2], model(x))""",
    )
    result.assert_outcomes(passed=4)
    for name in NAMES:
        result.stdout.fnmatch_lines([f"*::test_it[[]{name}-cpu[]] PASSED*"])


SPELLINGS = {
    "half": ["fp16", "FP16", "f16", "float16", "torch.float16", "torch.half"],
    "bfloat16": ["bf16", "BFloat16", "torch.bfloat16"],
    "autocast-fp16": ["amp-fp16", "amp_fp16", "autocast-half", "ac-float16"],
    "autocast-bf16": ["amp-bf16", "autocast-bfloat16", "Autocast_BF16"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_precision_is_shown_by_its_name(name: str, project: pytest.Pytester) -> None:
    for spelling in SPELLINGS[name]:
        result = marked(project, repr(spelling), f"assert lowprec.precision == {name!r}")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"*::test_it[[]{name}-cpu[]] PASSED*"])


@pytest.mark.parametrize(
    "arguments",
    [
        '"fp16,amp_bf16"', '["fp16", "amp-bf16"]', '"fp16", "amp-bf16"', 'torch.half, "amp-bf16"',
        'precisions=["half", "amp-bf16"]', 'precision="half,amp-bf16"',
        'precisions=(torch.half, "amp-bf16"), device="cpu"',
    ],
)  # fmt: skip
def test_the_marker_takes_lists(arguments: str, project: pytest.Pytester) -> None:
    result = marked(project, arguments, "pass")
    result.assert_outcomes(passed=2)
    for name in ("half", "autocast-bf16"):
        result.stdout.fnmatch_lines([f"*::test_it[[]{name}-cpu[]] PASSED*"])


def test_helpers_take_a_precision(project: pytest.Pytester) -> None:
    one(
        project,
        """
    for spelling, dtype in {"fp16": torch.half, torch.float16: torch.half, torch.bfloat16: torch.bfloat16}.items():
        assert lowprec.cast(x, spelling).dtype == dtype
        assert lowprec.cast(nn.Linear(8, 8), spelling)(lowprec.cast(x, spelling)).dtype == dtype
        assert lowprec.allclose(lowprec.cast(x, spelling), x, spelling)
    assert lowprec.cast(x, "amp-bf16").dtype == torch.float32
    with lowprec.autocast("amp-bf16"):
        assert (x @ x.T).dtype == torch.bfloat16
    assert "<autocast-fp16: error 5.0e-01 is over the tolerance 1e-02" in repr(lowprec.allclose(x * 1.5, x, "amp-fp16"))
    gate = repr(lowprec.allclose({"x": x, "gate": torch.ones(3) / 8}, {"x": x, "gate": torch.zeros(3)}, "half"))
    zero = "<half: the reference is zero, the output is not: "
    assert f"{zero}error inf is over the tolerance 1e-02 (max_abs 1.2e-01)" in gate
    result = lowprec.check(nn.Linear(8, 8), x, precision="fp16,amp_bf16")
    assert [run.precision for run in result.runs if run.is_low] == ["half", "autocast-bf16"]
    assert lowprec.check(nn.Linear(8, 8), x, precision=torch.bfloat16).run("bfloat16").status == "ok"
    lowprec.assert_no_gaps(torch.mm, x, x.T, dtype="FP16")""",
        passed=1,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('lowprec.cast(x, "haf")', "Unknown precision 'haf'.\nE*Did you mean half?"),
        ('lowprec.allclose(x, x, "amp")', "Did you mean autocast-bf16?"),
        ('lowprec.autocast("fp32")', "fp32 is the baseline"),
        ("lowprec.cast(x, torch.int8)", "Unknown precision 'torch.int8'"),
        ('lowprec.assert_supported("dot", dtype="bfloat")', "Did you mean bfloat16?"),
        ('lowprec.assert_no_gaps(torch.mm, x, x.T, dtype="amp-fp16")', "autocast-fp16 is not a dtype"),
        ("lowprec.cast(x)", r"lowprec.cast() needs the marker"),
    ],
)
def test_a_typo_gets_a_suggestion(call: str, message: str, project: pytest.Pytester) -> None:
    text = one(project, call)
    assert all(part.strip() in text for part in message.split("\nE*"))


def test_allclose_shows_the_error(project: pytest.Pytester) -> None:
    result = marked(project, '"half", tolerance=0.25', "assert lowprec.allclose(x * 1.5, x)")
    assert "assert <half: error 5.0e-01 is over the tolerance 2.5e-01 (rel_l2; max_abs " in texts(result)
    result = marked(project, '"half"', "assert lowprec.allclose(x / 0, x)")
    assert "assert <half: Inf where the reference is finite>" in texts(result)
    result = marked(project, '"half"', "assert lowprec.allclose(x[:2], x)")
    assert "assert <half: the output has shape (2, 8), the reference (4, 8)>" in texts(result)
    result = marked(project, '"half"', "assert lowprec.allclose([], [])")
    assert "nothing to compare" in texts(result)


def test_a_failed_allclose_shows_which_elements_differ(project: pytest.Pytester) -> None:
    body = """y = torch.arange(12.0).reshape(3, 4)
    z = {"logits": [y, y.clone()]}
    z["logits"][1][1, 2] += 5
    z["logits"][1][0, 1] += 2
    close = lowprec.allclose(z, {"logits": [y, y]})
    print(repr(close))
    assert close
    """
    for line in ("assert close", 'assert lowprec.allclose(z, {"logits": [y, y]})'):
        result = marked(project, '"half"', body.replace("assert close", line))
        first = "<half: error 2.4e-01 is over the tolerance 1e-02 (rel_l2; max_abs 5.0e+00)>"
        lines = [
            "Over the tolerance: 1 of 2 outputs, logits.1 (2.4e-01)",
            "In logits.1:",
            "Mismatched elements: 2 / 12 (16.7 %), by more than 6.5e-02 (the tolerance × the rms of the reference)",
            "Greatest absolute difference: 5 at index (1, 2)",
            "Greatest relative difference: 2 at index (0, 1)",
        ]
        assert "\n".join([f"assert {first}", *(f"  {line}" for line in lines)]) in texts(result)
        assert texts(result).count("Mismatched elements") == 1
        assert "\n".join([first, *lines]) in result.stdout.str()  # print(repr(close))


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("", "no precision given; choose from bfloat16, autocast-bf16, half, autocast-fp16"),
        ('"fp8"', "unknown precision 'fp8'; choose from bfloat16, autocast-bf16, half, autocast-fp16"),
        ('"half", "fp33"', "unknown precision 'fp33'; choose from bfloat16, autocast-bf16, half, autocast-fp16"),
        ('"amp-pf16"', "unknown precision 'amp-pf16'; did you mean autocast-fp16?"),
        ('"half", device="tpu"', "unknown device 'tpu'; choose from cpu, cuda, xpu, mps"),
        ('"half", tolerance=-1', "tolerance -1 is not a positive number"),
        ('"half", tolerance="x"', "tolerance 'x' is not a positive number"),
        ('"half", tolerance=float("nan")', "tolerance nan is not a positive number"),
        ('"half", tolerance=True', "tolerance True is not a positive number"),
        ('"half", tol=1', "it has no argument 'tol'; did you mean tolerance?"),
        ("dtype=torch.half", "it has no argument 'dtype'; did you mean precisions?"),
        (
            '"half", whatever=1',
            "it has no argument 'whatever'; its arguments are precisions, device, backend and tolerance",
        ),
        ('"half", precisions=["bfloat16"]', "precisions is given twice"),
        ("precisions=[]", "no precision given"),
        ('"half", device=["cpu", "tpu"]', "unknown device 'tpu'; choose from cpu, cuda, xpu, mps"),
        ('"half", device="cpu:x"', "unknown device 'cpu:x'; write cpu, or cpu:0"),
        ('"half", backend="inductr"', "unknown backend 'inductr'; did you mean inductor?"),
        ('"half", backend=["eager", "jit"]', "backend is one backend, not several"),
    ],
)
def test_a_wrong_marker_is_an_error(project: pytest.Pytester, marker: str, message: str) -> None:
    result = marked(project, marker)
    result.assert_outcomes(errors=1)
    assert f"marker lowprec: {message}" in result.stdout.str()


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ('"half", "half"', ["half-cpu"]),
        ('["fp16", "half"], "bfloat16"', ["half-cpu", "bfloat16-cpu"]),
        ('precisions=["half", torch.half]', ["half-cpu"]),
        ('"half", device=["cpu", "cpu:0"]', ["half-cpu"]),
        ('"half", device="cpu:0,CPU"', ["half-cpu:0"]),
        ('"half", device=[torch.device("cpu", 0), "cpu"], backend="eager"', ["half-cpu:0"]),
        ('"half", device=["xpu", "xpu:0", "xpu:1"]', ["half-xpu", "half-xpu:1"]),
    ],
)
def test_equal_cases_are_one(project: pytest.Pytester, marker: str, expected: list[str]) -> None:
    result = marked(project, marker)
    assert re.findall(r"::test_it\[(.*)\] (?:PASSED|SKIPPED)", result.stdout.str()) == expected


def test_equal_cases_of_two_markers_are_an_error(project: pytest.Pytester) -> None:
    result = marked(project, '"half", device="cpu:0")\n@pytest.mark.lowprec("half"')
    result.assert_outcomes(errors=1)
    assert "two markers name half-cpu:0 and half-cpu, which are the same; remove it from" in result.stdout.str()


@pytest.mark.parametrize("index", [0, 1])
def test_a_type_is_the_device_that_was_chosen(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: index == 1)  # set_device() initializes it
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = ["cuda", "cuda:0", "cuda:1", "cuda:2"]
    found = cases(pytest.mark.lowprec("half", device=devices).mark)
    assert [case.key.device for case in found] == [d for d in devices if d != f"cuda:{index}"]
    assert [is_device_available(device) for device in devices] == [True, True, True, False]


@pytest.mark.parametrize("also", ["", '@pytest.mark.lowprec("half")'])
def test_parametrizing_the_fixture_is_an_error(project: pytest.Pytester, also: str) -> None:
    project.makepyfile(
        f"""
        import pytest
        {also}
        @pytest.mark.parametrize("lowprec", ["half", "bfloat16"], indirect=True)
        def test_it(lowprec):
            lowprec.cast(1)
        """
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1 if also else 2)
    assert 'Write only @pytest.mark.lowprec("half", "bfloat16"), with the precisions to test.' in result.stdout.str()
    assert "duplicate parametrization" not in result.stdout.str()


def test_a_parameter_of_another_project_is_its_own(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize("lowprec, other", [(True, 1), (False, 2)])
        def test_it(lowprec, other):
            assert lowprec is (other == 1)
        """
    )
    project.runpytest().assert_outcomes(passed=2)


def test_a_marker_that_is_added_late_is_an_error(project: pytest.Pytester) -> None:
    project.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.lowprec("half"))
        """
    )
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [1])
        def test_late(lowprec, n): pass

        @pytest.mark.lowprec("half")
        def test_in_time(lowprec): lowprec.cast(1)
        """
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    assert "The marker lowprec was added after the tests were collected" in result.stdout.str()


def test_doctests_of_a_marked_module_run(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_doc="""
        '''
        >>> 1 + 1
        2
        '''
        import unittest
        import pytest
        pytestmark = pytest.mark.lowprec("half")

        def test_it(lowprec): lowprec.cast(1)

        class TestCase(unittest.TestCase):
            def test_u(self): pass
        """
    )
    result = project.runpytest("--doctest-modules")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at setup of TestCase.test_u*", "The marker lowprec does not work on methods of *"]
    )


def test_marker_without_fixture_is_an_error(project: pytest.Pytester) -> None:
    result = marked(project, '"half", "bfloat16"', arguments="")
    result.assert_outcomes(errors=1)
    assert "every precision would run the same code" in result.stdout.str()


def test_marker_skips_without_its_device(project: pytest.Pytester) -> None:
    result = marked(project, '"half", device="xpu"')
    result.assert_outcomes(skipped=1)
    assert re.search(r"SKIPPED \[1\] test_\w+.py:7: device xpu is not available", result.stdout.str())


@pytest.mark.parametrize(
    "devices", ['device=["cpu", "xpu"]', 'devices="cpu,xpu"', 'device=(torch.device("cpu"), "xpu")']
)
def test_the_marker_takes_devices(project: pytest.Pytester, devices: str) -> None:
    result = marked(project, f'"half", "bf16", {devices}', "assert lowprec.device == 'cpu'")
    result.assert_outcomes(passed=2, skipped=2)
    for precision in ("half", "bfloat16"):
        result.stdout.fnmatch_lines([f"*::test_it[[]{precision}-cpu[]] PASSED*"])
        result.stdout.fnmatch_lines([f"*::test_it[[]{precision}-xpu[]] SKIPPED*"])


STACKED = """
import pytest

@pytest.mark.lowprec("half", tolerance=0.5)
class TestClass:
    def test_of_class(self, lowprec):
        assert lowprec.tolerance == 0.5

    @pytest.mark.lowprec("bfloat16", tolerance=0.25)
    @pytest.mark.lowprec("autocast-bf16")
    def test_own(self, lowprec):
        assert lowprec.tolerance == {"bfloat16": 0.25, "autocast-bf16": 0.05}[lowprec.precision]
"""


def test_markers_of_a_function_add_up_and_replace_those_of_the_class(project: pytest.Pytester) -> None:
    project.makepyfile(STACKED)
    result = project.runpytest("-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*::test_of_class[[]half-cpu[]] *", "*::test_own[[]bfloat16-cpu[]] *", "*::test_own[[]autocast-bf16-cpu[]] *"]
    )
    project.makepyfile(STACKED.replace('"autocast-bf16")', '["autocast-bf16", "bf16"])'))
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    assert "marker lowprec: two markers name bfloat16-cpu; remove it from one of them." in result.stdout.str()
    project.makepyfile(STACKED.replace('"autocast-bf16")', '"autocast-bf16", dtype=1)'))
    project.runpytest().stdout.re_match_lines([".*did you mean precisions[?]$"])


def test_marker_in_a_unittest_class_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import unittest, pytest

        @pytest.mark.lowprec("half")
        class T(unittest.TestCase):
            def test_it(self): pass
        """
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    assert "methods of unittest.TestCase, which cannot use fixtures" in result.stdout.str()


def test_helpers_without_the_marker_are_an_error(project: pytest.Pytester) -> None:
    for call in ("cast(x)", "autocast()", "allclose(x, x)", "dtype", "tolerance", "precision", "device"):
        text = one(project, f"lowprec.{call}")
        assert "needs the marker" in text
        assert '@pytest.mark.lowprec("half")' in text


@pytest.mark.slow
def test_the_example_project_passes_as_documented() -> None:
    folder = ROOT / "examples" / "pytest_project"
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lowprec coverage" in done.stdout
    assert "linalg_inv_ex" in done.stdout
