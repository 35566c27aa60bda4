"""The release of torch that fixes an operator or a gap of a scan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.declared_support import row_supports
from lowprec_check.catalog.measured import Sweep, history, sweep_of
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of
from lowprec_check.catalog.records import Dtype, Mode, OpRecord
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_of, is_declared


def fixed_since(sweep: Sweep, ops: Sequence[str], dtype: Dtype, mode: Mode) -> str | None:
    """The first later release since which all ``ops`` run in all samples; ``None`` if there is none yet."""
    since = None
    for other in history(sweep.header.device, sweep.header.extension):
        if other.key > sweep.key:
            runs = [other.state(op, dtype, mode) == "all" for op in ops if op in other.records]
            since = (since or other.release) if runs and all(runs) else None
    return since


class Fix(NamedTuple):
    """The release that fixes a gap."""

    torch: str | None
    """The first later release that runs the op; ``None`` if no known release does."""
    newest: str
    """The newest release in the catalog."""
    ops: list[str]
    """The operators that were looked up."""

    def __str__(self) -> str:
        if self.torch:
            return f"supported since torch {self.torch}"
        return f"no torch release up to {self.newest} supports it"


def find_fix(
    op: str, *, device: AnyDevice, dtype: AnyDtype, torch: str, phase: str = "forward", autocast: bool = False
) -> Fix | None:
    """The release that fixes the gap of an op call (``aten.linalg_inv_ex.default``, ``torch.fft.rfft``).

    Derived from the operators that fail in that aten op in the sweep of version ``torch``, or from the declarations of the
    aten op. ``None`` if the catalog does not have that version on the device, or if nothing fails in that op.
    """
    kind, low = device_of(str(device)).name, dtype_of(dtype)
    release = declared.release_of(torch)  # raises if it is not a version
    if is_declared(kind):
        return _find_declared_fix(op, kind, low, release)
    try:
        sweep = sweep_of(kind, torch)
    except UsageError:
        return None
    plain: Mode = "backward" if phase == "backward" else "forward"
    under_autocast: Mode = "autocast-backward" if phase == "backward" else "autocast"
    for mode in (under_autocast, plain) if autocast else (plain,):
        ops = [record.op for record in sweep.records.values() if _fails_in(record, op, low, mode)]
        if ops:
            return Fix(fixed_since(sweep, ops, low, mode), history(kind)[-1].release, ops)
    return None


def _find_declared_fix(op: str, device: str, dtype: Dtype, release: str) -> Fix | None:
    if release not in declared.releases(device):
        return None
    rows = {dated.torch: dated.row for dated in declared.history(device, op)}
    runs = {other: row is not None and row_supports(row, dtype) is not False for other, row in rows.items()}
    later = [other for other in declared.releases(device) if version_key(other) >= version_key(release)]
    if rows[release] is None or runs[release]:
        return None
    since = None
    for other in later:
        since = (since or other) if runs[other] else None
    return Fix(since, later[-1], [op])


def _fails_in(record: OpRecord, op: str, dtype: Dtype, mode: Mode) -> bool:
    """Whether the operator fails in the aten op ``op``, or is the function ``op`` and fails."""
    failure = record.failure(dtype, mode)
    if failure is None:
        return False
    function = re.sub(r"^torch\.(nn\.functional\.|functional\.|Tensor\.)?", "", op)
    named = op.startswith("torch.") and record.op.removeprefix("nn.functional.") == function
    return named or failure.at == overload_name(op)
