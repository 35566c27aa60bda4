"""All measures, in the order in which they choose tensors of an output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, normalize

from lowprec_check.engine.model.output_measures import MOST_DECIBELS, Figure, Measured, OutputMeasure, Part, Unit
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.features.meaning.boxes import Boxes
from lowprec_check.torchkit.floating_dtypes import is_float

# -- choices of logits: the next token, the class, the class of each pixel

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


# -- pictures

PICTURE_KINDS = (
    "DecoderOutput",
    "ImagePipelineOutput",
    "StableDiffusionPipelineOutput",
    "StableDiffusionXLPipelineOutput",
)
"""Classes of diffusers whose tensors are pictures; a UNet's sample is noise."""
PICTURE_NAMES = ("images", "image", "sample", "picture", "reconstruction")
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
"""Of SSIM (Wang et al., 2004): the Gaussian window, and the constants that keep it stable."""


class Pictures(OutputMeasure):
    """Compares pictures by the error in parts of their range, and by their structure."""

    name = "picture"
    limited = {"psnr": "dB", "ssim": "share"}

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """Tensors N × C × H × W with one or three colours."""
        if form.judge is None and form.kind not in PICTURE_KINDS:
            return []
        return [
            {"picture": number}
            for number, path in enumerate(form.paths)
            if (path.partition(".")[0] in (*PICTURE_NAMES, "") or form.judge == self.name)
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


# -- masks


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


# -- embeddings

EMBEDDING_NAMES = ("embedding", "embeddings", "sentence_embedding", "pooler_output", "")
"""Of tensors for which ``--judge`` may ask; those that end with ``_embeds`` are told by that."""
MOST_ROWS = 1024
"""Vectors of a tensor, evenly spaced, that have neighbours: all pairs would fill the memory."""
NEAREST = 10
"""Neighbours of each vector whose order is compared."""
ALIKE = 0.999
"""The cosine from which two vectors are no further apart than the limit lets one be from fp32's."""


class Embeddings(OutputMeasure):
    """Compares vectors by direction and length, and the order of their neighbours in the batch."""

    name = "embeddings"
    limited = {"cosine": "cosine", "neighbours": "share", "length": "difference"}
    is_main = False  # other models take the hidden states beside them

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """Tensors N × D of such names."""
        return [
            {"vectors": number}
            for number, path in enumerate(form.paths)
            if (
                path.endswith("_embeds")
                or (form.judge == self.name and path in EMBEDDING_NAMES)
                or path in EMBEDDING_NAMES[:3]
            )
            and output[number].is_floating_point()
            and output[number].ndim == 2
            and output[number].shape[1] > 1
        ]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The worst cosine and length of a vector, and the neighbours that keep their order."""
        cosine, length, orders = 1.0, 0.0, list[Tensor]()
        least_alike = 1.0
        for low, fp32 in zip(output, reference, strict=True):
            ours, wanted = low["vectors"].double(), fp32["vectors"].double()
            if ours.shape != wanted.shape:
                return Measured({"cosine": Figure(0.0, "a cosine of {}: other shapes", ALIKE, "cosine")})
            if not len(wanted) or not bool(wanted.isfinite().all()):
                return Measured(cannot_tell="fp32 itself gives no finite vectors")
            sizes = wanted.norm(dim=1)
            if not bool(sizes.min() > 0):
                return Measured(cannot_tell="fp32 itself gives a vector of zeros")
            own, theirs = normalize(ours), normalize(wanted)
            cosine = min(cosine, float((own * theirs).sum(1).min()))
            length = max(length, float((ours.norm(dim=1) / sizes - 1).abs().max()))
            own, theirs = (vectors[:: -(-len(vectors) // MOST_ROWS)] for vectors in (own, theirs))
            similar = theirs @ theirs.T
            least_alike = min(least_alike, float(similar.min()))
            if len(wanted) > 2:
                orders.append(_kept_order(own @ own.T, similar, ROUNDINGS * rounding(low["vectors"].dtype)))
        figures = {"cosine": Figure(cosine, "a cosine of {} at least", ALIKE, "cosine")}
        if orders:
            kept = float(torch.cat(orders).double().mean())
            figures["neighbours"] = Figure(kept, "{} of the neighbours in order", 0.98)
        figures["length"] = Figure(length, "lengths {} apart", 0.05, "difference")
        told = ""
        if max(len(part["vectors"]) for part in reference) > 1 and least_alike >= ALIKE:
            told = f"fp32's own vectors are all alike: no two have a cosine below {ALIKE:g}"
        return Measured(figures, told)


def _kept_order(similar: Tensor, wanted: Tensor, tie: float) -> Tensor:
    """Whether each two of a vector's nearest ones in fp32 keep their order, or tie there."""
    others = wanted.clone()
    others.fill_diagonal_(-2.0)  # none is its own neighbour
    count = min(NEAREST, len(wanted) - 1)
    nearest = others.topk(count).indices
    first, second = torch.triu_indices(count, count, 1)
    wanted, similar = wanted.gather(1, nearest), similar.gather(1, nearest)
    ties = wanted[:, first] - wanted[:, second] <= tie
    return ties | (similar[:, first] > similar[:, second])


# -- sound

SOUND_NAMES = ("waveform", "audio_values", "audios", "audio")
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
            if (path.partition(".")[0] in SOUND_NAMES or (form.judge == self.name and not path))
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


# -- integers


class Integers(OutputMeasure):
    """The share of integers and booleans that are equal, beside floating tensors."""

    name = "integers"
    limited = {"equal": "share"}
    is_main = False

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """All of them; without floating ones, rel_l2 takes the share already."""
        integers = [number for number, tensor in enumerate(output) if not is_float(tensor) and tensor.numel()]
        if form.judge is None and len(integers) == sum(tensor.numel() > 0 for tensor in output):
            return []
        return [{"values": number} for number in integers]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The least share of equal values; as many may differ as the tolerance says of values."""
        least = 1.0
        for low, fp32 in zip(output, reference, strict=True):
            if low["values"].shape != fp32["values"].shape:
                least = 0.0
            else:
                least = min(least, float((low["values"] == fp32["values"]).double().mean()))
        words = "{} of the integers and booleans are equal"
        return Measured({"equal": Figure(least, words, max(0.0, 1.0 - tolerance))})


# -- all measures

LOGITS = ("logits", "")
TOKENS = Choices("tokens", "token", ("CausalLMOutput", "MaskedLMOutput", "Seq2SeqLMOutput"), -1, LOGITS)
CLASSES = Choices("classes", "class", ("ImageClassifierOutput", "SequenceClassifierOutput"), -1, LOGITS)
PIXELS = Choices("pixels", "pixel", ("SemanticSegmenterOutput", "OrderedDict"), 1, (*LOGITS, "out"))
BOXES = Boxes()
PICTURE = Pictures()
MASKS = Masks()
EMBEDDINGS = Embeddings()
AUDIO = Audio()
INTEGERS = Integers()
