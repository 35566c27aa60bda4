"""Lets a script that trains in fp32 train under autocast: by its own switch, or in its own code."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from lowprec_check.engine.model.observed_training import SAME_LOSS
from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix, torch_in, unused_name, wrapped
from lowprec_check.features.fix.script_fixes import faults, scaled
from lowprec_check.features.fix.script_steps import NAMES_OF_SWITCHES
from lowprec_check.features.fix.seen_values import ForwardPass, ScriptFacts, ScriptOption
from lowprec_check.features.fix.source_text import FUNCTIONS, Edit, Locate, SourceText, blocks_around
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.statements import say
from lowprec_check.schema.training import BEYOND, STALLED
from lowprec_check.torchkit.floating_dtypes import torch_dtype

# -- Autocast in the script's own loop

Change = tuple[SourceText, SourceFix]


Widened = Literal["nothing", "outputs", "read later"]
"""What models return is cast to fp32: at once, for a loss that needs it, or behind the block."""


def autocast_changes(facts: ScriptFacts, locate: Locate, dtype: str, widens: Widened = "nothing") -> list[Change] | str:
    """Autocast around what each backward pass follows from, or why not."""
    if not facts.passes:
        return "no call of a model leads to its backward passes in its own code"
    passes = list[_Pass]()
    for forward_pass in facts.passes:
        located = _located(forward_pass, locate)
        if isinstance(located, str):
            return located
        passes.append(located)
    changes = list[Change]()
    for source in dict.fromkeys(located.source for located in passes):
        torch, imports = torch_in(source)
        header = f'with {torch}.autocast("{facts.device}", {torch}.{dtype}):'
        own = [located for located in passes if located.source is source]
        covered = _covered(own, list(_events(facts, source, locate)))
        if isinstance(covered, str):
            return covered
        edits = [*imports]
        for located in own:
            edits += located.split(header, scales=dtype == "float16") if located.in_loss else []
        edits += _indented(source, covered, header, own, widens)
        changes.append((source, SourceFix("autocast", _WHY.format(dtype), own[0].backward, edits=tuple(edits))))
    return changes


def _covered(passes: list[_Pass], events: list[ast.AST]) -> list[ast.stmt] | str:
    """The statements of a file that are put under autocast."""
    covered = list[ast.stmt]()
    for located in passes:
        region = located.region(events)
        if isinstance(region, str):
            return region
        covered += [statement for statement in region if statement not in covered]
    unfit = next((each for each in covered if not passes[0].source.can_be_indented(each)), None)
    return covered if unfit is None else f"line {unfit.lineno} cannot be indented"


def _indented(
    source: SourceText, covered: list[ast.stmt], header: str, passes: list[_Pass], widens: Widened
) -> Iterator[Edit]:
    """What puts statements under autocast, and casts what models return to fp32."""
    # What a new statement gets a copy of is left as it is
    forward = [call for each in passes for call in each.forward if call not in each.in_loss]
    calls = [call for call in dict.fromkeys(forward) if isinstance(call, ast.expr)]
    for run in _runs(source, covered):
        yield from source.indented_under(run, header)
        if widens == "read later":
            indent = source.indent_of(run[-1]) + source.more_indent(run[0])
            lines = [f"{indent}{name} = {name}.float()" for name in _read_later(source, run, calls)]
            yield from [source.lines_behind(run[-1], lines)] if lines else []
    if widens == "outputs":
        for call in calls:
            yield from wrapped(source, call, ".float()")


_WHY = "the forward pass and the loss are computed under autocast to {}"


class _Pass(NamedTuple):
    """The calls of a pass in the function that makes it."""

    source: SourceText
    backward: ast.AST
    forward: list[ast.AST]

    @property
    def in_loss(self) -> list[ast.AST]:
        """Those of ``criterion(model(x), y).backward()``."""
        method = getattr(self.backward, "func", None)
        if not isinstance(method, ast.Attribute) or not isinstance(self.source.parents[self.backward], ast.Expr):
            return []
        return [call for call in self.forward if self.source.around_is(call, method.value)]

    def split(self, header: str, *, scales: bool) -> list[Edit]:
        """The loss in a statement of its own, under autocast; a call that ``scales`` it needs the
        parentheses around it.
        """
        source, statement = self.source, self.source.around(self.backward, ast.stmt)
        loss: ast.expr = self.backward.func.value  # type: ignore[attr-defined]
        name = unused_name(source, "loss")
        assert isinstance(statement, ast.stmt)
        more = source.more_indent(statement)
        start, end = source.span(loss) if scales else source.outer(loss)
        lines = [header, f"{more}{name} = {source.segment(loss)}"]
        return [*(source.line_before(statement, line) for line in lines), Edit(start, end, name)]

    def region(self, events: list[ast.AST]) -> list[ast.stmt] | str:
        """The statements from the first forward pass on, but for those that train, and those before
        the backward pass that do something else than the loss.
        """
        source = self.source
        behind = dict(blocks_around(source, self.backward))
        shared = []
        earlier = [call for call in self.forward if call not in self.in_loss]
        if not earlier:
            return []
        for call in earlier:
            common = next((block for block, _ in blocks_around(source, call) if block in behind), None)
            if common is None:
                return "the forward and the backward pass are in different functions"
            shared.append(common)
        # The outermost block that one of them shares with the backward pass
        order = list(behind)
        parent, field = max(shared, key=order.index)
        statements: list[ast.stmt] = getattr(parent, field)
        around = behind[parent, field]
        end = statements.index(around)
        starts = [self._number_in(statements, call) for call in earlier]
        if any(start >= end for start in starts):
            return f"line {around.lineno} makes both the forward and the backward pass"
        # Between two events: a generator's forward pass may come before the critic's step
        region = list[ast.stmt]()
        has_forward = False
        for number in range(min(starts), end):
            statement = statements[number]
            if any(source.around_is(event, statement) for event in events):
                has_forward = False
                continue
            has_forward |= number in starts
            if has_forward:
                region.append(statement)
        computing = {id(statements[number]) for number in starts}
        used = set(_names(around))
        while region and id(region[-1]) not in computing and used.isdisjoint(_names(region[-1])):
            region.pop()
        return region

    def _number_in(self, statements: list[ast.stmt], call: ast.AST) -> int:
        return next(number for number, each in enumerate(statements) if self.source.around_is(call, each))


def _read_later(source: SourceText, run: list[ast.stmt], calls: list[ast.expr]) -> Iterator[str]:
    """The variables that get what models return, and that are read behind these statements."""
    scope = source.around(run[0], FUNCTIONS) or source.tree
    end = source.span(run[-1])[1]
    reads = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    later = {node.id for node in reads if source.span(node)[0] >= end}
    bound: dict[str, None] = {}
    for statement in itertools.chain(*map(ast.walk, run)):
        if isinstance(statement, ast.Assign) and any(source.around_is(call, statement) for call in calls):
            names = [node for target in statement.targets for node in ast.walk(target)]
            bound |= dict.fromkeys(node.id for node in names if isinstance(node, ast.Name))
    yield from (name for name in bound if name in later)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The variables in a statement, and the attributes of ``self``."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield f"self.{node.attr}"
        elif isinstance(node, ast.Name) and node.id != "self":
            yield node.id


def _located(forward_pass: ForwardPass, locate: Locate) -> _Pass | str:
    """The expressions of a pass in their file."""
    found = locate(forward_pass.backward, "backward")
    if isinstance(found, str):
        return found
    source, backward = found
    forward = list[ast.AST]()
    for place in forward_pass.forward:
        call = locate(place, "forward")
        if isinstance(call, str):
            return call
        if call[0] is not source or call[1] is backward:
            return "the loop is not in the script's own code: use the switch for mixed precision of what runs it"
        forward.append(call[1])
    return _Pass(source, backward, forward)


def _events(facts: ScriptFacts, source: SourceText, locate: Locate) -> Iterator[ast.AST]:
    """The calls in a file that lead to backward passes, steps or clipping."""
    for place in facts.events:
        found = locate(place, "step")
        if not isinstance(found, str) and found[0] is source:
            yield found[1]


def _runs(source: SourceText, statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Those that follow each other in one block; without those inside another one."""
    outer = [s for s in statements if not any(o is not s and source.around_is(s, o) for o in statements)]
    blocks: dict[int, list[ast.stmt]] = {}
    for statement in sorted(outer, key=source.span):
        (parent, field), _ = next(blocks_around(source, statement))
        block: list[ast.stmt] = getattr(parent, field)
        run = blocks.setdefault(id(block), [])
        if run and block.index(statement) != block.index(run[-1]) + 1:
            yield run
            run = blocks[id(block)] = []
        run.append(statement)
    yield from blocks.values()


# -- Switches of the script

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


# -- The search for what passes

FAILS, IDLE = "the script fails", "nothing is computed in 16 bits"

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
        # The script, and the files of its own that make its passes
        made = [self._locate(forward_pass.backward, "backward") for forward_pass in self._before.passes]
        files = [script, *(each[0] for each in made if not isinstance(each, str))]
        sources = list(dict.fromkeys(file for file in files if isinstance(file, SourceText)))
        for precision in map(PRECISIONS.get, names):
            dtype = str(torch_dtype(precision.format)).removeprefix("torch.")
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
        if self.left[-1][1].startswith(IDLE):
            return
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
        # As where blocks of the script switch autocast off
        if after.distance == 0.0:
            return f"{IDLE}: the weights are those of fp32 bit for bit"
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
