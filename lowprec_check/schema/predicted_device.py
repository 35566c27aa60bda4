"""A device that is not here, for which a scan predicts. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.base import Struct


class PredictedDevice(Struct, frozen=True, kw_only=True):
    """What is predicted, and what the prediction rests on."""

    name: str
    """Its type: ``cuda``, ``xpu``."""
    torch: str
    """The release of torch that runs there, ``2.13``."""
    kernels: str
    """Where the support of kernels is from, in words: ``measured on cuda, torch 2.11``."""
    autocast: str
    """The release of torch whose policy of autocast is used, ``2.13``."""
