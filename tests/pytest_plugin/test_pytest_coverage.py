"""Coverage of an existing test suite: what it finds, and that tests are not affected."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch._dynamo  # what is compiled imports it, which works once in a process
from conftest import ROOT
from torch import nn
from watched import watching

from lowprec_check import catalog
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.names import dtype_of
from lowprec_check.catalog.records import COMPLEX_OPERATORS
from lowprec_check.catalog.versions import release_of
from lowprec_check.engine.sweep.samples import load_operators
from lowprec_check.pytest_plugin.op_support import no_support_text, support_of
from lowprec_check.report.coverage import RENDERERS
from lowprec_check.torchkit.autocast_rules import autocast_policies
from lowprec_check.torchkit.devices import is_available

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


def coverage_of(suite: pytest.Pytester, *options: str, precision: str = "half") -> dict[str, Any]:
    """The saved coverage: by operator, what the JSON report says about it."""
    suite.runpytest("--lowprec-coverage", precision, "--lowprec-report", "out.json", *options)
    found = json.loads(Path("out.json").read_text())
    uses = [use | {"tests": [found["tests"][index] for index in use["tests"]]} for use in found["ops"]]
    return {use["op"].removeprefix("aten.").removesuffix(".default"): use for use in uses}


def saved(suite: pytest.Pytester, *options: str) -> dict[str, list[str]]:
    """Tests by operator in the JSON report."""
    return {op: use["tests"] for op, use in coverage_of(suite, *options).items()}


def test_the_table_names_operators_and_tests(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--lowprec-coverage", "half", "--lowprec-coverage", "bfloat16")
    result.assert_outcomes(**OUTCOMES)
    text = result.stdout.str()
    assert re.search(r"\d+ operators in 8 tests · cpu, torch [\d.]+, measured", text)
    words = ["precision", "run", "run in part", "do not run", "not known", "does not apply"]
    known = [word for word in words if re.search(rf"^precision .*\b{word}\b", text, re.M) or word == "precision"]
    for name in ("half", "bfloat16"):
        [row] = re.findall(rf"^{name} +(\d[\d ]*)$", text, re.M)
        counted = dict(zip(known[1:], map(int, row.split()), strict=True))
        assert (counted["do not run"], counted["run in part"]) == (4, 0)
        assert counted["does not apply"] > 0
        assert sum(counted.values()) == int(re.search(r"(\d+) operators in", text)[1])  # type: ignore[index]
    assert re.search(r"^half, bfloat16 do not apply to .*: only integers and booleans$", text, re.M)
    why = "missing-kernel: linalg.inv: Low precision dtypes not supported. Got Half"
    assert re.search(r"^linalg_inv_ex +no +no +2 +test_suite.py:7 +missing-kernel: ", text, re.M)
    assert why in re.sub(r"\s+", " ", text)
    assert re.search(r"^linalg_cholesky_ex +no +no +1 ", text, re.M)
    assert re.search(r"^_cdist_forward +no +no +1 ", text, re.M)
    assert (
        "linalg_inv_ex: used by 2 tests\n      test_suite.py::TestCase::test_cdist\n      test_suite.py::test_inv\n"
        in text
    )
    assert not re.search(r"^mm |^addmm ", text, re.M)
    every = suite.runpytest("--lowprec-coverage", "half", "-v").stdout.str()
    assert re.search(r"^addmm +yes +1 ", every, re.M)


def test_coverage_of_another_device(suite: pytest.Pytester) -> None:
    text = suite.runpytest("--lowprec-coverage", "half", "--lowprec-device", "xpu").stdout.str()
    assert re.search(r"· xpu, torch [\d.]+, declared", text)
    assert re.search(r"^linalg_inv_ex +no +2 .*missing-kernel: its kernel does not support the dtype", text, re.M)


def test_each_operator_lists_its_tests(suite: pytest.Pytester) -> None:
    found = saved(suite)
    assert found["linalg_inv_ex"] == ["test_suite.py::TestCase::test_cdist", "test_suite.py::test_inv"]
    assert found["linalg_cholesky_ex"] == ["test_suite.py::test_fixture"]
    assert found["addmm"] == ["test_suite.py::test_linear"]
    assert "t" not in found  # a view
    assert found["arange"] == ["test_suite.py::test_integers"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-p", "no:terminal"), ("-n2", "-p", "no:terminal")], ids=" ".join)
def test_results_merged_from_workers_are_the_same(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    assert saved(suite, *options) == saved(suite)


def test_the_suffix_sets_the_report_format(suite: pytest.Pytester) -> None:
    for suffix, word in (
        (".md", "| `linalg_inv_ex` "),
        (".html", "<code>linalg_inv_ex</code>"),
        (".json", '"linalg.inv"'),
    ):
        path = Path(f"out{suffix}")
        result = suite.runpytest("--lowprec-coverage", "half", "--lowprec-report", str(path))
        assert word in path.read_text()
        assert f"Full report: {path.resolve()}" in result.stdout.str()
    assert set(RENDERERS) == {".md", ".html", ".json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lowprec-coverage", "int8"), "--lowprec-coverage: Unknown precision 'int8'."),
        (("--lowprec-coverage", "haf"), "Did you mean half?"),
        (("--lowprec-coverage", "autocst-bf16"), "Did you mean autocast-bf16?"),
        (("--lowprec-coverage", "fp32"), "--lowprec-coverage: fp32 is the baseline."),
        (("--lowprec-coverage", "amp-fp16", "--lowprec-device", "xpu"), "no measurements under autocast on xpu"),
        (("--lowprec-coverage", "half", "--lowprec-format", "json"), "unknown format 'json': use text or github."),
        (
            ("--lowprec-format", "github"),
            "Without --lowprec-coverage, --lowprec-format does nothing: add --lowprec-coverage",
        ),
        (
            ("--lowprec-coverage", "half", "--lowprec-device", "tpu"),
            "--lowprec-device: The catalog does not cover the device 'tpu'.",
        ),
        (
            ("--lowprec-device", "xpu"),
            "Without --lowprec-coverage, --lowprec-device does nothing: add --lowprec-coverage",
        ),
        (("--lowprec-fail-on", "gaps"), "Without --lowprec-coverage, --lowprec-fail-on does nothing: add"),
        (("--lowprec-coverage", "half", "--lowprec-device", "mps"), "Measured: cpu, cuda; declared: xpu."),
        (("--lowprec-coverage", "half", "--lowprec-device", "cuda:first"), "Unknown device 'cuda:first'."),
        (
            ("--lowprec-coverage", "half", "--lowprec-report", "a.txt"),
            "unknown format 'a.txt': use .json, .md or .html.",
        ),
        (("--lowprec-coverage", "half", "--lowprec-report", "no/a.md"), "--lowprec-report: the folder"),
        (("--lowprec-coverage", "half", "--lowprec-report", "."), "is a folder: name a file in it."),
        (
            ("--lowprec-coverage", ","),
            "--lowprec-coverage: No precision is given.\nChoose from bfloat16, autocast-bf16",
        ),
        (("--lowprec-coverage", "fp33"), "Unknown precision 'fp33'.\nChoose from bfloat16, autocast-bf16"),
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
    assert re.search(r"^bfloat16 +\d", text, re.M)
    assert Path("ini.md").exists()
    assert "cpu, torch" in suite.runpytest("--lowprec-device", "cpu").stdout.str()
    suite.makeini("[pytest]\nlowprec_coverage = int8\n")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"lowprec_coverage in \S+tox\.ini: Unknown precision 'int8'", result.stderr.str())


# -- numbers that a precision does not apply to

NUMBERS = """
import torch

def test_complex():
    x = torch.randn(8, dtype=torch.complex64)
    torch.fft.irfft(torch.fft.fft(x) * 2)

def test_real(): torch.fft.rfft(torch.randn(8))
def test_integers(): assert torch.tensor([2, 1]).cumsum(0)[1] == 3
def test_both():
    torch.ones(2).exp()
    torch.ones(2, dtype=torch.complex64).exp()

def test_doubles(): torch.ones(2, dtype=torch.float64).sin()
def test_made_from_integers(): torch.arange(4) / 3
"""


def test_complex_numbers_have_no_bfloat16(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=NUMBERS)
    found = coverage_of(project, precision="half,bfloat16,autocast-bf16")
    for op in ("_fft_c2c", "_fft_c2r", "mul.Tensor"):
        assert found[op]["numbers"] == "complex"
        for key in ("bfloat16", "autocast-bf16"):
            assert (found[op]["support"][key]["applies"], found[op]["support"][key]["state"]) == (False, None)
        assert "no complex bfloat16" in found[op]["support"]["bfloat16"]["message"]
    half = {op: found[op]["support"]["float16"] for op in found}
    assert half["_fft_c2c"]["state"] == half["_fft_c2r"]["state"] == "none"  # in complex32
    assert (half["mul.Tensor"]["state"], half["mul.Tensor"]["applies"]) == (None, True)
    assert "complex32" in half["mul.Tensor"]["message"]
    assert {found["_fft_r2c"]["support"][key]["state"] for key in ("float16", "bfloat16")} == {"none"}


def test_integers_have_no_precision(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=NUMBERS)
    found = coverage_of(project, precision="half,autocast-bf16")
    assert found["cumsum"]["numbers"] == "integer"
    assert {use["message"] for use in found["cumsum"]["support"].values()} == {"only integers and booleans"}
    assert found["exp"]["numbers"] == "floating"  # of both, the one that a precision applies to
    assert found["sin"]["numbers"] == "float64"
    assert [found["sin"]["support"][key]["applies"] for key in ("float16", "autocast-bf16")] == [True, False]
    assert found["div.Tensor"]["numbers"] == "floating"  # its output is


def test_every_format_counts_and_explains_what_does_not_apply(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=NUMBERS)
    text = project.runpytest("--lowprec-coverage", "bfloat16").stdout.str()
    assert re.search(r"^precision .*does not apply$", text, re.M)
    assert re.search(
        r"^bfloat16 does not apply to _fft_c2c, _fft_c2r, .*: only complex numbers, and there is no", text, re.M
    )
    for name in ("out.md", "out.html"):
        project.runpytest("--lowprec-coverage", "bfloat16", "--lowprec-report", name)
        page = Path(name).read_text()
        assert re.search(r"not apply to (<.*?>)?\\?_fft", page)
        row = next(line for line in page.splitlines() if "_fft_c2c" in line)
        assert re.search(r"does not apply\b.*only complex numbers, and there is no complex bfloat16 dtype", row)


def test_operators_with_complex_samples_are_known() -> None:
    """They never run in bfloat16, so what they dispatch must not count as run."""
    floating = {torch.float32, torch.float16, torch.bfloat16}
    operators = {name: op.supported_dtypes("cpu") for name, op in load_operators().items()}
    complex_only = {op for op, dtypes in operators.items() if torch.complex64 in dtypes and not dtypes & floating}
    assert complex_only == COMPLEX_OPERATORS


def test_the_catalog_says_that_bfloat16_does_not_apply() -> None:
    cells = [cell for cell in catalog.lookup("istft")[0].cells if cell.dtype == "bfloat16"]
    assert {(cell.state, bool(cell.not_applicable)) for cell in cells} == {(None, True)}
    assert {cell.device for cell in cells} == {"cpu", "cuda", "xpu"}
    for device in ("cpu", "xpu"):
        found = catalog.gaps(device, "bfloat16")
        assert "istft" in found.not_applicable
        assert not set(found.not_applicable) & {missing.op for missing in found.missing}
        assert catalog.gaps(device, "half").not_applicable == []
    support = support_of("istft", "bfloat16", "cuda" if not torch.cuda.is_available() else "xpu")
    assert not support.supported
    assert "the dtype does not apply: only complex numbers" in no_support_text(support)


# -- autocast


def test_autocast(suite: pytest.Pytester) -> None:
    found = coverage_of(suite, precision="autocast-bf16,amp-fp16")
    dtypes = {op: {key: cell["autocast"] for key, cell in use["support"].items()} for op, use in found.items()}
    both = ("autocast-bf16", "autocast-fp16")
    assert [dtypes["addmm"][key] for key in both] == ["low", "low"]
    assert [dtypes["linalg_inv_ex"][key] for key in both] == ["fp32", "fp32"]
    assert [dtypes["_cdist_forward"][key] for key in both] == ["fp32", "fp32"]
    assert [dtypes["randn"][key] for key in both] == ["inputs", "inputs"]
    text = suite.runpytest("--lowprec-coverage", "autocast-bf16", "-v").stdout.str()
    assert re.search(r"^precision +run in 16 bits +run in fp32 +run as their inputs ", text, re.M)
    assert re.search(r"^addmm +in bf16 +1 ", text, re.M)
    assert re.search(r"^linalg_inv_ex +in fp32 +2 ", text, re.M)


def test_functions_that_dispatch_what_other_functions_dispatch_too(project: pytest.Pytester) -> None:
    """No gap, as plain PyTorch shows: autocast casts the inputs of ``solve`` to fp32, though ``solve_ex`` fails;
    ``lstm`` dispatches other ops in 16 bits; ``sqrt_`` is left alone, though a loss in fp32 calls it.
    """
    code = (
        "torch.linalg.solve(torch.eye(3), torch.ones(3, 1)); torch.nn.LSTM(4, 4)(torch.ones(3, 2, 4)); "
        "torch.ones(3).sqrt_()"
    )
    project.makepyfile(f"import torch\ndef test_all(): {code}")
    found = coverage_of(project, precision="autocast-bf16,bfloat16")
    autocast = {op: use["support"]["autocast-bf16"] for op, use in found.items()}
    assert (autocast["_linalg_solve_ex"]["state"], autocast["_linalg_solve_ex"]["autocast"]) == ("all", "fp32")
    assert autocast["sqrt_"]["autocast"] == "inputs"
    assert found["_linalg_solve_ex"]["support"]["bfloat16"]["state"] == "none"
    for dtype in (torch.bfloat16, torch.half):
        lstm, x = nn.LSTM(4, 4).to(dtype), torch.ones(3, 2, 4, dtype=dtype, requires_grad=True)
        lstm(x)[0].sum().backward()
        cast = AtenCatalog("cpu", "bfloat16" if dtype == torch.bfloat16 else "float16", torch.__version__)
        assert [cast.of(f"mkldnn_rnn_layer{end}").state for end in ("", "_backward")] == ["all", "all"]


@pytest.mark.slow
def test_autocast_with_workers(suite: pytest.Pytester) -> None:
    assert coverage_of(suite, "-n1", precision="amp-bf16") == coverage_of(suite, precision="amp-bf16")


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (lambda x: x @ x, "low"),
        (lambda x: nn.functional.linear(x, x[0, 0]), "low"),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), "low"),
        (torch.linalg.inv, "fp32"),
        (lambda x: nn.functional.mse_loss(x, x), "fp32"),
        (lambda x: x.prod(), "fp32"),
        (lambda x: torch.cat([x, x]), "inputs"),
    ],
    ids=["matmul", "linear", "scaled_dot_product_attention", "linalg_inv", "mse_loss", "prod", "cat"],
)
def test_policies_are_what_autocast_does(
    function: Callable[[torch.Tensor], torch.Tensor], policy: str, request: pytest.FixtureRequest
) -> None:
    low = torch.bfloat16
    assert autocast_policies("cpu", low)[request.node.callspec.id] == policy
    with torch.autocast("cpu", dtype=low):
        outputs = [function(torch.eye(4, dtype=dtype)[None, None]).dtype for dtype in (torch.float32, low)]
    assert outputs == {"low": [low, low], "fp32": [torch.float32] * 2, "inputs": [torch.float32, low]}[policy]


def test_policies_of_a_missing_device_are_empty() -> None:
    device = next(device for device in ("xpu", "cuda") if not is_available(device))
    assert autocast_policies(device, torch.bfloat16) == {}


# -- derivatives whose formula fails before it dispatches an operator

GRADIENTS = """
import torch
from torch.utils.checkpoint import checkpoint

def leaf(): return torch.rand(3, requires_grad=True)
def i1(x): return torch.special.i1(x)

def test_backward(): i1(leaf()).sum().backward()
def test_grad():
    x = leaf()
    torch.autograd.grad(i1(x).sum(), x)
def test_twice():
    x = leaf()
    [grad] = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    i1(grad).sum().backward()
def test_func(): torch.func.grad(lambda x: i1(x).sum())(torch.rand(3))
def test_checkpoint(): checkpoint(lambda x: i1(x).sum(), leaf(), use_reentrant=False).backward()
def test_reentrant(): checkpoint(lambda x: i1(x).sum(), leaf(), use_reentrant=True).backward()
def test_later(graph): graph.backward()
def test_other_formula(): i1(torch.rand(3)).mul(leaf()).sum().backward()
def test_forward(): i1(leaf())
def test_without_gradients():
    with torch.no_grad(): y = i1(leaf())
    (y * leaf()).sum().backward()
def test_up_to_it():
    y = i1(leaf())
    torch.autograd.grad(y.exp().sum(), y)

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return i1(x)
    @staticmethod
    def backward(ctx, grad): return grad * 2

class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(i1(x).sum(), x)[0]

def test_own_formula(): Own.apply(leaf()).sum().backward()
def test_inner(): Inner.apply(leaf()).sum().backward()
"""
CONFTEST = """
import pytest, torch

@pytest.fixture
def graph(): return torch.special.i1(torch.rand(3, requires_grad=True)).sum()
"""
THROUGH_IT = ["backward", "checkpoint", "func", "grad", "inner", "later", "reentrant", "twice"]


def test_a_derivative_is_a_gap_of_the_tests_whose_backward_went_through_it(project: pytest.Pytester) -> None:
    """The newest release of CUDA in the catalog has no formula of ``i1`` in 16 bits."""
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=GRADIENTS)
    text = project.runpytest(
        *("--lowprec-coverage", "half", "--lowprec-device", "cuda"),
        *("--lowprec-report", "out.json", "--lowprec-fail-on", "gaps"),
    )
    assert text.ret == pytest.ExitCode.TESTS_FAILED
    text.assert_outcomes(passed=GRADIENTS.count("def test_"))
    assert re.search(
        rf"^special_i1 \(backward\) +no +{len(THROUGH_IT)} +test_suite.py:5 .*missing-kernel", text.stdout.str(), re.M
    )
    saved = json.loads(Path("out.json").read_text())
    rows = {use["phase"]: use for use in saved["ops"] if use["op"] == "aten.special_i1.default"}
    names = {phase: [saved["tests"][n].partition("::test_")[2] for n in use["tests"]] for phase, use in rows.items()}
    assert names["backward"] == THROUGH_IT
    assert set(names["forward"]) > set(THROUGH_IT)
    assert (rows["backward"]["support"]["float16"]["state"], rows["forward"]["support"]["float16"]["state"]) == (
        "none",
        "all",
    )


@pytest.mark.parametrize("options", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=str)
def test_a_derivative_is_a_new_gap_when_a_test_trains(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    coverage = ("--lowprec-coverage", "half", "--lowprec-device", "cuda", *options)
    project.makepyfile(test_suite="import torch\ndef test_it(): torch.special.i1(torch.rand(3, requires_grad=True))\n")
    assert project.runpytest(*coverage, "--lowprec-report", "base.json", "--lowprec-fail-on", "gaps").ret == 0
    project.makepyfile(
        test_suite="import torch\ndef test_it(): torch.special.i1(torch.rand(3, requires_grad=True)).sum().backward()\n"
    )
    gate = ("--lowprec-baseline", "base.json", "--lowprec-fail-on", "new", "--junitxml", "junit.xml")
    result = project.runpytest(*coverage, *gate, "--lowprec-format", "github")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["special_i1 (backward): does not run in half (not used before)"])
    assert "::error file=test_suite.py,line=2,title=lowprec%3A new%3A special_i1 (backward)" in result.stdout.str()
    assert 'value="special_i1 (backward)"' in Path("junit.xml").read_text()


@pytest.mark.parametrize("name", ["i1", "i1e", "i0e", "erfcx"])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_gaps_of_a_backward_are_those_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch.special, name)

    def fails(*, backward: bool) -> bool:
        x = torch.rand(5).to(dtype).requires_grad_()
        try:
            y = function(x)
            if backward:
                y.sum().backward()
        except (RuntimeError, NotImplementedError):
            return True
        return False

    support = AtenCatalog("cpu", dtype_of(str(dtype)), torch.__version__)
    if support.torch != release_of(torch.__version__):
        pytest.skip("the catalog lacks this release of torch")
    forward, backward = (support.of(f"aten.special_{name}.default", phase=phase) for phase in ("forward", "backward"))
    assert (forward.state != "all") == fails(backward=False)
    assert (forward.state != "all" or backward.state != "all") == fails(backward=True)


# -- annotations

PROJECT = """
import torch

def inverse(x):
    return torch.linalg.inv(x)
"""


@pytest.mark.parametrize("options", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=str)
def test_github_annotates_the_line_that_uses_a_gap(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    package = project.mkdir("odd, 100%")
    (package / "net.py").write_text(PROJECT)
    project.makepyfile(
        test_suite=f"""
        import runpy, torch
        net = runpy.run_path({str(package / "net.py")!r})

        def test_inverse(): net["inverse"](torch.eye(2))
        def test_again(): torch.linalg.inv(torch.eye(2))
        def test_rrelu(): torch.nn.functional.rrelu(torch.ones(2, 2), training=True)
        def test_linear(): torch.ones(2, 2) @ torch.ones(2, 2)
        """
    )
    result = project.runpytest("--lowprec-coverage", "fp16,bf16", "--lowprec-format", "github", *options)
    commands = [line for line in result.stdout.lines if line.startswith("::")]
    assert len(commands) == 2
    inverse = re.fullmatch(r"::error file=([^,:]+),line=5,title=([^,:]+)::(.*)", commands[0])
    assert inverse
    assert inverse[1] == "odd%2C 100%25/net.py"
    assert inverse[2] == "lowprec%3A linalg_inv_ex does not run in half%2C bfloat16 on cpu"
    assert inverse[3].startswith("missing-kernel: linalg.inv: Low precision dtypes not supported. Got Half (measured")
    assert inverse[3].endswith("Used by 2 tests; also at test_suite.py:5")
    assert re.match(
        r"::warning file=test_suite.py,line=6,title=lowprec%3A rrelu_with_noise does not always run", commands[1]
    )


def test_annotations_are_relative_to_the_checkout(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(test_suite=SUITE)
    project.makeini("[pytest]")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path.parent))
    text = project.runpytest("--lowprec-coverage", "half", "--lowprec-format", "github").stdout.str()
    assert f"::error file={project.path.name}/test_suite.py,line=" in text


# -- the saved file


@pytest.mark.parametrize("options", [("half",), ("half,bfloat16,autocast-bf16,autocast-fp16",)], ids=str)
def test_saved_coverage_matches_its_schema(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    project.makepyfile(test_suite=SUITE + NUMBERS)
    coverage_of(project, precision=options[0])
    schema = json.loads((ROOT / "docs" / "coverage-schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    found = json.loads(Path("out.json").read_text())
    validator.validate(found)
    assert found["ops"]
    found["ops"][0]["numbers"] = "roman"
    assert not validator.is_valid(found)


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
    with watching() as recorded:
        watched = compute()
    assert recorded.take()
    assert watched.dtype == plain.dtype
    assert torch.equal(watched, plain)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert sys.getprofile() is None


def test_kept_reports_do_not_hold_operators(project: pytest.Pytester) -> None:
    project.makepyfile("import torch\ndef test_inverse(): torch.linalg.inv(torch.eye(2))")
    run = project.inline_run("--lowprec-coverage", "half", "--lowprec-report", "out.json")
    assert "aten.linalg_inv_ex.default" in (project.path / "out.json").read_text()
    reports = run.getreports("pytest_runtest_logreport")
    assert len(reports) == 3
    assert not [name for report in reports for name in vars(report) if name.startswith("lowprec")]


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
    project.runpytest("--lowprec-coverage", "half").assert_outcomes(passed=1)


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
    assert half.of("aten.rrelu_with_noise.default").state == "some"
    assert half.of("aten._cdist_forward.default").state == "none"  # the samples of cdist that run do not dispatch it
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
