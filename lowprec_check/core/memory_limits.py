"""Keeps a scan within the free memory and within its share of it; what does not fit is left out."""

from __future__ import annotations

import itertools
import os
from typing import Literal, NamedTuple

import torch
from torch import nn

from lowprec_check.core.tasks import RunTask, TaskFiles
from lowprec_check.engine.model.streamed_weights import is_in_memory
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.measures import Errors
from lowprec_check.torchkit.devices import MemoryLimit, free_memory
from lowprec_check.torchkit.pytree import stored

MOST_TIMES_FP32 = 2.2
"""Times the peak of fp32 that a scan takes at most, unless its user allows all that is free."""
SMALL = 4 << 30
"""Bytes that a scan may always take, so that the analysis of small models stays complete."""
Part = Literal["plain", "none", "accumulated", "both"]
"""The plain part of a run, or its instrumented part by the errors that it computes."""
_ACTIVATIONS: dict[Part, float] = {"plain": 1.0, "none": 1.1, "accumulated": 1.5, "both": 3.0}
"""Times the activations at fp32's peak; the largest measured are 0.8, 0.9, 1.5 and 2.8."""
_LARGEST: dict[Part, float] = {"plain": 0.0, "none": 0.0, "accumulated": 1.0, "both": 1.0}
"""Times the largest weight, which is widened for an op."""
_FEWER: tuple[Errors, ...] = ("both", "accumulated", "none")
"""The errors that an instrumented part can compute; each needs less memory than the one before."""
_LEFT_OUT: dict[Errors, str] = {
    "accumulated": "the error of each op on its own inputs was not computed (as with --errors accumulated)",
    "none": "the errors of ops were not computed (as with --errors none)",
}

_SMALLER = "Use a smaller batch or shorter inputs, or fewer precisions at a time (-p bfloat16), or free some memory"

_ROOM = f"what is left of {MOST_TIMES_FP32} times the memory of fp32; --budget-error on allows half of the free memory"


class Allowance(NamedTuple):
    """What the instrumented part of a task may do with the memory there is."""

    errors: Errors | None
    """The errors to compute; ``None``: it cannot run."""
    room: MemoryLimit | None
    """What observers may keep within the memory of a scan; ``None``: as much as is free."""
    note: str | None
    """What was left out and what would help, for the report."""


def allowance(task: RunTask, model: nn.Module) -> Allowance:
    """What the instrumented part of ``task`` may compute; ``model`` is on its device, in fp32."""
    peak = task.fp32_peak
    if task.is_reference or peak is None:
        return Allowance("none" if task.is_reference else task.errors, None, None)
    size, free = ModelBytes.of(model), free_memory(torch.device(task.device))
    most = None
    if task.limits_memory:
        most = size.most(peak) - size.held
    saved = _outputs(task.files)
    if task.changes_parameters:
        saved += size.held + size.cast
    wanted = size.beyond(task.errors, peak) + saved
    # The most errors that fit. What needs least runs wherever it fits into the free memory.
    for errors in _FEWER[_FEWER.index(task.errors) :]:
        need = size.beyond(errors, peak) + saved
        if need <= free and (most is None or need <= most or errors == "none"):
            room = None
            if most is not None:
                room = MemoryLimit(max(0, most - need), _ROOM)
            if errors == task.errors:
                return Allowance(errors, room, None)
            if wanted > free:
                why = f"they need about {gibibytes(wanted)}, and {gibibytes(free)} are free. {_SMALLER}"
            else:
                total = gibibytes(size.held + wanted)
                limit = f"more than {MOST_TIMES_FP32} times fp32; --budget-error on allows all that is free"
                why = f"a scan would take about {total}, {limit}"
            return Allowance(errors, room, f"memory: {_LEFT_OUT[errors]}: {why}")
    need = size.beyond("none", peak) + saved
    why = (
        f"too little memory to run op by op: about {gibibytes(need)} are needed beside the fp32 weights, and "
        f"{gibibytes(free)} are free. {_SMALLER}"
    )
    return Allowance(None, None, why)


def most_at_once(task: RunTask, model: nn.Module) -> int:
    """How many complete tasks like ``task`` may run at once within the memory of a scan."""
    size, peak = ModelBytes.of(model), task.fp32_peak
    if peak is None:
        return 1
    room = free_memory(torch.device(task.device)) // 2
    if task.limits_memory:
        room = min(room, size.most(peak) - size.held)
    return max(1, room // max(1, size.beyond(task.errors, peak)))


def _outputs(files: TaskFiles) -> int:
    """Bytes for comparisons: what is kept of the fp32 run, in files, and as much of the run."""
    return 2 * sum(os.fstat(file).st_size for _, file in files.of_fp32)


def why_too_large(
    model: nn.Module, device: str, isolation: Isolation, fp32_peak: int | None, files: TaskFiles
) -> str | None:
    """Why the plain part does not fit into memory; ``None`` if it does, or that is not known."""
    # An accelerator raises an exception for what does not fit; on a CPU, a process is killed.
    if device != "cpu":
        return None
    size, free = ModelBytes.of(model), free_memory(torch.device("cpu"))
    need = size.beyond("plain", fp32_peak) + _loaded_again(size, isolation) + _outputs(files)
    if need <= free:
        return None
    return f"too little memory: it needs about {gibibytes(need)} more, and {gibibytes(free)} are free. {_SMALLER}"


def check_weights_fit(model: nn.Module, device: torch.device, isolation: Isolation = "none") -> None:
    """Raise :class:`UsageError` if the fp32 weights do not fit beside those of ``model`` itself."""
    size, need = ModelBytes.of(model), 0
    # On an accelerator they are moved; on a CPU a fresh interpreter loads them once more.
    if device.type == "cpu":
        need = _loaded_again(size, isolation)
    elif all(tensor.device.type != device.type for tensor in itertools.chain(model.parameters(), model.buffers())):
        need = size.held
    free = 0
    if need:
        free = free_memory(device)
    if need <= free:
        return
    weights, room = gibibytes(need), gibibytes(free)
    if device.type == "cpu":
        raise UsageError(
            f"The model does not fit into memory: a fresh interpreter loads its {weights} of fp32 weights again, and "
            f"{room} are free.",
            "Free some memory; or use --isolation fork, which shares the weights, if the file starts no threads "
            "when it is imported.",
        )
    raise UsageError(
        f"The model does not fit on {device}: its fp32 weights need {weights}, and {room} are free.",
        "Free memory on the device, use --stream if the weights are in .safetensors files, scan a smaller variant of "
        "the model (fewer layers), or use --device cpu.",
    )


def _loaded_again(size: ModelBytes, isolation: Isolation) -> int:
    """Bytes of weights that a worker holds itself: a fork shares them."""
    return size.held if isolation == "spawn" else 0


# -- The estimate, from the size of the model, and from the peak of its fp32 run once that is known


class ModelBytes(NamedTuple):
    """Bytes of the parameters and buffers of a model."""

    held: int
    """As they are."""
    cast: int
    """Of the floating ones after a cast to 16 bits."""
    largest: int
    """Of the largest floating one, as it is."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelBytes:
        """Those of ``model``, in which tensors may share memory."""
        held = cast = largest = 0
        seen: set[int] = set()
        for tensor in stored((*model.parameters(), *model.buffers())):
            if not is_in_memory(tensor) or tensor.untyped_storage()._cdata in seen:
                continue
            seen.add(tensor.untyped_storage()._cdata)
            size = tensor.untyped_storage().nbytes()
            held += size
            if tensor.is_floating_point() or tensor.is_complex():
                cast += min(size, size * 2 // tensor.element_size())
                largest = max(largest, size)
        return cls(held, cast, largest)

    def beyond(self, part: Part, fp32_peak: int | None) -> int:
        """Bytes that ``part`` needs beyond the fp32 weights, which stay in memory."""
        # The peak includes the weights; without it, this is a lower bound.
        activations = 0
        if fp32_peak is not None:
            activations = max(0, fp32_peak - self.held)
        return int(self.cast + _LARGEST[part] * self.largest + _ACTIVATIONS[part] * activations)

    def most(self, fp32_peak: int) -> int:
        """Bytes that a scan takes at most by default."""
        return max(SMALL, int(MOST_TIMES_FP32 * max(self.held, fp32_peak)))


def gibibytes(count: float) -> str:
    """``3.2 GiB``; with two digits if it is small."""
    size = count / 2**30
    if size >= 1:
        return f"{size:.1f} GiB"
    return f"{size:.2g} GiB"
