"""The measure of sound: its noise, and its spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.engine.model.output_measures import MOST_DECIBELS, Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm

NAMES = ("waveform", "audio_values", "audios", "audio")
"""Of transformers' (VITS, EnCodec, DAC) and diffusers' outputs."""
FRAME, LEAST_FRAME = 1024, 16
"""Samples of which a spectrum is made, every quarter of them."""
FLOOR = 1e-4
"""The part of the loudest power in the spectrum below which is silence: 40 dB, as of noise."""


class Audio(OutputMeasure):
    """Compares sounds by the noise that low precision adds, and by their spectra."""

    name = "audio"
    limited = {"snr": "dB", "spectrum": "difference"}

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """Tensors of such names, or the only one if asked for; time is the last dimension."""
        return [
            {"sound": number}
            for number, path in enumerate(form.paths)
            if (path.partition(".")[0] in NAMES or (form.judge == self.name and not path))
            and (output[number].is_floating_point() or form.judge == self.name)
            and output[number].ndim
            and output[number].shape[-1] >= LEAST_FRAME
        ]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The worst signal-to-noise ratio and log-spectral distance of a channel."""
        ratio, apart = MOST_DECIBELS, 0.0
        for low, fp32 in zip(output, reference, strict=True):
            ours, wanted = low["sound"].double(), fp32["sound"].double()
            if ours.shape != wanted.shape:
                return Measured({"snr": Figure(0.0, "an SNR of {}: other lengths", 40.0, "dB")})
            if not bool(wanted.isfinite().all()):
                return Measured(cannot_tell="the sound of fp32 has NaN or Inf")
            ours, wanted = ours.reshape(-1, ours.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
            heard = wanted.square().sum(1) > 0
            if not bool(heard.all()):
                return Measured(cannot_tell="a channel of fp32 is silent" if bool(heard.any()) else "fp32 is silent")
            noise = (ours - wanted).square().sum(1) / wanted.square().sum(1)
            if float(noise.max()):
                ratio = min(ratio, -10 * math.log10(float(noise.max())))
            apart = max(apart, log_spectral_distance(ours, wanted))
        figures = {"snr": Figure(ratio, "an SNR of {}", 40.0, "dB")}
        figures["spectrum"] = Figure(apart, "spectra {} dB apart", 1.0, "difference")
        return Measured(figures)


def log_spectral_distance(sounds: Tensor, wanted: Tensor) -> float:
    """The largest of channels in dB: root mean square over frequencies, mean over frames."""
    size = min(FRAME, 1 << (sounds.shape[1].bit_length() - 1))
    window = torch.hann_window(size, dtype=torch.float64)
    powers = []
    for signals in (sounds, wanted):
        frames = signals.unfold(1, size, size // 4) * window
        powers.append(torch.fft.rfft(frames).abs().square())
    least = FLOOR * powers[1].amax((1, 2), keepdim=True)
    levels = [10 * power.maximum(least).log10() for power in powers]
    return float((levels[0] - levels[1]).square().mean(2).sqrt().mean(1).max())
