"""Adds to a scan the predicted errors of formats that are not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.messages import Receive, Send, TaskAnswer, faults_sent
from lowprec_check.core.preparation import in_eager_mode, kernels_of, prepared_for
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.target import Target
from lowprec_check.features.what_if.prediction import predict
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.what_if import WhatIf


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIfTask(ModelTask):
    """Predict the output errors of formats that are not run."""

    formats: tuple[str, ...]

    @property
    def progress(self) -> tuple[str, str]:
        """It is about no run of its own."""
        return "what if", "predicting output errors"

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Send the errors, from one instrumented fp32 run."""
        with faults_sent("predicting", send), prepared_for(self, target) as ready, kernels_of(self):
            eager, breadcrumb = in_eager_mode(ready, target), Breadcrumb(self.files.breadcrumb)
            entries = predict(eager, target.args, target.kwargs, self.formats, seed=self.seed, breadcrumb=breadcrumb)
            send(TaskAnswer.of(entries))


class WhatIfFeature(Feature):
    """Errors of formats that are not run."""

    place = 20

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """Predict the output error that each format would cause."""
        if not options.what_if:
            return None
        runs = batches[0]
        budget, formats = runs.reference_budget, tuple(options.what_if)
        outcome = runs.launcher.do(runs.reference_task().as_task(WhatIfTask, formats=formats, budget=budget))
        if outcome.answers:
            entries = outcome.answers[-1].read(list[WhatIf])
        else:
            why = outcome.why_incomplete(budget) or "; ".join(outcome.faults)
            entries = [WhatIf(format=name, note=why) for name in formats]
        return msgspec.structs.replace(result, what_if=entries)


WHAT_IF = WhatIfFeature()
