"""A suite under coverage behaves as without it if Python chooses kernels: higher-order, custom ops, nested tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.strict_mode import strict_mode_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from watched import watching

from lowprec_check.torchkit.dispatch_mode import DispatchMode

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


HIGHER_ORDER = {
    "cond": ("aten.linalg_inv_ex.default", lambda: _cond(torch.tensor(True), _inverse, torch.sin, (X,))),
    "cond in cond": (
        "aten.linalg_inv_ex.default",
        lambda: _cond(torch.tensor(True), lambda x: _cond(torch.tensor(False), torch.sin, _inverse, (x,)), _sin, (X,)),
    ),
    "while_loop": (
        "aten.mm.default",
        lambda: while_loop_op(lambda i, _: i < 2, lambda i, x: (i + 1, x @ x), (torch.tensor(0), X), ()),
    ),
    "strict_mode": ("aten.cos.default", lambda: strict_mode_op(lambda x: x.cos(), (X,))),
    "map": ("aten.cos.default", lambda: map_impl(lambda x: (x.cos(),), (X,), ())),
    "out_dtype": ("aten.mm.default", lambda: out_dtype(torch.ops.aten.mm.default, torch.int32, I8, I8)),
    "random numbers": (
        "aten.native_dropout.default",
        lambda: run_and_save_rng_state(torch.ops.aten.native_dropout.default, X, 0.5, True),
    ),
}
I8 = torch.ones(2, 2, dtype=torch.int8)
_cond = torch.ops.higher_order.cond


def _inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)


def _sin(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_the_ops_inside_higher_order_ops_are_watched(name: str, inference: bool) -> None:
    op, call = HIGHER_ORDER[name]
    with torch.inference_mode(inference):
        torch.manual_seed(0)
        plain = tree_leaves(call())
        torch.manual_seed(0)
        with watching() as watch:
            watched = tree_leaves(call())
    assert op in watch.take()
    assert len(watched) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))


def test_gradients_and_errors_inside_a_higher_order_op_are_as_before() -> None:
    singular, parameter = torch.zeros(2, 2), X.clone().requires_grad_()
    with watching() as watch:
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            _cond(torch.tensor(True), _inverse, _sin, (singular,))
        watch.take()
        _cond(torch.tensor(True), lambda x: (x.sin(),), lambda x: (x.exp(),), (parameter,))[0].sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, X.cos())
    assert {"aten.sin.default", "aten.cos.default"} <= {*watch.take()}


def test_make_fx_and_fake_tensors_get_the_higher_order_op() -> None:
    def condition(x: torch.Tensor) -> torch.Tensor:
        return _cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]

    plain = make_fx(condition)(X).code
    assert "higher_order.cond" in str(plain)
    with watching():
        assert make_fx(condition)(X).code == plain
        with FakeTensorMode():
            fake = _cond(torch.tensor(True), torch.sin, torch.cos, (torch.empty(2, 2),))
    assert isinstance(fake, FakeTensor)


def test_the_first_op_inside_a_block_keeps_the_dtype_that_autocast_gives_it() -> None:
    """``cdist`` computes in fp32 under autocast, with a product inside that alone would be in 16 bits."""

    def distances() -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            direct = torch.cdist(points, points)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [direct, _cond(torch.tensor(True), lambda x: torch.cdist(x, x), _sin, (points,))]

    points = torch.randn(32, 4)
    plain = distances()
    with watching():
        watched = distances()
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))


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


@torch.library.custom_op("lowprec_kernels::halve_", mutates_args=("x",))
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


def test_the_body_of_a_custom_op_changes_its_argument_as_often_as_before() -> None:
    plain, watched = torch.ones(3), torch.ones(3)
    halve_(plain)
    with watching():
        halve_(watched)
    assert watched._version == plain._version  # 2 in torch 2.13, 1 in 2.11


WRITES = {
    "divide_": lambda x: x.divide_(2),
    "out": lambda x: torch.linalg.inv(x, out=x),
    "flatten": torch.Tensor.flatten,
    "chunk": lambda x: x.chunk(2)[0],
}


@pytest.mark.parametrize("name", WRITES)
def test_inference_mode_counts_writes_and_tracks_views_as_before(name: str) -> None:
    seen = []
    for context in (nullcontext(), watching()):
        x = X.clone()
        with context, torch.inference_mode():
            y = WRITES[name](x)
        seen.append((x._version, y._is_view(), y._base is x, y.is_inference()))
    assert seen[0] == seen[1]


def test_a_composite_op_does_not_write_to_an_inference_tensor() -> None:
    with torch.inference_mode():
        x = X.clone()
    with watching(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        x.absolute_()


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
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_modes_of_a_scan_leave_nested_tensors_their_kernels(layout: torch.layout, inference: bool) -> None:
    parts, linear = [torch.randn(2, 4), torch.randn(3, 4)], nn.Linear(4, 3)
    with torch.inference_mode(inference), DispatchMode():
        first = linear(torch.nested.nested_tensor(parts, layout=layout)).chunk(3, -1)[0]
    for output, part in zip(first.unbind(), parts, strict=True):
        torch.testing.assert_close(output, linear(part)[:, :1])


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("mode", [DispatchMode, watching])
def test_sparse_tensors_on_meta_fail_as_without_a_mode(make: Any, mode: Any) -> None:
    """Their dispatch keys are ``SparseMeta`` and ``SparseCsrMeta``."""
    x = make(torch.eye(2)).to("meta")
    with torch.inference_mode():
        with pytest.raises(NotImplementedError) as plain:
            torch.matmul(x, torch.empty(2, 2, device="meta"))
        with mode(), pytest.raises(NotImplementedError) as seen:
            torch.matmul(x, torch.empty(2, 2, device="meta"))
    assert str(seen.value) == str(plain.value)


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
