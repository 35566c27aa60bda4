"""Which elements of an output a failed comparison names."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.fixture.closeness import closeness

VALUES = st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=12)


def lines(y: object, reference: object, tolerance: float = 0.01) -> list[str]:
    found = closeness(y, reference, tolerance, "half")
    assert not found
    return repr(found).splitlines()


@settings(max_examples=25)
@given(y=VALUES, reference=VALUES, tolerance=st.sampled_from([1e-3, 1e-2, 0.5]))
def test_a_comparison_fails_only_with_mismatched_elements(
    y: list[float], reference: list[float], tolerance: float
) -> None:
    count = min(len(y), len(reference))
    one, other = torch.tensor(y[:count], dtype=torch.float64), torch.tensor(reference[:count], dtype=torch.float64)
    found = closeness(one, other, tolerance, "half")
    bound = tolerance * other.square().mean().sqrt()
    assume(
        bool((((one - other).abs() - bound).abs() > 1e-9 * bound).all())
    )  # not on the border, where rounding decides
    over = (one - other).abs() > bound
    if not found and bool(other.any()):
        assert f"Mismatched elements: {int(over.sum())} / {count} " in repr(found)
        assert bool(over.any())
    if found:
        assert "\n" not in repr(found)


def test_the_greatest_differences_are_at_their_index() -> None:
    reference = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    y = reference.clone()
    y[3, 4] += 9
    small = int(reference.abs().argmin())
    y.view(-1)[small] += 100 * float(reference.view(-1)[small])
    text = "\n".join(lines(y, reference))
    assert re.search(r"Greatest absolute difference: 9 at index \(3, 4\)", text)
    assert f"Greatest relative difference: 1e+02 at index {divmod(small, 6)}" in text


def test_nan_and_inf_are_counted_where_the_reference_has_none() -> None:
    reference = torch.tensor([[1.0, math.nan, math.inf], [2.0, 3.0, 4.0]])
    y = torch.tensor([[math.nan, math.nan, math.inf], [2.0, -math.inf, math.nan]])
    _, *found = lines(y, reference)
    assert found[0].startswith("Mismatched elements: 3 / 6 (50.0 %)")
    assert "NaN: 2 / 6 (33.3 %), the first at index (0, 0)" in found
    assert "Inf: 1 / 6 (16.7 %), the first at index (1, 1)" in found
    assert not any("Greatest" in line for line in found)


@pytest.mark.parametrize(
    ("y", "reference", "expected"),
    [
        (torch.tensor(2.0), torch.tensor(1.0), "Mismatched elements: 1 / 1 (100.0 %)"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3]), "Mismatched elements: 1 / 3 (33.3 %)"),
        (torch.tensor([1j, 2.0]), torch.tensor([1j, 1.0]), "Greatest absolute difference: 1 at index (1,)"),
        ([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(3)], "In output 1"),
        ({"a": torch.ones(2) * 2}, {"a": torch.ones(2)}, "Over the tolerance: 1 of 1 outputs, a (1.0e+00)"),
    ],
    ids=["scalar", "integer", "complex", "shape", "one-named"],
)
def test_other_kinds_of_output(y: Tensor, reference: Tensor, expected: str) -> None:
    assert any(line.startswith(expected) for line in lines(y, reference))


def test_a_complex_element_is_mismatched_by_its_magnitude() -> None:
    reference = torch.full((4,), 3 + 4j)
    y = reference + torch.tensor([0.0499, 0.0501, 0.0501j, 0.2])
    assert "Mismatched elements: 3 / 4 (75.0 %), by more than 5.0e-02" in "\n".join(lines(y, reference))


def test_tensors_of_two_mappings_are_compared_by_key() -> None:
    one, other = torch.ones(2), torch.full((2,), 3.0)
    assert closeness({"b": other, "a": one}, {"a": one, "b": other}, 0.01, "half")
    assert lines({"b": other, "a": one * 2}, {"a": one, "b": other})[1].endswith("a (1.0e+00)")
    assert lines({"a": one, "b": one}, {"a": one, "c": one}) == [
        "<half: only the output has b; only the reference has c>"
    ]
    assert closeness((one, other), [one, other], 0.01, "half")


def test_tensors_that_cannot_be_compared() -> None:
    assert lines(torch.ones(0), torch.ones(0)) == ["<half: nothing to compare: the tensors have no elements>"]
    with pytest.raises(UsageError, match="y has a tensor on the meta device"):
        closeness(torch.ones(2, device="meta"), torch.ones(2), 0.01, "half")


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_are_the_numbers_that_they_stand_for() -> None:
    reference = torch.tensor([0.5, 1.0])
    assert closeness(torch.quantize_per_tensor(reference, 0.1, 0, torch.qint8), reference, 0.01, "half")


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("y", "reference", "words"),
    [
        ([INF, 1.0], [-INF, 1.0], "Inf where the reference is -Inf"),
        ([-INF, 1.0], [INF, 1.0], "-Inf where the reference is Inf"),
        ([NAN, 1.0], [2.0, 1.0], "NaN where the reference is finite"),
        ([-INF, 1.0], [2.0, 1.0], "Inf where the reference is finite"),
        ([NAN, INF], [2.0, 1.0], "NaN and Inf where the reference is finite"),
        ([NAN, 1.0], [INF, 1.0], "NaN where the reference is Inf"),
        ([NAN, INF], [-INF, 1.0], "Inf where the reference is finite and NaN where the reference is Inf"),
        ([1.0, 1.0], [INF, 1.0], "the output is finite where the reference is infinite"),
        ([complex(1, INF)], [complex(1, -INF)], "Inf where the reference is -Inf"),
        ([NAN, 1.0], [1.0], "the output has shape (2,), the reference (1,), and the output has NaN or Inf"),
    ],
)
def test_the_first_line_says_how_nan_and_inf_differ(y: list[Any], reference: list[Any], words: str) -> None:
    found = closeness(torch.tensor(y), torch.tensor(reference), 0.01, "half")
    assert not found
    assert repr(found).splitlines()[0] == f"<half: {words}>"


def test_where_the_reference_is_nan_nothing_is_compared() -> None:
    for value in (INF, NAN, 1.0):
        assert closeness(torch.tensor([value, 1.0]), torch.tensor([NAN, 1.0]), 0.01, "half")
