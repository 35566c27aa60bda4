"""The support of an aten op in a dtype on a device, derived from the operators that dispatch it. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.declared_support import row_supports, why_missing
from lowprec_check.catalog.fixes import fixed_since
from lowprec_check.catalog.measured import at_release, sweep_of
from lowprec_check.catalog.records import MODES, Dtype, Failure, FailureKind, Mode, OpRecord, State
from lowprec_check.schema.base import Struct
from lowprec_check.schema.devices import is_declared

_NO_KERNEL = ("missing-kernel", "no-backend-kernel", "crash")
"""Failures of the op itself; other failures depend on the arguments of a sample."""


class AtenSupport(Struct, frozen=True, kw_only=True):
    """One aten op in one dtype on one device."""

    state: State | None
    """``some``: it depends on the arguments; ``None``: unknown."""
    kind: FailureKind | None = None
    message: str | None = None
    """The error message, or what is declared."""
    condition: str | None = None
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release of torch that runs it."""
    shown_by: list[str] = []
    """Operators that fail in this aten op."""


class _Use(NamedTuple):
    """One operator in one mode that dispatches the op or fails in it."""

    record: OpRecord
    mode: Mode
    state: State | None
    failure: Failure | None


class AtenCatalog:
    """The support of all aten ops in ``dtype`` on ``device``, for the release of ``torch`` if it is known, else for the newest one.

    Raises :class:`UsageError` if the catalog has no data for the device.
    """

    def __init__(self, device: str, dtype: Dtype, torch: str) -> None:
        self.device, self.dtype = device, dtype
        release = declared.release_of(torch)
        self.declared: declared.Release | None = None
        if is_declared(device):
            self.declared = declared.load(device, declared.known_release(device, release))
        measured_on = "cpu" if self.declared else device
        self.sweep = at_release(measured_on, release) or sweep_of(measured_on)
        self._dispatching: dict[str, list[_Use]] = defaultdict(list)  # by overload, in any mode
        self._failing: dict[str, list[_Use]] = defaultdict(list)
        for record in self.sweep.records.values():
            for mode, names in zip(MODES[:2], (record.aten, record.backward_aten), strict=True):
                use = _Use(record, mode, self.sweep.state(record.op, dtype, mode), record.failure(dtype, mode))
                for name in names:
                    self._dispatching[name].append(use)
                if self._lacks_kernel(use) and use.failure is not None and use.failure.at is not None:
                    self._failing[use.failure.at].append(use)

    def _lacks_kernel(self, use: _Use) -> bool:
        """Whether a kernel is missing. A variant does not count if its base operator runs (complex ``silu``)."""
        if use.state not in ("some", "none") or use.failure is None or use.failure.kind not in _NO_KERNEL:
            return False
        base = use.record.op.rpartition(".")[0]
        return self.sweep.state(base, self.dtype, use.mode) != "all"

    @property
    def evidence(self) -> str:
        """``measured`` or ``declared``."""
        return "declared" if self.declared else "measured"

    @property
    def torch(self) -> str:
        """The release that the answers apply to."""
        return self.declared.torch if self.declared else self.sweep.release

    def of(self, op: str) -> AtenSupport:
        """The support of an op in any usual spelling, ``aten.linalg_inv_ex.default``."""
        return self._declared_of(op, self.declared) if self.declared else self._measured_of(op)

    def _measured_of(self, op: str) -> AtenSupport:
        for name in _spellings(op):
            dispatching, failing = self._dispatching[name], self._failing[name]
            runs = any(use.state == "all" for use in dispatching)
            if failing:
                partly = runs or all(use.state == "some" for use in failing)
                return self._failure("some" if partly else "none", failing)
            if runs:
                return AtenSupport(state="all")
        refused = [use for use in self._dispatching[overload_name(op)] if use.failure is not None]
        if refused and all(use.failure and use.failure.at is None for use in refused):
            # every function that dispatches the op refuses the dtype before it does
            return self._failure("none" if any(use.state == "none" for use in refused) else "some", refused)
        return AtenSupport(state=None)

    def _failure(self, state: State, failing: list[_Use]) -> AtenSupport:
        first = failing[0]
        assert first.failure is not None
        ops = list(dict.fromkeys(use.record.op for use in failing))
        return AtenSupport(
            state=state,
            kind=first.failure.kind,
            message=first.failure.message,
            condition=first.failure.condition if state == "some" else None,
            fixed_in=fixed_since(self.sweep, ops, self.dtype, first.mode),
            shown_by=ops,
        )

    def _declared_of(self, op: str, file: declared.Release) -> AtenSupport:
        row = next((row for name in _spellings(op) if (row := file.row(name)) is not None), None)
        if row is None:
            return AtenSupport(state=None)
        if row.registration == "fallback":
            on_cpu = self._measured_of(op)
            message = "runs on the CPU" + (f": {on_cpu.message}" if on_cpu.message else "")
            return AtenSupport(state=on_cpu.state, kind=on_cpu.kind, message=message, shown_by=on_cpu.shown_by)
        supported = row_supports(row, self.dtype)
        if supported is not False:
            return AtenSupport(state="all" if supported else None)
        kind, message = why_missing(row.registration, file.device)
        return AtenSupport(state="none", kind=kind, message=message)


def _spellings(op: str) -> Iterator[str]:
    """The op, then its base op: ``add_.Tensor`` and ``add.out`` share kernels with ``add.Tensor`` and ``add``."""
    name = overload_name(op)
    yield name
    base, _, overload = name.partition(".")
    functional = base.removesuffix("_")
    if overload in ("out", "grad_input", "values", "generator"):
        yield functional
        yield f"{functional}.Tensor"
    if overload.endswith("_out"):
        yield f"{functional}.{overload.removesuffix('_out')}"
    if functional != base:
        yield f"{functional}.{overload}" if overload else functional
