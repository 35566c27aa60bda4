"""The operators that a test suite uses and their support in low precision as JSON, Markdown and HTML. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable

from tabulate import tabulate

from lowprec_check.analysis.suite_coverage import Coverage, precision_of
from lowprec_check.catalog.declared import overload_name
from lowprec_check.report.coverage import head_lines, why, words_of
from lowprec_check.report.template import fill


def coverage_json(found: Coverage) -> str:
    """All fields as JSON."""
    return found.to_json().decode()


def coverage_markdown(found: Coverage) -> str:
    """A table of all operators, the worst first, and the tests that use each gap."""
    lines = ["# Low precision in the tests", "", *(f"{line}  " for line in head_lines(found)), ""]
    lines += [tabulate(_rows(found), headers=_columns(found), tablefmt="github")] if found.ops else []
    for use in found.gaps:
        lines += ["", f"## {overload_name(use.op)}", "", why(use), "", *(f"- `{test}`" for test in found.tests_of(use))]
    return "\n".join(lines) + "\n"


def coverage_html(found: Coverage) -> str:
    """The same as a self-contained page."""
    gaps = [(overload_name(use.op), why(use), found.tests_of(use)) for use in found.gaps]
    return fill("coverage.html.jinja", head=head_lines(found), columns=_columns(found), rows=_rows(found), gaps=gaps)


def _columns(found: Coverage) -> list[str]:
    return ["operator", *map(precision_of, found.dtypes), "tests", "why"]


def _rows(found: Coverage) -> list[list[str]]:
    uses = sorted(found.ops, key=lambda use: (use.worst, use.op))
    return [
        [overload_name(use.op), *(words_of(use, dtype) for dtype in found.dtypes), str(len(use.tests)), why(use)]
        for use in uses
    ]


RENDERERS: dict[str, Callable[[Coverage], str]] = {
    ".json": coverage_json,
    ".md": coverage_markdown,
    ".html": coverage_html,
}
"""By the suffix of the file."""
