"""The messages between the plugin and the process that makes kept calls again, one JSON object per line."""

from __future__ import annotations

from lowprec_check.catalog.records import Dtype
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.schema.base import Struct


class ReplayTask(Struct, frozen=True, kw_only=True):
    """Sent to the process: a call of an op, to be made in a dtype on a device."""

    op: str
    """``aten.mm.default``."""
    dtype: Dtype
    device: str
    call: bytes
    """The arguments, as :func:`kept_calls.loaded` reads them."""


class ReplayAnswer(Struct, frozen=True, kw_only=True):
    """How the call went. The first answer of a process only says that it has started."""

    tried: bool = False
    raised: Raised | None = None
    """What the call raised in the dtype; ``None`` if it ran."""
    why_not: str | None = None
    """Why it was not tried in the dtype."""
