"""The manifest of known failures: TOML in, the same TOML out, sorted. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lowprec_check.catalog.toml_tables import read_tables
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import StrictStruct

HEAD = "# Tests that are known to fail, each with its exception. Written by pytest --lowprec-update-manifest; reasons are yours.\n"
NO_REASON = "not said yet"


class Known(StrictStruct, frozen=True, kw_only=True):
    """One test that fails."""

    test: str
    """Its exact id, ``tests/test_model.py::test_half[dot]``."""
    exception: str
    """Name of the exception's class, ``NotImplementedError``."""
    reason: str = NO_REASON


Manifest = dict[str, Known]
"""By test."""


def read(path: Path) -> Manifest:
    """Read a manifest strictly; raises :class:`UsageError` naming file, entry and key."""
    try:
        entries = read_tables(path, "known", Known)
    except FileNotFoundError:
        raise UsageError(
            f"There is no manifest {path}.", "--lowprec-update-manifest makes one of the tests that fail."
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    found: Manifest = {}
    for entry in entries:
        if entry.test in found:
            raise UsageError(f"{path}: {entry.test} is there twice.")
        found[entry.test] = entry
    return found


def dump(entries: Iterable[Known], head: str = HEAD) -> str:
    """The text of a manifest: sorted by test, so that two people's updates merge."""
    tables = [
        f"\n[[known]]\ntest = {_string(e.test)}\nexception = {_string(e.exception)}\nreason = {_string(e.reason)}\n"
        for e in sorted(entries, key=lambda entry: entry.test)
    ]
    return head + "".join(tables)


def _string(text: str) -> str:
    """A TOML basic string; JSON's are the same but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def head_of(path: Path) -> str:
    """The comment at the top of a manifest, which an update keeps."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(lines) or HEAD


class Change(NamedTuple):
    """A manifest brought up to date."""

    manifest: Manifest
    added: list[str]
    changed: list[str]
    removed: list[str]


def updated(before: Manifest, results: Mapping[str, str | None], gone: Iterable[str] = ()) -> Change:
    """``before`` after tests ran: ``results`` has the exception of each (``None``: it passed), ``gone`` are not there any more.

    Entries of tests that did not run stay as they are; reasons are kept.
    """
    after = {test: known for test, known in before.items() if test not in set(gone)}
    for test, exception in results.items():
        if exception is None:
            after.pop(test, None)
        else:
            reason = before[test].reason if test in before else NO_REASON
            after[test] = Known(test=test, exception=exception, reason=reason)
    return Change(
        after,
        added=sorted(after.keys() - before.keys()),
        changed=sorted(test for test in after.keys() & before.keys() if after[test] != before[test]),
        removed=sorted(before.keys() - after.keys()),
    )
