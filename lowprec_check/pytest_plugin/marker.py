"""The ``lowprec`` marker, and wrong arguments of it and of the fixture's methods."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import pytest

from lowprec_check.errors import UsageError, text_of, type_name
from lowprec_check.schema.axes import BACKENDS, DEVICES, device_of, device_type
from lowprec_check.schema.precisions import PRECISIONS, low_names
from lowprec_check.schema.registry import choices, nearest, words_in
from lowprec_check.schema.run_key import EAGER, RunKey

# -- Wrong arguments of the marker and of the fixture's methods: errors name the right one

__tracebackhide__ = True
"""pytest shows a failure at the line of the test."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TOLERANCE = "The tolerance is the largest relative error of the whole output, rel_l2; there is no absolute one."
# What an argument that another library or method has means here; the first that is taken.
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
# Names that no function of torch has: whoever gives one to a function means this library.
_OURS = frozenset(_MEANT) - {"tol", "atol", "rtol", "grad", "input", "args", "eps", "threshold"}


def unknown_argument(where: str, name: str, known: Iterable[str]) -> UsageError:
    """The error about a keyword that ``where`` (``check()``) does not take."""
    names = list(known)
    meant = next((other for other in _MEANT.get(name, ()) if other in names), None) or nearest(name, names)
    if meant is None:
        they_are = "Its argument is" if len(names) == 1 else "Its arguments are"
        hint = f"{they_are} {choices(names, 'and')}."
    else:
        hint = f"Did you mean {meant}?"
        if name == f"{meant}s":
            hint += f" {where} takes one {meant}."
        if meant == "tolerance" and name in _MEANT:
            hint += f" {_TOLERANCE}"
    return UsageError(f"{where} has no argument {name!r}.", hint)


def explained(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrong arguments of a fixture's method are a :class:`UsageError` without a traceback."""

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
    """The error with arguments of ``method`` in place of options: ``budget``, not ``--budget``."""
    names = inspect.signature(method).parameters

    def argument(option: re.Match[str]) -> str:
        name = option["name"].replace("-", "_")
        if name not in names:
            return option[0]
        if option["device"]:
            return f'{name}="{option["device"]}"'
        return name

    def translated(text: str) -> str:
        if "lowprec-check " in text:  # a command to run
            return text
        return re.sub(r"--(?P<name>[a-z][a-z-]*[a-z])(?: (?P<device>cpu)\b)?", argument, text)

    return UsageError(translated(error.message), error.hint and translated(error.hint))


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise :class:`UsageError` unless a method can be called with these arguments."""
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
    # How to call it: the arguments that it needs, without their types.
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for name, p in signature.parameters.items() if name != "self"]
    needed = [str(p) for p in parameters if p.default is empty]
    if len(needed) < len(parameters):
        needed.append("…")
    raise UsageError(f"{where}: {text_of(problem)}.", f"Call it as lowprec.{function.__name__}({', '.join(needed)}).")


def check_passed_on(function: Any, kwargs: dict[str, Any]) -> None:
    """Raise :class:`UsageError` for an argument of ours that ``function`` would get."""
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
    """A tolerance, or ``None``; it must be a positive, finite number."""
    return positive(value, "tolerance", "Give the largest rel_l2 that passes, such as tolerance=0.01.")


def positive(value: Any, name: str, hint: str) -> float | None:
    """``value`` as a float, or ``None``; it must be a positive, finite number."""
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        written = text_of(value) if is_number else f"{value!r:.100}"
        raise UsageError(f"{name} {written} is not a positive number.", hint)
    return float(value)


def check_flag(value: Any, name: str, *allowed: None) -> None:
    """Raise :class:`UsageError` unless ``value`` is a boolean, or ``allowed`` as well."""
    if not isinstance(value, bool) and value not in allowed:
        raise UsageError(f"{name} {value!r:.100} is not a boolean.", f"Write {name}=True or {name}=False.")


def check_callable(function: Any, name: str) -> None:
    """Raise :class:`UsageError` unless ``function`` can be called, or is ``None``."""
    if function is not None and not callable(function):
        hint = f"Pass a function as {name}."
        raise UsageError(f"{name} is of type {type_name(function)}, which cannot be called.", hint)


def device_name(value: Any, known: Sequence[str] | None = None) -> str:
    """The name of a device, also of a ``torch.device``. Raises :class:`UsageError` for several, and
    for one that is not ``known`` (by default, to torch).
    """
    if isinstance(value, (list, tuple, set)):
        raise UsageError("device is one device, not several.", "The marker takes several: one test for each.")
    names = DEVICES.names() if known is None else known
    kind = None
    if isinstance(value, str) or type_name(value) == "device":
        kind = DEVICES.find(device_type(str(value)))
    if kind is None or kind.name not in names:
        raise UsageError(f"Unknown device {value!r:.100}.", f"Choose from {', '.join(names)}.")
    _, colon, index = str(value).strip().partition(":")
    if not colon:
        return kind.name
    if not (index.isascii() and index.isdecimal()):
        raise UsageError(f"Unknown device {value!r:.100}.", f"Write {kind.name}, or {kind.name}:0.")
    return f"{kind.name}:{int(index)}"


def check_dtype(value: Any, hint: str = "Choose torch.half or torch.bfloat16.") -> None:
    """Raise :class:`UsageError` with ``hint`` unless ``value`` is one dtype, or the name of one."""
    if not isinstance(value, str) and type_name(value) != "dtype":
        if isinstance(value, (list, tuple, set)):
            raise UsageError("dtype is one dtype, not several.", hint)
        raise UsageError(f"dtype is of type {type_name(value)}, not a dtype.", hint)


# -- The marker ``lowprec``: its arguments, and one test per precision and device


class Case(NamedTuple):
    """One precision that a test runs in."""

    key: RunKey
    tolerance: float | None

    @property
    def largest_error(self) -> float:
        """The largest rel_l2 that passes: that of the marker, by default that of the precision."""
        if self.tolerance is not None:
            return self.tolerance
        return PRECISIONS.get(self.key.precision).tolerance

    @property
    def id(self) -> str:
        """The parameter in the test's id: ``half-cpu``, ``half-inductor-cpu``."""
        parts = (self.key.precision, self.key.backend, self.key.device)
        return "-".join(part for part in parts if part != EAGER)

    @property
    def same(self) -> RunKey:
        """Equal for cases that run the same, such as ``half-cpu`` and ``half-cpu:0``."""
        device, _, index = self.key.device.partition(":")
        if device != "cpu":
            if not index and is_device_available(device):
                from lowprec_check.torchkit.devices import default_index

                index = str(default_index(device))
            device = f"{device}:{index or 0}"
        return RunKey(self.key.precision, self.key.backend, device)


def is_device_available(device: str) -> bool:
    """Whether a device is available; raises :class:`UsageError` for an unknown one."""
    kind = device_of(device).name
    if kind == "cpu":
        return True
    from lowprec_check.torchkit.devices import is_available

    return is_available(device)


ONE_OF_THEM = 'Write only @pytest.mark.lowprec("half", "bfloat16"), with the precisions to test.'


# The marker's arguments by their first names, with their defaults.
_ARGUMENTS: dict[str, Any] = {"precisions": [], "device": "cpu", "backend": EAGER, "tolerance": None}
_OTHER_NAMES = {"precision": "precisions", "devices": "device"}


def cases(mark: pytest.Mark) -> list[Case]:
    """The cases of a marker, which must be right: each precision on each device, in their order."""
    arguments: dict[str, Any] = {}
    if mark.args:
        arguments["precisions"] = [precision for value in mark.args for precision in _several(value)]
    for name, value in mark.kwargs.items():
        first = _OTHER_NAMES.get(name, name)
        if first not in _ARGUMENTS:
            raise unknown_argument("it", name, _ARGUMENTS)
        if first in arguments:
            raise UsageError(f"{first} is given twice.", "Give it once.")
        arguments[first] = value
    arguments = _ARGUMENTS | arguments
    names = low_names()
    words = [word for text in _several(arguments["precisions"]) for word in words_in(text)]
    precisions = [PRECISIONS.get(word, names).name for word in words]
    if not precisions or not set(precisions) <= set(names):
        problem = "fp32 is the baseline." if precisions else "No precision given."
        raise UsageError(problem, f"Choose from {', '.join(names)}.")
    devices = [device_name(word) for word in _several(arguments["device"])]
    if not devices:
        raise UsageError("No device given.", f"Choose from {', '.join(DEVICES.names())}.")
    if not isinstance(arguments["backend"], str):
        problem = "one backend, not several" if _is_several(arguments["backend"]) else "no name"
        raise UsageError(f"backend is {problem}.")
    backend, tolerance = BACKENDS.get(arguments["backend"]).name, checked_tolerance(arguments["tolerance"])
    by_run: dict[RunKey, Case] = {}
    for name in precisions:
        for device in devices:
            case = Case(RunKey(name, backend, device), tolerance)
            by_run.setdefault(case.same, case)
    return list(by_run.values())


def _is_several(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _several(argument: Any) -> list[Any]:
    """The values given: one, several in a sequence, or in a text separated by commas."""
    values = list(argument) if _is_several(argument) else [argument]
    return [part for value in values for part in (value.split(",") if isinstance(value, str) else [value])]


def cases_of(node: pytest.Item) -> list[Case]:
    """The cases of the markers that are closest to a test: function before class before module.
    Those of several markers of the same add up in order; two markers must not name the same case.
    """
    marks = list(node.iter_markers_with_node("lowprec"))
    closest = [mark for owner, mark in marks if owner is marks[0][0]]
    by_run: dict[RunKey, Case] = {}
    for mark in reversed(closest):  # decorators are applied from the bottom up
        for case in cases(mark):
            other = by_run.setdefault(case.same, case)
            if other is not case:
                named = case.id
                if other.id != case.id:
                    named = f"{other.id} and {case.id}, which are the same"
                raise UsageError(f"Two markers name {named}.", "Remove it from one of them.")
    return list(by_run.values())


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Run a test once per case of ``mark``; wrong ones are collection errors."""
    problem, test_cases = None, list[Case]()
    try:
        test_cases = cases_of(metafunc.definition)
    except UsageError as error:
        parts = [part[:1].lower() + part[1:].rstrip(".") for part in (error.message, error.hint) if part]
        problem = f"marker {mark.name}: {'; '.join(parts)}"
        problem += "" if problem.endswith("?") else "."
    # Two mistakes that pytest would not explain.
    parametrized = [names for other in metafunc.definition.iter_markers("parametrize") for names in other.args[:1]]
    if problem is None and "lowprec" not in metafunc.fixturenames:
        problem = (
            "the test has the marker lowprec but does not use the fixture, so every precision would run the same code. "
            "Add the argument lowprec, and use lowprec.cast(model)."
        )
    elif problem is None and "lowprec" in (str(name).strip() for names in parametrized for name in _several(names)):
        problem = (
            "the marker lowprec makes the cases of the fixture lowprec, and @pytest.mark.parametrize names it too. "
            f"{ONE_OF_THEM}"
        )
    if problem is not None:  # outside of the handler, so that pytest shows one error
        pytest.fail(f"{metafunc.definition.nodeid}: {problem}", pytrace=False)
    # Cases on a device that is not available are skipped; each device is asked once.
    devices = dict.fromkeys(case.key.device for case in test_cases)
    absent = {device for device in devices if not is_device_available(device)}
    parameters = []
    for case in test_cases:
        marks = []
        if case.key.device in absent:
            marks = [pytest.mark.skip(reason=f"device {case.key.device} is not available")]
        parameters.append(pytest.param(case, id=case.id, marks=marks))
    metafunc.parametrize("lowprec", parameters, indirect=True)
