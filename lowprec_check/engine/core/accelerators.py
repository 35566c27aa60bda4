"""The accelerators that this process uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowprec_check.schema.devices import accelerators


def initialized() -> Iterator[Any]:
    """The modules (``torch.cuda``) of the accelerators that this process has initialized."""
    for name in accelerators():
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            yield module
