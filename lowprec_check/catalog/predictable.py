"""For which devices and releases of torch a prediction can be made, and what it rests on."""

from __future__ import annotations

from lowprec_check.catalog import declared
from lowprec_check.catalog.autocast_releases import releases
from lowprec_check.catalog.declared import release_of
from lowprec_check.catalog.measured import at_release, history, sweep_of
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_of, is_declared
from lowprec_check.schema.measures import PredictedDevice


def predicted_device(name: str, torch: str, installed: str) -> PredictedDevice:
    """The device ``name`` with a version of ``torch``, where the version ``installed`` runs; raises :class:`UsageError` for one
    that the catalog does not cover.
    """
    device, release = device_of(name), release_of(torch)
    known = [entry for entry in catalogued() if (declared.releases(entry) if is_declared(entry) else history(entry))]
    if device.name not in known:
        raise UsageError(
            f"Device {device.name!r} is not available, and nothing can be predicted for it: the catalog does not cover it.",
            f"Predictions exist for {', '.join(known)}.",
        )
    measured = [sweep.release for sweep in history("cpu")]
    if release != release_of(installed) and not _is_between(release, measured[0], measured[-1]):
        raise UsageError(
            f"Nothing is known of torch {release}.", f"The catalog has torch {measured[0]} to {measured[-1]}."
        )
    return PredictedDevice(
        name=device.name,
        torch=release,
        kernels=_kernels(device.name, release),
        autocast=_autocast(device.name, release, release_of(installed)),
    )


def _is_between(release: str, oldest: str, newest: str) -> bool:
    return version_key(oldest) <= version_key(release) <= version_key(newest)


def has_kernels(device: str, release: str) -> bool:
    """Whether the catalog says which kernels a device has in a release; a measured one counts for all releases."""
    return not is_declared(device) or release in declared.releases(device)


def _kernels(device: str, release: str) -> str:
    if is_declared(device):
        if has_kernels(device, release):
            return f"declared for {device}, torch {release}"
        known = declared.releases(device)
        return f"known issues of {device} only, since its kernels are declared for torch {known[0]} to {known[-1]}"
    sweep = at_release(device, release) or sweep_of(device)
    return f"measured on {device} ({sweep.header.capability}), torch {sweep.release}"


def _autocast(device: str, release: str, installed: str) -> str:
    """The release itself if its policy is known; else the nearest one that is."""
    known = list(releases())
    if device == "cpu" or release == installed:
        return installed
    return release if release in known else known[0] if version_key(release) < version_key(known[0]) else known[-1]
