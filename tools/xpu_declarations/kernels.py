"""The 16-bit dtypes that an XPU kernel does not support, from the dispatch macros in the C++ code of torch-xpu-ops.

`AT_DISPATCH_FLOATING_TYPES(dtype, "cdist_xpu", …)` means that the kernel `cdist_xpu` supports only float and double.
Only unsupported dtypes are reported, and only if every macro with the tag is understood and the file does not mention a
16-bit dtype outside such macros (`sum` branches on half before the macro).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WORDS = {"half": ("kHalf", "Half"), "bfloat16": ("kBFloat16", "BFloat16")}
_MACRO = re.compile(r"\b(AT_DISPATCH_(?!CASE)[A-Z0-9_]+)\s*\(")
_REAL = re.compile(r"FLOATING|AT_ALL_TYPES|DISPATCH_ALL_TYPES")
_UNDERSTOOD = re.compile(
    r"AT_DISPATCH_(V2|(FLOATING|COMPLEX|FLOATING_AND_COMPLEX|ALL|ALL_TYPES_AND_COMPLEX|INTEGRAL)(_TYPES)?(_AND\d?|_AND_COMPLEX"
    r"|_AND_HALF|_AND_COMPLEX_AND\d?)?)"
)


class Site(NamedTuple):
    """One use of a dispatch macro."""

    tag: str
    conclusive: bool
    dtypes: frozenset[str]
    real: bool
    """Whether it dispatches real floating dtypes, not only complex or integral ones."""


def sites(text: str) -> Iterator[Site]:
    """The dispatch macros of one C++ file."""
    uses = [(match.group(1), _balanced(text, match.end())) for match in _MACRO.finditer(text)]
    rest = text
    for _, arguments in uses:
        rest = rest.replace(arguments, "")
    branches = any(_names(rest, words) for words in WORDS.values())
    for macro, arguments in uses:
        types, tag = _types_and_tag(macro, arguments)
        if tag is None:
            continue
        dtypes = frozenset(name for name, words in WORDS.items() if _names(types, words))
        if macro.endswith("_AND_HALF"):
            dtypes |= {"half"}
        conclusive = not branches and _UNDERSTOOD.fullmatch(macro) is not None
        yield Site(tag, conclusive, dtypes, _REAL.search(macro + types) is not None)


def unsupported(texts: Iterable[str]) -> dict[str, frozenset[str]]:
    """The 16-bit dtypes that each conclusive kernel tag does not support; tags that support both are left out."""
    found: dict[str, list[Site]] = {}
    for text in texts:
        for site in sites(text):
            found.setdefault(site.tag, []).append(site)
    missing = {}
    for tag, uses in sorted(found.items()):
        if all(use.conclusive for use in uses) and any(use.real for use in uses):
            missing[tag] = frozenset(WORDS) - frozenset().union(*(use.dtypes for use in uses))
    return {tag: dtypes for tag, dtypes in missing.items() if dtypes}


def op_names(tag: str) -> frozenset[str]:
    """The base names of aten ops that a kernel tag may belong to: `_cdist_forward` for `cdist_xpu`."""
    if not tag.endswith("_xpu"):
        return frozenset()
    stem = tag.removesuffix("_xpu")
    return frozenset({stem, f"_{stem}", f"{stem}_forward", f"_{stem}_forward", f"special_{stem}"})


def _names(text: str, words: tuple[str, str]) -> bool:
    return re.search(rf"\b({words[0]}|\w+::{words[1]}|{words[1]}|AT_REDUCED_FLOATING_TYPES)\b", text) is not None


def _types_and_tag(macro: str, arguments: str) -> tuple[str, str | None]:
    """The part of the arguments that names dtypes, and the tag."""
    tag = re.search(r'"(\w+)"', arguments)
    if tag is None:
        return "", None
    if macro == "AT_DISPATCH_V2":  # dtype, tag, AT_WRAP(body), types…
        body = re.search(r"AT_WRAP\s*\(", arguments)
        after = arguments[body.end() + len(_balanced(arguments, body.end())) :] if body else arguments
        return after, tag.group(1)
    return arguments[: tag.start()], tag.group(1)


def _balanced(text: str, start: int) -> str:
    """The text from `start`, which follows an opening parenthesis, to the closing one."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return text[start:]
