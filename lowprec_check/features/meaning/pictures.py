"""The measure of pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from lowprec_check.engine.model.output_measures import MOST_DECIBELS, Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm

KINDS = ("DecoderOutput", "ImagePipelineOutput", "StableDiffusionPipelineOutput", "StableDiffusionXLPipelineOutput")
"""Classes of diffusers whose tensors are pictures; a UNet's sample is noise."""
NAMES = ("images", "image", "sample", "picture", "reconstruction")
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
"""Of SSIM (Wang et al., 2004): the Gaussian window, and the constants that keep it stable."""


class Pictures(OutputMeasure):
    """Compares pictures by the error in parts of their range, and by their structure."""

    name = "picture"
    limited = {"psnr": "dB", "ssim": "share"}

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """Tensors N × C × H × W with one or three colours."""
        if form.judge is None and form.kind not in KINDS:
            return []
        return [
            {"picture": number}
            for number, path in enumerate(form.paths)
            if (path.partition(".")[0] in (*NAMES, "") or form.judge == self.name)
            and (output[number].is_floating_point() or form.judge == self.name)
            and output[number].ndim == 4
            and output[number].shape[1] in (1, 3)
        ]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The worst PSNR and SSIM of a picture, over the range of all in a tensor."""
        decibels, similarities = MOST_DECIBELS, list[float]()
        for low, fp32 in zip(output, reference, strict=True):
            ours, wanted = low["picture"].double(), fp32["picture"].double()
            if ours.shape != wanted.shape:
                return Measured({"psnr": Figure(0.0, "a PSNR of {}: other shapes", 40.0, "dB")})
            extent = float(wanted.max() - wanted.min()) if wanted.numel() else 0.0
            if not math.isfinite(extent):
                return Measured(cannot_tell="the picture of fp32 has NaN or Inf")
            if not extent:
                return Measured(cannot_tell="the picture of fp32 is of one colour")
            error = float((ours - wanted).square().mean((1, 2, 3)).sqrt().max())
            if error:
                decibels = min(decibels, 20 * math.log10(extent / error))
            if min(wanted.shape[2:]) >= WINDOW:
                similarities.append(ssim(ours, wanted, extent))
        figures = {"psnr": Figure(decibels, "a PSNR of {}", 40.0, "dB")}
        if similarities:
            figures["ssim"] = Figure(min(similarities), "an SSIM of {}", 0.98)
        return Measured(figures)


def ssim(picture: Tensor, wanted: Tensor, extent: float) -> float:
    """The least mean structural similarity of pictures N × C × H × W in fp64 (Wang et al., 2004).

    Only windows inside the picture count; ``extent`` is the range of values.
    """
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    line = torch.exp(-offsets.square() / (2 * SIGMA**2))
    line /= line.sum()

    def mean(values: Tensor) -> Tensor:
        columns = conv2d(values.reshape(-1, 1, *values.shape[2:]), line.reshape(1, 1, -1, 1))
        return conv2d(columns, line.reshape(1, 1, 1, -1))

    ours, theirs = mean(picture), mean(wanted)
    variance, other = mean(picture.square()) - ours.square(), mean(wanted.square()) - theirs.square()
    together = mean(picture * wanted) - ours * theirs
    a, b = (K1 * extent) ** 2, (K2 * extent) ** 2
    above = (2 * ours * theirs + a) * (2 * together + b)
    below = (ours.square() + theirs.square() + a) * (variance + other + b)
    return float((above / below).reshape(len(wanted), -1).mean(1).min())
