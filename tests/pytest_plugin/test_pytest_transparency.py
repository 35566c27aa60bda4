"""A suite under coverage behaves as without it: while torch traces, in inference mode, in tracebacks of all styles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from watched import watching

from lowprec_check.pytest_plugin import coverage
from lowprec_check.pytest_plugin.shared import without_own_frames

# -- tracing


def kinds(graph: torch._C.Graph) -> list[str]:
    """The ops of a traced graph, in order."""
    return [node.kind() for node in graph.nodes()]


class Residual(nn.Module):
    """The tracer records convolutions in a kernel that a dispatch mode hides from it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_a_trace_is_that_of_the_plain_model(grad: bool, check: bool) -> None:
    model = Residual()
    with torch.set_grad_enabled(grad):
        plain = torch.jit.trace(model, torch.zeros(1, 3, 4, 4), check_trace=check)
        with watching():
            watched = torch.jit.trace(model, torch.zeros(1, 3, 4, 4), check_trace=check)
        assert kinds(watched.inlined_graph) == kinds(plain.inlined_graph)
        x = torch.randn(1, 3, 4, 4)
        assert torch.equal(watched(x), model(x))


def test_the_check_of_a_trace_is_watched() -> None:
    with watching() as watch:
        torch.jit.trace(torch.sin, torch.zeros(2))
    assert "aten.sin.default" in watch.take()


def test_a_function_with_named_inputs_and_methods_can_be_traced() -> None:
    conv = Residual().requires_grad_(False)
    example = {"x": torch.zeros(1, 3, 4, 4)}
    with watching():
        function = torch.jit.trace(conv.forward, example_kwarg_inputs=example)
        methods = torch.jit.trace_module(conv, {"forward": example["x"]})
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(function(x=x), conv(x))
    assert torch.equal(methods(x), conv(x))


class Flattened(nn.Module):
    """Its traced graph computes with sizes, which reach a mode as numbers where the ops take tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0) * x.size(1), -1).mul(x.shape[0] // 2)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [Flattened, lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.0)])
def test_a_traced_graph_with_sizes_runs(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 3, 8)
    with watching():
        traced = torch.jit.trace(model, torch.randn(2, 3, 8))
        watched = [traced(x), traced(x), traced(x)]  # the third call runs an optimized graph
    assert all(torch.equal(output, model(x)) for output in watched)


def test_an_op_that_refuses_a_number_still_does() -> None:
    with watching(), pytest.raises(RuntimeError, match="result type Float can't be cast"):
        torch.ones(2, dtype=torch.int32).add_(1.5)


def test_the_exporter_that_traces_sees_the_plain_model() -> None:
    """``torch.onnx.export(dynamo=False)`` gets its graph from this function."""
    model, x = Residual(), torch.zeros(1, 3, 4, 4)
    plain, _ = torch.jit._get_trace_graph(model, (x,))
    with watching() as watch:
        watched, _ = torch.jit._get_trace_graph(model, (x,))
        watch.take()
        model(x)
        assert "aten.convolution.default" in watch.take()  # it watches again
    assert kinds(watched) == kinds(plain)


@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(8, 2), lambda: nn.TransformerEncoderLayer(8, 2)])
def test_attention_can_be_scripted(make: type[nn.Module]) -> None:
    model = make().eval()
    inputs = [torch.randn(2, 3, 8)] * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    with watching():
        scripted = torch.jit.script(model)
    for watched, plain in zip(torch.utils._pytree.tree_leaves(scripted(*inputs)), _leaves(model(*inputs)), strict=True):
        assert torch.equal(watched, plain)


def _leaves(output: object) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(output)


def test_torch_is_as_before_afterwards() -> None:
    before = torch._C._create_function_from_trace, torch._C.ScriptModule._create_method_from_trace
    with watching():
        assert torch._C._create_function_from_trace is not before[0]
    assert (torch._C._create_function_from_trace, torch._C.ScriptModule._create_method_from_trace) == before


def test_a_fixture_can_replace_a_function_that_starts_the_tracer(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest, torch

        @pytest.fixture
        def replaced(monkeypatch):
            monkeypatch.setattr(torch._C, "_create_graph_by_tracing", lambda: "replaced")

        def test_replaced(replaced):
            assert torch._C._create_graph_by_tracing() == "replaced"

        def test_put_back():
            graph, out = torch.jit._get_trace_graph(torch.nn.ReLU(), (torch.ones(2),))
            assert out.tolist() == [1.0, 1.0]
        """
    )
    before = torch._C._create_graph_by_tracing
    project.runpytest("--lowprec-coverage", "half").assert_outcomes(passed=2)
    assert torch._C._create_graph_by_tracing is before


# -- ops inside others

X = 2 * torch.eye(4)
GAPS = {
    "linalg.inv": ("linalg_inv_ex", lambda: torch.linalg.inv(X)),
    "linalg.det": ("_linalg_det", lambda: torch.linalg.det(X)),
    "cdist": ("_cdist_forward", lambda: torch.cdist(X, X)),
    "cholesky": ("linalg_cholesky_ex", lambda: torch.linalg.cholesky(X)),
    "rfft": ("_fft_r2c", lambda: torch.fft.rfft(X)),
    "attention": ("_softmax", lambda: nn.MultiheadAttention(4, 2)(X, X, X)[0]),
}


@pytest.mark.parametrize("name", GAPS)
def test_inference_mode_shows_the_ops_inside_composite_ones(name: str) -> None:
    op, call = GAPS[name]
    torch.manual_seed(0)
    with torch.inference_mode():
        plain = call()
    torch.manual_seed(0)
    with torch.inference_mode(), watching() as watch:
        watched = call()
    found = watch.take()
    assert any(entry.split(".")[1] in (op, "_scaled_dot_product_flash_attention_for_cpu") for entry in found), found
    assert f"aten.{name.replace('.', '_')}.default" not in found
    assert torch.equal(watched, plain)


def test_a_test_in_inference_mode_has_the_gaps_of_one_outside(project: pytest.Pytester) -> None:
    body = "; ".join(
        f"torch.{name}" for name in ("linalg.inv(x)", "linalg.det(x)", "cdist(x, x)", "linalg.cholesky(x)")
    )
    project.makepyfile(
        f"""
        import torch
        x = torch.eye(4)
        def test_inference():
            with torch.inference_mode(): {body}; torch.fft.rfft(x)
        def test_plain(): {body}; torch.fft.rfft(x)
        """
    )
    text = project.runpytest("--lowprec-coverage", "half").stdout.str()
    gaps = re.findall(r"^(\S+) +(?:no|in part) +(\d) ", text, re.M)
    assert len(gaps) == 5
    assert {tests for _, tests in gaps} == {"2"}


def test_autocast_casts_in_inference_mode_as_without_coverage() -> None:
    def compute() -> list[torch.Tensor]:
        linear = nn.Linear(4, 4)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            return [linear(X), torch.linalg.inv(X.bfloat16()), torch.cdist(X @ X, X), nn.functional.layer_norm(X, (4,))]

    torch.manual_seed(0)
    plain = compute()
    torch.manual_seed(0)
    with watching():
        watched = compute()
    for one, other in zip(watched, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class Wrapped(torch.Tensor):
    """A subclass that handles composite ops itself, as they arrive whole in inference mode."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(str(func))
        return func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))


def test_a_tensor_subclass_gets_the_ops_that_it_gets_without_coverage() -> None:
    seen = []
    for context in (nullcontext(), watching()):
        Wrapped.seen = []
        with torch.inference_mode(), context:
            torch.linalg.inv(Wrapped(X))
            inverse(Wrapped(X))
        seen.append(Wrapped.seen)
    assert seen[0] == seen[1] == ["aten.linalg_inv.default", "lowprec_tests.inverse.default"]


@torch.library.custom_op("lowprec_tests::inverse", mutates_args=())
def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x) + 1


@torch.library.custom_op("lowprec_tests::scale_", mutates_args=("x",), device_types="cpu")
def scale_(x: torch.Tensor) -> None:
    x.mul_(torch.linalg.det(x))


inverse.register_autograd(lambda context, grad: grad.sin())
_library = torch.library.Library("lowprec_tests", "FRAGMENT")
_library.define("factor(Tensor x) -> Tensor")
_library.impl("factor", torch.linalg.cholesky, "CPU")


@pytest.mark.parametrize("inference", [False, True])
def test_the_body_of_a_custom_op_is_watched(inference: bool) -> None:
    with torch.inference_mode(inference), watching() as watch:
        x = X.clone()
        scale_(x)
        outputs = [inverse(X), x, torch.ops.lowprec_tests.factor(X)]
    expected = [torch.linalg.inv(X) + 1, X * torch.linalg.det(X), torch.linalg.cholesky(X)]
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    found = watch.take()
    assert {"aten.linalg_inv_ex.default", "aten._linalg_det.default", "aten.linalg_cholesky_ex.default"} <= {*found}
    assert "lowprec_tests.inverse.default" in found


def test_gradients_of_a_custom_op_are_as_before() -> None:
    x = X.clone().requires_grad_()
    with watching():
        inverse(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 4).sin())


# -- tracebacks

FAILING = """
import unittest
import pytest
import torch

def product(a, b): return a @ b

# The first call of each fills a cache of torch, which changes a line of tracebacks.
torch.ops.higher_order.cond(torch.tensor(True), product, torch.add, (torch.eye(2), torch.eye(2)))
torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, *[torch.ones(2, 2).char()] * 2)

def test_raises(): product(torch.ones(2, 3), torch.ones(2, 3))
def test_inference():
    with torch.inference_mode(): torch.linalg.inv(torch.zeros(2, 2))
def test_traced(): torch.jit.trace(product, (torch.ones(2, 3), torch.ones(2, 3)))
def test_caused():
    try: product(torch.ones(2, 3), torch.ones(2, 3))
    except RuntimeError as error: raise ValueError("shapes") from error
def test_autocast():
    with torch.autocast("cpu"): product(torch.ones(2, 3), torch.ones(2, 3))
def test_condition():
    torch.ops.higher_order.cond(torch.tensor(True), product, torch.add, (torch.ones(2, 3), torch.ones(2, 3)))
def test_builtin_in_condition():
    torch.ops.higher_order.cond(torch.tensor(True), torch.mm, torch.add, (torch.ones(2, 3), torch.ones(2, 3)))
def test_dtypes():
    torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, *[torch.ones(2, 3).char()] * 2)

@pytest.fixture(scope="module")
def refused(): return product(torch.ones(2, 3), torch.ones(2, 3))

@pytest.fixture
def closed():
    yield
    product(torch.ones(2, 3), torch.ones(2, 3))

def test_setup(refused): pass
def test_teardown(closed): pass

class TestCase(unittest.TestCase):
    def setUp(self): self.x = torch.ones(2, 3)
    def test_case(self):
        with self.subTest(1): product(self.x, self.x)
        torch.linalg.inv(torch.zeros(2, 2))
"""


@pytest.mark.parametrize("style", ["native", "short", "auto", "line"])
def test_tracebacks_are_those_without_coverage(project: pytest.Pytester, style: str) -> None:
    project.makepyfile(test_suite=FAILING)

    def shown(*options: str) -> str:
        text = project.runpytest("-p", "no:cacheprovider", f"--tb={style}", *options).stdout.str()
        text = re.sub(r"=+ lowprec coverage =+.*?(?==+ short test)", "", text, flags=re.S)
        return re.sub(r"0x[0-9a-f]+|in \d+\.\d+s|=+|^plugins: .*$", "", text, flags=re.M)

    plain = shown()
    assert "mat1 and mat2 shapes cannot be multiplied" in plain
    assert shown("--lowprec-coverage", "half") == plain


def test_a_failed_assertion_ends_at_the_line_of_the_test(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch
        def test_gaps(lowprec): lowprec.assert_no_gaps(torch.linalg.inv, torch.eye(2))
        def test_block(lowprec):
            with lowprec.record("half"): torch.ones(2, 3) @ torch.ones(2, 3)
        """
    )
    result = project.runpytest("--tb=native")
    result.assert_outcomes(failed=2)
    assert "lowprec_check/" not in result.stdout.str().replace("\\", "/")


def test_an_error_in_this_package_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError) as caught:
        coverage.CoverageColumn()  # type: ignore[call-arg]
    assert not without_own_frames(caught.value)  # raised by the test itself
    with pytest.raises(AttributeError) as caught_inside:
        coverage.CoverageRecorder._line_of(None, "test")  # type: ignore[arg-type]
    assert not without_own_frames(caught_inside.value)
    assert caught_inside.traceback[-1].path == Path(coverage.__file__)


def test_saved_operators_of_a_traced_model(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch
        from torch import nn
        def test_trace():
            model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
            traced = torch.jit.trace(model, torch.zeros(1, 3, 8, 8))
            assert torch.equal(traced(torch.ones(1, 3, 8, 8)), model(torch.ones(1, 3, 8, 8)))
        """
    )
    project.runpytest("--lowprec-coverage", "half", "--lowprec-report", "out.json").assert_outcomes(passed=1)
    assert "aten.convolution.default" in {use["op"] for use in json.loads(Path("out.json").read_text())["ops"]}


def test_ops_without_tensors_are_not_recorded() -> None:
    """Every step of an optimizer calls two of the profiler's."""
    parameter = nn.Parameter(torch.ones(2))
    with watching() as watch:
        parameter.sum().backward()
        torch.optim.SGD([parameter], lr=0.1).step()
    found = watch.take()
    assert {name.split(".")[0] for name in found} == {"aten"}
    assert "aten._foreach_add_.List" in found or "aten.add_.Tensor" in found
