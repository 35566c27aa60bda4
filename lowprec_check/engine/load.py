"""Load a target in this process, so that worker processes can share it, then scan or plan. Used by the command line."""

from __future__ import annotations

import functools
import os

import torch

from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_imports import separate_imports
from lowprec_check.engine.plan.planner import PlanOptions, plan_target
from lowprec_check.engine.run.isolation import best_isolation, check_isolation, other_threads
from lowprec_check.engine.run.launcher import OnProgress
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.scan import ScanOptions, scan_target
from lowprec_check.process import Isolation
from lowprec_check.schema.plan import Planning
from lowprec_check.schema.scan_result import ScanResult

# Makes `torch.cuda.is_available()` in a user's file work without initializing CUDA, which does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def load_seeded(spec: str, inputs: tuple[str, ...], seed: int) -> Target:
    """Load after seeding, so that a file with random weights gets the same ones in every worker and scan."""
    seed_everything(seed)
    return load_target(spec, inputs)


def load_and_scan(
    spec: str,
    inputs: tuple[str, ...],
    options: ScanOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """Load ``spec`` and scan it."""
    options.check()
    check_isolation(isolation)
    source, found = load_here(spec, inputs, options.seed)
    return scan_target(source, isolation or found, options, spec=spec, on_progress=on_progress)


def load_and_plan(
    spec: str,
    inputs: tuple[str, ...],
    options: PlanOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
) -> Planning:
    """Load ``spec`` and find its plan."""
    check_isolation(isolation)
    source, found = load_here(spec, inputs, options.seed)
    return plan_target(source, isolation or found, options, spec=spec, on_progress=on_progress)


def load_here(spec: str, inputs: tuple[str, ...], seed: int) -> tuple[TargetSource, Isolation]:
    """Load ``spec`` in this process, and return how its runs are isolated.

    A file that starts threads or sets their number is loaded again in fresh interpreters: threads are not forked.
    """
    running, threads = set(other_threads()), torch.get_num_threads()
    torch.set_num_threads(1)  # a process that forks must not have a pool of threads
    try:
        with separate_imports() as imports:
            target = load_seeded(spec, inputs, seed)
        forks_safely = torch.get_num_threads() == 1 and running.issuperset(other_threads())
    finally:
        torch.set_num_threads(threads)
    source = TargetSource(target, functools.partial(load_seeded, spec, inputs, seed), imports)
    isolation = best_isolation(can_spawn=True)
    return source, "spawn" if isolation == "fork" and not forks_safely else isolation
