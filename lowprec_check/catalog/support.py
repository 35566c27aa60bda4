"""The support of an operator in a dtype and mode, since when, and which release fixes it."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from lowprec_check.catalog.records import STATES, Dtype, Failure, Mode, State, Ulp, why_operator_not_applicable
from lowprec_check.schema.base import Struct

Evidence = Literal["measured", "declared"]
Registration = Literal["native", "fallback", "composite", "none"]
"""How a device runs an aten op: with its own kernel, on the CPU, by other ops, or not at all."""
OnCpu = Literal["partly", "wholly"]
Rank = tuple[int, int]
_ON_CPU = ("wholly", "partly", None)


class OpSupport(NamedTuple):
    """The support of an operator in one dtype and mode."""

    state: State
    on_cpu: OnCpu | None = None
    """If declared and it runs: whether tensors are copied to the CPU and back for it."""
    at: str | None = None
    """If declared: the aten op that fails, or that runs on the CPU."""
    failure: Failure | None = None
    """Why not all samples run."""

    @property
    def rank(self) -> Rank:
        """For comparing: higher is better."""
        return STATES.index(self.state), _ON_CPU.index(self.on_cpu)


class SupportCell(Struct, frozen=True, kw_only=True):
    """One operator in one dtype and mode, on one device under one version of torch."""

    device: str
    torch: str
    """Release, ``2.13``."""
    extension: str | None = None
    dtype: Dtype
    mode: Mode
    state: State | None
    """``None``: not measured, no source covers it, or the dtype does not apply."""
    not_applicable: str | None = None
    """Why the dtype does not apply."""
    evidence: Evidence
    passed: int | None = None
    samples: int | None = None
    since: str | None = None
    """Since when it has always run; if declared, also with a kernel, or always on the CPU."""
    since_oldest: bool = False
    """Whether that is the oldest release in the catalog: it may have run before."""
    failed_before: bool = False
    """Whether the release before is known not to run it, or to run it in another way."""
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release that runs it, if this one does not."""
    error: Ulp | None = None
    slower: float | None = None
    """The time of a call divided by that in fp32."""
    failure: Failure | None = None
    registration: Registration | None = None
    """If declared: the registration of the worst op that it dispatches."""
    on_cpu: OnCpu | None = None
    """If declared: whether tensors are copied to the CPU and back."""
    at: str | None = None
    """If declared: the aten op that does not run, or only on the CPU."""
    links: list[str] = []


class TorchRelease(abc.ABC):
    """What the catalog knows of the operators in one release of torch on one device."""

    basis: Evidence
    modes: tuple[Mode, ...]
    """Those that are known."""
    device: str
    release: str
    """``2.13``."""
    extension: str | None = None
    """``ipex 2.8.0``, if Intel's extension is loaded."""
    key: tuple[int, ...]
    """The version as numbers, for comparing."""

    @property
    def version(self) -> str:
        """As users write it: ``2.13``, ``2.8+ipex``."""
        if self.extension:
            return f"{self.release}+{self.extension.split()[0]}"
        return self.release

    @property
    @abc.abstractmethod
    def operators(self) -> Collection[str]:
        """The names of all that are known, sorted."""

    @abc.abstractmethod
    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The support of an operator; ``None`` if it is not known or ``dtype`` does not apply."""

    @abc.abstractmethod
    def history(self) -> Sequence[TorchRelease]:
        """All releases on the device, oldest first."""

    def state(self, op: str, dtype: Dtype, mode: Mode) -> State | None:
        """The state alone; ``None`` as in :meth:`support`."""
        support = self.support(op, dtype, mode)
        return support.state if support else None

    def counts_for(self, op: str) -> bool:
        """Whether the release has the operator, so that it says since when it runs."""
        return True

    def cell(self, op: str, dtype: Dtype, mode: Mode) -> SupportCell:
        """The support of an operator, since or until which release, and what subclasses add."""
        support = self.support(op, dtype, mode)
        state, since, is_oldest, failed = support and support.state, None, False, False
        if support is not None and state == "all":
            # Back through the releases as long as it runs in the same way.
            past = [other for other in self.history() if other.key <= self.key and other.counts_for(op)]
            while past and (found := past[-1].support(op, dtype, mode)) and found.rank == support.rank:
                since = past.pop().release
            is_oldest, failed = not past, bool(past) and found is not None
        on_cpu = at = failure = None
        if support is not None:
            on_cpu, at, failure = support.on_cpu, support.at, support.failure
        return SupportCell(
            device=self.device,
            torch=self.release,
            extension=self.extension,
            dtype=dtype,
            mode=mode,
            state=state,
            not_applicable=why_operator_not_applicable(op, dtype),
            evidence=self.basis,
            since=since,
            since_oldest=is_oldest,
            failed_before=failed,
            fixed_in=fixed_since(self, [op], dtype, mode) if state in ("some", "none") else None,
            on_cpu=on_cpu,
            at=at,
            failure=failure,
        )


def fixed_since(
    release: TorchRelease, ops: Sequence[str], dtype: Dtype, mode: Mode, at: str | None = None
) -> str | None:
    """The first later release since which all ``ops`` run in all samples, if there is one. Those
    that fail there in another aten op than ``at`` do not count.
    """
    since = None
    for other in release.history():
        if other.key <= release.key:
            continue
        supports = [other.support(op, dtype, mode) for op in ops if other.counts_for(op)]
        runs = [
            support is not None and support.state == "all"
            for support in supports
            if at is None or not support or not support.failure or support.failure.at in (None, at)
        ]
        if not runs or not all(runs):
            since = None
        elif since is None:
            since = other.release
    return since
