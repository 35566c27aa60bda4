"""Measures of outputs that choose: the next token, the class, the class of each pixel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.torchkit.floating_dtypes import is_float

SURE = 0.5
"""Nats between fp32's first and second choice, as a median, from which its choices mean something:
those of initial weights are some tenths apart, those of trained ones several nats.
"""
_AT_ONCE = 1 << 22
"""Logits whose distributions are computed at once, in fp64: 32 MiB a copy."""
ROUNDINGS = 2.0
"""Two logits tie if they are closer than so many roundings: each of them is rounded."""


class Choices(OutputMeasure):
    """Compares what logits choose, and their distributions."""

    def __init__(self, name: str, noun: str, kinds: Sequence[str], dimension: int, leaves: Sequence[str]) -> None:
        """Of outputs whose class is of these ``kinds``; classes are along a ``dimension``.

        ``name`` is the plural of ``noun``, what is chosen.
        """
        self.name, self._noun, self._kinds, self._dimension, self._leaves = name, noun, kinds, dimension, leaves

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """The logits."""
        if form.judge is None and not any(kind in form.kind for kind in self._kinds):
            return []
        least = 4 if self._dimension == 1 else 2
        named = [
            number
            for number, path in enumerate(form.paths)
            if path in self._leaves and is_float(output[number]) and output[number].ndim >= least
        ]
        return [{"logits": number} for number in named]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """Whether the same is chosen, but for ties, and the divergence of the distributions."""
        ours, wanted = ([part["logits"] for part in side] for side in (output, reference))
        if any(a.shape != b.shape for a, b in zip(ours, wanted, strict=True)):
            return Measured({"agree": Figure(0.0, f"{{}} of the {self.name} agree: other shapes", 0.99)})
        low = torch.cat([self._rows(tensor) for tensor in ours])
        fp32 = torch.cat([self._rows(tensor) for tensor in wanted])
        if not fp32.numel() or fp32.shape[1] < 2:
            return Measured(cannot_tell="there is nothing to choose from")
        rounding = _rounding(ours[0].dtype)

        best = fp32.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        chosen = low.argmax(1)
        differs = chosen != best.indices[:, 0]
        # Compared with what the row chose, which need not be fp32's second choice
        apart = best.values[:, 0] - fp32.gather(1, chosen[:, None])[:, 0]
        ties = differs & (apart <= ROUNDINGS * rounding * best.values[:, 0].abs())
        lost = differs & ~ties
        divergence = _divergence(fp32, low)
        figures = {
            "agree": Figure(1.0 - float(lost.double().mean()), f"{{}} of the {self.name} agree", 0.99),
            "kl": Figure(float(divergence.mean()), "a KL divergence of {} nats", 0.01, "difference"),
            "worst_kl": Figure(float(divergence.max()), unit="difference"),
            "ties": Figure(float(ties.double().mean())),
        }
        if fp32.shape[1] > 5:
            top = (low.topk(5).indices == best.indices[:, :1]).any(1)
            figures["top5"] = Figure(float(top.double().mean()))
        if self._dimension == 1:
            untied = torch.where(ties, best.indices[:, 0], chosen)
            figures["iou"] = Figure(_mean_iou(best.indices[:, 0], untied, fp32.shape[1]), "a mean IoU of {}", 0.98)
        told, sure = "", float(gaps.median())
        if not sure >= SURE:
            told = f"fp32 itself is not sure: its first two choices are {sure:.2g} nats apart (median)"
        return Measured(figures, told, [*self._examples(lost, apart)])

    def _rows(self, tensor: Tensor) -> Tensor:
        """One row for each choice."""
        moved = tensor.movedim(self._dimension, -1)
        return moved.reshape(-1, moved.shape[-1]).float()

    def _examples(self, lost: Tensor, apart: Tensor) -> list[str]:
        """Where another is chosen, first where fp32 is surest."""
        places = lost.nonzero()[:, 0]
        surest = places[apart[places].argsort(descending=True)]
        return [f"{self._noun} {place} differs: fp32 prefers it by {apart[place]:.2g}" for place in surest[:3].tolist()]


def _rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative; autocast makes fp32 logits from fp16 or wider."""
    if dtype in (torch.half, torch.bfloat16):
        return torch.finfo(dtype).eps / 2
    return torch.finfo(torch.half).eps / 2


def _divergence(fp32: Tensor, low: Tensor) -> Tensor:
    """KL(fp32 ‖ low) of each row in nats; classes with a logit of -Inf in fp32 have no share."""
    rows = max(1, _AT_ONCE // fp32.shape[1])
    divergences = []
    for wanted, ours in zip(fp32.split(rows), low.split(rows), strict=True):
        p, q = wanted.double().log_softmax(1), ours.double().log_softmax(1)
        terms = torch.where(wanted == -math.inf, 0.0, p.exp() * (p - q))
        divergences.append(terms.sum(1).clamp_min(0.0))
    return torch.cat(divergences)


def _mean_iou(wanted: Tensor, chosen: Tensor, classes: int) -> float:
    """The mean over the classes that fp32 chooses somewhere (the Jaccard index of VOC)."""
    both = torch.bincount(wanted[wanted == chosen], minlength=classes)
    union = torch.bincount(wanted, minlength=classes) + torch.bincount(chosen, minlength=classes) - both
    present = torch.bincount(wanted, minlength=classes) > 0
    return float((both[present] / union[present]).mean())
