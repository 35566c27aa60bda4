"""Fills in the templates in this folder; the security policy of the pages. Never imports torch."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).parent


def fill(template: str, **values: Any) -> str:
    """Render a template; values are escaped, and a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)


def script_in(name: str) -> str:
    """The text of a script in this folder, ``op/grid.js``."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def security_policy(scripts: Iterable[str]) -> str:
    """A content security policy by which only these ``scripts`` of a page run, and nothing is loaded."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
