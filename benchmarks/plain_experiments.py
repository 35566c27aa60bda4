"""Experiments on a plain model: cast or autocast it, keep modules in fp32, call it. Nothing of a scan is used.

:mod:`page_conclusions` holds what the page concludes against them. Only torch, ``copy.deepcopy``, and hooks and wrappers of their own;
the judgement of an output (rel_l2, NaN, Inf) is that of the plain calls in :mod:`verdict_breadth`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from verdict_breadth import (
    CALLS,
    SEVERITY,
    TOLERANCE,
    Inputs,
    copied,
    described,
    dtype_of,
    is_floating,
    judge_call,
    leaf_error,
    seed_all,
    tensors_in,
)

CASTS = ("half", "bfloat16")
SECONDS = 6.0
"""Of the calls that are timed."""


class Outcome(NamedTuple):
    """What three plain calls in a row gave."""

    status: str
    """``ok``, ``inaccurate``, ``nonfinite`` or ``error``."""
    error: float = 0.0
    """The largest rel_l2 of a floating tensor, or share of integers that differ."""
    rms: float | None = None
    """Root mean square of the fp32 tensor with that error; ``None`` if no tensor is floating."""
    detail: str = ""


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to each tensor in its tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = mapped(item, change)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    return type(value)(mapped(item, change) for item in value) if type(value) in (tuple, list) else value


def widened(value: Any, low: torch.dtype) -> Any:
    """Its tensors of dtype ``low`` in fp32."""
    return mapped(value, lambda tensor: tensor.float() if tensor.dtype == low else tensor)


def narrowed(value: Any, low: torch.dtype) -> Any:
    """Its fp32 tensors in ``low``."""
    return mapped(value, lambda tensor: tensor.to(low) if tensor.dtype == torch.float32 else tensor)


def fenced(forward: Callable[..., Any], low: torch.dtype, *, cast: bool) -> Callable[..., Any]:
    """``forward`` on fp32 inputs, outside autocast; its result is cast back to ``low`` in a model that was cast."""

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            output = forward(*widened(args, low), **widened(kwargs, low))
        return narrowed(output, low) if cast else output

    return in_fp32


def in_precision(model: nn.Module, precision: str, keep: Sequence[str] = ()) -> nn.Module:
    """A copy of the fp32 ``model``, cast if ``precision`` is a cast; the modules in ``keep`` are copies of the fp32 ones."""
    made = copy.deepcopy(model)
    if precision == "fp32":
        return made
    low = dtype_of(precision)
    if precision in CASTS:
        made = made.to(low)
    for path in keep:
        exact = copy.deepcopy(model.get_submodule(path))
        exact.forward = fenced(exact.forward, low, cast=precision in CASTS)  # type: ignore[method-assign]
        old = made.get_submodule(path)
        for parent in made.modules():
            for name, child in parent._modules.items():
                if child is old:
                    parent._modules[name] = exact
    return made


def call(model: nn.Module, inputs: Inputs, precision: str) -> Any:
    """One call of what :func:`in_precision` made, with seeded generators."""
    seed_all()
    return timed(model, inputs, precision)[0]


def timed(model: nn.Module, inputs: Inputs, precision: str) -> tuple[Any, float, float]:
    """The output of one call, its seconds, and those of the processor; copying the inputs is not counted."""
    given = copied(inputs, dtype_of(precision) if precision in CASTS else None)
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    context: Any = contextlib.nullcontext()
    if precision.startswith("autocast"):
        context = torch.autocast("cpu", dtype=dtype_of(precision))
    with torch.no_grad():
        wall, cpu = time.perf_counter(), time.process_time()
        with context:
            output = model(*args, **kwargs)
        return output, time.perf_counter() - wall, time.process_time() - cpu


def outputs(model: nn.Module, inputs: Inputs, precision: str, keep: Sequence[str] = ()) -> Iterator[list[Tensor]]:
    """The tensors of the outputs of three calls in a row."""
    made = in_precision(model, precision, keep)
    for _ in range(CALLS):
        yield [tensor.clone() for tensor in tensors_in(call(made, inputs, precision))]


def outcome(
    model: nn.Module, inputs: Inputs, precision: str, reference: Sequence[Sequence[Tensor]], keep: Sequence[str] = ()
) -> Outcome:
    """The worst of three calls compared with the fp32 outputs in ``reference``."""
    found, its = [], outputs(model, inputs, precision, keep)
    for expected in reference:
        try:
            output = next(its)
        except Exception as error:
            found.append(Outcome("error", math.inf, None, described(error)))
            break
        status, error_of_call = judge_call(output, expected, TOLERANCE[dtype_of(precision)])
        found.append(Outcome(status, error_of_call, rms_of_worst(output, expected)))
    return max(found, key=lambda one: (SEVERITY.index(one.status), one.error))


def rms_of_worst(output: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """Root mean square of the fp32 floating tensor with the largest error; ``None`` if there is none."""
    pairs = [(y, r) for y, r in zip(output, expected, strict=False) if is_floating(r) and r.numel()]
    if not pairs:
        return None
    _, reference = max(pairs, key=lambda pair: leaf_error(*pair))
    return float(reference.double().pow(2).mean().sqrt())


def is_all_zeros(tensors: Sequence[Tensor]) -> bool:
    """Whether an output has floating values, and all are zero."""
    floating = [tensor for tensor in tensors if is_floating(tensor) and tensor.numel()]
    return bool(floating) and not any(bool(tensor.any()) for tensor in floating)


# -- times


class Times(NamedTuple):
    """How many times as fast as fp32 a way is: calls in turns, in one process; the ratio of each round."""

    wall: float
    """Median of the ratios of the rounds."""
    quartiles: tuple[float, float]
    cpu: float
    """The same of the processor time, without what other programs used meanwhile."""
    rounds: int


def times(model: nn.Module, inputs: Inputs, precision: str, keep: Sequence[str] = ()) -> Times:
    """Rounds of fp32 and ``precision`` for about :data:`SECONDS`; of each the fastest of three calls counts."""
    pair = [(in_precision(model, name, kept), name) for name, kept in (("fp32", ()), (precision, keep))]
    ratios: list[tuple[float, float]] = []
    for made, name in pair:
        call(made, inputs, name)
    started = time.perf_counter()
    while len(ratios) < 5 or (len(ratios) < 40 and time.perf_counter() - started < SECONDS):
        (wall_32, cpu_32), (wall, cpu) = (seconds(made, inputs, name) for made, name in pair)
        ratios.append((wall_32 / wall, cpu_32 / cpu))
    low, middle, high = statistics.quantiles([ratio for ratio, _ in ratios], n=4)
    return Times(middle, (low, high), statistics.median(ratio for _, ratio in ratios), len(ratios))


def seconds(made: nn.Module, inputs: Inputs, precision: str) -> tuple[float, float]:
    """The time and the processor time of the fastest of three calls."""
    found = [timed(made, inputs, precision) for _ in range(3)]
    return min(wall for _, wall, _ in found), min(cpu for *_, cpu in found)


# -- what fails, and where


class Failure(NamedTuple):
    """A function that raised on 16-bit inputs, and did not in fp32."""

    name: str
    line: str
    """``whitening.py:23``: the innermost line outside torch."""
    message: str
    """First line."""


class Mending(TorchFunctionMode):
    """Repeats each function that raises with its inputs in fp32, casts the result back, and notes it."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.failures: list[Failure] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            output = func(*args, **kwargs)
        except Exception as error:
            try:
                output = func(*widened(args, self.low), **widened(kwargs, self.low))
            except Exception:
                raise error from None
            name = getattr(func, "__name__", str(func))
            lines = str(error).strip().splitlines() or [""]
            self.failures.append(Failure(name, line_outside_torch(), lines[0]))
            output = narrowed(output, self.low)
            if name.endswith("_") and not name.endswith("__"):
                return args[0].copy_(output)
            return output
        of_complex = any(tensor.is_complex() for tensor in tensors_in([args, kwargs]))
        return narrowed(output, self.low) if of_complex else output


def line_outside_torch() -> str:
    """``file.py:line`` of the innermost caller that is neither here nor in torch."""
    inside = (f"{Path(torch.__file__).parent}/", __file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inside):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def failures(model: nn.Module, inputs: Inputs, precision: str) -> tuple[list[Failure], str]:
    """Everything that raises in one call, each mended so that the next is found; and what ended it, if it ended early."""
    made, mending = in_precision(model, precision), Mending(dtype_of(precision))
    try:
        with mending:
            call(made, inputs, precision)
    except Exception as error:
        return mending.failures, described(error)
    return mending.failures, ""


def first_nonfinite(model: nn.Module, inputs: Inputs, precision: str) -> tuple[str, int]:
    """The first module to end with NaN or Inf in its output but none in its inputs, and the number of these values."""
    made = in_precision(model, precision)
    names = {module: name for name, module in made.named_modules()}
    found: list[tuple[str, int]] = []

    def bad(value: Any) -> int:
        return sum(int((~tensor.isfinite()).sum()) for tensor in tensors_in(value) if is_floating(tensor))

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not bad([args, kwargs]) and (number := bad(output)):
            found.append((names[module], number))

    for module in names:
        module.register_forward_hook(note, with_kwargs=True)
    call(made, inputs, precision)
    return found[0] if found else ("", 0)
