"""The autocast policies in ``ATen/autocast_mode.h``, a header that ships with torch: the ops that CUDA and XPU share.

The header lists the ops of each policy in a macro of its own. Whatever is not understood is an error, never left out.

>>> policies = parse_header(Path("torch/include/ATen/autocast_mode.h").read_text())  # doctest: +SKIP
>>> policies["mm"], policies["pow.Tensor_Scalar"]  # doctest: +SKIP
('lower', 'fp32')
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lowprec_check.catalog.predictable import HeaderPolicy
from lowprec_check.errors import UsageError

HEADER = "include/ATen/autocast_mode.h"
"""The header's path in torch's folder."""

POLICIES: dict[str, HeaderPolicy] = {
    "lower_precision_fp": "lower",
    "fp32": "fp32",
    "fp32_set_opt_dtype": "fp32-set-dtype",
    "fp32_append_dtype": "fp32-append-dtype",
    "promote": "promote",
}
"""By the name of the policy in the header."""

LISTS: dict[str, HeaderPolicy] = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32-set-dtype",
    "AT_FORALL_PROMOTE": "promote",
}
"""Lists of ops and overloads, and their policy."""

WITH_POLICY = "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE"
"""The list whose entries name an op, the overload to call instead, and the policy."""

_OTHER_LISTS = frozenset({"AT_FORALL_DEPRECATED_AUTOCAST_BACKENDS", "AT_FORALL_DEPRECATED_AUTOCAST_BAKCNEDS"})
"""Lists of device types: nothing about ops. The misspelled name is that of torch up to 2.6."""

_GUARDS = frozenset({"!defined(TORCH_STABLE_ONLY)&&!defined(TORCH_TARGET_VERSION)"})
"""Conditions that hold when torch itself is compiled, without spaces."""

_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/|/\*""", re.DOTALL)
_DEFINE = re.compile(r"#\s*define\s+(AT_FORALL_\w+)(?:\((\w+)\))?(.*)")
_CONDITION = re.compile(r"#\s*(ifdef|ifndef|if|elif|else|endif)\b(.*)")
_POLICY_ENUM = re.compile(r"\benum\s+class\s+CastPolicy\b[^{;]*\{([^}]*)\}")
_OP = re.compile(r"(\w+)(?:\s*,\s*(\w+))?")
_ADD_NS = re.compile(r"ADD_NS\(\s*(\w+)\s*\)")
_OP_NAME = re.compile(r'"((\w+)(?:\.\w+)?)"')
_SIGNATURE = re.compile(r"\w+\s*\((.*)\)")


class AutocastHeaderError(UsageError):
    """The header is not as this version of lowprec-check knows it."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"torch's header autocast_mode.h: {message}.",
            "Teach tools/autocast_header.py what is new in it.",
        )


class _List(NamedTuple):
    parameter: str
    body: str


def parse_header(text: str) -> dict[str, HeaderPolicy]:
    """The policy of each op in the header, by overload name without ``aten::`` (``pow.Tensor_Scalar``).

    Raises :class:`AutocastHeaderError` if anything in the header's lists or policies is unknown.
    """
    code = _without_comments(re.sub(r"\\\r?\n", " ", text))
    _check_policies(code)
    lists = _lists(code)
    found: dict[str, HeaderPolicy] = {}
    for name in (*LISTS, WITH_POLICY):
        if name not in lists:
            raise AutocastHeaderError(f"the list {name} is missing")
        ops = list(_ops(name, lists[name]))
        if not ops:
            raise AutocastHeaderError(f"the list {name} is empty")
        for op, policy in ops:
            if op in found:
                raise AutocastHeaderError(f"{op} is listed twice, as {found[op]} and in {name}")
            found[op] = policy
    return found


def _without_comments(text: str) -> str:
    """``text`` with a space for each comment; strings are kept."""

    def kept(token: re.Match[str]) -> str:
        if token[0] == "/*":
            raise AutocastHeaderError("a comment does not end")
        return " " if token[0].startswith("/") else token[0]

    return _TOKEN.sub(kept, text)


def _check_policies(code: str) -> None:
    """Raise if the policies that the header defines are not :data:`POLICIES`."""
    enums = _POLICY_ENUM.findall(code)
    if len(enums) != 1:
        raise AutocastHeaderError(f"{len(enums)} definitions of CastPolicy instead of one")
    names = [re.sub(r"\s*=\s*\d+$", "", name.strip()) for name in enums[0].split(",") if name.strip()]
    if sorted(names) != sorted(POLICIES):
        differing = sorted({*names} ^ {*POLICIES}) or sorted(names)
        raise AutocastHeaderError(f"the policies in CastPolicy differ from the known ones: {', '.join(differing)}")


def _lists(code: str) -> dict[str, _List]:
    """The lists of ops by name, without a condition around them that is not a known one."""
    found: dict[str, _List] = {}
    conditions: list[str] = []
    last: str | None = None
    for line in filter(None, map(str.strip, code.splitlines())):
        if last and not line.startswith("#"):
            raise AutocastHeaderError(f"the list {last} ends too early, before {_short(line)}")
        last = None
        if condition := _CONDITION.fullmatch(line):
            _follow(conditions, condition[1], condition[2])
        names = [name for name in re.findall(r"\bAT_FORALL_\w+", line) if name not in _OTHER_LISTS]
        if not names:
            continue
        name, define = names[0], _DEFINE.fullmatch(line)
        if name not in LISTS and name != WITH_POLICY:
            raise AutocastHeaderError(f"unknown list {name}")
        if define is None or define[1] != name or define[2] is None:
            raise AutocastHeaderError(f"{name} is used in an unknown way: {_short(line)}")
        if name in found:
            raise AutocastHeaderError(f"the list {name} is defined twice")
        if unknown := [known for known in conditions if known not in _GUARDS]:
            raise AutocastHeaderError(f"the list {name} depends on a condition: {_short(unknown[0])}")
        last = name
        found[name] = _List(define[2], define[3].strip())
    if conditions:
        raise AutocastHeaderError(f"the condition {_short(conditions[-1])} does not end")
    return found


def _follow(conditions: list[str], directive: str, rest: str) -> None:
    """Update the open conditions after a line with ``directive``."""
    condition = re.sub(r"\s", "", rest)
    if directive.startswith("if"):
        conditions.append(condition if directive == "if" else f"{directive} {condition}")
    elif not conditions:
        raise AutocastHeaderError(f"#{directive} without #if")
    elif directive == "endif":
        conditions.pop()
    else:
        conditions[-1] = f"{directive} {condition}"


def _ops(name: str, found: _List) -> Iterator[tuple[str, HeaderPolicy]]:
    """The ops of a list with their policy."""
    for entry in _entries(name, found):
        if name == WITH_POLICY:
            yield _op_with_policy(entry)
        elif op := _OP.fullmatch(entry):
            yield ".".join(filter(None, op.groups())), LISTS[name]
        else:
            raise AutocastHeaderError(f"{name} has an entry that is not understood: {_short(entry)}")


def _entries(name: str, found: _List) -> Iterator[str]:
    """The text in the parentheses of each entry ``_(…)``."""
    rest = found.body
    start = re.compile(rf"{re.escape(found.parameter)}\s*\(")
    while rest:
        opened = start.match(rest)
        end = _closing(rest, opened.end()) if opened else None
        if opened is None or end is None:
            raise AutocastHeaderError(f"{name} has an entry that is not understood: {_short(rest)}")
        yield rest[opened.end() : end].strip()
        rest = rest[end + 1 :].lstrip()


def _closing(text: str, start: int) -> int | None:
    """The index of the parenthesis that closes one opened before ``start``."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def _op_with_policy(entry: str) -> tuple[str, HeaderPolicy]:
    """The op of an entry of :data:`WITH_POLICY`, and its policy."""
    arguments = _arguments(entry)
    if len(arguments) == 5:
        function, op = _ADD_NS.fullmatch(arguments[0]), _OP_NAME.fullmatch(arguments[1])
        takes, calls = _SIGNATURE.fullmatch(arguments[2]), _SIGNATURE.fullmatch(arguments[3])
        policy = POLICIES.get(arguments[4])
        if function and op and op[2] == function[1] and takes and calls and policy == "fp32-append-dtype":
            before, after = len(_arguments(takes[1])), _arguments(calls[1])
            if len(after) == before + 1 and after[-1] == "ScalarType":
                return op[1], policy
    raise AutocastHeaderError(f"{WITH_POLICY} has an entry that is not understood: {_short(entry)}")


def _arguments(text: str) -> list[str]:
    """The parts of ``text`` between commas outside parentheses, as the preprocessor splits them."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"
