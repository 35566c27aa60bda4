"""Executes the recommended code of a scan before it is printed."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.analysis.conclusion import advised
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.snippet import snippet
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.engine.model.output_measures import OWN, parse_limits
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import Load
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process import system
from lowprec_check.process.function_worker import Channel, FunctionWorker, Method
from lowprec_check.process.supervisor import MessageEvent, Supervisor
from lowprec_check.schema.measures import CodeTrial
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.scanned_model import STREAMED
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.isolation import best_isolation


class CodeRequest(NamedTuple):
    """What to execute, and what its output may be."""

    code: str
    in_fp32: str
    """The same for the fp32 run; empty for training, whose loss is looked at."""
    seed: int
    tolerance: float | None
    """Of the output's error; ``None`` if the output cannot be judged."""
    form: OutputForm = OutputForm()
    """By what it is judged."""
    module: str = ""
    """The user's module that the code imports; empty if none."""
    folder: str | None = None
    """Where it does."""
    load: Load | None = None
    """Loads the script that the code belongs into; ``None`` if it stands alone."""


def wait_and_execute(loaded: Load | None, accelerator: str | None, channel: Channel) -> None:
    """Answer a :class:`CodeRequest` with a :class:`CodeTrial`; ``loaded`` gives what this process,
    a copy of one that has loaded the user's file, has of it. An ``accelerator`` is made ready.
    """
    # What the code prints is not for the terminal.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if accelerator is not None:
        _load_libraries(torch.device(accelerator))
    data = channel.receive()
    if data is None:
        return
    request: CodeRequest = pickle.loads(data)
    if loaded is not None:
        loaded()
        if request.load is not None:
            request = request._replace(load=loaded)
    channel(msgspec.msgpack.encode(executed(request)))


def _load_libraries(device: torch.device) -> None:
    """Load what convolutions and matrix products need on a device, which takes a second."""
    with contextlib.suppress(Exception):
        ones = torch.ones(1, 16, 16, 16, device=device)
        torch.nn.functional.conv2d(ones @ ones, ones)


def executed(request: CodeRequest) -> CodeTrial:
    """Whether the code runs, and its output passes."""
    try:
        # As the scan itself imports the user's files.
        with torchvision_works():
            return _compared(request)
    except BaseException as error:
        reason = f"{type_name(error)}: {first_line(message_of(error))}"
        return CodeTrial(code=request.code, status="failed", reason=reason)


def _compared(request: CodeRequest) -> CodeTrial:
    names: dict[str, Any] = {}
    if request.load is not None:
        names = request.load().namespace or {}
    elif request.folder is not None:
        sys.path.insert(0, request.folder)
    reference = _run(request.in_fp32, names, request.seed).get("output") if request.in_fp32 else None
    form = request.form
    if form.judge == OWN:
        form = form._replace(function=names.get(OWN) or getattr(sys.modules.get(request.module), OWN, None))
    # The reference keeps its values if the model changes them in place.
    expected = output_tensors(reference).mapped(Tensor.clone).as_asked(form)
    after = _run(request.code, names, request.seed)
    if not request.in_fp32:
        loss = after.get("step_loss")
        if loss is None or bool(loss.isfinite().all()):
            return CodeTrial(code=request.code, status="ran")
        return CodeTrial(code=request.code, status="differs", reason="its loss is not finite")
    status, compared = judge(output_tensors(after["output"]), expected, request.tolerance)
    trial = CodeTrial(code=request.code, status="ran", rel_l2=compared.error.rel_l2)
    if request.tolerance is None or status in ("ok", "unjudged"):
        return trial
    reason = f"the error of its output is {compared.distance:.1e}, above the tolerance of {request.tolerance:g}"
    if status == "nonfinite":
        reason = "its output has NaN or Inf"
    elif compared.error.by_meaning is not None:
        reason = compared.error.by_meaning.text
    return msgspec.structs.replace(trial, status="differs", reason=reason)


def _run(code: str, names: dict[str, Any], seed: int) -> dict[str, Any]:
    """The names after ``code``, which is executed where ``names`` are those that it can use."""
    seed_everything(seed)
    after = {"__name__": "__main__", **names}
    exec(compile(code, "<printed code>", "exec"), after)
    return after


LEAST_SECONDS, PART_OF_SCAN = 10.0, 0.25
"""The code may take so much of the time of the scan, or so many seconds."""
SMALL = 4 << 30
"""Bytes of a model in fp32 beside which an accelerator has room for libraries loaded twice."""
METHOD: Method = "spawn"
"""How the process of the code starts where this one has loaded the file: as new. Tests fork it."""


class PrintedCodeFeature(Feature):
    """The recommended code, executed."""

    place = 40

    def __init__(self) -> None:
        self._worker: FunctionWorker[CodeTrial] | None = None
        self._started = 0.0

    def before_loading(self) -> None:
        """Copy this process, which has imported torch and nothing of the user's, if it can fork."""
        self._end()
        if best_isolation(can_spawn=False) == "fork":
            self._start("fork")

    def after_reference(self, batches: Sequence[TargetRuns], fp32: Run) -> None:
        """Start a process for the code, if it needs another one."""
        runs = batches[0]
        source = runs.launcher.source
        is_here = runs.mode.evidence == "measured" and runs.isolation != "none" and STREAMED not in runs.target.notes
        if not (is_here and source.reload is not None and runs.target.observed is None and fp32.status == "ok"):
            self._end()
        elif runs.launcher.forks and "." not in _module_of(runs.target):
            # A copy of this process has what the file has made, by the name that the code imports.
            # A module of a package is imported anew: here, its own folder is on the path, too.
            self._end()
            accelerator = None
            if fp32.device != "cpu" and (fp32.peak_memory_bytes or math.inf) <= SMALL:
                accelerator = fp32.device
            self._start("fork", source.forked, accelerator)
        elif self._worker is None:
            self._start(METHOD if runs.isolation == "fork" else "spawn")

    def _start(self, method: Method, loaded: Load | None = None, accelerator: str | None = None) -> None:
        decode = partial(msgspec.msgpack.decode, type=CodeTrial)
        self._started = system.monotonic()
        self._worker = FunctionWorker(partial(wait_and_execute, loaded, accelerator), decode, method=method)

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """Execute the code in it."""
        if self._worker is None:
            return None
        try:
            request = _request(batches[0], advised(result), options)
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


def _module_of(target: Target) -> str:
    """The module from which the code for a target imports; empty if it imports none."""
    match = re.search(r"^from (\S+) import", "\n".join(target.setup), re.MULTILINE)
    return match[1] if match else ""


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
    form = target.output_form(options.judge or target.judge, parse_limits(options.limit))
    in_fp32 = ""
    if result.is_forward and result.as_given is None:  # the fp32 of several dtypes is not what the file has
        in_fp32 = snippet(result.runs[0].key, result.model, torch_version=result.torch)
    return CodeRequest(
        code=best.code,
        in_fp32=in_fp32,
        seed=options.seed,
        tolerance=tolerance,
        form=OutputForm(*form.saved),
        module=_module_of(target),
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
