"""The device types that a scan, the catalog or a test can name. Never imports torch.

To add one, add an entry to :func:`_built_in` and its data to the catalog, or register it from another package
(CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowprec_check.errors import UsageError
from lowprec_check.schema.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device type, as in ``torch.device(name).type``."""

    name: str
    catalog: Literal["measured", "declared"] | None = None
    """The catalog's data: measured on hardware, or declared in torch's sources; ``None`` if it has none."""
    fallback_variable: str | None = None
    """The environment variable that makes torch run missing ops on the CPU."""
    aliases: tuple[str, ...] = ()


def _built_in() -> Sequence[Device]:
    """The CPU, then the accelerators, in the order in which a scan prefers them."""
    return (
        Device(name="cpu", catalog="measured"),
        Device(name="cuda", catalog="measured"),
        Device(name="xpu", catalog="declared", fallback_variable="PYTORCH_ENABLE_XPU_FALLBACK"),
        Device(name="mps", fallback_variable="PYTORCH_ENABLE_MPS_FALLBACK"),
    )


DEVICES: Registry[Device] = Registry("device", Device, _built_in)


def device_type(device: str) -> str:
    """``cuda`` of ``cuda:0``."""
    return device.strip().lower().partition(":")[0]


def device_of(name: str) -> Device:
    """The device of a name such as ``cuda:0``; raises :class:`UsageError` for an unknown type."""
    found = DEVICES.find(device_type(name))
    if found is None:
        raise UsageError(f"Unknown device {name!r}.", f"Choose from {', '.join(DEVICES.names())}.")
    return found


def accelerators() -> list[str]:
    """All devices but the CPU, in the order in which a scan prefers them."""
    return [name for name in DEVICES.names() if name != "cpu"]


def catalogued(kind: Literal["measured", "declared"] | None = None) -> list[str]:
    """The devices in the catalog: all, or only the measured or declared ones."""
    return [device.name for device in DEVICES if device.catalog and kind in (None, device.catalog)]


def is_declared(device: str) -> bool:
    """Whether the catalog's data for a device is declared, not measured."""
    found = DEVICES.find(device_type(device))
    return found is not None and found.catalog == "declared"
