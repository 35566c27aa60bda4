"""The support of an aten op in a dtype on a device, derived from the operators that dispatch it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.measured import Sweep, at_release, history, sweep_of
from lowprec_check.catalog.names import function_name, overload_name
from lowprec_check.catalog.records import (
    COMPLEX_OPERATORS,
    MODES,
    SHORT,
    Dtype,
    Failure,
    FailureKind,
    Mode,
    Numbers,
    OpRecord,
    State,
    TorchRelease,
    fixed_since,
    why_not_applicable,
)
from lowprec_check.catalog.versioned_file import data_folder, read_tables
from lowprec_check.catalog.versions import release_of
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import is_declared
from lowprec_check.schema.base import StrictStruct, Struct
from lowprec_check.schema.run_key import Phase

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


# Failures of the op itself; other failures depend on the arguments of a sample.
_NO_KERNEL = ("missing-kernel", "no-backend-kernel", "crash")

AutocastDtype = Literal["low", "fp32", "inputs"]
"""What autocast runs an op in: its 16-bit dtype, fp32, or the dtype of the op's inputs."""
FROM_WORST: tuple[State | None, ...] = ("none", "some", None, "all")
Policies = Mapping[str, AutocastDtype]
"""By the name of the function, those that autocast casts the inputs of: ``linalg_inv``."""


class AtenSupport(Struct, frozen=True, kw_only=True):
    """One aten op in one dtype on one device."""

    state: State | None
    """``some``: it depends on the arguments; ``None``: unknown, or the precision does not apply."""
    applies: bool = True
    """Whether the precision changes what the op computes with; ``message`` says why not."""
    autocast: AutocastDtype | None = None
    """Under autocast: the dtype that the op runs in; ``None`` if unknown."""
    kind: FailureKind | None = None
    """Why it fails; ``None`` if it does not."""
    message: str | None = None
    """The error message, or what is declared."""
    condition: str | None = None
    """On which arguments it depends, in words."""
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release of torch that runs it."""
    shown_by: list[str] = []
    """Operators that fail in this aten op."""
    tried_here: bool = False
    """Whether one call of the tests was made again in the dtype on this machine."""


class _Use(NamedTuple):
    """One operator in one mode that dispatches the op or fails in it."""

    record: OpRecord
    mode: Mode
    state: State | None
    failure: Failure | None


class AtenCatalog:
    """The support of all aten ops in ``dtype`` on ``device``, by a cast or under ``autocast``, for
    the release of ``torch`` or else the newest; a :class:`UsageError` if the device has none.
    """

    def __init__(self, device: str, dtype: Dtype, torch: str, *, autocast: bool = False) -> None:
        self.device, self.dtype = device, dtype
        self._modes = MODES[2:] if autocast else MODES[:2]
        release = release_of(torch)
        self.declared: declared.Release | None = None
        if is_declared(device):
            self.declared = declared.load(device, declared.known_release(device, release))
        measured_on = "cpu" if self.declared else device
        self.sweep = at_release(measured_on, release) or sweep_of(measured_on)
        if autocast and (self.declared or dtype not in self.sweep.header.autocast):
            hint = "Choose half or bfloat16, or another device."
            raise UsageError(f"The catalog has no measurements under autocast on {device}.", hint)
        # By overload, operators that dispatch it in any mode or fail in it; by the aten name of the
        # function, operators.
        self._dispatching: dict[str, list[_Use]] = defaultdict(list)
        self._failing: dict[str, list[_Use]] = defaultdict(list)
        self._records_named: dict[str, list[str]] = defaultdict(list)
        for record in self.sweep.records.values():
            self._records_named[function_name(record.op)].append(record.op)
            for mode, names in zip(self._modes, (record.aten, record.backward_aten), strict=True):
                if record.op in COMPLEX_OPERATORS and why_not_applicable("complex", dtype, mode):
                    continue  # what it dispatches runs in complex64
                use = _Use(record, mode, self.sweep.state(record.op, dtype, mode), record.failure(dtype, mode))
                for name in names:
                    self._dispatching[name].append(use)
                failure, base = use.failure, record.op.rpartition(".")[0]
                if failure is None or failure.at is None or failure.kind not in _NO_KERNEL:
                    continue
                # A variant does not count if its base operator runs (complex ``silu``).
                if use.state in ("some", "none") and self.sweep.state(base, dtype, mode) != "all":
                    self._failing[failure.at].append(use)

    @property
    def evidence(self) -> str:
        """``measured`` or ``declared``."""
        return "declared" if self.declared else "measured"

    @property
    def torch(self) -> str:
        """The release that the answers apply to."""
        return self.declared.torch if self.declared else self.sweep.release

    def of(
        self, op: str, numbers: Numbers = "floating", policies: Policies | None = None, phase: Phase = "forward"
    ) -> AtenSupport:
        """The support of an op, ``aten.linalg_inv_ex.default``, that computes with ``numbers``.
        ``policies`` of autocast tell its dtype. In the phase ``backward``, the formula of its
        derivative; ops that this dispatches count by themselves.
        """
        reason = why_not_applicable(numbers, self.dtype, self._modes[0])
        if reason is not None:
            return AtenSupport(state=None, applies=False, message=reason)
        support = self._derivative(op) if phase == "backward" else self._alone(op)
        # On this device, or in 16 bits, functions may dispatch other ops.
        missing = support.kind == "no-backend-kernel" or (support.state is None and self.declared is None)
        elsewhere = only_device(op) not in (None, self.device) and not dispatched_elsewhere(op)
        in_a_cast = self._modes[0] == "forward" and counterpart(op, self.device) is not None
        if missing and (elsewhere or in_a_cast):
            support = self._of_counterparts(op)
        # No op without a kernel for half has one for complex32, but a third of those with one for
        # half have none. What these two have in half is complex32.
        complex_only = overload_name(op).startswith(("_fft_c2c", "_fft_c2r"))
        if numbers == "complex" and support.state == "all" and not complex_only:
            message = "only complex numbers: support for half says nothing about complex32"
            return AtenSupport(state=None, message=message)
        if policies is None or self._modes[0] != "autocast":
            return support
        # Users do not call ``_linalg_solve_ex``, but ``linalg.solve``, which autocast runs in fp32.
        callers_in_fp32 = []
        if support.state == "some" and not self._is_function(op):
            uses = self._dispatching[overload_name(op)]
            callers = [use.record.op for use in uses if use.mode == "autocast" and use.state == "all"]
            callers_in_fp32 = [caller for caller in callers if policies.get(function_name(caller)) == "fp32"]
        if callers_in_fp32:
            message = f"in {', '.join(callers_in_fp32)}, whose inputs autocast casts to fp32"
            if support.shown_by:
                message += f"; in {', '.join(support.shown_by)}: {support.message}"
            return AtenSupport(state="all", autocast="fp32", message=message)
        return msgspec.structs.replace(support, autocast=self._autocast_dtype(op, policies))

    def _is_function(self, op: str) -> bool:
        """Whether users call the op by its name."""
        return any(self._records_named.get(name.partition(".")[0]) for name in _spellings(op))

    def _of_counterparts(self, op: str) -> AtenSupport:
        """The worst support of what this device dispatches in place of another device's op."""
        # Measurements come before what the file states of the ops and of their support.
        stated, names = counterpart(op, self.device), list[str]()
        if not self.declared:
            names = measured_counterparts(op, self.sweep)
        if not names and stated:
            names = stated.dispatches
        if not names:
            message = f"only {only_device(op)} has this op; what {self.device} dispatches instead is not known"
            return AtenSupport(state=None, message=message)
        worst = min(map(self._alone, names), key=lambda support: FROM_WORST.index(support.state))
        state, message = worst.state, f"on {self.device}: {', '.join(names)}"
        supported = stated.supports(self.dtype) if stated else None
        if state is None and supported is not None:
            state = "all" if supported else "none"
        if worst.message or state is None:
            message += f": {worst.message or 'not known to the catalog'}"
        return msgspec.structs.replace(worst, state=state, message=message)

    def _derivative(self, op: str) -> AtenSupport:
        """The support of the formula of a derivative: it fails if the operator that the op belongs
        to runs forward, and its backward fails before it dispatches an op.
        """
        release: TorchRelease = self.declared or self.sweep
        for name in self._records_named[function_name(overload_name(op))]:
            forward, backward = (release.support(name, self.dtype, mode) for mode in self._modes)
            if not forward or not backward or backward.rank >= forward.rank:
                continue
            if backward.failure and not backward.failure.at:
                return self._failed(release, backward.state, backward.failure, [name], self._modes[1])
        return AtenSupport(state="all")

    def _autocast_dtype(self, op: str, policies: Policies) -> AutocastDtype:
        """The policy of the op, else of functions it belongs to (``cdist`` for ``_cdist_forward``),
        else the one of all its callers (``convolution``), unless users call it too (``sqrt_``).
        """
        for name in _spellings(op):
            if own := policies.get(name.partition(".")[0]):
                return own
        callers = [use.record.op for use in self._dispatching[overload_name(op)] if use.mode == "autocast"]
        policy_of = {caller: policies.get(function_name(caller), "inputs") for caller in callers}
        family = Counter(policy_of[caller] for caller in callers if _family(caller) == _family(op))
        if family:
            return family.most_common(1)[0][0]
        if not self._is_function(op) and len({*policy_of.values()}) == 1:
            return policy_of[callers[0]]
        return "inputs"

    def _measured_of(self, op: str) -> AtenSupport:
        for name in _spellings(op):
            dispatching, failing = self._dispatching[name], self._failing[name]
            runs = any(use.state == "all" for use in dispatching)
            if failing:
                partly = runs or all(use.state == "some" for use in failing)
                state = corrected_state(self.sweep.header.device, name, "some" if partly else "none")
                return self._failure(state, failing)
            if runs:
                return AtenSupport(state="all")
        # Every function that dispatches the op, or that it belongs to, may refuse the dtype before.
        failed = [use for use in self._dispatching[overload_name(op)] if use.failure is not None]
        refused = [use for use in failed if use.failure and use.failure.at is None]
        if refused and (len(refused) == len(failed) or all(_family(use.record.op) == _family(op) for use in refused)):
            return self._failure("none" if any(use.state == "none" for use in refused) else "some", refused)
        return AtenSupport(state=None)

    def _failure(self, state: State, failing: list[_Use]) -> AtenSupport:
        first = failing[0]
        assert first.failure is not None
        ops = list(dict.fromkeys(use.record.op for use in failing))
        return self._failed(self.sweep, state, first.failure, ops, first.mode)

    def _failed(self, release: TorchRelease, state: State, failure: Failure, ops: list[str], mode: Mode) -> AtenSupport:
        return AtenSupport(
            state=state,
            kind=failure.kind,
            message=failure.message,
            condition=failure.condition if state == "some" else None,
            fixed_in=fixed_since(release, ops, self.dtype, mode, failure.at),
            shown_by=ops,
        )

    def _alone(self, op: str) -> AtenSupport:
        file = self.declared
        if file is None:
            return self._measured_of(op)
        row = next((row for name in _spellings(op) if (row := file.row(name)) is not None), None)
        if row is None:
            return AtenSupport(state=None)
        if row.registration == "fallback":
            on_cpu = self._measured_of(op)
            message = "runs on the CPU" + (f": {on_cpu.message}" if on_cpu.message else "")
            return AtenSupport(state=on_cpu.state, kind=on_cpu.kind, message=message, shown_by=on_cpu.shown_by)
        supported = row.runs_in(self.dtype)
        if supported is not False:
            return AtenSupport(state="all" if supported else None)
        kind, message = declared.why_missing(row.registration, file.device)
        if kind == "no-backend-kernel" and has_other_layouts_only(op) and not dispatched_elsewhere(op):
            which = "only sparse, nested or quantized tensors have kernels of it"
            return AtenSupport(state=None, message=f"{which}; those of {file.device} are not declared")
        return AtenSupport(state="none", kind=kind, message=message)


def _family(op: str) -> str:
    """The first word of an op's name: ``fft`` for ``_fft_c2c`` and ``fft.ihfft2``."""
    return function_name(op).lstrip("_").partition("_")[0]


def _spellings(op: str) -> Iterator[str]:
    """The op, then its base op: ``add_.Tensor`` and ``add.out`` have kernels of ``add``."""
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
