"""Classifies failures, and finds what the failing samples have in common."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from lowprec_check.catalog.records import Failure, FailureKind
from lowprec_check.errors import message_of, type_name
from lowprec_check.process.supervisor import describe_exit, signal_name

_MISMATCH = re.compile(
    r"same (data ?)?d?type|expected scalar type|mixed dtype|dtypes? (must )?match|should be the same|does not match",
    re.I,
)
_NO_BACKEND = re.compile(r"Could not run 'aten::|not currently implemented for the|not currently supported on the")
DEVICE_LOST = 86
"""Exit code of a worker that lost its device: every later call of the process fails."""
MAX_MESSAGE = 160
"""Maximum number of characters of a message."""


class Raised(NamedTuple):
    """Type and message of an exception, without references to its frames and tensors."""

    type: str
    """The exception class; if the process died, the signal or ``timeout``."""
    message: str
    died: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Type and first line of ``error``, without memory addresses, which differ."""
        text = message_of(error).strip() or type_name(error)
        line = re.sub(r"0x[0-9a-f]+", "0x…", text.splitlines()[0])
        return cls(type_name(error), line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…")

    @classmethod
    def of_end(cls, exit_code: int | None, timeout: str) -> Raised:
        """How a worker ended; ``None``: a call took too long, as ``timeout`` says."""
        if exit_code is None:
            return cls("timeout", timeout, died=True)
        if exit_code == DEVICE_LOST:
            return cls("assertion", "an assertion failed on the device, which then refused every call", died=True)
        return cls(signal_name(exit_code) or "exit", describe_exit(exit_code), died=True)


def kind_of(raised: Raised, at: str | None, *, fails_in_fp32: bool) -> FailureKind:
    """The kind of failure. ``fails_in_fp32`` was measured; the message selects the name."""
    if raised.died:
        return "timeout" if raised.type == "timeout" else "crash"
    if "without overflow" in raised.message:
        return "scalar-overflow"
    if fails_in_fp32:
        return "no-backend-kernel" if _NO_BACKEND.search(raised.message) else "other"
    if "not implemented for '" in raised.message:
        return "missing-kernel"
    if _MISMATCH.search(raised.message):
        return "dtype-mismatch"
    return "missing-kernel" if at is not None else "unsupported-dtype"


def merged(failures: Iterable[Failure]) -> list[Failure]:
    """Merge failures that differ only in their cells and the name of their own dtype."""
    groups: dict[Any, Failure] = {}
    for failure in failures:
        key = (failure.type, failure.message_in(None), failure.kind, failure.at, failure.condition)
        first = groups.get(key)
        if first is None:
            groups[key] = failure
        else:
            groups[key] = msgspec.structs.replace(first, cells=[*first.cells, *failure.cells])
    return list(groups.values())


Features = dict[str, Any]
"""Properties of a sample by name: its arguments, then its sizes."""
POWERS = "all sizes powers of two"
COUNTS = ("number of tensors", "number of dimensions", "largest size", "number of elements")
SIZES = (POWERS, *COUNTS)


def condition(passed: Sequence[Features], failed: Sequence[Features]) -> str | None:
    """A property that all failing samples have and no passing one, or vice versa, if there is one.
    Single properties are tried before pairs, flags before other arguments (``training`` selects a
    kernel more often than ``lower=0.0``), these before sizes, in the order of the features.
    """
    if not passed or not failed:
        return None
    samples = (*failed, *passed)
    names = list(dict.fromkeys(name for features in samples for name in features))
    kinds = {name: {type(features.get(name)) for features in samples} for name in names}
    names.sort(key=lambda name: name in SIZES or not kinds[name] <= {bool, type(None)})
    # One property whose values differ between failing and passing samples.
    for name in names:
        fails, passes = ([features.get(name) for features in half] for half in (failed, passed))
        if set(map(repr, fails)).isdisjoint(map(repr, passes)):
            words = _in_words(name, fails, passes)
            if words is not None:
                return words
    # Two arguments that all samples of one kind share, and no sample of the other has together.
    for verb, those, others in (("runs only", passed, failed), ("fails", failed, passed)):
        shared = [name for name in names if name not in SIZES and len({repr(f.get(name)) for f in those}) == 1]
        common = [(name, those[0].get(name)) for name in shared]
        for pair in itertools.combinations(common, 2):
            if len(others) > 2 and not any(all(f.get(name) == value for name, value in pair) for f in others):
                return f"{verb} where {' and '.join(_equals(name, repr(value)) for name, value in pair)}"
    return None


def _in_words(name: str, failed: list[Any], passed: list[Any]) -> str | None:
    if name in COUNTS or (_numbers(failed) and _numbers(passed)):
        if max(passed) < min(failed):
            return f"fails from {name} {min(failed)} (runs up to {max(passed)})"
        if max(failed) < min(passed):
            return f"runs from {name} {min(passed)} (fails up to {max(failed)})"
    fails, runs = _values(failed), _values(passed)
    if len(fails) == 1 and len(fails) <= len(runs):
        return f"fails where {_equals(name, fails[0])}"
    if len(runs) == 1:
        return f"runs only where {_equals(name, runs[0])}"
    if len(fails) <= 3 and name not in COUNTS:
        return f"fails where {name} is one of {', '.join(fails)}"
    return None


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _values(values: Iterable[Any]) -> list[str]:
    return sorted({repr(value) for value in values})


def _equals(name: str, value: str) -> str:
    named = {"True": name, "False": f"not {name}", "None": f"{name} is not given"}
    return named.get(value, f"{name}={value}")
