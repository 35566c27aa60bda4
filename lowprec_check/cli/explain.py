"""``lowprec-check explain``: the manual of diagnostics."""

from __future__ import annotations

from typing import Annotated

from lowprec_check.cli.app import app, print_text, screen_size
from lowprec_check.cli.parameters import Argument
from lowprec_check.errors import UsageError


def _codes() -> list[str]:
    from lowprec_check.analysis.rules.registry import rules

    return list(rules())


@app.command()
def explain(
    code: Annotated[
        str | None,
        Argument(
            metavar="[CODE]",
            help="Code or name, e.g. LP101 or missing-kernel. Default: list all.",
            names=_codes,
        ),
    ] = None,
) -> None:
    """Print the manual page of a diagnostic code."""
    from lowprec_check.analysis.rules.registry import rules
    from lowprec_check.report.answers import list_document
    from lowprec_check.report.manual import render_page

    if code is None:
        print_text(list_document(rules().values()))
        return
    by_name = (rule for rule in rules().values() if rule.name == code.lower())
    rule = rules().get(code.upper()) or next(by_name, None)
    if rule is None:
        raise UsageError(f"Unknown diagnostic code {code!r}.", f"Choose from {', '.join(sorted(rules()))}.")
    print(render_page(rule, screen_size()["width"]))
