"""The application that commands register with, and code they share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from lowprec_check.errors import UsageError, encodable
from lowprec_check.process.interpreter import change_folder, current_folder
from lowprec_check.schema.base import check_file

if TYPE_CHECKING:
    from lowprec_check.report.blocks import Document
    from lowprec_check.schema.scan_result import ScanResult

Result = TypeVar("Result")
Ended = tuple[Result, BaseException | None]
"""The last result, and what ended the work early."""

FINDINGS, USAGE_ERROR, TOOL_FAILED, INTERRUPTED = 1, 2, 3, 130
"""The exit codes other than 0."""

COMMAND_ORDER = ("scan", "plan", "fix", "compat", "report", "diff", "op", "catalog", "explain", "env")
"""The order of the commands in the help, most used first; others follow."""


class _OrderedCommands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        order = {name: position for position, name in enumerate(COMMAND_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: order.get(name, len(order)))


app = typer.Typer(
    name="lowprec-check",
    cls=_OrderedCommands,
    help="Check a PyTorch model in fp16 and bf16: does it run, is it accurate, is it faster, and what to do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from lowprec_check.catalog.versions import own_version

        print(f"lowprec-check {own_version()}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    no_settings: Annotated[
        bool, typer.Option("--no-settings", help="Ignore [tool.lowprec-check] in pyproject.toml.")
    ] = False,
) -> None:
    if not no_settings:
        from lowprec_check.cli.settings import default_options

        context.default_map = default_options(context.command, context)


# -- What is printed, and where


def print_status(text: str) -> None:
    """Print ``text`` to stderr at once, with control characters made visible: it may be foreign."""
    from lowprec_check.report.foreign_text import visible_text

    with contextlib.suppress(OSError):  # the exit code matters more
        print(visible_text(text), file=sys.stderr, flush=True)


# -- Files to write, which are checked before the work starts


def check_writable(path: Path | None, option: str) -> None:
    """Raise :class:`UsageError` early if ``path``, the value of ``option``, cannot be written."""
    # Only JSON can go to stdout by the name of a file: reports are chosen by their suffix.
    if path is None or (str(path) == "-" and option == "--json"):
        return
    if str(path) == "-":
        hint = "To print to stdout, use --json."
        if option == "--report":
            hint = "Leave it out to print to stdout."
        raise UsageError(f"{option} needs a file name, not -.", hint)
    try:
        check_file(path)
    except UsageError as error:
        raise UsageError(error.message, f"Give {option} a path in an existing, writable folder.") from None


def output_files(report: list[Path] | None, format: str | None) -> list[Path]:
    """The values of ``--report``; raises :class:`UsageError` for several with one ``--format``."""
    files = report or []
    if format is not None and len(files) > 1:
        hint = "Leave --format out: the suffix of each file sets its format."
        raise UsageError("--format works with only one output file.", hint)
    return files


# -- Standard output, which programs read


def print_text(document: Document, **options: Any) -> None:
    """Print blocks as text, for the width and the colours of the terminal."""
    from lowprec_check.report.layout.text import text

    sys.stdout.write(text(document, **options, **screen_size()))


def print_document(data: bytes | str) -> None:
    """Print what a program reads in UTF-8, whatever the encoding of the terminal."""
    if isinstance(data, str):
        data = encodable(data).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """While a model runs, standard output is standard error: what it prints, also from C, must not
    end up in a result.

    Afterwards the current folder is the same as before, since names of files are relative to it.
    """
    from lowprec_check.process.process_group import PRIVATE

    sys.stdout.flush()
    stdout, folder = os.dup(1), current_folder()
    os.dup2(2, 1)
    PRIVATE.add(stdout)  # the model's processes do not inherit it
    try:
        yield
    finally:
        PRIVATE.remove(stdout)
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        change_folder(folder)


# -- Work that may end early


def last_before_end(results: Iterable[Result], on_result: Callable[[Any], object] = lambda _: None) -> Ended[Result]:
    """Take all ``results`` of a scan or search, which grow; what ends it early is returned, so that
    the last is not lost, or raised if there is none.
    """
    # An exception may come from anywhere: from the search, from Ctrl+C, or from ``on_result``.
    last = None
    try:
        for result in results:
            last = result
            on_result(result)
    except BaseException as error:
        if last is None:
            raise
        return last, error
    assert last is not None
    return last, None


@contextlib.contextmanager
def interrupts_ignored_after(error: BaseException | None) -> Iterator[None]:
    """After Ctrl+C, another one is ignored while what was finished is saved."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not isinstance(error, KeyboardInterrupt) or not in_main_thread:
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def print_error(error: UsageError) -> None:
    """Print a usage error and its hint to stderr."""
    print_status("\n".join(filter(None, [f"error: {error.message}", error.hint])))


def close_stdout() -> None:
    """Write the rest of the result, or raise ``OSError``; exit handlers then print to stderr."""
    sys.stdout.flush()
    os.dup2(2, 1)


def screen_size() -> dict[str, Any]:
    """The terminal's width (in a pipe ``COLUMNS`` or 100; at least 40), whether it has colours."""
    from lowprec_check.report.layout.text import NARROWEST

    return {"width": max(NARROWEST, shutil.get_terminal_size((100, 40)).columns), "color": sys.stdout.isatty()}


# -- Saved files to read

SAVE_SCAN = "Save a scan with: lowprec-check scan TARGET --json FILE"


def read_saved(path: Path, hint: str = SAVE_SCAN) -> bytes:
    """The content of a saved file (``-``: stdin); raises :class:`UsageError` with ``hint``."""
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read()
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from None


def load_result(path: Path, data: bytes | None = None) -> ScanResult:
    """Decode the scan at ``path``, whose content is ``data``; raises :class:`UsageError`."""
    from lowprec_check.schema.scan_result import ResultError, ScanResult

    if data is None:
        data = read_saved(path)
    try:
        return ScanResult.from_json(data)
    except ResultError as error:
        from lowprec_check.analysis.suite_coverage import kind_of

        # Both are saved by this package, and easily mixed up.
        if kind_of(data) == "coverage":
            hint = "Compare two of them with: lowprec-check diff OLD.json NEW.json"
            raise UsageError(f"{path} is the coverage of a test suite, not a scan.", hint) from None
        hint = "Pass an unchanged file that lowprec-check scan TARGET --json FILE saved."
        raise UsageError(f"{path}: {error}.", hint) from None
