"""The mode of a scan whose weights stay in their files: each call reads them, so calls are few."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from lowprec_check.analysis.source_lines import texts_of_lines
from lowprec_check.core.explanation import add_explanation, instrument
from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.machine import Machine
from lowprec_check.core.memory_limits import gibibytes
from lowprec_check.core.messages import Reporter, Send, Started, WeightRead
from lowprec_check.core.mode import Mode
from lowprec_check.core.plain_part import PlainPart
from lowprec_check.core.preparation import prepared_for
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.execution import Emulation
from lowprec_check.engine.model.streamed_weights import AHEAD_BYTES, HELD_BYTES, NOT_READ, WeightStream, stream_of
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.target_spec import NOTICE
from lowprec_check.errors import UsageError
from lowprec_check.process import system
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.run_key import REFERENCE, RunKey
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.torchkit.devices import generator_states, seed_everything
from lowprec_check.torchkit.output_comparison import digest_of

NEED_WEIGHTS = {
    "train": "--train",
    "scenario": "--scenario",
    "memory_formats": "--memory-format",
}
"""Options that need the weights in memory, with their flags."""


@dataclasses.dataclass(frozen=True)
class Streaming(Mode):
    """Weights are read from their files in each call."""

    many: bool
    """Whether they are more than may be held, so that one reading is to be enough."""
    reads_once: bool = False
    """Whether the instrumented part's output is judged, so that weights are read once."""
    name = "streamed"
    ignored = MappingProxyType({"further_inputs": "each further input would read all weights again"})
    has_times = False
    limits_calls = False
    repeats_fp32 = False
    runs_side_by_side = False
    has_backends = False

    def refuse(self, options: ScanOptions) -> None:
        """Options that need the weights in memory."""
        for name, flag in NEED_WEIGHTS.items():
            if getattr(options, name):
                raise UsageError(
                    f"{flag} needs the weights in memory, and --stream leaves them in their files.",
                    f"Leave out {flag}.",
                )

    def announce(self, source: TargetSource, options: ScanOptions, device: str) -> None:
        """Show how often and how long weights are read."""
        stream = stream_of(source.target.model)
        if self.many and stream is not None:
            source.report(NOTICE, _estimate(stream, options, device))

    def digest(self, source: TargetSource, batches: Sequence[TargetRuns]) -> str | None:
        """Of the user's own files and of fp32's outputs."""
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in source.own_files()]
        digests += [digest_of(batch.fp32_output()) for batch in batches]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def resumed(self, source: TargetSource, result: ScanResult, earlier: ScanResult | None) -> dict[RunKey, Run]:
        """The runs of ``earlier``, if both scans are about the same."""
        if earlier is None:
            return {}

        # One model, source, inputs and options on one machine, and fp32 gives the same output.
        def subject(scanned: ScanResult) -> bytes:
            options = {name: scanned.options.get(name) for name in result.options}
            return msgspec.json.encode(
                (scanned.tool, scanned.target, scanned.model, scanned.environment, options, scanned.digest)
            )

        # Also of modules that were imported by a run only.
        lines = earlier.source_lines
        if subject(result) != subject(earlier) or texts_of_lines(lines, source.name) != lines:
            return {}
        runs = {run.key: run for run in earlier.runs[1:] if run.status != "skipped" and run.base is None}
        source.report(NOTICE, f"Resumed: {', '.join(key.label for key in runs)} of the scan that ended early.")
        return runs

    def failure_hint(self, error: ExceptionInfo, device: str, target: Target) -> str | None:
        """A weight that was used without its module."""
        if NOT_READ not in error.message:
            return None
        return "Only attributes of modules are read (module.weight, not parameters()): scan it without --stream."

    def adjusted(self, task: RunTask) -> RunTask:
        """Without measurements; the derivative reads all weights again, so it must be asked for."""
        once = dataclasses.replace(self, reads_once=self.many and task.precision != REFERENCE)
        budget_error = task.budget_error and not task.limits_memory
        return dataclasses.replace(task, mode=once, measured=False, budget_error=budget_error)

    def simpler(self, task: RunTask) -> RunTask | None:
        """The instruments of a run in one reading may be to blame."""
        if not self.reads_once:
            return None
        return dataclasses.replace(task, mode=dataclasses.replace(self, reads_once=False))

    def begin(self, target: Target, send: Send) -> None:
        """Send which weight is read."""
        stream = stream_of(target.model)
        if stream is not None:
            stream.on_progress = lambda name, share: send(WeightRead(name.rpartition(".")[0], share))

    def run(self, task: RunTask, target: Target, report: Reporter) -> None:
        """Judge the instrumented part's output; call the model if that may be another one."""
        if not (self.reads_once and task.instrumented and target.metric is target.compiled is None):
            super().run(task, target, report)
            return
        report.send(Started(seconds=task.measure_budget))
        seed_everything(task.seed)
        outputs, before, started = list[Any](), generator_states(), system.thread_time()

        def keep(output: Any) -> None:
            if generator_states() == before:  # random numbers must be those of fp32
                outputs.append(output)

        instrumented = None
        with report.faults_of("instrumenting"):
            instrumented = instrument(task, target, report.send, emulation=Emulation(), keep=keep)
        # What changes or replaces calls may change the output.
        changed = True
        if instrumented is not None:
            run = instrumented.run
            changed = bool(run.function_mode or run.emulated or run.gaps or instrumented.faults)
        if changed or not outputs:
            self.plain(task, target, report)
        else:
            with prepared_for(task, target) as ready:
                part = PlainPart(task, target, ready, report)
                part.run(outputs[-1:])
        if instrumented is not None:
            with report.faults_of("instrumenting"):
                add_explanation(Explained(task, target, report, None, started), instrumented)


def _estimate(stream: WeightStream, options: ScanOptions, device: str) -> str:
    """What a scan takes at least of a model whose weights stay in their files."""
    lower = [name for name in options.names_of("precisions") if name != REFERENCE]
    often = 2 if options.budget_error == "on" and options.errors == "both" else 1
    times, speed = options.batches + often * len(lower), stream.bytes_per_second()
    seconds = max(1.0, times * stream.nbytes / speed)
    on_each = " on each batch" if options.batches > 1 else ""
    twice = "twice" if often > 1 else "once"
    again = ""
    if options.plan is not False:
        when = "If a precision fails" if options.plan else "If none of them passes"
        again = f"{when}, each trial of the search for a plan reads them again. "
    most = stream.most_held
    if not device.startswith("cpu"):
        most += 2 * AHEAD_BYTES
    return (
        f"{gibibytes(stream.nbytes)} of weights are read at least {times} times if every call ends: once in fp32"
        f"{on_each}, {twice} in each other precision. {again}Reading them {times} times takes about {seconds:.0f} s at "
        f"{gibibytes(speed)}/s, the speed of a sample; computing takes more. At most {gibibytes(most)} of weights are "
        "in memory at a time."
    )


class Streams(Feature):
    """Weights that stay in their files."""

    def mode(self, source: TargetSource, options: ScanOptions, machine: Machine) -> Mode | None:
        """If the model was loaded so."""
        stream = stream_of(source.target.model)
        if stream is None:
            return None
        return Streaming(many=stream.nbytes > HELD_BYTES)


STREAMS = Streams()
