"""A suite under coverage behaves as without it where Python code chooses the kernel: higher-order ops, custom ops, nested tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from watched import watching

X = 2 * torch.eye(4)


# -- higher-order ops


def test_higher_order_ops_run(project: pytest.Pytester) -> None:
    """In a process of its own: they import Dynamo. The graph compiled in inference mode has ``with_effects``."""
    project.makepyfile(
        """
        import torch
        from torch.nn.attention.flex_attention import flex_attention
        x = 2 * torch.eye(4)
        def test_condition(): assert torch.equal(torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,)), x.sin())
        def test_attention():
            assert flex_attention(x[None, None], x[None, None], x[None, None]).shape == (1, 1, 4, 4)
        def test_compiled():
            with torch.inference_mode():
                inverse = torch.compile(torch.linalg.inv, backend="aot_eager", fullgraph=True)(x)
                assert torch.equal(inverse, torch.linalg.inv(x))
        """
    )
    project.runpytest_subprocess("-Wignore", "--lowprec-coverage", "half").assert_outcomes(passed=3)


# -- ops of torch.library

_library = torch.library.Library("lowprec_kernels", "FRAGMENT")
_library.define("double_sine(Tensor x) -> Tensor")
_library.impl("double_sine", lambda x: 2 * x.sin(), "CPU")
_library.define("scale_(Tensor(a!) x) -> ()")
_library.impl("scale_", lambda x: [x.mul_(2), None][1], "CPU")


@torch.library.custom_op("lowprec_kernels::inverse", mutates_args=())
def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x) + 1


inverse.register_fake(torch.empty_like)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_the_gradient_of_an_op_without_one_is_that_of_the_ops_inside() -> None:
    x = torch.ones(3, requires_grad=True)
    with watching() as watch:
        torch.ops.lowprec_kernels.double_sine(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.ones(3).cos())
    assert {"aten.sin.default", "lowprec_kernels.double_sine.default"} <= {*watch.take()}


def test_an_op_that_changes_its_argument_counts_as_a_change() -> None:
    with watching():
        x = torch.ones(3)
        torch.ops.lowprec_kernels.scale_(x)
    assert x._version == 1


def test_an_op_on_meta_runs_its_description() -> None:
    with watching():
        assert inverse(torch.empty(3, 3, device="meta")).shape == (3, 3)
        with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
            torch.ops.lowprec_kernels.double_sine(torch.empty(3, device="meta"))


def test_an_error_has_no_other_one_as_its_context() -> None:
    with watching(), pytest.raises(RuntimeError, match="result type Float") as caught:
        torch.ones(2, dtype=torch.int32).add_(1.5)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("inference", [False, True])
def test_make_fx_traces_the_op_and_not_those_inside(inference: bool) -> None:
    def traced() -> str:
        with torch.inference_mode(inference):
            return str(make_fx(lambda x: torch.ops.lowprec_kernels.double_sine(torch.linalg.inv(x)))(X).code)

    plain = traced()
    assert "double_sine" in plain
    with watching():
        assert traced() == plain


# -- nested tensors


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_keep_their_kernels(layout: torch.layout, inference: bool) -> None:
    parts, linear = [torch.randn(2, 4), torch.randn(3, 4)], nn.Linear(4, 3)
    with torch.inference_mode(inference), watching():
        outputs = linear(torch.nested.nested_tensor(parts, layout=layout)).unbind()
    for output, part in zip(outputs, parts, strict=True):
        torch.testing.assert_close(output, linear(part))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_attention_of_nested_tensors() -> None:
    def attention() -> torch.Tensor:
        query = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query).transpose(1, 2).values()

    x = torch.randn(2, 2, 4)
    plain = attention()
    with watching():
        assert torch.equal(attention(), plain)


# -- doctests


@pytest.mark.parametrize("options", [(), ("--doctest-continue-on-failure",)])
def test_a_failed_doctest_shows_no_frame_of_this_package(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    project.makepyfile(
        functions='''
        def product():
            """
            >>> import torch
            >>> torch.ones(2, 3) @ torch.ones(2, 3)
            1
            >>> torch.ones(2, 3) @ torch.ones(2, 4)
            2
            """
        '''
    )
    result = project.runpytest("--doctest-modules", "functions.py", "--lowprec-coverage", "half", *options)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    assert "__torch_dispatch__" not in text
