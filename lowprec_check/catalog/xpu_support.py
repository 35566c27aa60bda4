"""The support of an operator on XPU, derived from what is declared of the aten ops that it dispatches. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import Release
from lowprec_check.catalog.declared_file import DeclaredRow, Registration
from lowprec_check.catalog.measured import at_release, history
from lowprec_check.catalog.records import MODES, SHORT, STATES, Dtype, Failure, FailureKind, Mode, OpRecord, State

OnCpu = Literal["partly", "wholly"]
Rank = tuple[int, int]
_ON_CPU = ("wholly", "partly", None)

WHY: dict[Registration, tuple[FailureKind, str]] = {
    "native": ("missing-kernel", "its kernel leaves the dtype out"),
    "composite": ("unsupported-dtype", "does not take the dtype"),
    "fallback": ("missing-kernel", "on the CPU, no kernel there"),
    "none": ("no-backend-kernel", "not registered for XPU"),
}
"""Why an aten op does not run in a dtype, by how it is registered."""

_COMPLEX_ONLY = frozenset({"imag", "istft", "view_as_real"})
"""They take complex values, which stay complex64 in bfloat16."""


class OpSupport(NamedTuple):
    """The support of an operator in one dtype and mode."""

    state: State
    on_cpu: OnCpu | None = None
    """On XPU, where it runs: what it dispatches is copied to the CPU and back."""
    at: str | None = None
    """On XPU: the aten op that refuses, or that the CPU has to run."""
    failure: Failure | None = None
    """On XPU: why it does not run, or not always."""

    @property
    def rank(self) -> Rank:
        """The better, the higher."""
        return STATES.index(self.state), _ON_CPU.index(self.on_cpu)


def declared_support(op: str, release: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
    """As its worst aten op, of those that it dispatches in that release; ``None`` where nothing says.

    On the fallback it is as on the CPU. Where an op refuses, *none*; *some* where the CPU runs some samples all the
    same: those go without that op, or it is composite, the same on every device.
    """
    sweep, file = at_release("cpu", release), declared.load(release)
    record = sweep.records.get(op) if sweep else None
    if sweep is None or record is None or not record.samples[MODES.index(mode) % 2] or op.endswith(".complex"):
        return None
    if op in _COMPLEX_ONLY and dtype == "bfloat16":
        dtype = "float32"
    names, cell = dispatched(record, mode, file), f"{dtype}/{mode}"
    refusing, falling = _refusing(names, file, dtype), [n for n in names if file.ops[n].registration == "fallback"]
    if not refusing and _refuses_everywhere(record, dtype, mode, file):
        message = "refuses the dtype, as on other devices"
        return OpSupport(
            "none", failure=Failure(cells=[cell], type="declared", kind="unsupported-dtype", message=message)
        )
    at = refusing or next(iter(falling), None)
    if at is None:
        return OpSupport("all") if any(takes(file.ops[name], dtype) for name in names) else None
    kind, message = WHY[file.ops[at].registration]
    failure = Failure(cells=[cell], type="declared", kind=kind, message=message, at=at)
    state, on_the_cpu = sweep.state(op, dtype, mode), record.failure(dtype, mode)
    if refusing:
        same = on_the_cpu is not None and on_the_cpu.at == refusing and kind != "no-backend-kernel"
        partly = state == "some" and (same or file.ops[refusing].registration == "composite")
        return OpSupport("some" if partly else "none", at=at, failure=failure)
    if state is None or state == "none":
        return OpSupport("none", at=at, failure=failure) if state else None
    on_cpu: OnCpu = "partly" if any(file.ops[name].registration == "native" for name in names) else "wholly"
    return OpSupport(state, on_cpu, at, failure if state == "some" else None)


def dispatched(record: OpRecord, mode: Mode, file: Release) -> list[str]:
    """The aten ops that count on XPU: the function itself, and those of a CPU sweep but for the ones that only CPUs have."""
    names = [_itself(record.op), *record.aten, *(record.backward_aten if mode.endswith("backward") else [])]
    known = (name for name in names if name in file.ops and "_for_cpu" not in name and "mkldnn" not in name)
    return list(dict.fromkeys(known))


def _itself(op: str) -> str:
    """The aten op that a function would be."""
    return op.removeprefix("nn.functional.").replace(".", "_")


def _refusing(names: Sequence[str], file: Release, dtype: Dtype) -> str | None:
    """The op that is not registered, or leaves the dtype out; a kernel rather than what is made of it.

    Where part of it runs on the CPU, only kernels count: what composite ops leave out shows on the CPU as well.
    """
    refusing = {file.ops[name].registration: name for name in reversed(names) if takes(file.ops[name], dtype) is False}
    falls = any(file.ops[name].registration == "fallback" for name in names)
    return refusing.get("none") or refusing.get("native") or (None if falls else refusing.get("composite"))


def _refuses_everywhere(record: OpRecord, dtype: Dtype, mode: Mode, file: Release) -> bool:
    """Whether it is Python, or a backward formula, that refuses the dtype, on the CPU and wherever else it was measured."""
    if _itself(record.op) in file.ops and not mode.endswith("backward"):
        return False  # a function in C++ may ask which device it is on: torch.fft does
    on_cuda = (each.records[record.op] for each in history("cuda")[-1:] if record.op in each.records)
    return all(_refuses_itself(each, dtype, mode) for each in (record, *on_cuda))


def _refuses_itself(record: OpRecord, dtype: Dtype, mode: Mode) -> bool:
    failure = record.failure(dtype, mode)
    return failure is not None and failure.at is None and record.state(dtype, mode) == "none"


def takes(row: DeclaredRow, dtype: Dtype) -> bool | None:
    """Whether an aten op runs in a dtype on XPU; ``None`` where no source says."""
    if row.registration == "none":
        return False
    return True if dtype == "float32" else row.takes(SHORT[dtype])
