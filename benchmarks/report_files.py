"""How a benchmark saves what it measured: as JSON, and as a report that is rendered from this JSON alone.

``tools/committed_reports.py`` lists the reports that are in ``reports/`` and renders them again.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def made(device: str = "cpu", note: str = "") -> dict[str, str]:
    """How the figures of this process come about: command, date, versions, machine, and what else one has to know."""
    from lowprec_check.engine.machine import environment  # imports torch, and some benchmarks time that

    found = environment(device)
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "lowprec-check": importlib.metadata.version("lowprec-check"),
        "torch": found["torch"],
        "machine": found["device_name"] + (f", {found['cores']} cores" if device == "cpu" else ""),
        "note": note,
    }


def head(title: str, data: Mapping[str, Any]) -> list[str]:
    """The first lines of a report in Markdown: the title, and how it was made."""
    how = data["made"]
    where = f"{how['date']}, lowprec-check {how['lowprec-check']}, torch {how['torch']}, {how['machine']}."
    return [f"# {title}", "", f"`{how['command']}`  ", f"{where}{' ' + how['note'] if how['note'] else ''}", ""]


def dumped(data: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of the lists and tables at its top."""

    def of(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and any(isinstance(entry, list | dict) for entry in value):
            return "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n]"
        if isinstance(value, dict) and any(isinstance(entry, list | dict) for entry in value.values()):
            entries = (f"{json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in value.items())
            return "{\n" + ",\n".join(entries) + "\n}"
        return text

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {of(value)}" for key, value in data.items()) + "\n}\n"


def save(output: Path | None, data: Mapping[str, Any], render: Callable[[Any], str]) -> None:
    """Write the data as OUTPUT.json and their report as OUTPUT.md; print the report if there is no output."""
    saved = dumped(data)
    text = render(json.loads(saved))
    if output is None:
        print(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(saved, encoding="utf-8")
    output.with_suffix(".md").write_text(text, encoding="utf-8")
