"""The worker of a sweep: an operator per line of stdin, its results per line of stdout. The
breadcrumb is updated before every call, so that a crash can be located. Needs torch 2.1 and
msgspec.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgspec
import torch

from lowprec_check.catalog.records import DTYPES, MODES, Dtype, Failure, Mode, OpRecord
from lowprec_check.engine.sweep.calls import Caller, FirstFailure, Trial
from lowprec_check.engine.sweep.failures import Raised, condition, kind_of, merged
from lowprec_check.engine.sweep.kept_sweep import Answer, CannotMeasure, Hello, OperatorFault, Task, open_channel
from lowprec_check.engine.sweep.samples import (
    Sample,
    argument_names,
    features,
    larger,
    load_operators,
    samples_of,
    seed_all,
)
from lowprec_check.errors import UsageError, traceback_of
from lowprec_check.process.breadcrumb import Breadcrumb

# -- One operator: which of its samples run in which dtype, forward and backward


class OperatorMeasurement:
    """One operator with at most ``bound`` samples and larger ones; ``enter(cell, detail)`` is
    called before each step. ``lost`` are cells in which an earlier process died or hung.
    """

    def __init__(
        self, name: str, caller: Caller, bound: int, lost: dict[str, Raised], enter: Callable[[str, str], None]
    ) -> None:
        self.name, self.caller, self.bound, self.lost, self.enter = name, caller, bound, lost, enter
        self.samples: list[Sample] = []
        self.outcomes: dict[tuple[Dtype, Mode], list[Raised | bool]] = {}

    def modes(self, dtype: Dtype) -> tuple[Mode, ...]:
        """The modes to measure."""
        return MODES[:2]

    def measure(self) -> OpRecord:
        """Measure everything; exceptions of the operator become results."""
        reason = self.draw()
        if reason is not None:
            return OpRecord(op=self.name, samples=(0, 0), note=reason)
        for dtype in DTYPES:
            for mode in self.modes(dtype):
                cell, outcomes = f"{dtype}/{mode}", list[Raised | bool]()
                for index, sample in enumerate(self.samples):
                    if cell in self.lost:
                        outcomes.append(self.lost[cell])
                        continue
                    self.enter(cell, str(index))
                    trial = self.caller.attempt(sample, getattr(torch, dtype), mode)
                    outcomes.append(trial.outcome)
                    self.compare(index, dtype, mode, trial)
                self.outcomes[dtype, mode] = outcomes
        return self.record()

    def draw(self) -> str | None:
        """Draw the samples; return the reason if there are none."""
        if "samples" in self.lost:
            return f"samples cannot be drawn: {self.lost['samples'].message}"
        self.enter("samples", "")
        seed_all(self.name)
        try:
            drawn = samples_of(self.caller.operator, self.caller.device, self.bound)
        except Exception as error:
            return f"samples cannot be drawn: {Raised.of(error).message}"
        floating = [sample for sample in drawn if sample.floating()]
        if not floating:
            return "takes no floating tensor or dtype"
        # Samples with an empty output show nothing, unless there are no others.
        self.enter("float32/forward", "size")
        self.samples = [sample for sample in floating if self.caller.size_of_result(sample) != 0] or floating
        if "larger" not in self.lost:
            self.enter("larger", "")
            self.samples += larger(self.samples, self.caller.size_of_result)
        return None

    def compare(self, index: int, dtype: Dtype, mode: Mode, trial: Trial) -> None:
        """Look at the result of a sample."""

    def record(self) -> OpRecord:
        """The results."""
        # The samples that count, forward and backward: they run in a dtype.
        valid: list[list[int]] = []
        for mode in MODES[:2]:
            tried = [self.outcomes[dtype, mode] for dtype in DTYPES]
            valid.append([i for i in range(len(self.samples)) if any(outcomes[i] is True for outcomes in tried)])
        # Dtypes in which all of them run are left out.
        passed: dict[Dtype, list[int]] = {}
        for dtype in DTYPES if valid[0] else ():
            cells = [(self.outcomes[dtype, mode], valid[MODES.index(mode) % 2]) for mode in self.modes(dtype)]
            counts = [sum(outcomes[i] is True for i in counted) for outcomes, counted in cells]
            if counts != [len(counted) for _, counted in cells]:
                passed[dtype] = counts
        note = None
        if not valid[0]:
            outcomes_in_fp32 = self.outcomes["float32", "forward"]
            raised = next((outcome for outcome in outcomes_in_fp32 if isinstance(outcome, Raised)), None)
            note = f"runs in no floating dtype: {raised.message}" if raised else "has no sample that runs"
        return OpRecord(
            op=self.name,
            samples=(len(valid[0]), len(valid[1])),
            passed=passed,
            note=note,
            failures=merged(filter(None, (self._failure(dtype, mode, valid) for dtype, mode in self.outcomes))),
        )

    def _failure(self, dtype: Dtype, mode: Mode, valid: list[list[int]]) -> Failure | None:
        """The most frequent failure of a cell, among counted samples, or all if none runs."""
        outcomes, direction = self.outcomes[dtype, mode], MODES.index(mode) % 2
        counted = valid[direction] if valid[0] else range(len(outcomes))
        failed = [index for index in counted if isinstance(outcomes[index], Raised)]
        if not failed:
            return None
        raised, _ = Counter(cast("Raised", outcomes[index]) for index in failed).most_common(1)[0]
        at = None
        if not raised.died:  # the overload that raises is found by running the sample once more
            index = outcomes.index(raised)
            self.enter(f"{dtype}/{mode}", f"{index}, once more")
            recording = FirstFailure()
            self.caller.record(self.samples[index], getattr(torch, dtype), mode, recording)
            at = recording.failed
        # It is the dtype that fails if the op runs in fp32, and then on some samples only.
        fp32 = self.outcomes["float32", MODES[direction]]
        in_fp32 = dtype == "float32" or not any(fp32[index] is True for index in counted)
        ran, names = [index for index in counted if outcomes[index] is True], argument_names(self.caller.operator)
        return Failure(
            cells=[f"{dtype}/{mode}"],
            type=raised.type,
            kind=kind_of(raised, at, fails_in_fp32=in_fp32),
            message=raised.message,
            at=at,
            condition=condition(
                [features(self.samples[index], names) for index in ran],
                [features(self.samples[index], names) for index in failed],
            ),
        )


# -- The process

Enter = Callable[[str, str], None]
"""Called with the cell and a detail before each step of an operator."""


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line: those of ``parser``, and those of every worker."""
    parser.add_argument("--device", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--breadcrumb", required=True)
    return parser.parse_args()


def serve(
    options: argparse.Namespace,
    greet: Callable[[dict[str, Any]], Hello],
    answer: Callable[[str, Caller, dict[str, Raised], Enter], Answer],
    *,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Call ``prepare``, send a greeting, then the answer to each task, until stdin ends."""
    send = open_channel()
    torch.set_num_threads(1)
    try:
        prepare()
        if options.device != "cpu" and not getattr(torch, options.device).is_available():
            raise UsageError(f"Device {options.device!r} is not available.", "Pass --device cpu.")
        operators = load_operators()
        hello = greet(operators)
    except UsageError as error:
        send(CannotMeasure(error.message, error.hint))
        return
    send(hello)
    breadcrumb = Breadcrumb.open(options.breadcrumb)
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)

        def enter(cell: str, detail: str, op: str = task.op) -> None:
            breadcrumb.enter(op, cell, detail)

        try:
            send(answer(task.op, Caller(operators[task.op], options.device), task.lost, enter))
        except Exception as error:
            send(OperatorFault(task.op, traceback_of(error)))


def torch_version() -> str:
    """The version of torch without the build's suffix, ``2.13.0``."""
    return torch.__version__.partition("+")[0]


def main() -> None:
    """Find out what runs of operators."""
    options = options_of(argparse.ArgumentParser())

    def answer(op: str, caller: Caller, lost: dict[str, Raised], enter: Enter) -> Answer:
        return Answer(OperatorMeasurement(op, caller, options.samples, lost, enter).measure())

    serve(options, lambda operators: Hello(torch_version(), list(operators)), answer)


if __name__ == "__main__":
    main()
