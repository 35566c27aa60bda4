"""The fields of saved data as a JSON Schema, whose descriptions are the docstrings below the fields."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any, get_args

import msgspec

from lowprec_check.schema.op_calls import OpCall, OpCalls
from lowprec_check.schema.options import ScanOptions, declared_in
from lowprec_check.schema.scan_result import ScanResult

ENVIRONMENT = {
    "torch": "The version of torch.",
    "python": "The version of Python.",
    "platform": "The operating system and the processor's architecture.",
    "device": "The device of the runs: `cpu`, `cuda:0`.",
    "device_name": "Its name.",
    "default_autocast": "The dtype that autocast uses on it by default.",
    "cpu_capability": "The instruction set that torch uses on the CPU.",
    "cpu_features": "Instructions of the CPU that matter to low precision.",
    "fp16_accelerated": "Whether the device computes matrix products in fp16; `null` if torch cannot tell.",
    "bf16_accelerated": "Whether the device computes matrix products in bf16; `null` if torch cannot tell.",
    "threads": "Threads that torch uses in an op.",
    "cores": "Processor cores of the machine.",
    "accelerators": "The accelerators of the machine, in words.",
    "torchvision": "The version of torchvision; `null` if it is not installed.",
    "timm": "The version of timm; `null` if it is not installed.",
    "transformers": "The version of transformers; `null` if it is not installed.",
    "ipex": "The version of Intel's extension; `null` if it is not installed.",
    "ipex_fits": "Whether Intel's extension fits this torch; `null` if it is not installed.",
    "ipex_limit": "Why Intel's extension cannot prepack bf16 weights on this processor; "
    "`null` if it can, or is not installed.",
}

SAVED_OPTIONS = {
    "isolation": "How runs are kept apart: `fork`, `spawn`, `shared` or `none`.",
    **{name: declared.text for name, _, _, declared in declared_in(ScanOptions) if declared.saved},
    "fail_on": "The scan's `--fail-on`, which decides what fails in JUnit; missing in a result of the Python API.",
    "baseline": "`true` if the scan had a baseline, with which findings that rest on times do not fail.",
}

KEYS = {"environment": ENVIRONMENT, "options": SAVED_OPTIONS}
"""The keys of fields that are plain objects, with their descriptions."""


def structs_in(saved: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The class of the file and all classes in it, by name, in the order in which they first appear."""
    found: dict[str, type[msgspec.Struct]] = {}

    def add(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
            found[kind.__name__] = kind
            for field in msgspec.structs.fields(kind):
                add(field.type)
        for part in get_args(kind):
            add(part)

    add(saved)
    return found


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field, by its name in the file, as Markdown in which `None` is `null`."""
    kind = OpCall if kind is OpCalls else kind
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    texts = {
        field.target.id: _as_markdown(text.value.value)
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: texts[field.name] for field in fields if field.name in texts}


def _as_markdown(docstring: str) -> str:
    text = " ".join(inspect.cleandoc(docstring).split())
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("`None`", "`null`")


def described_schema(saved: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON Schema of ``saved``, every property described; raises ``KeyError`` for a field without a docstring."""
    found: dict[str, Any] = msgspec.json.schema(saved)
    for name, kind in structs_in(saved).items():
        texts = descriptions(kind)
        for key, value in found["$defs"][name]["properties"].items():
            value["description"] = texts[key]
            if kind is ScanResult and key in KEYS:
                value["properties"] = {inner: {"description": text} for inner, text in KEYS[key].items()}
    return found
