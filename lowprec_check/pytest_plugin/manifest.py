"""The manifest of known failures, a sorted TOML file: its entries, read, written and updated."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from lowprec_check.catalog.data_files import read_tables
from lowprec_check.errors import UsageError, encodable, message_of
from lowprec_check.schema.axes import DEVICES
from lowprec_check.schema.base import StrictStruct

# -- One entry of a manifest: the tests that it names, where it applies, and the failures that it expects

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


# -- Reads, writes and updates the manifest of known failures, a sorted TOML file

HEAD = "# Tests that are known to fail, each with its exception. Updated by pytest --lowprec-update-manifest; fill in the reasons.\n"

Manifest = list[KnownFailure]
"""Entries in the order of the file."""


def read(path: Path) -> Manifest:
    """Read a manifest strictly; raises :class:`UsageError` that names file, entry and key."""
    try:
        entries = read_tables(path, "known", KnownFailure)
    except FileNotFoundError:
        raise UsageError(f"The manifest {path} does not exist.", "Create it with --lowprec-update-manifest.") from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    found: set[Any] = set()
    for entry in entries:
        problem = problem_of(entry)
        if problem is not None:
            raise UsageError(f"{path}: entry {entry.test!r}: {problem.message}", problem.hint)
        if (entry.test, entry.conditions) in found:
            raise UsageError(f"{path}: duplicate entry {entry.test!r}.", "Remove one of them.")
        found.add((entry.test, entry.conditions))
    return entries


def dump(entries: Iterable[KnownFailure], head: str = HEAD) -> str:
    """The text of a manifest, sorted by test so that updates of two people merge."""
    return head + "".join(map(_table, sorted(entries, key=_in_order)))


def _in_order(entry: KnownFailure) -> tuple[str, list[str]]:
    return entry.test, [condition or "" for condition in entry.conditions]


def _table(entry: KnownFailure) -> str:
    """An entry; optional keys only where they are given, the reason always, so that it is filled in."""
    values = {name: getattr(entry, name) for name in entry.__struct_fields__}
    given = {name: value for name, value in values.items() if value is not None and (name, value) != ("strict", True)}
    return "\n[[known]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in given.items())


def _toml(value: str | list[str] | bool) -> str:
    """A TOML value; a basic string differs from a JSON string only in DEL."""
    given = encodable(value) if isinstance(value, str) else value
    return json.dumps(given, ensure_ascii=False).replace("\x7f", "\\u007f")


def head_of(path: Path) -> str:
    """The comment at the top of a manifest, which an update keeps."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8-sig").splitlines(keepends=True) if path.exists() else []:
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(lines) or HEAD


def line_break_of(path: Path) -> str:
    """The line break of a file, which an update keeps: that of its first line."""
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        return "\r\n" if file.readline().endswith(b"\r\n") else "\n"


class Result(NamedTuple):
    """What a test did, its subtests included."""

    raised: tuple[str, ...] = ()
    """The names of the exceptions' classes, each once; empty if it passed."""
    entry: KnownFailure | None = None
    """The entry that applies to the test."""
    expected: bool = True
    """Whether the entry expects all of the exceptions."""
    matched: bool = True
    """Whether all messages match those of the entry."""

    def __add__(self, other: tuple[Any, ...]) -> Result:
        """Of two subtests of one test."""
        raised, entry, expected, matched = other
        together = tuple(dict.fromkeys((*self.raised, *raised)))
        return Result(together, entry, self.expected and expected, self.matched and matched)


class Change(NamedTuple):
    """An updated manifest and its changes, as ids of tests."""

    manifest: Manifest
    added: list[str]
    changed: list[str]
    removed: list[str]
    edit: list[str]
    """Patterns that must be edited by hand, with the tests that pass."""


def updated(before: Manifest, results: Mapping[str, Result], missing: Iterable[KnownFailure] = ()) -> Change:
    """Update ``before`` by the results of the tests that ran; ``missing`` are entries whose tests do not exist.

    Entries of tests that did not run, and that do not apply here, are unchanged. A pattern is unchanged; a test that it names but that
    raises something else gets an entry of its own. Reasons and other keys are kept, but for a ``match`` that fails.
    """
    gone, added, changed, edit = [*missing], [], [], []
    after = [entry for entry in before if entry not in gone]
    for test, (raised, entry, expected, matched) in results.items():
        is_own = entry is not None and entry.is_exact(test)
        if not raised:
            if entry is not None and entry.strict and is_own:
                gone.append(entry)
                after.remove(entry)
            elif entry is not None and entry.strict:
                edit.append(f"{entry.test}: {test} passes")
        elif entry is None or not (expected or is_own):
            after.append(KnownFailure(test=exact(test), exception=_one_or_more(raised)))
            added.append(test)
        elif not expected:
            match = entry.match if matched else None
            replaced = msgspec.structs.replace(entry, exception=_one_or_more(raised), match=match)
            after[after.index(entry)] = replaced
            changed.append(test)
    return Change(after, sorted(added), sorted(changed), sorted(entry.test for entry in gone), sorted(edit))


def _one_or_more(names: tuple[str, ...]) -> str | list[str]:
    return names[0] if len(names) == 1 else sorted(names)
