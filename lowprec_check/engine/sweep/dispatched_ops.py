"""Records which aten ops a call dispatches, and which of them raised."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op


class DispatchedOps(DispatchMode):
    """Records the names of dispatched overloads while it is active, without ``aten.`` and ``.default``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.views: dict[str, None] = {}
        """Views: they compute nothing and work in every dtype."""
        self.random = False
        self.failed: str | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run ``func`` as it is."""
        name = short_name(func)
        (self.views if is_view(func) else self.names)[name] = None
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        try:
            return run_op(func, args, kwargs, keys)
        except Exception:
            self.failed = self.failed or name
            raise


def short_name(func: OpOverload) -> str:
    """``linalg_inv_ex``, ``add.Tensor``, ``prims.x``."""
    return str(func).removeprefix("aten.").removesuffix(".default")


def is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns an alias and writes nothing."""
    schema = func._schema
    written = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return not written and any(returned.alias_info is not None for returned in schema.returns)
