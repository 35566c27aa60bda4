"""The axes of a run besides its precision: backends, devices and memory formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.registry import Registry, added_by_packages, choices, modules_of_features, objects_in
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, MemoryFormat, RunKey

if TYPE_CHECKING:
    from lowprec_check.schema.findings import Gap
    from lowprec_check.schema.measures import LayerError
    from lowprec_check.schema.scan_result import ModelInfo


# -- The backends: each a way to execute a model in its precision
#
# To add one, add a module with an instance of :class:`Backend` to
# :mod:`lowprec_check.engine.backends`, or register it from another package (CONTRIBUTING.md).


class Replacement(NamedTuple):
    """What runs in place of a backend that cannot run here."""

    backend: str
    why: str
    """A clause: ``Intel's extension is archived and fits torch 2.8 only``."""


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a backend prepares a model for: a call of it, as it will be called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """An example of the inputs, cast for the precision, on the device."""
    precision: Precision
    device: str
    """Its type, ``cpu``."""
    calibration: Callable[[], Iterable[Call]]
    """Returns inputs to calibrate on: those of the file's ``calibration()``, else the example."""
    keep: tuple[str, ...] = ()
    """Paths of layers to leave in :attr:`precision`, for a backend with ``keeps_layers``."""
    is_trial: bool = False
    """Whether only its values count, for a trial of a plan: it need not be compiled."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code to paste that replaces ``model``, in its precision, by what a backend prepares."""

    imports: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Lines before the call and its context."""
    inside: tuple[str, ...] = ()
    """Lines inside the context of the call (``torch.no_grad()`` and autocast), before the call."""


class UnsupportedOpsError(Exception):
    """A backend has no implementation of some ops of a model."""

    def __init__(self, backend: str, gaps: list[Gap]) -> None:
        ops = ", ".join(dict.fromkeys(gap.op for gap in gaps))
        super().__init__(f"{backend} does not support {ops}")
        self.gaps = gaps


class Backend:
    """How a prepared model is executed. Subclasses import torch only inside :meth:`prepare`."""

    name: ClassVar[str]
    """The name in options, saved results and reports: ``inductor``."""
    summary: ClassVar[str]
    """One line for ``--help``."""
    aliases: ClassVar[tuple[str, ...]] = ()
    setup_budget: ClassVar[float] = 0.0
    """Seconds for preparing the model and its first call, beyond the budget of a call."""
    changes_process: ClassVar[bool] = False
    """Whether it changes its process for good (overrides kernels), so that it needs a worker."""
    tolerance: ClassVar[float] = 0.0
    """The least default tolerance (rel_l2), for a backend that computes in fewer bits itself."""
    lowers_precision: ClassVar[bool] = False
    """Whether it computes in fewer bits than the precision: fp32 on it is a low-precision run."""
    calibrates: ClassVar[bool] = False
    """Whether it depends on :attr:`Example.calibration`."""
    keeps_layers: ClassVar[bool] = False
    """Whether it can leave layers in the precision, so that a plan can keep some of those that
    :meth:`layer_errors` names."""
    project: ClassVar[str] = ""
    """Where its faults are reported, ``pytorch/pytorch``; empty for the registering package."""

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Why the backend cannot run a precision on a device; ``None`` if it can."""
        return None

    def replacement(self) -> Replacement | None:
        """The backend that runs in its place here, and why; ``None`` if it runs itself."""
        return None

    def note(self, precision: Precision) -> str | None:
        """What the backend does otherwise for a precision here, a note of the scan; or ``None``."""
        return None

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """Return a callable that replaces ``model`` (a ``torch.nn.Module`` in its precision, on its
        device).

        It is called in the context of the first call: without gradients, under autocast if the
        precision is. Ops that the backend lacks are an :class:`UnsupportedOpsError`; those that it
        computes in fp32 instead may be a list of gaps, the attribute ``gaps`` of what is returned.
        If it computes without the kernels that the backend is about, its attribute ``emulated`` is
        the reason; such a run has no times and no memory.
        """
        raise NotImplementedError

    def memory(self, prepared: Any, measured: int | None) -> int | None:
        """Bytes that serving ``prepared`` (what :meth:`prepare` returned) takes at the peak of a
        call; ``None`` if that is not known.

        What is not known is shown as "–" and decides no recommendation. ``measured`` is right for
        every runtime that holds its memory in its process: on the CPU, what a process with
        ``prepared`` alone holds beyond one that has loaded torch and the model's file, but no
        model; weights of the model count only if ``prepared`` refers to them. On an accelerator, it
        is what torch's allocator reports. Override this method for a runtime that holds memory
        elsewhere.
        """
        return measured

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The errors of quantized layers of what :meth:`prepare` returned; called after it ran."""
        return []

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """Code that does the same as :meth:`prepare`; ``model.call`` is how the model is called."""
        return Code()

    def code_keeping(self, key: RunKey, model: ModelInfo, layers: Sequence[str]) -> Code:
        """The same, with ``layers`` left in the precision, if :attr:`keeps_layers`."""
        return self.code(key, model)


def replaced(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The backends that run for ``names``, each once, and a note for each that is replaced."""
    running: list[str] = []
    replaced_by: dict[Replacement, list[str]] = {}
    for name in names:
        replacement = BACKENDS.get(name).replacement()
        running.append(replacement.backend if replacement else name)
        if replacement:
            replaced_by.setdefault(replacement, []).append(name)
    notes = []
    for replacement, backends in replaced_by.items():
        verb = "runs" if len(backends) == 1 else "run"
        notes.append(f"{choices(backends, 'and')} {verb} as {replacement.backend} here: {replacement.why}")
    return list(dict.fromkeys(running)), notes


def backend_notes(keys: Iterable[RunKey]) -> list[str]:
    """What the backends of runs do otherwise on this machine; nothing of runs that are skipped."""
    notes = []
    for key in keys:
        backend, precision = BACKENDS.get(key.backend), PRECISIONS.get(key.precision)
        if backend.skip_reason(precision, key.device, key.memory_format) is None:
            notes += [backend.note(precision)]
    return [note for note in dict.fromkeys(notes) if note is not None]


BACKENDS: Registry[Backend] = Registry(
    "backend",
    Backend,
    lambda: sorted(
        [
            *objects_in("lowprec_check.engine.backends", Backend),
            *(backend for module in modules_of_features("further_backends") for backend in module.BACKENDS),
        ],
        key=lambda backend: (backend.name != EAGER, backend.name),
    ),
    lambda backend: None if isinstance(getattr(backend, "summary", None), str) else "it has no summary",
)
"""All backends, eager first."""


def project_of(name: str) -> str:
    """Where faults of the backend ``name`` are reported."""
    backend = BACKENDS.find(name)
    packages = (package for package, item in added_by_packages() if item is backend)
    return (backend.project if backend is not None else "") or next(packages, f"the project of {name}")


def lowers_precision(name: str) -> bool:
    """Whether the backend computes in fewer bits than the precision; false if not installed."""
    return bool(getattr(BACKENDS.find(name), "lowers_precision", False))


def keeps_layers(name: str) -> bool:
    """Whether the backend ``name`` can leave layers alone; false if it is not installed."""
    return bool(getattr(BACKENDS.find(name), "keeps_layers", False))


def kept_in(backend: str, precision: str | None) -> str:
    """What a plan keeps modules in: fp32; if the backend quantizes, the format of ``precision``."""
    base = PRECISIONS.find(precision or "")
    if base is not None and keeps_layers(backend):
        return base.format.short
    return "fp32"


def calibrates(name: str) -> bool:
    """Whether the backend ``name`` is calibrated; false if it is not installed."""
    return bool(getattr(BACKENDS.find(name), "calibrates", False))


# -- The device types that a scan, the catalog or a test can name
#
# To add one, add an entry to :data:`DEVICES` and its data to the catalog, or register it from
# another package (CONTRIBUTING.md).


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device type, as in ``torch.device(name).type``."""

    name: str
    catalog: Literal["measured", "declared"] | None = None
    """The catalog's data, ``measured`` on hardware or ``declared`` in torch's sources, if any."""
    fallback_variable: str | None = None
    """The environment variable that makes torch run missing ops on the CPU."""
    aliases: tuple[str, ...] = ()


DEVICES: Registry[Device] = Registry(
    "device",
    Device,
    (
        Device(name="cpu", catalog="measured"),
        Device(name="cuda", catalog="measured"),
        Device(name="xpu", catalog="declared", fallback_variable="PYTORCH_ENABLE_XPU_FALLBACK"),
        Device(name="mps", fallback_variable="PYTORCH_ENABLE_MPS_FALLBACK"),
    ),
)
"""The CPU, then the accelerators, in the order in which a scan prefers them."""


def device_type(device: str) -> str:
    """``cuda`` of ``cuda:0``."""
    return device.strip().lower().partition(":")[0]


def device_of(name: str) -> Device:
    """The device of a name such as ``cuda:0``; raises :class:`UsageError` for an unknown one."""
    device = DEVICES.find(device_type(name))
    if device is None:
        raise UsageError(f"Unknown device {name!r}.", f"Choose from {', '.join(DEVICES.names())}.")
    if not re.fullmatch(r"[^:]*(:(0|[1-9][0-9]*))?", name.strip()):
        raise UsageError(f"Unknown device {name!r}.", f"Choose from {device.name}, {device.name}:0.")
    return device


def accelerators() -> list[str]:
    """All devices but the CPU, in the order in which a scan prefers them."""
    return [name for name in DEVICES.names() if name != "cpu"]


def catalogued(kind: Literal["measured", "declared"] | None = None) -> list[str]:
    """The devices in the catalog: all, or only the measured or declared ones."""
    return [device.name for device in DEVICES if device.catalog and kind in (None, device.catalog)]


def is_declared(device: str) -> bool:
    """Whether the catalog's data for a device is declared, not measured."""
    known = DEVICES.find(device_type(device))
    return known is not None and known.catalog == "declared"


# -- The memory formats by name


@dataclass(frozen=True)
class NamedFormat:
    """A memory format of torch."""

    name: MemoryFormat
    aliases: tuple[str, ...] = ()


MEMORY_FORMATS: Registry[NamedFormat] = Registry(
    "memory format",
    NamedFormat,
    (NamedFormat(CONTIGUOUS, ("nchw", "contiguous_format")), NamedFormat("channels_last", ("nhwc",))),
)
"""All memory formats, torch's default first."""
