"""What the loaders of models by name share."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import psutil

from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.errors import UsageError, message_of, type_name


def import_zoo(package: str) -> Any:
    """The package; raises :class:`UsageError` if it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise _broken(package, error) from error
        raise UsageError(f"{package} is not installed.", "pip install 'lowprec-check[zoo]'") from None
    except Exception as error:
        raise _broken(package, error) from error


def _broken(package: str, error: Exception) -> UsageError:
    return UsageError(
        f"{package} is installed, but its import fails: {type_name(error)}: {first_line(message_of(error))}",
        f"Install a release of {package} for this torch.",
    )


def unknown_name(owner: str, noun: str, name: str, names: Sequence[str], hint: str) -> UsageError:
    """The error for a model or option that its ``owner`` does not have; it suggests similar names."""
    near = difflib.get_close_matches(name, names, 3) or [known for known in names if name and name in known][:3]
    return UsageError(f"{owner} has no {noun} {name!r}.", f"Did you mean {', '.join(near)}?" if near else hint)


BYTES_EACH = 12
"""Memory for each parameter: the fp32 weights, their cast, and what a run adds."""


def check_memory(what: str, parameters: int, hint: str) -> None:
    """Raise :class:`UsageError` if a model of so many parameters does not fit into the free memory of this machine."""
    needed, free = parameters * BYTES_EACH, psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{what} has {parameters / 1e9:.1f} billion parameters: a scan needs about {needed / 2**30:.0f} GiB of memory, "
            f"and {free / 2**30:.0f} GiB are free.",
            hint,
        )
