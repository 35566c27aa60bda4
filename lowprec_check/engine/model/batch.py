"""One batch of tensors from what people call inputs: a data loader, a dataset, NumPy arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lowprec_check.errors import UsageError, message_of


class Batch(NamedTuple):
    """Inputs, and how they were made from what was given."""

    inputs: Any
    notes: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """The same as code."""


def take_batch(given: Any, forward: Callable[..., Any]) -> Batch:
    """The inputs of a call of ``forward``.

    Of a data loader or dataset, the first batch is taken, and of that as many elements as ``forward`` requires: the
    others are usually targets. NumPy arrays become tensors, in fp32 if they are in fp64.
    """
    batch = Batch(given)
    if isinstance(given, (DataLoader, Dataset)):
        batch = _first_batch(given, forward)
    return _with_tensors(batch)


def _first_batch(given: DataLoader[Any] | Dataset[Any], forward: Callable[..., Any]) -> Batch:
    if isinstance(given, DataLoader):
        first, what, code = _first(given, "DataLoader"), "a DataLoader: its first batch", "next(iter(inputs))"
    else:
        item = _first(given, "Dataset") if isinstance(given, IterableDataset) else given[0]
        first, what = default_collate([item]), "a Dataset: its first item"
        code = f"torch.utils.data.default_collate([{'next(iter(inputs))' if isinstance(given, IterableDataset) else 'inputs[0]'}])"
    parameters = list(inspect.signature(forward).parameters.values())
    if isinstance(first, Mapping):
        names = _accepted(first, parameters)
        if len(names) == len(first):
            return Batch(first, (f"`inputs` is {what} was used",), (f"inputs = {code}",))
        left_out = ", ".join(repr(name) for name in first if name not in names)
        note = f"`inputs` is {what} was used, without {left_out}, which forward does not accept"
        picked = "{name: batch[name] for name in " + repr(names) + "}"
        return Batch({name: first[name] for name in names}, (note,), (f"batch = {code}", f"inputs = {picked}"))
    if not isinstance(first, (list, tuple)):
        return Batch(first, (f"`inputs` is {what} was used",), (f"inputs = {code}",))
    required = _required(parameters)
    if required in (0, len(first)) or required > len(first):
        return Batch(tuple(first), (f"`inputs` is {what} was used",), (f"inputs = {code}",))
    note = f"`inputs` is {what} was used, {required} of its {len(first)} elements: forward requires no more"
    if required == 1:
        return Batch(first[0], (note,), (f"inputs = {code}[0]",))
    return Batch(tuple(first[:required]), (note,), (f"inputs = {code}[:{required}]",))


def _first(given: Any, what: str) -> Any:
    for item in given:
        return item
    raise UsageError(f"`inputs` is a {what} without any item.", "Give it data, or make `inputs` a tensor.")


def _accepted(batch: Mapping[str, Any], parameters: list[inspect.Parameter]) -> list[str]:
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return list(batch)
    names = {parameter.name for parameter in parameters}
    return [name for name in batch if name in names]


def _required(parameters: list[inspect.Parameter]) -> int:
    """Number of positional parameters without a default; 0 if ``forward`` takes any number."""
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)


def _with_tensors(batch: Batch) -> Batch:
    given = batch.inputs
    if _is_array(given):
        tensor = _as_tensor(given)
        code = "torch.from_numpy(inputs)" + (".float()" if given.dtype.name == "float64" else "")
        return Batch(tensor, (*batch.notes, _array_note(given)), (*batch.setup, f"inputs = {code}"))
    items = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    arrays = [item for item in items if _is_array(item)]
    if not arrays:
        return batch
    notes = (*batch.notes, _array_note(*arrays))
    convert = "torch.as_tensor(x).float()" if all(a.dtype.name == "float64" for a in arrays) else "torch.as_tensor(x)"
    if isinstance(given, Mapping):
        code = f"inputs = {{name: {convert} for name, x in inputs.items()}}"
        return Batch({name: _as_tensor(item) for name, item in given.items()}, notes, (*batch.setup, code))
    return Batch(tuple(map(_as_tensor, given)), notes, (*batch.setup, f"inputs = [{convert} for x in inputs]"))


def _array_note(*arrays: Any) -> str:
    wide = ", from fp64 to fp32" if any(array.dtype.name == "float64" for array in arrays) else ""
    return f"NumPy arrays in `inputs` were converted to tensors{wide}"


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _as_tensor(value: Any) -> Any:
    if not _is_array(value):
        return value
    try:
        tensor = torch.as_tensor(value.copy())
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"A NumPy array in `inputs` cannot become a tensor: {message_of(error)}",
            "Convert it in your file, or make `inputs` tensors.",
        ) from None
    return tensor.float() if tensor.dtype == torch.float64 else tensor
