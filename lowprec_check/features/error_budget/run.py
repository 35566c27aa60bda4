"""Adds to a run where the error of its output comes from, and measures the largest shares."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.observers import MakeObserver
from lowprec_check.features.error_budget.measured_shares import measure_shares
from lowprec_check.features.error_budget.observer import BudgetObserver
from lowprec_check.torchkit.devices import MemoryLimit, free_memory


class Budget(Feature):
    """The error budget of each run."""

    place = 20

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """If it is asked for; it needs both errors of each op."""
        if not task.budget_error or allowed.errors != "both":
            return None
        half = MemoryLimit.half_of(free_memory(torch.device(task.device)))
        limit = min(half, allowed.room or half, key=lambda limit: limit.size)
        saved = Fp32Outputs.load(task.files)
        fp32: Sequence[Tensor] = saved.outputs[0]
        if saved.probe is not None:
            fp32 = saved.probe.tensors
        return functools.partial(BudgetObserver, limit=limit, fp32=fp32, autocast=task.uses_autocast, seed=task.seed)

    def after_explanation(self, explained: Explained) -> None:
        """Measure the shares of modules by keeping one in fp32 at a time."""
        measure_shares(explained)


BUDGET = Budget()
