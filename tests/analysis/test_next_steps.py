"""Commands to run next are whole: they can be pasted."""

from __future__ import annotations

import shlex

import msgspec
import pytest
from shared_result import shared_result

from lowprec_check.analysis.next_steps import command


@pytest.mark.parametrize(
    ("target", "target_options", "options", "expected"),
    [
        ("net.py", [], {}, "lowprec-check fix net.py --apply"),
        ("my nets/net.py:make", [], {}, "lowprec-check fix 'my nets/net.py:make' --apply"),
        ("net.py", ["--inputs", "a=1x3", "--weights", "w.pt"], {}, "fix net.py --apply --inputs a=1x3 --weights w.pt"),
        ("train.py", ["--", "--data", "a b"], {"seed": 3}, "fix train.py --apply --seed 3 -- --data 'a b'"),
        (
            "net.py",
            [],
            {"without_kernel": ["aten.dot:half"], "tolerance": None, "seed": 0},
            "--without-kernel aten.dot",
        ),
        ("Whitening", None, {}, "lowprec-check fix TARGET --apply"),
    ],
)
def test_a_command_names_the_target_and_what_it_was_loaded_with(
    target: str, target_options: list[str] | None, options: dict[str, object], expected: str
) -> None:
    scanned = msgspec.structs.replace(shared_result(), target=target, target_options=target_options, options=options)
    said = command(scanned, "fix --apply")
    assert expected in said
    assert shlex.split(said)[2] == ("TARGET" if target_options is None else target)
