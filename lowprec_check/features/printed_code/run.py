"""Executes the recommended code of a scan before it is printed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial

import msgspec

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.snippet import snippet
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.engine.model.output_measures import parse_limits
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.features.printed_code.code_process import CodeRequest, wait_and_execute
from lowprec_check.process import system
from lowprec_check.process.function_worker import FunctionWorker, Method
from lowprec_check.process.supervisor import MessageEvent, Supervisor
from lowprec_check.schema.code_trial import CodeTrial
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.scanned_model import STREAMED

LEAST_SECONDS, PART_OF_SCAN = 10.0, 0.25
"""The code may take so much of the time of the scan, or so many seconds."""
METHOD: Method = "spawn"
"""How the process of the code starts where runs are forks: as new. Most tests fork it."""


class PrintedCodeFeature(Feature):
    """The recommended code, executed."""

    place = 40

    def __init__(self) -> None:
        self._worker: FunctionWorker[CodeTrial] | None = None
        self._started = 0.0

    def after_reference(self, batches: Sequence[TargetRuns], fp32: Run) -> None:
        """Start an interpreter, which imports torch while the scan goes on."""
        self._end()
        runs = batches[0]
        is_here = runs.mode.evidence == "measured" and runs.isolation != "none" and STREAMED not in runs.target.notes
        from_file = runs.launcher.source.reload is not None and runs.target.observed is None
        if is_here and from_file and fp32.status == "ok":
            decode = partial(msgspec.msgpack.decode, type=CodeTrial)
            self._started = system.monotonic()
            method: Method = METHOD if runs.isolation == "fork" else "spawn"
            self._worker = FunctionWorker(wait_and_execute, decode, method=method)

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """Execute the code in it."""
        if self._worker is None:
            return None
        try:
            concluded = conclude(result)
            request = _request(batches[0], concluded, options)
            if request is None:
                return None
            now = system.monotonic()
            limit = max(LEAST_SECONDS, PART_OF_SCAN * (now - self._started))
            batches[0].launcher.source.report("code", "executing it")
            trial = _answer(self._worker, request, limit)
            return msgspec.structs.replace(
                result, code_trial=msgspec.structs.replace(trial, seconds=system.monotonic() - now)
            )
        finally:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _request(runs: TargetRuns, result: ScanResult, options: ScanOptions) -> CodeRequest | None:
    """What to execute; ``None`` if nothing is recommended, or nothing can be executed."""
    best, run, target = result.recommendation, recommended_run(result), runs.target
    if best is None or run is None or best.code.startswith(("# in the step", "#  ")):
        return None
    is_inside = best.code.startswith("# in ")
    if is_inside and target.namespace is None:
        return None
    tolerance = None
    if run.status == "ok" and target.weights != "scaled":
        tolerance = runs.tolerance(best.precision, run.backend)
    in_fp32 = ""
    if result.is_forward and result.as_given is None:  # the fp32 of several dtypes is not what the file has
        in_fp32 = snippet(result.runs[0].key, result.model, torch_version=result.torch)
    return CodeRequest(
        code=best.code,
        in_fp32=in_fp32,
        seed=options.seed,
        tolerance=tolerance,
        form=OutputForm(judge=options.judge or target.judge, limits=parse_limits(options.limit)),
        folder=target.folder,
        load=runs.launcher.source.reload if is_inside else None,
    )


def _answer(worker: FunctionWorker[CodeTrial], request: CodeRequest, limit: float) -> CodeTrial:
    worker.send(pickle.dumps(request))
    worker.set_timeout(limit)
    with Supervisor[FunctionWorker[CodeTrial], CodeTrial]([worker]) as supervisor:
        for event in supervisor.events():
            if isinstance(event, MessageEvent):
                return event.message
            if event.state == "timeout":
                reason = f"it took longer than {limit:.0f} s"
                return CodeTrial(code=request.code, status="not run", reason=reason)
    return CodeTrial(code=request.code, status="failed", reason="its process died")


PRINTED_CODE = PrintedCodeFeature()
