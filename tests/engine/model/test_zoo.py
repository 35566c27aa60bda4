"""torchvision models, and the Python replacements for its compiled ops."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.zoo import import_torchvision, load_torchvision

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)


def boxes_of(seed: int, count: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * spread
    size = torch.rand(count, 2, generator=generator) * 40 + 1
    return torch.cat([corner, corner + size], 1), torch.rand(count, generator=generator)


def by_definition(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """NMS box by box, in Python numbers."""

    def overlap(a: list[float], b: list[float]) -> float:
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        common = max(width, 0.0) * max(height, 0.0)
        return common / (sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)) - common)

    kept: list[int] = []
    plain = boxes.double().tolist()
    for index in scores.argsort(descending=True).tolist():
        if all(overlap(plain[index], plain[other]) <= threshold for other in kept):
            kept.append(index)
    return kept


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10_000), st.integers(0, 400), st.sampled_from([5.0, 60.0, 500.0]), st.sampled_from([0.1, 0.5, 0.9])
)
def test_nms_matches_its_definition(seed: int, count: int, spread: float, threshold: float) -> None:
    boxes, scores = boxes_of(seed, count, spread)
    assert torchvision_ops.nms(boxes.double(), scores.double(), threshold).tolist() == by_definition(
        boxes, scores, threshold
    )


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "Half"), (torch.bfloat16, "BFloat16")])
def test_nms_rejects_the_dtypes_that_torchvision_rejects(dtype: torch.dtype, name: str) -> None:
    boxes, scores = boxes_of(0, 10, 50.0)
    with pytest.raises(NotImplementedError, match=f"\"nms_kernel\" not implemented for '{name}'"):
        torchvision_ops.nms(boxes.to(dtype), scores.to(dtype), 0.5)


def test_roi_align_supports_fp16_but_not_bf16() -> None:
    import_torchvision()
    features, regions = torch.randn(1, 3, 16, 16), torch.tensor([[0.0, 1.0, 2.0, 9.0, 12.0]] * 100)
    wide = torchvision_ops.roi_align(features, regions, 1.0, 4, 4, 2, False)
    low = torchvision_ops.roi_align(features.half(), regions.half(), 1.0, 4, 4, 2, False)
    assert (wide.shape, low.dtype) == ((100, 3, 4, 4), torch.float16)
    torch.testing.assert_close(low.float(), wide, rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="roi_align_forward_kernel"):
        torchvision_ops.roi_align(features.bfloat16(), regions.bfloat16(), 1.0, 4, 4, 2, False)


def test_replacements_run_in_fp32_under_autocast() -> None:
    import_torchvision()
    if not torchvision_ops.declared():
        pytest.skip("torchvision's compiled ops are loaded")
    ops = importlib.import_module("torchvision.ops")
    boxes, scores = boxes_of(0, 50, 50.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = ops.nms(boxes.bfloat16(), scores.bfloat16(), 0.5)
        aligned = ops.roi_align(torch.randn(1, 3, 16, 16).bfloat16(), [boxes[:5].bfloat16()], 4)
    assert kept.tolist() == torchvision_ops.nms(boxes.bfloat16().float(), scores.bfloat16().float(), 0.5).tolist()
    assert aligned.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "images"), [("3x64x96", 1), ("2x3x64x96", 2), ("images=3x64x96", 1)])
def test_a_detector_keeps_the_size_of_its_images(shape: str, images: int) -> None:
    target = load_torchvision("fasterrcnn_mobilenet_v3_large_320_fpn", (shape,))
    assert [image.shape for image in target.args[0]] == [(3, 64, 96)] * images
    assert target.model.transform.min_size == (96,)
    with torch.no_grad():
        found = target.model(*target.args)
    assert set(found[0]) == {"boxes", "labels", "scores"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lraspp_mobilenet_v3_large", "1x3x32x32"), ("mc3_18", "1x3x4x32x32"), ("resnet18", "1x3x32x32")],
)
def test_other_models_accept_a_batch(name: str, shape: str) -> None:
    target = load_torchvision(name, (shape,))
    assert "x".join(map(str, target.args[0].shape)) == shape
    with torch.no_grad():
        target.model(*target.args)
