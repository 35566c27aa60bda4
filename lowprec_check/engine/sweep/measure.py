"""Measures one operator: which of its samples run in which dtype and mode, how accurately and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from lowprec_check.catalog.records import DTYPES, LOW, MODES, Dtype, Failure, Mode, OpRecord, OpTimes, Ulp
from lowprec_check.engine.sweep.calls import Caller, Setting
from lowprec_check.engine.sweep.failures import Raised, condition, kind_of, merged
from lowprec_check.engine.sweep.samples import Sample, argument_names, features, larger, samples_of, seed_all
from lowprec_check.engine.sweep.ulp import summary

_UNINITIALISED = ("empty", "new_empty", "resize_")
_UNREPEATABLE = ("linalg.lstsq", "nn.functional.fractional_max_pool")
"""Operators whose result depends on a choice that differs between dtypes (pivots, random windows): no error is measured."""


class Results(NamedTuple):
    """The results of one operator."""

    record: OpRecord
    times: OpTimes


class OperatorMeasurement:
    """One operator. ``enter(cell, detail)`` is called before each step, so that a crash can be located.

    ``lost`` maps the cells in which an earlier process died or hung to the failure. If ``brief``, only what runs is measured: no
    errors, no times, no aten ops, nothing under autocast.
    """

    def __init__(
        self,
        name: str,
        operator: Any,
        setting: Setting,
        lost: dict[str, Raised],
        enter: Callable[[str, str], None],
        *,
        brief: bool = False,
    ) -> None:
        self.name, self.operator, self.setting, self.lost, self.enter = name, operator, setting, lost, enter
        self.brief = brief
        self.caller = Caller(name, operator, setting)
        self.samples: list[Sample] = []
        self.outcomes: dict[tuple[Dtype, Mode], list[Raised | bool]] = {}
        self.ulp: dict[Dtype, list[Ulp | None]] = {}
        self.random: set[int] = set()
        self.aten: list[dict[str, None]] = [{}, {}]
        self.views: dict[str, None] = {}

    def measure(self) -> Results:
        """Measure everything; exceptions of the operator become results."""
        reason = self._draw()
        if reason is not None:
            return Results(OpRecord(op=self.name, samples=(0, 0), note=reason), OpTimes(op=self.name))
        if not self.brief:
            self._record_aten()
        for dtype in DTYPES:
            self.ulp[dtype] = []
            for mode in MODES if dtype in self.setting.autocast and not self.brief else MODES[:2]:
                self.outcomes[dtype, mode] = self._cell(dtype, mode)
        return Results(self._record(), OpTimes(op=self.name) if self.brief else self._times())

    def _draw(self) -> str | None:
        """Draw the samples; return the reason if there are none."""
        if "samples" in self.lost:
            return f"samples cannot be drawn: {self.lost['samples'].message}"
        self.enter("samples", "")
        seed_all(self.name)
        try:
            drawn = samples_of(self.operator, self.setting.device, self.setting.samples)
        except Exception as error:
            return f"samples cannot be drawn: {Raised.of(error).message}"
        floating = [sample for sample in drawn if sample.floating()]
        if not floating:
            return "takes no floating tensor or dtype"
        self.enter("float32/forward", "size")
        self.samples = [sample for sample in floating if self.caller.size_of_result(sample) != 0] or floating
        if "larger" not in self.lost:
            self.enter("larger", "")
            self.samples += larger(self.samples, self.caller.size_of_result)
        return None

    def _record_aten(self) -> None:
        """Record the aten ops in fp32, and which samples draw random numbers."""
        for index, mode in enumerate(MODES[:2]):
            self.enter(f"aten/{mode}", "")
            for number, sample in enumerate(() if f"aten/{mode}" in self.lost else self.samples):
                recording = self.caller.record(sample, torch.float32, mode)
                self.aten[index] |= recording.names
                self.views |= recording.views
                if self.name.startswith(_UNINITIALISED) or (recording.random and self.caller.depends_on_seed(sample)):
                    self.random.add(number)

    def _cell(self, dtype: Dtype, mode: Mode) -> list[Raised | bool]:
        """The outcome of each sample; also measures their errors, except under autocast."""
        cell, low = f"{dtype}/{mode}", getattr(torch, dtype)
        if cell in self.lost:
            self.ulp[dtype].append(None)
            return [self.lost[cell]] * len(self.samples)
        found, distances = [], []
        for index, sample in enumerate(self.samples):
            self.enter(cell, str(index))
            trial = self.caller.attempt(sample, low, mode)
            found.append(trial.outcome)
            if trial.result is not None and mode in MODES[:2] and self._comparable(index):
                distances += self.caller.distances(sample, low, mode, trial.result)
        self.ulp[dtype].append(summary(distances))
        return found

    def _comparable(self, index: int) -> bool:
        """Whether the error of a sample is caused by the kernel."""
        return not self.brief and index not in self.random and not self.name.startswith(_UNREPEATABLE)

    # -- the results

    def _record(self) -> OpRecord:
        valid = [self._valid(mode) for mode in MODES[:2]]
        return OpRecord(
            op=self.name,
            samples=(len(valid[0]), len(valid[1])),
            passed=self._passed(valid),
            ulp={dtype: self.ulp[dtype][:2] for dtype in DTYPES if any(self.ulp[dtype])},
            aten=sorted(self.aten[0] or self.views),
            backward_aten=sorted(self.aten[1].keys() - self.aten[0].keys()) if valid[1] else [],
            random=bool(self.random),
            note=None if valid[0] else self._why_not(),
            failures=merged(filter(None, (self._failure(dtype, mode, valid) for dtype, mode in self.outcomes))),
        )

    def _valid(self, mode: Mode) -> list[int]:
        """Indices of the samples that run in at least one dtype; only these are counted."""
        tried = [self.outcomes[dtype, mode] for dtype in DTYPES]
        return [index for index in range(len(self.samples)) if any(outcomes[index] is True for outcomes in tried)]

    def _passed(self, valid: list[list[int]]) -> dict[Dtype, list[int]]:
        """Number of samples that run, for each mode, of each dtype in which some fail."""
        passed: dict[Dtype, list[int]] = {}
        for dtype in DTYPES if valid[0] else ():
            modes = [mode for mode in MODES if (dtype, mode) in self.outcomes]
            counted = [valid[MODES.index(mode) % 2] for mode in modes]
            counts = [
                sum(self.outcomes[dtype, m][i] is True for i in those) for m, those in zip(modes, counted, strict=True)
            ]
            if counts != [len(those) for those in counted]:
                passed[dtype] = counts
        return passed

    def _why_not(self) -> str:
        outcome = next((o for o in self.outcomes["float32", "forward"] if isinstance(o, Raised)), None)
        return f"runs in no floating dtype: {outcome.message}" if outcome else "has no sample that runs"

    def _failure(self, dtype: Dtype, mode: Mode, valid: list[list[int]]) -> Failure | None:
        """The most frequent failure of one cell, among the counted samples (all samples, if none runs forward)."""
        outcomes = self.outcomes[dtype, mode]
        plain: Mode = (
            "backward" if mode in ("backward", "autocast-backward") else "forward"
        )  # without autocast, as in fp32
        counted = valid[MODES.index(plain)] if valid[0] else range(len(outcomes))
        failed = [index for index in counted if isinstance(outcomes[index], Raised)]
        if not failed:
            return None
        raised, _ = Counter(cast("Raised", outcomes[index]) for index in failed).most_common(1)[0]
        at = None if raised.died else self._failing_overload(outcomes.index(raised), dtype, mode)
        fp32 = self.outcomes["float32", plain]
        in_fp32 = dtype == "float32" or not any(fp32[index] is True for index in counted)
        ran, names = [index for index in counted if outcomes[index] is True], argument_names(self.operator)
        return Failure(
            cells=[f"{dtype}/{mode}"],
            type=raised.type,
            kind=kind_of(raised, at, fails_in_fp32=in_fp32),
            message=raised.message,
            at=at,
            condition=condition(
                *([features(self.samples[index], names) for index in those] for those in (ran, failed))
            ),
        )

    def _failing_overload(self, index: int, dtype: Dtype, mode: Mode) -> str | None:
        """The overload that raises, found by running the sample once more."""
        self.enter(f"{dtype}/{mode}", f"{index}, once more")
        return self.caller.record(self.samples[index], getattr(torch, dtype), mode).failed

    def _times(self) -> OpTimes:
        """Times of the largest sample that runs in fp32, the last one."""
        modes = MODES[:2]
        fp32 = self.outcomes["float32", "forward"]
        last = max((index for index, outcome in enumerate(fp32) if outcome is True), default=None)
        if last is None or "times" in self.lost:
            return OpTimes(op=self.name)
        self.enter("times", str(last))
        sample = self.samples[last]
        seconds: dict[tuple[Dtype, Mode], float | None] = {
            (dtype, mode): self.caller.seconds(sample, getattr(torch, dtype), mode)
            for dtype in DTYPES
            for mode in modes
            if self.outcomes[dtype, mode][last] is True
        }
        base = [seconds.get(("float32", mode)) for mode in modes]
        return OpTimes(
            op=self.name,
            float32_us=[_rounded(value * 1e6) if value else None for value in base],
            slower={
                dtype: [_ratio(seconds.get((dtype, mode)), value) for mode, value in zip(modes, base, strict=True)]
                for dtype in LOW
            },
        )


def _ratio(value: float | None, base: float | None) -> float | None:
    return _rounded(value / base) if value and base else None


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
