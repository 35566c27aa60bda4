"""A process group with one rank: this process alone."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import os
import socket
import sys
import warnings
from collections.abc import Iterator

import psutil
import torch
from torch import distributed

from lowprec_check.errors import first_line, message_of

_INTERFACE = "GLOO_SOCKET_IFNAME"
_IMPORTED = (
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""What FSDP2 and DDP import. A module that is imported while there is a process group may keep it for good, as the default of an argument."""
_TIMEOUT = datetime.timedelta(seconds=60)


class CannotMeasureError(Exception):
    """Why a policy cannot be measured here."""


def check_rank() -> None:
    """Raise :class:`CannotMeasureError` if this process cannot be a rank of its own."""
    if not distributed.is_available():
        raise CannotMeasureError("this build of torch has no torch.distributed")
    if not distributed.is_gloo_available():
        raise CannotMeasureError("this build of torch has no gloo")
    if distributed.is_initialized():
        raise CannotMeasureError("this process belongs to a process group already")


def check_fsdp2() -> None:
    """Raise :class:`CannotMeasureError` if FSDP2 cannot run on a CPU here."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        raise CannotMeasureError(f"FSDP2 does not run on a CPU in torch {torch.__version__.partition('+')[0]}")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group over gloo whose only rank is this process, ended afterwards.

    Gloo listens on one port, of the loopback interface unless the user chose another. Environment variables, warnings and the handler
    of uncaught exceptions, which torch replaces, are restored. After FSDP2, a cache of torch keeps the threads and the port of the
    group until this process ends. Raises :class:`CannotMeasureError` if gloo cannot start.
    """
    environment, hook, frozen = dict(os.environ), sys.excepthook, gc.get_freeze_count()
    interface = _loopback()
    if interface is not None:
        os.environ.setdefault(_INTERFACE, interface)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _IMPORTED:
                importlib.import_module(name)
            gc.freeze()  # a collection after each policy need not visit what is loaded
            store = distributed.HashStore()  # type: ignore[attr-defined]
            try:
                distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=_TIMEOUT)
            except Exception as error:
                raise CannotMeasureError(f"gloo cannot start: {first_line(message_of(error))}") from None
            yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        gc.collect()  # threads and port end with the last reference to the group
        if not frozen:
            gc.unfreeze()
        sys.excepthook = hook
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _loopback() -> str | None:
    """The name of the loopback interface, ``lo``; ``None`` if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family == socket.AF_INET and found.address.startswith("127.") for found in addresses):
            return name
    return None
