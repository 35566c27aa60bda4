"""Keeps existing files as they are while the user's code runs, which writes to copies of them."""

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

from lowprec_check.process import system
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.torchkit.source_location import show_file


@contextlib.contextmanager
def replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    """Inside, ``function`` stands for the attribute ``name`` of ``place``."""
    original = getattr(place, name)
    setattr(place, name, function)
    try:
        yield
    finally:
        setattr(place, name, original)


class KeptFiles(contextlib.ExitStack):
    """Inside, ``open``, :mod:`os`, :mod:`shutil` and ``torch.save`` change no file that exists.

    Code that opens one for writing gets a copy, which it also reads from then on; a removed file or
    folder counts as removed where it is made anew. Other processes and libraries in C can change
    files.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: str | None = None
        self._since = 0
        self._copies: dict[str, str] = {}
        self._removed: set[str] = set()
        self._made: set[str] = set()  # folders
        self._kept: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which files were kept, in a sentence."""
        names = [show_file(path) for path in self._kept]
        if not names:
            return ()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (f"the file writes to or removes {', '.join(names[:3])}{more}, which the scan left as they are",)

    def __enter__(self) -> KeptFiles:
        # Files that the user's code makes from now on are to have a later time than existing ones
        self._since = _time_of_files()
        deadline = system.monotonic() + _TICK_SECONDS
        while _time_of_files() <= self._since and system.monotonic() < deadline:
            system.sleep(0.001)
        files: list[Any] = [os]
        if hasattr(pathlib, "_normal_accessor"):  # Python 3.10, which has copies of the functions of os
            files.append(pathlib._normal_accessor)
        for place in (builtins, io, *files[1:]):
            self._replace(place, "open", self._open)
        for place in files:
            for name in ("remove", "unlink", "rmdir"):
                self._replace(place, name, self._remove)
            for name in ("rename", "replace"):
                self._replace(place, name, self._rename)
            self._replace(place, "mkdir", self._make_folder)
        self._replace(os, "truncate", lambda original, path, length: original(self._place(path, "r+"), length))
        self._replace(shutil, "rmtree", self._remove)
        self._replace(torch, "save", self._save)
        return self

    def _replace(self, place: Any, name: str, instead: Callable[..., Any]) -> None:
        """Let ``instead`` be called with the function and its arguments."""
        original = getattr(place, name, None)

        def function(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        if original is not None:
            self.enter_context(replaced(place, name, function))

    # -- Which files, and where their copies are

    def _is_kept(self, path: Any) -> bool:
        """Whether ``path`` is a file or folder that existed before."""
        try:
            status = os.lstat(path)
        except (OSError, TypeError, ValueError):
            return False
        # The time of a folder changes with what it holds
        if stat.S_ISDIR(status.st_mode):
            return _name(path) not in self._made
        return status.st_ctime_ns <= self._since

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
        # The user's code adds to the file, or reads what it does not overwrite
        if "w" not in mode and name not in self._removed:
            shutil.copyfile(name, copy)
        self._copies[name] = copy
        self._kept[name] = None
        return copy

    # -- The functions

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return original(self._place(file, mode) if isinstance(mode, str) else file, mode, *args, **kwargs)

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, self._place(f, "w"), *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None or not self._is_kept(path):
            return original(path, *args, **kwargs)
        name = _name(path)
        self._removed.add(name)
        self._kept[name] = None
        return None

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        if kwargs or not (self._is_kept(src) or self._is_kept(dst)):
            original(src, dst, **kwargs)
        elif os.path.isfile(src):
            shutil.copyfile(self._place(src, "r"), self._place(dst, "w"))
            os.remove(src)
        else:  # a folder
            self._kept[_name(src)] = None

    def _make_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        name = _name(path)
        # A folder that counts as removed, or lies in one, is still there
        is_removed = any(name.startswith(removed) for removed in self._removed)
        if kwargs.get("dir_fd") is None and os.path.isdir(name) and is_removed:
            return
        original(path, *args, **kwargs)
        self._made.add(name)


_TICK_SECONDS = 0.05
"""At least the resolution of the times of files."""


def _time_of_files() -> int:
    """The time that a file made now has, which is behind the clock."""
    with tempfile.TemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


def _name(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
