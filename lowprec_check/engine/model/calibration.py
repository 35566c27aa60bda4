"""The inputs that a quantized model is calibrated on, from the user's file or the API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.model.inputs import Arguments, as_call, is_function
from lowprec_check.engine.model.user_module import call_function, call_user_code
from lowprec_check.errors import UsageError, type_name
from lowprec_check.schema.axes import Call

Calibration = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches, each in the form of the inputs, or a function that returns or yields them."""

PASTE_CALIBRATION = """Make `calibration` a function that yields batches like `inputs`:

    def calibration():
        for batch in range(8):
            yield torch.randn(1, 3, 224, 224)"""


def check_calibration(given: Any, name: str) -> Any:
    """``given``; raises :class:`UsageError` unless it is ``None``, a function, or batches that can be read more than once."""
    if given is None or (is_function(given) and not isinstance(given, nn.Module)):
        return given
    if isinstance(given, Iterator):
        raise UsageError(f"{name} can be read only once, and several runs need it.", PASTE_CALIBRATION)
    if not isinstance(given, Iterable) or isinstance(given, (Tensor, Mapping, str, bytes)):
        raise UsageError(f"{name} has type {type_name(given)}, not a function or a list of batches.", PASTE_CALIBRATION)
    return given


def calibration_calls(given: Any, inputs: Arguments, forward: Callable[..., Any]) -> Iterator[Call]:
    """Yield a call of ``forward`` for each batch; raises :class:`UsageError` for one that is not like ``inputs``, or if none come."""
    batches = call_function("calibration", given) if is_function(given) else given
    if not isinstance(batches, Iterable) or isinstance(batches, (Tensor, Mapping, str, bytes)):
        raise UsageError(
            f"`calibration` returned an object of type {type_name(batches)}, not a list of batches.", PASTE_CALIBRATION
        )
    source, number = iter(batches), 0
    while (batch := call_user_code("Reading `calibration`", lambda: next(source, _END))) is not _END:
        number += 1
        yield _call(number, batch, inputs, forward)
    if not number:
        raise UsageError("`calibration` is empty: it has no batch.", PASTE_CALIBRATION)


_END = object()


def _call(number: int, batch: Any, inputs: Arguments, forward: Callable[..., Any]) -> Call:
    """The call for ``batch``; raises :class:`UsageError` unless its tensors are where those of ``inputs`` are."""
    found = as_call(batch, forward)
    expected, places = (sorted(path for path, _ in leaves((call.args, call.kwargs))) for call in (inputs, found))
    if found.form != inputs.form or places != expected:
        raise UsageError(
            f"Batch {number} of `calibration` has type {type_name(batch)} with {_count(places)}; "
            f"the inputs are {_count(expected)}, given by {inputs.form}.",
            "Yield batches in the form of `inputs`, without targets.",
        )
    return found.args, found.kwargs


def _count(places: list[str]) -> str:
    return f"{len(places)} tensor{'' if len(places) == 1 else 's'}"
