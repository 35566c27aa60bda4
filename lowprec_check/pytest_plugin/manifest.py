"""The manifest of known failures, a sorted TOML file: its entries, read, written and updated."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import importlib.metadata
import io
import json
import platform
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from lowprec_check.catalog.versioned_file import read_tables
from lowprec_check.errors import UsageError, encodable, message_of
from lowprec_check.schema.axes import DEVICES
from lowprec_check.schema.base import StrictStruct

# -- One entry: the tests that it names, where it applies, and the failures that it expects

NO_REASON = "no reason given"
_CONDITIONS = ("torch", "device", "python", "platform")


class KnownFailure(StrictStruct, frozen=True, kw_only=True):
    """Tests that are known to fail."""

    test: str
    r"""The id of a test, or a pattern: ``*`` stands for any characters, ``\*`` for a star."""
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
        if isinstance(self.exception, str):
            return (self.exception,)
        return tuple(self.exception)

    @property
    def conditions(self) -> tuple[str | None, ...]:
        """Where it applies; two entries of the same tests must differ in this."""
        return tuple(getattr(self, name) for name in _CONDITIONS)

    def names(self, test: str) -> bool:
        """Whether the entry is about a test."""
        return test == self.test or _pattern(self.test).fullmatch(test) is not None

    def is_exact(self, test: str) -> bool:
        """Whether the entry names this test alone."""
        return test in (self.test, _literal(self.test))

    def matches(self, error: BaseException) -> bool:
        """Whether the message and its notes have a match; raises ``TimeoutError``."""
        try:
            message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        except Exception:
            message = message_of(error)
        if self.match is None:
            return True
        with _limited(MATCH_SECONDS):
            return re.search(self.match, message) is not None

    @property
    def applies_here(self) -> bool:
        """Whether the versions and the platform are those of this process."""
        return _is_installed(self.torch, self.python) and self.platform in (None, sys.platform)


MATCH_SECONDS = 1.0
"""Processor time of a search: one for ``(a+)+$`` takes longer than anybody waits."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` after so much processor time, if a signal can: not on Windows."""
    if not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: object) -> NoReturn:
        raise TimeoutError

    handler = signal.signal(signal.SIGVTALRM, end)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)


def _check(entry: KnownFailure) -> None:
    """Raise :class:`UsageError` for a wrong value."""
    if not entry.test:
        raise UsageError("no test is given.", 'Write its id; "*" names all tests.')
    if not entry.exceptions or "" in entry.exceptions:
        raise UsageError("no exception is given.", "Name the class, such as AssertionError.")
    for name in entry.exceptions:
        if "." in name:
            raise UsageError(f"exception {name!r} has a dot.", f"Name the class alone: {name.rpartition('.')[2]}.")
    for key, versions in (("torch", entry.torch), ("python", entry.python)):
        try:
            SpecifierSet(versions or "")
        except InvalidSpecifier:
            hint = f'Write {key} = ">=2.6,<2.9".'
            raise UsageError(f"{key} {versions!r} is not a range of versions.", hint) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # [[:a:]] may mean something else in a later Python
            re.compile(entry.match or "")
    except (re.error, OverflowError, RecursionError) as error:
        problem = f"match {entry.match!r} is not a regular expression: {message_of(error)}."
        raise UsageError(problem, "Escape it with \\.") from None
    platforms, devices = ("linux", "darwin", "win32"), DEVICES.names()
    if entry.device not in (None, *devices):
        raise UsageError(f"unknown device {entry.device!r}.", f"Choose from {', '.join(devices)}.")
    if entry.platform not in (None, *platforms, sys.platform):
        raise UsageError(f"unknown platform {entry.platform!r}.", f"Choose from {', '.join(platforms)}.")


def closest(entries: Iterable[KnownFailure], test: str) -> KnownFailure | None:
    """The entry of a test: the exact one, else the pattern with the most characters besides stars,
    of equal ones that with the most conditions; a :class:`UsageError` if two are equally close.
    """

    def closeness(entry: KnownFailure) -> tuple[bool, int, int]:
        characters = len(_literal(entry.test) or re.sub(r"\\?\*", "", entry.test))
        return entry.is_exact(test), characters, sum(condition is not None for condition in entry.conditions)

    # Of two that are equally close, none can be preferred: people must decide
    closest_first = sorted(entries, key=closeness, reverse=True)
    if len(closest_first) > 1 and closeness(closest_first[0]) == closeness(closest_first[1]):
        two = []
        for entry in closest_first[:2]:
            conditions = zip(_CONDITIONS, entry.conditions, strict=True)
            where = [f"{name} {value}" for name, value in conditions if value is not None]
            two.append(f"{entry.test} ({', '.join(where)})" if where else entry.test)
        hint = "Remove one of them, or add an entry for the test itself."
        raise UsageError(f"{test} has two entries, and neither is closer: {' and '.join(two)}.", hint)
    return next(iter(closest_first), None)


def exact(test: str) -> str:
    """The pattern that names one test only."""
    return test.replace("*", r"\*")


@functools.cache
def _pattern(test: str) -> re.Pattern[str]:
    parts = re.findall(r"\\\*|.", test, re.DOTALL)
    return re.compile(fnmatch.translate("".join(part if part == "*" else glob.escape(part[-1]) for part in parts)))


def _literal(test: str) -> str | None:
    """The only test that a pattern names; ``None`` if it has a star that stands for others."""
    if re.search(r"(?<!\\)\*", test):
        return None
    return test.replace(r"\*", "*")


@functools.cache
def _is_installed(torch: str | None, python: str | None) -> bool:
    """Whether the versions are in these ranges; a development version of 2.9 counts as 2.9."""
    here = [(python, platform.python_version())]
    if torch is not None:
        here.append((torch, importlib.metadata.version("torch")))
    return all(SpecifierSet(versions or "").contains(Version(version).base_version) for versions, version in here)


# -- The file

HEAD = (
    "# Tests that are known to fail, each with its exception. "
    "Updated by pytest --lowprec-update-manifest; fill in the reasons.\n"
)

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
    # The same test may have an entry for each torch or platform
    seen: set[Any] = set()
    for entry in entries:
        try:
            _check(entry)
        except UsageError as error:
            raise UsageError(f"{path}: entry {entry.test!r}: {error.message}", error.hint) from None
        if (entry.test, entry.conditions) in seen:
            raise UsageError(f"{path}: duplicate entry {entry.test!r}.", "Remove one of them.")
        seen.add((entry.test, entry.conditions))
    return entries


def dump(entries: Iterable[KnownFailure], head: str = HEAD) -> str:
    """The text of a manifest, sorted by test so that updates of two people merge. Optional keys
    only if they are given; the reason always, so that it is filled in.
    """
    tables = [head]
    for entry in sorted(entries, key=lambda entry: (entry.test, [condition or "" for condition in entry.conditions])):
        tables.append("\n[[known]]\n")
        for name in entry.__struct_fields__:
            value = getattr(entry, name)
            if value is not None and (name, value) != ("strict", True):
                if isinstance(value, str):
                    value = encodable(value)
                # But for this character, TOML writes strings, lists and booleans as JSON does.
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                tables.append(f"{name} = {text}\n")
    return "".join(tables)


def head_of(path: Path) -> str:
    """The comment at the top of a manifest, which an update keeps."""
    # A byte order mark of an editor on Windows is no part of it
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
    """Update ``before`` by the results of the tests that ran; tests of ``missing`` do not exist.
    Other entries are unchanged, also patterns, which are about other tests too: a test that raises
    something else than its pattern gets its own entry. Reasons and other keys are kept, but for a
    ``match`` that fails.
    """
    gone, added, changed, edit = [*missing], [], [], []
    after = [entry for entry in before if entry not in gone]
    for test, (raised, entry, expected, matched) in results.items():
        is_own = entry is not None and entry.is_exact(test)  # else a pattern, which is not changed
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
    if len(names) == 1:
        return names[0]
    return sorted(names)
