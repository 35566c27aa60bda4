"""Commands that a reader can run next, whole: with the target of the scan, loaded as it was."""

from __future__ import annotations

import shlex

from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult

_SHARED = ("tolerance", "seed", "without_kernel")
"""Options that ``scan``, ``plan`` and ``fix`` have, and that change what passes."""


def command(result: ScanResult, name: str) -> str:
    """``lowprec-check fix overflow.py --apply``, of ``fix --apply``, for the target of a scan.

    A scan of the Python API has no file to name; its target is left to the reader.
    """
    subcommand, *options = name.split()
    given = result.target_options
    if given is None and result.target == result.model.name:
        return f"lowprec-check {subcommand} TARGET {shlex.join(options)}".rstrip()
    given = given or []
    script = given.index("--") if "--" in given else len(given)
    shared = []
    for option in _SHARED:
        values = result.options.get(option)
        if values in (None, [], getattr(ScanOptions, option)):
            continue
        for value in values if isinstance(values, list) else [values]:
            shared += [f"--{option.replace('_', '-')}", str(value)]
    words = ["lowprec-check", subcommand, result.target, *options, *given[:script], *shared, *given[script:]]
    return shlex.join(words)
