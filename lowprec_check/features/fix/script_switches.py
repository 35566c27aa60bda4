"""What in a training script, or on its command line, may select low precision already."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix
from lowprec_check.features.fix.script_steps import NAMES_OF_SWITCHES
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptOption
from lowprec_check.features.fix.source_text import Edit, SourceText

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
