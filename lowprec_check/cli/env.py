"""``lowprec-check env``: what this machine accelerates."""

from __future__ import annotations

from lowprec_check.cli.app import Json, app, print_answer
from lowprec_check.cli.options import Device


@app.command()
def env(json: Json = False, device: Device = None) -> None:
    """Show the hardware and which precisions it accelerates."""
    from lowprec_check.core.machine import environment
    from lowprec_check.report.answers import environment_document

    print_answer(environment(device), environment_document, json)
