"""Statements that are left out of a text, or indented under another, as the text is."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from lowprec_check.features.fix.source_text import SourceText, edited


@pytest.mark.parametrize("seed", range(60))
def test_statements_are_left_out_and_the_others_stay(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    is_one_line = draw.random() < 0.3
    breaks = ["; "] if is_one_line else ["; ", "\n    ", "  # why\n    ", ";\n    "]
    names = [f"call{number}()" for number in range(draw.randint(1, 6))]
    text = "if x:" + (" " if is_one_line else "\n    ") + names[0]
    for name in names[1:]:
        text += draw.choice(breaks) + name
    file = tmp_path / "code.py"
    file.write_text(text + draw.choice(["\n", "", "  # end\n", ";\n"]))
    source = SourceText(file)
    block = source.tree.body[0].body  # type: ignore[attr-defined]
    left_out = [statement for statement in block if draw.random() < 0.5] or block[:1]
    changed = edited(source.text, source.removals(left_out))
    stay = [ast.unparse(statement) for statement in block if statement not in left_out]
    now = ast.parse(changed).body[0].body  # type: ignore[attr-defined]
    assert [ast.unparse(statement) for statement in now] == (stay or ["pass"])


@pytest.mark.parametrize("indent", ["  ", "    ", "\t"])
@pytest.mark.parametrize("around", ["for x in y:", "try:"])
def test_statements_are_indented_as_their_file_is(tmp_path: Path, indent: str, around: str) -> None:
    file = tmp_path / "code.py"
    after = "" if around.startswith("for") else f"\n{indent}finally:\n{indent * 2}pass"
    lines = [f"{indent}{around}", f"{indent * 2}if a:", f"{indent * 3}b()", "", f"{indent * 2}c()  # d"]
    file.write_text("def f():\n" + "\n".join(lines) + after + "\n")
    source = SourceText(file)
    block = source.tree.body[0].body[0].body  # type: ignore[attr-defined]
    changed = edited(source.text, source.indented_under(block, "with e:"))
    inner = [f"{indent * 2}with e:", f"{indent * 3}if a:", f"{indent * 4}b()", "", f"{indent * 3}c()  # d"]
    assert changed == "def f():\n" + "\n".join([lines[0], *inner]) + after + "\n"
    ast.parse(changed)
