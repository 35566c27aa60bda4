"""Which models to scan: reads a list from a file, adds options and devices, chooses file names."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lowprec_check.errors import UsageError, encodable


class Request(NamedTuple):
    """One model to scan on one device."""

    target: str
    options: tuple[str, ...] = ()
    """Additional options of ``scan``."""
    device: str | None = None
    slug: str = ""
    """A file name, unique in the list."""


def read_list(path: Path) -> list[Request]:
    """Read one target per line, followed by options of ``scan``; ``#`` starts a comment.

    A file name that is not UTF-8 is read as it would be from the command line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    if "\0" in text:  # no argument of a command can contain it
        raise _unreadable(path, "it has a null byte")
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(
                f"Cannot parse {path}:{number}: {error}.",
                "Write one target per line, followed by scan options.",
            ) from None
        if words:
            requests.append(Request(words[0], tuple(words[1:])))
    return requests


def _unreadable(path: Path, why: str | None) -> UsageError:
    hint = "Choose a text file with one target per line, followed by scan options."
    return UsageError(f"Cannot read {path}: {why}.", hint)


def expand_requests(requests: Iterable[Request], options: tuple[str, ...], devices: Iterable[str]) -> list[Request]:
    """Return each model on each device, without duplicates; ``options`` are placed before the model's own options."""
    chosen: list[str | None] = [*devices] or [None]
    return with_slugs(
        request._replace(options=(*options, *request.options), device=device)
        for request in requests
        for device in chosen
    )


def with_slugs(requests: Iterable[Request]) -> list[Request]:
    """Return the requests without duplicates, each with its slug: the target and the device.

    If several requests have the same slug, a digest of their options is appended.
    """
    plain = {request: _plain_slug(request) for request in requests}
    taken = Counter(plain.values())
    return [
        request._replace(slug=slug if taken[slug] == 1 else f"{slug}-{_digest(request)}")
        for request, slug in plain.items()
    ]


def _plain_slug(request: Request) -> str:
    zoo = re.match(r"\w+:[^,./]+(?=,)", request.target)  # without the values of a configuration
    name = _file_name(zoo[0] if zoo else request.target)[-80:].lstrip("-.") or "model"
    return f"{name}-{_file_name(request.device.replace(':', ''))}" if request.device else name


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def _digest(request: Request) -> str:
    text = "\0".join([request.target, *request.options])
    return hashlib.sha256(encodable(text).encode()).hexdigest()[:6]
