"""The command line: parse, call, render, exit code. No logic of its own; torch is imported when a model is."""

from __future__ import annotations

import errno
import importlib
import io
import pkgutil
import sys
import warnings

import typer

from lowprec_check.cli.app import INTERRUPTED, TOOL_FAILED, WRONG_CALL, app
from lowprec_check.errors import UsageError


def main() -> None:
    """Entry point: exit 0, 1 (findings), 2 (the call or the user's file is wrong), 3 (the tool failed)."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's, at import; nothing here needs it
    for stream in (sys.stdout, sys.stderr):  # a pipe or console that holds no "≤" shows "?" there
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _import_commands()
        code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:  # the parser's own way to pass it on
            raise KeyboardInterrupt
        sys.exit(code)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
        sys.exit(WRONG_CALL)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # what the parser says of a wrong call
            error.show()
            sys.exit(error.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"error: {error.strerror}.", file=sys.stderr)
            sys.exit(WRONG_CALL)
        import traceback

        traceback.print_exc()
        print("lowprec-check itself failed; please report this with the lines above.", file=sys.stderr)
        sys.exit(TOOL_FAILED)


def _import_commands() -> None:
    """Import the modules of this package, which register their commands and list what is registered in their help."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
