"""The marker ``lowprec``: its arguments, and one test per precision. Never imports torch."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest

from lowprec_check.errors import UsageError
from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.devices import DEVICES, device_of, device_type
from lowprec_check.schema.precisions import PRECISIONS, low_precisions
from lowprec_check.schema.registry import Registry, words_in
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


def is_device_available(device: str) -> bool:
    """Whether a device is available; raises :class:`UsageError` for an unknown one."""
    kind = device_of(device).name
    if kind == "cpu":
        return True
    from lowprec_check.engine.model.device import is_available

    return is_available(kind)


class MarkerError(ValueError):
    """An argument of the marker is wrong."""


def cases(mark: pytest.Mark) -> list[Case]:
    """The cases of a marker, in its order; raises :class:`MarkerError` if an argument is wrong."""
    try:
        bound = inspect.signature(_arguments).bind(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise MarkerError(f"{error}; its arguments are precisions, device, backend and tolerance") from None
    bound.apply_defaults()
    tolerance = bound.kwargs["tolerance"]
    names = [precision.name for precision in low_precisions()]
    if not bound.args:
        raise MarkerError(f"no precision given; choose from {', '.join(names)}")
    precisions = [_named(PRECISIONS, word) for given in bound.args for word in words_in(given)]
    if not set(precisions) <= set(names):
        raise MarkerError(f"fp32 is the baseline; choose from {', '.join(names)}")
    if len(set(precisions)) < len(precisions):
        raise MarkerError("duplicate precision")
    if not isinstance(bound.kwargs["device"], str) or DEVICES.find(device_type(bound.kwargs["device"])) is None:
        raise MarkerError(f"unknown device {bound.kwargs['device']!r}; choose from {', '.join(DEVICES.names())}")
    backend = _named(BACKENDS, bound.kwargs["backend"])
    if tolerance is not None and (isinstance(tolerance, bool) or not _is_positive(tolerance)):
        raise MarkerError(f"tolerance {tolerance!r} is not a positive number")
    return [Case(RunKey(name, backend, bound.kwargs["device"]), tolerance) for name in precisions]


def _arguments(*precisions: str, device: str = "cpu", backend: str = EAGER, tolerance: float | None = None) -> None:
    """The marker's arguments."""


def _named(registry: Registry[Any], name: object) -> str:
    """The name for a name or alias."""
    try:
        return str(registry.get(str(name)).name)
    except UsageError as error:
        hint = f"; {error.hint[:1].lower()}{error.hint[1:].rstrip('.')}" if error.hint else ""
        raise MarkerError(f"{error.message[:1].lower()}{error.message[1:].rstrip('.')}{hint}") from None


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Run a test once per case; a wrong marker, or a test without the fixture, is a collection error."""
    try:
        found = cases(mark)
    except MarkerError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: marker lowprec: {error}.", pytrace=False)
    if "lowprec" not in metafunc.fixturenames:
        pytest.fail(
            f"{metafunc.definition.nodeid}: the test has the marker lowprec but does not use the fixture, so every "
            "precision would run the same code. Add the argument lowprec, and use lowprec.cast(model).",
            pytrace=False,
        )
    device = found[0].key.device
    marks = [] if is_device_available(device) else [pytest.mark.skip(reason=f"device {device} is not available")]
    metafunc.parametrize("lowprec", [pytest.param(case, id=case.id, marks=marks) for case in found], indirect=True)
