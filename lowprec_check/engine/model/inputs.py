"""Makes arguments of calls from tensors, loaders, datasets, functions, NumPy arrays and shapes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lowprec_check.engine.model.target_spec import input_shapes
from lowprec_check.engine.model.user_code import call_user_code, parameters_of, required_arguments
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.torchkit.pytree import leaves, map_tensors, tensors_by_code

PASTE_INPUTS = """Add to the file (a tensor, a tuple, a dict of keyword arguments, or a function that returns one):

    import torch
    torch.manual_seed(0)
    inputs = torch.randn(1, 3, 224, 224)

or pass shapes: --inputs 1x3x224x224, or --inputs input_ids=1x128:int64"""

_NOTHING = object()


# -- The arguments of a call


class Arguments(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: str  # the call as code, with `inputs` as they were given


def as_call(inputs: Any, forward: Callable[..., Any]) -> Arguments:
    """The arguments of a call of ``forward``: a tensor, tuple, list, or mapping of keywords."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs), "model(**inputs)")
    # A list or named tuple (`PackedSequence`) is one argument if `forward` accepts it only so
    is_one = type(inputs) is not tuple and accepts(forward, inputs)
    if isinstance(inputs, (tuple, list)) and (accepts(forward, *inputs) or not is_one):
        return Arguments(tuple(inputs), {}, "model(*inputs)")
    return Arguments((inputs,), {}, "model(inputs)")


def accepts(forward: Callable[..., Any], *args: Any) -> bool:
    """Whether ``forward`` takes so many positional arguments; true if that is unknown."""
    try:
        inspect.signature(forward).bind(*args)
    except TypeError:
        return not callable(forward)
    except ValueError:
        pass
    return True


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; raises :class:`UsageError` if a positional one has none."""
    signature, bound = inspect.signature(forward), dict[str, Any]()
    with contextlib.suppress(TypeError, ValueError):
        bound = signature.bind(*args, **kwargs).arguments
    kinds = {name: signature.parameters[name].kind for name in bound}
    if not bound or not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}.isdisjoint(
        kinds.values()
    ):
        problem = "The model is called with positional and keyword arguments that cannot all be named."
        raise UsageError(problem, PASTE_INPUTS)
    by_name = dict[str, Any]()
    for name, value in bound.items():
        by_name |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    return by_name


def as_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of ``forward`` is made with, in a form in which inputs can be given."""
    if args and kwargs:
        return bind(forward, args, kwargs)
    if len(args) == 1 and isinstance(args[0], Tensor):
        return args[0]
    return args or kwargs


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """``(1, 3, 224, 224)`` for each tensor, with its dtype if that is not fp32."""
    described = []
    for path, tensor in (*leaves(args), *leaves(kwargs)):
        dtype = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype)[6:]}"
        name = "" if path.isdigit() else f"{path}="
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        described.append(f"{name}{shape}{dtype}")
    return described


# -- The names of tensors in the arguments


def named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], form: str) -> dict[str, Tensor]:
    """The tensors of a call by the names that its user has for them, ``form`` being its code:
    ``timestep`` for a keyword argument, else ``inputs`` or ``inputs[1]``; ``cond["mask"]`` inside.
    """
    by_keyword = [pair for name, value in kwargs.items() for pair in tensors_by_code(value, name)]
    if form == "model(inputs)" and len(args) == 1:
        return dict([*tensors_by_code(args[0], "inputs"), *by_keyword])
    return dict([*tensors_by_code(args, "inputs"), *by_keyword])


def tensors_named(
    names: Collection[str], args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[str] = ()
) -> list[Tensor]:
    """The tensors that :func:`named_tensors` gives ``names`` to, whatever the form of the call.

    ``parameters`` are those of the function called: an argument that the names give by keyword may
    come by position, and the other way round.
    """
    if not names:
        return []
    by_place = {**kwargs}
    for position, value in enumerate(args):
        by_place[f"inputs[{position}]"] = value
    # A tensor that is the only input has the name `inputs`; `inputs[0]` inside it are its elements
    if len(args) == 1:
        by_place["inputs"] = args[0]
    for position, name in enumerate(parameters):
        by_place.setdefault(name, by_place.get(f"inputs[{position}]"))
        by_place.setdefault(f"inputs[{position}]", kwargs.get(name))
    named = (pair for place, value in by_place.items() for pair in tensors_by_code(value, place))
    return [tensor for name, tensor in named if name in names]


# -- Batches


class NoBatchError(UsageError):
    """There is no batch of that number, or only one: the inputs are fixed."""


class Batch(NamedTuple):
    """Inputs, and how they were made from what was given."""

    inputs: Any
    notes: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # the same as code
    targets: tuple[Any, ...] = ()  # the elements of the batch that `forward` does not require
    code: str = ""  # code for the whole batch, where there are targets
    targets_code: str = ""  # code for the targets, from `batch`


def take_batch(source: Any, forward: Callable[..., Any]) -> Batch:
    """The inputs of a call of ``forward``.

    Of a data loader, dataset or iterator, the first batch is taken, and of that as many elements as
    ``forward`` requires: the others are usually targets. NumPy arrays become tensors, fp64 ones in
    fp32. Raises :class:`UsageError` if there is no batch, or an array of a dtype that torch lacks.
    """
    if not isinstance(source, (DataLoader, Dataset, Iterator)):
        return _with_tensors(Batch(source))
    if isinstance(source, DataLoader):
        what, code = "a DataLoader: its first batch", "next(iter(inputs))"
    elif isinstance(source, Iterator):
        what, code = "an iterator: its first item", "next(inputs)"
    else:
        item = "next(iter(inputs))" if isinstance(source, IterableDataset) else "inputs[0]"
        what, code = "a Dataset: its first item", f"torch.utils.data.default_collate([{item}])"
    first = call_user_code("Taking a batch from `inputs`", lambda: next(_items(source), _NOTHING))
    if first is _NOTHING:
        raise UsageError("`inputs` is empty: it has no batch.", "Check what it loads.")
    if isinstance(source, Dataset):
        first = call_user_code("Making a batch of an item of `inputs`", lambda: default_collate([first]))
    return _with_tensors(_needed(first, f"`inputs` is {what} was used", code, forward))


class BatchMaker:
    """Makes the inputs of batch 0, 1, 2, … in a form that :func:`take_batch` accepts."""

    def __init__(self, source: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._source, self._call = source, call
        self._taken: list[Any] = []
        """Items of an iterator after the first, kept since several runs of a process need them."""
        self._pass: tuple[int, Iterator[Any]] | None = None
        """A pass over a loader or dataset, and the number of the batch that it gives next."""

    @classmethod
    def of(cls, source: Any, call: Callable[[Callable[[], Any]], Any] = lambda make: make()) -> BatchMaker | None:
        """``None`` for a ``source`` with one batch only; ``call`` calls the user's code."""
        if is_function(source) or isinstance(source, (DataLoader, Dataset, Iterator)):
            return cls(source, call)
        return None

    @property
    def draws(self) -> bool:
        """Whether a function makes the inputs, which are not the next batches of something."""
        return is_function(self._source)

    def __call__(self, index: int) -> Any:
        """The inputs of a batch; raises :class:`UsageError` if there are fewer."""
        return self._call(lambda: self._make(index))

    def _make(self, index: int) -> Any:
        source = self._source
        if is_function(source):
            takes_number = _takes_number(source)
            if takes_number and (index or not accepts(source)):
                source = source(index)
            else:
                source = source()
            if takes_number:
                return source
        if index == 0 or not isinstance(source, (DataLoader, Dataset, Iterator)):
            return source

        def take() -> Any:
            # An iterator gives each item once, and runs may change their inputs in place
            if source is self._source and isinstance(source, Iterator):
                self._taken += itertools.islice(source, max(0, index - len(self._taken)))
                if index <= len(self._taken):
                    return map_tensors(self._taken[index - 1], torch.clone)
                return _NOTHING
            # A loader that is asked for batches in order is passed over once
            if source is self._source and self._pass is not None and self._pass[0] == index:
                items = self._pass[1]
            else:
                items = itertools.islice(_items(source), index, None)
            item = next(items, _NOTHING)
            self._pass = None
            if source is self._source:
                self._pass = (index + 1, items)
            if item is not _NOTHING and isinstance(source, Dataset):
                return default_collate([item])
            return item

        batch = call_user_code(f"Taking batch {index} from `inputs`", take)
        if batch is _NOTHING:
            problem = f"`inputs` has no batch {index}; the first is batch 0."
            raise NoBatchError(problem, "Give more batches, or ask for fewer.")
        return iter([batch])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Workers get their batch, and an iterator cannot be sent to them
        return type(None), ()


_NUMBERS = ("index", "number", "seed", "step")
"""Names of arguments that are the number of a batch whatever their default value."""


def _takes_number(function: Callable[..., Any]) -> bool:
    """Whether a function that returns inputs takes the number of the batch first."""
    if not accepts(function, 0):
        return False
    first = next(iter(parameters_of(function).values()), None)
    if first is None or first.default is first.empty or first.name in _NUMBERS:
        return True
    # One with another default value is rather a size, a device or a scale
    return type(first.default) is int and first.default == 0


def is_function(value: Any) -> bool:
    """Whether inputs are given as a function that returns them."""
    return callable(value) and not isinstance(value, (Tensor, Mapping))


def call_code(inputs: Any) -> tuple[str, ...]:
    """The line that makes the first batch, if ``inputs`` is a function."""
    if is_function(inputs):
        return (f"inputs = inputs({'' if accepts(inputs) else 0})",)
    return ()


def _items(source: DataLoader[Any] | Dataset[Any] | Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader, the items of others."""
    if isinstance(source, DataLoader):
        # A copy that starts no processes and threads, since one batch is needed
        source = copy.copy(source)
        vars(source).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        numbers = range(len(source)) if isinstance(source, Sized) else itertools.count()
        return (source[number] for number in numbers)
    return iter(source)


def _needed(first: Any, note: str, code: str, forward: Callable[..., Any]) -> Batch:
    """What ``forward`` needs of the batch ``first``, which ``code`` makes."""
    parameters = parameters_of(forward)
    kinds = {parameter.kind for parameter in parameters.values()}
    required = required_arguments(forward)  # 0: as many as there are
    # A mapping, such as a batch of a tokenizer: the names that are parameters
    if isinstance(first, Mapping):
        accepted = first if inspect.Parameter.VAR_KEYWORD in kinds else parameters
        names, others = [name for name in first if name in accepted], [name for name in first if name not in accepted]
        if not others:
            return Batch(first, (note,), (f"inputs = {code}",))
        if not names and required == 1:
            return Batch((first,), (f"{note} as the argument",), (f"inputs = ({code},)",))
        picked = "{name: batch[name] for name in " + repr(names) + "}"
        return Batch(
            {name: first[name] for name in names},
            (f"{note}, without {', '.join(map(repr, others))}, which forward does not accept",),
            (f"batch = {code}", f"inputs = {picked}"),
            tuple(first[name] for name in others),
            targets_code=f"tuple(batch[name] for name in {others!r})",
        )
    if not isinstance(first, (list, tuple)):
        return Batch(first, (note,), (f"inputs = {code}",))
    if required in (0, len(first)) or required > len(first):
        return Batch(tuple(first), (note,), (f"inputs = tuple({code})",))
    # More elements than are required: the rest are usually labels
    inputs: Any = tuple(first[:required])
    setup = f"inputs = tuple({code}[:{required}])"
    if required == 1 and isinstance(first[0], torch.Tensor):
        inputs, setup = first[0], f"inputs = {code}[0]"
    note = f"{note}, {required} of its {len(first)} elements: forward requires no more"
    return Batch(inputs, (note,), (setup,), tuple(first[required:]), code, f"tuple(batch[{required}:])")


# -- NumPy arrays


def _with_tensors(batch: Batch) -> Batch:
    """The batch with tensors in place of NumPy arrays, at any depth."""
    inputs = batch.inputs
    if isinstance(inputs, Mapping):  # which need not be a pytree
        inputs = dict(inputs)
    arrays = [leaf for leaf in tree_leaves(inputs) if _is_array(leaf)]
    if not arrays:
        return batch
    wide = ", from fp64 to fp32" if any(map(_is_wide, arrays)) else ""
    note = f"NumPy arrays in `inputs` were converted to tensors{wide}"
    setup = (*batch.setup, *_conversion_code(inputs, arrays))
    return batch._replace(inputs=tree_map(_as_tensor, inputs), notes=(*batch.notes, note), setup=setup)


def _conversion_code(inputs: Any, arrays: list[Any]) -> list[str]:
    """Code that converts the ``arrays`` in ``inputs``, each by its place if none is deeper."""
    if _is_array(inputs):
        return [f"inputs = {_array_code('inputs', inputs)}"]
    places = inputs
    if not isinstance(inputs, dict):
        places = dict(enumerate(inputs))
    at = {key: value for key, value in places.items() if _is_array(value)}
    # Some lie deeper
    if len(at) < len(arrays):
        convert = _array_code("x", *arrays)
        return ["import numpy", f"inputs = tree_map_only(numpy.ndarray, lambda x: {convert}, inputs)"]
    if isinstance(inputs, dict):
        code = {key: f"inputs[{json.dumps(key)}]" for key in at}
        return [f"{code[key]} = {_array_code(code[key], array)}" for key, array in at.items()]
    # A tuple cannot be changed in place, so it is made anew
    items = {key: f"inputs[{key}]" for key in places}
    items |= {key: _array_code(items[key], array) for key, array in at.items()}
    listed = ", ".join(items.values())
    if isinstance(inputs, list):
        return [f"inputs = [{listed}]"]
    return [f"inputs = ({listed}{',' * (len(items) == 1)})"]


def _array_code(name: str, *arrays: Any) -> str:
    """Code that makes a tensor of the array ``name``, which is one of ``arrays``."""
    backwards = any(stride < 0 for array in arrays for stride in array.strides)  # torch has no such tensors
    code = f"torch.from_numpy({name}{'.copy()' * backwards})"
    if all(map(_is_wide, arrays)):
        return f"{code}.float()"
    if any(map(_is_wide, arrays)):
        return f'{code}.float() if {name}.dtype == "float64" else {code}'
    return code


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
        problem = f"A NumPy array in `inputs` cannot become a tensor: {first_line(message_of(error))}"
        raise UsageError(problem, "Convert it, for example with array.astype('float32').") from None
    if _is_wide(value):
        return tensor.float()
    return tensor


# -- Random inputs of given shapes


def parse_inputs(specs: tuple[str, ...], *, seed: int = 0) -> Any:
    """Seeded random inputs for specs like ``1x3x224x224``, ``1x128:int64``, ``mask=1x128:bool``."""
    generator = torch.Generator().manual_seed(seed)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for spec, name, sizes, dtype_name in input_shapes(specs):
        try:
            dtype: torch.dtype = getattr(torch, dtype_name)
            if dtype == torch.bool:
                tensor = torch.ones(sizes, dtype=dtype)
            elif dtype.is_floating_point or dtype.is_complex:
                wide = torch.complex64 if dtype.is_complex else torch.float32
                tensor = torch.randn(sizes, generator=generator, dtype=wide).to(dtype)
            else:
                tensor = torch.randint(0, 10, sizes, generator=generator).to(dtype)
        except (AttributeError, RuntimeError, TypeError, OverflowError) as error:
            # Too large, a dtype without such values, or one that only other releases of torch have
            hint = "Give a smaller shape, or another dtype."
            raise UsageError(f"Cannot make the input --inputs {spec}: {first_line(message_of(error))}", hint) from None
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return kwargs or (args[0] if len(args) == 1 else tuple(args))


def inputs_code(value: Any) -> str:
    """Code that makes random inputs like ``value``, a tensor or a container; others as they are."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {inputs_code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        listed = ", ".join(map(inputs_code, value))
        if isinstance(value, list):
            return f"[{listed}]"
        return f"({listed}{',' * (len(value) == 1)})"
    if not isinstance(value, Tensor):
        return repr(value)
    sizes = ", ".join(map(str, value.shape))
    shape = f"({sizes}{',' * (value.dim() == 1)})"
    dtype = f", dtype={value.dtype}"
    if value.is_floating_point() or value.is_complex():
        return f"torch.randn({sizes or shape}{dtype if value.dtype != torch.float32 else ''})"
    # Integers are indices or masks: the same range of values, which an embedding has rows for
    highest = 0
    if value.dtype != torch.bool and value.numel():
        highest = int(value.max())
    if highest <= 1:
        return f"torch.ones({shape}{dtype})"
    return f"torch.randint(0, {highest + 1}, {shape}{dtype if value.dtype != torch.int64 else ''})"
