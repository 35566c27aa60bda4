"""How saved data is declared, read and written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from lowprec_check.errors import UsageError, encodable

# -- Writes files: regular ones in a writable folder are replaced as a whole, others in place

_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
"""Errors of a folder without new files, or a mount point; the file itself may be writable."""

_CHOOSE = "Choose an existing, writable folder."


def write_file(path: str | Path, data: bytes | str) -> None:
    """Write ``data`` (text as UTF-8) to ``path``: into a new file in the same folder, which then
    replaces the old one.

    The file keeps its mode and, if possible, its owner, but not its hard links. A symbolic link
    stays, and its target is replaced. What is not a regular file (``/dev/stdout``, a FIFO) is
    written in place, and so is a file in a folder where none may be made.

    Raises:
        UsageError: the file cannot be written.
    """
    content = encodable(data).encode() if isinstance(data, str) else data
    with _usage_errors("write", path):
        file, old = _writable_target(Path(path))
        # What is no regular file, as a terminal or a FIFO, has nothing to replace.
        if old is not None and (not stat.S_ISREG(old.st_mode) or _is_in_proc(file)):
            _write_in_place(file, content)
            return
        try:
            _replace(file, content, old)
        except OSError as error:  # a folder may allow to write its files and to add none
            if old is None or error.errno not in _NOT_REPLACEABLE:
                raise
            _write_in_place(file, content)


def check_file(path: str | Path) -> None:
    """Raise :class:`UsageError` if ``path`` cannot be written. Changes nothing, opens no FIFO."""
    with _usage_errors("write", path):
        _writable_target(Path(path))


def make_folder(path: Path) -> None:
    """Create the folder ``path`` and its parents if needed; may raise :class:`UsageError`."""
    with _usage_errors("create", path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _usage_errors(verb: str, path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free some space, or choose another folder." if full else _CHOOSE
        raise UsageError(f"Cannot {verb} {path}: {error.strerror or error}.", hint) from None
    except ValueError as error:  # a null character in the path
        raise UsageError(f"Cannot {verb} {path}: {error}.", _CHOOSE) from None


def _writable_target(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file that ``path`` leads to, and its status if it exists; or raises ``OSError``."""
    try:
        old = path.stat()
    except FileNotFoundError:
        old = None
    # A link is followed by hand: its target is replaced, and may not exist yet.
    while path.is_symlink() and not _is_in_proc(path):
        path = path.parent / path.readlink()
    if old is None:
        path.parent.stat()  # raises if there is no such folder
        allowed = os.access(path.parent, os.W_OK | os.X_OK)
    else:
        allowed = os.access(path, os.W_OK)
    if not allowed:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if old is not None and stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path, old


def _is_in_proc(path: Path) -> bool:
    """Whether ``path`` is an open file, such as ``/dev/stdout``: others may be writing to it."""
    return str(path.parent.resolve()).startswith("/proc/")


def _write_in_place(file: Path, content: bytes) -> None:
    """Write a file that cannot be replaced; an open file continues where others have written."""
    with file.open("ab" if _is_in_proc(file) else "wb") as stream:
        stream.write(content)


def _replace(file: Path, content: bytes, old: os.stat_result | None) -> None:
    new = file.with_name(f".lowprec-check-{os.urandom(8).hex()}")  # a name that nobody can predict
    try:
        _write_new(new, content, old)
        new.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _write_new(new: Path, content: bytes, old: os.stat_result | None) -> None:
    """Write a new file, nameless until it is complete (if possible): a kill leaves nothing."""
    unnamed = None
    with contextlib.suppress(AttributeError, OSError):  # not every system and file system can
        unnamed = os.open(new.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    if unnamed is not None:
        with open(unnamed, "wb") as stream:
            _fill(stream, content, old)
            with contextlib.suppress(OSError):  # some file systems cannot name it
                # With a folder descriptor, os.link follows the link in /proc.
                os.link(f"/proc/self/fd/{unnamed}", new, src_dir_fd=unnamed)
                return
    with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as stream:
        _fill(stream, content, old)


def _fill(stream: IO[bytes], content: bytes, old: os.stat_result | None) -> None:
    """Write ``content`` to the disk, with the owner and mode of ``old``."""
    stream.write(content)
    stream.flush()
    if old is not None and hasattr(os, "fchown"):
        with contextlib.suppress(PermissionError):
            os.fchown(stream.fileno(), old.st_uid, old.st_gid)
        with contextlib.suppress(PermissionError):
            os.fchmod(stream.fileno(), stat.S_IMODE(old.st_mode))
    os.fsync(stream.fileno())


# -- The base classes of saved data, and how it is read
#
# The rule for saved files: a field that is added does not change the schema number, and older
# readers of that number skip it; removing a field or changing its meaning raises the number. A
# reader that meets a higher number asks for an upgrade.


class Struct(msgspec.Struct, frozen=True):
    """Base of saved data: immutable; skips unknown fields, which newer versions may add."""


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of files written by hand: an unknown field is an error, maybe a typing mistake."""


def encode(value: Struct | Sequence[Struct] | dict[str, Any], indent: int = 2) -> bytes:
    """Encode as indented JSON with a final newline."""
    return msgspec.json.format(encoded(value, msgspec.json.encode), indent=indent) + b"\n"


def encoded(value: Any, encoder: Callable[[Any], bytes]) -> bytes:
    r"""``encoder(value)``; a lone surrogate in a text becomes ``\udc80``, so that no text prevents
    saving or sending.
    """
    try:
        return encoder(value)
    except UnicodeEncodeError:
        return encoder(_encodable(msgspec.to_builtins(value)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value


class _Head(msgspec.Struct):
    schema: int
    tool: str = ""


Saved = TypeVar("Saved", bound=Struct)


_HUGE = re.compile(rb"\d{19}")


def _check_integers(value: Any) -> None:
    """Raise ``ValueError`` for an integer beyond 64 bits: no figure of a scan is one."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer has more than 64 bits")
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        _check_integers(item)


def decode(data: bytes | str, kind: type[Saved], schema: int) -> Saved:
    """Decode JSON with the schema number ``schema``; raises ``ValueError`` naming the wrong key or
    the required version.

    The number is read first, since another number means other fields.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema == schema:
            # The decoder takes an integer of any size for a float; most files have no such digits.
            if _HUGE.search(data.encode() if isinstance(data, str) else data):
                _check_integers(msgspec.json.decode(data))
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    saved_by = f"saved by {head.tool or 'another version of lowprec-check'}"
    if head.schema > schema:
        raise ValueError(f"{saved_by} with schema {head.schema}; upgrade lowprec-check, which reads schema {schema}")
    raise ValueError(f"{saved_by} with schema {head.schema}, which is too old; this version reads schema {schema}")
