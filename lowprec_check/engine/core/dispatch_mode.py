"""The base class of all dispatch modes here, and helpers for their handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose handler torch does not wrap.

    torch wraps a handler to keep Dynamo out. The wrapper imports ``torch._dynamo`` at the first op (about a second) and
    costs microseconds at every further op. It is not needed: nothing is compiled under these modes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextlib.contextmanager
def reached_by_autocast(device_type: str) -> Iterator[None]:
    """Let autocast apply to the ops inside a kernel, as it does without a mode; inside a mode's handler it is excluded."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}", None)
    if key is None:
        yield
        return
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
