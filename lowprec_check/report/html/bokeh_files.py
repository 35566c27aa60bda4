"""Bokeh's JavaScript, which draws the charts: 1.4 MB, read from its package, since importing Bokeh takes a second."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lowprec_check.errors import UsageError

OLDEST = (3, 9)
_FILES = ("bokeh.min.js", "bokeh-api.min.js")


def folder() -> Path:
    """The folder of the scripts; raises :class:`UsageError` if Bokeh is missing or too old."""
    found = find_spec("bokeh")
    if found is None or found.origin is None or tuple(map(int, version("bokeh").split(".")[:2])) < OLDEST:
        raise UsageError(
            "An HTML report needs Bokeh 3.9 or later, which is not installed.",
            "Run: pip install 'lowprec-check[report]'",
        )
    return Path(found.origin).parent / "server" / "static" / "js"


def scripts() -> list[str]:
    """The scripts: BokehJS and its plotting API."""
    return [(folder() / name).read_text(encoding="utf-8") for name in _FILES]
