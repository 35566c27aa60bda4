"""Histograms of magnitudes, against ``torch.frexp`` of what plain forward hooks see in fp32."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import CPU, DEFAULT, LOW, begun, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check.core.trace.instrument import fp32_state, run_instrumented
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.magnitudes import run as sampling
from lowprec_check.features.magnitudes.run import MagnitudeSamples, sample
from lowprec_check.schema.measures import SAMPLE, ModuleMagnitudes
from lowprec_check.schema.precisions import PRECISIONS


class Net(nn.Module):
    """Each layer is one op; the activations stay below the size of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.norm, self.linear, self.act = nn.LayerNorm(200), nn.Linear(200, 50), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.relu(self.conv(x)).to(memory_format=torch.channels_last))
        return self.act(self.linear(self.norm(y.flatten(1))))


IMAGE = (1, 3, 11, 11)


def by_frexp(values: Tensor) -> Counter[int]:
    """Counts by exponent, of the non-zeros."""
    _, exponents = torch.frexp(values.detach().double().flatten())
    return Counter((exponents - 1)[values.flatten() != 0].tolist())


def counts_of(found: ModuleMagnitudes) -> Counter[int]:
    return Counter({found.lowest + index: count for index, count in enumerate(found.counts) if count})


def hooked(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The outputs of the plain fp32 model by module, copied when the module returns."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach().clone()}))
        for name, module in model.named_modules()
        if name
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("deferred", [False, True])
def test_histograms_are_those_of_the_outputs_of_the_plain_fp32_model(precision: str, deferred: bool) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(IMAGE)
    plain = hooked(model, x)
    _, found = run(model, (x,), precision, options=DEFAULT._replace(deferred=deferred))
    histograms = {its.module: its for its in found.magnitudes}
    assert set(histograms) >= set(plain)
    for name, values in plain.items():
        assert values.numel() <= SAMPLE
        assert counts_of(histograms[name]) == by_frexp(values), name
        assert histograms[name].zeros == int((values == 0).sum())
        assert (histograms[name].values, histograms[name].ops) == (values.numel(), 1)


def test_a_sample_is_bounded_and_meets_every_channel() -> None:
    values = torch.arange(768.0).expand(197, 768).contiguous()
    taken = sample(values)
    assert len(taken) <= SAMPLE
    assert len(set(taken.tolist())) == 768


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(
        st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-40, math.inf, math.nan]), max_size=40), max_size=9
    ),
    batch=st.integers(1, 5),
)
def test_every_number_is_counted_once(values: list[list[float]], batch: int) -> None:
    """Subnormals, zeros, infinities, batches of any size; against arithmetic in fp64."""
    samples, kept = MagnitudeSamples(), sampling.BATCH
    try:
        sampling.BATCH = batch
        for index, numbers in enumerate(values):
            samples.add(f"m{index % 4}", torch.tensor(numbers))
    finally:
        sampling.BATCH = kept
    histograms = {its.module: its for its in samples.result()}
    for name in {f"m{index % 4}" for index, numbers in enumerate(values) if numbers}:
        of_it = [number for index, numbers in enumerate(values) if f"m{index % 4}" == name for number in numbers]
        finite = [number for number in of_it if math.isfinite(number) and number]
        assert counts_of(histograms[name]) == Counter(math.frexp(number)[1] - 1 for number in finite)
        assert histograms[name].zeros == sum(number == 0 for number in of_it)
        assert histograms[name].nonfinite == len(of_it) - len(finite) - histograms[name].zeros


def test_counts_on_a_device_are_those_on_a_cpu() -> None:
    """The code for accelerators, on CPU tensors."""
    torch.manual_seed(0)
    pending = [(row % 3, torch.randn(50 + row).relu() * 10.0 ** (row - 40)) for row in range(9)]
    on_cpu, elsewhere = torch.zeros(3, 279, dtype=torch.int64), torch.zeros(3, 279, dtype=torch.int64)
    sampling.add_on_cpu(on_cpu, pending)
    sampling.add_on_accelerator(elsewhere, pending)
    assert on_cpu.sum()
    assert torch.equal(on_cpu, elsewhere)


class Odd(nn.Module):
    """Outputs that need care: empty, complex, conjugated, transposed, integer, random, in inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x.float()).conj() * 2
        order = x.argsort()
        return spectrum.real.to(x.dtype).t().add(1).t()[:0].sum() + x.gather(1, order).sum() + torch.rand_like(x).sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("budget", [False, True])
def test_odd_outputs_are_counted_without_a_fault(mode: Any, budget: bool) -> None:
    with mode():
        _, found = run(Odd(), (torch.randn(4, 4),), "bfloat16", budget=budget)
    (histogram,) = found.magnitudes
    assert histogram.values
    assert not histogram.nonfinite


def test_no_histogram_without_a_reference_and_only_of_the_forward_pass() -> None:
    _, found = run(Net().eval(), (torch.randn(IMAGE),), "half", options=DEFAULT._replace(errors="none"))
    assert found.magnitudes == []


def test_beyond_the_most_modules_values_count_for_the_module_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_MODULES", 3)
    samples = MagnitudeSamples()
    for module in ("a", "a.b", "a.b.c", "d"):
        samples.add(module, torch.ones(2))
    assert [(its.module, its.ops, its.counts) for its in samples.result()] == [
        ("", 1, [2]),
        ("a", 1, [2]),
        ("a.b", 2, [4]),
    ]


def test_samples_do_not_keep_the_tensors_of_the_model() -> None:
    with prepared(Net().eval(), PRECISIONS.get("bfloat16"), CPU) as ready:
        x, fp32 = torch.randn(8, *IMAGE[1:]), fp32_state(ready.model)
        found = run_instrumented(begun("bfloat16"), ready, (x,), {}, fp32, DEFAULT).run
    assert all(its.values <= its.ops * SAMPLE for its in found.magnitudes)
    big = torch.zeros(1 << 16)
    assert sample(big).untyped_storage().nbytes() <= SAMPLE * 4
