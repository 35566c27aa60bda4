"""Writes docs/cli.md and docs/diagnostics.md from the program itself: ``python tools/make_reference.py``.

A test holds them to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lowprec_check.analysis.rules.registry import rules

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


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli(), encoding="utf-8")
    (DOCS / "diagnostics.md").write_text(diagnostics(), encoding="utf-8")
