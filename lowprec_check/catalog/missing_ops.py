"""Operators that run in fp32 on a device but fail, at least for some inputs, in a lower precision."""

from __future__ import annotations

import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared_support import declared_support
from lowprec_check.catalog.fixes import fixed_since
from lowprec_check.catalog.measured import Sweep, catalog_device, sweep_of
from lowprec_check.catalog.names import AnyDevice, AnyDtype, low_dtype_of
from lowprec_check.catalog.numbers import why_operator_not_applicable
from lowprec_check.catalog.records import MODES, Dtype, FailureKind, Mode, OpRecord, State
from lowprec_check.catalog.support_cells import declared_cells
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.schema.axes import is_declared
from lowprec_check.schema.base import Struct


class MissingOp(Struct, frozen=True, kw_only=True):
    """An operator that runs in fp32 but not in all samples and modes of a lower precision."""

    op: str
    states: dict[Mode, State | None]
    kind: FailureKind | None = None
    at: str | None = None
    message: str | None = None
    condition: str | None = None
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release that runs it in every mode that fails here."""


class Gaps(Struct, frozen=True, kw_only=True):
    """The missing operators of one device, version and dtype."""

    device: str
    torch: str
    dtype: Dtype
    evidence: str
    runnable: int
    """The number of operators that run in fp32 and to which the dtype applies."""
    missing: list[MissingOp]
    not_applicable: list[str] = []
    """Operators that run in fp32 to which the dtype does not apply, since they take complex numbers; not among the runnable."""
    on_cpu: list[str] = []
    """On a declared device: operators that run, but copy tensors to the CPU and back."""


def gaps(device: AnyDevice = "cpu", dtype: AnyDtype = "float16", torch: str | None = None) -> Gaps:
    """Operators that run in fp32 on the device but fail, at least for some inputs, in ``dtype``; ``torch`` defaults to the newest version."""
    kind, low = catalog_device(device), low_dtype_of(dtype)
    return _declared_gaps(kind, low, torch) if is_declared(kind) else _measured_gaps(sweep_of(kind, torch), low)


def _measured_gaps(sweep: Sweep, dtype: Dtype) -> Gaps:
    in_fp32 = [record for record in sweep.records.values() if record.state("float32", "forward") in ("all", "some")]
    runnable = [record for record in in_fp32 if not why_operator_not_applicable(record.op, dtype)]
    return Gaps(
        device=sweep.header.device,
        torch=sweep.version,
        dtype=dtype,
        evidence="measured",
        runnable=len(runnable),
        missing=[missing for record in runnable if (missing := _missing(sweep, record, dtype)) is not None],
        not_applicable=[record.op for record in in_fp32 if record not in runnable],
    )


def _missing(sweep: Sweep, record: OpRecord, dtype: Dtype) -> MissingOp | None:
    states = {mode: sweep.state(record.op, dtype, mode) for mode in MODES}
    failing = [mode for mode in MODES[:2] if states[mode] in ("some", "none")]
    if not failing:
        return None
    failure = record.failure(dtype, failing[0])
    return MissingOp(
        op=record.op,
        states=states,
        kind=failure.kind if failure else None,
        at=failure.at if failure else None,
        message=failure.message if failure else None,
        condition=failure.condition if failure else None,
        fixed_in=_last([fixed_since(sweep, [record.op], dtype, mode) for mode in failing]),
    )


def _declared_gaps(device: str, dtype: Dtype, torch: str | None) -> Gaps:
    file = declared.load(device, torch or declared.known_release(device))
    fp32 = {op: declared_support(op, file, "float32", "forward") for op in sweep_of("cpu", file.torch).records}
    in_fp32 = [op for op, support in fp32.items() if support is not None and support.state != "none"]
    runnable = [op for op in in_fp32 if not why_operator_not_applicable(op, dtype)]
    supports = {op: [declared_support(op, file, dtype, mode) for mode in MODES[:2]] for op in runnable}
    failing = {
        op for op, both in supports.items() if any(support is not None and support.state != "all" for support in both)
    }
    return Gaps(
        device=device,
        torch=file.torch,
        dtype=dtype,
        evidence="declared",
        runnable=len(runnable),
        missing=[_declared_missing(op, device, dtype, file.torch) for op in runnable if op in failing],
        not_applicable=[op for op in in_fp32 if op not in runnable],
        on_cpu=sorted(
            op
            for op, both in supports.items()
            if op not in failing and any(support and support.on_cpu for support in both)
        ),
    )


def _declared_missing(op: str, device: str, dtype: Dtype, release: str) -> MissingOp:
    cells = declared_cells(op, device, (dtype,), release)
    failing = [cell for cell in cells if cell.state in ("some", "none")]
    failure = failing[0].failure
    return MissingOp(
        op=op,
        states={cell.mode: cell.state for cell in cells},
        kind=failure.kind if failure else None,
        at=failure.at if failure else None,
        message=failure.message if failure else None,
        fixed_in=_last([cell.fixed_in for cell in failing]),
    )


def _last(releases: list[str | None]) -> str | None:
    """The latest of the releases; ``None`` if one is missing."""
    known = [release for release in releases if release is not None]
    return max(known, key=version_key) if known and len(known) == len(releases) else None
