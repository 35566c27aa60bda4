"""Lets a script that trains in fp32 train under autocast: by its own switch, or in its own code."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.engine.model.observed_training import SAME_LOSS
from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix
from lowprec_check.features.fix.script_autocast import Widened, autocast_changes
from lowprec_check.features.fix.script_calls import Locate
from lowprec_check.features.fix.script_fixes import faults, scaled
from lowprec_check.features.fix.script_steps import NAMES_OF_SWITCHES
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptOption
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.statements import say
from lowprec_check.schema.training import BEYOND, STALLED
from lowprec_check.torchkit.floating_dtypes import torch_dtype

MOST = 4
"""Switches that are tried."""

_VALUES = {
    "bfloat16": ("bfloat16", "bf16", "bf16-mixed", "bf16_mixed", "amp_bf16", "amp_bfloat16"),
    "float16": ("float16", "fp16", "16-mixed", "fp16-mixed", "fp16_mixed", "amp_fp16", "half"),
}
"""How scripts call these formats."""

_IN_FP32 = {
    "float32": {"bfloat16": "bfloat16", "float16": "float16"},
    "fp32": {"bfloat16": "bf16", "float16": "fp16"},
    "no": {"bfloat16": "bf16", "float16": "fp16"},
    "32": {"bfloat16": "bf16-mixed", "float16": "16-mixed"},
    "32-true": {"bfloat16": "bf16-mixed", "float16": "16-mixed"},
}
"""What they say for fp32, and for these formats then."""

_OTHERS = {"bfloat16": ("fp16", "float16", "half"), "float16": ("bf16",)}
"""What names of switches for the other format have."""

_FRAMEWORKS = {
    "accelerate": (("Accelerator",), 'mixed_precision="{}"', {"bfloat16": "bf16", "float16": "fp16"}),
    "transformers": (("TrainingArguments", "Seq2SeqTrainingArguments"), "{}=True", {"bfloat16": "bf16"}),
    "lightning": (("Trainer", "Fabric"), 'precision="{}"', {"bfloat16": "bf16-mixed", "float16": "16-mixed"}),
}
"""The calls of what trains, and the argument that switches it."""


class Switch(NamedTuple):
    """Something to try."""

    words: str  # "`--amp`"
    arguments: tuple[str, ...]  # the script's, with it
    change: tuple[SourceText, SourceFix] | None = None


def switches(
    facts: ScriptFacts, arguments: Sequence[str], sources: Sequence[SourceText], dtype: str
) -> Iterator[Switch]:
    """Those for a dtype, at most :data:`MOST`, the likely ones first."""
    candidates = itertools.chain(
        _in_arguments(arguments, dtype), _options(facts, arguments, dtype), _in_sources(facts, sources, dtype)
    )
    yield from itertools.islice(candidates, MOST)


def _is_of_another(name: str, dtype: str) -> bool:
    """Whether a switch is for the other format by its name."""
    short = name.lower().replace("bfloat16", "bf16")
    return any(other in short for other in _OTHERS[dtype])


def _in_arguments(arguments: Sequence[str], dtype: str) -> Iterator[Switch]:
    """A value that the command line has already: ``--dtype=float32``."""
    for number, argument in enumerate(arguments):
        name, is_given, value = argument.rpartition("=")
        before = name if is_given else "".join(arguments[number - 1 : number])
        if value in _IN_FP32 and NAMES_OF_SWITCHES.search(before):
            changed = f"{name}{is_given}{_IN_FP32[value][dtype]}"
            shown = changed if is_given else f"{before} {changed}"
            yield Switch(shown, (*arguments[:number], changed, *arguments[number + 1 :]))


def _options(facts: ScriptFacts, arguments: Sequence[str], dtype: str) -> Iterator[Switch]:
    """Options that are not given: ``--amp --amp-dtype bfloat16``."""
    given = {argument.partition("=")[0] for argument in arguments}
    free = [option for option in facts.options if option.flag not in given]
    fitting = [option for option in free if not _is_of_another(option.flag, dtype)]
    flags = [option for option in fitting if option.is_switch]
    valued = [(option, value) for option in fitting if (value := _value_for(option, dtype)) is not None]
    # The switch together with the dtype that it takes
    for flag, (option, value) in itertools.product(flags, valued):
        if option.flag.startswith(flag.flag):
            added = (flag.flag, option.flag, value)
            yield Switch(" ".join(added), (*arguments, *added))
    for option, value in valued:
        yield Switch(f"{option.flag} {value}", (*arguments, option.flag, value))
    for flag in flags:
        yield Switch(flag.flag, (*arguments, flag.flag))


def _value_for(option: ScriptOption, dtype: str) -> str | None:
    """What to give an option for a dtype; ``None`` if it takes no such value."""
    if option.is_switch:
        return None
    named = [name for name in _VALUES[dtype] if name in option.choices]
    if named or option.choices:
        return named[0] if named else None
    if option.value in _IN_FP32:
        return _IN_FP32[option.value][dtype]
    if option.value in (*_VALUES["bfloat16"], *_VALUES["float16"]):
        other = _VALUES["float16"] if option.value in _VALUES["float16"] else _VALUES["bfloat16"]
        return _VALUES[dtype][other.index(option.value)]
    return None


def _in_sources(facts: ScriptFacts, sources: Sequence[SourceText], dtype: str) -> Iterator[Switch]:
    """Constants of the script, and arguments of the framework that trains."""
    framework = {"pytorch_lightning": "lightning"}.get(facts.framework, facts.framework)
    calls, argument, values = _FRAMEWORKS.get(framework, ((), "", {}))
    for source in sources:
        for node in ast.walk(source.tree):
            named = _named_value(node)
            if named is not None:
                name, value = named
                text = _constant_for(name, value, dtype)
                if text is not None:
                    edit = Edit(*source.span(value), text)
                    yield _in_source(f"{name} = {text}", source, value, edit)
            elif dtype in values and isinstance(node, ast.Call):
                text = argument.format(values[dtype])
                given = [each.arg for each in node.keywords]
                is_framework = source.segment(node.func).rpartition(".")[2] in calls
                if is_framework and text.partition("=")[0] not in given:
                    yield _in_source(text, source, node, keyword(source, node, text))


def _named_value(node: ast.AST) -> tuple[str, ast.expr] | None:
    """``amp = False``, as an assignment or an argument."""
    if isinstance(node, ast.keyword) and node.arg is not None:
        return node.arg, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return node.target.id, node.value
    return None


def _constant_for(name: str, value: ast.expr, dtype: str) -> str | None:
    """What a constant is replaced by; ``None`` if it seems to be no switch."""
    fits = NAMES_OF_SWITCHES.search(name) and not _is_of_another(name, dtype)
    if not fits or not isinstance(value, ast.Constant):
        return None
    if value.value is False:
        return "True"
    if value.value in _IN_FP32:
        return repr(_IN_FP32[value.value][dtype])
    if value.value == 32 and dtype == "bfloat16":
        return '"bf16-mixed"'
    return None


def _in_source(words: str, source: SourceText, anchor: ast.AST, edit: Edit) -> Switch:
    why = f"the script's own switch for low precision: {words}"
    return Switch(words, (), (source, SourceFix("switch", why, anchor, edits=(edit,))))


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
