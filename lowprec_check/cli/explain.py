"""``lowprec-check explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from lowprec_check.cli.app import app
from lowprec_check.cli.options import completing
from lowprec_check.errors import UsageError


def _codes() -> list[str]:
    from lowprec_check.analysis.rules.registry import rules

    return list(rules())


@app.command()
def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            autocompletion=completing(_codes),
            help="Code or name, e.g. LP101 or missing-kernel. Default: list all.",
        ),
    ] = None,
) -> None:
    """Print the manual page of a diagnostic code."""
    from lowprec_check.analysis.rules.registry import rules

    if code is None:
        for _, rule in sorted(rules().items()):
            print(f"{rule.code}  {rule.name:<28}{rule.severity:<9}{rule.summary}")
        return
    found = rules().get(code.upper()) or next((rule for rule in rules().values() if rule.name == code.lower()), None)
    if found is None:
        raise UsageError(f"Unknown diagnostic code {code!r}.", f"Choose from {', '.join(sorted(rules()))}.")
    print(f"{found.code} {found.name} ({found.severity})\n\n{found.manual}")
