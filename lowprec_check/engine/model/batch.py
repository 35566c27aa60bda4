"""Batches of tensors from what people call inputs (a data loader, a dataset, an iterator, NumPy arrays), and those to calibrate on."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.model.inputs import Arguments, accepts, as_call, call_with_number, is_function
from lowprec_check.engine.model.user_module import call_function, call_user_code
from lowprec_check.errors import UsageError, first_line, message_of, type_name
from lowprec_check.schema.axes import Call

# -- Batches of tensors from what people call inputs: a data loader, a dataset, an iterator, NumPy arrays


class NoBatchError(UsageError):
    """There is no batch of that number, or only one: the inputs are fixed."""


class Batch(NamedTuple):
    """Inputs, and how they were made from what was given."""

    inputs: Any
    notes: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """The same as code."""
    targets: tuple[Any, ...] = ()
    """The elements of the batch that ``forward`` does not require."""
    code: str = ""
    """Code for the whole batch, where there are targets."""
    targets_code: str = ""
    """Code for the targets, from ``batch``."""


def take_batch(given: Any, forward: Callable[..., Any]) -> Batch:
    """The inputs of a call of ``forward``.

    Of a data loader, dataset or iterator, the first batch is taken, and of that as many elements as ``forward`` requires:
    the others are usually targets. NumPy arrays become tensors, in fp32 if they are in fp64. Raises :class:`UsageError` if
    there is no batch, or an array of a dtype that torch lacks.
    """
    batch = Batch(given)
    if isinstance(given, (DataLoader, Dataset, Iterator)):
        first, what, code = _first(given)
        batch = _needed(first, f"`inputs` is {what} was used", code, forward)
    return _with_tensors(batch)


# -- several batches


class BatchMaker:
    """Makes the inputs of batch 0, 1, 2, … from what the user gives; :func:`take_batch` accepts them.

    A copy of a pickled one is ``None``: workers get their batch, and an iterator cannot be sent to them.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._taken = 1
        """Items taken from an iterator: the first one by :func:`take_batch`."""

    @classmethod
    def of(cls, given: Any) -> BatchMaker | None:
        """For a function, or for what has several batches; ``None`` for inputs that are fixed."""
        several = is_function(given) or isinstance(given, (DataLoader, Dataset, Iterator))
        return cls(given) if several else None

    def __call__(self, index: int) -> Any:
        """The inputs of a batch; raises :class:`UsageError` if there are fewer."""
        given = self._given
        if is_function(given):
            made = call_with_number(given, index)
            return made if index == 0 or accepts(given, index) else _item(made, index, index)
        if index == 0:
            return given
        if not isinstance(given, Iterator):
            return _item(given, index, index)
        position, self._taken = max(0, index - self._taken), index + 1
        return _item(given, position, index)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _item(given: Any, position: int, index: int) -> Any:
    """The item of ``given`` at ``position``, as an iterator over it, which is batch ``index``; ``given`` if it has no items."""
    if not isinstance(given, (DataLoader, Dataset, Iterator)):
        return given
    what = f"Taking batch {index} from `inputs`"
    found = call_user_code(what, lambda: next(itertools.islice(_batches(given), position, None), _NOTHING))
    if found is _NOTHING:
        raise NoBatchError(
            f"`inputs` has no batch {index}; the first is batch 0.", "Give more batches, or ask for fewer."
        )
    return iter([found])


def _batches(given: DataLoader[Any] | Dataset[Any] | Iterator[Any]) -> Iterator[Any]:
    if isinstance(given, DataLoader):
        return iter(_in_this_process(given))
    return (default_collate([item]) for item in _items(given)) if isinstance(given, Dataset) else given


# -- loaders


_NOTHING = object()


def _first(given: DataLoader[Any] | Dataset[Any] | Iterator[Any]) -> tuple[Any, str, str]:
    """The first batch, what it was taken from, and the code that takes it."""
    source: Iterable[Any]
    if isinstance(given, DataLoader):
        source, what, code = _in_this_process(given), "a DataLoader: its first batch", "next(iter(inputs))"
    elif isinstance(given, Iterator):
        source, what, code = given, "an iterator: its first item", "next(inputs)"
    elif isinstance(given, IterableDataset):
        source, what, code = given, "a Dataset: its first item", "default_collate([next(iter(inputs))])"
    else:
        source, what, code = _items(given), "a Dataset: its first item", "default_collate([inputs[0]])"
    first = call_user_code("Taking a batch from `inputs`", lambda: next(iter(source), _NOTHING))
    if first is _NOTHING:
        raise UsageError("`inputs` is empty: it has no batch.", "Check what it loads.")
    if isinstance(given, Dataset):
        first = call_user_code("Making a batch of an item of `inputs`", lambda: default_collate([first]))
        code = f"torch.utils.data.{code}"
    return first, what, code


def _in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of ``loader`` that starts no processes and threads: one batch is wanted."""
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
    return alone


def _items(dataset: Dataset[Any]) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from dataset
        return
    for index in range(len(dataset)) if isinstance(dataset, Sized) else itertools.count():
        yield dataset[index]


def _needed(first: Any, note: str, code: str, forward: Callable[..., Any]) -> Batch:
    """What ``forward`` needs of the batch ``first``, which ``code`` makes."""
    parameters = _parameters(forward)
    if isinstance(first, Mapping):
        return _named(first, note, code, parameters)
    if not isinstance(first, (list, tuple)):
        return Batch(first, (note,), (f"inputs = {code}",))
    required = _required(parameters)
    if required in (0, len(first)) or required > len(first):
        return Batch(tuple(first), (note,), (f"inputs = tuple({code})",))
    note = f"{note}, {required} of its {len(first)} elements: forward requires no more"
    if required == 1 and isinstance(first[0], torch.Tensor):
        return Batch(first[0], (note,), (f"inputs = {code}[0]",), tuple(first[1:]), code, "tuple(batch[1:])")
    setup, rest = (f"inputs = tuple({code}[:{required}])",), tuple(first[required:])
    return Batch(tuple(first[:required]), (note,), setup, rest, code, f"tuple(batch[{required}:])")


def _named(first: Mapping[str, Any], note: str, code: str, parameters: list[inspect.Parameter]) -> Batch:
    """The values of a batch whose names ``forward`` accepts; the whole batch if it accepts none and requires one argument."""
    names = _accepted(first, parameters)
    if len(names) == len(first):
        return Batch(first, (note,), (f"inputs = {code}",))
    if not names and _required(parameters) == 1:
        return Batch((first,), (f"{note} as the argument",), (f"inputs = ({code},)",))
    left_out = ", ".join(repr(name) for name in first if name not in names)
    note = f"{note}, without {left_out}, which forward does not accept"
    picked = "{name: batch[name] for name in " + repr(names) + "}"
    others = [name for name in first if name not in names]
    return Batch(
        {name: first[name] for name in names},
        (note,),
        (f"batch = {code}", f"inputs = {picked}"),
        tuple(first[name] for name in others),
        targets_code=f"tuple(batch[name] for name in {others!r})",
    )


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return []


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


# -- arrays


def _with_tensors(batch: Batch) -> Batch:
    """The batch with tensors in place of NumPy arrays, at any depth."""
    given = batch.inputs
    arrays = [leaf for value in (given.values() if isinstance(given, Mapping) else [given]) for leaf in _arrays(value)]
    if not arrays:
        return batch
    inputs = {key: tree_map(_as_tensor, value) for key, value in given.items()} if isinstance(given, Mapping) else None
    if inputs is None:
        inputs = tree_map(_as_tensor, given)
    wide = ", from fp64 to fp32" if any(_is_wide(array) for array in arrays) else ""
    note = f"NumPy arrays in `inputs` were converted to tensors{wide}"
    return batch._replace(inputs=inputs, notes=(*batch.notes, note), setup=(*batch.setup, *_conversion(given, arrays)))


def _conversion(given: Any, arrays: list[Any]) -> list[str]:
    """The code that converts the ``arrays`` in ``given``, each by its place if none lies deeper."""
    if _is_array(given):
        return [f"inputs = {_array_code('inputs', given)}"]
    places = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
    at = {key: value for key, value in places.items() if _is_array(value)}
    if len(at) < len(arrays):
        convert = _array_code("x", *arrays)
        return ["import numpy", f"inputs = tree_map_only(numpy.ndarray, lambda x: {convert}, inputs)"]
    if isinstance(given, Mapping):
        code = {key: f"inputs[{json.dumps(key)}]" for key in at}
        return [f"{code[key]} = {_array_code(code[key], array)}" for key, array in at.items()]
    items = [_array_code(f"inputs[{key}]", at[key]) if key in at else f"inputs[{key}]" for key in places]
    listed = ", ".join(items)
    return [f"inputs = [{listed}]" if isinstance(given, list) else f"inputs = ({listed}{',' * (len(items) == 1)})"]


def _array_code(name: str, *arrays: Any) -> str:
    """Code that makes a tensor of the array ``name``, which is one of ``arrays``."""
    backwards = any(stride < 0 for array in arrays for stride in array.strides)  # torch has no such tensors
    code = f"torch.from_numpy({name}{'.copy()' * backwards})"
    if all(_is_wide(array) for array in arrays):
        return f"{code}.float()"
    return f'{code}.float() if {name}.dtype == "float64" else {code}' if any(map(_is_wide, arrays)) else code


def _arrays(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if _is_array(leaf)]


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_wide(array: Any) -> bool:
    return bool(array.dtype.name == "float64")


def _as_tensor(value: Any) -> Any:
    """The tensor with the values of an array; any other value as it is."""
    if not _is_array(value):
        return value
    try:
        tensor = torch.from_numpy(value.copy())
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"A NumPy array in `inputs` cannot become a tensor: {first_line(message_of(error))}",
            "Convert it, for example with array.astype('float32').",
        ) from None
    return tensor.float() if _is_wide(value) else tensor


# -- The inputs that a quantized model is calibrated on, from the user's file or the API

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
