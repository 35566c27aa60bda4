"""Each measure equals an independent implementation, and decides as a user who applies it by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import check_judge, output_measures, parse_limits
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError
from lowprec_check.schema.meaning import Meaning

TOLERANCE = 1e-2


def output(kind: str, judged_by: str | None = None, limits: Any = (), **tensors: Tensor) -> OutputTensors:
    """An output of a class with these tensors."""
    return OutputTensors(tensors.values(), OutputForm(kind, tuple(tensors), judged_by, limits))


def meaning(low: OutputTensors, fp32: OutputTensors) -> tuple[str, Meaning]:
    """The status of ``low``, and what its measure says."""
    status, compared = judge(low, fp32, TOLERANCE)
    assert compared.error.meaning is not None
    return status, compared.error.meaning


def logits(*shape: int, scale: float = 5.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# -- Tokens and classes


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
def test_tokens_equal_a_plain_loop(noise: float) -> None:
    fp32 = logits(2, 40, 60)
    low = fp32 + logits(2, 40, 60, scale=noise, seed=1)
    status, told = meaning(output("CausalLMOutput", logits=low), output("CausalLMOutput", logits=fp32))
    agree, divergences = [], []
    for ours, wanted in zip(low.reshape(-1, 60), fp32.reshape(-1, 60), strict=True):
        agree.append(int(ours.argmax() == wanted.argmax()))
        p, q = wanted.double().softmax(0), ours.double().softmax(0)
        divergences.append(float((p * (p.log() - q.log())).sum()))
    assert told.figures["agree"] == pytest.approx(sum(agree) / 80, abs=1 / 79)  # but for a tie
    assert told.figures["kl"] == pytest.approx(sum(divergences) / 80, rel=1e-3, abs=1e-9)
    assert told.figures["worst_kl"] == pytest.approx(max(divergences), rel=1e-3, abs=1e-9)
    by_hand = told.figures["agree"] >= 0.99 and sum(divergences) / 80 <= 0.01
    assert (status == "ok") == by_hand


def test_a_tie_closer_than_the_rounding_is_no_error() -> None:
    fp32 = torch.tensor([[8.0, 8.001, 0.0], *[[9.0, 0.0, 0.0]] * 9])
    low = fp32.half()
    low[0, 0] = 8.01  # one unit in the last place of fp16 above
    status, told = meaning(output("CausalLMOutput", logits=low), output("CausalLMOutput", logits=fp32))
    assert status == "ok"
    assert told.figures["agree"] == 1.0
    assert told.figures["ties"] == pytest.approx(0.1)


def test_what_fp32_is_sure_of_and_low_precision_is_not_is_named() -> None:
    fp32 = logits(1, 50, 10)
    low = fp32.clone()
    low[0, 7, int(fp32[0, 7].argmin())] = 99.0
    status, told = meaning(output("MaskedLMOutput", logits=low), output("MaskedLMOutput", logits=fp32))
    assert status == "inaccurate"
    assert told.examples[0].startswith("token 7 differs: fp32 prefers it by ")


def test_logits_of_initial_weights_are_judged_by_the_error() -> None:
    fp32 = logits(2, 30, 1000, scale=0.01)
    low = fp32 * 1.02
    status, told = meaning(output("CausalLMOutput", logits=low), output("CausalLMOutput", logits=fp32))
    assert not told.decides
    assert "not sure" in told.cannot_tell
    assert status == "inaccurate"  # 2 % over a tolerance of 1 %


def test_classes_of_an_image_classifier() -> None:
    fp32 = logits(200, 1000)
    low = fp32.clone()
    low[:3] = -low[:3]
    status, told = meaning(
        output("ImageClassifierOutput", logits=low), output("ImageClassifierOutputWithNoAttention", logits=fp32)
    )
    assert told.measure == "classes"
    assert told.figures["agree"] == pytest.approx(197 / 200)
    assert status == "inaccurate"


# -- Pixels


def test_pixels_equal_torchmetrics() -> None:
    with torchvision_works():
        from torchmetrics.functional import jaccard_index

    fp32 = logits(2, 6, 24, 24)
    low = fp32 + logits(2, 6, 24, 24, scale=0.2, seed=1)
    _, told = meaning(output("OrderedDict", out=low), output("OrderedDict", out=fp32))
    agree = float((low.argmax(1) == fp32.argmax(1)).double().mean())
    iou = float(jaccard_index(low.argmax(1), fp32.argmax(1), task="multiclass", num_classes=6))
    assert told.measure == "pixels"
    assert told.figures["agree"] == pytest.approx(agree, abs=2e-3)  # but for ties
    assert told.figures["iou"] == pytest.approx(iou, abs=5e-3)


# -- Boxes


def detections(boxes: Tensor, labels: Tensor, scores: Tensor) -> OutputTensors:
    return output("list", **{"0.boxes": boxes, "0.labels": labels, "0.scores": scores})


def some_boxes(count: int = 100, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes of which no two overlap, with labels and scores."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.stack([torch.arange(count) * 50.0, torch.zeros(count)], 1)
    sizes = torch.rand(count, 2, generator=generator) * 20 + 10
    labels = torch.randint(0, 5, (count,), generator=generator)
    return torch.cat([corners, corners + sizes], 1), labels, torch.rand(count, generator=generator) * 0.6 + 0.4


def test_boxes_that_change_places_are_the_same() -> None:
    boxes, labels, scores = some_boxes()
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    fp32 = detections(boxes, labels, scores)
    status, told = meaning(detections(boxes[order], labels[order], scores[order]), fp32)
    assert status == "ok"
    assert told.figures["found"] == 1.0
    assert told.figures["iou"] == pytest.approx(1.0)


@pytest.mark.parametrize("lost", [0, 1, 2, 5])
def test_lost_boxes_weigh_as_much_as_their_scores(lost: int) -> None:
    boxes, labels, scores = some_boxes()
    kept = scores.argsort()[: 100 - lost]
    status, told = meaning(detections(boxes[kept], labels[kept], scores[kept]), detections(boxes, labels, scores))
    gone = float(scores.sum() - scores[kept].sum())
    found = 1 - gone / float(scores.sum() + scores[kept].sum())
    assert told.figures["found"] == pytest.approx(found)
    assert (status == "ok") == (found >= 0.98)
    if lost > 2:
        assert told.examples[0] == f"box {int(scores.argmax())} (score {float(scores.max()):.2f}) is lost"


@pytest.mark.parametrize("shift", [0.0, 0.2, 1.0, 3.0])
def test_shifted_boxes_equal_torchvision(shift: float) -> None:
    with torchvision_works():
        from torchvision.ops.boxes import box_iou
    boxes, labels, scores = some_boxes()
    status, told = meaning(detections(boxes + shift, labels, scores), detections(boxes, labels, scores))
    iou = box_iou(boxes + shift, boxes).diagonal()
    if float(iou.min()) >= 0.5:
        mean = float((iou * scores).sum() / scores.sum())
        assert told.figures["iou"] == pytest.approx(mean, rel=1e-5)
        assert (status == "ok") == (mean >= 0.95)
    else:
        assert status == "inaccurate"


def test_boxes_of_noise_are_judged_by_the_error() -> None:
    boxes, labels, scores = some_boxes()
    status, told = meaning(
        detections(boxes[:-1], labels[:-1], scores[:-1] / 10), detections(boxes, labels, scores / 10)
    )
    assert told.cannot_tell == "fp32 is sure of none of its 100 boxes: no score reaches 0.3"
    assert status == "inaccurate"


# -- Pictures


@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.1])
def test_pictures_equal_torchmetrics(noise: float) -> None:
    with torchvision_works():
        from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    generator = torch.Generator().manual_seed(0)
    wanted = torch.rand(2, 3, 48, 40, generator=generator) * 2 - 1
    picture = wanted + noise * torch.randn(wanted.shape, generator=generator)
    status, told = meaning(output("DecoderOutput", sample=picture), output("DecoderOutput", sample=wanted))
    extent = float(wanted.max() - wanted.min())
    psnr = float(peak_signal_noise_ratio(picture, wanted, data_range=extent))
    similarity: Any = structural_similarity_index_measure(picture, wanted, data_range=extent)
    assert told.figures["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert told.figures["ssim"] == pytest.approx(float(similarity), abs=2e-3)  # which pads the picture
    assert (status == "ok") == (psnr >= 40 and told.figures["ssim"] >= 0.98)


def test_a_dark_picture_fails() -> None:
    wanted = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    status, told = meaning(output("DecoderOutput", sample=wanted * 0), output("DecoderOutput", sample=wanted))
    assert status == "inaccurate"
    assert "at least 40 dB would pass" in told.text


# -- Integers and booleans beside floating tensors


@pytest.mark.parametrize(("flipped", "status"), [(0, "ok"), (10, "ok"), (11, "inaccurate"), (545, "inaccurate")])
def test_a_mask_that_flips_is_not_ok(flipped: int, status: str) -> None:
    values, mask = logits(1000), torch.zeros(1000, dtype=torch.bool)
    other = mask.clone()
    other[:flipped] = True
    low, fp32 = output("tuple", a=values, keep=other), output("tuple", a=values, keep=mask)
    found, told = meaning(low, fp32)
    assert found == status
    assert told.figures["equal"] == pytest.approx(1 - flipped / 1000)


# -- What is asked for


def test_limits_and_measures_that_are_asked_for() -> None:
    boxes, labels, scores = some_boxes()
    kept = scores.argsort()[:95]
    low, fp32 = detections(boxes[kept], labels[kept], scores[kept]), detections(boxes, labels, scores)
    assert meaning(low, fp32)[0] == "inaccurate"
    loose = fp32.as_asked(OutputForm(limits=parse_limits(["boxes.found=0.9"])))
    assert meaning(low, loose)[0] == "ok"
    status, compared = judge(low, fp32.as_asked(OutputForm(judge="rel_l2")), TOLERANCE)
    assert status == "inaccurate"
    assert compared.error.meaning is None
    plain = logits(20, 100)
    named = OutputTensors([plain], OutputForm("Tensor", ("",), "classes"))
    assert meaning(OutputTensors([plain]), named)[1].measure == "classes"
    with pytest.raises(UsageError, match="nothing to be judged by boxes"):
        judge([plain], named.as_asked(OutputForm(judge="boxes")), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "limits"), [("box", []), (None, ["bxes.found=1"]), (None, ["boxes=1"]), (None, ["x"])]
)
def test_a_wrong_measure_or_limit_is_refused(name: str | None, limits: list[str]) -> None:
    with pytest.raises(UsageError):
        check_judge(name, limits)


def test_the_form_of_an_output_is_told_by_its_class_and_names() -> None:
    class Output(dict[str, Tensor]):
        pass

    tensors = output_tensors(Output(logits=torch.ones(2), mask=torch.ones(3)))
    assert tensors.form == OutputForm("Output", ("logits", "mask"))
    assert {"tokens", "classes", "pixels", "boxes", "picture", "integers"} == set(output_measures())
