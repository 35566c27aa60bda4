"""Files without a name that processes share by their descriptor; they vanish with the last process."""

from __future__ import annotations

import os
import tempfile

from lowprec_check.errors import UsageError
from lowprec_check.process.standard_streams import open_descriptors


def shared_file() -> int:
    """A new descriptor of an empty file: in memory on Linux, so that no temporary folder is needed; else in one.

    Raises :class:`UsageError` if neither is possible.
    """
    open_descriptors()
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("lowprec-check")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise UsageError(
            f"Cannot create a temporary file: {error.strerror or error}.", "Free some space, or set TMPDIR."
        ) from None


def clear_shared(descriptor: int) -> None:
    """Empty a shared file, and return to its start."""
    os.truncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)


def read_shared(descriptor: int) -> bytes:
    """The content of a shared file."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()
