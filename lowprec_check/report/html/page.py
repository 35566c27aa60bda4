"""Pages in one file: autoescaped templates, inlined styles and scripts, a content security policy that allows no others."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from lowprec_check.report.template import security_policy

_HERE = files("lowprec_check.report.html")


_FIGURE = re.compile(r"\d(?:\.\d+)?e-\d+")


def _unbroken(text: str) -> Markup:
    """``text`` as HTML, in which no line ends inside a figure such as ``5e-02``."""
    return Markup(_FIGURE.sub(lambda found: f'<span class="tight">{found[0]}</span>', str(escape(text))))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowprec_check.report.html", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["unbroken"] = _unbroken
    return environment


def static(name: str) -> str:
    """The text of a file in ``static/``."""
    return (_HERE / "static" / name).read_text(encoding="utf-8")


def render_fragment(template: str, **values: Any) -> str:
    """Fill in a template without scripts, such as a part of another page."""
    return _environment().get_template(template).render(**values)


def render_page(template: str, scripts: list[str], **values: Any) -> str:
    """Render a page on which only the given ``scripts`` may run and nothing may be loaded."""
    page = _environment().get_template(template)
    style, inlined = Markup(static("style.css")), [Markup(script) for script in scripts]
    return page.render(policy=security_policy(scripts), style=style, scripts=inlined, **values)
