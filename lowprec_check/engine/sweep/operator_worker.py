"""The worker of a sweep: an operator per line of stdin, its results per line of stdout. The
breadcrumb is updated before every call, so that a crash can be located. Needs torch 2.1 and
msgspec.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.catalog.records import DTYPES, MODES, Dtype, Failure, Mode, OpRecord
from lowprec_check.engine.sweep.failures import DEVICE_LOST, Raised, condition, kind_of, merged
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
from lowprec_check.errors import UsageError, message_of, traceback_of, type_name
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import is_float, widen
from lowprec_check.torchkit.pytree import leaves, map_tensors

SEED = 0
"""Seed of every call, so that an operator that draws random numbers always draws the same."""


class FirstFailure(DispatchMode):
    """Notes the first dispatched overload that raises, without ``aten.`` and ``.default``."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: str | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run ``func`` as it is."""
        try:
            return run_op(func, args, kwargs, keys)
        except Exception:
            self.failed = self.failed or overload_name_of(func)
            raise


def overload_name_of(func: OpOverload) -> str:
    """``linalg_inv_ex``, ``add.Tensor``, ``prims.x``."""
    return str(func).removeprefix("aten.").removesuffix(".default")


class Trial(NamedTuple):
    """The outcome of one call."""

    outcome: Raised | bool
    """The exception, or whether it ran: ``False`` if there is nothing to differentiate."""
    result: Any = None
    """The output, or the gradients."""


class Caller:
    """Calls one operator on a device, always from the same seed."""

    def __init__(self, operator: Any, device: str) -> None:
        # The dtype of the reference is ``wide``.
        self.operator, self.device, self.wide = operator, device, _widest(device)

    def attempt(self, sample: Sample, dtype: torch.dtype, mode: Mode, seed: int = SEED) -> Trial:
        """Call a copy of ``sample`` in ``dtype``."""
        self.seed(seed)
        try:
            result = self.run(sample.cast(dtype, grad=mode.endswith("backward")), dtype, mode)
        # The kernel ran, but the rounded values were singular.
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return Trial(True)
        except Exception as error:
            exit_if_device_lost(error)
            return Trial(Raised.of(error))
        return Trial(result is not None or not mode.endswith("backward"), result)

    def run(self, sample: Sample, dtype: torch.dtype, mode: Mode) -> Any:
        """The output, or the gradients (``None`` if there are none). Errors are not caught."""
        if mode.endswith("backward"):
            with self._autocast(dtype, mode):
                out = self._forward(sample)
            return self._gradients(sample, self.comparable(sample, out), dtype)
        with torch.no_grad(), self._autocast(dtype, mode):
            return self._forward(sample)

    def record(self, sample: Sample, dtype: torch.dtype, mode: Mode, recording: DispatchMode) -> None:
        """Call a copy of ``sample`` with the dispatch mode ``recording`` active."""
        backward = mode.endswith("backward")
        sample = sample.cast(dtype, grad=backward)
        self.seed()
        # The recording is wanted also of a call that fails.
        with contextlib.suppress(Exception):
            with torch.set_grad_enabled(backward), self._autocast(dtype, mode), recording:
                out = self._forward(sample)
            if backward:
                outputs = [tensor for _, tensor in leaves(out) if is_float(tensor)]
                self._gradients(sample, outputs, dtype, recording)

    def size_of_result(self, sample: Sample) -> int | None:
        """Number of elements of the output in fp32; ``None`` if the call fails."""
        trial = self.attempt(sample, torch.float32, "forward")
        if trial.outcome is not True:
            return None
        return sum(tensor.numel() for _, tensor in leaves(trial.result))

    def comparable(self, sample: Sample, out: Any) -> list[Tensor]:
        """The floating leaves of an output in ``wide``, without what is not unique."""
        widened = map_tensors(out, lambda tensor: widen(tensor, self.wide))
        return [tensor for _, tensor in leaves(sample.comparable(widened)) if is_float(tensor)]

    def seed(self, seed: int = SEED) -> None:
        """Seed the generators of the CPU and the device."""
        torch.default_generator.manual_seed(seed)
        if self.device != "cpu":
            getattr(torch, self.device).manual_seed(seed)

    def _forward(self, sample: Sample) -> Any:
        out = self.operator.op(*sample.args, **sample.kwargs)
        self._synchronize()
        return out

    def _gradients(
        self, sample: Sample, outputs: list[Tensor], dtype: torch.dtype, recording: DispatchMode | None = None
    ) -> list[Tensor] | None:
        inputs = [tensor for tensor in sample.tensors() if tensor.requires_grad]
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if not inputs or not outputs:
            return None
        # Cotangents with values in [-1, 1] that ``dtype`` represents exactly.
        cotangents = []
        for output in outputs:
            positions = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
            cotangents.append(torch.cos(positions).to(dtype).to(output.dtype).reshape(output.shape))
        with recording or contextlib.nullcontext():
            gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        self._synchronize()
        return [gradient for gradient in gradients if gradient is not None]

    def _autocast(self, dtype: torch.dtype, mode: Mode) -> Any:
        if mode.startswith("autocast"):
            return torch.autocast(self.device, dtype=dtype)
        return contextlib.nullcontext()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()


@cache
def _widest(device: str) -> torch.dtype:
    """fp64, or fp32 if the device does not support fp64."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).add(1).cpu()
    except Exception:
        return torch.float32
    return torch.float64


def exit_if_device_lost(error: BaseException) -> None:
    """End the process if an assertion on the device makes every later call fail."""
    if "CUDA error" in message_of(error) or type_name(error) == "AcceleratorError":
        os._exit(DEVICE_LOST)


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
