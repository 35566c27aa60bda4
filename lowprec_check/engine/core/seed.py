"""Seed every random number generator that a model may use."""

from __future__ import annotations

import random
import sys

import torch

from lowprec_check.engine.core.accelerators import initialized


def seed_everything(seed: int) -> None:
    """Seed torch (the CPU and all initialized accelerators), ``random``, and NumPy if it is loaded.

    ``torch.manual_seed`` is avoided: its first call imports ``torch._dynamo``, which takes a second in each worker.
    """
    torch.default_generator.manual_seed(seed)
    for module in initialized():
        module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
