"""What the benchmarks share: their options, how they save what they measured, and processes for their parts."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import multiprocessing.connection
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix; default: print it")
    return parser


def made(device: str = "cpu") -> dict[str, str]:
    """How the figures of this process come about: command, date, versions and machine."""
    from lowprec_check.catalog.versions import own_version
    from lowprec_check.core.machine import environment  # imports torch, and some benchmarks time that

    machine = environment(device)
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "lowprec-check": own_version(),
        "torch": machine["torch"],
        "machine": machine["device_name"] + (f", {machine['cores']} cores" if device == "cpu" else ""),
    }


def head(title: str, data: Mapping[str, Any]) -> list[str]:
    """The first lines of a report in Markdown: the title, and how it was made."""
    how = data["made"]
    where = f"{how['date']}, lowprec-check {how['lowprec-check']}, torch {how['torch']}, {how['machine']}."
    return [f"# {title}", "", f"`{how['command']}`  ", where, ""]


def save(output: Path | None, data: Mapping[str, Any], render: Callable[[Any], str]) -> None:
    """Write the data as OUTPUT.json and their report as OUTPUT.md; print the report if there is no output."""
    saved = json.dumps(data, ensure_ascii=False, indent=1)
    text = render(json.loads(saved))
    if output is None:
        print(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(saved + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(text, encoding="utf-8")


def saved(output: Path | None, key: str) -> Any:
    """What an earlier call saved under ``key``; an empty list if there is none."""
    path = output and output.with_suffix(".json")
    if path is None or not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))[key]


def described(error: BaseException) -> str:
    """Type and first line; of a traceback, the last."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if lines[0].startswith('Traceback') else 0][:160]}"


def in_processes(
    work: Callable[[Any], Any], items: Sequence[Any], jobs: int, seconds: float = math.inf, limit: float = math.inf
) -> Iterator[tuple[Any, Any, str]]:
    """Yield ``(item, result, problem)`` of each call as it ends, each in a forked process of its own.

    A call that takes longer than ``limit`` seconds is killed; after ``seconds``, all are.
    """
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + seconds
    waiting = list(items)
    running: dict[Any, tuple[Any, Any, float]] = {}

    def send(sender: Any, item: Any) -> None:
        try:
            sender.send((work(item), ""))
        except BaseException as error:
            sender.send((None, described(error)))

    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                item = waiting.pop(0)
                process = context.Process(target=send, args=(sender, item))
                process.start()
                sender.close()
                running[receiver] = (process, item, time.monotonic() + limit)
            ready = multiprocessing.connection.wait(list(running), 1.0)
            late = [receiver for receiver, (*_, due) in running.items() if time.monotonic() > due]
            for receiver in {*ready, *late}:
                process, item, _ = running.pop(receiver)
                result, problem = None, f"not done after {limit:.0f} s"
                if receiver in ready:
                    try:
                        result, problem = receiver.recv()
                    except EOFError:
                        process.join()
                        problem = f"the process ended with exit code {process.exitcode}"
                process.kill()
                process.join()
                yield item, result, problem
    finally:
        for process, *_ in running.values():
            process.kill()
