"""One entry of a manifest: the tests that it names, where it applies, and the failures that it expects."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from lowprec_check.errors import UsageError, message_of
from lowprec_check.schema.axes import DEVICES
from lowprec_check.schema.base import StrictStruct

NO_REASON = "no reason given"
_PLATFORMS = ("linux", "darwin", "win32")


class KnownFailure(StrictStruct, frozen=True, kw_only=True):
    """Tests that are known to fail."""

    test: str
    r"""The id of a test, ``tests/test_model.py::test_half[dot]``, or a pattern in which ``*`` stands for any characters, also for
    none; ``\*`` is a star."""
    exception: str | list[str]
    """Name of the exception's class, ``NotImplementedError``; several if subtests raise several."""
    match: str | None = None
    """A regular expression that the message must contain a match of."""
    torch: str | None = None
    """Where it applies: versions of torch, ``>=2.6,<2.9``."""
    device: str | None = None
    """Where it applies: a type of device, ``cuda``."""
    python: str | None = None
    """Where it applies: versions of Python."""
    platform: str | None = None
    """Where it applies: ``sys.platform``, ``linux``."""
    strict: bool = True
    """Whether the tests must fail; otherwise they may."""
    reason: str = NO_REASON

    @property
    def exceptions(self) -> tuple[str, ...]:
        """The names of the exceptions' classes."""
        return (self.exception,) if isinstance(self.exception, str) else tuple(self.exception)

    @property
    def conditions(self) -> tuple[str | None, ...]:
        """Where it applies; two entries of the same tests must differ in this."""
        return self.torch, self.device, self.python, self.platform

    def names(self, test: str) -> bool:
        """Whether the entry is about a test."""
        return test == self.test or _pattern(self.test).fullmatch(test) is not None

    def is_exact(self, test: str) -> bool:
        """Whether the entry names this test alone."""
        return test in (self.test, _literal(self.test))

    def expects(self, error: BaseException, name: str) -> bool:
        """Whether an exception, whose class has this name, is one that the entry expects."""
        return name in self.exceptions and self.matches(error)

    def matches(self, error: BaseException) -> bool:
        """Whether the message, with the notes below it as in ``pytest.raises``, has a match."""
        return self.match is None or re.search(self.match, _whole_message(error)) is not None

    @property
    def applies_here(self) -> bool:
        """Whether the versions and the platform are those of this process."""
        return _is_installed(self.torch, self.python) and self.platform in (None, sys.platform)


def problem_of(entry: KnownFailure) -> UsageError | None:
    """What is wrong with the values of an entry."""
    return _problem_of_test(entry) or _problem_of_conditions(entry)


def _problem_of_test(entry: KnownFailure) -> UsageError | None:
    if not entry.test:
        return UsageError("no test is given.", 'Write its id; "*" names all tests.')
    if not entry.exceptions or "" in entry.exceptions:
        return UsageError("no exception is given.", "Name the class, such as AssertionError.")
    dotted = next((name for name in entry.exceptions if "." in name), None)
    if dotted is not None:
        return UsageError(f"exception {dotted!r} has a dot.", f"Name the class alone: {dotted.rpartition('.')[2]}.")
    return None


def _problem_of_conditions(entry: KnownFailure) -> UsageError | None:
    for key, versions in (("torch", entry.torch), ("python", entry.python)):
        try:
            SpecifierSet(versions or "")
        except InvalidSpecifier:
            return UsageError(f"{key} {versions!r} is not a range of versions.", f'Write {key} = ">=2.6,<2.9".')
    try:
        re.compile(entry.match or "")
    except re.error as error:
        return UsageError(
            f"match {entry.match!r} is not a regular expression: {message_of(error)}.", "Escape it with \\."
        )
    if entry.device is not None and entry.device not in DEVICES.names():
        return UsageError(f"unknown device {entry.device!r}.", f"Choose from {', '.join(DEVICES.names())}.")
    if entry.platform is not None and entry.platform not in (*_PLATFORMS, sys.platform):
        return UsageError(f"unknown platform {entry.platform!r}.", f"Choose from {', '.join(_PLATFORMS)}.")
    return None


def closest(entries: Iterable[KnownFailure], test: str) -> KnownFailure | None:
    """The entry of a test, of those that name it: the exact one before patterns, of these the one with the most characters that are
    no star, and with the same characters the one with the most conditions.

    Raises :class:`UsageError` that names two entries if neither is closer.
    """

    def closeness(entry: KnownFailure) -> tuple[bool, int, int]:
        characters = len(_literal(entry.test) or re.sub(r"\\?\*", "", entry.test))
        return entry.is_exact(test), characters, sum(condition is not None for condition in entry.conditions)

    found = sorted(entries, key=closeness, reverse=True)
    if len(found) > 1 and closeness(found[0]) == closeness(found[1]):
        raise UsageError(
            f"{test} has two entries, and neither is closer: {_shown(found[0])} and {_shown(found[1])}.",
            "Remove one of them, or add an entry for the test itself.",
        )
    return found[0] if found else None


def _shown(entry: KnownFailure) -> str:
    names = ("torch", "device", "python", "platform")
    where = [f"{name} {value}" for name, value in zip(names, entry.conditions, strict=True) if value is not None]
    return f"{entry.test} ({', '.join(where)})" if where else entry.test


def exact(test: str) -> str:
    """The pattern that names one test only."""
    return test.replace("*", r"\*")


@functools.cache
def _pattern(test: str) -> re.Pattern[str]:
    parts = re.findall(r"\\\*|.", test, re.DOTALL)
    return re.compile(
        "".join(".*" if part == "*" else re.escape(part.replace(r"\*", "*")) for part in parts), re.DOTALL
    )


def _literal(test: str) -> str | None:
    """The only test that a pattern names; ``None`` if it has a star that stands for others."""
    return None if re.search(r"(?<!\\)\*", test) else test.replace(r"\*", "*")


@functools.cache
def _is_installed(torch: str | None, python: str | None) -> bool:
    """Whether the versions are in these ranges; a development version of 2.9 counts as 2.9."""
    installed = importlib.metadata.version("torch") if torch is not None else "0"
    here = ((torch, installed), (python, platform.python_version()))
    return all(SpecifierSet(versions or "").contains(Version(version).base_version) for versions, version in here)


def _whole_message(error: BaseException) -> str:
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    except Exception:
        return message_of(error)
