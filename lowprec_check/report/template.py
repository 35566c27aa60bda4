"""Pages made of one template that lies beside the renderers. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def fill(template: str, **values: Any) -> str:
    """The page; values are escaped, and one that the template asks for and does not get is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)
