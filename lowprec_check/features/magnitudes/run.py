"""Adds to a run the histogram of the values that the ops of each module give in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.observers import End, MakeObserver, OpObserver, Pass
from lowprec_check.core.trace.ops import COPIES
from lowprec_check.schema.measures import SAMPLE, ModuleMagnitudes
from lowprec_check.schema.module_paths import module_around
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import as_real, is_float
from lowprec_check.torchkit.tensor_comparison import is_dense

LOWEST = -149  # the exponent of the smallest fp32 number, that of the first bucket

# The number of exponents of finite fp32 numbers: -149 to 127.
_POWERS = 277
# What is added to the exponent in the bits of a normal number.
_NORMAL = -127 - LOWEST
# The bits without the sign; those of the largest subnormal number.
_MAGNITUDE, _SUBNORMAL = 0x7FFFFFFF, 0x7FFFFF
_NONFINITE, _ZERO, _BUCKETS = _POWERS, _POWERS + 1, _POWERS + 2

BATCH = 64  # samples that are counted together

MOST_MODULES = 4096  # modules with a histogram of their own; values of further ones count for the module around


class MagnitudeSamples:
    """The histograms of one run."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {"": 0}
        self._ops: list[int] = [0]
        self._pending: list[tuple[int, Tensor]] = []
        # By device, of shape (modules, buckets), int64.
        self._counts: dict[torch.device, Tensor] = {}

    def add(self, module: str, values: Tensor) -> None:
        """Count a sample of floating or complex ``values``, which an op of ``module`` gave."""
        if not values.numel():
            return
        row = self._rows.get(module)
        if row is None and len(self._rows) >= MOST_MODULES:
            row = self._rows[module_around(module, self._rows) or ""]
        if row is None:
            row = self._rows[module] = len(self._ops)
            self._ops.append(0)
        self._ops[row] += 1
        self._pending.append((row, sample(values)))
        if len(self._pending) >= BATCH:
            self._count()

    def result(self) -> list[ModuleMagnitudes]:
        """The histograms, in the order in which the modules first ran."""
        self._count()
        counts = [self._grown(table).cpu() for table in self._counts.values()]
        total = torch.stack(counts).sum(0).tolist() if counts else []
        histograms = []
        for module, row in self._rows.items():
            if not self._ops[row]:
                continue
            powers = total[row][:_POWERS]
            filled = [index for index, count in enumerate(powers) if count]
            first = last = -LOWEST
            if filled:
                first, last = filled[0], filled[-1] + 1
            histogram = ModuleMagnitudes(
                module=module,
                lowest=LOWEST + first,
                counts=powers[first:last],
                zeros=total[row][_ZERO],
                nonfinite=total[row][_NONFINITE],
                ops=self._ops[row],
            )
            histograms.append(histogram)
        return histograms

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        for device in {values.device for _, values in pending}:
            samples = [(row, values) for row, values in pending if values.device == device]
            table = self._counts[device] = self._grown(self._counts.get(device), device)
            (add_on_cpu if device.type == "cpu" else add_on_accelerator)(table, samples)

    def _grown(self, table: Tensor | None, device: torch.device | None = None) -> Tensor:
        """``table`` with a row for each module known by now."""
        rows = len(self._ops)
        if table is not None and len(table) >= rows:
            return table[:rows] if device is None else table
        # Twice as many as needed while the run goes on, so that it seldom grows.
        size = rows if device is None else 2 * rows
        grown = torch.zeros(size, _BUCKETS, dtype=torch.int64, device=device if table is None else table.device)
        if table is not None:
            grown[: len(table)] = table
        return grown


def sample(values: Tensor) -> Tensor:
    """A flat copy of ``values``, or of at most :data:`~lowprec_check.schema.measures.SAMPLE` of
    them: their distance has no factor in common with their number, so that all channels are met.
    """
    if values.requires_grad:
        values = values.detach()
    values = as_real(values)
    if not (values.is_contiguous() or is_dense(values)):
        values = values.contiguous()
    count = values.numel()
    step = -(-count // SAMPLE)
    while step > 1 and math.gcd(step, count) > 1:
        step += 1
    return values.as_strided((-(-count // step),), (step,), values.storage_offset()).clone()


def add_on_accelerator(table: Tensor, pending: list[tuple[int, Tensor]]) -> None:
    """Count the samples in their rows of ``table`` (int64, modules by buckets), without a wait."""
    values = torch.cat([values for _, values in pending]).float()
    rows, sizes = _rows_and_sizes(pending).to(table.device, non_blocking=True)
    keys = rows.repeat_interleave(sizes, output_size=len(values)) * _BUCKETS + buckets(values)
    table.view(-1).index_add_(0, keys, torch.ones_like(keys))


def add_on_cpu(table: Tensor, pending: list[tuple[int, Tensor]]) -> None:
    """The same, in a third of the time: values below fp32's smallest normal number are rare."""
    values = torch.cat([values for _, values in pending]).float()
    rows, sizes = _rows_and_sizes(pending)
    starts = torch.arange(0, len(sizes) * _BUCKETS, _BUCKETS, dtype=torch.int32)
    keys = starts.repeat_interleave(sizes, output_size=len(values))
    bits = values.view(torch.int32) & _MAGNITUDE
    smallest: Any = ((bits - 1) & _MAGNITUDE).min().tolist()  # zero becomes the largest here
    rare = smallest < _SUBNORMAL
    keys += buckets(values) if rare else (bits >> 23).add_(_NORMAL)
    counts = torch.bincount(keys, minlength=len(sizes) * _BUCKETS).view(-1, _BUCKETS)
    if not rare:
        counts[:, _ZERO], counts[:, _NORMAL] = counts[:, _NORMAL].clone(), 0
    table.index_add_(0, rows, counts)


def _rows_and_sizes(pending: list[tuple[int, Tensor]]) -> Tensor:
    return torch.tensor([[row for row, _ in pending], [len(values) for _, values in pending]])


def buckets(values: Tensor) -> Tensor:
    """The bucket of each fp32 value, int32: the exponent above :data:`LOWEST`, or a special one."""
    bits = values.view(torch.int32) & _MAGNITUDE
    exponent = bits >> 23
    # As integers, bits below 2**23 are exact in fp32, whose exponent is then that of the number.
    subnormal = (bits.float().view(torch.int32) >> 23) - 127
    small = torch.where(bits == 0, _ZERO, subnormal)
    return torch.where(exponent == 0, small, exponent + _NORMAL)


class MagnitudeObserver(OpObserver):
    """Counts the reference's values of each op of a forward pass."""

    def __init__(self, observed: Pass) -> None:
        self._twins, self._samples = observed.lockstep.twins, MagnitudeSamples()

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Count those of the first output, unless the op gives no new ones."""
        traits = call.traits
        repeats = traits.casts or traits.packet in COPIES or traits.packet == "aten::copy_"
        if call.phase not in (None, "forward") or repeats or not outputs or not is_float(outputs[0]):
            return
        if not traits.moves or any(map(is_float, call.inputs)):
            self._samples.add(call.module, self._twins.reference_of(outputs[0]))

    def finish(self, end: End) -> Mapping[str, Any]:
        """The histograms."""
        return {"magnitudes": self._samples.result()}


class Magnitudes(Feature):
    """Histograms of magnitudes."""

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """Always."""
        return MagnitudeObserver


MAGNITUDES = Magnitudes()
