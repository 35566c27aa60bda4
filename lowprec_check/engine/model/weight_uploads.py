"""Weights on their way to an accelerator, through pinned memory, while the device computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lowprec_check.engine.model.safetensors_files import Saved
from lowprec_check.torchkit.devices import module_of

_READERS, _PART_BYTES = 4, 64 << 20
"""Threads that read for an accelerator, and bytes of a weight that one reads at a time."""


def reads_ahead(device: torch.device) -> bool:
    """Whether weights can be copied to ``device`` while it computes."""
    return device.type != "cpu" and hasattr(module_of(device), "Stream")


class WeightUploads:
    """The weights that were started and not taken; own threads read them until it is closed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = module_of(device)
        self._queue = self._module.Stream(device)
        self._pool = ThreadPoolExecutor(_READERS)
        self._coming: dict[str, tuple[Tensor, list[Future[None]]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._coming

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that were started and not taken."""
        return sum(values.nbytes for values, _ in self._coming.values())

    def start(self, name: str, saved: Saved) -> None:
        """Begin to read a weight, if that has not begun."""
        if name in self._coming:
            return
        with torch.inference_mode(False), self._module.stream(self._queue):
            values = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device)
        begins = range(0, saved.nbytes, _PART_BYTES)
        parts = [self._pool.submit(self._copy, saved, at, values[at : at + _PART_BYTES]) for at in begins]
        self._coming[name] = values, parts

    def _copy(self, saved: Saved, begin: int, part: Tensor) -> None:
        staged = torch.empty(len(part), dtype=torch.uint8, device="cpu", pin_memory=True)
        saved.read(begin, staged)
        with self._module.stream(self._queue):
            part.copy_(staged, non_blocking=True)

    def take(self, name: str, saved: Saved) -> Tensor:
        """The weight on the device; what computes with it next waits for it there."""
        values, parts = self._coming.pop(name)
        for part in parts:
            part.result()
        current = self._module.current_stream(self.device)
        current.wait_stream(self._queue)
        values.record_stream(current)
        return values.view(saved.dtype).view(saved.shape)

    def forget(self) -> None:
        """Forget what was started."""
        for _, parts in self._coming.values():
            for part in parts:
                part.cancel()
        self._coming.clear()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
