"""Whether an aten op, as a dispatch mode sees it, runs in a dtype on a device: told by the operators that dispatch it. Never imports torch."""

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
"""Failures that are the op's own; others are of what a sample gave it."""


class AtenSupport(Struct, frozen=True, kw_only=True):
    """One aten op in one dtype on one device."""

    state: State | None
    """``some``: it depends on the arguments; ``None``: the catalog cannot tell."""
    kind: FailureKind | None = None
    message: str | None = None
    """How it fails, or what is declared of it."""
    condition: str | None = None
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The later release of torch from which on it runs."""
    shown_by: list[str] = []
    """Operators that fail in it."""


class _Seen(NamedTuple):
    """One operator in one mode, which dispatches the op or fails in it."""

    record: OpRecord
    mode: Mode
    state: State | None
    failure: Failure | None


class AtenCatalog:
    """What is known of all aten ops in ``dtype`` on ``device``, for the release of ``torch``, else for the newest known.

    Raises :class:`UsageError` where nothing is known of the device.
    """

    def __init__(self, device: str, dtype: Dtype, torch: str) -> None:
        self.device, self.dtype = device, dtype
        release = declared.release_of(torch)
        self.declared: declared.Release | None = None
        if is_declared(device):
            self.declared = declared.load(device, declared.known_release(device, release))
        measured_on = "cpu" if self.declared else device
        self.sweep = at_release(measured_on, release) or sweep_of(measured_on)
        self._dispatching: dict[str, list[_Seen]] = defaultdict(list)  # by overload, in any mode
        self._failing: dict[str, list[_Seen]] = defaultdict(list)
        for record in self.sweep.records.values():
            for mode, names in zip(MODES[:2], (record.aten, record.backward_aten), strict=True):
                seen = _Seen(record, mode, self.sweep.state(record.op, dtype, mode), record.failure(dtype, mode))
                for name in names:
                    self._dispatching[name].append(seen)
                if self._lacks_kernel(seen) and seen.failure is not None and seen.failure.at is not None:
                    self._failing[seen.failure.at].append(seen)

    def _lacks_kernel(self, seen: _Seen) -> bool:
        """Whether the failure is a kernel's; a variant does not count where what it is a variant of runs (complex ``silu``)."""
        if seen.state not in ("some", "none") or seen.failure is None or seen.failure.kind not in _NO_KERNEL:
            return False
        base = seen.record.op.rpartition(".")[0]
        return self.sweep.state(base, self.dtype, seen.mode) != "all"

    @property
    def evidence(self) -> str:
        """``measured`` or ``declared``."""
        return "declared" if self.declared else "measured"

    @property
    def torch(self) -> str:
        """The release that the answers are about."""
        return self.declared.torch if self.declared else self.sweep.release

    def of(self, op: str) -> AtenSupport:
        """What is known of an op in any usual spelling, ``aten.linalg_inv_ex.default``."""
        return self._declared_of(op, self.declared) if self.declared else self._measured_of(op)

    def _measured_of(self, op: str) -> AtenSupport:
        for name in _spellings(op):
            dispatching, failing = self._dispatching[name], self._failing[name]
            runs = any(seen.state == "all" for seen in dispatching)
            if failing:
                partly = runs or all(seen.state == "some" for seen in failing)
                return self._failure("some" if partly else "none", failing)
            if runs:
                return AtenSupport(state="all")
        refused = [seen for seen in self._dispatching[overload_name(op)] if seen.failure is not None]
        if refused and all(seen.failure and seen.failure.at is None for seen in refused):
            # by every function that dispatches it, before it does
            return self._failure("none" if any(seen.state == "none" for seen in refused) else "some", refused)
        return AtenSupport(state=None)

    def _failure(self, state: State, failing: list[_Seen]) -> AtenSupport:
        first = failing[0]
        assert first.failure is not None
        ops = list(dict.fromkeys(seen.record.op for seen in failing))
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
            said = "computed on the CPU" + (f": {on_cpu.message}" if on_cpu.message else "")
            return AtenSupport(state=on_cpu.state, kind=on_cpu.kind, message=said, shown_by=on_cpu.shown_by)
        supported = row_supports(row, self.dtype)
        if supported is not False:
            return AtenSupport(state="all" if supported else None)
        kind, message = why_missing(row.registration, file.device)
        return AtenSupport(state="none", kind=kind, message=message)


def _spellings(op: str) -> Iterator[str]:
    """The op, then what it is a variant of: ``add_.Tensor`` and ``add.out`` share kernels with ``add.Tensor`` and ``add``."""
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
