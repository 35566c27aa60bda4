"""Coverage of an existing test suite: what it finds, and that tests are not affected."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.pytest_plugin import coverage  # noqa: F401 - imported once for all projects
from lowprec_check.pytest_plugin.fixture import watch  # noqa: F401 - imported once for all projects
from lowprec_check.pytest_plugin.fixture.watch import Watch
from lowprec_check.report.coverage import RENDERERS

SUITE = """
import unittest, warnings
import pytest
import torch
from torch import nn

def test_linear(): nn.Linear(3, 3)(torch.randn(2, 3)).sum().backward()
def test_inv(): torch.linalg.inv(torch.eye(3))
def test_fft(): torch.fft.rfft(torch.randn(8))
def test_fails(): assert torch.ones(2).sum() == 3
def test_raises(): torch.ones(2) @ torch.ones(3)
def test_integers(): assert torch.arange(3).sum() == 3

@pytest.fixture(scope="module")
def factor(): return torch.linalg.cholesky(torch.eye(3))

def test_fixture(factor): assert factor.shape == (3, 3)

class TestCase(unittest.TestCase):
    def test_cdist(self): torch.cdist(torch.randn(3, 3), torch.linalg.inv(torch.eye(3)))
"""
OUTCOMES = {"passed": 6, "failed": 2}


@pytest.fixture
def suite(project: pytest.Pytester) -> pytest.Pytester:
    project.makepyfile(test_suite=SUITE)
    return project


def saved(suite: pytest.Pytester, *options: str) -> dict[str, list[str]]:
    """Tests by operator in the JSON report."""
    suite.runpytest("--lowprec-coverage", "half", "--lowprec-report", "out.json", *options)
    found = json.loads(Path("out.json").read_text())
    return {use["op"]: use["tests"] for use in found["ops"]}


def test_the_table_names_operators_and_tests(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--lowprec-coverage", "half", "--lowprec-coverage", "bfloat16")
    result.assert_outcomes(**OUTCOMES)
    text = result.stdout.str()
    assert re.search(r"\d+ operators used by 8 tests · cpu, torch [\d.]+, measured", text)
    assert re.search(r"half: \d+ run, \d+ not known, 1 in part, 3 do not run", text)
    assert re.search(r"^linalg_inv_ex +no +no +2$", text, re.M)
    assert re.search(r"^linalg_cholesky_ex +no +no +1$", text, re.M)
    assert re.search(r"^_cdist_forward +in part +in part +1$", text, re.M)
    assert "linalg_inv_ex: missing-kernel: linalg.inv: Low precision dtypes not supported. Got Half\n" in text
    assert "      test_suite.py::test_inv\n" in text
    assert not re.search(r"^mm |^addmm ", text, re.M)
    every = suite.runpytest("--lowprec-coverage", "half", "-v").stdout.str()
    assert re.search(r"^addmm +yes +1$", every, re.M)


def test_coverage_of_another_device(suite: pytest.Pytester) -> None:
    text = suite.runpytest("--lowprec-coverage", "half", "--lowprec-device", "xpu").stdout.str()
    assert re.search(r"· xpu, torch [\d.]+, declared", text)
    assert "linalg_inv_ex: missing-kernel: its kernel does not support the dtype" in text


def test_each_operator_lists_its_tests(suite: pytest.Pytester) -> None:
    found = saved(suite)
    assert found["aten.linalg_inv_ex.default"] == ["test_suite.py::TestCase::test_cdist", "test_suite.py::test_inv"]
    assert found["aten.linalg_cholesky_ex.default"] == ["test_suite.py::test_fixture"]
    assert found["aten.addmm.default"] == ["test_suite.py::test_linear"]
    assert "aten.t.default" not in found  # a view
    assert not any("test_suite.py::test_integers" in tests for tests in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n2",), ("-p", "no:terminal"), ("-n2", "-p", "no:terminal")], ids=" ".join)
def test_results_merged_from_workers_are_the_same(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    assert saved(suite, *options) == saved(suite)


def test_the_suffix_sets_the_report_format(suite: pytest.Pytester) -> None:
    for suffix, word in ((".md", "| linalg_inv_ex "), (".html", "<td>linalg_inv_ex</td>"), (".json", '"linalg.inv"')):
        path = Path(f"out{suffix}")
        result = suite.runpytest("--lowprec-coverage", "half", "--lowprec-report", str(path))
        assert word in path.read_text()
        assert f"Full report: {path.resolve()}" in result.stdout.str()
    assert set(RENDERERS) == {".md", ".html", ".json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lowprec-coverage", "int8"), "--lowprec-coverage: 'int8' is not a dtype in the catalog."),
        (("--lowprec-coverage", "fp32"), "--lowprec-coverage: 'fp32' is not a low precision."),
        (
            ("--lowprec-coverage", "half", "--lowprec-device", "tpu"),
            "--lowprec-device: The catalog does not cover the device 'tpu'.",
        ),
        (("--lowprec-device", "xpu"), "need --lowprec-coverage: add --lowprec-coverage half."),
        (
            ("--lowprec-coverage", "half", "--lowprec-report", "a.txt"),
            "unknown format 'a.txt': use .json, .md or .html.",
        ),
        (("--lowprec-coverage", "half", "--lowprec-report", "no/a.md"), "--lowprec-report: the folder"),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error(suite: pytest.Pytester, options: tuple[str, ...], message: str) -> None:
    result = suite.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


def test_ini_keys_are_used_without_options(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nlowprec_coverage = half bfloat16\nlowprec_device = xpu\nlowprec_report = ini.md\n")
    text = suite.runpytest().stdout.str()
    assert "xpu, torch" in text
    assert "bfloat16: " in text
    assert Path("ini.md").exists()
    assert "cpu, torch" in suite.runpytest("--lowprec-device", "cpu").stdout.str()
    suite.makeini("[pytest]\nlowprec_coverage = int8\n")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"lowprec_coverage in \S+tox\.ini: 'int8' is not a dtype", result.stderr.str())


# -- tests are not affected


def test_outcomes_and_exit_codes_are_unchanged(suite: pytest.Pytester) -> None:
    plain = suite.runpytest("-rA")
    watched = suite.runpytest("-rA", "--lowprec-coverage", "half")
    assert watched.ret == plain.ret == pytest.ExitCode.TESTS_FAILED

    def shown(result: pytest.RunResult) -> str:
        """The output without the table: tracebacks, and one line per test."""
        text = re.sub(r"=+ lowprec coverage =+.*?(?==+ short test)", "", result.stdout.str(), flags=re.S)
        return re.sub(r"0x[0-9a-f]+|in \d+\.\d+s|=+", "", text)

    assert "RuntimeError: inconsistent tensor size" in shown(plain)
    assert shown(watched) == shown(plain)
    suite.runpytest("--lowprec-coverage", "half", "--lf").assert_outcomes(failed=2)


def test_warnings_of_operators_name_the_calling_line(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import warnings
        import pytest
        import torch

        def resized():
            return torch.add(torch.ones(3), torch.ones(3), out=torch.empty(2))  # C++ warns

        @pytest.mark.filterwarnings("ignore", f"error::UserWarning:{__name__}")
        def test_error():
            with pytest.raises(UserWarning, match="resized"):
                resized()

        def test_recorded():
            with pytest.warns(UserWarning) as caught:
                resized()
            assert caught[0].filename == __file__
        """
    )
    project.runpytest("--lowprec-coverage", "half").assert_outcomes(passed=2)


def _encoder() -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(torch.randn(2, 5, 16))


def _trained() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(288, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _recurrent() -> torch.Tensor:
    torch.manual_seed(0)
    lstm, attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = lstm(torch.randn(4, 2, 8))[0]
    with torch.no_grad():
        return attention(x, x, x)[0]


def _transformed() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.func.vmap(torch.func.grad(lambda x: (x.sin() @ x).sum()))(torch.randn(3, 4))


def _distances() -> torch.Tensor:
    """Autocast runs ``cdist`` in fp32, and turns itself off inside; the ops that reach a mode are inside."""
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cdist(x @ x.T, x @ x.T + 1)


@pytest.mark.parametrize("compute", [_encoder, _trained, _recurrent, _transformed, _distances])
def test_outputs_are_bitwise_equal(compute: object) -> None:
    assert callable(compute)
    plain = compute()
    watching = Watch()
    watching.start()
    try:
        watched = compute()
    finally:
        watching.stop()
    assert watching.take()
    assert watched.dtype == plain.dtype
    assert torch.equal(watched, plain)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert sys.getprofile() is None


@pytest.mark.slow
def test_compiled_code_stays_compiled(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch

        def test_compiled():
            graphs = []

            def backend(graph, inputs):
                graphs.append(graph)
                return graph.forward

            compiled = torch.compile(lambda x: (x @ x).sin(), backend=backend, fullgraph=True)
            compiled(torch.ones(2, 2))
            assert len(graphs) == 1
        """
    )
    project.runpytest_subprocess("--lowprec-coverage", "half").assert_outcomes(passed=1)


def test_modes_of_fixtures_stay_active_in_all_phases(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest, torch
        from torch._subclasses.fake_tensor import FakeTensorMode, FakeTensor
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            calls = 0
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                Count.calls += 1
                return func(*args, **(kwargs or {}))

        @pytest.fixture(scope="module")
        def fake():
            with FakeTensorMode() as mode:
                yield mode

        @pytest.fixture
        def count():
            with Count() as mode:
                yield mode

        def test_fake(fake): assert isinstance(torch.ones(2) + 1, FakeTensor)
        def test_both(fake, count):
            assert isinstance(torch.ones(2) + 1, FakeTensor)
            assert Count.calls == 2
        def test_count(count): torch.ones(2)
        """
    )
    project.runpytest("--lowprec-coverage", "half").assert_outcomes(passed=3)
    assert torch._C._len_torch_dispatch_stack() == 0


# -- the catalog by aten op


def test_support_of_an_aten_op_comes_from_operators_that_dispatch_it() -> None:
    half = AtenCatalog("cpu", "float16", "2.13.0")
    assert half.of("aten.addmm.default").state == "all"
    assert half.of("aten.add_.Tensor").state == "all"
    assert half.of("aten.mm.out").state == half.of("aten.add.out").state == "all"
    assert half.of("aten.randn.generator").state == "all"
    assert half.of("aten.silu.default").state == "all"  # although its complex variant fails
    assert half.of("aten._cdist_forward.default").state == "some"
    inverse = half.of("aten.linalg_inv_ex.default")
    assert inverse.state == "none"
    assert inverse.kind == "missing-kernel"
    assert "linalg.inv" in inverse.shown_by
    assert half.of("torchvision.nms.default").state is None
    assert half.evidence == "measured"


def test_gaps_in_the_catalog_fail_on_this_machine() -> None:
    """Runs only with the torch release that the expectations are for."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the expectations are for torch 2.13")
    x = torch.eye(3, dtype=torch.half)
    for op, call in {
        "linalg_inv_ex": lambda: torch.linalg.inv_ex(x),
        "linalg_cholesky_ex": lambda: torch.linalg.cholesky_ex(x),
        "_linalg_svd": lambda: torch.ops.aten._linalg_svd(x),
        "avg_pool3d": lambda: torch.ops.aten.avg_pool3d(x[None, None], [1, 1, 1]),
        "linalg_qr": lambda: torch.linalg.qr(x),
    }.items():
        assert AtenCatalog("cpu", "float16", "2.13.0").of(op).state == "none"
        with pytest.raises((NotImplementedError, RuntimeError)):
            call()


def test_xpu_is_declared() -> None:
    half = AtenCatalog("xpu", "float16", "2.13.0")
    assert half.evidence == "declared"
    assert half.of("aten.dot.default").state == "all"
    assert half.of("aten._cdist_forward.default").state == "none"
    svd = half.of("aten._linalg_svd.default")
    assert svd.state == "none"
    assert (svd.message or "").startswith("runs on the CPU")
