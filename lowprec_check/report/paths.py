"""Leaves folders of the machine out of reports that are published: a comment, a log, an upload."""

from __future__ import annotations

import os
import re

_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|*?]+"
_PATH = rf"(?<![\w/\\.~@-])(?:file://)?(?:[A-Za-z]:[/\\]|/)(?!(?:dev|proc|sys)/|/)(?:{_PART}[/\\])+(?:{_PART})?"
_QUOTED = r"(?<=(['\"`]))(?:[A-Za-z]:[/\\]|/)(?:[^'\"`\n/\\]+[/\\])+[^'\"`\n/\\]*(?=\1)"
_ABSOLUTE = re.compile(f"{_QUOTED}|{_PATH}")
"""Paths of at least two parts, with spaces only within quotes; not URLs, and not `/dev/shm`, which is the same everywhere."""

_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?=.)|.*[/\\]lib[/\\]python3\.\d+[/\\](?=.)")


def without_folders(text: str) -> str:
    """``text`` with each absolute path replaced by what means the same elsewhere.

    That is the path from an installed package on (``timm/layers/mlp.py:42``), relative to the current folder, or else the name alone.
    """
    return _ABSOLUTE.sub(_short, text) if "/" in text or "\\" in text else text


def _short(match: re.Match[str]) -> str:
    path = match[0].removeprefix("file://")
    installed = _PACKAGES.match(path)
    if installed is not None:
        return path[installed.end() :].replace("\\", "/")
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        here = os.sep
    if len(here) > 1 and path.startswith(here) and path != here:
        return path[len(here) :]
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
