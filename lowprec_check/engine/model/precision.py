"""The named precisions: how a model is cast, what goes around the call, and how all is put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.keep_fp32 import cast_except, keep_out_of_autocast
from lowprec_check.engine.model.snapshot import Snapshot


class Precision(NamedTuple):
    """A way to run a model; at most one of ``cast`` and ``autocast`` is set, ``fp32`` has neither."""

    name: str
    cast: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @property
    def low(self) -> torch.dtype | None:
        """The narrow dtype in play, ``None`` for fp32."""
        return self.cast or self.autocast


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32"),
        Precision("bfloat16", cast=torch.bfloat16),
        Precision("autocast-bf16", autocast=torch.bfloat16),
        Precision("half", cast=torch.float16),
        Precision("autocast-fp16", autocast=torch.float16),
    )
}
"""By name, in the order in which a scan shows them."""


def seed_everything(seed: int) -> None:
    """Seed torch (the CPU, and accelerators that are awake), ``random``, and NumPy where it is loaded.

    ``torch.manual_seed`` would import ``torch._dynamo`` on its first call, a second in each worker.
    """
    torch.default_generator.manual_seed(seed)
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class Prepared(NamedTuple):
    """A model made ready for one precision; call it with inputs in fp32."""

    model: nn.Module
    precision: Precision
    device: torch.device
    call: Callable[..., Any]
    """What is called: the model, or the model and the user's loss."""

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies on the device, floating ones cast where the model is."""

        def ready(tensor: Tensor) -> Tensor:
            dtype = self.precision.cast if tensor.is_floating_point() and self.precision.cast else tensor.dtype
            return tensor.detach().to(self.device, dtype, copy=True)

        return map_tensors(args, ready), map_tensors(kwargs, ready)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What goes around the call: autocast or nothing."""
        if self.precision.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.autocast)


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    *,
    keep_fp32: Sequence[str] = (),
    call: Callable[..., Any] | None = None,
) -> Iterator[Prepared]:
    """Cast ``model`` in place as ``model.half()`` would, and put it back afterwards.

    ``keep_fp32`` names modules that stay in fp32. The model must already be on ``device``.
    """
    snapshot = Snapshot(model)
    try:
        if precision.cast is not None:
            cast_except(model, precision.cast, keep_fp32)
        elif precision.autocast is not None:
            keep_out_of_autocast(model, precision.autocast, keep_fp32, device.type)
        with torch.no_grad():
            yield Prepared(model, precision, device, call or model)
    finally:
        snapshot.restore()
