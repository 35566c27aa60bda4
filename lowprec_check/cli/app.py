"""The application that commands register with, and code they share."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import pkgutil
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click

from lowprec_check.cli.parameters import CommandGroup, Option
from lowprec_check.errors import UsageError, encodable
from lowprec_check.process.interpreter import change_folder, current_folder

if TYPE_CHECKING:
    from lowprec_check.report.blocks import Document
    from lowprec_check.schema.scan_result import ScanResult

Result = TypeVar("Result")
Ended = tuple[Result, BaseException | None]
"""The last result, and what ended the work early."""

FINDINGS, USAGE_ERROR, TOOL_FAILED, INTERRUPTED = 1, 2, 3, 130
"""The exit codes other than 0."""

PACKAGE = "lowprec_check"
COMMANDS = {
    "scan": ("cli.scan", "Run a model in fp32, half, bfloat16 and autocast."),
    "plan": ("features.plan.command", "Find the modules that must stay in fp32."),
    "fix": ("features.fix.command", "Find a patch of the model's source with which it passes."),
    "compat": ("cli.compat", "Scan many models and write a compatibility matrix."),
    "report": ("cli.report", "Write a saved scan as a page, Markdown, SARIF, JUnit or text."),
    "diff": ("cli.diff", "Compare two saved scans, or two coverages of test suites."),
    "op": ("cli.lookups", "Show whether an operator runs in a dtype on a device."),
    "catalog": ("cli.lookups", "Operator support by dtype, device and torch release."),
    "explain": ("cli.explain", "Print the manual page of a diagnostic code."),
    "env": ("cli.env", "Show the hardware and which precisions it accelerates."),
    "program": ("features.programs.command", "Run a script to its end and scan every model that it calls."),
}
"""The module of each command, and its line in the help, most used first.

A module is imported when its command is used. Those of features that are not named here are found
in their folders, and follow.
"""


@contextlib.contextmanager
def _ends_kept() -> Iterator[None]:
    """Keep from click what ends a command: it forgets that the reader of the output has gone, and
    on Ctrl+C it prints an empty line, during which a second Ctrl+C ends the process.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(FINDINGS) from error
    except KeyboardInterrupt:
        raise click.Abort from None


class _ImportedOnUse(CommandGroup):
    """The commands; the help of all imports the module of none that :data:`COMMANDS` names."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _ends_kept():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _ends_kept():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        present = _modules_of_features()
        self._add(present - {module for module, _ in COMMANDS.values()})
        named = [name for name, (module, _) in COMMANDS.items() if module in present or module.startswith("cli.")]
        return list(dict.fromkeys([*named, *self.commands]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            # A wrong name needs all others: one is suggested.
            names = [cmd_name] if cmd_name in COMMANDS else self.list_commands(ctx)
            modules = {COMMANDS[name][0] for name in names if name in COMMANDS}
            present = _modules_of_features()
            self._add({module for module in modules if module in present or module.startswith("cli.")})
        return self.commands.get(cmd_name)

    def _add(self, modules: set[str]) -> None:
        """Add the commands of ``modules``, each of which registers its own with :data:`app`."""
        for module in sorted(modules):
            importlib.import_module(f"{PACKAGE}.{module}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each command."""
        names = self.list_commands(ctx)
        lines = [COMMANDS[name][1] if name in COMMANDS else self.commands[name].get_short_help_str() for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(list(zip(names, lines, strict=True)))


def _modules_of_features() -> set[str]:
    """The modules with commands that features have, which are not imported for it."""
    modules = set()
    folder = importlib.import_module(f"{PACKAGE}.features").__path__[0]
    for feature in pkgutil.iter_modules([folder]):
        if importlib.machinery.PathFinder.find_spec("command", [os.path.join(folder, feature.name)]) is not None:
            modules.add(f"features.{feature.name}.command")
    return modules


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from lowprec_check.catalog.versions import own_version

        print(f"lowprec-check {own_version()}")
        context.exit()


_VERSION = Option("--version", callback=_print_version, is_eager=True, expose_value=False, help="Print the version.")
_NO_SETTINGS = Option("--no-settings", help="Ignore [tool.lowprec-check] in pyproject.toml.")


@click.pass_context
def _use_settings(context: click.Context, *, no_settings: bool) -> None:
    if not no_settings:
        from lowprec_check.cli.settings import default_options

        context.default_map = default_options(context.command, context)


app = _ImportedOnUse(
    name="lowprec-check",
    help="Check a PyTorch model in fp16 and bf16: does it run, is it accurate, is it faster, and what to do.",
    params=[_VERSION.parameter("version", bool, False), _NO_SETTINGS.parameter("no_settings", bool, False)],
    callback=_use_settings,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    from lowprec_check.schema.base import check_file

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


Json = Annotated[bool, Option("--json", help="Print JSON.")]


def print_answer(answer: Any, document: Callable[[Any], Document], json: bool) -> None:
    """Print a struct, a list of structs or a dictionary: as indented JSON, or as text."""
    if json:
        from lowprec_check.schema.base import encode

        print_document(encode(answer))
    else:
        print_text(document(answer))


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
        from lowprec_check.analysis.saved_coverage import kind_of

        # Both are saved by this package, and easily mixed up.
        if kind_of(data) == "coverage":
            hint = "Compare two of them with: lowprec-check diff OLD.json NEW.json"
            raise UsageError(f"{path} is the coverage of a test suite, not a scan.", hint) from None
        hint = "Pass an unchanged file that lowprec-check scan TARGET --json FILE saved."
        raise UsageError(f"{path}: {error}.", hint) from None
