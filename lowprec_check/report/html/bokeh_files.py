"""Bokeh's own JavaScript, which draws the charts: 1.4 MB read from its wheel. Importing Bokeh would take a second."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lowprec_check.errors import UsageError

OLDEST = (3, 9)
_FILES = ("bokeh.min.js", "bokeh-api.min.js")


def folder() -> Path:
    """Where the files are; raises :class:`UsageError` if Bokeh is not installed, or too old."""
    found = find_spec("bokeh")
    if found is None or found.origin is None or tuple(map(int, version("bokeh").split(".")[:2])) < OLDEST:
        raise UsageError(
            "An HTML report needs Bokeh 3.9 or later, which is not installed.", "pip install 'lowprec-check[report]'"
        )
    return Path(found.origin).parent / "server" / "static" / "js"


def scripts() -> list[str]:
    """What draws plots, and what makes them."""
    return [(folder() / name).read_text(encoding="utf-8") for name in _FILES]
