"""Where a NaN or Inf originates in a plain fp32 run: the first op with finite inputs and a non-finite output."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import ModuleStack, call_model, source_line
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.trace.op_arguments import tensors_in
from lowprec_check.engine.trace.op_traits import traits


class _FirstNonfinite(DispatchMode):
    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.found: tuple[str, str, str | None] | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        op = traits(func)
        inputs_finite = self.found is None and not op.skipped and all(map(_finite, tensors_in(args, kwargs)))
        out = run_op(func, args, kwargs, keys)
        if inputs_finite and not all(_finite(tensor) for _, tensor in leaves(out)):
            self.found = (op.name, self.stack.current, source_line(sys._getframe(1)))
        return out


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def first_nonfinite(
    ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[str, str, str | None] | None:
    """``(op, module, source)``; ``None`` if it comes from a weight or an input."""
    seed_everything(seed)
    inputs, named = ready.inputs(args, kwargs)
    with ModuleStack(ready.model) as stack, _FirstNonfinite(stack) as mode, ready.context():
        call_model(ready.call, inputs, named)
    found: tuple[str, str, str | None] | None = mode.found
    return found
