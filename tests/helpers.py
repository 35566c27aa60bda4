"""Scans and runs in this process, without workers: for tests of what is found, which make many."""

from __future__ import annotations

import functools
import math
import re
import sys
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

import lowprec_check
from lowprec_check.core.machine import Machine
from lowprec_check.core.target_runs import TargetRuns, open_runs
from lowprec_check.core.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.core.trace.observers import MakeObserver
from lowprec_check.core.trace.plain_modes import withholding
from lowprec_check.engine.model.plain_run import PlainCalls
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.features.error_budget.run import BudgetObserver
from lowprec_check.features.magnitudes.run import MagnitudeObserver
from lowprec_check.features.nonfinite_origins.run import origins_of
from lowprec_check.report.layout.text import text
from lowprec_check.report.scan_document import scan_document
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.torchkit.devices import MemoryLimit

CPU = torch.device("cpu")


def run_printed(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names after printed ``code``; ``names`` are those of the user's file, which the code imports, or is in."""
    modules = {}
    for name, imported in re.findall(r"^from (\w+) import (\w+)", code, re.MULTILINE):
        if imported in names:
            modules[name] = types.ModuleType(name)
            vars(modules[name]).update(names)
    after = {**names}
    with mock.patch.dict(sys.modules, modules):
        exec(compile(code, "pasted.py", "exec"), after)
    return after


def screen_of(result: ScanResult, *, width: int = 100, verbose: bool = False) -> str:
    """The text report of a scan."""
    return text(scan_document(result), width=width, detail="more" if verbose else "first")


def scan_here(model: nn.Module, inputs: Any, **options: Any) -> ScanResult:
    """A scan in this process that explains all runs, without times: a quarter of the work in workers."""
    return lowprec_check.scan(model, inputs, **{"isolation": "none", "times": "off", "explain": "all", **options})


def runs_here(model: nn.Module, inputs: Any, **options: Any) -> AbstractContextManager[TargetRuns]:
    """Makes the runs of a scan in this process one by one, without further inputs."""
    source, machine = TargetSource(make_target(model, inputs)), Machine(environment={"device": "cpu"})
    return open_runs(source, ScanOptions(**{"further_inputs": 0, "explain": "all", **options}), machine, "none")


DEFAULT = Options(observers=(MagnitudeObserver, origins_of))
LOW = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")


def begun(precision: str) -> RunSoFar:
    """A run of which nothing is known yet."""
    return RunSoFar(run=Run(precision=precision, device="cpu", status="timeout"))


def budget_observer(
    fp32: Sequence[torch.Tensor], *, autocast: bool = False, limit: MemoryLimit | None = None
) -> MakeObserver:
    """What finds the error budget of a run; ``fp32`` are the outputs of the fp32 model."""
    most = limit or MemoryLimit(math.inf, "all that there is")
    return functools.partial(BudgetObserver, limit=most, fp32=fp32, autocast=autocast, seed=0)


def run(
    model: nn.Module,
    args: tuple[Any, ...],
    precision: str,
    *,
    options: Options = DEFAULT,
    without_kernel: tuple[str, ...] = (),
    kwargs: dict[str, Any] | None = None,
    keep_fp32: tuple[str, ...] = (),
    budget: bool = False,
    budget_limit: MemoryLimit | None = None,
) -> tuple[Run, Run]:
    """Both parts of one run; the instruments must not have failed. ``budget``: with an error budget, as in a scan."""
    kwargs = kwargs or {}
    with prepared(model, PRECISIONS.get("fp32"), CPU) as ready:
        fp32_calls = PlainCalls(ready, args, kwargs, seed=0)
        in_fp32 = fp32_calls.run(begun("fp32"), seconds=60.0).run
    assert in_fp32.exception is None, in_fp32.exception
    fp32 = fp32_state(model)
    chosen = PRECISIONS.get(precision)
    if budget:
        of_fp32 = fp32_calls.outputs[0]
        observer = budget_observer(of_fp32, autocast=chosen.kind == "autocast", limit=budget_limit)
        options = options._replace(observers=(observer, *options.observers))
    with prepared(model, chosen, CPU, keep_fp32=keep_fp32) as ready, withholding(without_kernel):
        snapshot = Snapshot(model)
        tolerance = chosen.tolerance
        calls = PlainCalls(ready, args, kwargs, seed=0, tolerance=tolerance, references=fp32_calls.outputs)
        plain = calls.run(begun(precision), seconds=60.0).run
        snapshot.restore()
        plain_output = calls.outputs[0] if calls.outputs else None
        found = run_instrumented(begun(precision), ready, args, kwargs, fp32, options, plain_output)
    assert not found.faults, found.faults
    return plain, found.run


def gap_ops(found: Run) -> set[str]:
    """Names of the ops with gaps."""
    return {gap.op for gap in found.gaps}
