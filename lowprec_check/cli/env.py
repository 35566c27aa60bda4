"""``lowprec-check env``."""

from __future__ import annotations

from lowprec_check.cli.app import app, print_json, print_text
from lowprec_check.cli.options import Device, Json


@app.command()
def env(json: Json = False, device: Device = None) -> None:
    """Show the hardware and which precisions it accelerates."""
    from lowprec_check.engine.machine import environment

    found = environment(device)
    if json:
        print_json(found)
        return
    from lowprec_check.report.answers import environment_document

    print_text(environment_document(found))
