"""The entry point of the command line. It imports torch only for commands that run a model or query the machine."""

from __future__ import annotations

import errno
import importlib
import io
import pkgutil
import sys
import warnings
from typing import Any

import typer

from lowprec_check.cli.app import INTERRUPTED, TOOL_FAILED, USAGE_ERROR, app, print_status
from lowprec_check.errors import UsageError


def main() -> None:
    """Entry point: exit 0, 1 (findings), 2 (the call or the user's file is wrong), 3 (the tool failed)."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # from importing torch; NumPy is not needed
    for stream in (sys.stdout, sys.stderr):  # "?" for "≤" if the stream cannot encode it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _import_commands()
        code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:  # how the parser reports Ctrl+C
            raise KeyboardInterrupt
        sys.exit(code)
    except UsageError as error:
        print_status(f"error: {error.message}")
        if error.hint:
            print_status(error.hint)
        sys.exit(USAGE_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error that the parser found
            print_status(_shown(error))
            sys.exit(error.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"error: {error.strerror}.", file=sys.stderr)
            sys.exit(USAGE_ERROR)
        import traceback

        print_status(traceback.format_exc())
        print("lowprec-check failed. Please report this bug with the traceback above.", file=sys.stderr)
        sys.exit(TOOL_FAILED)


def _shown(error: Any) -> str:
    """What the parser prints for a usage error: it repeats the arguments."""
    text = io.StringIO()
    error.show(text)
    return text.getvalue()


def _import_commands() -> None:
    """Import every module of this package, so that each registers its command."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
