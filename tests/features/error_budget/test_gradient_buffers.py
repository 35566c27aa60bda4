"""Gradients by storage are those of autograd, for parts of a storage in any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowprec_check.features.error_budget.gradient_buffers import GradientBuffers, Part, pulled_back

SIZE = 24
DIRECTIONS = 3
View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.view(4, 6).t(),
    "columns": lambda base: base.view(4, 6)[:, 1:6:2],
    "row": lambda base: base.view(4, 6)[2],
    "scalar": lambda base: base[5],
    "empty": lambda base: base[3:3],
    "flipped halves": lambda base: base.view(2, 3, 4).permute(2, 0, 1)[1:],
    "expanded": lambda base: base[4:8].view(4, 1).expand(4, 5),
    "expanded scalar": lambda base: base[7].expand(2, 3),
    "windows": lambda base: base.unfold(0, 6, 2),
    "diagonal": lambda base: base.view(4, 6).diagonal(),
    "negated": lambda base: torch._neg_view(base[2:9]),
}
COMPLEX_VIEWS: dict[str, View] = {
    "complex": torch.view_as_complex,
    "complex columns": lambda base: torch.view_as_complex(base).view(3, 4)[:, ::2],
    "conjugated": lambda base: torch.view_as_complex(base).conj(),
    "conjugated row": lambda base: torch.view_as_complex(base).view(3, 4)[1].conj(),
    "complex expanded": lambda base: torch.view_as_complex(base)[2:4].view(2, 1).expand(2, 3),
    "conjugated windows": lambda base: torch.view_as_complex(base).conj().unfold(0, 4, 1),
    "real part": lambda base: torch.view_as_complex(base).real,
    "imaginary part": lambda base: torch.view_as_complex(base).view(3, 4)[:, 1:].imag,
    "imaginary part of a conjugate": lambda base: torch.view_as_complex(base).conj().imag,
    "pairs": lambda base: torch.view_as_real(torch.view_as_complex(base)[3:]),
}
CASES = [*((name, view, False) for name, view in VIEWS.items())]
CASES += [(name, view, True) for name, view in COMPLEX_VIEWS.items()]


def base_of(pairs: bool) -> Tensor:
    """What the views are of: real numbers, in pairs for complex views."""
    return torch.zeros(SIZE // 2, 2) if pairs else torch.zeros(SIZE)


def random_like(tensor: Tensor, *, several: bool = True) -> Tensor:
    """Gradients in all directions, or in one."""
    shape = (DIRECTIONS, *tensor.shape) if several else tuple(tensor.shape)
    return torch.randn(shape, dtype=tensor.dtype)


def by_autograd(view: View, pairs: bool, gradients: Tensor) -> Tensor:
    """The gradients of the whole storage, (directions, numbers)."""
    found = []
    for gradient in gradients:
        leaf = base_of(pairs).requires_grad_()
        found.append(torch.autograd.grad(view(leaf), leaf, gradient)[0].reshape(-1))
    return torch.stack(found)


def everything(buffers: GradientBuffers, pairs: bool) -> Tensor:
    """All gradients, as real numbers; the buffers are empty afterwards."""
    taken = buffers.take(Part.of(0, base_of(pairs)))
    return torch.zeros(DIRECTIONS, SIZE) if taken is None else taken.reshape(DIRECTIONS, SIZE)


@pytest.mark.parametrize(("view", "pairs"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_added_gradients_are_those_of_autograd(view: View, pairs: bool) -> None:
    shown = view(base_of(pairs))
    gradients, part = random_like(shown), Part.of(0, shown)
    buffers = GradientBuffers(DIRECTIONS)
    buffers.add(part, gradients.clone())
    assert torch.allclose(everything(buffers, pairs), by_autograd(view, pairs, gradients), atol=1e-6)


@pytest.mark.parametrize(
    ("view", "pairs"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES if not {"expanded", "windows"} & set(case[0].split())],
)
def test_gradients_of_what_an_op_wrote_are_taken_and_cleared(view: View, pairs: bool) -> None:
    """Overwriting a part with y: its gradient is that of y, and what was there before has none."""
    buffers, whole = GradientBuffers(DIRECTIONS), base_of(pairs)
    gradients = random_like(whole)
    buffers.add(Part.of(0, whole), gradients.clone())
    taken = buffers.take(Part.of(0, view(whole)))
    assert taken is not None
    for direction in range(DIRECTIONS):
        old = whole.clone().requires_grad_()
        new = torch.zeros_like(view(whole)).resolve_conj().resolve_neg().requires_grad_()
        both = old.clone()
        view(both).copy_(new)
        of_old, of_new = torch.autograd.grad(both, (old, new), gradients[direction])
        assert torch.allclose(taken[direction], of_new)
        left = buffers._by_storage.get(0)
        assert torch.equal(torch.zeros(SIZE) if left is None else left[direction], of_old.reshape(-1))


@settings(max_examples=25)
@given(data=st.data(), pairs=st.booleans())
def test_gradients_of_several_views_add_up(data: st.DataObject, pairs: bool) -> None:
    known = COMPLEX_VIEWS if pairs else VIEWS
    names = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    buffers, expected = GradientBuffers(DIRECTIONS), torch.zeros(DIRECTIONS, SIZE)
    for name in names:
        shown = known[name](base_of(pairs))
        gradients = random_like(shown)
        buffers.add(Part.of(0, shown), gradients.clone())
        expected += by_autograd(known[name], pairs, gradients)
    assert torch.allclose(everything(buffers, pairs), expected, atol=1e-5)


def test_storages_are_apart_and_unknown_ones_have_no_gradient() -> None:
    buffers = GradientBuffers(1)
    buffers.add(Part.of(1, torch.zeros(2)), torch.ones(1, 2))
    assert buffers.take(Part.of(2, torch.zeros(2))) is None
    taken = buffers.take(Part.of(1, torch.zeros(2)))
    assert taken is not None
    assert taken.tolist() == [[1.0, 1.0]]
    assert buffers.take(Part.of(1, torch.zeros(2))) is None


def test_derivatives_that_are_not_finite_count_as_zero() -> None:
    zeros = torch.zeros(3, requires_grad=True)
    [found] = pulled_back([zeros.sqrt()], [zeros], [torch.tensor([[1.0, -1.0, 0.0], [2.0, 1.0, 0.0]])])
    assert found is not None
    assert found.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_storage_that_grew_keeps_its_gradients() -> None:
    buffers = GradientBuffers(2)
    buffers.add(Part.of(0, torch.zeros(2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    buffers.add(Part.of(0, torch.zeros(3)), torch.ones(2, 3))
    assert buffers.take(Part.of(0, torch.zeros(3))).tolist() == [[2.0, 3.0, 1.0], [4.0, 5.0, 1.0]]  # type: ignore[union-attr]
