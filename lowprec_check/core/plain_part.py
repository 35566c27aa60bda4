"""The plain part of a run: the verdict against the saved outputs of fp32, then measurements."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
import zlib
from collections.abc import Sequence
from ctypes import c_char
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from lowprec_check.core.messages import Reporter, Started
from lowprec_check.core.preparation import OnBackend, on_backend
from lowprec_check.core.process_memory import ProcessMemory
from lowprec_check.core.tasks import RunTask, TaskFiles
from lowprec_check.core.trace.plain_modes import Draw, DrawsDiffer, RecordDraws, ReplayDraws, first_nonfinite
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.engine.model.memory import measure_memory
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    PlainCalls,
    judge,
    judged,
    last_informative_module,
    module_output,
    output_tensors,
    run_once,
    with_verdict,
)
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.streamed_weights import is_in_memory
from lowprec_check.engine.model.target import Target
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.compiled import compiled_code_in_eager, forget_compiled
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.output_comparison import compare_outputs, root_mean_square, same_bits, torch_as_imported
from lowprec_check.torchkit.pytree import stored

SLOW = "a call takes too long to try more inputs"
RANDOM = "the model draws random numbers"
"""Why a run that passes is not tried on other inputs."""
OTHER_DRAWS = "its output cannot be compared, since fp32 draws other random numbers"
EQUAL_DRAWS = (
    "compiled with torch._inductor.config.fallback_random = True, with which it draws the random numbers of eager mode"
)
INFINITE = "the fp32 output has infinities: the same ones are expected in low precision"


class Fp32Outputs(NamedTuple):
    """The outputs of the fp32 run, on the CPU."""

    outputs: Sequence[OutputTensors]
    """The leaves of the output, of each call compared."""
    probe: ModuleOutput | None
    """The output of a module, if that of the model holds nothing to compare."""

    def save(self, files: TaskFiles) -> None:
        """Write what :meth:`load` reads; :class:`UsageError` if memory or a limit is too small."""
        outputs = [[tensor.cpu() for tensor in tensors] for tensors in self.outputs]
        forms = [tensors.form.saved for tensors in self.outputs]
        probe = self.probe and (self.probe.module, self.probe.number, [tensor.cpu() for tensor in self.probe.tensors])
        files.keep({"outputs": outputs, "forms": forms, "probe": probe})

    @classmethod
    def load(cls, files: TaskFiles, target: Target | None = None) -> Fp32Outputs:
        """Read what the fp32 run saved, which the function of ``target`` may judge."""
        saved = files.kept()
        function = target.judge_function if target is not None else None
        outputs = [
            OutputTensors(tensors, OutputForm(*form)._replace(function=function))
            for tensors, form in zip(saved["outputs"], saved["forms"], strict=True)
        ]
        return cls(outputs, saved["probe"] and ModuleOutput(*saved["probe"]))


class PlainPart:
    """Runs the plain part of ``task`` with the model ``ready``; reports what it finds."""

    def __init__(
        self, task: RunTask, target: Target, ready: Prepared, report: Reporter, memory: ProcessMemory | None = None
    ) -> None:
        self._memory = memory
        self.task, self.target, self.ready, self.report = task, target, ready, report
        self._call = (ready, target.args, target.kwargs)
        self._snapshot = Snapshot(ready.model, target.rewound, parameters=task.changes_parameters)
        self.outputs: list[OutputTensors] = []
        self.warnings: list[warnings.WarningMessage] = []
        """What was warned of in the calls."""
        self.probed: ModuleOutput | None = None
        """The output of a module that was judged in place of that of the model."""
        self.draws: list[list[Draw]] = []
        """The random calls of each call, if fp32 may have drawn other random numbers."""

    @property
    def too_slow(self) -> bool:
        """Whether the model failed, or is too slow to be called again."""
        return self.task.is_too_slow(self.report.so_far)

    def rewind(self) -> None:
        """Restore the state of the model, the inputs and the process from before the calls."""
        self._snapshot.rewind()

    @property
    def is_compiled(self) -> bool:
        """Whether its calls ran compiled code, or on another backend."""
        return self.task.backend != EAGER or self.report.run.compiled

    def run(self, made: Sequence[Any] = ()) -> None:
        """Call the model, or take the outputs that were ``made`` already; send the verdict."""
        task = self.task
        saved = None
        if not task.saves_reference:
            saved = Fp32Outputs.load(task.files, self.target)
        before = 0
        if not task.changes_parameters:
            before = _fingerprint(self.ready.model)
        calls = PlainCalls(
            *self._call,
            seed=task.seed,
            tolerance=task.tolerance,
            references=saved.outputs if saved else None,
            on_call=lambda number: self.report.send(Started(seconds=task.part_budget, call=number)),
            prepares=task.backend != EAGER,
            made=made,
        )
        so_far = calls.run(
            task.begun(),
            seconds=task.budget / 2 if task.measured else min(2.0, task.budget / 5),
            too_slow=task.slow_seconds,
            hopeless=task.hopeless_seconds,
            # What random numbers excuse is not known before the last call.
            until_failed=task.status_only and not task.draws,
        )
        form = self.target.output_form(task.judge, task.limits)
        self.outputs = [outputs.as_asked(form) for outputs in calls.outputs]
        self.warnings = calls.warnings
        changed = not task.changes_parameters and _fingerprint(self.ready.model) != before
        if isinstance(self.ready.call, OnBackend):
            call = self.ready.call
            so_far = so_far.with_fields(gaps=call.gaps, without_kernels=call.emulated)
        so_far = msgspec.structs.replace(so_far, changes_parameters=changed)
        run = so_far.run
        if saved is None:
            run = self._as_reference(run)
            run = msgspec.structs.replace(run, notes=[*run.notes, *self._snapshot.notes])
        elif run.status == "unjudged" and saved.probe is not None:
            # The output of the last module that has an informative one. The run itself has passed:
            # what the hook changes is not its fault.
            self.rewind()
            tensors = None
            with contextlib.suppress(Exception):
                tensors = module_output(*self._call, task.seed, saved.probe)
            if tensors is not None:
                self.probed = saved.probe._replace(tensors=tensors)
                run = msgspec.structs.replace(run, compared_module=saved.probe.module)
                run = with_verdict(run, *judge(tensors, saved.probe.tensors, task.tolerance))
        if run.judged_by_one_call and task.fp32_ms:
            seconds = max(0.0, so_far.seconds - task.fp32_setup)
            run = msgspec.structs.replace(run, one_call_ratio=seconds * 1e3 / task.fp32_ms)
        self.report.update(msgspec.structs.replace(so_far, run=run))

    def draw_as_eager(self, context: contextlib.ExitStack) -> None:
        """If a compiler drew other numbers than fp32, compile without that while in ``context``."""
        run, inductor = self.report.run, sys.modules.get("torch._inductor.config")
        if run.status != "inaccurate" or not (run.random and self.is_compiled) or inductor is None:
            return
        context.enter_context(inductor.patch(fallback_random=True))
        forget_compiled()
        self.rewind()
        self.ready = on_backend(self.task, self.target, self.ready)
        self._call = (self.ready, self.target.args, self.target.kwargs)
        self.run()
        self.report.add(notes=[*self.report.run.notes, EQUAL_DRAWS])

    def measure(self) -> None:
        """Send time and memory; of the reference, how two runs differ. Records random calls."""
        task, so_far = self.task, self.report.so_far
        run = so_far.run
        if so_far.failed:
            return
        # The times and the memory of a device, or of kernels, are not those of a stand-in.
        measured = task.measured and task.evidence == "measured" and run.without_kernels is None
        if measured:
            latency_ms, setup_seconds = so_far.seconds * 1e3, None
            if self.is_compiled:
                setup_seconds = max(0.0, so_far.first_seconds - so_far.seconds)
            self.report.add(latency_ms=latency_ms, setup_seconds=setup_seconds)
        # A verdict that may rest on other random numbers than fp32's is judged again later.
        may_draw = (task.draws or run.random) and not (task.saves_reference or self.too_slow)
        if may_draw and run.status in ("inaccurate", "nonfinite"):
            recorded = self._record_draws()
            self.draws = recorded or []
            self.report.add_facts(draws=recorded != [])
        if run.status == "inaccurate" and run.random and self.is_compiled and not self.draws:
            self.report.replace_run(_without_verdict(self.report.run, OTHER_DRAWS))
        # The output is None if what was attached to measure could change it.
        again = None
        if measured and not self.too_slow:
            again = self._measure_memory()
        if not task.saves_reference:
            return
        if task.mode.repeats_fp32 and not self.too_slow:
            if again is None:
                self.rewind()
                again, _ = run_once(*self._call, task.seed)
            compared = compare_outputs(output_tensors(again), self.outputs[0])
            if compared.compared and compared.distance > 0:
                self.report.add_facts(self_error=compared.error)
        if run.status == "nonfinite":
            self.rewind()
            self.report.add_facts(nonfinite_at=first_nonfinite(*self._call, task.seed))

    def _measure_memory(self) -> Any:
        """Send the memory of a call, and return its output."""
        task, call = self.task, self.ready.call
        held = peak = output = None
        self.rewind()
        if self._memory is not None:
            prepared = call.prepared if isinstance(call, OnBackend) else None
            held = self._memory.peak(lambda: run_once(*self._call, task.seed), self.outputs.clear, prepared)
            self.rewind()
        if not (isinstance(call, OnBackend) and task.device == "cpu"):
            peak, output = measure_memory(*self._call, seed=task.seed)
        if isinstance(call, OnBackend):
            peak = call.memory(held if task.device == "cpu" else peak)
            held = held and peak
        self.report.add(peak_memory_bytes=peak, process_memory_bytes=held)
        return output

    def _as_reference(self, run: Run) -> Run:
        """Save the outputs for the other runs. NaN is ``nonfinite``; infinities count as meant."""
        if run.status == "error":
            return run
        probe = None
        if judge(self.outputs[0], self.outputs[0], None)[0] == "unjudged":
            self.rewind()
            with contextlib.suppress(Exception):
                probe = last_informative_module(*self._call, self.task.seed)
        Fp32Outputs(self.outputs, probe).save(self.task.files)
        floating = [tensor for tensors in self.outputs for tensor in tensors if is_float(tensor)]
        sizes = [root_mean_square(tensor.cpu()) for tensor in self.outputs[0] if is_float(tensor)]
        rms = max((size for size in sizes if size is not None), default=None)
        if rms is not None and math.isfinite(rms):
            run = msgspec.structs.replace(run, output_rms=rms)
        with torch_as_imported():
            has_nan, has_inf = (
                any(bool(test(tensor).any()) for tensor in floating) for test in (torch.isnan, torch.isinf)
            )
        if has_nan:
            return msgspec.structs.replace(run, status="nonfinite")
        if has_inf:
            return msgspec.structs.replace(run, notes=[*run.notes, INFINITE])
        return run

    def _record_draws(self) -> list[list[Draw]] | None:
        """The random calls of each call; empty if there are none, ``None`` if not repeatable."""
        self.rewind()
        of_calls = []
        for output in self.outputs:
            with compiled_code_in_eager(), RecordDraws() as recorder:
                again, _ = run_once(*self._call, self.task.seed)
            if not same_bits(output_tensors(again), output):
                return None
            of_calls.append(recorder.draws)
            # The first call is enough if it draws nothing and the others give the same output.
            draws = bool(recorder.draws) or self.report.run.random
            if not draws and all(same_bits(other, output) for other in self.outputs[1:]):
                return []
        return of_calls if any(of_calls) else []


def judge_with_same_draws(ready: Prepared, part: PlainPart) -> None:
    """Report the verdict on ``part`` against fp32, ``ready``, with the same random numbers."""
    run = part.report.run
    call, tolerance = (ready, part.target.args, part.target.kwargs, part.task.seed), part.task.tolerance
    try:
        with compiled_code_in_eager():
            if part.probed is None:
                form = part.target.output_form(part.task.judge, part.task.limits)
                references, replays = [], [ReplayDraws(draws) for draws in part.draws]
                for replay in replays:
                    with replay:
                        output, _ = run_once(*call)
                    reference = output_tensors(output).copied()
                    references.append(reference.as_asked(form))
                run = judged(run, part.outputs, references, tolerance)
            else:
                replays = [ReplayDraws(part.draws[0])]
                with replays[0]:
                    tensors = module_output(*call, part.probed)
                run = with_verdict(run, *judge(part.probed.tensors, tensors or [], tolerance))
        # Numbers that fp32 does not draw may be without an effect.
        if run.status != "ok":
            for replay in replays:
                replay.check_all_drawn()
    except DrawsDiffer as difference:
        # A finite output says nothing if fp32 draws in other places.
        if run.status != "nonfinite":
            run = _without_verdict(run, f"{OTHER_DRAWS} ({difference})")
    part.report.replace_run(run)


def _without_verdict(run: Run, why: str) -> Run:
    return msgspec.structs.replace(run, status="unjudged", output_error=None, notes=[*run.notes, why])


MANY_BYTES = 1 << 20
"""Larger weights are first summed up by all threads of torch: a checksum takes a second a GiB."""

LINE = 64
"""Words of eight bytes in a line. The sums of lines and of columns together show what moved."""


def _fingerprint(model: nn.Module) -> int:
    checksum = 0
    seen: set[int] = set()
    for parameter in stored(model.parameters()):
        if not is_in_memory(parameter) or storage_key(parameter) in seen:
            continue
        seen.add(storage_key(parameter))
        storage = parameter.untyped_storage()
        # The address of an empty one is none, for which zlib starts anew.
        if not storage.nbytes():
            continue
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if storage.device.type != "cpu":
            checksum = hash((checksum, int(values.sum())))
            continue
        if storage.nbytes() > MANY_BYTES:
            # As the lines are odd in number, signs of float64 do not cancel if all turn.
            count = storage.nbytes() // (8 * LINE)
            in_lines = (count - 1 | 1) * 8 * LINE
            lines = values[:in_lines].view(torch.int64).view(-1, LINE)
            checksum = _checksum(lines.sum(1), checksum)
            checksum = _checksum(lines.sum(0), checksum)
            values = values[in_lines:]
        checksum = _checksum(values, checksum)
    return checksum


def _checksum(values: torch.Tensor, before: int) -> int:
    size = values.numel() * values.element_size()
    if not size:
        return before
    return zlib.crc32(memoryview((c_char * size).from_address(values.data_ptr())), before)
