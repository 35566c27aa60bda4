"""What a trial of a source of the user's found: its runs, and what its expressions gave."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import Run


class SeenValue(Struct, frozen=True, kw_only=True):
    """What an expression gave in one run."""

    kind: Literal["tensor", "module", "number", "callable", "tuple", "other"]
    dtypes: tuple[str, ...] = ()
    """Of a tensor, ``float16``, of all calls; of a module, that of its first floating parameter."""
    name: str = ""
    """Of a module: its first floating parameter, ``weight``; of a callable: where it is defined, ``torch.nn.functional.normalize``."""
    of_torch: bool = False
    """Whether the class of a module is one of torch."""
    number: float | None = None
    absmax: float | None = None
    """The largest finite magnitude of a tensor, over all calls."""
    parts: tuple[str, ...] = ()
    """Of a tuple, the dtypes of its tensors, empty for another element; of a module, the names of its buffers."""


Places = dict[str, dict[str, SeenValue]]
"""By file, and by the place of an expression, what it gave."""


class SourceTrial(Struct, frozen=True, kw_only=True):
    """What a trial found."""

    runs: list[Run] = []
    """Those of each precision; analyzed op by op if that was asked for, and they fail."""
    outputs: str = ""
    """A digest of the outputs in fp32, bit for bit; empty if two calls differ."""
    gradients: str = ""
    """The same of the gradients; empty if there are none."""
    seen: dict[str, Places] = {}
    """What expressions gave, by precision."""
    buffers: dict[str, list[str]] = {}
    """The buffers with values that a cast rounds, by the class that has them."""
    packages: list[str] = []
    """The modules that are not the user's own, imported until the model has run."""
