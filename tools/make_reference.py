"""Writes the generated files in docs/ (see ``REFERENCES``) from the program itself: ``python tools/make_reference.py``.

A test checks that they are up to date.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.schema.scan_result import ScanResult

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = (
    "scan",
    "plan",
    "compat",
    "report",
    "diff",
    "op",
    "catalog build",
    "catalog diff",
    "catalog gaps",
    "catalog report",
    "explain",
    "env",
)


def help_of(*arguments: str) -> str:
    """What ``--help`` prints, 100 columns wide, without colours."""
    command = [sys.executable, "-m", "lowprec_check", *arguments, "--help"]
    plain = os.environ | {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    return done.stdout.replace("python -m lowprec_check", "lowprec-check").rstrip()


def cli() -> str:
    """The text of cli.md."""
    parts = ["# The command line", "", "Made by `python tools/make_reference.py`.", ""]
    for name in ("", *COMMANDS):
        parts += [f"## lowprec-check {name}".rstrip(), "", "```", help_of(*name.split()), "```", ""]
    return "\n".join(parts)


def diagnostics() -> str:
    """The text of diagnostics.md."""
    parts = [
        "# Diagnostics",
        "",
        "Made by `python tools/make_reference.py`; `lowprec-check explain CODE` prints the same.",
        "",
    ]
    for code, rule in sorted(rules().items()):
        parts += [f"## {code} {rule.name}", "", f"*{rule.severity}.* {rule.manual}", ""]
    return "\n".join(parts)


def schema() -> str:
    """The text of schema.json: the JSON Schema of a saved scan."""
    described = msgspec.json.schema(ScanResult)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A scan saved by lowprec-check",
        "description": "Fields may be added without a new schema number: readers must skip those they do not know.",
    }
    return json.dumps(head | described, indent=1, ensure_ascii=False) + "\n"


REFERENCES = {"cli.md": cli, "diagnostics.md": diagnostics, "schema.json": schema}
"""What is written: the file in docs/ and what makes it."""

if __name__ == "__main__":
    for name, text in REFERENCES.items():
        (DOCS / name).write_text(text(), encoding="utf-8")
