"""How an operator fares on XPU, told from what is declared of the aten ops that it dispatches. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import Declared, Row
from lowprec_check.catalog.measured import history
from lowprec_check.catalog.records import MODES, SHORT, Dtype, Mode, OpRecord, State

OnCpu = Literal["partly", "wholly"]
_STATES = ("none", "some", "all")
_ON_CPU = ("wholly", "partly", None)


class Fare(NamedTuple):
    """How an operator fares in one dtype and mode."""

    state: State
    on_cpu: OnCpu | None = None
    """On XPU: what it dispatches is copied to the CPU and back; said only where it runs."""

    @property
    def rank(self) -> tuple[int, int]:
        """The better, the higher."""
        return _STATES.index(self.state), _ON_CPU.index(self.on_cpu)


def declared_fare(record: OpRecord, release: str, dtype: Dtype, mode: Mode) -> Fare | None:
    """As its worst aten op; on the fallback as the CPU fares; ``None`` where no source says.

    Where an op refuses, *none*; *some* where the CPU runs some samples all the same: those go without that op, or it is
    composite, the same on every device.
    """
    file = declared.load(release)
    names = dispatched(record, mode, file)
    if not names or not record.samples[MODES.index(mode) % 2]:
        return None
    refusing, on_cpu = _refusing(names, file, dtype), _on_cpu(names, file)
    if refusing is None and on_cpu is None:
        return Fare("all") if any(_takes(file.ops[name], dtype) for name in names) else None
    state, fails_at = _as_on_cpu(record.op, release, dtype, mode)
    if refusing is None:
        return Fare(state, on_cpu if state != "none" else None) if state else None
    the_same = fails_at == refusing or file.ops[refusing].registration == "composite"
    return Fare("some" if state == "some" and the_same else "none")


def to_blame(record: OpRecord, file: Declared, dtype: Dtype, mode: Mode) -> str | None:
    """The aten op for whose sake the operator does not run: one that refuses, or that the CPU has to run."""
    names = dispatched(record, mode, file)
    return _refusing(names, file, dtype) or next((n for n in names if file.ops[n].registration == "fallback"), None)


def dispatched(record: OpRecord, mode: Mode, file: Declared) -> list[str]:
    """The aten ops that count on XPU: the function itself, and those of a CPU sweep but for the ones that only CPUs have."""
    itself = record.op.removeprefix("nn.functional.").replace(".", "_")
    names = [itself, *record.aten, *(record.backward_aten if mode.endswith("backward") else [])]
    known = (name for name in names if name in file.ops and "_for_cpu" not in name and "mkldnn" not in name)
    return list(dict.fromkeys(known))


def _refusing(names: Sequence[str], file: Declared, dtype: Dtype) -> str | None:
    """The op that is not registered, or leaves the dtype out; a kernel rather than what is made of it.

    Where part of it runs on the CPU, only kernels count: what composite ops leave out shows on the CPU as well.
    """
    rows = {name: file.ops[name] for name in names}
    missing = [name for name, row in rows.items() if row.registration == "none"]
    left_out = {
        kind: [name for name, row in rows.items() if row.registration == kind and _takes(row, dtype) is False]
        for kind in ("native", "composite")
    }
    composite = [] if _on_cpu(names, file) else left_out["composite"]
    return next(iter([*missing, *left_out["native"], *composite]), None)


def _on_cpu(names: Sequence[str], file: Declared) -> OnCpu | None:
    kinds = {file.ops[name].registration for name in names}
    if "fallback" not in kinds:
        return None
    return "partly" if "native" in kinds else "wholly"


def _takes(row: Row, dtype: Dtype) -> bool | None:
    return True if dtype == "float32" else row.takes(SHORT[dtype])


def _as_on_cpu(op: str, release: str, dtype: Dtype, mode: Mode) -> tuple[State | None, str | None]:
    """How the CPU of that release fares, and the aten op in which it fails."""
    sweep = next((sweep for sweep in history("cpu") if sweep.release == release and op in sweep.records), None)
    if sweep is None:
        return None, None
    failure = sweep.records[op].failure(dtype, mode)
    return sweep.state(op, dtype, mode), failure.at if failure else None
