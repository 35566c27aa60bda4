"""Load a target in this process, so that worker processes can share it, then scan or plan. Used by the command line."""

from __future__ import annotations

import functools
import os

import torch

from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.plan.planner import PlanOptions, plan_target
from lowprec_check.engine.run.isolation import Isolation, best_isolation
from lowprec_check.engine.run.job_worker import Load
from lowprec_check.engine.run.target_runs import OnProgress
from lowprec_check.engine.scan import ScanOptions, scan_target
from lowprec_check.schema.plan import Planning
from lowprec_check.schema.scan_result import ScanResult

# Makes `torch.cuda.is_available()` in a user's file work without initializing CUDA, which does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def load_seeded(spec: str, inputs: tuple[str, ...], seed: int) -> Target:
    """Load after seeding, so that a file with random weights gets the same ones in every worker and scan."""
    seed_everything(seed)
    return load_target(spec, inputs)


def load_and_scan(
    spec: str, inputs: tuple[str, ...], options: ScanOptions, on_progress: OnProgress | None = None
) -> ScanResult:
    """Load ``spec`` and scan it."""
    options.check()
    return scan_target(*_load(spec, inputs, options.seed), options, spec=spec, on_progress=on_progress)


def load_and_plan(
    spec: str, inputs: tuple[str, ...], options: PlanOptions, on_progress: OnProgress | None = None
) -> Planning:
    """Load ``spec`` and find its plan."""
    return plan_target(*_load(spec, inputs, options.seed), options, spec=spec, on_progress=on_progress)


def _load(spec: str, inputs: tuple[str, ...], seed: int) -> tuple[Target, Load, Isolation]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that forks must not have a pool of threads
    try:
        target = load_seeded(spec, inputs, seed)
    finally:
        torch.set_num_threads(threads)
    isolation = best_isolation(can_spawn=True)
    load = functools.partial(load_seeded, spec, inputs, seed) if isolation == "spawn" else lambda: target
    return target, load, isolation
