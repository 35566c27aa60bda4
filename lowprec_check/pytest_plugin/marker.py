"""The marker ``lowprec``: its arguments, and one test for each precision. Never imports torch."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest

from lowprec_check.errors import UsageError

NAMES = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")
"""Precisions that the marker takes; those of ``precision.PRECISIONS`` but fp32."""

DEVICES = ("cpu", "cuda", "xpu", "mps")


class Case(NamedTuple):
    """One precision in which a test is run."""

    precision: str
    device: str
    tolerance: float | None

    @property
    def id(self) -> str:
        """What the test's name ends with: ``half-cpu``."""
        return f"{self.precision}-{self.device}"


def is_there(device: str) -> bool:
    """Whether a device is there; raises :class:`UsageError` if there is none of that name."""
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"Unknown device {device!r}.", f"Choose one of {', '.join(DEVICES)}.")
    if kind == "cpu":
        return True
    from lowprec_check.engine.model.device import is_available

    return is_available(kind)


class MarkerError(ValueError):
    """The marker's arguments are wrong."""


def cases(mark: pytest.Mark) -> list[Case]:
    """The precisions that a marker asks for, in its order; raises :class:`MarkerError` saying what is wrong."""
    try:
        bound = inspect.signature(_arguments).bind(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise MarkerError(f"{error}; it takes precisions, device and tolerance") from None
    bound.apply_defaults()
    precisions, device, tolerance = bound.args, bound.kwargs["device"], bound.kwargs["tolerance"]
    if not precisions:
        raise MarkerError(f"it names no precision; choose among {', '.join(NAMES)}")
    for name in precisions:
        if name not in NAMES:
            raise MarkerError(f"unknown precision {name!r}; choose among {', '.join(NAMES)}")
    if len(set(precisions)) < len(precisions):
        raise MarkerError("a precision is there twice")
    if not isinstance(device, str) or device.partition(":")[0] not in DEVICES:
        raise MarkerError(f"unknown device {device!r}; choose among {', '.join(DEVICES)}")
    if tolerance is not None and (isinstance(tolerance, bool) or not _is_positive(tolerance)):
        raise MarkerError(f"tolerance {tolerance!r} is no positive number")
    return [Case(name, device, tolerance) for name in precisions]


def _arguments(*precisions: str, device: str = "cpu", tolerance: float | None = None) -> None:
    """What the marker takes."""


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Run a test once for each case; a wrong marker, or a test that cannot tell the cases apart, is a collection error."""
    try:
        found = cases(mark)
    except MarkerError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: marker lowprec: {error}.", pytrace=False)
    if "lowprec" not in metafunc.fixturenames:
        pytest.fail(
            f"{metafunc.definition.nodeid}: has the marker lowprec but not the fixture: it would run "
            f"{len(found)} times the same. Add the argument lowprec, and use lowprec.cast(model).",
            pytrace=False,
        )
    device = found[0].device
    marks = [] if is_there(device) else [pytest.mark.skip(reason=f"device {device} is not there")]
    metafunc.parametrize("lowprec", [pytest.param(case, id=case.id, marks=marks) for case in found], indirect=True)
