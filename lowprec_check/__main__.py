"""The command, also as ``python -m lowprec_check``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command; Ctrl+C during its imports ends the process without a traceback."""
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lowprec_check.cli.main import main as command

    if hears:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
