"""The plain part of a run: the model as the user would run it, without instruments. Status, time and memory come from here."""

from __future__ import annotations

import math
import re
import statistics
import threading
import time
import warnings
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.output_comparison import compare_outputs
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import call_model, traceback_line
from lowprec_check.engine.model import device as devices
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import WithLoss
from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import ErrorStats, ExceptionInfo, Status

SAMPLES = 7
MANY_SAMPLES, MANY_SECONDS = 50, 0.3
"""More samples for short calls, whose times vary more."""
_FALLBACK = re.compile(r"fall(ing|s)?[ -]?back.*cpu|fallback from \w+ to cpu", re.IGNORECASE)


class PlainResult(Struct, frozen=True, kw_only=True):
    """The result of the plain part, without the output; a worker sends it."""

    status: Status
    exception: ExceptionInfo | None = None
    output_error: ErrorStats | None = None
    seconds: float = 0.0
    """Of the first call."""
    random: bool = False
    """Whether the model used random numbers."""
    notes: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    loss: float | None = None
    output_is_zero: bool = False


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, detached, as plain tensors; Python numbers become tensors with one element."""
    return [tensor.detach().as_subclass(Tensor) for _, tensor in leaves(output, numbers=True)]


def reraise_interrupt(error: BaseException) -> None:
    """Reraise Ctrl-C. Python delivers it only to the main thread, so in a worker's thread the model itself raised it."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def run_once(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> tuple[Any, float]:
    """One seeded call on fresh inputs: the output and its seconds."""
    seed_everything(seed)
    inputs, named = ready.inputs(args, kwargs)
    with ready.context():
        return devices.timed(ready.device, lambda: call_model(ready.call, inputs, named))


def run_plain(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int,
    tolerance: float | None = None,
    reference: list[Tensor] | None = None,
    compare_random: bool = False,
) -> tuple[PlainResult, list[Tensor] | None]:
    """The first call: its result, and the leaves of the output, ``None`` if it raised.

    ``compare_random``: compare with ``reference`` even if the model drew random numbers.
    """
    seed_everything(seed)
    state_before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            output, seconds = run_once(ready, args, kwargs, seed)
        except BaseException as error:
            reraise_interrupt(error)
            return PlainResult(status="error", exception=describe_error(error, ready.model)), None
    drew = not torch.equal(state_before, torch.get_rng_state())
    outputs = output_tensors(output)
    fallbacks = tuple(dict.fromkeys(first_line(str(w.message)) for w in caught if _FALLBACK.search(str(w.message))))
    floating = [tensor for tensor in outputs if is_float(tensor)]
    found = PlainResult(
        status="ok",
        seconds=seconds,
        random=drew,
        fallbacks=fallbacks,
        loss=_loss(output),
        output_is_zero=bool(floating) and not any(bool(tensor.any()) for tensor in floating),
    )
    if reference is not None and (compare_random or not drew):
        found = _judge(found, outputs, reference, tolerance)
    return found, outputs


def _judge(plain: PlainResult, outputs: list[Tensor], reference: list[Tensor], tolerance: float | None) -> PlainResult:
    """Return ``plain`` with the status and error of ``outputs`` compared with ``reference``."""
    compared = compare_outputs([tensor.cpu() for tensor in outputs], reference)
    status: Status = "ok"
    if compared.nonfinite:
        status = "nonfinite"
    elif tolerance is not None and not compared.rel_l2 <= tolerance:
        status = "inaccurate"
    notes = (*plain.notes, compared.note) if compared.note else plain.notes
    return msgspec.structs.replace(plain, status=status, output_error=compared.error, notes=notes)


def _loss(output: Any) -> float | None:
    if isinstance(output, WithLoss):
        value = float(output.loss)
        return value if math.isfinite(value) else None
    return None


def describe_error(error: BaseException, model: torch.nn.Module) -> ExceptionInfo:
    """Type and message of the exception, with the module and the user's line that raised it."""
    return ExceptionInfo(
        type=type(error).__name__,
        message=first_line(str(error)),
        module=_module_of_traceback(error, model),
        source=traceback_line(error.__traceback__),
    )


def _module_of_traceback(error: BaseException, model: torch.nn.Module) -> str | None:
    names = {id(module): name for name, module in model.named_modules()}
    found, traceback = None, error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = names.get(id(owner), found) if owner is not None else found
        traceback = traceback.tb_next
    return found


def measure_latency(
    ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int, first: float, seconds: float
) -> float:
    """Median milliseconds of at least ``SAMPLES`` calls, or as many as fit in ``seconds``; else the time of the first call."""
    samples: list[float] = []
    started = time.monotonic()

    def may_continue() -> bool:
        elapsed = time.monotonic() - started
        if elapsed + (samples[-1] if samples else first) > seconds:
            return False
        return len(samples) < SAMPLES or (elapsed < MANY_SECONDS and len(samples) < MANY_SAMPLES)

    while may_continue():
        samples.append(run_once(ready, args, kwargs, seed)[1])
    return statistics.median(samples or [first]) * 1e3
