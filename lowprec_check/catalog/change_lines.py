"""Files that hold many versions: one line per change of an operator, starting with its name and the first version with the change.

Lines are sorted by operator, then by version, and decoded on first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from lowprec_check.errors import UsageError

MEASURE_AGAIN = "Restore the file, or measure again with `lowprec-check catalog build`."


class CatalogError(UsageError):
    """A file of the catalog cannot be read; the message names the line and the key."""


class ChangeLine(NamedTuple):
    """One change of one operator."""

    number: int
    """The line number in the file, from 1."""
    since: int
    """The index of the version in the list of versions of the file."""
    removed: bool
    """Whether the operator is missing since that version."""
    data: bytes


class ChangeLines:
    """The changes of a file by operator.

    ``prefix`` matches the start of a line. Its groups are the operator, the version and, if the operator is removed, the rest.
    ``versions`` maps each version to its index. Raises :class:`CatalogError` naming file and line.
    """

    def __init__(
        self, path: Path, lines: Sequence[bytes], first: int, prefix: re.Pattern[bytes], versions: Mapping[str, int]
    ) -> None:
        self.path = path
        self.by_op: dict[str, list[ChangeLine]] = {}
        last = ""
        for number, data in enumerate(lines, first):
            found = prefix.match(data)
            if found is None:
                raise self._format_error(number, data)
            op, version = found[1].decode(errors="replace"), found[2].decode(errors="replace")
            if version not in versions:
                raise self.error(number, f"op {op!r}: version {version!r} is not listed at the top of the file")
            line = ChangeLine(number, versions[version], found[3] is not None, data)
            if op == last and line.since > self.by_op[op][-1].since:
                self.by_op[op].append(line)
            elif op > last:
                self.by_op[op] = [line]
            else:
                raise self.error(number, f"op {op!r} version {version!r}: duplicate or not sorted")
            last = op

    def _format_error(self, number: int, data: bytes) -> CatalogError:
        decode(self.path, number, data, dict[str, msgspec.Raw] if data[:1] == b"{" else list[msgspec.Raw])
        return self.error(number, "does not start with an operator and a version")

    def error(self, number: int, message: str) -> CatalogError:
        """An error that names a line."""
        return CatalogError(f"{self.path.name}:{number}: {message}", MEASURE_AGAIN)


T = TypeVar("T")


def decode(path: Path, number: int, data: bytes, kind: type[T]) -> T:
    """Decode one line; raises :class:`CatalogError` naming file, line and key."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path.name}:{number}: {error}", MEASURE_AGAIN) from None


class _Schema(msgspec.Struct):
    schema: int


def read_head(path: Path, line: bytes, kind: type[T], schema: int) -> T:
    """Decode the first line of a file. ``schema`` is checked first: another schema has other keys."""
    found = decode(path, 1, line, _Schema).schema
    if found != schema:
        raise CatalogError(f"{path.name}:1: schema {found}, but this version of lowprec-check reads schema {schema}")
    return decode(path, 1, line, kind)


def split_lines(path: Path) -> list[bytes]:
    """The lines of a file without line ends; at least one."""
    return path.read_bytes().removesuffix(b"\n").split(b"\n")
