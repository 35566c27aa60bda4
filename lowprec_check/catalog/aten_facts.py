"""Which aten ops only one type of device has, and what other devices dispatch instead.

A composite function selects them by the device of its inputs, so a device without
``_scaled_dot_product_flash_attention_for_cpu`` runs ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from lowprec_check.catalog.data_files import data_folder, read_tables
from lowprec_check.catalog.measured import Sweep, at_release, history
from lowprec_check.catalog.names import overload_name
from lowprec_check.catalog.records import SHORT, Dtype, OpRecord, State
from lowprec_check.schema.base import StrictStruct

FILE, LAYOUTS, COUNTERPARTS = "one-device-ops.toml", "other-layout-ops.toml", "device-counterparts.toml"


class OneDevice(StrictStruct, frozen=True, kw_only=True):
    """Ops that a release has kernels of for one type of device, by ``native_functions.yaml``."""

    device: str
    torch: str
    ops: list[str]
    """Overload names, ``mkldnn_rnn_layer``."""


class OtherLayouts(StrictStruct, frozen=True, kw_only=True):
    """Ops that a release has no dense kernels of, by ``native_functions.yaml``."""

    torch: str
    ops: list[str]
    """Overload names, ``_to_dense``."""


class Counterpart(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What another device dispatches in place of an op."""

    op: str
    device: str
    dispatches: list[str]
    half: bool | None = None
    """Whether they support half, if the catalog has nothing better; ``None``: not known."""
    bfloat16: bool | None = None
    why: str
    link: str

    def supports(self, dtype: Dtype) -> bool | None:
        """Whether the ops support a dtype, by the source named in ``why``."""
        return {"half": self.half, "bfloat16": self.bfloat16}.get(SHORT[dtype])


class AtenCorrection(StrictStruct, frozen=True, kw_only=True):
    """The support of ops that the samples of operators suggest to run in part, from bare calls."""

    device: str
    ops: list[str]
    """Overload names, ``_cdist_forward``."""
    state: State
    why: str


@cache
def _one_device() -> Mapping[str, str]:
    return {op: entry.device for entry in read_tables(data_folder() / FILE, "device", OneDevice) for op in entry.ops}


@cache
def _other_layouts() -> frozenset[str]:
    return frozenset(op for entry in read_tables(data_folder() / LAYOUTS, "layouts", OtherLayouts) for op in entry.ops)


@cache
def _counterparts() -> Mapping[tuple[str, str], Counterpart]:
    entries = read_tables(data_folder() / COUNTERPARTS, "counterpart", Counterpart)
    return {(entry.op, entry.device): entry for entry in entries}


@cache
def _corrections() -> Mapping[tuple[str, str], State]:
    entries = read_tables(data_folder() / "aten-corrections.toml", "correction", AtenCorrection)
    return {(entry.device, op): entry.state for entry in entries for op in entry.ops}


@cache
def _failing() -> frozenset[tuple[str, str | None]]:
    """By device, the ops that raise in its newest sweep."""
    return frozenset(
        (device, failure.at)
        for device in ("cpu", "cuda")
        for sweep in history(device)[-1:]
        for record in sweep.records.values()
        for failure in record.failures
    )


def only_device(op: str) -> str | None:
    """The only type of device with a kernel of an op; ``None`` if several, or composite."""
    return _one_device().get(overload_name(op))


def has_other_layouts_only(op: str) -> bool:
    """Whether an op has kernels for sparse, nested, quantized or MKL-DNN tensors only."""
    return overload_name(op) in _other_layouts()


def counterpart(op: str, device: str) -> Counterpart | None:
    """What a device dispatches in place of an op, as ``device-counterparts.toml`` states it."""
    return _counterparts().get((overload_name(op), device))


def measured_counterparts(op: str, sweep: Sweep) -> list[str]:
    """What the device of ``sweep`` dispatches in place of an op: in every operator that dispatches
    the op on its own device, and in no other, the ops that are dispatched only here.
    """
    own = only_device(op)
    other = at_release(own, sweep.release) if own else None
    if other is None:
        return []
    # In each operator that dispatches the op there, what is dispatched only here.
    name, elsewhere, replacing = overload_name(op), set[str](), list[set[str]]()
    for here in sweep.records.values():
        there = other.records.get(here.op, OpRecord(op=here.op, samples=(0, 0)))
        for ours, theirs in ((here.aten, there.aten), (here.backward_aten, there.backward_aten)):
            if name not in theirs:
                elsewhere |= set(ours)
            elif name not in ours:
                replacing.append(set(ours) - set(theirs))
    return sorted(set.intersection(*replacing) - elsewhere) if replacing else []


def dispatched_elsewhere(op: str) -> bool:
    """Whether a function dispatches the op on another device too, where it then fails."""
    own = only_device(op)
    return any((device, overload_name(op)) in _failing() for device in ("cpu", "cuda") if device != own)


def corrected_state(device: str, op: str, state: State) -> State:
    """The state of an op; for one that runs in part, that in the samples of operators."""
    if state == "some":
        return _corrections().get((device, op), state)
    return state
