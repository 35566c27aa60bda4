"""What a script's training step is, without a scan of it: what a scan would train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowprec_check.core.session import Session
from lowprec_check.engine.model.target_spec import LOAD_SECONDS, OnProgress, TargetSpec
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.base import Struct
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scanned_model import IN_TRAINING_MODE

if TYPE_CHECKING:
    from lowprec_check.engine.model.target_source import TargetSource


class Observed(Struct, frozen=True):
    """The step, in lines to be printed."""

    lines: list[str]


def observe_file(
    spec: TargetSpec, options: ScanOptions, isolation: Isolation | None, on_progress: OnProgress | None
) -> Observed:
    """Load the script of ``spec`` and observe its step; raises as a scan does."""
    session = Session(spec, options, isolation, options.budget or LOAD_SECONDS, on_progress)
    (observed,) = session.grow(_observed, Observed)
    return observed


def _observed(source: TargetSource, _isolation: Isolation | None, _options: ScanOptions) -> Iterator[Observed]:
    from lowprec_check.engine.model.inputs import describe_inputs
    from lowprec_check.engine.model.observed_training import ScriptStep
    from lowprec_check.engine.model.training import describe_optimizer, make_optimizer

    target = source.target
    observed = target.observed
    if observed is None:
        raise UsageError(f"{target.name} makes no training step.", "Leave out --observe to scan how its model trains.")
    model, batch = observed.model, observed.batches[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = [type(part).__name__ for part in model.children()] if isinstance(model, ScriptStep) else []
    plan = model.start(batch.args) if isinstance(model, ScriptStep) else ()
    made = ", ".join(line for line in observed.optimizers if line)
    lines = [
        f"step       {observed.line}{observed.framework and f', by {observed.framework}'}",
        f"model      {', '.join(names) or type(model).__name__}, "
        f"{sum(parameter.numel() for parameter in trained):,} trained parameters",
        f"optimizer  {describe_optimizer(make_optimizer(observed.optimizer, trained))}{made and f', made at {made}'}",
        f"loss       {observed.loss.words}",
        f"batch      {', '.join(describe_inputs((*batch.args, *batch.targets), batch.kwargs))}",
    ]
    if len(plan) > 1:
        lines.append(f"passes     {len(plan)} backward passes a step")
    said = (IN_TRAINING_MODE, f"the training step is that of the script, observed at {observed.line}")
    lines += [f"note       {note}" for note in target.notes if note not in said]
    yield Observed(lines)
