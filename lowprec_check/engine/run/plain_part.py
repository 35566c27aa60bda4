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
from torch import Tensor, nn

from lowprec_check.engine.core.compiled import compiled_code_in_eager, forget_compiled
from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.output_comparison import compare_outputs, root_mean_square, same_bits, torch_as_imported
from lowprec_check.engine.core.pytree import stored
from lowprec_check.engine.model.memory import measure_memory
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    PlainCalls,
    PlainResult,
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
from lowprec_check.engine.model.streamed_weights import is_in_memory, stream_of
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.backend_check import BackendChecker
from lowprec_check.engine.run.compiler_check import CompilerChecker
from lowprec_check.engine.run.margin_part import SLOW, FurtherCalls
from lowprec_check.engine.run.messages import CallStarted, ChangedInputStarted, InputStarted, Measures, Send
from lowprec_check.engine.run.preparation import OnBackend, as_standalone, on_backend
from lowprec_check.engine.run.process_memory import ProcessMemory
from lowprec_check.engine.run.tasks import RunTask, TaskFiles
from lowprec_check.engine.trace.plain_modes import Draw, DrawsDiffer, RecordDraws, ReplayDraws, first_nonfinite
from lowprec_check.engine.trace.twins import storage_key
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.backend_checks import BackendCheck
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.ways_to_train import WayToTrain

OTHER_DRAWS = "its output cannot be compared, since fp32 draws other random numbers"
EQUAL_DRAWS = (
    "compiled with torch._inductor.config.fallback_random = True, with which it draws the random numbers of eager mode"
)
INFINITE = "the fp32 output has infinities: the same ones are expected in low precision"


class Fp32Outputs(NamedTuple):
    """The outputs of the fp32 run, on the CPU."""

    outputs: list[list[Tensor]]
    """The leaves of the output, of each call compared."""
    probe: ModuleOutput | None
    """The output of a module, if that of the model holds nothing to compare."""

    def save(self, files: TaskFiles) -> None:
        """Write what :meth:`load` reads; :class:`UsageError` if memory or a limit is too small."""
        outputs = [[tensor.cpu() for tensor in tensors] for tensors in self.outputs]
        probe = self.probe and (self.probe.module, self.probe.number, [tensor.cpu() for tensor in self.probe.tensors])
        files.keep({"outputs": outputs, "probe": probe})

    @classmethod
    def load(cls, files: TaskFiles) -> Fp32Outputs:
        """Read what the fp32 run saved."""
        saved = files.kept()
        return cls(saved["outputs"], saved["probe"] and ModuleOutput(*saved["probe"]))


class Called(NamedTuple):
    """What the plain part of a run, or its training, leaves for the parts after it."""

    too_slow: bool
    outputs: list[Tensor] | None = None
    """The first output, if the instrumented part runs the same code and so must repeat it."""
    seconds: float | None = None
    """What a call takes, if another one gives the same, in reasonable time."""
    way: WayToTrain | None = None


class PlainPart:
    """Runs the plain part of ``task`` with the model ``ready``; sends what it finds."""

    def __init__(
        self, task: RunTask, target: Target, ready: Prepared, send: Send, memory: ProcessMemory | None = None
    ) -> None:
        self._memory = memory
        self.task, self.target, self.ready, self._send = task, target, ready, send
        self._call = (ready, target.args, target.kwargs)
        self._snapshot = Snapshot(ready.model, target.rewound, parameters=task.changes_parameters)
        self._measures = Measures()
        self.result = PlainResult(status="error")
        self.outputs: list[list[Tensor]] = []
        self.paths: list[str] = []
        """Where an output has them."""
        self._warnings: list[warnings.WarningMessage] = []
        self.probed: ModuleOutput | None = None
        """The output of a module that was judged in place of that of the model."""
        self.draws: list[list[Draw]] = []
        """The random calls of each call, if fp32 may have drawn other random numbers."""

    @property
    def too_slow(self) -> bool:
        """Whether the model failed, or is too slow to be called again."""
        result = self.result
        return result.status == "error" or result.judged_by_one_call or result.seconds > self.task.slow_seconds

    def called(self) -> Called:
        """What it leaves for the parts after it."""
        called = Called(self.too_slow)
        if self.outputs and not self._is_compiled:
            called = called._replace(outputs=self.outputs[0])
        if not (self.result.random or self.result.judged_by_one_call):
            called = called._replace(seconds=self.result.seconds)
        return called

    @property
    def _is_compiled(self) -> bool:
        return self.task.backend != EAGER or self.result.compiled

    def run(self, made: Sequence[Any] = ()) -> None:
        """Call the model, or take the outputs that were ``made`` already; send the verdict."""
        task = self.task
        saved = None
        if not task.saves_reference:
            saved = Fp32Outputs.load(task.files)
        before = 0
        if not task.changes_parameters:
            before = _fingerprint(self.ready.model)
        calls = PlainCalls(
            *self._call,
            seed=task.seed,
            tolerance=task.tolerance,
            references=saved.outputs if saved else None,
            on_call=lambda number: self._send(CallStarted(number)),
            prepares=task.backend != EAGER,
            made=made,
        )
        result = calls.run(
            seconds=task.budget / 2 if task.measured else min(2.0, task.budget / 5),
            too_slow=task.slow_seconds,
            hopeless=task.hopeless_seconds,
            # What random numbers excuse is not known before the last call.
            until_failed=task.status_only and not task.draws,
        )
        self.outputs, self.paths, self._warnings = calls.outputs, calls.paths, calls.warnings
        changed = not task.changes_parameters and _fingerprint(self.ready.model) != before
        gaps = self.ready.call.gaps if isinstance(self.ready.call, OnBackend) else []
        self.result = msgspec.structs.replace(result, changes_parameters=changed, backend_gaps=gaps)
        if saved is None:
            self.result = self._as_reference(self.result)
            self.result = msgspec.structs.replace(self.result, notes=(*self.result.notes, *self._snapshot.notes))
        elif self.result.status == "unjudged" and saved.probe is not None:
            # The output of the last module that has an informative one. The run itself has passed:
            # what the hook changes is not its fault.
            self._snapshot.rewind()
            tensors = None
            with contextlib.suppress(Exception):
                tensors = module_output(*self._call, task.seed, saved.probe)
            if tensors is not None:
                self.probed = saved.probe._replace(tensors=tensors)
                result = msgspec.structs.replace(self.result, compared_module=saved.probe.module)
                self.result = with_verdict(result, *judge(tensors, saved.probe.tensors, task.tolerance))
        self._send(self.result)

    def draw_as_eager(self, context: contextlib.ExitStack) -> None:
        """If a compiler drew other numbers than fp32, compile without that while in ``context``."""
        result, inductor = self.result, sys.modules.get("torch._inductor.config")
        if result.status != "inaccurate" or not (result.random and self._is_compiled) or inductor is None:
            return
        context.enter_context(inductor.patch(fallback_random=True))
        forget_compiled()
        self._snapshot.rewind()
        self.ready = on_backend(self.task, self.target, self.ready)
        self._call = (self.ready, self.target.args, self.target.kwargs)
        self.run()
        self.result = msgspec.structs.replace(self.result, notes=(*self.result.notes, EQUAL_DRAWS))
        self._send(self.result)

    def measure(self) -> None:
        """Send time and memory; of the reference, how two runs differ. Records random calls."""
        task, result = self.task, self.result
        if result.status == "error":
            return
        self._add(latency_ms=result.seconds * 1e3 if task.measured else None)
        # A verdict that may rest on other random numbers than fp32's is judged again later.
        may_draw = (task.draws or result.random) and not (task.saves_reference or self.too_slow)
        if may_draw and result.status in ("inaccurate", "nonfinite"):
            recorded = self._record_draws()
            self.draws = recorded or []
            self._add(draws=recorded != [])
        if result.status == "inaccurate" and result.random and self._is_compiled and not self.draws:
            self.result = _without_verdict(result, OTHER_DRAWS)
            self._send(self.result)
        # The output is None if what was attached to measure could change it.
        again = None
        if task.measured and not self.too_slow:
            again = self._measure_memory()
        if not task.saves_reference:
            return
        if stream_of(self.ready.model) is None:
            if again is None:
                self._snapshot.rewind()
                again, _ = run_once(*self._call, task.seed)
            compared = compare_outputs(output_tensors(again), self.outputs[0])
            if compared.compared and compared.distance > 0:
                self._add(self_error=compared.error)
        if result.status == "nonfinite":
            self._snapshot.rewind()
            self._add(nonfinite_at=first_nonfinite(*self._call, task.seed))

    def check_backend(self) -> None:
        """Send how the backend differs from eager mode; the verdict, if changed inputs fail."""
        task, result = self.task, self.result
        if not self._is_compiled or result.status == "error" or not task.measured:
            return
        if self.too_slow:
            self._add(backend_check=BackendCheck(reason=SLOW))
            return
        quantizes = BACKENDS.get(task.backend).lowers_precision
        checker = BackendChecker(self._compiler_checker(), result, quantizes=quantizes)
        try:
            checker.check(self._warnings, lambda change: self._send(ChangedInputStarted(change)))
        finally:
            self._add(backend_check=checker.observed)
        if checker.result is not result:
            self.result = checker.result
            self._send(self.result)

    def _compiler_checker(self) -> CompilerChecker:
        return CompilerChecker(
            self.task, self.target, self.ready, self._snapshot.rewind, by_dynamo=self.result.compiled
        )

    def _measure_memory(self) -> Any:
        """Send the memory of a call, and return its output."""
        task, call = self.task, self.ready.call
        held = peak = output = None
        self._snapshot.rewind()
        if self._memory is not None:
            prepared = call.prepared if isinstance(call, OnBackend) else None
            held = self._memory.peak(lambda: run_once(*self._call, task.seed), self.outputs.clear, prepared)
            self._snapshot.rewind()
        if not (isinstance(call, OnBackend) and task.device == "cpu"):
            peak, output = measure_memory(*self._call, seed=task.seed)
        if isinstance(call, OnBackend):
            peak = call.memory(held if task.device == "cpu" else peak)
            held = held and peak
        self._add(peak_memory_bytes=peak, process_memory_bytes=held)
        return output

    def try_further_inputs(self) -> None:
        """In the fp32 run, save further inputs; in others that pass, call the model on them."""
        task, result = self.task, self.result
        if task.further_inputs == 0 or not task.measured or result.status != "ok":
            return
        probe = self.probed
        if task.saves_reference:
            probe = Fp32Outputs.load(task.files).probe
        calls = FurtherCalls(task, self.target, self.ready, self._snapshot.rewind, result, probe)
        if not task.saves_reference:
            self._add(further_inputs=calls.tried(lambda number, so_far: self._send(InputStarted(number, so_far))))
            return
        self_error, distance = self._measures.self_error, 0.0
        if self_error is not None:
            distance = math.inf if self_error.distance is None else self_error.distance
        calls.keep(distance)

    def compute_metric(self) -> None:
        """Send the value of the user's metric, if there is one and the model ran."""
        metric, call = self.target.metric, self.ready.call
        if metric is not None and self.result.status != "error" and not self.too_slow:
            replaced = call.prepared if isinstance(call, OnBackend) else self.target.compiled
            self._snapshot.rewind()
            self._add(metric=float(metric(as_standalone(self.ready, replaced))))

    def check_compiler(self) -> None:
        """Send whether the compiler made the output worse, if it is compiled and not random."""
        backend = BACKENDS.get(self.task.backend)
        compiled = (self.result.compiled or self.task.backend != EAGER) and not backend.lowers_precision
        if compiled and self.outputs and not (self.result.random or self.too_slow or self.task.keep_fp32):
            # Each is sent, in case time is too short for what follows.
            for check in self._compiler_checker().checks():
                self._add(compiler=check)

    def add_layer_errors(self) -> None:
        """Send the errors of the layers that a backend quantized, if the model ran."""
        call = self.ready.call
        if isinstance(call, OnBackend) and self.task.measured and self.result.status != "error":
            with self.ready.context():
                self._add(layer_errors=call.layer_errors())

    def _add(self, **measured: Any) -> None:
        self._measures = msgspec.structs.replace(self._measures, **measured)
        self._send(self._measures)

    def _as_reference(self, result: PlainResult) -> PlainResult:
        """Save the outputs for the other runs. NaN is ``nonfinite``; infinities count as meant."""
        if result.status == "error":
            return result
        probe = None
        if judge(self.outputs[0], self.outputs[0], None)[0] == "unjudged":
            self._snapshot.rewind()
            with contextlib.suppress(Exception):
                probe = last_informative_module(*self._call, self.task.seed)
        Fp32Outputs(self.outputs, probe).save(self.task.files)
        floating = [tensor for tensors in self.outputs for tensor in tensors if is_float(tensor)]
        sizes = [root_mean_square(tensor.cpu()) for tensor in self.outputs[0] if is_float(tensor)]
        rms = max((size for size in sizes if size is not None), default=None)
        result = msgspec.structs.replace(result, output_rms=rms)
        with torch_as_imported():
            has_nan, has_inf = (
                any(bool(test(tensor).any()) for tensor in floating) for test in (torch.isnan, torch.isinf)
            )
        if has_nan:
            return msgspec.structs.replace(result, status="nonfinite")
        if has_inf:
            return msgspec.structs.replace(result, notes=(*result.notes, INFINITE))
        return result

    def _record_draws(self) -> list[list[Draw]] | None:
        """The random calls of each call; empty if there are none, ``None`` if not repeatable."""
        self._snapshot.rewind()
        of_calls = []
        for output in self.outputs:
            with compiled_code_in_eager(), RecordDraws() as recorder:
                again, _ = run_once(*self._call, self.task.seed)
            if not same_bits(output_tensors(again), output):
                return None
            of_calls.append(recorder.draws)
            # The first call is enough if it draws nothing and the others give the same output.
            draws = bool(recorder.draws) or self.result.random
            if not draws and all(same_bits(other, output) for other in self.outputs[1:]):
                return []
        return of_calls if any(of_calls) else []


def judge_with_same_draws(ready: Prepared, part: PlainPart, send: Send) -> None:
    """Send the verdict on ``part`` against fp32, ``ready``, with the same random numbers."""
    call, tolerance = (ready, part.target.args, part.target.kwargs, part.task.seed), part.task.tolerance
    try:
        with compiled_code_in_eager():
            if part.probed is None:
                references, replays = [], [ReplayDraws(draws) for draws in part.draws]
                for replay in replays:
                    with replay:
                        output, _ = run_once(*call)
                    references.append([tensor.cpu().clone() for tensor in output_tensors(output)])
                part.result = judged(part.result, part.outputs, references, tolerance, part.paths)
            else:
                replays = [ReplayDraws(part.draws[0])]
                with replays[0]:
                    reference = module_output(*call, part.probed)
                part.result = with_verdict(part.result, *judge(part.probed.tensors, reference or [], tolerance))
        # Numbers that fp32 does not draw may be without an effect.
        if part.result.status != "ok":
            for replay in replays:
                replay.check_all_drawn()
    except DrawsDiffer as difference:
        # A finite output says nothing if fp32 draws in other places.
        if part.result.status != "nonfinite":
            part.result = _without_verdict(part.result, f"{OTHER_DRAWS} ({difference})")
    send(part.result)


def _without_verdict(result: PlainResult, why: str) -> PlainResult:
    return msgspec.structs.replace(result, status="unjudged", output_error=None, notes=(*result.notes, why))


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
        if storage.device.type == "cpu":
            checksum = zlib.crc32((c_char * storage.nbytes()).from_address(storage.data_ptr()), checksum)
        else:
            values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            checksum = hash((checksum, int(values.sum())))
    return checksum
