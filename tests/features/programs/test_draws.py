"""Random numbers that a program draws in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # knows functions as they are when it is imported
from torch import Tensor

from lowprec_check.features.programs.running import Draws

SIZE = 1000


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


DRAWS: dict[str, Callable[[Any], Tensor]] = {
    "randn": lambda dtype: torch.randn(SIZE, dtype=dtype),
    "rand": lambda dtype: torch.rand((4, SIZE), dtype=dtype, device="cpu"),
    "by keyword": lambda dtype: torch.rand(size=(SIZE,), dtype=dtype),
    "with a generator": lambda dtype: torch.randn((1, SIZE), generator=seeded(), dtype=dtype),
    "randn_like": lambda dtype: torch.randn_like(torch.zeros(SIZE, dtype=dtype)),
    "rand_like with a dtype": lambda dtype: torch.rand_like(torch.zeros(SIZE), dtype=dtype),
    "normal_": lambda dtype: torch.zeros(SIZE, dtype=dtype).normal_(2.0, 0.5),
    "uniform_": lambda dtype: torch.zeros(SIZE, dtype=dtype)[::2].uniform_(-1, 1),
    "with a seed": lambda dtype: torch.zeros(SIZE, dtype=dtype).exponential_(generator=seeded()),
}


def drawn(draw: Callable[[Any], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is drawn, and the next number that torch draws."""
    torch.manual_seed(5)
    return draw(dtype), torch.rand(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_are_those_of_fp32_rounded(draw: Callable[[Any], Tensor], dtype: torch.dtype) -> None:
    numbers, following = drawn(draw, torch.float32)

    with Draws().as_in_fp32():
        low, following_low = drawn(draw, dtype)

    assert low.dtype == dtype
    assert torch.equal(low, numbers.to(dtype))
    assert torch.equal(following, following_low)
    assert torch.equal(drawn(draw, dtype)[1], drawn(draw, dtype)[1])  # torch draws as before


def test_only_lines_with_other_numbers_are_told() -> None:
    draws = Draws()
    torch.manual_seed(5)
    by_itself, numbers = (drawn(DRAWS["randn"], dtype)[0].float() for dtype in (torch.float16, torch.float32))

    with draws.as_in_fp32():
        torch.randn(SIZE)
        torch.rand(1, dtype=torch.float16)  # a single number is the same one

        drawn(DRAWS["randn"], torch.float16)

    # Releases of torch differ in this
    assert bool(draws.lines) == (not torch.allclose(by_itself, numbers, rtol=2**-5, atol=2**-10))
    assert len(draws.lines) <= 1


def test_what_cannot_be_drawn_fails_as_before() -> None:
    with Draws().as_in_fp32(), pytest.raises(TypeError):
        torch.randn(SIZE, dtype=torch.float16, unknown=True)
    with Draws().as_in_fp32(), pytest.raises(RuntimeError):
        torch.zeros(SIZE, dtype=torch.float16).uniform_(1, -1)


def test_options_of_torch_are_kept() -> None:
    with Draws().as_in_fp32():
        weights = torch.randn(SIZE, dtype=torch.bfloat16, requires_grad=True)
        out = torch.empty(SIZE, dtype=torch.bfloat16)
        assert torch.randn(SIZE, dtype=torch.bfloat16, out=out) is out
    assert weights.requires_grad
    assert weights.is_leaf


def test_tensors_without_numbers_are_drawn_as_they_are() -> None:
    with Draws().as_in_fp32():
        drawn = torch.randn(2, 3, dtype=torch.float16, device="meta")
        assert torch.rand_like(drawn).is_meta
        assert drawn.normal_().is_meta


class Noisy(torch.nn.Module):
    """Adds noise in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(4, dtype=x.dtype) + torch.rand_like(x) + torch.empty_like(x).normal_()


def test_functions_that_are_compiled_or_transformed_draw_as_before() -> None:
    noisy, x = Noisy(), torch.ones(2, 4, dtype=torch.bfloat16)

    def compiled() -> Any:
        return torch.compile(Noisy(), fullgraph=True, backend="eager")(x)

    def mapped() -> Any:
        return torch.func.vmap(noisy, randomness="different")(x)

    def traced() -> Any:
        graph = torch.jit.trace(noisy, x, check_trace=False).graph
        return [node.kind() for node in graph.nodes()]

    for transformed in (compiled, mapped, traced):
        torch.manual_seed(5)
        expected = transformed()
        torch.manual_seed(5)
        with Draws().as_in_fp32():
            found = transformed()
        assert str(found) == str(expected)
    with Draws().as_in_fp32():
        assert torch.randn.__name__ == "randn"
