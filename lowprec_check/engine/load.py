"""What the command line does first: load a target in this process so that workers can share it, then scan or plan."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.precision import seed_everything
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.plan.planner import plan_target
from lowprec_check.engine.run.isolation import Isolation, best_isolation
from lowprec_check.engine.run.job_worker import Load
from lowprec_check.engine.scan import scan_target
from lowprec_check.schema.plan import Planning
from lowprec_check.schema.scan_result import ScanResult

# Lets `torch.cuda.is_available()` in a user's file answer without waking the driver, which no fork survives.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def load_seeded(spec: str, inputs: tuple[str, ...], seed: int) -> Target:
    """Load with seeded random numbers: a file that draws its weights draws the same in every worker and scan."""
    seed_everything(seed)
    return load_target(spec, inputs)


def load_and_scan(spec: str, inputs: tuple[str, ...] = (), *, seed: int = 0, **options: Any) -> ScanResult:
    """Load ``spec`` and scan it; options as :func:`lowprec_check.engine.scan.scan_target` takes them."""
    return scan_target(*_load(spec, inputs, seed), spec=spec, seed=seed, **options)


def load_and_plan(spec: str, inputs: tuple[str, ...] = (), *, seed: int = 0, **options: Any) -> Planning:
    """Load ``spec`` and find its plan; options as :func:`lowprec_check.engine.plan.planner.plan_target` takes them."""
    return plan_target(*_load(spec, inputs, seed), spec=spec, seed=seed, **options)


def _load(spec: str, inputs: tuple[str, ...], seed: int) -> tuple[Target, Load, Isolation]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no pool of threads in the process that forks
    try:
        target = load_seeded(spec, inputs, seed)
    finally:
        torch.set_num_threads(threads)
    isolation = best_isolation(can_spawn=True)
    load = functools.partial(load_seeded, spec, inputs, seed) if isolation == "spawn" else lambda: target
    return target, load, isolation
