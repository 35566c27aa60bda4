"""A run in this process, without the worker: for tests that make many."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowprec_check.engine.model.plain_run import PlainResult, run_plain
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.trace.instrumented import Instrumented
from lowprec_check.engine.trace.withheld_kernels import withholding
from lowprec_check.schema.precisions import PRECISIONS

CPU = torch.device("cpu")
DEFAULT = Options()
LOW = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")


def run(
    model: nn.Module,
    args: tuple[Any, ...],
    precision: str,
    *,
    options: Options = DEFAULT,
    without_kernel: tuple[str, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> tuple[PlainResult, Instrumented]:
    """Both parts of one run; the instruments must not have failed."""
    kwargs = kwargs or {}
    with prepared(model, PRECISIONS.get("fp32"), CPU) as ready:
        in_fp32, reference = run_plain(ready, args, kwargs, seed=0)
    assert reference is not None, in_fp32.exception
    fp32 = fp32_state(model)
    chosen = PRECISIONS.get(precision)
    with prepared(model, chosen, CPU) as ready, withholding(without_kernel):
        snapshot = Snapshot(model)
        tolerance = chosen.tolerance
        plain, outputs = run_plain(ready, args, kwargs, seed=0, tolerance=tolerance, reference=reference)
        snapshot.restore()
        found = run_instrumented(ready, args, kwargs, fp32, options, outputs)
    assert not found.faults, found.faults
    return plain, found


def gap_ops(found: Instrumented) -> set[str]:
    """Names of the ops with gaps."""
    return {gap.op for gap in found.gaps}
