"""Wrong arguments of the marker and of the fixture's methods, each with a sentence that names the right one."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from lowprec_check.errors import UsageError, text_of, type_name
from lowprec_check.schema.axes import DEVICES, device_type
from lowprec_check.schema.registry import choices, nearest

__tracebackhide__ = True
"""pytest shows a failure at the line of the test."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TOLERANCE = "The tolerance is the largest relative error of the whole output, rel_l2; there is no absolute one."
_MEANT: dict[str, tuple[str, ...]] = {
    "precision": ("precision", "precisions", "dtype"),
    "precisions": ("precisions", "precision", "dtype"),
    "dtype": ("dtype", "precision", "precisions"),
    "dtypes": ("dtype", "precision", "precisions"),
    "device": ("device", "devices"),
    "devices": ("device",),
    "backend": ("backend",),
    "backends": ("backend",),
    "grad": ("backward",),
    "input": ("inputs",),
    "args": ("inputs",),
} | dict.fromkeys(
    ("tolerance", "tol", "atol", "rtol", "abs_tol", "rel_tol", "threshold", "max_error", "eps"), ("tolerance",)
)
"""What someone means who writes an argument that another library, or another method, has; the first that is taken."""
_OURS = frozenset(_MEANT) - {"tol", "atol", "rtol", "grad", "input", "args", "eps", "threshold"}
"""Names that no function of torch has: whoever gives one to a function means this library."""


def unknown_argument(where: str, name: str, known: Iterable[str]) -> UsageError:
    """The error about a keyword that ``where`` (``check()``) does not take: the one that was probably meant."""
    names = list(known)
    meant = next((other for other in _MEANT.get(name, ()) if other in names), None) or nearest(name, names)
    if meant is None:
        its = "Its argument is" if len(names) == 1 else "Its arguments are"
        return UsageError(f"{where} has no argument {name!r}.", f"{its} {choices(names, 'and')}.")
    about = f" {_TOLERANCE}" if meant == "tolerance" and name in _MEANT else ""
    several = f" {where} takes one {meant}." if name == f"{meant}s" else ""
    return UsageError(f"{where} has no argument {name!r}.", f"Did you mean {meant}?{several}{about}")


def explained(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method of the fixture whose wrong arguments are a :class:`UsageError`, which has no traceback: its message is sufficient."""

    @functools.wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            try:
                return method(*args, **kwargs)
            except TypeError:
                check_call(method, args, kwargs)
                raise
        except UsageError as error:
            raise _in_words_of(method, error).with_traceback(None) from None

    return called


def _in_words_of(method: Callable[..., Any], error: UsageError) -> UsageError:
    """The error with the arguments of ``method`` in place of options of the command line: ``budget`` for ``--budget``."""
    names = inspect.signature(method).parameters

    def argument(option: re.Match[str]) -> str:
        name = option["name"].replace("-", "_")
        if name not in names:
            return option[0]
        return f'{name}="{option["device"]}"' if option["device"] else name

    def translated(text: str) -> str:
        if "lowprec-check " in text:  # a command to run
            return text
        return re.sub(r"--(?P<name>[a-z][a-z-]*[a-z])(?: (?P<device>cpu)\b)?", argument, text)

    return UsageError(translated(error.message), error.hint and translated(error.hint))


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise :class:`UsageError` unless a method of the fixture can be called with these arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        problem = error
    where = f"{function.__name__}()"
    named = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self"
    ]
    for name in kwargs:
        if name not in named:
            raise unknown_argument(where, name, named) from None
    raise UsageError(f"{where}: {text_of(problem)}.", f"Call it as lowprec.{function.__name__}{_shown(signature)}.")


def _shown(signature: inspect.Signature) -> str:
    """The signature without ``self`` and types."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for n, p in signature.parameters.items() if n != "self"]
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    shown = [str(p) for p in required] + (["…"] if len(required) < len(parameters) else [])
    return f"({', '.join(shown)})"


def check_passed_on(function: Any, kwargs: dict[str, Any]) -> None:
    """Raise :class:`UsageError` for an argument meant for ``assert_no_gaps`` that ``function``, which gets it, does not have."""
    call = getattr(function, "forward", function)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # written in C++
        foreign = [name for name in kwargs if name in _OURS]
    else:
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        foreign = [name for name in kwargs if name in _MEANT and name not in parameters]
    if foreign:
        raise unknown_argument("assert_no_gaps()", foreign[0], ("dtype", "device"))


def checked_tolerance(value: Any) -> float | None:
    """A tolerance, or ``None`` if none is given; raises :class:`UsageError` unless it is a positive, finite number."""
    return positive(value, "tolerance", "Give the largest rel_l2 that passes, such as tolerance=0.01.")


def positive(value: Any, name: str, hint: str) -> float | None:
    """``value`` as a float, or ``None``; raises :class:`UsageError` with ``hint`` unless it is a positive, finite number."""
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        shown = text_of(value) if is_number else f"{value!r:.100}"
        raise UsageError(f"{name} {shown} is not a positive number.", hint)
    return float(value)


def check_flag(value: Any, name: str, *allowed: None) -> None:
    """Raise :class:`UsageError` unless ``value`` is a boolean, or one that is ``allowed`` as well."""
    if not isinstance(value, bool) and value not in allowed:
        raise UsageError(f"{name} {value!r:.100} is not a boolean.", f"Write {name}=True or {name}=False.")


def check_callable(function: Any, name: str) -> None:
    """Raise :class:`UsageError` unless ``function`` can be called; ``None`` is no function given."""
    if function is not None and not callable(function):
        raise UsageError(
            f"{name} is of type {type_name(function)}, which cannot be called.", f"Pass a function as {name}."
        )


def device_name(value: Any, known: Sequence[str] | None = None) -> str:
    """The name of a device, also of a ``torch.device``.

    Raises :class:`UsageError` for several, and for one whose type is not ``known`` (by default, to torch).
    """
    if isinstance(value, (list, tuple, set)):
        raise UsageError("device is one device, not several.", "The marker takes several: one test for each.")
    names = DEVICES.names() if known is None else known
    found = DEVICES.find(device_type(str(value))) if isinstance(value, str) or type_name(value) == "device" else None
    if found is None or found.name not in names:
        raise UsageError(f"Unknown device {value!r:.100}.", f"Choose from {', '.join(names)}.")
    _, colon, index = str(value).strip().partition(":")
    if colon and not (index.isascii() and index.isdecimal()):
        raise UsageError(f"Unknown device {value!r:.100}.", f"Write {found.name}, or {found.name}:0.")
    return f"{found.name}:{int(index)}" if colon else found.name


def check_dtype(value: Any) -> None:
    """Raise :class:`UsageError` unless ``value`` is one dtype, or the name of one."""
    if not isinstance(value, str) and type_name(value) != "dtype":
        several = isinstance(value, (list, tuple, set))
        what = "dtype is one dtype, not several." if several else f"dtype is of type {type_name(value)}, not a dtype."
        raise UsageError(what, "Choose torch.half or torch.bfloat16.")
