"""Loads what the user names in this process, so that worker processes can share it."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_module import separate_imports
from lowprec_check.engine.model.weights import scale_weights
from lowprec_check.engine.run.isolation import best_isolation, threads_end
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.process import Isolation
from lowprec_check.process.interpreter import change_folder, current_folder

# Makes `torch.cuda.is_available()` in a user's file work without initializing CUDA, which does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class TargetSpec(NamedTuple):
    """How the user names a target."""

    name: str
    """``mymodel.py``, ``package.module:attr``, ``torchvision:resnet50``, …"""
    inputs: tuple[str, ...] = ()
    """Shapes that replace the inputs of the target."""
    weights: Path | None = None
    """File with a state dict."""
    scale_weights: bool = False
    """Whether to scale random weights of layers whose output vanishes or explodes."""

    def load(self, seed: int) -> Target:
        """Load after seeding, so that a file with random weights gets the same ones in every worker and scan."""
        seed_everything(seed)
        target = load_target(self.name, self.inputs, str(self.weights) if self.weights is not None else None)
        return scale_weights(target, seed) if self.scale_weights else target


def load_here(spec: TargetSpec, seed: int) -> TargetSource:
    """Load ``spec`` in this process; the source knows how its runs are isolated best.

    A file that starts threads or sets their number is loaded again in fresh interpreters: threads are not forked.
    """
    running, threads, folder = threading.enumerate(), torch.get_num_threads(), current_folder()
    torch.set_num_threads(1)  # a process that forks must not have a pool of threads
    try:
        with separate_imports() as imports:
            target = spec.load(seed)
        forks_safely = torch.get_num_threads() == 1 and threads_end(known=running)
    finally:
        torch.set_num_threads(threads)
    isolation = best_isolation(can_spawn=True)
    best: Isolation = "spawn" if isolation == "fork" and not forks_safely else isolation
    return TargetSource(target, functools.partial(_load_in, folder, spec, seed), imports, best)


def _load_in(folder: str | None, spec: TargetSpec, seed: int) -> Target:
    """Load ``spec`` in the folder of the command: its file may have changed the current one, which new processes inherit."""
    change_folder(folder)
    return spec.load(seed)
