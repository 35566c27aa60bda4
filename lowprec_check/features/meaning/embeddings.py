"""The measure of embeddings: vectors of which directions and neighbours count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.features.meaning.logits import ROUNDINGS, rounding

NAMES = ("embedding", "embeddings", "sentence_embedding", "pooler_output", "")
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
            if (path.endswith("_embeds") or (form.judge == self.name and path in NAMES) or path in NAMES[:3])
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
