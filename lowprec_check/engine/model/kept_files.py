"""Keeps existing files as they are while the user's code runs: what would write to one writes to a
temporary copy.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowprec_check.engine.core.source_location import show_file
from lowprec_check.process import system
from lowprec_check.process.process_group import GUARDIAN


@contextlib.contextmanager
def replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    """Inside, ``function`` stands for the attribute ``name`` of ``place``."""
    kept = getattr(place, name)
    setattr(place, name, function)
    try:
        yield
    finally:
        setattr(place, name, kept)


class KeptFiles(contextlib.ExitStack):
    """While it is entered, no file that existed before is changed or removed through ``open``,
    :mod:`os`, :mod:`shutil` or ``torch.save``.

    Code that opens one for writing gets a copy, which it also reads from then on; a removed file or
    folder counts as removed where it is made anew. What other processes and libraries in C write is
    not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: str | None = None
        self._since = 0
        self._copies: dict[str, str] = {}
        self._removed: set[str] = set()
        self._made: set[str] = set()
        """Folders."""
        self._kept: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which files were kept, in a sentence."""
        shown = [show_file(path) for path in self._kept]
        if not shown:
            return ()
        more = ""
        if len(shown) > 3:
            more = f" and {len(shown) - 3} more"
        return (f"the file writes to or removes {', '.join(shown[:3])}{more}, which the scan left as they are",)

    def __enter__(self) -> KeptFiles:
        """Replace the functions that change files."""
        self._since = _time_of_files()
        deadline = system.monotonic() + _TICK_SECONDS
        while _time_of_files() <= self._since and system.monotonic() < deadline:
            system.sleep(0.001)
        files = [os, *([pathlib._normal_accessor] if hasattr(pathlib, "_normal_accessor") else [])]  # Python 3.10
        for place in (builtins, io, *files[1:]):
            self._replace(place, "open", self._open)
        for place in files:
            for name in ("remove", "unlink", "rmdir"):
                self._replace(place, name, self._remove)
            for name in ("rename", "replace"):
                self._replace(place, name, self._rename)
            self._replace(place, "mkdir", self._make_folder)
        self._replace(os, "truncate", self._truncate)
        self._replace(shutil, "rmtree", self._remove)
        self._replace(torch, "save", self._save)
        return self

    def _replace(self, place: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
        if hasattr(place, name):
            self.enter_context(replaced(place, name, wrapped(getattr(place, name))))

    # -- Which files, and where their copies are

    def _is_kept(self, path: Any) -> bool:
        """Whether ``path`` is a file or folder that existed before. The time of a folder changes
        with what it holds.
        """
        try:
            found = os.lstat(path)
        except (OSError, TypeError, ValueError):
            return False
        is_folder = stat.S_ISDIR(found.st_mode)
        if is_folder:
            return _name(path) not in self._made
        return found.st_ctime_ns <= self._since

    def _place(self, path: Any, mode: str) -> Any:
        """Where to open ``path``: there, or at its copy if it must be kept."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path  # a descriptor
        name = _name(path)
        writes = any(letter in mode for letter in "wax+")
        if name in self._copies or not writes or not os.path.isfile(name) or not self._is_kept(name):
            return self._copies.get(name, path)
        if self._folder is None:
            self._folder = tempfile.mkdtemp(dir=GUARDIAN.temporary_folder())
        copy = os.path.join(self._folder, f"{len(self._copies)}-{os.path.basename(name)}")
        if "w" not in mode and name not in self._removed:
            shutil.copyfile(name, copy)
        self._copies[name] = copy
        self._kept[name] = None
        return copy

    # -- The functions

    def _open(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return kept(self._place(file, mode) if isinstance(mode, str) else file, mode, *args, **kwargs)

        return open_

    def _save(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            kept(obj, self._place(f, "w"), *args, **kwargs)

        return save

    def _remove(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or not self._is_kept(path):
                return kept(path, *args, **kwargs)
            name = _name(path)
            self._removed.add(name)
            self._kept[name] = None
            return None

        return remove

    def _rename(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            if kwargs or not (self._is_kept(source) or self._is_kept(target)):
                kept(source, target, **kwargs)
                return
            if os.path.isfile(source):
                shutil.copyfile(self._place(source, "r"), self._place(target, "w"))
                os.remove(source)
            else:  # a folder
                self._kept[_name(source)] = None

        return rename

    def _make_folder(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        def make(path: Any, *args: Any, **kwargs: Any) -> None:
            name = _name(path)
            if (
                kwargs.get("dir_fd") is None
                and os.path.isdir(name)
                and any(name.startswith(each) for each in self._removed)
            ):
                return
            kept(path, *args, **kwargs)
            self._made.add(name)

        return make

    def _truncate(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, length: kept(self._place(path, "r+"), length)


_TICK_SECONDS = 0.05
"""At least the resolution of the times of files."""


def _time_of_files() -> int:
    """The time that a file made now has, which is behind the clock."""
    with tempfile.TemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


def _name(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
