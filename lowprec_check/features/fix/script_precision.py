"""Lets a script that trains in fp32 train under autocast: by its own switch, or in its own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.engine.model.observed_training import SAME_LOSS
from lowprec_check.features.fix.scene import SourceFix
from lowprec_check.features.fix.script_autocast import Widened, autocast_changes
from lowprec_check.features.fix.script_calls import Locate
from lowprec_check.features.fix.script_fixes import faults, scaled
from lowprec_check.features.fix.script_switches import switches
from lowprec_check.features.fix.seen_values import ScriptFacts
from lowprec_check.features.fix.source_text import SourceText
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.statements import say
from lowprec_check.schema.training import BEYOND, STALLED
from lowprec_check.torchkit.floating_dtypes import torch_dtype

Change = tuple[SourceText, SourceFix]

FAILS = "the script fails"

DEFAULT = ("autocast-bf16", "autocast-fp16")
"""What is tried, in this order, unless a precision is asked for."""


def limit_of(facts: ScriptFacts, tolerance: float) -> float:
    """How far weights may end from those in fp32, as in a scan of training: twice as far as those
    of another run in fp32, or the ``tolerance`` of the precision.
    """
    return max(tolerance, BEYOND * facts.spread)


class TriedScript(NamedTuple):
    """What the steps of the script did with a change."""

    facts: ScriptFacts | None
    """``None`` if it fails."""
    failure: str


class Adopted(NamedTuple):
    """How the script trains in low precision."""

    precision: Precision
    changes: list[Change]
    facts: ScriptFacts
    limit: float
    """The largest distance of the weights that passes."""
    command: str = ""
    """What to add to its command line, or to change there; empty if its source is changed."""


class Adoption:
    """The search for a change with which a script ``before`` it trains under autocast.

    ``run`` makes its steps with changes and arguments; ``left`` collects what does not work.
    """

    def __init__(
        self,
        before: ScriptFacts,
        run: Callable[[Sequence[Change], Sequence[str]], TriedScript],
        locate: Locate,
        tolerance: float | None,
    ) -> None:
        self._before, self._run, self._locate, self._tolerance = before, run, locate, tolerance
        self.left: list[tuple[str, str]] = []
        """What was tried, and why it is not offered."""

    @staticmethod
    def is_due(before: ScriptFacts) -> bool:
        """Whether the script trains in fp32 alone."""
        return not (before.autocast or before.low_weights or before.amp or before.scaled_backward)

    def found(self, names: Sequence[str], arguments: Sequence[str], script: SourceText | str) -> Adopted | None:
        """The first way that passes."""
        for precision in map(PRECISIONS.get, names):
            dtype = str(torch_dtype(precision.format)).removeprefix("torch.")
            sources = self._sources(script)
            for switch in switches(self._before, arguments, sources, dtype):
                of_switch = [] if switch.change is None else [switch.change]
                adopted = self._tried(precision, dtype, of_switch, switch.arguments or arguments, switch.words)
                if adopted is not None:
                    return adopted if of_switch else adopted._replace(command=switch.words)
            for words, changes in self._in_code(dtype):
                if isinstance(changes, str):
                    self.left.append((words, changes))
                    break
                adopted = self._tried(precision, dtype, changes, arguments, words)
                if adopted is not None:
                    return adopted
        return None

    def _sources(self, script: SourceText | str) -> list[SourceText]:
        """The script, and the files of its own that make its passes."""
        found = [self._locate(forward_pass.backward, "backward") for forward_pass in self._before.passes]
        sources = [script, *(each[0] for each in found if not isinstance(each, str))]
        return list(dict.fromkeys(each for each in sources if isinstance(each, SourceText)))

    def _in_code(self, dtype: str) -> Iterator[tuple[str, list[Change] | str]]:
        """Autocast in the script's loop, also with outputs in fp32, or why that is not possible."""
        scaler = list[Change]()
        if dtype == "float16":
            made = scaled(self._before, self._locate, None)
            if isinstance(made, str):
                yield f"a GradScaler for {dtype}", made
                return
            scaler.append(made)
        words = f"autocast to {dtype}"
        changes = autocast_changes(self._before, self._locate, dtype)
        yield words, changes if isinstance(changes, str) else [*changes, *scaler]
        # Code that fails, as that of NumPy without bf16, needs fp32 later; else the loss may
        widens: Widened = "read later" if self.left[-1][1].startswith(FAILS) else "outputs"
        others = autocast_changes(self._before, self._locate, dtype, widens)
        if others != changes:
            yield f"{words}, with outputs in fp32", others if isinstance(others, str) else [*others, *scaler]

    def _tried(
        self, precision: Precision, dtype: str, changes: list[Change], arguments: Sequence[str], words: str
    ) -> Adopted | None:
        trial = self._run(changes, arguments)
        facts, limit = trial.facts, self._tolerance or limit_of(self._before, precision.tolerance)
        # A scale that skips no step
        if facts is not None and facts.skipped and facts.scale is not None and changes:
            made = scaled(self._before, self._locate, facts.scale)
            if not isinstance(made, str) and any(fix.kind == "grad_scaler" for _, fix in changes):
                changes = [*(change for change in changes if change[1].kind != "grad_scaler"), made]
                trial = self._run(changes, arguments)
        why = trial.failure or self._why_not(
            trial.facts, dtype, limit, is_switch=all(fix.kind == "switch" for _, fix in changes)
        )
        if why or trial.facts is None:
            self.left.append((words, why))
            return None
        return Adopted(precision, changes, trial.facts, limit)

    def _is_alike(self, after: ScriptFacts) -> bool:
        """Whether its losses in fp32 are those of the script but for rounding."""
        before = self._before.losses
        pairs = zip(before, after.fp32_losses, strict=False)
        apart = max((abs(loss - other) for loss, other in pairs), default=0.0)
        return len(before) == len(after.fp32_losses) and apart <= SAME_LOSS * max(map(abs, before), default=0.0)

    def _why_not(self, after: ScriptFacts | None, dtype: str, limit: float, *, is_switch: bool) -> str:
        """Why a trial does not pass; empty if it does."""
        if after is None:
            return "the script makes no steps"
        if after.problem:
            return after.problem
        if dtype not in after.autocast:
            return f"it does not enter autocast to {dtype} on {after.device}"
        if after.low_weights:
            return f"it trains weights in {after.low_weights[0]}"
        # A switch may change more than the dtype, as how batches are padded
        if after.fp32 != self._before.fp32 and not (is_switch and self._is_alike(after)):
            return "it changes what the script does in fp32"
        if any(faults(after, lambda *_: "")):
            return "it brings another fault of AMP"
        if after.distance is None or after.losses_apart is None:
            return "the weights or losses are not finite"
        if after.distance > limit:
            words = "the distance from fp32's weights is {distance:error}, more than {limit:error}"
            return say(words, distance=after.distance, limit=limit).text
        if (after.moved or 0.0) < STALLED:
            return say("the weights move {moved:share} of the way of fp32's", moved=after.moved or 0.0).text
        losses = max(limit, BEYOND * self._before.losses_spread)
        if after.losses_apart > losses:
            words = "the distance from fp32's losses is {distance:error}, more than {limit:error}"
            return say(words, distance=after.losses_apart, limit=losses).text
        return ""
