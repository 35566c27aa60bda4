"""Each measure equals an independent implementation, and decides as a user who applies it by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowprec_check.analysis.run_summary import effective_status, error_of
from lowprec_check.analysis.statements.status import error_text
from lowprec_check.engine.model.output_measures import Figure, check_judge, output_measures, parse_limits
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge, judged, output_tensors
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError
from lowprec_check.features.meaning import boxes as boxes_module
from lowprec_check.features.meaning import measures as measures_module
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.verdict import Meaning
from lowprec_check.torchkit import output_comparison
from tests.features.meaning.by_hand import Judged, choices, passes

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
    by_hand, _ = choices(low, fp32, -1)
    assert told.figures == pytest.approx(by_hand, rel=1e-6, abs=1e-9)
    assert (status == "ok") == passes(Judged("tokens", {}), by_hand)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_in_fp32_are_not_judged_by_tokens(bad: float) -> None:
    fp32 = logits(2, 40, 60)
    fp32[0, 0, 0] = bad
    low = logits(2, 40, 60, seed=1)
    low[0, 0, 0] = bad
    status, told = meaning(output("CausalLMOutput", logits=low), output("CausalLMOutput", logits=fp32))
    assert told.cannot_tell == "fp32 itself gives NaN or Inf"
    assert status == "inaccurate"


def test_masked_classes_and_rows_do_not_count() -> None:
    fp32 = logits(2, 40, 60)
    fp32[:, :, 50:] = -torch.inf
    fp32[1, 30:] = -torch.inf
    status, told = meaning(output("CausalLMOutput", logits=fp32.clone()), output("CausalLMOutput", logits=fp32))
    assert (status, told.cannot_tell) == ("ok", "")
    assert told.figures["agree"] == 1.0


def test_rows_are_compared_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = logits(2, 6, 8, 8)
    low, fp32 = output("OrderedDict", out=fp32 + logits(2, 6, 8, 8, scale=0.5, seed=1)), output("OrderedDict", out=fp32)
    at_once = meaning(low, fp32)
    monkeypatch.setattr(measures_module, "_AT_ONCE", 30)
    assert meaning(low, fp32) == at_once


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


@pytest.mark.parametrize(("name", "channels"), [("out", 960), ("out", 3), ("logits", 21)])
def test_features_and_pictures_are_no_classes(name: str, channels: int) -> None:
    tensors = output("OrderedDict", **{name: logits(1, channels, 4, 4)})
    _, compared = judge(tensors, tensors, TOLERANCE)
    assert compared.error.meaning is None


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


def test_boxes_without_an_area_are_found() -> None:
    boxes, labels, scores = some_boxes()
    boxes[0, 2:] = boxes[0, :2]
    fp32 = detections(boxes, labels, scores)
    status, told = meaning(fp32, fp32)
    assert (status, told.figures["found"], told.figures["iou"]) == ("ok", 1.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("role", "place", "value", "why"),
    [
        (0, (3, 2), -1.0, "the boxes of fp32 are not x1, y1, x2, y2"),
        (0, (3, 2), torch.nan, "fp32 itself gives NaN or Inf"),
        (2, (3,), torch.nan, "fp32 itself gives NaN or Inf"),
    ],
)
def test_boxes_that_are_none_are_judged_by_the_error(role: int, place: Any, value: float, why: str) -> None:
    tensors = some_boxes()
    tensors[role][place] = value
    fp32 = detections(*tensors)
    assert meaning(fp32, fp32)[1].cannot_tell == why


def test_boxes_are_matched_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, labels, scores = some_boxes()
    low, fp32 = detections(boxes[5:] + 1, labels[5:], scores[5:]), detections(boxes, labels, scores)
    at_once = meaning(low, fp32)
    monkeypatch.setattr(boxes_module, "_AT_ONCE", 200)
    assert meaning(low, fp32) == at_once


def test_where_fp32_finds_no_box_the_error_decides() -> None:
    boxes, labels, scores = some_boxes()
    status, told = meaning(detections(boxes, labels, scores), detections(boxes[:0], labels[:0], scores[:0]))
    assert (status, told.cannot_tell) == ("inaccurate", "fp32 finds no box")


def test_boxes_of_a_batch_in_one_tensor_are_judged_by_the_error() -> None:
    tensors = {"boxes": torch.rand(2, 5, 4), "labels": torch.ones(2, 5), "scores": torch.rand(2, 5)}
    low = {name: tensor * 1.02 for name, tensor in tensors.items()}
    status, compared = judge(output("dict", **low), output("dict", **tensors), TOLERANCE)
    assert (status, compared.error.meaning) == ("inaccurate", None)


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
    pairs = list(zip(picture.split(1), wanted.split(1), strict=True))
    psnr = min(float(peak_signal_noise_ratio(*pair, data_range=extent)) for pair in pairs)
    whole: Any = structural_similarity_index_measure(picture, wanted, data_range=extent, return_full_image=True)
    inside = whole[1][:, :, 5:-5, 5:-5]  # the window leaves the picture on the border, which it pads
    similarity = float(inside.mean((1, 2, 3)).min())
    assert told.figures["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert told.figures["ssim"] == pytest.approx(similarity, abs=1e-4)
    assert (status == "ok") == (psnr >= 40 and told.figures["ssim"] >= 0.98)


def test_a_dark_picture_fails() -> None:
    wanted = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    status, told = meaning(output("DecoderOutput", sample=wanted * 0), output("DecoderOutput", sample=wanted))
    assert status == "inaccurate"
    assert "at least 40 dB would pass" in told.text


def test_a_picture_with_inf_in_fp32_is_not_judged_by_its_psnr() -> None:
    wanted = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    picture = wanted.flip(2)
    wanted[0, 0, 0, 0] = picture[0, 0, 0, 0] = torch.inf
    status, told = meaning(output("DecoderOutput", sample=picture), output("DecoderOutput", sample=wanted))
    assert told.cannot_tell == "the picture of fp32 has NaN or Inf"
    assert status == "inaccurate"


def test_a_picture_that_is_smaller_than_the_window_has_no_ssim() -> None:
    wanted = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    _, told = meaning(output("DecoderOutput", sample=wanted.half()), output("DecoderOutput", sample=wanted))
    assert set(told.figures) == {"psnr"}


def test_one_bad_picture_of_many_fails() -> None:
    wanted = torch.rand(64, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    picture = wanted.clone()
    picture[5] += 0.05
    status, told = meaning(output("DecoderOutput", sample=picture), output("DecoderOutput", sample=wanted))
    assert status == "inaccurate"
    assert told.figures["psnr"] == pytest.approx(26, abs=0.1)


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


def test_integers_that_differ_are_counted_where_the_error_decides() -> None:
    values, mask = logits(1000), torch.zeros(1000, dtype=torch.bool)
    other = mask.clone()
    other[0] = True
    low, fp32 = output("tuple", a=values * 1.009, keep=other), output("tuple", a=values, keep=mask)
    status, compared = judge(low, fp32, TOLERANCE)
    assert (status, compared.error.by_meaning) == ("ok", None)
    assert compared.error.mismatched == pytest.approx(1e-3)


def test_zeros_do_not_hide_that_tokens_differ() -> None:
    tensors = {"logits": logits(2, 40, 60), "aux": torch.zeros(4)}
    lost = {"logits": logits(2, 40, 60, seed=1), "aux": torch.full((4,), 1e-6)}
    run = Run(precision="half", device="cpu", status="ok", tolerance=TOLERANCE)
    low, fp32 = output("CausalLMOutput", **lost), output("CausalLMOutput", **tensors)
    run = judged(run, [low], [fp32], TOLERANCE)
    assert run.by_meaning is not None
    assert effective_status(run, [run]) == "inaccurate"
    # Where the tokens agree, the tensor of zeros has an infinite error
    low = output("CausalLMOutput", logits=tensors["logits"], aux=lost["aux"])
    run = judged(run, [low], [fp32], TOLERANCE)
    assert effective_status(run, [run]) == "unjudged"


# -- What is said


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(0.98996, "{} agree", 0.99), "less than 99 % agree; at least 99 % would pass"),
        (Figure(0.5, "{} agree", 0.99), "50 % agree; at least 99 % would pass"),
        (Figure(39.96, "a PSNR of {}", 40.0, "dB"), "a PSNR of less than 40 dB; at least 40 dB would pass"),
        (Figure(0.01004, "a KL of {}", 0.01, "difference"), "a KL of more than 0.01; at most 0.01 would pass"),
        (Figure(0.99, "{} agree", 0.99), "99 % agree"),
    ],
)
def test_a_figure_and_its_limit_do_not_read_the_same(figure: Figure, text: str) -> None:
    assert figure.text == text


def test_the_error_of_boxes_that_cannot_be_subtracted_is_not_infinite() -> None:
    boxes, labels, scores = some_boxes()
    kept = scores.argsort()[1:]
    low, fp32 = detections(boxes[kept], labels[kept], scores[kept]), detections(boxes, labels, scores)
    run = Run(precision="half", device="cpu", status="ok", tolerance=TOLERANCE)
    run = judged(run, [low], [fp32], TOLERANCE)
    assert (run.status, run.rel_l2, error_text(run)) == ("ok", None, "by boxes")


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
    ("name", "limits"),
    [
        ("box", []),
        *((None, [limit]) for limit in ("bxes.found=1", "boxes=1", "x", "rel_l2.x=1", "boxes.foo=1", "tokens.ties=1")),
        *((None, [limit]) for limit in ("boxes.found=98", "boxes.iou=-1", "tokens.kl=nan", "picture.psnr=inf")),
        *((None, [limit]) for limit in ("apart=nan", "judge.apart=inf", "embeddings.cosine=2")),
    ],
)
def test_a_wrong_measure_or_limit_is_refused(name: str | None, limits: list[str]) -> None:
    with pytest.raises(UsageError):
        check_judge(name, limits)


def test_a_limit_without_a_figure_is_told_the_figures() -> None:
    with pytest.raises(UsageError) as raised:
        check_judge(None, ["picture=0.3"])
    assert raised.value.hint == "Choose from: picture.psnr, picture.ssim."


def test_every_limit_that_can_be_set_is_one_of_a_figure() -> None:
    boxes, labels, scores = some_boxes()
    masks = torch.rand(100, 1, 4, 4)
    points = torch.rand(100, 17, 3)
    detected = {"boxes": boxes, "labels": labels, "scores": scores, "masks": masks, "keypoints": points}
    picture = torch.rand(1, 3, 16, 16)
    outputs = {
        "tokens": output("CausalLMOutput", logits=logits(20, 30), loss=torch.tensor(2.0)),
        "classes": output("ImageClassifierOutput", logits=logits(20, 30)),
        "pixels": output("OrderedDict", out=logits(1, 6, 8, 8)),
        "masks": output("SamImageSegmentationOutput", pred_masks=logits(1, 1, 8, 8)),
        "boxes": output("list", **{f"0.{name}": tensor for name, tensor in detected.items()}),
        "audio": output("VitsModelOutput", waveform=picture.reshape(1, -1)),
        "embeddings": output("dict", text_embeds=logits(5, 30)),
        "picture": output("DecoderOutput", sample=picture),
        "integers": output("tuple", a=picture, b=labels),
    }
    assert set(outputs) == set(output_measures())
    for name, fp32 in outputs.items():
        limited = output_measures()[name].limited
        check_judge(name, [f"{name}.{figure}=1" for figure in limited])
        assert set(limited) <= set(meaning(fp32, fp32)[1].figures)


def test_each_call_is_held_against_its_own_limit() -> None:
    fp32 = output("tuple", a=logits(1000), b=torch.zeros(1000, dtype=torch.bool))
    half_of_the_tolerance = output("tuple", a=fp32[0] * 1.005, b=fp32[1])
    strict = fp32.as_asked(OutputForm(limits=parse_limits(["integers.equal=0.998"])))
    differs = fp32[1].clone()
    differs[0] = True  # of the 2 that may
    differs[1] = True
    run = Run(precision="half", device="cpu", status="ok", tolerance=TOLERANCE)
    calls = [half_of_the_tolerance, output("tuple", a=fp32[0], b=differs)]
    run = judged(run, calls, [strict, strict], TOLERANCE)
    assert run.by_meaning is not None
    assert (run.status, run.tolerance, run.relative_tolerance) == ("ok", pytest.approx(0.002), TOLERANCE)
    # Judged again, by the error, it has its own tolerance
    run = judged(run, calls[:1], [strict], TOLERANCE)
    assert (run.by_meaning, run.tolerance) == (None, TOLERANCE)


def test_the_form_of_an_output_is_told_by_its_class_and_names() -> None:
    class Output(dict[str, Tensor]):
        pass

    tensors = output_tensors(Output(logits=torch.ones(2), mask=torch.ones(3)))
    assert tensors.form == OutputForm("Output", ("logits", "mask"))


# -- What decides


def test_a_measure_that_fails_leaves_the_verdict_to_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: object) -> None:
        raise RuntimeError("no kernel")

    fp32 = logits(2, 30, 100)
    monkeypatch.setattr(output_measures()["tokens"], "compare", compare)
    for factor, expected in ((1.001, "ok"), (1.02, "inaccurate")):
        low = output("CausalLMOutput", logits=fp32 * factor)
        status, told = meaning(low, output("CausalLMOutput", logits=fp32))
        assert (status, told.decides) == (expected, False)
        assert told.cannot_tell == "the measure fails: RuntimeError: no kernel"


def test_each_tensor_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare_leaf = output_comparison._compare_leaf
    monkeypatch.setattr(output_comparison, "_compare_leaf", lambda *pair: compared.append(1) or compare_leaf(*pair))
    fp32 = output("CausalLMOutput", logits=logits(2, 30, 100), aux=logits(50))
    low = output("CausalLMOutput", logits=fp32[0], aux=fp32[1] * 1.02)
    status, outcome = judge(low, fp32, TOLERANCE)
    assert (status, outcome.leaf, outcome.error.by_meaning) == ("inaccurate", 1, None)
    assert len(compared) == 2


def test_by_products_of_a_language_model_do_not_decide() -> None:
    beside = {"hidden_states.0": logits(50), "past_key_values.is_initialized": torch.tensor(True)}
    fp32 = output("CausalLMOutputWithPast", logits=logits(2, 30, 100), **beside)
    beside["hidden_states.0"] = beside["hidden_states.0"] * 1.02
    low = output("CausalLMOutputWithPast", logits=fp32[0], **beside)
    assert meaning(low, fp32)[0] == "ok"
    # Where the tokens cannot tell, all of the output counts
    small = OutputTensors([fp32[0] / 1000, *fp32[1:]], fp32.form)
    assert meaning(OutputTensors([low[0] / 1000, *low[1:]]), small)[0] == "inaccurate"


def test_several_measures_of_one_output_are_kept() -> None:
    fp32 = output("CausalLMOutput", logits=logits(2, 30, 100), keep=torch.zeros(100, dtype=torch.bool))
    low = output("CausalLMOutput", logits=fp32[0], keep=torch.ones(100, dtype=torch.bool))
    status, compared = judge(low, fp32, TOLERANCE)
    assert status == "inaccurate"
    assert compared.error.by_meaning is not None
    assert [told.measure for told in (compared.error.by_meaning, *compared.error.beside)] == ["integers", "tokens"]


def test_runs_are_ranked_by_the_part_of_their_limit() -> None:
    fp32 = output("DecoderOutput", sample=torch.rand(1, 3, 16, 16))
    limits = OutputForm(limits=parse_limits(["picture.psnr=20"]))
    run = Run(precision="half", device="cpu", status="ok", tolerance=TOLERANCE)
    low = fp32.mapped(lambda tensor: tensor * 1.05)
    by_picture = judged(run, [low], [fp32.as_asked(limits)], TOLERANCE)
    by_error = judged(run, [fp32.mapped(lambda tensor: tensor * 1.009)], [OutputTensors(fp32)], TOLERANCE)
    assert by_picture.by_meaning is not None
    assert by_picture.distance > by_error.distance  # of other units
    assert error_of(by_picture) < error_of(by_error)
