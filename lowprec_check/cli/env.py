"""``lowprec-check env``."""

from __future__ import annotations

from typing import Annotated

import typer

from lowprec_check.cli.app import app, print_json


@app.command()
def env(
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, xpu or mps.")] = None,
) -> None:
    """Say what this machine has and accelerates."""
    from lowprec_check.engine.machine import environment

    found = environment(device)
    if json:
        print_json(found)
        return
    from lowprec_check.report.environment import render

    print(render(found))
