"""What expressions of the user's source gave while the model ran."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct


class SeenValue(Struct, frozen=True, kw_only=True):
    """What an expression gave in one run."""

    kind: Literal["tensor", "module", "number", "callable", "tuple", "other"]
    dtypes: tuple[str, ...] = ()
    """Of a tensor, ``float16``, of all calls; of a module, that of its first floating parameter."""
    name: str = ""
    """Of a module: its first floating parameter, ``weight``; of a callable: where it is defined, ``torch.nn.functional.normalize``."""
    number: float | None = None
    absmax: float | None = None
    """The largest finite magnitude of a tensor, over all calls."""
    parts: tuple[str, ...] = ()
    """Of a tuple, the dtypes of its tensors, empty for another element; of a module, the names of its buffers."""
