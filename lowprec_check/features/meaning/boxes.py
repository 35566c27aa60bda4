"""The measure of detected objects: boxes with labels and scores, and their masks and keypoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
KEPT = 0.05
"""The score from which a query of DETR is a box, as for torchvision's detectors."""
_BY_SOFTMAX = ("DetrObject", "YolosObject", "TableTransformerObject")
"""Outputs whose last class is "no object"; other kinds of DETR have a sigmoid for each class."""


class Boxes(OutputMeasure):
    """Matches boxes one to one by label and IoU; unmatched ones weigh as much as their scores."""

    name = "boxes"
    limited = {"found": "share", "iou": "share", "score": "difference", "mask_iou": "share", "keypoints": "difference"}

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """For each image its boxes, labels, scores, masks and keypoints; or DETR's queries."""
        images: dict[str, dict[str, int]] = {}
        for number, path in enumerate(form.paths):
            folder, _, role = path.rpartition(".")
            if role in (*ROLES, "masks", "keypoints", "keypoints_scores"):
                images.setdefault(folder, {})[role] = number
        parts = [part for part in images.values() if set(ROLES) <= set(part) and _is_list(part, output)]
        if {"logits", "pred_boxes"} <= set(form.paths):
            logits, boxes = form.paths.index("logits"), form.paths.index("pred_boxes")
            if output[logits].ndim == 3 and output[boxes].shape == (*output[logits].shape[:2], 4):
                role = "softmax" if form.kind.startswith(_BY_SOFTMAX) else "sigmoid"
                parts.append({role: logits, "pred_boxes": boxes})
        return parts

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The share of boxes found, their mean IoU, and the mean difference of their scores."""
        tally = _Tally()
        ours, wanted = ([image for part in side for image in _images(part)] for side in (output, reference))
        if not all(bool(fp32[role].isfinite().all()) for fp32 in wanted for role in ("boxes", "scores")):
            return Measured(cannot_tell="fp32 itself gives NaN or Inf")
        if any(bool((fp32["boxes"][:, :2] > fp32["boxes"][:, 2:]).any()) for fp32 in wanted):
            return Measured(cannot_tell="the boxes of fp32 are not x1, y1, x2, y2")
        for number, (low, fp32) in enumerate(zip(ours, wanted, strict=True)):
            tally.add(low, fp32, f" of image {number}" if len(wanted) > 1 else "")
        if not tally.total or not tally.count:
            return Measured(cannot_tell="fp32 finds no box")
        told = ""
        if not tally.seen:
            told = f"fp32 is sure of none of its {counted(tally.count, 'box')}"
            told += f": no score reaches {SEEN:g}"
        return Measured(tally.figures(), told, [text for *_, text in sorted(tally.examples, reverse=True)])


class _Tally:
    """Sums over images, weighed by fp32's scores."""

    def __init__(self) -> None:
        self.total = self.lost = 0.0
        """Of the scores of all boxes, and of those without a partner."""
        self.count = self.seen = 0
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self.examples: list[tuple[bool, float, str]] = []
        """Whether fp32 has the box, its score, and what is said."""

    def add(self, low: Part, fp32: Part, where: str) -> None:
        """Add an image, which is called ``where``."""
        scores, own_scores = fp32["scores"].double(), low["scores"].double()
        self.count += len(scores)
        self.seen += int((scores >= SEEN).sum())
        self.total += float(scores.sum() + own_scores.sum())
        pairs = _matched(low, fp32)
        partnered, used = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
        for number in set(range(len(scores))) - partnered:
            score = float(scores[number])
            self.lost += score
            self.examples.append(
                (True, score, f"box {int(fp32['numbers'][number])}{where} (score {score:.2f}) is lost")
            )
        for number in set(range(len(own_scores))) - used:
            score = float(own_scores[number])
            self.lost += score
            self.examples.append((False, score, f"a box of score {score:.2f}{where} is one that fp32 lacks"))
        for wanted, own, iou in pairs:
            score = float(scores[wanted])
            self._add("iou", score, iou)
            self._add("score", score, abs(score - float(own_scores[own])))
            if "masks" in fp32 and "masks" in low:
                self._add("mask_iou", score, _mask_iou(low["masks"][own], fp32["masks"][wanted]))
            size = float(_areas(fp32["boxes"][wanted, None].double()).sqrt())
            if "keypoints" in fp32 and "keypoints" in low and size:
                self._add("keypoints", score, _moved(low["keypoints"][own], fp32["keypoints"][wanted]) / size)

    def _add(self, name: str, weight: float, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + weight * value
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def figures(self) -> dict[str, Figure]:
        """The figures of all images."""
        mean = {name: sum_ / self._weights[name] for name, sum_ in self._sums.items() if self._weights[name]}
        figures = {"found": Figure(1.0 - self.lost / self.total, "{} of the boxes are found, by score", 0.98)}
        if "iou" in mean:
            figures["iou"] = Figure(mean["iou"], "a mean IoU of {}", 0.95)
            figures["score"] = Figure(mean["score"], "scores {} apart", 0.02, "difference")
        if "mask_iou" in mean:
            figures["mask_iou"] = Figure(mean["mask_iou"], "a mean IoU of masks of {}", 0.95)
        if "keypoints" in mean:
            figures["keypoints"] = Figure(mean["keypoints"], "keypoints {} of the size apart", 0.025, "difference")
        return figures


def _images(part: Part) -> Iterator[Part]:
    """Boxes, labels and scores of each image of a part."""
    if "boxes" in part:
        yield {"numbers": torch.arange(len(part["scores"])), **part}
        return
    if "softmax" in part:
        probabilities = part["softmax"].double().softmax(-1)[..., :-1]
    else:
        probabilities = part["sigmoid"].double().sigmoid()
    centre, size = part["pred_boxes"].double().split(2, -1)
    corners = torch.cat([centre - size / 2, centre + size / 2], -1)
    for scores_of_classes, boxes in zip(probabilities, corners, strict=True):
        scores, labels = scores_of_classes.max(-1)
        kept = (scores >= KEPT).nonzero()[:, 0]
        yield {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept], "numbers": kept}


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
    each = all(output[part[role]].shape[:1] == count for role in ("masks", "keypoints") if role in part)
    return len(count) == 1 and shapes == [(*count, 4), count, count] and each


def _iou(boxes: Tensor, others: Tensor) -> Tensor:
    """The intersection over union of each pair of boxes (x1, y1, x2, y2): N × M."""
    start = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    end = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = (end - start).clamp_min(0).prod(2)
    union = _areas(boxes)[:, None] + _areas(others)[None, :] - shared
    equal = (boxes[:, None] == others[None, :]).all(2)  # of no area too
    return torch.where(union > 0, shared / union, equal.double())


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(1)


def _mask_iou(mask: Tensor, wanted: Tensor) -> float:
    """Of two masks with a probability for each pixel, which count from one half on."""
    own, theirs = mask >= 0.5, wanted >= 0.5
    union = int((own | theirs).sum())
    return int((own & theirs).sum()) / union if union else 1.0


def _moved(points: Tensor, wanted: Tensor) -> float:
    """How far the points (x, y, visible) that fp32 sees have moved, as a mean."""
    visible = wanted[:, 2] > 0
    if not bool(visible.any()):
        return 0.0
    return float((points[visible, :2].double() - wanted[visible, :2].double()).norm(dim=1).mean())
