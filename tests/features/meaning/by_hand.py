"""Measures of meaning as a user would write them: plain loops, which use none of the product's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowprec_check.engine.model.output_tensors import OutputTensors

LIMITS = {
    **dict.fromkeys(("agree", "top1"), 0.99),
    "kl": -0.01,
    "perplexity": -0.01,
    "found": 0.98,
    "score": -0.02,
    "keypoints": -0.025,
    "psnr": 40.0,
    "ssim": 0.98,
    "snr": 40.0,
    "spectrum": -1.0,
    "cosine": 0.999,
    "neighbours": 0.98,
    "length": -0.05,
}
"""Negative: at most."""
IOU = {"pixels": 0.98, "boxes": 0.95, "masks": 0.95}
BY_PRODUCTS = re.compile(r"past_key|.*hidden_state|.*attentions|auxiliary|intermediate|init_ref")


class Judged(NamedTuple):
    """What an output is: the measure, and the paths of its tensors in the output by role."""

    measure: str
    roles: Mapping[str, str]


def unit_of(tensor: Tensor) -> float:
    """Two roundings."""
    return torch.finfo(tensor.dtype if tensor.dtype in (torch.half, torch.bfloat16) else torch.half).eps


def choices(low: Tensor, fp32: Tensor, dimension: int, loss: Sequence[Tensor] = ()) -> tuple[dict[str, float], bool]:
    """Agreement, KL, top-5 and the mean IoU of logits, row by row."""
    classes = fp32.shape[dimension]
    rows = [each.movedim(dimension, -1).reshape(-1, classes).double() for each in (low, fp32)]
    agree, ties, kl, gaps, top5 = [], [], [], [], []
    both, own, wanted_count = [0] * classes, [0] * classes, [0] * classes
    for ours, wanted in zip(*rows, strict=True):
        first, second = wanted.sort(descending=True).values[:2].tolist()
        best, chosen = int(wanted.argmax()), int(ours.argmax())
        is_tie = chosen != best and first - float(wanted[chosen]) <= unit_of(low) * abs(first)
        ties.append(is_tie)
        agree.append(chosen == best or is_tie)
        p = F.softmax(wanted, 0)
        kl.append(max(0.0, float((p * (F.log_softmax(wanted, 0) - F.log_softmax(ours, 0)))[p > 0].sum())))
        gaps.append(first - second)
        top5.append(int((ours > ours[best]).sum()) < 5)
        own[best if is_tie else chosen] += 1
        wanted_count[best] += 1
        both[best] += chosen == best or is_tie
    count = len(agree)
    figures = {"agree": sum(agree) / count, "kl": sum(kl) / count, "worst_kl": max(kl), "ties": sum(ties) / count}
    if classes > 5:
        figures["top5"] = sum(top5) / count
    if dimension == 1:
        present = [each for each in range(classes) if wanted_count[each]]
        figures["iou"] = sum(both[c] / (own[c] + wanted_count[c] - both[c]) for c in present) / len(present)
    if loss:
        figures["perplexity"] = abs(math.exp(float(loss[0])) / math.exp(float(loss[1])) - 1)
    return figures, sorted(gaps)[(count - 1) // 2] >= 0.5


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """The IoU of two boxes."""
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return width * height / (sum(areas) - width * height) if sum(areas) > width * height else 0.0


def images_of(parts: Mapping[str, Tensor], softmax: bool) -> list[dict[str, Any]]:
    """The boxes of each image, as lists."""
    if "boxes" in parts:
        return [{name: tensor.double().tolist() for name, tensor in parts.items()}]
    images = []
    for logits, boxes in zip(parts["logits"].double(), parts["pred_boxes"].double().tolist(), strict=True):
        shares = F.softmax(logits, 1)[:, :-1] if softmax else logits.sigmoid()
        image: dict[str, Any] = {"boxes": [], "labels": [], "scores": []}
        for of_query, (x, y, w, h) in zip(shares.tolist(), boxes, strict=True):
            if max(of_query) >= 0.05:
                image["boxes"].append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
                image["scores"].append(max(of_query))
                image["labels"].append(of_query.index(max(of_query)))
        images.append(image)
    return images


def boxes(low: Mapping[str, Tensor], fp32: Mapping[str, Tensor], softmax: bool) -> tuple[dict[str, float], bool]:
    """Greedy matching by score; what has no partner weighs as much as its score."""
    total = lost = 0.0
    sums: dict[str, list[tuple[float, float]]] = {}
    is_sure = False
    for ours, wanted in zip(images_of(low, softmax), images_of(fp32, softmax), strict=True):
        free = set(range(len(ours["scores"])))
        total += sum(ours["scores"]) + sum(wanted["scores"])
        is_sure |= any(score >= 0.3 for score in wanted["scores"])
        for index in sorted(range(len(wanted["scores"])), key=lambda each: -wanted["scores"][each]):
            box, score = wanted["boxes"][index], wanted["scores"][index]
            same = [each for each in sorted(free) if ours["labels"][each] == wanted["labels"][index]]
            best = max(same, key=lambda each: overlap(ours["boxes"][each], box), default=None)
            if best is None or overlap(ours["boxes"][best], box) < 0.5:
                lost += score
                continue
            free.remove(best)
            figures = {"iou": overlap(ours["boxes"][best], box), "score": abs(score - ours["scores"][best])}
            if "masks" in wanted:
                a, b = (torch.tensor(m) >= 0.5 for m in (ours["masks"][best], wanted["masks"][index]))
                figures["mask_iou"] = int((a & b).sum()) / int((a | b).sum()) if bool((a | b).any()) else 1.0
            if "keypoints" in wanted:
                points = zip(ours["keypoints"][best], wanted["keypoints"][index], strict=True)
                moved = [math.dist(a[:2], b[:2]) for a, b in points if b[2] > 0]
                size = math.sqrt((box[2] - box[0]) * (box[3] - box[1]))
                figures["keypoints"] = sum(moved) / len(moved) / size
            for name, value in figures.items():
                sums.setdefault(name, []).append((score, value))
        lost += sum(ours["scores"][each] for each in free)
    if not total:
        return {}, False
    means = {name: sum(w * v for w, v in each) / sum(w for w, _ in each) for name, each in sums.items()}
    return {"found": 1 - lost / total, **means}, is_sure


def picture(low: Tensor, fp32: Tensor) -> tuple[dict[str, float], bool]:
    """PSNR and SSIM over the range of fp32."""
    ours, wanted = low.double(), fp32.double()
    extent = float(wanted.max() - wanted.min())
    errors = [float((a - b).square().mean()) for a, b in zip(ours, wanted, strict=True)]
    psnr = 10 * math.log10(extent**2 / max(errors)) if max(errors) else 200.0
    line = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    window = torch.tensor([[a * b for b in line] for a in line], dtype=torch.float64) / sum(line) ** 2

    def mean(values: Tensor) -> Tensor:
        return (values.unfold(2, 11, 1).unfold(3, 11, 1) * window).sum((-2, -1))

    m, n = mean(ours), mean(wanted)
    v, w, c = mean(ours * ours) - m * m, mean(wanted * wanted) - n * n, mean(ours * wanted) - m * n
    a, b = (0.01 * extent) ** 2, (0.03 * extent) ** 2
    similar = (2 * m * n + a) * (2 * c + b) / ((m * m + n * n + a) * (v + w + b))
    return {"psnr": psnr, "ssim": min(float(each.mean()) for each in similar)}, extent > 0


def audio(low: Tensor, fp32: Tensor) -> tuple[dict[str, float], bool]:
    """SNR and log-spectral distance of the worst channel."""
    ratios, distances = [200.0], [0.0]
    for ours, wanted in zip(*(each.double().reshape(-1, each.shape[-1]) for each in (low, fp32)), strict=True):
        noise = float((ours - wanted).square().sum())
        if noise:
            ratios.append(10 * math.log10(float(wanted.square().sum()) / noise))
        window = torch.hann_window(1024, dtype=torch.float64)
        power = [
            torch.stft(each, 1024, 256, window=window, center=False, return_complex=True).abs() ** 2
            for each in (ours, wanted)
        ]
        floor = torch.full_like(power[1], float(power[1].max()) * 1e-4)
        levels = [10 * torch.maximum(each, floor).log10() for each in power]
        distances.append(float(((levels[0] - levels[1]) ** 2).mean(0).sqrt().mean()))
    return {"snr": min(ratios), "spectrum": max(distances)}, True


def embeddings(low: Tensor, fp32: Tensor) -> tuple[dict[str, float], bool]:
    """Cosine, length and the order of neighbours, vector by vector."""
    ours, wanted = low.double(), fp32.double()
    count = len(wanted)
    cosines = [float(F.cosine_similarity(ours[i], wanted[i], 0)) for i in range(count)]
    lengths = [abs(float(ours[i].norm() / wanted[i].norm()) - 1) for i in range(count)]
    near = [
        [[float(F.cosine_similarity(v[i], v[j], 0)) for j in range(count)] for i in range(count)]
        for v in (ours, wanted)
    ]
    kept = []
    for i in range(count):
        order = sorted((j for j in range(count) if j != i), key=lambda j: -near[1][i][j])[:10]
        for place, j in enumerate(order):
            ties = (near[1][i][j] - near[1][i][k] <= unit_of(low) for k in order[place + 1 :])
            kept += [tie or near[0][i][j] > near[0][i][k] for tie, k in zip(ties, order[place + 1 :], strict=True)]
    figures = {"cosine": min(cosines), "length": max(lengths)}
    if kept and count > 2:
        figures["neighbours"] = sum(kept) / len(kept)
    return figures, count < 2 or min(map(min, near[1])) < 0.999


def masks(low: Tensor, fp32: Tensor) -> tuple[dict[str, float], bool]:
    """Pixels and IoU of masks, one after another."""
    same = count = 0
    shares = []
    for ours, wanted in zip(*(each.double().reshape(-1, *each.shape[-2:]) for each in (low, fp32)), strict=True):
        tie = wanted.abs() <= unit_of(low) * wanted.abs().max()
        a, b = torch.where(tie, wanted >= 0, ours >= 0), wanted >= 0
        same, count = same + int((a == b).sum()), count + a.numel()
        if bool((a | b).any()):
            shares.append(int((a & b).sum()) / int((a | b).sum()))
    return {"agree": same / count, "iou": sum(shares) / len(shares)}, float(fp32.abs().double().median()) >= 0.5


def by_hand(
    case: Judged, kind: str, low: Mapping[str, Tensor], fp32: Mapping[str, Tensor]
) -> tuple[dict[str, float], bool]:
    """The figures of the measure, and whether it can tell."""
    if case.measure == "boxes":
        return boxes(low, fp32, kind.startswith(("Detr", "Yolos")))
    if case.measure in ("tokens", "classes", "pixels"):
        loss = [side["loss"] for side in (low, fp32) if "loss" in side]
        return choices(low["logits"], fp32["logits"], 1 if case.measure == "pixels" else -1, loss)
    (ours,), (wanted,) = low.values(), fp32.values()
    return {"picture": picture, "audio": audio, "embeddings": embeddings, "masks": masks}[case.measure](ours, wanted)


def passes(case: Judged, figures: Mapping[str, float]) -> bool:
    """Whether each figure is within its limit."""
    limits = LIMITS | {"iou": IOU.get(case.measure, 0.0), "mask_iou": 0.95}
    for name, value in figures.items():
        limit = limits.get(name)
        if limit is not None and not (value <= -limit if limit < 0 else value >= limit):
            return False
    return True


def verdict(case: Judged, low: OutputTensors, fp32: OutputTensors, tolerance: float) -> tuple[bool, dict[str, float]]:
    """Whether a user who applies the measure by hand, and rel_l2 to the rest, calls it right."""
    of_paths = [dict(zip(side.form.paths, (each.cpu() for each in side), strict=True)) for side in (low, fp32)]
    ours, wanted = ({role: side[path] for role, path in case.roles.items()} for side in of_paths)
    if not all(bool(each.isfinite().all()) for each in of_paths[0].values() if each.is_floating_point()):
        return False, {}
    figures, can_tell = by_hand(case, fp32.form.kind, ours, wanted)
    rest = {path for path in of_paths[1] if not can_tell or path not in case.roles.values()}
    if can_tell and "Output" in fp32.form.kind and case.measure != "embeddings":
        rest = {path for path in rest if not BY_PRODUCTS.match(path)}
    if not can_tell:
        figures = {}
    for path in rest - {"0.keypoints_scores"}:
        a, b = (side[path] for side in of_paths)
        if a.shape != b.shape:
            return False, figures
        error = float((a != b).double().mean()) if a.numel() else 0.0
        if b.is_floating_point():
            error = float((a.double() - b.double()).norm() / b.double().norm())
        if not error <= tolerance:
            return False, figures
    return not can_tell or passes(case, figures), figures
