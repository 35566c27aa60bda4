"""The entry point of the command line. It imports torch only for commands that run a model or query the machine."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import pkgutil
import signal
import sys
import warnings

import typer

from lowprec_check.cli.app import INTERRUPTED, TOOL_FAILED, USAGE_ERROR, app, close_stdout
from lowprec_check.errors import Terminated, UsageError


def main() -> None:
    """Entry point: exit 0, 1 (findings), 2 (the call or the user's file is wrong), 3 (the tool failed)."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # from importing torch; NumPy is not needed
    for stream in (sys.stdout, sys.stderr):  # "?" for "≤" if the stream cannot encode it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    _end_workers_when_terminated()
    try:
        _import_commands()
        code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:  # how the parser reports Ctrl+C
            raise KeyboardInterrupt
        close_stdout()
        sys.exit(code)
    except Terminated as end:
        print(f"ended by {signal.Signals(end.number).name}", file=sys.stderr)
        sys.exit(128 + end.number)
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error that the parser found
            error.show()
            sys.exit(error.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"error: {error.strerror}.", file=sys.stderr)
            sys.exit(USAGE_ERROR)
        import traceback

        traceback.print_exc()
        print("lowprec-check failed. Please report this bug with the traceback above.", file=sys.stderr)
        sys.exit(TOOL_FAILED)
    finally:
        with contextlib.suppress(OSError):
            close_stdout()


def _end_workers_when_terminated() -> None:
    """Turn SIGTERM and SIGHUP, unless they are ignored, into an exception, but not in workers, which are forks."""

    def end(number: int, _frame: object) -> None:
        raise Terminated(number)

    def reset() -> None:
        for number in numbers:
            if signal.getsignal(number) == end:
                signal.signal(number, signal.SIG_DFL)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


def _import_commands() -> None:
    """Import every module of this package, so that each registers its command."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
