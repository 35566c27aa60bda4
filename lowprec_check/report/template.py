"""Fills in the templates in this folder. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def fill(template: str, **values: Any) -> str:
    """Render a template; values are escaped, and a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)
