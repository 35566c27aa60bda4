"""Calls an operator, forward or backward, with or without autocast, and compares the result with the reference."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lowprec_check.catalog.records import Dtype, Mode
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.sweep.dispatched_ops import DispatchedOps
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.messages import DEVICE_LOST
from lowprec_check.engine.sweep.samples import Sample
from lowprec_check.engine.sweep.ulp import ulp_errors
from lowprec_check.errors import message_of, type_name

SEED = 0
"""Seed of every call, so that an operator that draws random numbers always draws the same."""
OTHER_SEEDS = range(1, 9)
"""If an operator draws random numbers, at least one of these seeds changes its result."""

REPEATS = 3
ENOUGH_SECONDS = 0.02
"""A call that takes this long is timed only once."""


class Setting(NamedTuple):
    """The settings common to all operators."""

    device: str
    samples: int
    """Maximum number of samples of an operator, not counting larger ones."""
    autocast: tuple[Dtype, ...]
    """Dtypes that autocast supports on the device."""
    wide: torch.dtype
    """Dtype of the reference: fp64, or fp32 if the device does not support fp64."""


class Trial(NamedTuple):
    """The outcome of one call."""

    outcome: Raised | bool
    """The exception, or whether it ran: ``False`` if there is nothing to differentiate."""
    result: Any = None
    """The output, or the gradients."""


class Caller:
    """Calls one operator, always from the same seed."""

    def __init__(self, name: str, operator: Any, setting: Setting) -> None:
        self.name, self.operator, self.setting = name, operator, setting

    def attempt(self, sample: Sample, dtype: torch.dtype, mode: Mode, seed: int = SEED) -> Trial:
        """Call a copy of ``sample`` in ``dtype``."""
        self._seed(seed)
        try:
            result = self.run(sample.cast(dtype, grad=mode.endswith("backward")), dtype, mode)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the kernel ran; the rounded values were singular
            return Trial(True)
        except Exception as error:
            exit_if_device_lost(error)
            return Trial(Raised.of(error))
        return Trial(result is not None or not mode.endswith("backward"), result)

    def run(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> Any:
        """Call ``sample`` and return the output, or the gradients (``None`` if there are none). Exceptions are not caught."""
        if mode.endswith("backward"):
            with self._autocast(dtype, mode):
                out = self._forward(sample)
            return self._gradients(sample, self._comparable(sample, out), dtype)
        with torch.no_grad(), self._autocast(dtype, mode):
            return self._forward(sample)

    def record(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> DispatchedOps:
        """Call a copy of ``sample`` and record the aten ops it dispatches, and the one that raises."""
        sample, backward = sample.cast(dtype, grad=mode.endswith("backward")), mode.endswith("backward")
        recording = DispatchedOps()
        self._seed()
        with contextlib.suppress(Exception):
            with torch.set_grad_enabled(backward), self._autocast(dtype, mode), recording:
                out = self._forward(sample)
            if backward:
                outputs = [tensor for _, tensor in leaves(out) if _is_float(tensor)]
                self._gradients(sample, outputs, dtype, recording)
        return recording

    def size_of_result(self, sample: Sample) -> int | None:
        """Number of elements of the output in fp32; ``None`` if the call fails."""
        out = self.attempt(sample, torch.float32, "forward")
        return sum(tensor.numel() for _, tensor in leaves(out.result)) if out.outcome is True else None

    def depends_on_seed(self, sample: Sample) -> bool:
        """Whether the fp32 result changes with the seed; dropout with p=0 does not draw random numbers."""
        first = self._seeded(sample, SEED)
        others = (self._seeded(sample, seed) for seed in OTHER_SEEDS)
        return any(len(other) != len(first) or not all(map(torch.equal, first, other)) for other in others)

    def _seeded(self, sample: Sample, seed: int) -> list[Tensor]:
        with mock.patch.object(torch, "manual_seed", side_effect=lambda _: self._seed(seed)):  # OpInfo seeds by itself
            return [tensor for _, tensor in leaves(self.attempt(sample, torch.float32, "forward", seed).result)]

    def distances(self, sample: Sample, dtype: torch.dtype, mode: Mode, result: Any) -> list[Tensor]:
        """Errors of ``result`` against the reference on the same inputs, in ULP; empty if there is no reference."""
        try:
            grad = mode == "backward"
            self._seed()
            reference = self.run(sample.cast(dtype, wide=self.setting.wide, grad=grad), dtype, mode)
            if not grad:
                result, reference = self._comparable(sample, result), self._comparable(sample, reference)
            if reference is None or len(result) != len(reference):
                return []
            return [ulp_errors(value, wide, dtype) for value, wide in zip(result, reference, strict=True)]
        except Exception as error:
            exit_if_device_lost(error)
            return []

    def seconds(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> float | None:
        """The shortest time of a few calls; ``None`` if the call fails."""
        least = None
        for _ in range(REPEATS):
            ready = sample.cast(dtype, grad=mode == "backward")
            started = time.perf_counter()
            try:
                result = self.run(ready, dtype, mode)
            except Exception:
                return None
            taken = time.perf_counter() - started
            if result is None:
                return None
            least = taken if least is None else min(least, taken)
            if taken > ENOUGH_SECONDS:
                break
        return least

    def _forward(self, sample: Sample) -> Any:
        out = self.operator.op(*sample.args, **sample.kwargs)
        self._synchronize()
        return out

    def _gradients(
        self, sample: Sample, outputs: list[Tensor], dtype: torch.dtype, recording: DispatchedOps | None = None
    ) -> list[Tensor] | None:
        inputs = [tensor for tensor in sample.tensors() if tensor.requires_grad]
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if not inputs or not outputs:
            return None
        cotangents = [_cotangent(output, dtype) for output in outputs]
        with recording or contextlib.nullcontext():
            found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        self._synchronize()
        return [gradient for gradient in found if gradient is not None]

    def _comparable(self, sample: Sample, out: Any) -> list[Tensor]:
        """The floating leaves of an output in the reference's dtype, without what is not unique, such as signs of singular vectors."""
        return [
            tensor for _, tensor in leaves(sample.comparable(_widened(out, self.setting.wide))) if _is_float(tensor)
        ]

    def _autocast(self, dtype: torch.dtype, mode: Mode) -> Any:
        if mode.startswith("autocast"):
            return torch.autocast(self.setting.device, dtype=dtype)
        return contextlib.nullcontext()

    def _seed(self, seed: int = SEED) -> None:
        torch.default_generator.manual_seed(seed)
        if self.setting.device != "cpu":
            getattr(torch, self.setting.device).manual_seed(seed)

    def _synchronize(self) -> None:
        if self.setting.device != "cpu":
            getattr(torch, self.setting.device).synchronize()


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _widened(value: Any, wide: torch.dtype) -> Any:
    """``value`` with every floating tensor in the dtype ``wide``; container types are kept."""
    if isinstance(value, Tensor):
        complex_wide = torch.complex128 if wide == torch.float64 else torch.complex64
        return value.to(complex_wide if value.is_complex() else wide) if _is_float(value) else value
    if isinstance(value, (tuple, list)):
        items = [_widened(item, wide) for item in value]
        return type(value)(*items) if hasattr(value, "_make") else type(value)(items)
    return value


def _cotangent(output: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient passed to the backward of ``output``: values in [-1, 1] that ``dtype`` represents exactly."""
    positions = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return torch.cos(positions).to(dtype).to(output.dtype).reshape(output.shape)


def exit_if_device_lost(error: BaseException) -> None:
    """End the process if an assertion on the device makes every later call fail; the parent then starts another."""
    if "CUDA error" in message_of(error) or type_name(error) == "AcceleratorError":
        os._exit(DEVICE_LOST)
