"""The marker ``lowprec``: its arguments, and one test per precision and device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.call_arguments import checked_tolerance, device_name, unknown_argument
from lowprec_check.schema.axes import BACKENDS, DEVICES, device_of
from lowprec_check.schema.precisions import PRECISIONS, low_names
from lowprec_check.schema.registry import words_in
from lowprec_check.schema.run_key import EAGER, RunKey


class Case(NamedTuple):
    """One precision that a test runs in."""

    key: RunKey
    tolerance: float | None

    @property
    def largest_error(self) -> float:
        """The largest rel_l2 that passes: that of the marker, by default that of the precision."""
        return self.tolerance if self.tolerance is not None else PRECISIONS.get(self.key.precision).tolerance

    @property
    def id(self) -> str:
        """The parameter in the test's id: ``half-cpu``, ``half-inductor-cpu``."""
        backend = [] if self.key.backend == EAGER else [self.key.backend]
        return "-".join([self.key.precision, *backend, self.key.device])

    @property
    def same(self) -> RunKey:
        """Equal for cases that run the same: ``half-cpu`` and ``half-cpu:0``."""
        return RunKey(self.key.precision, self.key.backend, _same_device(self.key.device))


def is_device_available(device: str) -> bool:
    """Whether a device is available; raises :class:`UsageError` for an unknown one."""
    kind = device_of(device).name
    if kind == "cpu":
        return True
    from lowprec_check.engine.model.device import is_available

    return is_available(device)


def _same_device(device: str) -> str:
    """One name for the names of one device: ``cpu`` for ``cpu:0``, ``cuda:0`` for ``cuda`` if that is the default."""
    kind, colon, index = device.partition(":")
    if kind == "cpu":  # there is one, whatever the index
        return kind
    if colon or not is_device_available(kind):
        return f"{kind}:{index or 0}"
    from lowprec_check.engine.model.device import default_index

    return f"{kind}:{default_index(kind)}"


ONE_OF_THEM = 'Write only @pytest.mark.lowprec("half", "bfloat16"), with the precisions to test.'


class MarkerError(ValueError):
    """An argument of the marker is wrong."""


_ARGUMENTS = ("precisions", "device", "backend", "tolerance")
_OTHER_NAMES = {"precision": "precisions", "devices": "device"}


def cases(mark: pytest.Mark) -> list[Case]:
    """The cases of a marker: its precisions in order, each on its devices in order.

    Raises :class:`MarkerError` if an argument is wrong.
    """
    try:
        return _cases(mark)
    except UsageError as error:
        hint = f"; {error.hint[:1].lower()}{error.hint[1:].rstrip('.')}" if error.hint else ""
        raise MarkerError(f"{error.message[:1].lower()}{error.message[1:].rstrip('.')}{hint}") from None


def _cases(mark: pytest.Mark) -> list[Case]:
    given = _arguments_of(mark)
    names = low_names()
    precisions = [PRECISIONS.get(word, names).name for one in _several(given["precisions"]) for word in words_in(one)]
    if not precisions:
        raise MarkerError(f"no precision given; choose from {', '.join(names)}")
    if not set(precisions) <= set(names):
        raise MarkerError(f"fp32 is the baseline; choose from {', '.join(names)}")
    devices = [device_name(word) for word in _several(given["device"])]
    if not devices:
        raise MarkerError(f"no device given; choose from {', '.join(DEVICES.names())}")
    if not isinstance(given["backend"], str):
        raise MarkerError(
            "backend is one backend, not several" if _is_several(given["backend"]) else "backend is no name"
        )
    backend, tolerance = BACKENDS.get(given["backend"]).name, checked_tolerance(given["tolerance"])
    found: dict[RunKey, Case] = {}
    for name in precisions:
        for device in devices:
            case = Case(RunKey(name, backend, device), tolerance)
            found.setdefault(case.same, case)
    return list(found.values())


def _arguments_of(mark: pytest.Mark) -> dict[str, Any]:
    """The marker's arguments by their first names, with their defaults."""
    positional = [value for given in mark.args for value in _several(given)]
    found: dict[str, Any] = {"precisions": positional} if mark.args else {}
    for name, value in mark.kwargs.items():
        first = _OTHER_NAMES.get(name, name)
        if first not in _ARGUMENTS:
            raise unknown_argument("it", name, _ARGUMENTS)
        if first in found:
            raise MarkerError(f"{first} is given twice; give it once")
        found[first] = value
    return {"precisions": [], "device": "cpu", "backend": EAGER, "tolerance": None} | found


def _is_several(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _several(given: Any) -> list[Any]:
    """The values given: one, several in a sequence, or in a text separated by commas."""
    values = list(given) if _is_several(given) else [given]
    return [part for value in values for part in (value.split(",") if isinstance(value, str) else [value])]


def cases_of(node: pytest.Item) -> list[Case]:
    """The cases of the markers that are closest to a test: those of the function replace those of its class, and these those of its module.

    The cases of several markers of one function (or class, or module) add up, in the order in which they are written.
    Raises :class:`MarkerError` for a wrong marker, and for a case that two markers name.
    """
    marks = list(node.iter_markers_with_node("lowprec"))
    closest = [mark for owner, mark in marks if owner is marks[0][0]]
    found: dict[RunKey, Case] = {}
    for mark in reversed(closest):  # decorators are applied from the bottom up
        for case in cases(mark):
            if case.same in found:
                other = found[case.same].id
                named = case.id if other == case.id else f"{other} and {case.id}, which are the same"
                raise MarkerError(f"two markers name {named}; remove it from one of them")
            found[case.same] = case
    return list(found.values())


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Run a test with the marker ``mark`` once per case; a wrong marker, or a test without the fixture, is a collection error."""
    problem, found = None, list[Case]()
    try:
        found = cases_of(metafunc.definition)
    except MarkerError as error:
        text = str(error)
        problem = f"{metafunc.definition.nodeid}: marker {mark.name}: {text}{'' if text.endswith('?') else '.'}"
    if problem is not None:  # outside of the handler, so that pytest shows one error
        pytest.fail(problem, pytrace=False)
    if "lowprec" not in metafunc.fixturenames:
        pytest.fail(
            f"{metafunc.definition.nodeid}: the test has the marker lowprec but does not use the fixture, so every "
            "precision would run the same code. Add the argument lowprec, and use lowprec.cast(model).",
            pytrace=False,
        )
    given = [names for other in metafunc.definition.iter_markers("parametrize") for names in other.args[:1]]
    if any("lowprec" in _argument_names(names) for names in given):
        pytest.fail(
            f"{metafunc.definition.nodeid}: the marker lowprec makes the cases of the fixture lowprec, and "
            f"@pytest.mark.parametrize names it too. {ONE_OF_THEM}",
            pytrace=False,
        )
    devices = dict.fromkeys(case.key.device for case in found)
    absent = {device for device in devices if not is_device_available(device)}
    parameters = [
        pytest.param(case, id=case.id, marks=_skipped(case) if case.key.device in absent else []) for case in found
    ]
    metafunc.parametrize("lowprec", parameters, indirect=True)


def _argument_names(given: object) -> list[str]:
    """The first argument of ``parametrize``: names in a sequence, or in a text separated by commas."""
    names = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    return [str(name).strip() for name in names]


def _skipped(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=f"device {case.key.device} is not available")]
