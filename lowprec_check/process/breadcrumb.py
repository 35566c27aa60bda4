"""Files that processes share: a breadcrumb, which survives its worker, and files without a name."""

from __future__ import annotations

import io
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_check.errors import UsageError
from lowprec_check.process import system
from lowprec_check.process.interpreter import open_descriptors

# -- Files without a name, shared by their descriptor: they vanish with the last process


def shared_file() -> int:
    """A new descriptor of an empty file: in memory on Linux, else in a temporary folder. Raises
    :class:`UsageError` if neither is possible.
    """
    open_descriptors()
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("lowprec-check")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    except OSError as error:
        problem = f"Cannot create a temporary file: {error.strerror or error}."
        raise UsageError(problem, "Free some space, or set TMPDIR.") from None


def clear_shared(descriptor: int) -> None:
    """Empty a shared file, and return to its start."""
    os.truncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)


class _Shared(io.RawIOBase):
    """Reads a shared file at a position of its own: processes share that of the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, os.fstat(self._descriptor).st_size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._position += count
        return count


def open_shared(descriptor: int) -> io.BufferedReader:
    """A shared file, from its start; several processes may read it at once."""
    return io.BufferedReader(_Shared(descriptor))


def read_shared(descriptor: int) -> bytes:
    """The content of a shared file."""
    return open_shared(descriptor).read()


# -- A breadcrumb: the op that a worker is running, and since when. It survives a crash
#
# The file, which may have no name, is mapped into both processes. The worker writes it before and
# after every op; its supervisor reads it to show progress, to detect an op that takes too long, and
# to name the op in which the process died.

_SIZE = 1024
_HEAD = struct.Struct("<BdIH")  # state, started, ops so far, length of the text
_THREADS = struct.Struct("<H")  # at the end of the file: what the supervisor tells the worker
_TEXT = _SIZE - _HEAD.size - _THREADS.size

IDLE, IN_OP, AFTER_OP = 0, 1, 2


class Position(NamedTuple):
    """What a breadcrumb contains."""

    state: int
    started: float
    """``time.time()`` at which the op started."""
    ops: int
    op: str
    module: str
    source: str | None

    @property
    def in_op(self) -> bool:
        """Whether an op has started and not ended."""
        return self.state == IN_OP

    def seconds_in_op(self) -> float:
        """Seconds since the running op started; 0 between ops."""
        if self.in_op:
            return system.now() - self.started
        return 0.0


class Breadcrumb:
    """The mapped file of a descriptor, which may be closed afterwards."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _SIZE)
        self._ops = 0
        self.watch_threads: Callable[[int], None] | None = None
        """Called with :attr:`threads` before each op."""

    @classmethod
    def clear(cls, descriptor: int) -> Breadcrumb:
        """Empty the file, and map it."""
        os.truncate(descriptor, 0)
        os.truncate(descriptor, _SIZE)
        return cls(descriptor)

    @classmethod
    def open(cls, path: str | Path) -> Breadcrumb:
        """Map the file at ``path``, which another process has created."""
        with open(path, "r+b") as file:
            return cls(file.fileno())

    @classmethod
    def create(cls, path: str | Path) -> Breadcrumb:
        """Create an empty breadcrumb at ``path``."""
        Path(path).write_bytes(bytes(_SIZE))
        return cls.open(path)

    def enter(self, op: str, module: str, source: str | None) -> None:
        """Record that an op starts."""
        text = f"{op}\0{module}\0{source or ''}".encode()[:_TEXT]
        self._ops += 1
        head = _HEAD.pack(IN_OP, system.now(), self._ops, len(text))
        self._map[: _HEAD.size + len(text)] = head + text
        if self.watch_threads is not None:
            self.watch_threads(self.threads)

    def leave(self) -> None:
        """Record that the op has ended."""
        self._map[0] = AFTER_OP

    def read(self) -> Position | None:
        """Return the last position written; ``None`` before the first op."""
        state, started, ops, length = _HEAD.unpack_from(self._map)
        if state == IDLE:
            return None
        text = self._map[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        op, module, source = [*text.split("\0"), "", ""][:3]
        return Position(state, started, ops, op, module, source or None)

    @property
    def threads(self) -> int:
        """How many threads the instruments may use; 0: no limit."""
        found: int = _THREADS.unpack_from(self._map, _SIZE - _THREADS.size)[0]
        return found

    def limit_threads(self, number: int) -> None:
        """Limit the threads of the instruments; 0 removes the limit."""
        _THREADS.pack_into(self._map, _SIZE - _THREADS.size, number)
