"""The support of an operator on a device that has declarations only, derived from the aten ops that it dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lowprec_check.catalog.declared import Release
from lowprec_check.catalog.declared_file import DeclaredRow, Registration
from lowprec_check.catalog.measured import at_release, history
from lowprec_check.catalog.numbers import why_operator_not_applicable
from lowprec_check.catalog.records import MODES, SHORT, STATES, Dtype, Failure, FailureKind, Mode, OpRecord, State
from lowprec_check.schema.axes import catalogued

OnCpu = Literal["partly", "wholly"]
Rank = tuple[int, int]
_ON_CPU = ("wholly", "partly", None)

_WHY: dict[Registration, tuple[FailureKind, str]] = {
    "native": ("missing-kernel", "its kernel does not support the dtype"),
    "composite": ("unsupported-dtype", "does not support the dtype"),
    "fallback": ("missing-kernel", "runs on the CPU, no kernel there"),
    "none": ("no-backend-kernel", "not registered for {device}"),
}


def why_missing(registration: Registration, device: str) -> tuple[FailureKind, str]:
    """Why an aten op does not run in a dtype, by how it is registered on the device: the kind of failure and a message."""
    kind, message = _WHY[registration]
    return kind, message.format(device=device)


class OpSupport(NamedTuple):
    """The support of an operator in one dtype and mode. All but ``state`` are set for declared devices only."""

    state: State
    on_cpu: OnCpu | None = None
    """If it runs: whether tensors are copied to the CPU and back for it."""
    at: str | None = None
    """The aten op that fails, or that runs on the CPU."""
    failure: Failure | None = None
    """Why not all samples run."""

    @property
    def rank(self) -> Rank:
        """For comparing: higher is better."""
        return STATES.index(self.state), _ON_CPU.index(self.on_cpu)


def declared_support(op: str, file: Release, dtype: Dtype, mode: Mode) -> OpSupport | None:
    """The support of the worst aten op that the operator dispatches in that release; ``None`` if no source covers it.

    If an aten op runs on the CPU, the result is that of the CPU sweep. If an aten op fails, the state is *none*; it is *some*
    if the CPU runs some samples although the same op fails there (those do not dispatch it), or the op is composite, so
    that it behaves the same on every device.
    """
    sweep = at_release("cpu", file.torch)
    record = sweep.records.get(op) if sweep else None
    not_applicable = op.endswith(".complex") or why_operator_not_applicable(op, dtype)
    if sweep is None or record is None or not record.samples[MODES.index(mode) % 2] or not_applicable:
        return None
    names, cell = dispatched(record, mode, file), f"{dtype}/{mode}"
    failing, fallback = _failing(names, file, dtype), [n for n in names if file.ops[n].registration == "fallback"]
    if not failing and _refused_everywhere(record, dtype, mode, file):
        message = "refuses the dtype, as on other devices"
        return OpSupport(
            "none", failure=Failure(cells=[cell], type="declared", kind="unsupported-dtype", message=message)
        )
    at = failing or next(iter(fallback), None)
    if at is None:
        return OpSupport("all") if any(row_supports(file.ops[name], dtype) for name in names) else None
    kind, message = why_missing(file.ops[at].registration, file.device)
    failure = Failure(cells=[cell], type="declared", kind=kind, message=message, at=at)
    state, failure_on_cpu = sweep.state(op, dtype, mode), record.failure(dtype, mode)
    if failing:
        same = failure_on_cpu is not None and failure_on_cpu.at == failing and kind != "no-backend-kernel"
        partly = state == "some" and (same or file.ops[failing].registration == "composite")
        return OpSupport("some" if partly else "none", at=at, failure=failure)
    if state is None or state == "none":
        return OpSupport("none", at=at, failure=failure) if state else None
    on_cpu: OnCpu = "partly" if any(file.ops[name].registration == "native" for name in names) else "wholly"
    return OpSupport(state, on_cpu, at, failure if state == "some" else None)


def dispatched(record: OpRecord, mode: Mode, file: Release) -> list[str]:
    """The aten ops that an operator dispatches on the device: its own, and those of a CPU sweep that are not specific to CPUs."""
    names = [_own_name(record.op), *record.aten, *(record.backward_aten if mode.endswith("backward") else [])]
    known = (name for name in names if name in file.ops and "_for_cpu" not in name and "mkldnn" not in name)
    return list(dict.fromkeys(known))


def _own_name(op: str) -> str:
    """The name of the aten op with the same function."""
    return op.removeprefix("nn.functional.").replace(".", "_")


def _failing(names: Sequence[str], file: Release, dtype: Dtype) -> str | None:
    """An op that is not registered or does not support the dtype; one with a kernel rather than a composite one.

    If another op runs on the CPU, composite ops do not count: what they do not support fails in the CPU sweep too.
    """
    failing = {
        file.ops[name].registration: name for name in reversed(names) if row_supports(file.ops[name], dtype) is False
    }
    falls_back = any(file.ops[name].registration == "fallback" for name in names)
    return failing.get("none") or failing.get("native") or (None if falls_back else failing.get("composite"))


def _refused_everywhere(record: OpRecord, dtype: Dtype, mode: Mode, file: Release) -> bool:
    """Whether Python code or a backward formula refuses the dtype, on the CPU and on every other device that was measured."""
    if _own_name(record.op) in file.ops and not mode.endswith("backward"):
        return False  # C++ code may check the device, as torch.fft does
    newest = (history(device)[-1:] for device in catalogued("measured") if device != "cpu")
    others = (sweep.records[record.op] for sweeps in newest for sweep in sweeps if record.op in sweep.records)
    return all(_refuses_above_dispatch(each, dtype, mode) for each in (record, *others))


def _refuses_above_dispatch(record: OpRecord, dtype: Dtype, mode: Mode) -> bool:
    failure = record.failure(dtype, mode)
    return failure is not None and failure.at is None and record.state(dtype, mode) == "none"


def row_supports(row: DeclaredRow, dtype: Dtype) -> bool | None:
    """Whether an aten op runs in a dtype on the device; ``None`` if no source covers it."""
    if row.registration == "none":
        return False
    return True if dtype == "float32" else row.supports(SHORT[dtype])
