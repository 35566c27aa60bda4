"""Sentences: joining runs, rounding and ranges never make one false; statements name the runs that they are true of."""

from __future__ import annotations

import json
import math
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_result import budgeted_result, latency, run, shared_result

from lowprec_check.analysis.run_summary import label
from lowprec_check.analysis.statements.kinds import kinds, statements
from lowprec_check.schema.measures import Ablation
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import (
    Sentence,
    Statement,
    chained,
    join,
    joined,
    percent,
    plain,
    say,
    share_figure,
    short_op,
    shown,
    times,
)

RESULT = shared_result()

# -- one formatter for each type


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.0004, "< 0.1 %"),
        (0.002, "0.2 %"),
        (0.218, "21.8 %"),
        (0.9996, "> 99.9 %"),
        (1.0, "100 %"),
        (-0.02, "−2 %"),
    ],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.004, "< 1 %"), (0.46, "46 %"), (0.996, "> 99 %"), (1.0, "100 %"), (1.04, "104 %")],
)
def test_shares(share: float, text: str) -> None:
    assert share_figure(share) == text


@given(st.floats(1.0, 1e6))
def test_a_ratio_never_says_that_two_times_are_the_same(ratio: float) -> None:
    assert ratio < 1.005 or not times(ratio).startswith(("1.0 ", "1.00 "))


def test_figures_of_chained_sentences_stay_apart() -> None:
    half, third = say("{share:share}", share=0.5), say("{share:share}", share=0.3)
    pair = chained(half, third, between=", ")
    assert chained(pair, pair, chained(third, pair)).text == "50 %, 30 %; 50 %, 30 %; 30 %; 50 %, 30 %"


def test_an_op_has_one_name() -> None:
    assert [short_op(op) for op in ("aten._cdist_forward.default", "aten.linalg_inv_ex.default", "torch.fft.rfft")] == [
        "cdist_forward",
        "linalg_inv_ex",
        "torch.fft.rfft",
    ]


def test_a_module_is_not_read_as_a_number() -> None:
    assert say("{share:share} {module:module}", share=0.12, module="0").text == '12 % "0"'
    assert say("{share:share} {module:module}", share=0.12, module="").text == "12 % the model itself"


def test_foreign_text_is_no_template() -> None:
    text = "KeyError: '{error:error}' {0} }{"
    assert plain(text).text == text
    assert chained(plain(text), say("{share:share} more", share=0.5)).text == f"{text}; 50 % more"


def test_figures_of_one_name_stay_apart_in_sentences_of_sentences() -> None:
    inner = chained(plain("takes as long"), plain("saves memory"))
    assert chained(plain("it "), inner, between="").text == "it takes as long; saves memory"
    assert chained(inner, plain("and"), inner).text == "takes as long; saves memory; and; takes as long; saves memory"


def test_a_template_names_its_figures() -> None:
    with pytest.raises(ValueError, match="other"):
        say("error {error:error}", other=1.0)


# -- joining runs

NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "error": st.one_of(st.none(), st.floats(1e-12, 1e12)),
    "limit": st.floats(1e-6, 1.0),
    "share": st.floats(0.0, 1.2),
    "percent": st.floats(0.0, 1.0),
    "number": st.integers(0, 10**7),
    "count call": st.integers(0, 10**7),
    "times": st.floats(1.0, 1e3),
    "ms": st.floats(1e-4, 1e5),
    "bytes": st.integers(0, 2**40),
    "of value": st.tuples(st.integers(0, 1000), st.sampled_from([0, 1000, 2000])).map(list),
    "text": st.sampled_from(["norm", "head", "12 %"]),
    "modules": st.lists(st.sampled_from(["a", "b", "0"]), min_size=1, max_size=4),
}


@st.composite
def said(draw: st.DrawFn) -> list[tuple[str, Sentence]]:
    """What several runs say, with two templates of random figures."""
    types = draw(st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=3))
    words = draw(st.sampled_from(["one", "two"]))
    found = []
    for number in range(draw(st.integers(1, 5))):
        template = f"{draw(st.sampled_from(['one', words]))} " + ", ".join(
            f"{{f{i}:{kind}}}" for i, kind in enumerate(types)
        )
        figures = {f"f{i}": draw(NUMBERS[kind]) for i, kind in enumerate(types)}
        found.append((f"run {number}", Sentence(template=template, figures=figures)))
    return found


@given(said())
def test_a_joined_sentence_is_true_of_each_of_its_runs(found: list[tuple[str, Sentence]]) -> None:
    groups = join(found)
    assert sorted(name for group in groups for name in group.runs) == sorted(name for name, _ in found)
    mine = dict(found)
    for group in groups:
        assert [mine[name] for name in group.runs] == group.sentences
        for sentence in group.sentences:
            assert sentence.template == group.sentences[0].template
            for _, name, kind, _ in string.Formatter().parse(sentence.template):
                if name:
                    assert _covers(group.sentences, name, kind or "", sentence.figures[name], group.text)


def _covers(group: list[Sentence], name: str, kind: str, figure: Any, text: str) -> bool:
    """Whether the sentence of the group shows this figure, or a range that holds it."""
    mine = shown(figure, kind)
    if all(shown(one.figures[name], kind) == mine for one in group):
        return mine in text
    values = [one.figures[name] for one in group]
    if kind.startswith("of "):
        low, high = min(number for number, _ in values), max(number for number, _ in values)
        return (f"{low:,} – {high:,}" if low != high else f"{low:,} ") in text
    ends = sorted(math.inf if value is None else value for value in values)
    low, high = (shown(None if end == math.inf else end, kind) for end in (ends[0], ends[-1]))
    return (
        f" – {high}" in text
        and low.rpartition(" ")[0] in text
        and ends[0] <= (math.inf if figure is None else figure) <= ends[-1]
    )


@given(said())
def test_a_sentence_of_one_run_has_no_range(found: list[tuple[str, Sentence]]) -> None:
    for _, sentence in found:
        text = joined([sentence])
        assert all(
            shown(sentence.figures[name], kind or "") in text
            for _, name, kind, _ in string.Formatter().parse(sentence.template)
            if name
        )


def test_runs_with_other_words_have_sentences_of_their_own() -> None:
    ablated = say("with {kept:modules} in fp32 the error is {after:error}", kept=["norm"], after=4.3e-4)
    other = say("with {kept:modules} in fp32 the error is {after:error}", kept=["norm"], after=2.8e-2)
    groups = join(
        [
            ("half", ablated),
            ("bfloat16", other),
            ("autocast-fp16", say("with {kept:modules} in fp32 it passes", kept=["norm"])),
        ]
    )
    assert [group.runs for group in groups] == [["half", "bfloat16"], ["autocast-fp16"]]
    assert groups[0].text == "with norm in fp32 the error is 4.3e-04 – 2.8e-02"


# -- the statements of a result


def test_statements_name_runs_of_the_result() -> None:
    names = {label(run) for run in RESULT.runs}
    found = statements(RESULT)
    assert found
    for statement in found:
        assert set(statement.runs) <= names, statement
        assert len(statement.figures) == max(1, len(statement.runs)), statement
        assert statement.kind in kinds()


def test_statements_are_saved_and_said_again() -> None:
    saved = msgspec.structs.replace(RESULT, statements=statements(RESULT))
    again = ScanResult.from_json(saved.to_json())
    assert again.statements == statements(again) == saved.statements


def test_statements_of_an_older_version_are_read() -> None:
    saved = msgspec.structs.replace(RESULT, statements=statements(RESULT))
    older = json.loads(saved.to_json())
    for statement in older["statements"]:
        statement["disproof"] = "running the model so"
    assert ScanResult.from_json(json.dumps(older)).statements == saved.statements != []


def test_every_kind_says_what_it_is() -> None:
    assert kinds()
    for kind in kinds().values():
        assert (kind.make.__doc__ or "").partition("\n\n")[0].rstrip().endswith("."), kind.name


def test_the_order_of_statements_depends_on_no_import() -> None:
    code = "import lowprec_check.analysis.statements.evidence, lowprec_check.features.training.statements\n"
    code += "from lowprec_check.analysis.statements.kinds import kinds\nprint(*kinds())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == list(kinds())
    assert " verdict amp-use way-out no-plan first-call weight-cast patch-of-script passes " in done.stdout


def _of(result: ScanResult, kind: str) -> list[Statement]:
    return [found for found in statements(result) if found.kind == kind]


def with_runs(*runs: Any, **more: Any) -> ScanResult:
    return msgspec.structs.replace(RESULT, runs=[run("fp32", tolerance=None), *runs], plan=None, **more)


def test_an_ablation_that_does_not_help_withdraws_the_shares() -> None:
    """x * 3e-7 in a module: the error is in its input."""
    blamed = next(found for found in budgeted_result().runs if _of(with_runs(found), "shares"))
    before = blamed.output_error.rel_l2 if blamed.output_error else None
    assert before is not None
    for after, is_told in ((0.95 * before, False), (0.5 * before, True)):
        tried = Ablation(keep_fp32=["head"], blamed_for="share", status="inaccurate", rel_l2=after)
        result = with_runs(msgspec.structs.replace(blamed, ablation=tried))
        assert bool(_of(result, "shares")) == is_told
        assert ("does not help" in _of(result, "ablation")[0].text) != is_told


def test_ablations_of_two_runs_keep_their_figures() -> None:
    def failing(name: str, after: float) -> Any:
        tried = Ablation(keep_fp32=["head"], blamed_for="share", status="ok", rel_l2=after)
        return run(name, "inaccurate", 0.2, ablation=tried)

    (found,) = _of(with_runs(failing("half", 4.3e-4), failing("autocast-fp16", 2.8e-2)), "ablation")
    assert found.runs == ["half", "autocast-fp16"]
    assert [figures["after"] for figures in found.figures] == [4.3e-4, 2.8e-2]
    assert "4.3e-04 – 2.8e-02" in found.text


def test_a_verdict_near_its_limit_says_so_and_is_not_green() -> None:
    near = run("half", "ok", 9.8e-3, latency=latency(4.0, 2.0), peak_memory_bytes=1 << 20)
    from lowprec_check.analysis.conclusion import conclude

    result = conclude(with_runs(near, diagnostics=[]))
    (verdict,), (passes,) = _of(result, "verdict"), _of(result, "passes")
    assert verdict.text == "Use half"
    assert verdict.tone == "warn"
    assert "on 1 of 1 input, at 98 % of the tolerance" in passes.text
    assert re.search("other inputs can exceed it", passes.text)


def test_faster_says_than_what() -> None:
    from lowprec_check.analysis.conclusion import conclude

    fast = run("half", "ok", 1e-3, latency=latency(4.0, 2.0))
    result = conclude(with_runs(fast, diagnostics=[]))
    for found in statements(result):
        assert not re.search(r"\b(faster|slower)\b(?! than fp32| or slower than fp32)", found.text), found.text
