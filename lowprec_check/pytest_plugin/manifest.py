"""Reads and writes the manifest of known failures, a sorted TOML file. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lowprec_check.catalog.toml_tables import read_tables
from lowprec_check.errors import UsageError, encodable
from lowprec_check.schema.base import StrictStruct

HEAD = "# Tests that are known to fail, each with its exception. Updated by pytest --lowprec-update-manifest; fill in the reasons.\n"
NO_REASON = "no reason given"


class KnownFailure(StrictStruct, frozen=True, kw_only=True):
    """One test that is known to fail."""

    test: str
    """Its exact id, ``tests/test_model.py::test_half[dot]``."""
    exception: str
    """Name of the exception's class, ``NotImplementedError``."""
    reason: str = NO_REASON


Manifest = dict[str, KnownFailure]
"""By test."""


def read(path: Path) -> Manifest:
    """Read a manifest strictly; raises :class:`UsageError` that names file, entry and key."""
    try:
        entries = read_tables(path, "known", KnownFailure)
    except FileNotFoundError:
        raise UsageError(f"The manifest {path} does not exist.", "Create it with --lowprec-update-manifest.") from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    found: Manifest = {}
    for entry in entries:
        if entry.test in found:
            raise UsageError(f"{path}: duplicate entry {entry.test}.", "Remove one of them.")
        found[entry.test] = entry
    return found


def dump(entries: Iterable[KnownFailure], head: str = HEAD) -> str:
    """The text of a manifest, sorted by test so that updates of two people merge."""
    tables = [
        f"\n[[known]]\ntest = {_string(e.test)}\nexception = {_string(e.exception)}\nreason = {_string(e.reason)}\n"
        for e in sorted(entries, key=lambda entry: entry.test)
    ]
    return head + "".join(tables)


def _string(text: str) -> str:
    """A TOML basic string, which differs from a JSON string only in DEL."""
    return json.dumps(encodable(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def head_of(path: Path) -> str:
    """The comment at the top of a manifest, which an update keeps."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(lines) or HEAD


class Change(NamedTuple):
    """An updated manifest and its changes."""

    manifest: Manifest
    added: list[str]
    changed: list[str]
    removed: list[str]


def updated(before: Manifest, results: Mapping[str, str | None], missing: Iterable[str] = ()) -> Change:
    """Update ``before``. ``results`` has the exception of each test that ran (``None``: it passed); ``missing`` tests do not exist.

    Entries of tests that did not run are unchanged; reasons are kept.
    """
    after = {test: known for test, known in before.items() if test not in set(missing)}
    for test, exception in results.items():
        if exception is None:
            after.pop(test, None)
        else:
            reason = before[test].reason if test in before else NO_REASON
            after[test] = KnownFailure(test=test, exception=exception, reason=reason)
    return Change(
        after,
        added=sorted(after.keys() - before.keys()),
        changed=sorted(test for test in after.keys() & before.keys() if after[test] != before[test]),
        removed=sorted(before.keys() - after.keys()),
    )
