"""The operators that torch describes, and samples of their arguments, some of them enlarged. OpInfo
is a private part of torch that changes between versions; only this module uses it.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.sweep.failures import COUNTS, POWERS, Features
from lowprec_check.errors import UsageError, message_of
from lowprec_check.torchkit.floating_dtypes import COMPLEX
from lowprec_check.torchkit.pytree import leaves, map_values

MAX_GENERATED = 256
"""Maximum number of samples taken from OpInfo; some operators have thousands."""
MAX_ELEMENTS = 1 << 15
"""Maximum number of elements of an enlarged sample; a software half kernel is slow."""
MAX_TRIED, MAX_GROWN = 12, 8
"""How many samples to try to enlarge, and how many enlarged samples to keep."""

_WANTED = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)


def load_operators() -> dict[str, Any]:
    """OpInfo's operators by name and variant; a :class:`UsageError` if it is not importable."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        problem = f"Cannot import the operator database of torch {torch.__version__}: {message_of(error)}."
        raise UsageError(problem, "Install what it needs: pip install 'lowprec-check[catalog]'") from None
    operators: dict[str, Any] = {}
    for operator in op_db:
        operators.setdefault(full_name(operator), operator)
    return operators


def full_name(operator: Any) -> str:
    """Name and variant: ``std.unbiased``."""
    variant = operator.variant_test_name
    if variant:
        return f"{operator.name}.{variant}"
    return str(operator.name)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call: positional and named arguments in the dtype they were generated in."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    comparable: Callable[[Any], Any]
    """Reduces an output to what is unique in it; signs of singular vectors are not."""

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [tensor for _, tensor in leaves((self.args, self.kwargs))]

    def floating(self) -> bool:
        """Whether an argument is a floating tensor or dtype, whose precision can be chosen."""
        asked = any(isinstance(value, torch.dtype) and value in _FLOATING for value in self.kwargs.values())
        return asked or any(t.is_floating_point() or t.is_complex() for t in self.tensors())

    def cast(self, wanted: torch.dtype, *, grad: bool = False) -> Sample:
        """A copy in the dtype ``wanted``; with ``grad``, the same tensors require gradients."""

        def change(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return _target(value, wanted)
            tensor = value.detach().to(_target(value.dtype, wanted)).clone()
            return tensor.requires_grad_(grad and value.requires_grad)

        return dataclasses.replace(self, args=map_values(self.args, change), kwargs=map_values(self.kwargs, change))


_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def _target(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """What ``dtype`` becomes if floating values are ``wanted``; there is no complex bf16."""
    if dtype in _FLOATING or (wanted == torch.float64 and dtype.is_floating_point):
        return wanted
    if dtype in (torch.complex64, torch.complex32):
        return COMPLEX.get(wanted, dtype)
    return dtype


def seed_all(name: str) -> None:
    """Seed every generator that samples draw from, by the operator's name."""
    number = zlib.crc32(name.encode())
    torch.manual_seed(number)
    random.seed(number)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(number)


def samples_of(operator: Any, device: str, bound: int) -> list[Sample]:
    """At most ``bound`` samples, evenly chosen, in fp32 if OpInfo supports it. Those that are
    sparse, empty or too large are omitted, unless all are. Exceptions of OpInfo are not caught.
    """
    claimed = operator.supported_dtypes(device)
    dtype = next((dtype for dtype in _WANTED if dtype in claimed), torch.float32)
    drawn = operator.sample_inputs(device, dtype, requires_grad=operator.supports_autograd)
    generated = [
        Sample((sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad)
        for sample in itertools.islice(drawn, MAX_GENERATED)
    ]
    # What is left out, unless nothing else is left.
    dense = [sample for sample in generated if all(t.layout == torch.strided for t in sample.tensors())] or generated
    full = [sample for sample in dense if all(t.numel() for t in sample.tensors())] or dense
    full = [sample for sample in full if _elements(sample) <= 4 * MAX_ELEMENTS] or full
    if len(full) <= bound:
        return full
    return [full[index * len(full) // bound] for index in range(bound)]


def larger(samples: list[Sample], run: Callable[[Sample], int | None]) -> list[Sample]:
    """Enlarged copies of the samples: sizes multiplied, or powers of two; the largest for each
    choice of arguments. The factor is doubled while ``run``, the number of elements of the output,
    succeeds and all stay below :data:`MAX_ELEMENTS`.
    """
    distinct: dict[str, Sample] = {}
    for sample in sorted(samples, key=_elements, reverse=True):
        distinct.setdefault(repr(features(sample, [], sizes=False)), sample)
    enlarged: list[Sample] = []
    for sample in list(distinct.values())[:MAX_TRIED]:
        for powers in (False, True):
            # As large as the operator takes it.
            best = None
            for factor in (2, 4, 8, 16, 32):
                shapes = [_larger_shape(tensor, factor, powers) for tensor in sample.tensors()]
                if not _elements(sample) < sum(math.prod(shape) for shape in shapes) <= MAX_ELEMENTS:
                    break
                grown = _grow(sample, factor, powers)
                out = run(grown)
                best = best if out is None else grown
                if out is not None and out > MAX_ELEMENTS:
                    break
            if best is not None and len(enlarged) < MAX_GROWN:
                enlarged.append(best)
    return sorted(enlarged, key=_elements)


def _elements(sample: Sample) -> int:
    return sum(tensor.numel() for tensor in sample.tensors())


def _larger_shape(tensor: Tensor, factor: int, powers: bool) -> list[int]:
    """Sizes over 1 multiplied, first rounded up with ``powers``; sparse ones stay."""
    if tensor.layout != torch.strided:
        return list(tensor.shape)
    whole = [int(2 ** math.ceil(math.log2(size))) if powers and size > 1 else size for size in tensor.shape]
    return [size * factor if size > 1 else size for size in whole]


def _grow(sample: Sample, factor: int, powers: bool) -> Sample:
    """``sample`` with tensors repeated; square matrices along the diagonal: invertible."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or (shape := _larger_shape(value, factor, powers)) == list(value.shape):
            return value
        tensor = value.detach()
        repeats = [-(-size // n) for size, n in zip(shape, tensor.shape, strict=True)]
        tiled = tensor.repeat(repeats)[tuple(slice(size) for size in shape)]
        if tensor.dtype in _WANTED and tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]:
            blocks = torch.arange(shape[-1], device=tensor.device) // tensor.shape[-1]
            tiled = tiled * (blocks[:, None] == blocks[None, :])
        elif tensor.dtype in _WANTED:
            tiled = tiled * torch.linspace(0.75, 1.0, shape[-1], device=tensor.device, dtype=tiled.real.dtype)
        return tiled.requires_grad_(value.requires_grad)

    return dataclasses.replace(sample, args=map_values(sample.args, change), kwargs=map_values(sample.kwargs, change))


def features(sample: Sample, names: list[str], *, sizes: bool = True) -> Features:
    """Properties of a sample, the most useful first: arguments (``names``), then sizes."""
    properties = {name: _describe(value) for name, value in sample.kwargs.items()}
    for index, value in enumerate(sample.args[1:], 1):
        if not isinstance(value, (Tensor, list)):
            properties[names[index] if index < len(names) else f"argument {index + 1}"] = _describe(value)
    if not sizes:
        return properties
    tensors = sample.tensors() or [torch.empty(0)]
    lengths = [length for tensor in tensors for length in tensor.shape]
    properties[POWERS] = all(length & (length - 1) == 0 for length in lengths)
    counts = (len(tensors), tensors[0].ndim, max(lengths, default=0), _elements(sample))
    return properties | dict(zip(COUNTS, counts, strict=True))


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return str(value)


def argument_names(operator: Any) -> list[str]:
    """Names of an operator's positional arguments, by signature or schema, if known."""
    try:
        return list(inspect.signature(operator.op).parameters)
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, operator.name.replace(".", "_"), None)
    schemas = []
    if packet is not None:
        schemas = [getattr(packet, name)._schema for name in packet.overloads()]
    return max(([argument.name for argument in schema.arguments] for schema in schemas), key=len, default=[])
