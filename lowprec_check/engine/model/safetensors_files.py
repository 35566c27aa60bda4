"""Files of safetensors, mapped into memory: the length of a header, a header in JSON, and values
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.errors import UsageError, first_line, message_of

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH = 8
"""Bytes of the number in front of the header, which is the header's length."""
_MAP_NORESERVE = 0x4000
"""A flag of Linux's mman.h: memory for writes is not set aside."""
_WINDOW = 128 << 10
"""Bytes that Linux reads ahead at most, by default."""


class Saved(NamedTuple):
    """A tensor in a file that is mapped into memory: the system reads its pages, and drops them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    mapped: mmap.mmap
    start: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def values(self) -> Tensor:
        """The tensor, each time with its own storage, which tells when it is used no longer."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.mapped, dtype=self.dtype, count=count, offset=self.start).view(self.shape)

    def read(self, begin: int, into: Tensor) -> None:
        """Fill ``into``, bytes in memory, with those from byte ``begin`` of the tensor on."""
        # Without the map, whose pages come one by one
        view = memoryview((ctypes.c_char * len(into)).from_address(into.data_ptr())).cast("B")
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + begin)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{self.path} ended while it was read")
                view = view[count:]

    def prefetch(self) -> None:
        """Let the system read it meanwhile, in parts that it reads ahead at once."""
        if not self.nbytes:
            return
        first, end = self.start - self.start % mmap.PAGESIZE, self.start + self.nbytes
        for begin in range(first, end, _WINDOW):
            self.mapped.madvise(mmap.MADV_WILLNEED, begin, min(_WINDOW, end - begin))

    def forget(self, *, cached: bool) -> None:
        """Drop its pages from this process and, unless ``cached``, from the system's cache."""
        if not self.nbytes:
            return
        first = self.start - self.start % mmap.PAGESIZE
        self.mapped.madvise(mmap.MADV_DONTNEED, first, self.start + self.nbytes - first)
        if not cached and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), self.start, self.nbytes, os.POSIX_FADV_DONTNEED)


def saved_tensors(path: Path) -> dict[str, Saved]:
    """The tensors in a file of safetensors, by name; raises :class:`UsageError` if it is none."""
    try:
        with path.open("rb") as file:
            mapped = None
            # Private, so that a model that writes to a weight neither ends nor changes the file
            if sys.platform == "linux":
                flags, rights = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                with contextlib.suppress(OSError):  # this system sets memory aside for all writes
                    mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=rights)
            if mapped is None:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = _LENGTH + int.from_bytes(mapped[:_LENGTH], "little")
        header = json.loads(mapped[_LENGTH:begin])
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is in the format {entry['dtype']}")
            first, end = entry["data_offsets"]
            saved = Saved(_DTYPES[entry["dtype"]], tuple(entry["shape"]), path, mapped, begin + first)
            # Of a file that was not copied to its end, reading would end this process
            if end - first != saved.nbytes or begin + end > len(mapped):
                raise ValueError(f"{name} has not as many bytes as its shape needs")
            tensors[name] = saved
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "Weights are streamed from .safetensors only."
        raise UsageError(f"Cannot read weights from {path}: {first_line(message_of(error))}", hint) from None
    return tensors
