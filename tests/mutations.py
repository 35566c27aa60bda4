"""Mutated copies of files that commands read: values, keys, nesting or bytes changed."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS = """\
[project]
name = "example"

[tool.lowprec-check]
precision = ["half", "amp-bf16"]
tolerance = 0.1
json = "saved.json"

[tool.lowprec-check.scan]
fail-on = "never"
report = ["report.md"]
baseline = "accepted.json"

[tool.lowprec-check.catalog.gaps]
dtype = "bf16"
"""
MANIFEST = """\
# Known failures.

[[known]]
test = "test_model.py::test_fails"
exception = "ValueError"
match = "a+"
torch = ">=2.6"
reason = "a reason"

[[known]]
test = "test_*.py::test_f*"
exception = ["KeyError", "ValueError"]
platform = "linux"
strict = false
reason = "another"
"""

NUMBERS = int, float
DEEP = 100_000
ODD_TEXTS = (
    "", " ", "x" * 256, "x" * 5000, "\0", "a\nb", "\x1b[31m", "\u202e", "\u061c", "\U000e0041", "%s{}", "../../x",
    "/", "-", "~", "é" * 200, "😀" * 80, "(a+)+$", "(", "[[:x:]]", "a{1000000}", "*" * 40, "(?P<x>", "a." * 10_000,
    "a/" * 3000, "::error::x", "<b>", "1e999", "nan", "2.99", "LP101", "half", "cpu", "dask://x:1", "aten.mm.default",
    ">=2,<", "model.py --json x", "'", '"', "#", "$(x)", "\\", "\ud800",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 10**19, -(10**30), 10**400, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"),
    [], {}, [[]], [None], {"": ""}, {"x": {"y": []}}, ["x", 1], [0] * 1000, *ODD_TEXTS,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys or indices."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = (
            container if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        )
        for key in keys:
            yield container, key
            waiting.append(container[key])


def mutated_value(value: Any, drawn: random.Random) -> Any:
    """A JSON value with one to four places changed."""
    value = copy.deepcopy(value)
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        found = [*places(value)]
        if not found:
            break
        container, key = drawn.choice(found)
        other, at = drawn.choice(found)
        action = drawn.choice(("alike", "alike", "alike", "set", "remove", "rename", "copy", "swap", "double", "nest"))
        if action in ("set", "alike"):
            alike = [
                odd
                for odd in ODD_VALUES
                if isinstance(odd, NUMBERS if isinstance(container[key], NUMBERS) else type(container[key]))
            ]
            container[key] = copy.deepcopy(drawn.choice((action == "alike" and alike) or ODD_VALUES))
        elif action == "remove":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[drawn.choice(ODD_TEXTS)] = container.pop(key)
        elif action == "copy" and len(str(other[at])) < 100_000:
            container[key] = copy.deepcopy(other[at])
        elif action == "swap" and isinstance(container, list):
            container[key], container[0] = container[0], container[key]
        elif action == "double" and isinstance(container, list):
            container += copy.deepcopy(container[key:][:1000])
        elif action == "nest":
            for _ in range(drawn.choice((1, 3, 300))):
                container[key] = drawn.choice(([container[key]], {"x": container[key]}))
    return value


def mutated_json(data: bytes, drawn: random.Random) -> bytes:
    """A JSON file with values changed, sometimes with something nested too deeply to be read."""
    text = json.dumps(mutated_value(json.loads(data), drawn))
    if drawn.random() < 0.1:
        deep = drawn.choice((500, 5000, DEEP))
        opened, closed = drawn.choice((("[", "]"), ('{"x":', "}")))
        ends = [match.end() for match in re.finditer(r'": |\[', text)]
        at = drawn.choice(ends) if ends else 0
        text = f"{text[:at]}{opened * deep}0{closed * deep}{',' if text[at - 1 : at] == '[' else ''}{text[at:]}"
    if drawn.random() < 0.1:
        text = re.sub(
            r"\d+",
            lambda match: drawn.choice((match[0], match[0], "9" * drawn.choice((19, 400, 5000)))),
            text,
            count=50,
        )
    return text.encode("utf-8", "surrogatepass")


def mutated_lines(data: bytes, drawn: random.Random) -> bytes:
    """A TOML file, or another text, with lines or values changed."""
    lines = data.decode().splitlines()
    for _ in range(drawn.choice((1, 1, 2, 3))):
        at = drawn.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        action = drawn.choice(("value", "value", "value", "remove", "double", "move", "deep", "word"))
        if action == "value" and equals:
            lines[at] = f"{key} = {drawn.choice((toml_text, repr, json.dumps))(drawn.choice(ODD_VALUES))}"
        elif action == "remove" and len(lines) > 1:
            del lines[at]
        elif action == "double":
            lines.insert(drawn.randrange(len(lines)), lines[at])
        elif action == "move":
            lines.insert(drawn.randrange(len(lines)), lines.pop(at))
        elif action == "deep":
            deep = drawn.choice((100, 5000, DEEP))
            lines.insert(at, drawn.choice((
                f"{key or 'x'} = {'[' * deep}{']' * deep}", f"{key or 'x'} = {'{x=' * deep}0{'}' * deep}",
                f"[{'a.' * deep}a]", f"{'a.' * deep}a = 1", f"[[{'tool.' * deep}x]]",
            )))  # fmt: skip
        elif action == "word":
            lines[at] = re.sub(
                r"[\w.]+", lambda match: drawn.choice((match[0], match[0], drawn.choice(ODD_TEXTS))), lines[at]
            )
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def toml_text(value: Any) -> str:
    """A text in double quotes, which may hold any character."""
    return json.dumps(value if isinstance(value, str) else str(value))


def mutated_bytes(data: bytes, drawn: random.Random) -> bytes:
    """Bytes removed, changed, repeated or added."""
    at, length = drawn.randrange(len(data) + 1), drawn.choice((1, 2, 8, 100, 10_000))
    action = drawn.choice(("truncate", "remove", "flip", "repeat", "insert", "noise", "empty", "encode"))
    if action == "flip":
        return bytes(byte ^ (drawn.random() < 3 / len(data)) << drawn.randrange(8) for byte in data)
    if action == "encode":
        return data.decode("utf-8", "replace").encode(drawn.choice(("utf-16", "utf-8-sig", "utf-32")))
    return {
        "truncate": data[:at],
        "remove": data[:at] + data[at + length :],
        "repeat": data[:at] + data[at : at + length] * drawn.choice((2, 50)) + data[at + length :],
        "insert": data[:at]
        + drawn.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"[", b'"', b"\\u0000", b"\r", b"1e400"))
        + data[at:],
        "noise": data[:at] + drawn.randbytes(length) + data[at + length :],
        "empty": b"",
    }[action]


def mutated(name: str, data: bytes, drawn: random.Random) -> bytes:
    """A file that differs from ``data``."""
    by_suffix = {".json": mutated_json, ".toml": mutated_lines, ".txt": mutated_lines, ".py": mutated_lines}
    change = by_suffix.get(Path(name).suffix, mutated_bytes)
    return (mutated_bytes if drawn.random() < 0.2 else change)(data, drawn)
