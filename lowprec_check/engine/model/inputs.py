"""Model inputs from the command line or a file, converted to the arguments of a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.errors import UsageError, first_line, message_of

PASTE_INPUTS = """Add to the file (a tensor, a tuple, a dict of keyword arguments, or a function that returns one):

    import torch
    torch.manual_seed(0)
    inputs = torch.randn(1, 3, 224, 224)

or pass shapes: --inputs 1x3x224x224, or --inputs input_ids=1x128:int64"""

_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


def is_function(value: Any) -> bool:
    """Whether inputs are given as a function that returns them."""
    return callable(value) and not isinstance(value, (Tensor, Mapping))


def call_with_number(given: Callable[..., Any], index: int) -> Any:
    """Return ``given(index)`` if it accepts an argument, else ``given()``; batch 0 needs no number if it has a default."""
    return given(index) if accepts(given, index) and (index or not accepts(given)) else given()


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``forward`` by name; raises :class:`UsageError` if a positional one has none."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    parameters = inspect.signature(forward).parameters
    kinds = {parameters[name].kind for name in bound}
    if not bound or inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise UsageError(
            "The model is called with positional and keyword arguments that cannot all be named.", PASTE_INPUTS
        )
    by_name = dict[str, Any]()
    for name, value in bound.items():
        by_name |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return by_name


class Arguments(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: str
    """The call as code, with ``inputs`` as they were given."""


def as_call(inputs: Any, forward: Callable[..., Any]) -> Arguments:
    """The arguments of a call of ``forward``: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.

    A list or named tuple (``PackedSequence``) is one argument if ``forward`` accepts it only so.
    """
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs), "model(**inputs)")
    is_one = type(inputs) is not tuple and accepts(forward, inputs)
    if isinstance(inputs, (tuple, list)) and (accepts(forward, *inputs) or not is_one):
        return Arguments(tuple(inputs), {}, "model(*inputs)")
    return Arguments((inputs,), {}, "model(inputs)")


def accepts(forward: Callable[..., Any], *args: Any) -> bool:
    """Whether ``forward`` can be called with so many positional arguments; true if that is unknown."""
    try:
        inspect.signature(forward).bind(*args)
    except TypeError:
        return not callable(forward)
    except ValueError:
        return True
    return True


def parse_inputs(specs: tuple[str, ...], *, seed: int = 0) -> Any:
    """Random inputs for specs like ``1x3x224x224``, ``1x128:int64``, ``mask=1x128:bool``; seeded.

    Integers are between 0 and 9. Raises :class:`UsageError` if a spec cannot be parsed.
    """
    generator = torch.Generator().manual_seed(seed)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for spec in (part for text in specs for part in text.split(",")):
        match = _SPEC.fullmatch(spec.strip())
        dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise UsageError(f"Cannot parse --inputs {spec!r}.", "Examples: 1x3x224x224, 1x128:int64, mask=1x128:bool.")
        shape = [] if match["shape"] == "scalar" else [int(size) for size in match["shape"].split("x")]
        tensor = _random(spec, shape, dtype, generator)
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    if args and kwargs:
        raise UsageError("--inputs mixes tensors with and without a name.", "Name all of them or none.")
    return kwargs or (args[0] if len(args) == 1 else tuple(args))


def _random(spec: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    try:
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
        return torch.randint(0, 10, shape, generator=generator).to(dtype)
    except (RuntimeError, TypeError, OverflowError) as error:  # too large, or a dtype without such values
        raise UsageError(
            f"Cannot make the input --inputs {spec}: {first_line(message_of(error))}",
            "Give a smaller shape, or another dtype.",
        ) from None


def inputs_code(value: Any) -> str:
    """Code that makes random inputs like ``value``: tensors, and lists, tuples and mappings of them; other values as they are."""
    if isinstance(value, Tensor):
        return _tensor_code(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {inputs_code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inputs_code, value)) + "]"
    if isinstance(value, tuple):
        return (
            "("
            + "".join(f"{inputs_code(item)}, " for item in value).removesuffix(" " if len(value) == 1 else ", ")
            + ")"
        )
    return repr(value)


def _tensor_code(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    shape = f"({sizes},)" if tensor.dim() == 1 else f"({sizes})"
    if tensor.dtype == torch.bool:
        return f"torch.ones({shape}, dtype=torch.bool)"
    if tensor.is_floating_point() or tensor.is_complex():
        dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
        return f"torch.randn({sizes or shape}{dtype})"
    dtype = "" if tensor.dtype == torch.int64 else f", dtype={tensor.dtype}"
    highest = int(tensor.max()) if tensor.numel() else 0
    return (
        f"torch.ones({shape}, dtype={tensor.dtype})"
        if highest <= 1
        else f"torch.randint(0, {highest + 1}, {shape}{dtype})"
    )


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """``(1, 3, 224, 224)`` for each tensor, with its dtype if that is not fp32."""
    described = []
    for path, tensor in (*leaves(args), *leaves(kwargs)):
        dtype = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype)[6:]}"
        name = "" if path.isdigit() else f"{path}="
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        described.append(f"{name}{shape}{dtype}")
    return described
