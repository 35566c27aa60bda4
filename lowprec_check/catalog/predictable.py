"""What a prediction of a device rests on: the releases that the catalog covers, and the autocast
policies of CUDA and XPU in each.

`catalog/autocast-policies.toml` has the ops that torch's header `ATen/autocast_mode.h` lists in
each release; :data:`DEVICE_OPS` has those that a device registers elsewhere.

>>> policies_of("xpu", "2.15")["layer_norm"]
'fp32'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from lowprec_check.catalog import declared
from lowprec_check.catalog.measured import at_release, history, sweep_of
from lowprec_check.catalog.versioned_file import data_folder, read_tables
from lowprec_check.catalog.versions import has_extension, release_of, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_of, device_type, is_declared
from lowprec_check.schema.base import StrictStruct
from lowprec_check.schema.measures import PredictedDevice

# -- Autocast policies

HeaderPolicy = Literal["lower", "fp32", "fp32-set-dtype", "fp32-append-dtype", "promote"]
"""What autocast does with the inputs of an op.

``lower``: casts them to the autocast dtype. ``fp32``: casts them to fp32. ``fp32-set-dtype``:
leaves them, and sets the argument ``dtype`` to fp32 if the caller did not set it.
``fp32-append-dtype``: calls the overload that has a ``dtype``, with fp32. ``promote``: casts them
to the widest of their dtypes, at least the autocast dtype. Only floating inputs on the device are
cast, and fp64 never is; the two policies about ``dtype`` apply if the first input is one that may
be cast.
"""
HEADER_POLICIES: tuple[HeaderPolicy, ...] = get_args(HeaderPolicy)
CastPolicy = Literal[HeaderPolicy, "fp16", "banned"]
"""A policy of the header, or of one device: ``fp16`` casts to fp16 always, ``banned`` raises."""

FILE = "autocast-policies.toml"
DEVICES = ("cuda", "xpu")


class DeviceOp(NamedTuple):
    """An op whose autocast kernel is registered outside the lists of the header."""

    op: str
    policy: CastPolicy
    devices: tuple[str, ...]
    source: str
    """The file of pytorch/pytorch that registers it."""
    since: str = "2.6"
    """The first release that registers it; 2.6 is the oldest in the catalog."""
    needs_device_build: bool = False
    """Whether builds of torch without the device lack the registration."""


_MODE, _RNN = "aten/src/ATen/autocast_mode.cpp", "aten/src/ATen/cudnn/AutocastRNN.cpp"
DEVICE_OPS = (
    DeviceOp("cudnn_convolution", "lower", ("cuda",), _MODE),
    DeviceOp("cudnn_convolution_transpose", "lower", ("cuda",), _MODE),
    DeviceOp("linalg_matrix_sqrth", "fp32", ("cuda",), _MODE, since="2.14"),
    DeviceOp("binary_cross_entropy", "banned", DEVICES, _MODE),
    DeviceOp("_cudnn_rnn", "fp16", ("cuda",), _RNN, needs_device_build=True),
)
"""With the ops in the header, these are exactly what builds of torch 2.6 to 2.15 register."""


ANY_AUTOCAST_DTYPE = ("cuda",)
"""Devices on which ``torch.autocast`` runs in any dtype. On others it is disabled with a warning
unless the dtype is fp16 or bf16: so in torch/amp/autocast_mode.py of each release from 2.6 to 2.13.
They differ in the words, and up to 2.9 XPU warns of a region with ``enabled=False``, too.
"""


class ReadHeader(NamedTuple):
    """What the header of a release lists."""

    build: str
    """The version whose header was read, `2.13.0`."""
    policies: Mapping[str, HeaderPolicy]


class HeaderChanges(StrictStruct, frozen=True, kw_only=True, rename="kebab"):
    """What the header of a release changed; the first release has all ops."""

    torch: str
    """The release, `2.13`."""
    build: str
    """The version whose header was read, `2.13.0`."""
    lower: list[str] = []
    fp32: list[str] = []
    fp32_set_dtype: list[str] = []
    fp32_append_dtype: list[str] = []
    promote: list[str] = []
    removed: list[str] = []

    def added(self) -> Iterator[tuple[str, HeaderPolicy]]:
        """Ops that are new or have another policy than before."""
        for policy in HEADER_POLICIES:
            for op in getattr(self, policy.replace("-", "_")):
                yield op, policy


def policies_of(device: str, torch: str) -> dict[str, CastPolicy]:
    """By overload name, the policy of each op that autocast wraps in a release (`2.13.0+cpu`).
    Raises :class:`UsageError` if the catalog does not have those of this device or release.
    """
    known = releases()
    if has_extension(torch) or release_of(torch) not in known:
        hint = f"Releases with policies: {', '.join(known)}."
        raise UsageError(f"The catalog has no autocast policies for torch {torch}.", hint)
    kind = device_type(device)
    if kind not in DEVICES:
        raise UsageError(f"The catalog has no autocast policies for {device}.", f"Choose from {', '.join(DEVICES)}.")
    own: dict[str, CastPolicy] = {
        entry.op: entry.policy
        for entry in DEVICE_OPS
        if kind in entry.devices and version_key(entry.since) <= version_key(release_of(torch))
    }
    return {**known[release_of(torch)].policies, **own}


def installed_policies(device: str, torch: str, registered: Iterable[str]) -> dict[str, CastPolicy]:
    """The policies of the installed torch, whose version is ``torch``. Its build must have
    ``registered`` the same ops (`aten::mm`) for autocast on the device; else :class:`UsageError`.
    """
    policies = policies_of(device, torch)
    ops = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    optional = {entry.op for entry in DEVICE_OPS if entry.needs_device_build}
    differing = (ops ^ policies.keys()) - (optional - ops)
    if differing:
        raise UsageError(
            f"torch {torch} registers other ops for autocast than the catalog has: {', '.join(sorted(differing))}.",
            "lowprec-check does not know the autocast policies of this build of torch. Use a release that it knows, or "
            "update lowprec-check.",
        )
    return policies


@cache
def releases() -> dict[str, ReadHeader]:
    """The header of each release, oldest first."""
    return read_releases(data_folder() / FILE)


def read_releases(path: Path) -> dict[str, ReadHeader]:
    """The headers in a file that :mod:`tools.autocast_policies` wrote, oldest first."""
    headers: dict[str, ReadHeader] = {}
    policies: dict[str, HeaderPolicy] = {}
    for changes in read_tables(path, "release", HeaderChanges):
        policies = {op: policy for op, policy in policies.items() if op not in changes.removed} | dict(changes.added())
        headers[changes.torch] = ReadHeader(changes.build, policies)
    return headers


# -- Predicted devices


def predicted_device(name: str, torch: str, installed: str) -> PredictedDevice:
    """The device ``name`` with a version of ``torch``, where the version ``installed`` runs; raises
    :class:`UsageError` for one that the catalog does not cover.
    """
    device, release, here = device_of(name), release_of(torch), release_of(installed)
    known = [entry for entry in catalogued() if (declared.releases(entry) if is_declared(entry) else history(entry))]
    if device.name not in known:
        problem = "is not available, and nothing can be predicted for it: the catalog does not cover it."
        raise UsageError(f"Device {device.name!r} {problem}", f"Predictions exist for {', '.join(known)}.")
    measured = [sweep.release for sweep in history("cpu")]
    if release != here and not version_key(measured[0]) <= version_key(release) <= version_key(measured[-1]):
        hint = f"The catalog has torch {measured[0]} to {measured[-1]}."
        raise UsageError(f"Nothing is known of torch {release}.", hint)
    # What is known of its kernels, in words.
    if not is_declared(device.name):
        sweep = at_release(device.name, release) or sweep_of(device.name)
        kernels = f"measured on {device.name} ({sweep.header.capability}), torch {sweep.release}"
    elif has_kernels(device.name, release):
        kernels = f"declared for {device.name}, torch {release}"
    else:
        among = declared.releases(device.name)
        covered = f"torch {among[0]} to {among[-1]}"
        kernels = f"known issues of {device.name} only, since its kernels are declared for {covered}"
    # The release whose autocast policies apply: its own, or the nearest that is known.
    with_policies, autocast = list(releases()), release
    if device.name == "cpu":
        autocast = here
    elif release not in with_policies and version_key(release) < version_key(with_policies[0]):
        autocast = with_policies[0]
    elif release not in with_policies:
        autocast = with_policies[-1]
    return PredictedDevice(name=device.name, torch=release, kernels=kernels, autocast=autocast)


def has_kernels(device: str, release: str) -> bool:
    """Whether the kernels of a device are known; measured ones count for all releases."""
    return not is_declared(device) or release in declared.releases(device)
