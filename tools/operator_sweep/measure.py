"""Measures one operator for the catalog: what runs, also under autocast, error, speed, aten ops that it dispatches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.catalog.records import DTYPES, LOW, MODES, Dtype, Mode, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.operator_worker import (
    SEED,
    Caller,
    FirstFailure,
    OperatorMeasurement,
    Trial,
    exit_if_device_lost,
    overload_name_of,
)
from lowprec_check.engine.sweep.samples import Sample
from lowprec_check.torchkit.dispatch_mode import AutocastKeys
from lowprec_check.torchkit.pytree import leaves
from tools.operator_sweep.ulp import summary, ulp_errors

OTHER_SEEDS = range(1, 9)
"""If an operator draws random numbers, at least one of these seeds changes its result."""
REPEATS = 3
ENOUGH_SECONDS = 0.02
"""A call that takes this long is timed only once."""
_UNINITIALISED = ("empty", "new_empty", "resize_")
_UNREPEATABLE = ("linalg.lstsq", "nn.functional.fractional_max_pool")
"""Operators whose result depends on a choice (pivots, random windows) that differs by dtype: no error is measured."""


class DispatchedOps(FirstFailure):
    """Also records the names of all dispatched overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.views: dict[str, None] = {}
        """Ops that return an alias and write nothing: they compute nothing and work in every dtype."""
        self.random = False

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run ``func`` as it is."""
        aliases = [argument.alias_info for argument in func._schema.arguments]
        writes = any(alias is not None and alias.is_write for alias in aliases)
        is_view = not writes and any(returned.alias_info is not None for returned in func._schema.returns)
        (self.views if is_view else self.names)[overload_name_of(func)] = None
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return super().handle(func, args, kwargs, keys)


class FullMeasurement(OperatorMeasurement):
    """All that the catalog has of one operator; ``autocast`` are the dtypes that autocast supports on the device."""

    def __init__(
        self,
        name: str,
        caller: Caller,
        bound: int,
        lost: dict[str, Raised],
        enter: Callable[[str, str], None],
        *,
        autocast: tuple[Dtype, ...],
    ) -> None:
        super().__init__(name, caller, bound, lost, enter)
        self.autocast = autocast
        self.errors: dict[tuple[Dtype, Mode], list[Tensor]] = defaultdict(list)
        self.random: set[int] = set()
        self.aten: list[dict[str, None]] = [{}, {}]
        self.views: dict[str, None] = {}

    def modes(self, dtype: Dtype) -> tuple[Mode, ...]:
        """All that autocast supports."""
        return MODES if dtype in self.autocast else MODES[:2]

    def draw(self) -> str | None:
        """Also record the aten ops in fp32, and which samples draw random numbers."""
        reason = super().draw()
        for index, mode in enumerate(MODES[:2] if reason is None else ()):
            self.enter(f"aten/{mode}", "")
            for number, sample in enumerate(() if f"aten/{mode}" in self.lost else self.samples):
                recording = DispatchedOps()
                self.caller.record(sample, torch.float32, mode, recording)
                self.aten[index] |= recording.names
                self.views |= recording.views
                if self.name.startswith(_UNINITIALISED) or (recording.random and self._depends_on_seed(sample)):
                    self.random.add(number)
        return reason

    def _depends_on_seed(self, sample: Sample) -> bool:
        """Whether the fp32 result changes with the seed; dropout with p=0 does not draw random numbers."""

        def of_seed(seed: int) -> list[Tensor]:
            with mock.patch.object(torch, "manual_seed", side_effect=lambda _: self.caller.seed(seed)):  # OpInfo's own
                result = self.caller.attempt(sample, torch.float32, "forward", seed).result
                return [tensor for _, tensor in leaves(result)]

        first = of_seed(SEED)
        others = map(of_seed, OTHER_SEEDS)
        return any(len(other) != len(first) or not all(map(torch.equal, first, other)) for other in others)

    def compare(self, index: int, dtype: Dtype, mode: Mode, trial: Trial) -> None:
        """Measure the error of a result, if it is caused by the kernel."""
        repeatable = index not in self.random and not self.name.startswith(_UNREPEATABLE)
        if trial.result is not None and mode in MODES[:2] and repeatable:
            self.errors[dtype, mode] += self._distances(self.samples[index], getattr(torch, dtype), mode, trial.result)

    def _distances(self, sample: Sample, dtype: torch.dtype, mode: Mode, result: Any) -> list[Tensor]:
        """Errors of ``result`` against the reference on the same inputs, in ULP; empty if there is no reference."""
        caller, grad = self.caller, mode == "backward"
        try:
            caller.seed()
            rounded = sample.cast(dtype, grad=grad)
            reference = caller.run(rounded.cast(caller.wide, grad=grad), dtype, mode)
            if not grad:
                result, reference = caller.comparable(sample, result), caller.comparable(sample, reference)
            if reference is None or len(result) != len(reference):
                return []
            return [ulp_errors(value, wide, dtype) for value, wide in zip(result, reference, strict=True)]
        except Exception as error:
            exit_if_device_lost(error)
            return []

    def record(self) -> OpRecord:
        """The results, with errors and aten ops."""
        record = super().record()
        ulp = {dtype: [summary(self.errors[dtype, mode]) for mode in MODES[:2]] for dtype in DTYPES}
        return msgspec.structs.replace(
            record,
            ulp={dtype: errors for dtype, errors in ulp.items() if any(errors)},
            aten=sorted(self.aten[0] or self.views),
            backward_aten=sorted(self.aten[1].keys() - self.aten[0].keys()) if record.samples[1] else [],
            random=bool(self.random),
        )

    def times(self) -> OpTimes:
        """Times of the largest sample that runs in fp32, the last one; call it after :meth:`measure`."""
        fp32 = self.outcomes.get(("float32", "forward"), [])
        last = max((index for index, outcome in enumerate(fp32) if outcome is True), default=None)
        if last is None or "times" in self.lost:
            return OpTimes(op=self.name)
        self.enter("times", str(last))
        seconds: dict[tuple[Dtype, Mode], float | None] = {
            (dtype, mode): self._seconds(self.samples[last], getattr(torch, dtype), mode)
            for dtype in DTYPES
            for mode in MODES[:2]
            if self.outcomes[dtype, mode][last] is True
        }
        base = [seconds.get(("float32", mode)) for mode in MODES[:2]]

        def ratios(dtype: Dtype) -> list[float | None]:
            pairs = [(seconds.get((dtype, mode)), value) for mode, value in zip(MODES[:2], base, strict=True)]
            return [_rounded(low / wide) if low and wide else None for low, wide in pairs]

        return OpTimes(
            op=self.name,
            float32_us=[_rounded(value * 1e6) if value else None for value in base],
            slower={dtype: ratios(dtype) for dtype in LOW},
        )

    def _seconds(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> float | None:
        """The shortest time of a few calls; ``None`` if the call fails."""
        least = None
        for _ in range(REPEATS):
            ready = sample.cast(dtype, grad=mode == "backward")
            started = time.perf_counter()
            try:
                result = self.caller.run(ready, dtype, mode)
            except Exception:
                return None
            taken = time.perf_counter() - started
            if result is None:
                return None
            least = taken if least is None else min(least, taken)
            if taken > ENOUGH_SECONDS:
                break
        return least


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
