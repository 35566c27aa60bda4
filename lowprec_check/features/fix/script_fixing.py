"""The search for a patch of a training script: runs its steps with changes, without, in fp32."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from lowprec_check.catalog.versions import own_version
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError, first_line, message_of
from lowprec_check.features.fix.fix_sites import OwnFiles, Sites
from lowprec_check.features.fix.fixing import change_of, shown_path
from lowprec_check.features.fix.scene import Site, SourceFix, compose
from lowprec_check.features.fix.script_fixes import Fault, faults
from lowprec_check.features.fix.script_precision import DEFAULT, FAILS, Adoption, Change, TriedScript, limit_of
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import SourceText, edited, unified_diff
from lowprec_check.features.fix.source_trial import ScriptTrial, fails_again, try_script
from lowprec_check.process import Isolation, system
from lowprec_check.schema.fixing import Fixing, LeftAlone, ScriptProof
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.options import FixOptions, ScanOptions
from lowprec_check.schema.precisions import BF16, FP16
from lowprec_check.schema.statements import counted, say
from lowprec_check.schema.training import STALLED

STEPS = 8  # that are run by default
NEARER = 0.5  # part of the distance from fp32's weights (1: weights that do not move) that a patch may leave
SECONDS = 600.0  # for the steps of a script


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
        self._fp32, self._is_repeated = "", False

    def found(self) -> tuple[list[Change], Fixing]:
        """The changes that bring the weights nearer to those in fp32, and what is told of them."""
        before = self._tried([]).facts or ScriptFacts(steps=0)

        # What stops the script, so that its steps cannot be compared without a change.
        if before.failure and not before.steps:
            return self._running_again(before)

        wrong = list(faults(before, self._located))
        self._check(before)

        # Changes that are known for what fails, if they help.
        tolerance = self.options.tolerance
        if tolerance is None:
            tolerance = (FP16 if "float16" in before.autocast else BF16).tolerance
        if Adoption.is_due(before) and not wrong:
            return self._in_low_precision(before, tolerance)
        # Without a fault, it may be as far as another run in fp32, if its weights move
        if not wrong and self.options.tolerance is None and (before.moved or 0.0) >= STALLED:
            tolerance = limit_of(before, tolerance)
        reasons = list[tuple[Fault, str]]()
        if before.distance is not None and before.distance <= tolerance and not _faulty(before):
            near = f"not changed: within the tolerance of {tolerance:g}, these steps do as well without"
            reasons = [(fault, near) for fault in wrong if not fault.is_harmless]
            wrong = [fault for fault in wrong if fault.is_harmless]
        elif any(not fault.is_harmless for fault in wrong):
            wrong = [fault for fault in wrong if not fault.is_harmless]
        reasons += [(fault, fault.found) for fault in wrong if isinstance(fault.found, str)]
        changes, after = self._changes(wrong), before
        if changes:
            changes, after, why = self._best(changes, wrong, before, tolerance)
            reasons += [(fault, why) for fault in wrong if why and not isinstance(fault.found, str)]
        return changes, self._fixing(changes, before, after, reasons, tolerance)

    def _check(self, before: ScriptFacts) -> None:
        """Raise :class:`UsageError` if steps cannot be compared, or have what the user must fix."""
        if before.problem:
            fewer = None
            if before.steps:
                fewer = f"Add --steps {before.steps}."
            raise UsageError(f"The steps of {self.spec.name} cannot be compared: {before.problem}.", fewer)
        if not before.steps:
            parts = "If it defines its parts, scan them: lowprec-check scan --train."
            raise UsageError(f"{self.spec.name} makes no steps of training itself.", parts)
        if before.low_weights and not any(use.fault == "unscaled-fp16" for use in before.amp):
            eps = ", in which eps of its optimizer is zero" if before.zero_eps else ""
            ways = "Keep the weights in fp32, under autocast; lowprec-check scan --train compares the ways to train."
            raise UsageError(f"{self.spec.name} trains weights in {before.low_weights[0]}{eps}.", ways)
        if not before.fp32:
            raise self._differs()

    def _differs(self) -> UsageError:
        seed = "Seed all that it draws, as by torch.manual_seed(0), and read nothing that an earlier run has written."
        return UsageError(f"Two runs of {self.spec.name} in fp32 differ, so no change can be judged.", seed)

    def _running_again(self, before: ScriptFacts) -> tuple[list[Change], Fixing]:
        """The changes with which a script makes its steps that fails without, if it trains well."""
        wrong = list(faults(before, self._located))
        tolerance = self.options.tolerance or BF16.tolerance
        changes = self._changes(wrong)
        reasons = [(fault, fault.found) for fault in wrong if isinstance(fault.found, str)]
        trial = self._tried(changes) if changes else TriedScript(None, "")
        after, why = trial.facts, trial.failure
        if after is not None:
            is_right = after.distance is not None and after.distance <= tolerance and not _faulty(after)
            why = after.problem or ("" if is_right else "the change that is known for it is not enough")
        if after is None or why:
            reasons += [(fault, why) for fault in wrong if not isinstance(fault.found, str)]
            return [], self._fixing([], before, before, reasons, tolerance)
        fixing = self._fixing(changes, msgspec.structs.replace(before, steps=after.steps), after, reasons, tolerance)
        return changes, msgspec.structs.replace(fixing, outputs_equal=None)

    def _in_low_precision(self, before: ScriptFacts, tolerance: float) -> tuple[list[Change], Fixing]:
        """How a script that trains in fp32 trains under autocast."""
        adoption = Adoption(before, self._tried, self._located, self.options.tolerance)
        names = tuple(self.options.precisions or DEFAULT)
        adopted = adoption.found(names, self.spec.arguments, self.files.find(self.spec.name))
        left = [LeftAlone(source=None, op=words, reason=why) for words, why in adoption.left]
        if adopted is None:
            return [], msgspec.structs.replace(self._fixing([], before, before, [], tolerance), left_alone=left)
        fixing = self._fixing(adopted.changes, before, adopted.facts, [], adopted.limit)
        assert fixing.script is not None
        script = msgspec.structs.replace(
            fixing.script,
            precision=adopted.precision.name,
            command=adopted.command,
            losses=adopted.facts.losses_apart,
        )
        return adopted.changes, msgspec.structs.replace(fixing, script=script, passes=True, left_alone=left)

    def _best(
        self, changes: list[Change], wrong: Sequence[Fault], before: ScriptFacts, tolerance: float
    ) -> tuple[list[Change], ScriptFacts, str]:
        """The changes for what is ``wrong`` and their trial, from a scale that skips no step; or
        none, and why not.
        """
        after = self._tried(changes).facts
        # Steps that are skipped lower the scale: start from where it ends
        if after is not None and after.skipped and after.scale is not None and before.scale is None:
            again = self._changes(
                fault for fault in faults(before, self._located, after.scale) if not fault.is_harmless
            )
            tried = self._tried(again).facts
            if tried is not None and tried.skipped < after.skipped:
                changes, after = again, tried
        change, why = "the change that is known for it", ""
        if after is None:
            return [], before, f"with {change}, the script fails"
        if after.problem:
            return [], before, f"with {change}, {after.problem}"
        # Gradients that are clipped once per update differ from those clipped after each batch, and
        # weights in fp32 from those in 16 bits
        is_other = any(fix.kind in ("unscale_once", "fp32_weights", "loss_fp32") for _, fix in changes)
        is_right = after.distance is not None and after.distance <= tolerance
        is_right &= _faulty(before) or (before.distance is not None and before.distance <= tolerance)
        is_harmless = all(fault.is_harmless for fault in wrong)
        left = [fault for fault in faults(after, lambda *_: "") if is_harmless or not fault.is_harmless]
        unfit = [fault for fault in wrong if is_harmless and isinstance(fault.found, str)]
        if after.fp32 != before.fp32 and not is_other:
            why = f"{change} changes the weights in fp32"
        elif len(left) > len(unfit) or _faulty(after):
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
        line = place.source
        # Reports name a file of another folder without that
        if line is not None and place.file and place.caller is None:
            line = f"{place.file}:{line.rpartition(':')[2]}"
        row = OpCall(name, source=line, caller=place.caller, span=place.span)
        return Sites(self.files, {}, "cpu").located(row)

    def _tried(self, changes: Sequence[Change], arguments: Sequence[str] | None = None) -> TriedScript:
        """What the steps do with ``changes`` or other ``arguments``; without both, raises if they
        fail.
        """
        self.trials += 1
        if self.on_progress is not None:
            self.on_progress("fix", f"trial {self.trials}: {counted(len(changes), 'change')}")
        try:
            texts = tuple((str(source.path), text) for source, text in _texts(changes).items())
        except ValueError as error:  # two changes of one expression
            return TriedScript(None, message_of(error))
        path, steps = os.path.abspath(self.spec.name), self.options.steps or STEPS
        # Without a change, an exception is the script's own
        is_first = not changes and arguments is None
        given = self.spec.arguments if arguments is None else tuple(arguments)
        trial = ScriptTrial(path=path, arguments=given, steps=steps, twice=is_first)
        options = ScanOptions(seed=self.options.seed)
        facts, failure = None, ""
        try:
            spec = self.spec._replace(sources=texts, arguments=given)
            facts = try_script(spec, options, self.isolation, trial, SECONDS)
        except (UsageError, ProcessLostError) as error:
            if is_first:
                raise
            failure = first_line(message_of(error))
        if is_first and facts is not None:
            self._fp32 = facts.fp32
        elif self._fp32 and not self._is_repeated and (facts is None or facts.fp32 != self._fp32):
            # Forks of one process had the same start; perhaps another process has another
            self._is_repeated = True
            again = self._tried([], self.spec.arguments)
            if again.facts is None:
                raise fails_again(again.failure.removeprefix(f"{FAILS}: "))
            if again.facts.fp32 != self._fp32:
                raise self._differs()
        return TriedScript(facts, failure and f"{FAILS}: {failure}")

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
            tool=f"lowprec-check {own_version()}",
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
                runs_again=before.runs_again,
            ),
        )
