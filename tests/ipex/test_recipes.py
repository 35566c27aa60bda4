"""What Intel documents, on ResNet-50 and a transformer, each compared with plain eager fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
ON_OR_OFF = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])


def types(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


def check(case: Any, inference: Any, model: Any, dtype: torch.dtype, **changed: Any) -> None:
    """Every one of three calls has a small error; that of bf16 is not 0."""
    with inference(dtype):
        errors = [case.error(case.call(model, **changed)) for _ in range(3)]
    assert max(errors) < BOUNDS[dtype]
    assert dtype == torch.float32 or min(errors) > 1e-4


@DTYPES
@ON_OR_OFF
def test_weights_are_prepacked(ipex: Any, case: Any, inference: Any, dtype: torch.dtype, on: bool) -> None:
    model = ipex.optimize(case.model, dtype=dtype, weights_prepack=on, auto_kernel_selection=True)
    packed = [name for name in types(model) if name.startswith("_IPEX")]
    assert bool(packed) == on
    check(case, inference, model, dtype)
    assert not any(name.startswith("_IPEX") for name in types(case.model))


@DTYPES
def test_optimize_alone(ipex: Any, case: Any, inference: Any, dtype: torch.dtype) -> None:
    check(case, inference, ipex.optimize(case.model, dtype=dtype), dtype)


@DTYPES
@ON_OR_OFF
def test_batch_norm_is_folded(ipex: Any, resnet: Any, inference: Any, dtype: torch.dtype, on: bool) -> None:
    model = ipex.optimize(resnet.model, dtype=dtype, conv_bn_folding=on)
    assert types(resnet.model).count("BatchNorm2d") == 53
    assert types(model).count("BatchNorm2d") == (0 if on else 53)
    check(resnet, inference, model, dtype)


@DTYPES
def test_channels_last(ipex: Any, resnet: Any, inference: Any, dtype: torch.dtype) -> None:
    (image,) = resnet.args
    model = ipex.optimize(resnet.model.to(memory_format=torch.channels_last), dtype=dtype)
    image = image.to(memory_format=torch.channels_last)
    assert not image.is_contiguous()
    check(resnet, inference, model, dtype, args=(image,))


@DTYPES
def test_trace_and_freeze(ipex: Any, case: Any, inference: Any, dtype: torch.dtype) -> None:
    model = ipex.optimize(case.model, dtype=dtype)
    given = {"example_kwarg_inputs": case.kwargs} if case.kwargs else {"example_inputs": case.args}
    with inference(dtype):
        frozen = torch.jit.freeze(torch.jit.trace(model, **given, check_trace=False, strict=False))
    check(case, inference, frozen, dtype)
    assert "ipex" in str(frozen.graph_for(*case.args, **case.kwargs))


@DTYPES
def test_compile(ipex: Any, case: Any, inference: Any, dtype: torch.dtype) -> None:
    model = ipex.optimize(case.model, dtype=dtype, weights_prepack=False)
    check(case, inference, torch.compile(model, backend="ipex"), dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int = 4) -> list[float]:
    """The losses of a few steps on one batch."""
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % 4
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            output = model(images)
        loss = F.cross_entropy(output.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def small_classifier() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2))
    return nn.Sequential(body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).train()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_training_in_bf16(ipex: Any, kind: str) -> None:
    """The losses are those of fp32, and the master weights change."""
    options = {"lr": 0.5, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01}
    plain = small_classifier()
    expected = train(plain, getattr(torch.optim, kind)(plain.parameters(), **options), torch.float32, 10)
    model = small_classifier()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = ipex.optimize(model, dtype=torch.bfloat16, optimizer=optimizer)
    losses = train(model, optimizer, torch.bfloat16, 10)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=0.05)
    after = model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value.float(), after[name].float())]
    assert {name for name, _ in small_classifier().named_parameters()} - {"0.3.bias"} <= set(changed)


def test_training_resnet50_in_bf16(ipex: Any, resnet: Any) -> None:
    model = resnet.model.train()
    torch.manual_seed(0)
    model.fc = nn.Linear(2048, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    before = model.fc.weight.detach().clone()
    model, optimizer = ipex.optimize(model, dtype=torch.bfloat16, optimizer=optimizer)
    losses = train(model, optimizer, torch.bfloat16)
    assert losses[-1] < losses[0]
    assert not torch.equal(model.state_dict()["fc.weight"].float(), before)


def test_training_needs_an_optimizer(ipex: Any, resnet: Any) -> None:
    with pytest.raises(AssertionError, match="The optimizer should be given for training mode"):
        ipex.optimize(resnet.model.train())


def test_fp16_weights_are_prepacked_if_the_cpu_can(ipex: Any, case: Any, inference: Any) -> None:
    """The extension itself knows which CPUs can: Intel's flag for one more of them is not torch's."""
    refusal = "FP16 weight prepack needs the cpu support avx_ne_convert or avx512_core_fp16"
    if ipex._C.onednn_has_fp16_support():
        model = ipex.optimize(case.model, dtype=torch.half)
        with inference(torch.half):
            assert case.error(case.call(model)) < 5e-3
    else:
        with pytest.raises(AssertionError, match=refusal):
            ipex.optimize(case.model, dtype=torch.half)


def test_the_fused_encoder_layer_cannot_read_prepacked_bf16_weights(ipex: Any, inference: Any) -> None:
    """``nn.TransformerEncoderLayer`` in eval mode passes its weights to a fused op itself."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), torch.randn(2, 16, 64)
    with inference(torch.bfloat16):
        with pytest.raises(RuntimeError, match="2d weights expected"):
            ipex.optimize(model, dtype=torch.bfloat16)(x)
        ipex.optimize(model, dtype=torch.bfloat16, weights_prepack=False)(x.bfloat16())
