"""The entry point of the command line; imports torch only for commands that need it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
import warnings

import click

from lowprec_check.cli.app import INTERRUPTED, TOOL_FAILED, USAGE_ERROR, app, close_stdout, print_error, print_status
from lowprec_check.errors import LONGEST_MESSAGE, ProcessLostError, Terminated, first_line, traceback_of, usage_error_of
from lowprec_check.process.interpreter import open_standard_streams
from lowprec_check.report.foreign_text import TRANSLITERATE

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)
"""Errors of printing; those of files are usage errors when they get here."""

_REPLACED = {
    "--budget": "--search-seconds",
    "--inputs-from": "--batches",
    "--output": "--report",
    "--save": "--save-plan",
}
"""Earlier names of options of ``plan``, ``fix`` and the commands that write files."""


def main() -> None:
    """Entry point: exit 0, 1 (findings), 2 (the call or the user's file is wrong), 3 (the tool
    failed), 128 + a signal.
    """
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # from importing torch; NumPy is not needed
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=TRANSLITERATE)
    signals = _end_workers_when_terminated()
    try:
        try:
            code = app(standalone_mode=False) or 0
            close_stdout()
        finally:
            for number in signals:  # one more would interrupt the report; exit handlers print an exception, and go on
                signal.signal(number, signal.SIG_DFL)
    except BaseException as error:
        code = _report(error)
        with contextlib.suppress(OSError):
            close_stdout()
    if code == INTERRUPTED:  # also how the parser reports Ctrl+C
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit handlers
        print_status("interrupted")
    sys.exit(code)


# -- What is printed of what ended a command


def _report(error: BaseException) -> int:
    """Print what ended the command, and return the exit code."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # exit code 1 means findings
    # How the user, or a signal, ended it.
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(error, Terminated):
        print_status(f"ended by {error.name}")
        return 128 + error.number
    # What the user can fix: the output, the call, a file.
    if isinstance(error, OSError) and error.errno == errno.EPIPE:  # the reader of standard output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes at exit
        return 128 + signal.SIGPIPE
    if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
        print_status(f"error: Cannot write to standard output: {error.strerror}.")
        return USAGE_ERROR
    if (wrong := usage_error_of(error)) is not None:
        print_error(wrong)
        return USAGE_ERROR
    if isinstance(error, click.ClickException):  # a usage error that the parser found
        if isinstance(error, click.NoSuchOption) and error.option_name in _REPLACED:
            wanted, replaced_by = error.option_name, _REPLACED[error.option_name]
            error = click.NoSuchOption(wanted, f"No such option {wanted}. Use {replaced_by}.", ctx=error.ctx)
        text = io.StringIO()
        error.show(text)
        print_status(text.getvalue())
        return error.exit_code
    # What is left is not the user's: it has exit code 3.
    if not isinstance(error, Exception):
        raise error
    if isinstance(error, ProcessLostError):
        print_status(f"error: {error}")
        return TOOL_FAILED
    # A bug: the innermost line of this package, since what it calls is seldom at fault, and a file.
    trace = traceback_of(error)
    places = re.findall(r'File ".*?(lowprec_check[/\\][^"]+)", line (\d+)', trace)
    where = "".join(f" at {file}:{line}" for file, line in places[-1:])
    print_status(f"lowprec-check failed{where}: {first_line(trace.rstrip().splitlines()[-1])[:LONGEST_MESSAGE]}")
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="lowprec-check-", suffix=".txt", delete=False
        ) as saved:
            saved.write(trace)
        print_status(f"Please report this bug with the traceback in {saved.name}")
    except OSError as problem:
        print_status(f"Please report this bug. Its traceback could not be saved: {problem.strerror}.")
    return TOOL_FAILED


# -- Signals


def _end_workers_when_terminated() -> list[signal.Signals]:
    """Turn SIGTERM and SIGHUP, unless they are ignored, into an exception, but not in workers,
    which are forks.

    Returns which of these and SIGINT, which Python turns into one, were not ignored.
    """

    def end(number: int, _frame: object) -> None:
        raise Terminated(number)

    def reset() -> None:
        if sys.unraisablehook == raise_again:  # what a model's destructor raises is the model's
            sys.unraisablehook = report
        for number in numbers:
            if signal.getsignal(number) == end:
                signal.signal(number, signal.SIG_DFL)

    def raise_again(lost: sys.UnraisableHookArgs) -> None:
        """A destructor or callback prints an exception and goes on: send the signal again."""
        if not isinstance(lost.exc_value, (KeyboardInterrupt, Terminated)):
            report(lost)
            return
        number = getattr(lost.exc_value, "number", signal.SIGINT)
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number)).start()

    # Signals that are ignored, as under nohup, stay ignored.
    report, sys.unraisablehook = sys.unraisablehook, raise_again
    numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
    return numbers + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) == signal.default_int_handler)
