"""``lowprec-check explain``: the manual of diagnostics."""

from __future__ import annotations

from typing import Annotated

from lowprec_check.cli.app import app, print_text, screen_size
from lowprec_check.cli.parameters import Argument
from lowprec_check.errors import UsageError


def _codes() -> list[str]:
    from lowprec_check.analysis.rules.registry import rules

    return [*rules(), *(rule.name for rule in rules().values())]


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
    from lowprec_check.schema.registry import nearest

    if code is None:
        print_text(list_document(rules().values()))
        return
    by_name = {rule.name: rule for rule in rules().values()}
    rule = rules().get(code.upper()) or by_name.get(code.lower())
    if rule is None:
        near = nearest(code, by_name)
        hint = f"Did you mean {near}?" if near else f"Choose from {', '.join(sorted(rules()))}."
        raise UsageError(f"Unknown diagnostic code {code!r}.", hint)
    print(render_page(rule, screen_size()["width"]))
