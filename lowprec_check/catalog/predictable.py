"""For which devices and releases of torch a prediction can be made, and what it rests on."""

from __future__ import annotations

from lowprec_check.catalog import declared
from lowprec_check.catalog.autocast_releases import releases
from lowprec_check.catalog.measured import at_release, history, sweep_of
from lowprec_check.catalog.versions import release_of, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_of, is_declared
from lowprec_check.schema.measures import PredictedDevice


def predicted_device(name: str, torch: str, installed: str) -> PredictedDevice:
    """The device ``name`` with a version of ``torch``, where the version ``installed`` runs; raises :class:`UsageError` for one
    that the catalog does not cover.
    """
    device, release, here = device_of(name), release_of(torch), release_of(installed)
    known = [entry for entry in catalogued() if (declared.releases(entry) if is_declared(entry) else history(entry))]
    if device.name not in known:
        raise UsageError(
            f"Device {device.name!r} is not available, and nothing can be predicted for it: the catalog does not cover it.",
            f"Predictions exist for {', '.join(known)}.",
        )
    measured = [sweep.release for sweep in history("cpu")]
    if release != here and not version_key(measured[0]) <= version_key(release) <= version_key(measured[-1]):
        raise UsageError(
            f"Nothing is known of torch {release}.", f"The catalog has torch {measured[0]} to {measured[-1]}."
        )
    if not is_declared(device.name):
        sweep = at_release(device.name, release) or sweep_of(device.name)
        kernels = f"measured on {device.name} ({sweep.header.capability}), torch {sweep.release}"
    elif has_kernels(device.name, release):
        kernels = f"declared for {device.name}, torch {release}"
    else:
        first, *_, last = declared.releases(device.name)
        kernels = f"known issues of {device.name} only, since its kernels are declared for torch {first} to {last}"
    policies = list(releases())  # of the release itself, or the nearest one that is known
    nearest = policies[0] if version_key(release) < version_key(policies[0]) else policies[-1]
    autocast = here if device.name == "cpu" else release if release in policies else nearest
    return PredictedDevice(name=device.name, torch=release, kernels=kernels, autocast=autocast)


def has_kernels(device: str, release: str) -> bool:
    """Whether the catalog says which kernels a device has in a release; a measured one counts for all releases."""
    return not is_declared(device) or release in declared.releases(device)
