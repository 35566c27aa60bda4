"""Calls an operator, forward or backward, with or without autocast."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.catalog.records import Mode
from lowprec_check.engine.sweep.failures import DEVICE_LOST, Raised
from lowprec_check.engine.sweep.samples import Sample
from lowprec_check.errors import message_of, type_name
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import is_float, widen
from lowprec_check.torchkit.pytree import leaves, map_tensors

SEED = 0
"""Seed of every call, so that an operator that draws random numbers always draws the same."""


class FirstFailure(DispatchMode):
    """Notes the first dispatched overload that raises, without ``aten.`` and ``.default``."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: str | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run ``func`` as it is."""
        try:
            return run_op(func, args, kwargs, keys)
        except Exception:
            self.failed = self.failed or overload_name_of(func)
            raise


def overload_name_of(func: OpOverload) -> str:
    """``linalg_inv_ex``, ``add.Tensor``, ``prims.x``."""
    return str(func).removeprefix("aten.").removesuffix(".default")


class Trial(NamedTuple):
    """The outcome of one call."""

    outcome: Raised | bool
    """The exception, or whether it ran: ``False`` if there is nothing to differentiate."""
    result: Any = None
    """The output, or the gradients."""


class Caller:
    """Calls one operator on a device, always from the same seed."""

    def __init__(self, operator: Any, device: str) -> None:
        # The dtype of the reference is ``wide``.
        self.operator, self.device, self.wide = operator, device, _widest(device)

    def attempt(self, sample: Sample, dtype: torch.dtype, mode: Mode, seed: int = SEED) -> Trial:
        """Call a copy of ``sample`` in ``dtype``."""
        self.seed(seed)
        try:
            result = self.run(sample.cast(dtype, grad=mode.endswith("backward")), dtype, mode)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the kernel ran; the rounded values were singular
            return Trial(True)
        except Exception as error:
            exit_if_device_lost(error)
            return Trial(Raised.of(error))
        return Trial(result is not None or not mode.endswith("backward"), result)

    def run(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> Any:
        """The output, or the gradients (``None`` if there are none). Errors are not caught."""
        if mode.endswith("backward"):
            with self._autocast(dtype, mode):
                out = self._forward(sample)
            return self._gradients(sample, self.comparable(sample, out), dtype)
        with torch.no_grad(), self._autocast(dtype, mode):
            return self._forward(sample)

    def record(self, sample: Sample, dtype: torch.dtype, mode: Mode, recording: DispatchMode) -> None:
        """Call a copy of ``sample`` with the dispatch mode ``recording`` active."""
        backward = mode.endswith("backward")
        sample = sample.cast(dtype, grad=backward)
        self.seed()
        # The recording is wanted also of a call that fails.
        with contextlib.suppress(Exception):
            with torch.set_grad_enabled(backward), self._autocast(dtype, mode), recording:
                out = self._forward(sample)
            if backward:
                outputs = [tensor for _, tensor in leaves(out) if is_float(tensor)]
                self._gradients(sample, outputs, dtype, recording)

    def size_of_result(self, sample: Sample) -> int | None:
        """Number of elements of the output in fp32; ``None`` if the call fails."""
        trial = self.attempt(sample, torch.float32, "forward")
        if trial.outcome is not True:
            return None
        return sum(tensor.numel() for _, tensor in leaves(trial.result))

    def comparable(self, sample: Sample, out: Any) -> list[Tensor]:
        """The floating leaves of an output in ``wide``, without what is not unique."""
        widened = map_tensors(out, lambda tensor: widen(tensor, self.wide))
        return [tensor for _, tensor in leaves(sample.comparable(widened)) if is_float(tensor)]

    def seed(self, seed: int = SEED) -> None:
        """Seed the generators of the CPU and the device."""
        torch.default_generator.manual_seed(seed)
        if self.device != "cpu":
            getattr(torch, self.device).manual_seed(seed)

    def _forward(self, sample: Sample) -> Any:
        out = self.operator.op(*sample.args, **sample.kwargs)
        self._synchronize()
        return out

    def _gradients(
        self, sample: Sample, outputs: list[Tensor], dtype: torch.dtype, recording: DispatchMode | None = None
    ) -> list[Tensor] | None:
        inputs = [tensor for tensor in sample.tensors() if tensor.requires_grad]
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if not inputs or not outputs:
            return None
        # Cotangents with values in [-1, 1] that ``dtype`` represents exactly.
        cotangents = []
        for output in outputs:
            positions = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
            cotangents.append(torch.cos(positions).to(dtype).to(output.dtype).reshape(output.shape))
        with recording or contextlib.nullcontext():
            gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        self._synchronize()
        return [gradient for gradient in gradients if gradient is not None]

    def _autocast(self, dtype: torch.dtype, mode: Mode) -> Any:
        if mode.startswith("autocast"):
            return torch.autocast(self.device, dtype=dtype)
        return contextlib.nullcontext()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()


@cache
def _widest(device: str) -> torch.dtype:
    """fp64, or fp32 if the device does not support fp64."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).add(1).cpu()
    except Exception:
        return torch.float32
    return torch.float64


def exit_if_device_lost(error: BaseException) -> None:
    """End the process if an assertion on the device makes every later call fail."""
    if "CUDA error" in message_of(error) or type_name(error) == "AcceleratorError":
        os._exit(DEVICE_LOST)
