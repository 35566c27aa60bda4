"""The autocast policies of CUDA and XPU in each supported release of torch.

`catalog/autocast-policies.toml` has the ops that the header of each release lists (see
:mod:`lowprec_check.catalog.autocast_header`); :data:`DEVICE_OPS` has those that a device registers elsewhere.

>>> policies_of("xpu", "2.15")["layer_norm"]
'fp32'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from lowprec_check.catalog.autocast_header import POLICIES, AutocastHeaderError, HeaderPolicy, parse_header
from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.declared import has_extension, release_of
from lowprec_check.catalog.toml_tables import read_tables, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.base import StrictStruct

CastPolicy = Literal[HeaderPolicy, "fp16", "banned"]
"""A policy of the header, or one of a device alone. ``fp16``: casts to fp16, whatever the autocast dtype is.
``banned``: raises.
"""

FILE = "autocast-policies.toml"
DEVICES = ("cuda", "xpu")
_REBUILD = "Restore the file, or rebuild it with python -m tools.autocast_policies."


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


class ReadHeader(NamedTuple):
    """What the header of a release lists."""

    build: str
    """The version whose header was read, `2.13.0`."""
    policies: Mapping[str, HeaderPolicy]


class HeaderChanges(StrictStruct, frozen=True, kw_only=True, rename="kebab"):
    """What the header of a release changed since the release before it; the first release has all ops."""

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
        for policy in POLICIES.values():
            for op in getattr(self, policy.replace("-", "_")):
                yield op, policy


def policies_of(device: str, torch: str) -> dict[str, CastPolicy]:
    """The policy of each op that autocast on a device wraps in a release (`2.13`, `2.13.0+cpu`), by overload name.

    Raises :class:`UsageError` if the catalog does not have the policies of this device or release.
    """
    known = releases()
    if has_extension(torch) or release_of(torch) not in known:
        raise UsageError(
            f"The catalog has no autocast policies for torch {torch}.", f"Releases with policies: {', '.join(known)}."
        )
    return _on_device(device, torch, known[release_of(torch)].policies)


def installed_policies(device: str, torch: str, header: str, registered: Iterable[str]) -> dict[str, CastPolicy]:
    """The policies of the installed torch, from its version and the text of its header.

    ``registered`` are the ops (`aten::mm`) that this torch registers for autocast on the device. Raises
    :class:`AutocastHeaderError` if they are not those of the result.
    """
    found = _on_device(device, torch, parse_header(header))
    ops = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    optional = {entry.op for entry in DEVICE_OPS if entry.needs_device_build}
    if differing := (ops ^ found.keys()) - (optional - ops):
        raise AutocastHeaderError(f"torch registers other ops than the header lists: {', '.join(sorted(differing))}")
    return found


def _on_device(device: str, torch: str, listed: Mapping[str, HeaderPolicy]) -> dict[str, CastPolicy]:
    """The policies in the header and those of the device alone."""
    kind = device_type(device)
    if kind not in DEVICES:
        raise UsageError(f"The catalog has no autocast policies for {device}.", f"Choose from {', '.join(DEVICES)}.")
    own: dict[str, CastPolicy] = {
        entry.op: entry.policy
        for entry in DEVICE_OPS
        if kind in entry.devices and version_key(entry.since) <= version_key(release_of(torch))
    }
    if twice := own.keys() & listed.keys():
        raise AutocastHeaderError(f"it lists ops that {kind} registers itself: {', '.join(sorted(twice))}")
    return {**listed, **own}


@cache
def releases() -> dict[str, ReadHeader]:
    """The header of each release, oldest first."""
    return read_releases(data_folder() / FILE)


def read_releases(path: Path) -> dict[str, ReadHeader]:
    """The headers in a file by release, oldest first; raises :class:`UsageError` that names file and entry."""
    found: dict[str, ReadHeader] = {}
    policies: dict[str, HeaderPolicy] = {}
    for changes in read_tables(path, "release", HeaderChanges):
        where = f"{path.name}: release {changes.torch}"
        if release_of(changes.build) != changes.torch:
            raise UsageError(f"{where}: build {changes.build} is not of this release.", _REBUILD)
        if found and version_key(changes.torch) <= version_key(list(found)[-1]):
            raise UsageError(f"{where}: duplicate or not sorted.", _REBUILD)
        policies = _apply(where, policies, changes)
        found[changes.torch] = ReadHeader(changes.build, policies)
    if not found:
        raise UsageError(f"{path.name}: no releases.", _REBUILD)
    return found


def _apply(where: str, before: Mapping[str, HeaderPolicy], changes: HeaderChanges) -> dict[str, HeaderPolicy]:
    """The policies after the changes of a release."""
    after = dict(before)
    named = [*changes.removed, *(op for op, _ in changes.added())]
    if twice := {op for op in named if named.count(op) > 1}:
        raise UsageError(f"{where}: duplicate op {min(twice)}.", _REBUILD)
    for op in changes.removed:
        if after.pop(op, None) is None:
            raise UsageError(f"{where}: removes {op}, which the release before does not have.", _REBUILD)
    for op, policy in changes.added():
        if before.get(op) == policy:
            raise UsageError(f"{where}: {op} is {policy} already.", _REBUILD)
        after[op] = policy
    if missing := set(POLICIES.values()) - set(after.values()):
        raise UsageError(f"{where}: no op is {min(missing)}.", _REBUILD)
    return after


def all_changes(headers: Iterable[ReadHeader]) -> list[HeaderChanges]:
    """What to store for headers, one per release: oldest first, the ops sorted."""
    found: list[HeaderChanges] = []
    before: Mapping[str, HeaderPolicy] = {}
    for build, after in sorted(headers, key=lambda header: version_key(header.build)):
        lists: dict[str, list[str]] = {policy.replace("-", "_"): [] for policy in POLICIES.values()}
        for op, policy in sorted(after.items()):
            if before.get(op) != policy:
                lists[policy.replace("-", "_")].append(op)
        removed = sorted(before.keys() - after.keys())
        found.append(HeaderChanges(torch=release_of(build), build=build, removed=removed, **lists))
        before = after
    return found
