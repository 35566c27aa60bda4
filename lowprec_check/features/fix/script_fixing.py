"""The search for a patch of a training script: runs its steps with changes, without, in fp32."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowprec_check.core.machine import version
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError
from lowprec_check.features.fix.chosen import change_of, shown_path
from lowprec_check.features.fix.fix_sites import OwnFiles, Sites
from lowprec_check.features.fix.scene import Site, SourceFix, compose
from lowprec_check.features.fix.script_fixes import Fault, faults
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import SourceText, edited, unified_diff
from lowprec_check.features.fix.source_trial import ScriptTrial, try_source
from lowprec_check.process import Isolation, system
from lowprec_check.schema.fixing import Fixing, LeftAlone, ScriptProof
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.options import FixOptions, ScanOptions
from lowprec_check.schema.precisions import BF16, FP16
from lowprec_check.schema.statements import counted, say

STEPS = 8  # that are run by default
NEARER = 0.5  # part of the distance from fp32's weights (1: weights that do not move) that a patch may leave
SECONDS = 600.0  # for the steps of a script
Change = tuple[SourceText, SourceFix]


def _faulty(facts: ScriptFacts) -> bool:
    """Whether the script's own calls of ``GradScaler`` are wrong, whatever its weights are."""
    return any(not use.is_harmless for use in facts.amp)


def fix_script(
    spec: TargetSpec, options: FixOptions, isolation: Isolation | None = None, on_progress: OnProgress | None = None
) -> tuple[Fixing, dict[SourceText, str]]:
    """Run a script's steps and search for a patch: what was found, and the texts with it."""
    if not spec.name.endswith(".py"):
        raise UsageError(
            f"{spec.name} is not a training script.", "Give the path of one: lowprec-check fix train.py --train."
        )
    if isolation == "none":
        raise UsageError("Each change is tried in a process of its own.", "Leave --isolation none out.")
    changes, fixing = _Search(spec, options, isolation, on_progress).found()
    return fixing, _texts(changes)


def _texts(changes: Sequence[Change]) -> dict[SourceText, str]:
    by_source: dict[SourceText, list[SourceFix]] = {}
    for source, fix in changes:
        by_source.setdefault(source, []).append(fix)
    return {source: edited(source.text, compose(source, fixes)) for source, fixes in by_source.items()}


@dataclass
class _Search:
    spec: TargetSpec
    options: FixOptions
    isolation: Isolation | None
    on_progress: OnProgress | None
    trials: int = 0

    def __post_init__(self) -> None:
        self.started, self.files = system.monotonic(), OwnFiles(self.spec.name)

    def found(self) -> tuple[list[Change], Fixing]:
        """The changes that bring the weights nearer to those in fp32, and what is told of them."""
        before = self._tried([])

        # What cannot be compared, or is the user's to fix.
        if before is not None and before.problem:
            fewer = None
            if before.steps:
                fewer = f"Add --steps {before.steps}."
            raise UsageError(f"The steps of {self.spec.name} cannot be compared: {before.problem}.", fewer)
        if before is None or not before.steps:
            parts = "If it defines its parts, scan them: lowprec-check scan --train."
            raise UsageError(f"{self.spec.name} makes no steps of training itself.", parts)
        if before.low_weights:
            eps = ", in which eps of its optimizer is zero" if before.zero_eps else ""
            ways = "Keep the weights in fp32, under autocast; lowprec-check scan --train compares the ways to train."
            raise UsageError(f"{self.spec.name} trains weights in {before.low_weights[0]}{eps}.", ways)
        if not before.fp32:
            seed = "Seed all that it draws: torch.manual_seed(0)."
            raise UsageError(f"Two runs of {self.spec.name} in fp32 differ, so no change can be judged.", seed)

        # Changes that are known for what fails, if they help.
        wrong = list(faults(before, self._located))
        tolerance = self.options.tolerance
        if tolerance is None:
            tolerance = (FP16 if "float16" in before.autocast else BF16).tolerance
        reasons = [(fault, fault.found) for fault in wrong if isinstance(fault.found, str)]
        if before.distance is not None and before.distance <= tolerance and not _faulty(before):
            near = f"not changed: within the tolerance of {tolerance:g}, these steps do as well without"
            return [], self._fixing([], before, before, [(fault, near) for fault in wrong], tolerance)
        changes, after = self._changes(wrong), before
        if changes:
            changes, after, why = self._best(changes, before, tolerance)
            reasons += [(fault, why) for fault in wrong if why and not isinstance(fault.found, str)]
        return changes, self._fixing(changes, before, after, reasons, tolerance)

    def _best(
        self, changes: list[Change], before: ScriptFacts, tolerance: float
    ) -> tuple[list[Change], ScriptFacts, str]:
        """The changes and their trial, from a scale that skips no step; or none, and why not."""
        after = self._tried(changes)
        if after is not None and after.skipped and after.scale is not None and before.scale is None:
            again = self._changes(faults(before, self._located, after.scale))
            tried = self._tried(again)
            if tried is not None and tried.skipped < after.skipped:
                changes, after = again, tried
        change, why = "the change that is known for it", ""
        if after is None:
            return [], before, f"with {change}, the script fails"
        if after.problem:
            return [], before, f"with {change}, {after.problem}"
        # Gradients that are clipped once per update differ from those clipped after each batch
        is_moved = any(fix.kind == "unscale_once" for _, fix in changes)
        is_right = _faulty(before) and after.distance is not None and after.distance <= tolerance
        if after.fp32 != before.fp32 and not is_moved:
            why = f"{change} changes the weights in fp32"
        elif any(faults(after, lambda *_: "")) or _faulty(after):
            why = f"{change} is not enough"
        elif not is_right and (after.distance is None or after.distance > NEARER * min(1.0, before.distance or 1.0)):
            words = "with {change:text}, the distance from fp32's weights is {after:error} instead of {before:error}"
            why = say(words, change=change, after=after.distance, before=before.distance).text
        if why:
            return [], before, why
        return changes, after, ""

    @staticmethod
    def _changes(wrong: Iterable[Fault]) -> list[Change]:
        return [fault.found for fault in wrong if not isinstance(fault.found, str)]

    def _located(self, place: ScriptPlace, name: str) -> tuple[SourceText, ast.AST] | str:
        row = OpCall(name, source=place.source, caller=place.caller, span=place.span)
        return Sites(self.files, {}, "cpu").located(row)

    def _tried(self, changes: Sequence[Change]) -> ScriptFacts | None:
        """What the steps do with ``changes``; ``None``, or without any an error, if they fail."""
        self.trials += 1
        if self.on_progress is not None:
            self.on_progress("fix", f"trial {self.trials}: {counted(len(changes), 'change')}")
        texts = tuple((str(source.path), text) for source, text in _texts(changes).items())
        path, steps = os.path.abspath(self.spec.name), self.options.steps or STEPS
        trial = ScriptTrial(path=path, arguments=self.spec.arguments, steps=steps, twice=not changes)
        options = ScanOptions(seed=self.options.seed)
        try:
            return try_source(self.spec._replace(sources=texts), options, self.isolation, trial, SECONDS).script
        except (UsageError, ProcessLostError):
            if not changes:
                raise
            return None

    def _fixing(
        self,
        changes: Sequence[Change],
        before: ScriptFacts,
        after: ScriptFacts,
        left: Sequence[tuple[Fault, str]],
        tolerance: float,
    ) -> Fixing:
        texts = _texts(changes)
        return Fixing(
            tool=f"lowprec-check {version()}",
            target=self.spec.name,
            device=before.device,
            due=bool(changes),
            passes=after.distance is not None and after.distance <= tolerance,
            changes=[change_of(Site(source, fix.anchor, ""), fix) for source, fix in changes],
            diff="".join(unified_diff(source.text, text, shown_path(source.path)) for source, text in texts.items()),
            outputs_equal=after.fp32 == before.fp32,
            left_alone=[
                LeftAlone(source=fault.place.caller or fault.place.source, op=fault.op, reason=why)
                for fault, why in left
            ],
            trials=self.trials,
            seconds=round(system.monotonic() - self.started, 2),
            script=ScriptProof(
                steps=before.steps,
                before=before.distance,
                failure=before.failure,
                after=after.distance,
                tolerance=tolerance,
                skipped=after.skipped,
            ),
        )
