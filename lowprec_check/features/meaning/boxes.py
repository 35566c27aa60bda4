"""The measure of detected boxes, as torchvision's detectors return them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.schema.statements import counted

ROLES = ("boxes", "labels", "scores")
_AT_ONCE = 1 << 20
"""Pairs of boxes whose overlaps are computed at once."""
OVERLAP = 0.5
"""The IoU from which two boxes of one label are the same one, as in PASCAL VOC and COCO's AP50."""
SEEN = 0.3
"""The score from which a box is one that fp32 saw; boxes of initial weights are below it."""


class Boxes(OutputMeasure):
    """Matches boxes one to one by label and IoU; unmatched ones weigh as much as their scores."""

    name = "boxes"
    limited = {"found": "share", "iou": "share", "score": "difference", "mask_iou": "share"}

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """For each image its boxes, labels and scores, and masks if there are any."""
        images: dict[str, dict[str, int]] = {}
        for number, path in enumerate(form.paths):
            folder, _, role = path.rpartition(".")
            if role in (*ROLES, "masks"):
                images.setdefault(folder, {})[role] = number
        return [part for part in images.values() if set(ROLES) <= set(part) and _is_list(part, output)]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The share of boxes found, their mean IoU, and the mean difference of their scores."""
        total = lost = weight = overlap = apart = masks = 0.0
        examples: list[tuple[float, str]] = []
        seen = 0
        for image, (low, fp32) in enumerate(zip(output, reference, strict=True)):
            scores, own_scores = fp32["scores"].double(), low["scores"].double()
            seen += int((scores >= SEEN).sum())
            pairs = _matched(low, fp32)
            total += float(scores.sum() + own_scores.sum())
            where = f" of image {image}" if len(reference) > 1 else ""
            partnered, used = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
            for number in set(range(len(scores))) - partnered:
                lost += float(scores[number])
                examples.append((float(scores[number]), f"box {number}{where} (score {scores[number]:.2f}) is lost"))
            for number in set(range(len(own_scores))) - used:
                score = float(own_scores[number])
                lost += score
                examples.append((score, f"a box of score {score:.2f}{where} is one that fp32 lacks"))
            for wanted, own, iou in pairs:
                score = float(scores[wanted])
                weight += score
                overlap += score * iou
                apart += score * abs(score - float(own_scores[own]))
                if "masks" in fp32 and "masks" in low:
                    masks += score * _mask_iou(low["masks"][own], fp32["masks"][wanted])
        count = sum(len(part["scores"]) for part in reference)
        if not total or not count:
            return Measured(cannot_tell="fp32 finds no box")
        figures = {"found": Figure(1.0 - lost / total, "{} of the boxes are found, by score", 0.98)}
        if weight:
            figures["iou"] = Figure(overlap / weight, "a mean IoU of {}", 0.95)
            figures["score"] = Figure(apart / weight, "scores {} apart", 0.02, "difference")
            if any("masks" in part for part in reference):
                figures["mask_iou"] = Figure(masks / weight, "a mean IoU of masks of {}", 0.95)
        told = ""
        if not seen:
            told = f"fp32 is sure of none of its {counted(count, 'box')}"
            told += f": no score reaches {SEEN:g}"
        return Measured(figures, told, [text for _, text in sorted(examples, reverse=True)])


def _matched(low: Part, fp32: Part) -> list[tuple[int, int, float]]:
    """Pairs of a box of fp32 and one of ``low``, with their IoU, as COCO's evaluation matches.

    fp32's boxes choose in the order of their scores: each takes the free one that it overlaps most.
    """
    boxes, others = fp32["boxes"].double(), low["boxes"].double()
    pairs: list[tuple[int, int, float]] = []
    if not len(others):
        return pairs
    taken = torch.zeros(len(others), dtype=torch.bool)
    for some in fp32["scores"].argsort(descending=True, stable=True).split(max(1, _AT_ONCE // len(others))):
        same_label = fp32["labels"][some, None] == low["labels"][None, :]
        overlaps = torch.where(same_label, _iou(boxes[some], others), 0.0)
        for wanted, row in zip(some.tolist(), overlaps, strict=True):
            iou, own = row.masked_fill(taken, 0.0).max(0)
            if float(iou) >= OVERLAP:
                pairs.append((wanted, int(own), float(iou)))
                taken[own] = True
    return pairs


def _is_list(part: dict[str, int], output: Sequence[Tensor]) -> bool:
    """Whether it has one box, label and score in a row; a batch of images has more dimensions."""
    shapes = [tuple(output[part[role]].shape) for role in ROLES]
    count = shapes[2]
    has_masks = "masks" not in part or output[part["masks"]].shape[:1] == count
    return len(count) == 1 and shapes == [(*count, 4), count, count] and has_masks


def _iou(boxes: Tensor, others: Tensor) -> Tensor:
    """The intersection over union of each pair of boxes (x1, y1, x2, y2): N × M."""
    start = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    end = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = (end - start).clamp_min(0).prod(2)
    union = _areas(boxes)[:, None] + _areas(others)[None, :] - shared
    return torch.where(union > 0, shared / union, 0.0)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(1)


def _mask_iou(mask: Tensor, wanted: Tensor) -> float:
    """Of two masks with a probability for each pixel, which count from one half on."""
    own, theirs = mask >= 0.5, wanted >= 0.5
    union = int((own | theirs).sum())
    return int((own & theirs).sum()) / union if union else 1.0
