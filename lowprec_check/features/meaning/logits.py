"""Measures of outputs that choose: the next token, the class, the class of each pixel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part, Unit
from lowprec_check.engine.model.output_tensors import OutputForm

SURE = 0.5
"""Nats between fp32's first and second choice, as a median, from which its choices mean something:
those of initial weights are some tenths apart, those of trained ones several nats.
"""
_AT_ONCE = 1 << 20
"""Logits that are compared at once, in fp64: 8 MiB a copy, of which caches hold some."""
ROUNDINGS = 2.0
"""Two logits tie if they are closer than so many roundings: each of them is rounded."""
MOST_CLASSES = 256
"""Of pixels: COCO-Stuff has 171, ADE20K 150."""
TOP = 5
"""First choices among which fp32's is looked for."""


class Choice(NamedTuple):
    """What low precision and fp32 choose, a value for each row."""

    best: Tensor
    """The class that fp32 chooses."""
    gap: Tensor
    """By how much fp32 prefers it to its second choice, in nats."""
    chosen: Tensor
    """The class that low precision chooses."""
    differs: Tensor
    apart: Tensor
    """By how much fp32 prefers its own to ``chosen``, which need not be its second choice."""
    ties: Tensor
    """Whether they differ, but are closer than roundings."""
    divergence: Tensor
    """KL(fp32 ‖ low) in nats; NaN where fp32 has NaN or +Inf."""
    is_in_top: Tensor
    """Whether ``best`` is among the first :data:`TOP` of low precision."""


def _choice(low: Tensor, fp32: Tensor, roundings: float) -> Choice:
    first = fp32.topk(2)
    best, chosen = first.indices[:, 0], low.argmax(1)
    # Where all classes are masked, there is nothing to choose
    differs = (chosen != best) & (first.values[:, 0] > -math.inf)
    apart = first.values[:, 0] - fp32.gather(1, chosen[:, None])[:, 0]
    ties = differs & (apart <= roundings * first.values[:, 0].abs())
    # Classes with a logit of -Inf in fp32 have no share
    p, q = fp32.log_softmax(1), low.log_softmax(1)
    divergence = torch.where(fp32 == -math.inf, 0.0, p.exp() * (p - q)).sum(1).clamp_min(0.0)
    return Choice(
        best=best,
        gap=first.values[:, 0] - first.values[:, 1],
        chosen=chosen,
        differs=differs,
        apart=apart,
        ties=ties,
        divergence=divergence,
        is_in_top=(low > low.gather(1, best[:, None])).sum(1) < TOP,
    )


class Choices(OutputMeasure):
    """Compares what logits choose, and their distributions."""

    fits_by_loss = True

    def __init__(self, name: str, noun: str, kinds: Sequence[str], dimension: int, leaves: Sequence[str]) -> None:
        """Of outputs whose class is of these ``kinds``; classes are along a ``dimension``.

        ``name`` is the plural of ``noun``, what is chosen.
        """
        self.name, self._noun, self._kinds, self._dimension, self._leaves = name, noun, kinds, dimension, leaves
        limited: dict[str, Unit] = {"agree": "share", "kl": "difference"}
        if name == "tokens":
            limited["perplexity"] = "difference"
        if dimension == 1:
            limited["iou"] = "share"
        self.limited = limited

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """The logits, of tokens with the loss if the model was given labels."""
        is_certain = form.judge is not None or (form.loss == "classes" and self.name != "tokens")
        # Trained by binary cross entropy, each logit chooses for itself
        is_of_kind = form.loss != "binary" and any(kind in form.kind for kind in self._kinds)
        if not is_certain and not is_of_kind:
            return []
        leaves, colours = self._leaves, 0
        if not is_certain and form.kind == "OrderedDict":
            leaves, colours = ("out",), 3  # as torchvision's; other models return one of pictures
        parts = [
            {"logits": number}
            for number, path in enumerate(form.paths)
            if path in leaves
            and output[number].is_floating_point()
            and self._has_classes(output[number])
            and output[number].shape[1] != colours
        ]
        is_entropy = form.loss in ("", "classes")
        if len(parts) == 1 and self.name == "tokens" and is_entropy and "loss" in form.paths:
            loss = form.paths.index("loss")
            if output[loss].numel() == 1:
                parts[0]["loss"] = loss
        return parts

    def _has_classes(self, tensor: Tensor) -> bool:
        """Whether its shape is one of logits; features have more channels than pixels classes."""
        if self._dimension == 1:
            return tensor.ndim >= 4 and 2 <= tensor.shape[1] <= MOST_CLASSES
        return tensor.ndim >= 2 and tensor.shape[-1] >= 2 and (self.name == "tokens" or tensor.ndim == 2)

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """Whether the same is chosen, but for ties, and the divergence of the distributions."""
        ours, wanted = ([part["logits"] for part in side] for side in (output, reference))
        if any(a.shape != b.shape for a, b in zip(ours, wanted, strict=True)):
            return Measured({"agree": Figure(0.0, f"{{}} of the {self.name} agree: other shapes", 0.99)})
        parts = [part for pair in zip(ours, wanted, strict=True) for part in self._parts(*pair)]
        classes = max((tensor.shape[self._dimension] for tensor in wanted), default=0)
        if not parts:
            return Measured(cannot_tell="there is nothing to choose from")
        rows = Choice(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        if bool(rows.divergence.isnan().any()):
            return Measured(cannot_tell="fp32 itself gives NaN or Inf")
        lost = rows.differs & ~rows.ties
        figures = {
            "agree": Figure(1.0 - float(lost.double().mean()), f"{{}} of the {self.name} agree", 0.99),
            "kl": Figure(float(rows.divergence.mean()), "a KL divergence of {} nats", 0.01, "difference"),
            "worst_kl": Figure(float(rows.divergence.max()), unit="difference"),
            "ties": Figure(float(rows.ties.double().mean())),
        }
        if classes > TOP:
            figures["top5"] = Figure(float(rows.is_in_top.double().mean()))
        if self._dimension == 1:
            untied = torch.where(rows.ties, rows.best, rows.chosen)
            figures["iou"] = Figure(_mean_iou(rows.best, untied, classes), "a mean IoU of {}", 0.98)
        if "loss" in reference[0] and bool(reference[0]["loss"].isfinite()):  # NaN if no label counts
            apart = float((output[0]["loss"].double() - reference[0]["loss"].double()).expm1().abs())
            figures["perplexity"] = Figure(apart, "perplexities {} of fp32's apart", 0.01, "difference")
        told, sure = "", float(rows.gap.nanmedian())
        if not sure >= SURE:
            told = f"fp32 itself is not sure: its first two choices are {sure:.2g} nats apart (median)"
        return Measured(figures, told, [*self._examples(lost, rows.apart)])

    def _parts(self, low: Tensor, fp32: Tensor) -> Iterator[Choice]:
        """What is chosen in each row, some rows at once: logits may fill the memory."""
        ours, wanted = (tensor.movedim(self._dimension, -1) for tensor in (low, fp32))
        classes = wanted.shape[-1]
        if not wanted.numel():
            return
        at_once = max(1, _AT_ONCE // classes)
        rows = (tensor.reshape(-1, classes).split(at_once) for tensor in (ours, wanted))
        for own, theirs in zip(*rows, strict=True):
            yield _choice(own.double(), theirs.double(), ROUNDINGS * rounding(low.dtype))

    def _examples(self, lost: Tensor, apart: Tensor) -> list[str]:
        """Where another is chosen, first where fp32 is surest."""
        places = lost.nonzero()[:, 0]
        surest = places[apart[places].argsort(descending=True)]
        return [f"{self._noun} {place} differs: fp32 prefers it by {apart[place]:.2g}" for place in surest[:3].tolist()]


def rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative; autocast makes fp32 logits from fp16 or wider."""
    if dtype in (torch.half, torch.bfloat16):
        return torch.finfo(dtype).eps / 2
    return torch.finfo(torch.half).eps / 2


def _mean_iou(wanted: Tensor, chosen: Tensor, classes: int) -> float:
    """The mean over the classes that fp32 chooses somewhere (the Jaccard index of VOC)."""
    both = torch.bincount(wanted[wanted == chosen], minlength=classes)
    union = torch.bincount(wanted, minlength=classes) + torch.bincount(chosen, minlength=classes) - both
    present = torch.bincount(wanted, minlength=classes) > 0
    return float((both[present] / union[present]).mean())
