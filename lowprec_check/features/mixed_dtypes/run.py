"""Where dtypes meet for which ops fail: in a run, with a cast that helps; in the model as given."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import msgspec
import torch

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.messages import Receive, Send, TaskAnswer, faults_sent
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.streamed_weights import stream_of
from lowprec_check.engine.model.target import Target
from lowprec_check.features.mixed_dtypes.casts_tried import Casting, DtypeOrigins, try_casts
from lowprec_check.schema.findings import ModelAsGiven
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.torchkit.floating_dtypes import torch_dtype
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import ModuleStack


def floating_dtypes(target: Target) -> set[torch.dtype]:
    """Those of the parameters and of the inputs."""
    tensors = [*target.model.parameters(), *(tensor for _, tensor in leaves(target.inputs))]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def called_as_given(ready: Prepared, target: Target, seed: int) -> ModelAsGiven:
    """What one call of the model gives, without autocast; the op at which dtypes meet, if any."""
    # The modules that own parameters of each dtype, with ``*`` for numbers; each once.
    modules: dict[str, dict[str, None]] = {}
    for name, parameter in target.model.named_parameters():
        if parameter.is_floating_point():
            owner = re.sub(r"\b\d+\b", "*", name.rpartition(".")[0])
            modules.setdefault(str(parameter.dtype)[6:], {})[owner] = None
    dtypes = {dtype: list(names) for dtype, names in modules.items()}
    without_autocast = ready._replace(enters_context=True)
    with ModuleStack(ready.model) as stack:
        inputs = ready.inputs(target.args, target.kwargs)
        mode = Casting(stack, DtypeOrigins(ready.model, inputs), torch.float16, "narrow", [], raises=True)
        _, error = call_under(mode, without_autocast, *inputs, seed)
    if error is None:
        return ModelAsGiven(dtypes=dtypes)
    mixed = next(iter(mode.calls.values()), None)
    return ModelAsGiven(dtypes=dtypes, exception=describe_error(error, ready.model), mixed=mixed)


class MixedDtypesTrials(Feature):
    """A run again, with casts where dtypes meet."""

    place = 6

    def after_explanation(self, explained: Explained) -> None:
        """Try them in an eager run that fails in its forward pass."""
        task, target, report = explained.task, explained.target, explained.report
        run = report.run
        if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.status != "error":
            return
        if not any(gap.kind == "dtype-mismatch" for gap in run.gaps):
            return
        saved = Fp32Outputs.load(task.files, target)
        if saved.probe is not None:
            return
        with prepared_for(task, target) as ready:
            tried = try_casts(
                in_eager_mode(ready, target),
                target.args,
                target.kwargs,
                run.gaps,
                torch_dtype(PRECISIONS.get(task.precision).format),
                saved.outputs[0],
                tolerance=task.tolerance or 0.0,
                seed=task.seed,
                slow=run.emulated,
            )
        report.add(mixed_dtypes=tried)

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """Call a model with several floating dtypes as it is given, which no run does."""
        runs, target = batches[0], batches[0].target
        is_measured = runs.mode.is_forward and runs.mode.evidence == "measured" and stream_of(target.model) is None
        if not is_measured or len(floating_dtypes(target)) < 2:
            return None
        task = runs.reference_task().as_task(AsGivenTask, precision="autocast-bf16", budget=runs.reference_budget)
        outcome = runs.launcher.do(task)
        if not outcome.answers:
            return None
        return msgspec.structs.replace(result, as_given=outcome.answers[-1].read(ModelAsGiven))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsGivenTask(ModelTask):
    """Call the model as its user gives it; its precision is one that leaves it as it is."""

    @property
    def progress(self) -> tuple[str, str]:
        """It is about no run of its own."""
        return "the model as given", "calling it"

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Send what it raised, if it did."""
        with faults_sent("calling the model as given", send), prepared_for(self, target) as ready:
            send(TaskAnswer.of(called_as_given(in_eager_mode(ready, target), target, self.seed)))


MIXED_DTYPES = MixedDtypesTrials()
