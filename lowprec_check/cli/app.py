"""The application that commands register with, and what they share. Never imports torch."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult

FOUND, WRONG_CALL, TOOL_FAILED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes besides 0."""

ORDER = ("scan", "plan", "compat", "report", "diff", "op", "catalog", "explain", "env")
"""Of the commands in the help, the most used first."""


class _Ordered(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="lowprec-check",
    cls=_Ordered,
    help="Tells what happens to a PyTorch model in fp16 and bf16: does it run, is it right, is it worth it, what to do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"lowprec-check {version('lowprec-check')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def check_writable(path: Path | None, option: str) -> None:
    """Raise :class:`UsageError` before the work, not after; ``option`` is what gave the path."""
    if path is None or (str(path) == "-" and option == "--json"):
        return
    if str(path) == "-":
        hint = "Leave it out to print." if option == "-o" else "--json - prints all of it."
        raise UsageError(f"{option} needs a file.", hint)
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"Cannot write {path}: {error.strerror}.", f"Give {option} a path in a folder that exists."
        ) from None


def check_folder(path: Path, option: str) -> None:
    """Raise :class:`UsageError` before the work where ``path`` is no folder."""
    if not path.is_dir():
        raise UsageError(f"There is no folder {path}.", f"Make it, or give {option} another.")


def print_json(value: Any) -> None:
    """Print a struct, a list of them or a dictionary, indented."""
    from lowprec_check.schema.base import encode

    print(encode(value).decode(), end="")


def screen_size(least: int = 100) -> dict[str, Any]:
    """Width and colour of a screen: the terminal's, but at least ``least`` columns, below which figures would be cut."""
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size((100, 40)).columns if terminal else 100
    return {"width": max(least, columns), "color": terminal}


@contextlib.contextmanager
def step_progress(what: str, quiet: bool) -> Iterator[Any]:
    """A bar on stderr, told (done, of how many, which comes next); nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def on_progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{name:<32.32}")

        yield on_progress


def load_result(path: Path) -> ScanResult:
    """The saved scan at ``path`` (``-``: stdin); raises :class:`UsageError` that says what is wrong with it."""
    from lowprec_check.schema.scan_result import ResultError, ScanResult

    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return ScanResult.from_json(data)
    except OSError as error:
        raise UsageError(
            f"Cannot read {path}: {error.strerror}.", "lowprec-check scan … --json FILE makes one."
        ) from None
    except ResultError as error:
        hint = "It must be what lowprec-check scan … --json FILE wrote, whole and unchanged."
        raise UsageError(f"{path}: {error}.", hint) from None


@contextlib.contextmanager
def progress(target: str, quiet: bool) -> Iterator[Any]:
    """A status line on stderr while work is going on; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"loading {target}") as status:

        def on_progress(run: str, doing: str) -> None:
            status.update(f"{run} · {doing}"[: console.width - 4])

        yield on_progress
