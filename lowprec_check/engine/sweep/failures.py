"""What kind of failure an exception is, and what the samples that fail have in common. Never imports torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from lowprec_check.catalog.records import Failure, FailureKind

_MISMATCH = re.compile(
    r"same (data ?)?d?type|expected scalar type|mixed dtype|dtypes? (must )?match|should be the same|does not match",
    re.I,
)
_NO_BACKEND = re.compile(r"Could not run 'aten::|not currently implemented for the|not currently supported on the")
MESSAGE = 160
"""Characters of a message that are kept."""


class Raised(NamedTuple):
    """An exception, without the frames and tensors that hang on it."""

    type: str
    """Its class; of a process that died the signal, or ``timeout``."""
    message: str
    died: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Take the first line, without what differs between runs: addresses."""
        text = str(error).strip() or type(error).__name__
        line = re.sub(r"0x[0-9a-f]+", "0x…", text.splitlines()[0])
        return cls(type(error).__name__, line if len(line) <= MESSAGE else line[: MESSAGE - 1] + "…")


def kind_of(raised: Raised, at: str | None, *, fails_in_fp32: bool) -> FailureKind:
    """The family; that it fails low and passes in fp32 has been told by experiment, the message only adds a name."""
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
    """Failures that differ only in their cells, as one; what each calls its own dtype in the message makes no difference."""
    groups: dict[Any, Failure] = {}
    for failure in failures:
        key = (failure.type, failure.message_in(None), failure.kind, failure.at, failure.condition)
        first = groups.get(key)
        groups[key] = failure if first is None else msgspec.structs.replace(first, cells=[*first.cells, *failure.cells])
    return list(groups.values())


Features = dict[str, Any]
"""Properties of a sample that can be named: its arguments, then its sizes."""
POWERS = "all sizes powers of two"
COUNTS = ("number of tensors", "number of dimensions", "largest size", "number of elements")
SIZES = (POWERS, *COUNTS)


def condition(passed: Sequence[Features], failed: Sequence[Features]) -> str | None:
    """What every failing sample has and no passing one, or the other way round; ``None`` if no property tells.

    One property is tried before two together, flags before other arguments, arguments before sizes (the order of the
    features): of those that tell equally well, ``training`` chooses a kernel more often than ``lower=0.0``.
    """
    if not passed or not failed:
        return None
    every = (*failed, *passed)
    names = list(dict.fromkeys(name for features in every for name in features))
    names.sort(key=lambda name: name in SIZES or not _flag([features.get(name) for features in every]))
    for name in names:
        values = {repr(features.get(name)) for features in failed}, {repr(features.get(name)) for features in passed}
        if values[0].isdisjoint(values[1]):
            said = _in_words(name, [f.get(name) for f in failed], [f.get(name) for f in passed])
            if said is not None:
                return said
    for verb, those, others in (("runs only", passed, failed), ("fails", failed, passed)):
        common = [(name, those[0].get(name)) for name in names if _shared(name, those)]
        for pair in itertools.combinations(common, 2):
            if len(others) > 2 and not any(all(f.get(name) == value for name, value in pair) for f in others):
                return f"{verb} where {' and '.join(_equals(name, repr(value)) for name, value in pair)}"
    return None


def _flag(values: list[Any]) -> bool:
    """Whether it is on, off or not given."""
    return {type(value) for value in values} <= {bool, type(None)}


def _shared(name: str, samples: Sequence[Features]) -> bool:
    """Whether an argument (sizes say too little) is the same in all."""
    return name not in SIZES and len({repr(features.get(name)) for features in samples}) == 1


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
