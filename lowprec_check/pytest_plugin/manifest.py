"""Reads, writes and updates the manifest of known failures, a sorted TOML file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lowprec_check.catalog.toml_tables import read_tables
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin.known_failure import KnownFailure, exact, problem_of

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
