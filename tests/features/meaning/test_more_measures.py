"""Embeddings, sounds, masks, keypoints, DETR's boxes and perplexity equal independent figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.features.meaning import measures as measures_module
from lowprec_check.schema.verdict import Meaning
from tests.features.meaning.by_hand import Judged, audio, embeddings, passes
from tests.features.meaning.test_measures import TOLERANCE, logits, meaning, output, some_boxes


def told_by(kind: str, name: str, low: Tensor, fp32: Tensor, **form: Any) -> tuple[str, Meaning]:
    """The status, and what the measure says of one tensor of this name."""
    outputs = (OutputTensors([tensor], OutputForm(kind, (name,), **form)) for tensor in (low, fp32))
    return meaning(*outputs)


# -- Embeddings


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.03, 0.3])
def test_embeddings_equal_a_plain_loop(noise: float) -> None:
    fp32 = logits(7, 32, scale=1.0)
    low = fp32 + logits(7, 32, scale=noise, seed=1)
    status, told = told_by("CLIPTextModelOutput", "text_embeds", low, fp32)
    by_hand, _ = embeddings(low, fp32)
    assert told.measure == "embeddings"
    assert told.figures == pytest.approx(by_hand, rel=1e-9, abs=1e-9)
    assert (status == "ok") == passes(Judged("embeddings", {}), by_hand)


def test_embeddings_that_shrink_fail() -> None:
    fp32 = logits(4, 32)
    assert told_by("dict", "image_embeds", fp32 / 2, fp32)[0] == "inaccurate"


def test_hidden_states_beside_embeddings_count() -> None:
    fp32 = {"text_embeds": logits(4, 32), "last_hidden_state": logits(4, 5, 32)}
    low = fp32 | {"last_hidden_state": fp32["last_hidden_state"] * 1.05}
    assert meaning(output("CLIPTextModelOutput", **low), output("CLIPTextModelOutput", **fp32))[0] == "inaccurate"


def test_a_cosine_is_no_percentage() -> None:
    text = told_by("CLIPTextModelOutput", "text_embeds", -logits(1, 32), logits(1, 32))[1].text
    assert text == "a cosine of -1 at least; at least 0.999 would pass"


def test_neighbours_are_looked_for_among_some(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = logits(50, 16)
    low = fp32 + logits(50, 16, scale=0.5, seed=1)
    monkeypatch.setattr(measures_module, "MOST_ROWS", 20)
    told = told_by("dict", "embedding", low, fp32)[1].figures
    wanted = embeddings(low, fp32)[0] | {"neighbours": embeddings(low[::3], fp32[::3])[0]["neighbours"]}
    assert told == pytest.approx(wanted, rel=1e-9)


def test_embeddings_that_are_all_alike_are_judged_by_the_error() -> None:
    fp32 = torch.ones(5, 32) + logits(5, 32, scale=1e-3)
    status, told = told_by("dict", "embeddings", fp32 * 1.02, fp32)
    assert "all alike" in told.cannot_tell
    assert status == "inaccurate"


# -- Audio


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.02, 0.2])
def test_sounds_equal_torchmetrics_and_a_plain_loop(noise: float) -> None:
    with torchvision_works():
        from torchmetrics.functional.audio import signal_noise_ratio

    time = torch.arange(4000) / 8000
    fp32 = torch.stack([(440 * 6.283 * time).sin() * 0.3, (880 * 6.283 * time).cos() * time])
    low = fp32 + logits(2, 4000, scale=noise, seed=1) * 0.3
    status, told = told_by("VitsModelOutput", "waveform", low, fp32)
    if noise:
        ratio = float(signal_noise_ratio(low.double(), fp32.double()).min())
        assert told.figures["snr"] == pytest.approx(ratio, abs=1e-6)
    by_hand, _ = audio(low, fp32)
    assert told.figures == pytest.approx(by_hand, abs=1e-9)
    assert (status == "ok") == passes(Judged("audio", {}), by_hand)


@pytest.mark.parametrize(("loud", "why"), [(1.0, "a channel of fp32 is silent"), (0.0, "fp32 is silent")])
def test_a_silent_channel_cannot_be_judged_by_its_noise(loud: float, why: str) -> None:
    fp32 = torch.stack([torch.full((100,), loud), torch.zeros(100)])
    quiet = fp32 + 1e-3 * loud * fp32
    status, told = told_by("AudioPipelineOutput", "audios", quiet, fp32)
    assert (status, told.cannot_tell) == ("ok" if loud else "unjudged", why)


def test_decibels_are_said_as_they_are() -> None:
    fp32 = torch.sin(torch.arange(4000.0))
    assert told_by("VitsModelOutput", "waveform", fp32, fp32)[1].text.startswith("an SNR of 200 dB or more")
    assert told_by("VitsModelOutput", "waveform", fp32 * 0, fp32)[1].shown == "audio 0 dB"
    assert told_by("VitsModelOutput", "waveform", fp32 * 1.01012, fp32)[1].shown == "audio 39.9 dB"
    assert told_by("VitsModelOutput", "waveform", fp32 * 1.010001, fp32)[1].shown == "audio less than 40 dB"


def test_sounds_and_pictures_of_integers_are_judged_if_asked_for() -> None:
    fp32 = (torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    for name, figure in (("picture", "psnr"), ("audio", "snr")):
        low = fp32.clone()
        low[0, 0, 0, :2] ^= 64
        status, told = told_by("Tensor", "", low, fp32, judge=name)
        assert (status, told.measure) == ("inaccurate", name)
        assert 10 < told.figures[figure] < 40


# -- Masks


@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0])
def test_masks_equal_torchmetrics(noise: float) -> None:
    with torchvision_works():
        from torchmetrics.functional.classification import binary_jaccard_index

    fp32 = logits(2, 3, 16, 16)
    low = fp32 + logits(2, 3, 16, 16, scale=noise, seed=1)
    status, told = told_by("SamImageSegmentationOutput", "pred_masks", low, fp32)
    pairs = zip(low.flatten(0, 1), fp32.flatten(0, 1), strict=True)
    iou = sum(float(binary_jaccard_index(a >= 0, (b >= 0).long())) for a, b in pairs) / 6
    agree = float(((low >= 0) == (fp32 >= 0)).double().mean())
    assert told.measure == "masks"
    assert told.figures["agree"] == pytest.approx(agree, abs=2e-3)  # but for ties
    assert told.figures["iou"] == pytest.approx(iou, abs=4e-3)
    assert (status == "ok") == (told.figures["agree"] >= 0.99 and told.figures["iou"] >= 0.95)


def test_what_a_model_is_trained_by_tells_what_its_output_is() -> None:
    fp32 = logits(2, 1, 16, 16)
    assert told_by("Tensor", "", fp32, fp32, loss="binary")[1].measure == "masks"
    assert told_by("Tensor", "", logits(20, 10), logits(20, 10), loss="classes")[1].measure == "classes"
    assert told_by("Tensor", "", logits(2, 4, 8, 8), logits(2, 4, 8, 8), loss="classes")[1].measure == "pixels"
    one, several = logits(20, 1), logits(20, 5)
    for kind, name, tensor, loss in (
        ("Tensor", "", fp32, ""),
        ("Tensor", "", one, "classes"),
        ("SequenceClassifierOutput", "logits", one, ""),
        ("SequenceClassifierOutput", "logits", several, "binary"),
    ):
        plain = OutputTensors([tensor], OutputForm(kind, (name,), loss=loss))
        assert judge(plain, plain, TOLERANCE)[1].error.meaning is None
    told = told_by("SequenceClassifierOutput", "logits", several, several, loss="classes")[1]
    assert (told.measure, told.why) == ("classes", "SequenceClassifierOutput, trained by cross entropy")
    assert told_by("CLIPOutput", "text_embeds", one.T, one.T, loss="classes")[1].why == "CLIPOutput"


# -- Keypoints


@pytest.mark.parametrize("shift", [0.0, 0.2, 2.0])
def test_keypoints_are_compared_in_parts_of_the_object(shift: float) -> None:
    boxes, labels, scores = some_boxes(20)
    corner, size = boxes[:, None, :2], boxes[:, None, 2:] - boxes[:, None, :2]
    points = corner + size * torch.rand(20, 17, 2, generator=torch.Generator().manual_seed(2))
    seen = (torch.arange(17) % 5 > 0).float().expand(20, 17)[..., None]
    moved = points + shift * torch.tensor([0.6, 0.8])

    def detected(keypoints: Tensor) -> OutputTensors:
        tensors = {"boxes": boxes, "labels": labels, "scores": scores, "keypoints": torch.cat([keypoints, seen], -1)}
        tensors["keypoints_scores"] = keypoints[..., 0]  # which may be as far apart as the boxes' order
        return output("list", **{f"0.{name}": tensor for name, tensor in tensors.items()})

    status, told = meaning(detected(moved), detected(points))
    sizes = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    by_hand = float((scores * shift / sizes).sum() / scores.sum())
    assert told.figures["keypoints"] == pytest.approx(by_hand, rel=1e-4, abs=1e-6)
    assert (status == "ok") == (by_hand <= 0.025)


# -- DETR


@pytest.mark.parametrize(
    ("kind", "has_empty"), [("DetrObjectDetectionOutput", True), ("RTDetrObjectDetectionOutput", False)]
)
def test_queries_of_detr_are_judged_as_boxes(kind: str, has_empty: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    fp32 = {"logits": torch.full((2, 10, 5), -6.0), "pred_boxes": torch.rand(2, 10, 4, generator=generator) * 0.2 + 0.3}
    if has_empty:
        fp32["logits"][..., -1] = 2.0
    fp32["logits"][0, :4, 1] = fp32["logits"][1, 2, 3] = 8.0
    low = {name: tensor.clone() for name, tensor in fp32.items()}
    low["logits"][0, 3, 1] = -6.0
    low["pred_boxes"][1, 2, :2] += 0.01
    status, told = meaning(output(kind, **low), output(kind, **fp32))
    assert status == "inaccurate"
    if has_empty:
        scores = fp32["logits"].double().softmax(-1)[..., :-1].amax(-1)
    else:
        scores = fp32["logits"].double().sigmoid().amax(-1)
    strong = scores[scores > 0.5]
    assert told.figures["found"] == pytest.approx(float(1 - strong[0] / (strong.sum() * 2 - strong[0])))
    assert told.examples[0] == f"box 3 of image 0 (score {float(strong[0]):.2f}) is lost"
    assert meaning(output(kind, **fp32), output(kind, **fp32))[0] == "ok"


# -- Perplexity


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_with_labels_the_ratio_of_perplexities_counts(noise: float) -> None:
    fp32, labels = logits(2, 40, 60), torch.randint(0, 60, (80,), generator=torch.Generator().manual_seed(3))
    low = fp32 + logits(2, 40, 60, scale=noise, seed=1)
    losses = [functional.cross_entropy(each.reshape(-1, 60), labels) for each in (low, fp32)]
    outputs = [output("CausalLMOutput", loss=loss, logits=each) for loss, each in zip(losses, (low, fp32), strict=True)]
    _, told = meaning(*outputs)
    perplexities = [
        float(functional.cross_entropy(each.reshape(-1, 60).double(), labels).exp()) for each in (low, fp32)
    ]
    assert told.figures["perplexity"] == pytest.approx(abs(perplexities[0] / perplexities[1] - 1), rel=1e-3, abs=1e-6)
    # Without a label that counts, there is none
    empty = output("CausalLMOutput", loss=torch.tensor(torch.nan), logits=fp32)
    told = meaning(empty, empty)[1]
    assert (told.figures["agree"], "perplexity" in told.figures) == (1.0, False)
    # A loss of the user's own may be no entropy
    outputs = [each.as_asked(OutputForm(loss="other")) for each in outputs]
    assert "perplexity" not in meaning(*outputs)[1].figures
