"""Makes this process the twin of a device that is not here: its autocast policy and its kernels, on CPU tensors.

A process that became a twin stays one: kernels are registered and functions replaced for good. So it does one job, then ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowprec_check.catalog.autocast_header import HEADER
from lowprec_check.catalog.autocast_releases import CastPolicy, installed_policies, policies_of
from lowprec_check.catalog.declared import release_of
from lowprec_check.engine.device_twin import asks_for_cpu, fft_in_half, twin_autocast
from lowprec_check.engine.device_twin.emulated_kernels import EmulatedKernels
from lowprec_check.engine.device_twin.kernel_support import KernelSupport
from lowprec_check.schema.measures import PredictedDevice

DEFAULT_AUTOCAST = torch.float16
"""Of ``torch.autocast`` on CUDA and XPU; on a CPU it is bfloat16."""


class _Twin(NamedTuple):
    """What this process became."""

    device: PredictedDevice
    support: KernelSupport


_became: list[_Twin] = []
"""At most one."""


def become_twin(device: PredictedDevice) -> None:
    """Make this process the twin of ``device``; again for the same device it does nothing.

    Raises ``RuntimeError`` if it is the twin of another, and :class:`UsageError` if the catalog does not cover the release.
    """
    check_process(device)
    if _became:
        return
    twin = _Twin(device, KernelSupport(device))
    _became.append(twin)
    if device.name == "cpu":
        return
    twin_autocast.register(device.name, policies_for(device), DEFAULT_AUTOCAST)
    _answer_as(device.name)
    asks_for_cpu.choose_as_on_gpu()
    if twin.support.computes_fft_in_half():
        fft_in_half.allow()


def check_process(device: PredictedDevice | None) -> None:
    """Raise ``RuntimeError`` if this process is the twin of another device than ``device``, or of any if that is ``None``."""
    if _became and _became[0].device != device:
        raise RuntimeError(f"a process that predicts {_became[0].device.name} cannot do anything else")


def emulating(device: PredictedDevice | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops run with the kernels of ``device``, which this process is the twin of; nothing for ``None``."""
    check_process(device)
    return EmulatedKernels(_became[0].support) if _became else contextlib.nullcontext()


def assumed_ops() -> list[str]:
    """The ops in 16 bits that ran and that the catalog does not have."""
    return sorted({op for twin in _became for op in twin.support.assumed})


def known_ops() -> list[str]:
    """The ops in 16 bits that ran or were refused because the catalog says so."""
    return sorted({op for twin in _became for op in twin.support.known})


def policies_for(device: PredictedDevice) -> Mapping[str, CastPolicy]:
    """The autocast policies of ``device``: from the header of the installed torch if it has that release, else from the catalog."""
    if device.autocast != release_of(torch.__version__):
        return policies_of(device.name, device.autocast)
    header = (Path(torch.__file__).parent / HEADER).read_text(encoding="utf-8")
    key = f"Autocast{device.name.upper()}"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return installed_policies(device.name, torch.__version__, header, registered)


def _answer_as(device: str) -> None:
    """Let code that names the device, such as ``torch.autocast("cuda")``, mean this process."""

    def named(kind: str) -> str:
        return "cpu" if kind == device else kind

    autocast = torch.amp.autocast_mode.autocast
    initialize = autocast.__init__

    @functools.wraps(initialize)
    def initialize_renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, named(device_type), *args, **kwargs)

    autocast.__init__ = initialize_renamed  # type: ignore[method-assign]
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _renaming(getattr(torch, name), named))
    if device == "cuda":  # what torch means where no device is named
        torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")


def _renaming(function: Callable[..., Any], named: Callable[[str], str]) -> Callable[..., Any]:
    """``function`` of a device, by default CUDA; called with the device that is ``named`` so here."""

    @functools.wraps(function)
    def renamed(*args: Any) -> Any:
        if args and isinstance(args[0], str):
            return function(named(args[0]), *args[1:])
        return function(named("cuda"), *args)

    return renamed
