"""What a run of steps did: its losses, and samples of its weights after each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from lowprec_check.torchkit.floating_dtypes import as_real

SAMPLED, TOGETHER = 1024, 2**17
"""Random elements kept of each tensor; more if all have at most ``TOGETHER`` together."""


class Samples:
    """The same random elements of named tensors in every run; ``sizes`` are numbers of elements."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sizes = dict(sizes)
        most = max(SAMPLED, TOGETHER // max(1, len(self.sizes)))
        self._picked: dict[str, Tensor | None] = {}
        self.slices: dict[str, slice] = {}  # by name, where its elements are in what :meth:`take` returns
        # A small tensor is kept whole; of a large one, each sample stands for several elements.
        weights, end = [torch.zeros(0)], 0
        for name, size in self.sizes.items():
            count, self._picked[name] = min(size, most), None
            if size > most:
                self._picked[name] = torch.randint(size, (most,), generator=generator)
            self.slices[name] = slice(end, end + count)
            end += count
            weights.append(torch.full((count,), size / max(count, 1)))
        self.weights = torch.cat(weights)  # how many elements each sample stands for

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Samples:
        """Those of ``tensors``."""
        return cls({name: as_real(tensor).numel() for name, tensor in tensors.items()})

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The elements of all tensors, as one fp32 vector on the CPU."""
        samples = [torch.zeros(0)]
        for name, picked in self._picked.items():
            flat = as_real(tensors[name].detach()).reshape(-1)
            samples.append((flat if picked is None else flat[picked.to(flat.device)]).float().cpu())
        return torch.cat(samples)


@dataclasses.dataclass
class Trajectory:
    """What a run of steps did; it is saved for the runs that are compared with it."""

    losses: list[float] = dataclasses.field(default_factory=list)  # before each step, and after the last
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    """:class:`Samples` of the weights that are trained, before the first step and after each."""
    buffers: list[Tensor] = dataclasses.field(default_factory=list)  # the same of the floating buffers
    skipped: int = 0  # steps that a ``GradScaler`` skipped; they were repeated with the same batch
    scales: list[float] = dataclasses.field(default_factory=list)
    """The loss scale of each step that was not skipped; empty without a ``GradScaler``."""
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step

    @property
    def steps(self) -> int:
        """Steps that were done."""
        return max(0, len(self.weights) - 1)
