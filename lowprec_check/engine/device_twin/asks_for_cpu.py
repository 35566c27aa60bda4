"""Functions of other packages that compute in another way on a CPU: in a twin they choose as on a GPU."""

from __future__ import annotations

import sys
import types

_FUNCTIONS = (("torchvision.ops.boxes", "batched_nms"),)
"""Modules and functions that compare the type of a tensor's device with ``"cpu"``. ``batched_nms`` of more than 1,000 boxes treats classes
one by one on a CPU. On a GPU it moves the boxes of each class apart, which takes digits that half does not have.
"""


def choose_as_on_gpu() -> None:
    """Change those that are imported, for the rest of this process: tensors are on the CPU, but no comparison finds that."""
    for module, name in _FUNCTIONS:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, types.FunctionType):
            code = function.__code__
            function.__code__ = code.replace(
                co_consts=tuple("another device" if value == "cpu" else value for value in code.co_consts)
            )
