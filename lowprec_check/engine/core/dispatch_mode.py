"""The base of our dispatch modes, and what their handlers need of the dispatcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is called as it stands.

    torch wraps a mode's handler to keep Dynamo out, which imports ``torch._dynamo`` (a second) at the first op and
    costs microseconds at every other. Nothing is compiled under our modes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextlib.contextmanager
def reached_by_autocast(device_type: str) -> Iterator[None]:
    """Let autocast reach the ops inside a kernel, as it does where no mode is active: a mode's handler keeps it out."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}", None)
    if key is None:
        yield
        return
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
