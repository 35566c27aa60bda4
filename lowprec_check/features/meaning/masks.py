"""The measure of masks: one logit for each pixel, which is in a mask from 0 on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.features.meaning.logits import ROUNDINGS, SURE, rounding


class Masks(OutputMeasure):
    """Compares which pixels are in each mask."""

    name = "masks"
    limited = {"agree": "share", "iou": "share"}
    fits_by_loss = True

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """``pred_masks`` of SAM and its kin; N × 1 × H × W trained by binary cross entropy."""
        return [
            {"masks": number}
            for number, path in enumerate(form.paths)
            if output[number].is_floating_point()
            and output[number].ndim >= 4
            and ((path == "pred_masks" and "Segmentation" in form.kind) or self._is_binary(path, form, output[number]))
        ]

    def _is_binary(self, path: str, form: OutputForm, tensor: Tensor) -> bool:
        """Whether it is the one map of logits, by what it is trained by or judged by."""
        is_asked = form.judge == self.name or form.loss == "binary"
        return is_asked and path in ("", "logits", "out", "pred_masks") and tensor.shape[1] == 1

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The share of pixels that agree, but for ties, and the mean IoU of masks."""
        same, counts, overlaps, odds = list[Tensor](), 0, list[Tensor](), list[Tensor]()
        for low, fp32 in zip(output, reference, strict=True):
            ours, wanted = low["masks"].double(), fp32["masks"].double()
            if ours.shape != wanted.shape:
                return Measured({"agree": Figure(0.0, "{} of the pixels agree: other shapes", 0.99)})
            # The logit is the distance from the other choice: one as small as its rounding ties
            size = wanted.abs().amax((-2, -1), keepdim=True)
            ties = wanted.abs() <= ROUNDINGS * rounding(low["masks"].dtype) * size
            chosen = torch.where(ties, wanted >= 0, ours >= 0).flatten(0, -3)
            masks = (wanted >= 0).flatten(0, -3)
            union = (chosen | masks).sum((1, 2))
            overlaps.append(((chosen & masks).sum((1, 2)) / union)[union > 0])
            same.append((chosen == masks).sum())
            counts += masks.numel()
            odds.append(wanted.abs().flatten())
        if not counts:
            return Measured(cannot_tell="there are no pixels")
        figures = {"agree": Figure(float(torch.stack(same).sum()) / counts, "{} of the pixels agree", 0.99)}
        shares = torch.cat(overlaps)
        if len(shares):
            figures["iou"] = Figure(float(shares.mean()), "a mean IoU of {}", 0.95)
        sure, told = float(torch.cat(odds).nanmedian()), ""
        if not sure >= SURE:
            told = f"fp32 itself is not sure: its logits are {sure:.2g} from 0 (median)"
        return Measured(figures, told)
