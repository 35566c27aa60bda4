"""Pages: blocks as HTML, tables that only pages have, charts; in a real browser without errors and network."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from browser import opened
from hypothesis import given
from hypothesis import strategies as st
from shared_result import MODULES, budgeted, budgeted_result, gap, op_calls, run, shared_result

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.report import charts
from lowprec_check.report.blocks import (
    Chart,
    CodeBlock,
    Column,
    Document,
    ErrorOf,
    Fold,
    Heading,
    Link,
    Pairs,
    Row,
    Say,
    SpeedOf,
    Table,
)
from lowprec_check.report.layout.html import fragment, html
from lowprec_check.report.manual import manual_blocks
from lowprec_check.report.page_blocks import (
    MOST_CALLS,
    MOST_ROWS,
    calls_inside,
    module_table,
    operator_table,
    page_blocks,
    range_blocks,
    scan_page,
    source_table,
)
from lowprec_check.report.registry import render
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.verdict import LOOKS

RESULT = shared_result()
LARGEST = 2 * 2**20


def column(table: Table, name: str) -> list[Any]:
    """The cells of a column."""
    index = [known.name for known in table.columns].index(name)
    return [row.cells[index] for row in table.rows]


def every_block() -> Document:
    columns = [
        Column("run", "run"),
        Column("status", "status"),
        Column("error", "error", "How far it is off."),
        Column("speed", "speed"),
        Column("share", "share"),
        Column("op", "op"),
        Column("module", "module"),
        Column("more", "link"),
        Column("severity", "severity"),
    ]
    cells = ["half", "ok", ErrorOf(1e-3, 1e-2), SpeedOf("faster", 1.8), 0.25, "aten.mm.default", "a.b"]
    row = Row(
        [*cells, Link("docs", "https://example.org"), "warning"],
        "recommended",
        module="a.b",
    )
    below = [Table([Column("call", "number")], [Row([1])], "calls")]
    rows = [row, *(row._replace(cells=["bfloat16", *[None] * 8], tag="", below=below) for _ in range(9))]
    return Document(
        "all",
        [
            Say("The title", role="title"),
            Say("Use half.", "good", "verdict"),
            Say("It passes: 1.0e-03.", role="hint"),
            Say("one", "bad", "item", "half"),
            CodeBlock("model.half()"),
            Heading("Runs", anchor="runs"),
            Table(columns, rows, "runs", searchable=True, left_out=3),
            Fold("More", [Pairs([("torch", "2.13")], "environment")], detail="more"),
            Chart("A chart", lambda: "<svg role='img' aria-label='a'></svg>", detail="all"),
        ],
        "tool 1",
    )


# -- the layout


def test_every_block_is_laid_out() -> None:
    page = html(every_block())
    for part in (
        "<h1>The title</h1>",
        '<div class="verdict good">',
        '<li class="bad"><b>half</b> one</li>',
        "model.half()",
        '<h2 id="runs">Runs</h2>',
        '<nav aria-label="Sections"><a href="#runs">Runs</a></nav>',
        f'title="{LOOKS["ok"].meaning}"',
        'style="--w:50%;--t:67%" title="tolerance 1e-02"',
        "1.8 × as fast",
        'style="--a:20%;--b:40%"',
        '<code title="aten.mm.default">mm</code>',
        '<a class="module" href="#m=a.b"><code>a.b</code></a>',
        '<a href="https://example.org">docs</a>',
        "3 of 13 rows are not shown",
        "<dt>error</dt><dd>How far it is off.</dd>",
        "<summary>More</summary>",
        "<dt>torch</dt><dd>2.13</dd>",
        "<svg role='img'",
        '<tr class="below"><td colspan="9">',
        "<footer>tool 1</footer>",
        "<span class=tight>1.0e-03</span>",
    ):
        assert part in page, part


@pytest.mark.parametrize(
    ("target", "is_link"),
    [
        ("https://a.b/c", True),
        ("#runs", True),
        ("models/a-b.html", True),
        ("javascript:alert(1)", False),
        ("//a.b", False),
        ("data:x", False),
    ],
)
def test_a_link_leads_nowhere_but_to_the_web_the_page_or_a_file_beside_it(target: str, is_link: bool) -> None:
    page = html(Document("t", [Table([Column("a", "link"), Column("b")], [Row([Link("text", target), "x"])])]))
    assert ("<a href=" in page.partition("<tbody>")[2]) == is_link


@given(
    st.one_of(
        st.text(max_size=40),
        st.sampled_from(["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}", "{0}"]),
    )
)
def test_no_text_becomes_markup(text: str) -> None:
    def parts(shown: str) -> list[str]:
        return re.findall(r"<(/?\w+)", re.sub(r"<style>.*?</style>|<script>.*?</script>", "", shown, flags=re.DOTALL))

    columns = [Column(text, kind, text) for kind in ("text", "run", "sentence", "code", "op", "module", "source")]  # type: ignore[arg-type]
    blocks = [
        Say(text, lead=text),
        Heading(text),
        Table(columns, [Row([text] * 7, text, module=text)], text),
        CodeBlock(text),
        Pairs([(text, text)], text),
        Fold(text, []),
    ]
    plain = [word if not isinstance(word, str) else "x" for word in parts(html(Document(text, blocks, text)))]
    assert parts(html(Document(text, blocks, text))).count("script") == 0
    assert "img" not in parts(html(Document(text, blocks, text)))
    assert len(plain) > 20


def test_only_the_script_of_the_page_may_run_and_nothing_is_loaded() -> None:
    page = render(RESULT, "html")
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]
    assert not re.findall(r"\son\w+=|<link|<img|@import|url\(|src=", page)


def test_a_negative_share_has_a_bar_to_the_left() -> None:
    page = html(Document("t", [Table([Column("a"), Column("b", "share")], [Row(["x", -0.1]), Row(["y", 0.1])])]))
    assert re.findall(r'style="(--a[^"]*)"', page) == ["--a:12%;--b:20%", "--a:20%;--b:28%"]


def test_sentences_show_code_and_links_and_manuals_lists() -> None:
    page = html(Document("t", [Say("call `x < 1` (see https://example.org/a?b=1)."), *manual_blocks(rules()["LP301"])]))
    assert 'call <code>x &lt; 1</code> (see <a href="https://example.org/a?b=1">https://example.org/a?b=1</a>).' in page
    assert "<b>Usual causes</b> the other findings" in page
    assert page.count("<ol><li>") == 1
    assert page.count("<li>Use the precision that the scan recommends.</li>") == 1


@pytest.mark.parametrize("code", sorted(rules()))
def test_no_manual_shows_raw_markdown(code: str) -> None:
    page = html(Document("t", list(manual_blocks(rules()[code]))))
    body = page.partition("<main")[2].partition("</main>")[0]
    prose = re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", body, flags=re.DOTALL)
    assert not re.findall(r"`|\*\*|^(?:- |\d+\. )|\]\(", re.sub(r"<[^>]+>", "\n", prose), re.MULTILINE)


def test_a_fragment_has_neither_scripts_nor_styles() -> None:
    shown = fragment(scan_page(RESULT))
    assert "<script" not in shown
    assert "<style" not in shown
    assert "Use half with 2 of 6 modules in fp32" in shown


def test_pages_are_small() -> None:
    assert len(render(budgeted_result(), "html")) < 300_000


# -- sums of op calls


def calls_of(*rows: OpCall) -> Any:
    return msgspec.structs.replace(run("half", "inaccurate", 0.5), op_calls=to_columns(rows))


a_call = st.builds(
    OpCall,
    op=st.sampled_from(["aten.mm.default", "aten.add.Tensor", "torch.fft.rfft"]),
    module=st.sampled_from(MODULES),
    source=st.sampled_from([None, "net.py:3", "net.py:4", "other.py:1"]),
    dtypes=st.sampled_from(["f16→f16", "f32→f16", ""]),
    local_error=st.none() | st.floats(0, 10),
    accumulated_error=st.none() | st.floats(0, 10),
    introduced_inf=st.integers(0, 3),
    recast=st.integers(0, 1),
)


@given(st.lists(a_call, min_size=1, max_size=30))
def test_operators_are_plain_sums_over_the_op_calls(rows: list[OpCall]) -> None:
    table = operator_table(calls_of(*rows))
    assert table is not None
    names = [known.name for known in table.columns]
    assert sum(column(table, "calls")) == len(rows)
    for row in table.rows:
        cells = dict(zip(names, row.cells, strict=True))
        mine = [one for one in rows if one.op == cells["op"]]
        assert cells["calls"] == len(mine)
        assert cells.get("repeated casts") == (sum(one.recast for one in mine) or None)
        lost = sum(one.introduced_inf for one in mine)
        assert cells.get("Inf or NaN") == (lost or None)
        errors = [one.accumulated_error for one in mine if one.accumulated_error is not None]
        if lost:
            assert cells["worst error"].error is None
        elif errors:
            assert cells["worst error"] == ErrorOf(max(errors), 1e-2)
        locals_ = [one.local_error for one in mine if one.local_error is not None]
        assert cells.get("worst of the op itself") == (max(locals_) if locals_ else None)


@given(st.lists(a_call, min_size=1, max_size=30))
def test_a_module_holds_the_worst_of_all_inside(rows: list[OpCall]) -> None:
    found = calls_inside(calls_of(*rows))
    for path, calls in found.items():
        inside = [one for one in rows if one.module == path or one.module.startswith(f"{path}.") or not path]
        assert len(calls.positions) == len(inside)
        assert calls.total("accumulated_error") == max(
            (one.accumulated_error for one in inside if one.accumulated_error is not None), default=None
        )
        assert calls.total("introduced_nan") == sum(one.introduced_inf for one in inside)


def test_an_op_unfolds_its_worst_calls() -> None:
    rows = [OpCall("aten.mm.default", f"m{i}", accumulated_error=i / 1000) for i in range(100)]
    table = operator_table(calls_of(*rows))
    assert table is not None
    [calls] = table.rows[0].below
    assert isinstance(calls, Table)
    assert column(calls, "module") == [f"m{i}" for i in range(99, 99 - MOST_CALLS, -1)]
    assert calls.left_out == 100 - MOST_CALLS


def test_shares_of_modules_are_those_of_the_budget() -> None:
    failing = budgeted_result().run("bfloat16")
    shares = dict(
        zip(
            column(table := module_table([failing]), "module"),
            column(table, "bfloat16 share"),
            strict=True,
        )
    )
    assert shares["head"] == pytest.approx(0.46)
    assert shares["encoder.blocks"] == pytest.approx(0.21)
    assert shares[""] == pytest.approx(0.74)


def test_a_budget_that_explains_too_little_shows_no_shares() -> None:
    failing = budgeted_result().run("bfloat16")
    vague = msgspec.structs.replace(failing, budget=msgspec.structs.replace(failing.budget, unexplained=0.6))
    assert not [known.name for known in module_table([vague]).columns if "share" in known.name]


def test_children_follow_their_parent_in_the_order_of_execution() -> None:
    rows = [OpCall("aten.mm.default", module, accumulated_error=1.0) for module in ("b.x", "a", "b.y", "a.z.w")]
    table = module_table([calls_of(*rows)])
    assert column(table, "module") == ["", "b", "b.x", "b.y", "a", "a.z", "a.z.w"]
    assert [row.depth for row in table.rows] == [0, 1, 2, 2, 1, 2, 3]


def test_the_deepest_of_very_many_modules_are_left_out() -> None:
    rows = [OpCall("aten.mm.default", f"m{i}.deep", accumulated_error=1.0) for i in range(MOST_ROWS)]
    table = module_table([calls_of(*rows)])
    assert (len(table.rows), table.left_out) == (MOST_ROWS, MOST_ROWS + 1)
    assert all(row.depth < 2 for row in table.rows)


def test_an_error_in_a_run_that_passes_is_not_marked() -> None:
    passes = msgspec.structs.replace(calls_of(OpCall("aten.mm.default", "a", accumulated_error=0.9)), status="ok")
    assert column(module_table([passes]), "half error") == [ErrorOf(0.9, None)] * 2


def test_the_recommended_run_is_among_those_with_columns() -> None:
    calls = op_calls(9)
    runs = [run("fp32", tolerance=None)]
    runs += [run("half", "inaccurate", 0.5, backend=f"b{i}", op_calls=calls) for i in range(4)]
    plan = msgspec.structs.replace(RESULT.runs[-1], op_calls=calls)
    blocks = list(page_blocks(msgspec.structs.replace(RESULT, runs=[*runs, plan])))
    [modules] = [block for block in blocks if isinstance(block, Table) and block.name == "modules"]
    names = [known.name for known in modules.columns]
    assert names == ["module", "half · b0 error", "half · b1 error", "half · b2 error", "plan (half) error"]
    assert any(isinstance(block, Say) and "4 of 5 runs" in block.text for block in blocks)


# -- the user's code


def with_code(result: ScanResult) -> ScanResult:
    lines = {f"net.py:{number}": f"x = f{number}(x)" for number in range(20, 32)}
    return msgspec.structs.replace(result, source_lines=lines)


def test_the_code_shows_ops_shares_and_gaps_at_its_lines() -> None:
    result = with_code(budgeted_result())
    table = source_table(result, [result.run("bfloat16"), result.run("half")])
    assert table is not None
    rows = {
        row.cells[0]: dict(zip([known.name for known in table.columns], row.cells, strict=True)) for row in table.rows
    }
    assert [*rows] == ["net.py", *map(str, range(20, 27)), "31"]
    line = rows["23"]
    assert line["code"] == "x = f23(x)"
    assert "linalg_cholesky_ex: missing-kernel (half)" in line["found"]
    assert "quantile: unsupported-dtype (half)" in rows["31"]["found"]
    calls = result.run("bfloat16").op_calls
    shares = [share for source, share in zip(calls.source, calls.share, strict=True) if source == "net.py:23"]
    assert (line["bfloat16 share"] or 0.0) == pytest.approx(sum(shares))


def test_without_the_text_of_a_line_there_is_no_code() -> None:
    assert source_table(RESULT, [RESULT.run("bfloat16")]) is None


# -- the ends of the range


def test_value_ranges_are_shown_only_where_values_leave_the_range() -> None:
    quiet = msgspec.structs.replace(RESULT, diagnostics=[])
    assert list(range_blocks(quiet, quiet.runs[1:])) == []
    shown = [block.title for block in range_blocks(RESULT, RESULT.runs) if isinstance(block, Fold)]
    assert any(title.startswith("autocast-fp16: ") and "ends of the range of fp16" in title for title in shown)


# -- charts


def svg(chart: Chart | None, *, narrow: bool = False) -> ElementTree.Element:
    """The chart as a wide window shows it, or a narrow one."""
    assert chart is not None
    wide, for_phones = ElementTree.fromstring(f"<all>{chart.draw()}</all>")
    return for_phones if narrow else wide


def numbers(found: ElementTree.Element, tag: str, name: str) -> list[float]:
    return [float(one.attrib[name]) for one in found.iter(tag)]


def test_the_trade_off_has_a_dot_for_each_run_that_was_timed_and_compared() -> None:
    runs = [
        run("fp32", latency_ms=10.0),
        run("bfloat16", "inaccurate", 0.31, latency_ms=5.0),
        run("half", "ok", 1e-3, latency_ms=20.0),
        run("autocast-fp16", "error"),
    ]
    result = msgspec.structs.replace(RESULT, runs=runs)
    found = svg(charts.tradeoff(result))
    fast, slow = numbers(found, "circle", "cx")
    inaccurate, exact = numbers(found, "circle", "cy")
    assert fast > slow
    assert inaccurate < exact
    assert [one.text for one in found.iter("title")] == [
        "bfloat16: 2.0 × as fast, error 3.1e-01, 1.00 × the memory, inaccurate",
        "half: 2.0 × slower, error 1.0e-03, 1.00 × the memory, ok",
    ]
    assert {one.text for one in found.iter("text")} >= {"bfloat16", "half", "fp32", "tolerance of bf16 and fp16"}


def test_an_interval_without_ends_goes_from_edge_to_edge() -> None:
    runs = [
        run("fp32", latency_ms=0.2),
        run("half", "ok", 1e-3, latency_ms=0.1),
        run("bfloat16", "ok", 1e-2, latency_ms=0.1),
    ]
    found = svg(charts.tradeoff(msgspec.structs.replace(RESULT, runs=runs)))
    whiskers = [one.attrib for one in found.iter("line") if one.attrib.get("stroke-width") == "1.5"]
    frame = next(
        one.attrib
        for one in found.iter("line")
        if one.attrib["stroke"] == "var(--dim)" and one.attrib["y1"] == one.attrib["y2"]
    )
    assert [(one["x1"], float(one["x2"])) for one in whiskers] == [
        (f"{float(frame['x1']):.1f}", float(frame["x2"]))
    ] * 2


def test_names_in_the_trade_off_do_not_overlap() -> None:
    runs = [run("fp32", latency_ms=10.0)]
    runs += [
        run(name, "ok", 1e-3, latency_ms=10.0 + i / 100)
        for i, name in enumerate(("half", "bfloat16", "autocast-fp16", "autocast-bf16"))
    ]
    found = svg(charts.tradeoff(msgspec.structs.replace(RESULT, runs=runs)))
    names = {one.label if hasattr(one, "label") else one.precision for one in runs[1:]}
    boxes = [
        (
            float(one.attrib["x"]),
            float(one.attrib["y"]) - 12,
            float(one.attrib["x"]) + 6 * len(one.text or ""),
            float(one.attrib["y"]) + 3,
        )
        for one in found.iter("text")
        if one.text in names
    ]
    assert len(boxes) == 4
    assert not [
        (a, b)
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


def along(*rows: OpCall, narrow: bool = False) -> ElementTree.Element:
    return svg(charts.error_along([calls_of(*rows)]), narrow=narrow)


def test_the_error_along_the_model_is_thinned_to_its_worst_calls() -> None:
    rows = [(i, OpCall("aten.mm.default", accumulated_error=1.0 if i == 4321 else 1e-3)) for i in range(10_000)]
    kept = list(charts.worst_of_segments(rows, charts.MOST_POINTS))
    assert len(kept) <= charts.MOST_POINTS
    assert 4321 in [index for index, _ in kept]
    chart = charts.error_along([calls_of(*(row for _, row in rows))])
    assert chart is not None
    assert len(chart.draw()) < 100_000


def test_an_error_of_exactly_zero_neither_breaks_nor_drops_the_line() -> None:
    errors = [1e-4, 0.0, 0.0, 2e-4, 3e-4, None, 5e-4, 0.0]
    found = along(*(OpCall("aten.mm.default", accumulated_error=error) for error in errors))
    [line] = [one.attrib["d"] for one in found.iter("path") if one.attrib["stroke"] == "var(--s1)"]
    assert (line.count("M"), line.count("L")) == (1, 3)


def test_the_line_breaks_at_inf_and_nan() -> None:
    rows = [OpCall("aten.mm.default", accumulated_error=error) for error in (1e-4, 2e-4, 1e-3, 1e-3)]
    rows[2] = OpCall("aten.exp.default", introduced_inf=3)
    found = along(*rows)
    [line] = [one.attrib["d"] for one in found.iter("path") if one.attrib["stroke"] == "var(--s1)"]
    assert line.count("M") == 2
    assert {"✕", "✕ Inf or NaN"} <= {one.text for one in found.iter("text")}
    assert "exp · the model itself\nhalf: Inf or NaN" in [one.text for one in found.iter("title")]


def test_one_chart_has_a_line_for_each_precision_over_the_same_modules() -> None:
    """Under autocast more ops are called: casts lie between the others, and those of weights are left out."""
    modules = [f"blocks.{i // 2}" for i in range(8)] + ["head"] * 2
    cast = [OpCall("aten.mm.default", module, accumulated_error=1e-3) for module in modules]
    autocast = []
    for number, module in enumerate(modules):
        autocast.append(OpCall("aten._to_copy.default", module, accumulated_error=0.9))
        autocast.append(OpCall("aten._to_copy.default", module, accumulated_error=1e-4, reads=(number % 2,)))
        autocast.append(OpCall("aten.mm.default", module, accumulated_error=2e-3, reads=(1,)))
    runs = [run("half", "ok", 1e-3, op_calls=to_columns(cast))]
    runs.append(run("autocast-fp16", "ok", 1e-3, op_calls=to_columns(autocast)))
    chart = charts.error_along(runs)
    found = svg(chart)
    half, other = ([*found.iter("path")][at].attrib["d"] for at in (0, 1))
    assert (half.count("L"), other.count("L")) == (9, 19)
    ends = [re.split("[ML ]", line)[-2] for line in (half, other)]
    assert ends[0] == ends[1], "the last op of both runs is one place"
    texts = [one.text for one in found.iter("text")]
    assert {"half", "autocast-fp16", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"} <= {*texts}
    assert chart is not None
    assert "Casts of weights are left out: their error is at most 9.0e-01 (autocast-fp16)" in chart.name


def test_ticks_are_the_modules_at_which_the_model_divides() -> None:
    blocks = along(*(OpCall("aten.mm.default", f"model.layers.{i // 9}", accumulated_error=1e-3) for i in range(27)))
    assert {"model.layers.0", "model.layers.1", "model.layers.2"} <= {one.text for one in blocks.iter("text")}
    shared = along(*(OpCall("aten.mm.default", "ab"[i % 2], accumulated_error=1e-3) for i in range(5000)))
    assert len([*shared.iter("line")]) < 300


def test_a_run_that_overflows_at_once_is_drawn_too() -> None:
    healthy = [OpCall("aten.mm.default", accumulated_error=1e-3)] * 4
    runs = [run("bfloat16", "ok", 1e-3, op_calls=to_columns(healthy))]
    runs.append(run("half", "nonfinite", op_calls=to_columns([OpCall("aten.mm.default", introduced_inf=3)])))
    found = svg(charts.error_along(runs))
    assert {"bfloat16", "half", "✕", "✕ Inf or NaN"} <= {one.text for one in found.iter("text")}
    assert charts.error_along(runs[1:]) is None


def test_a_tree_scrolls_on_a_phone_and_other_tables_become_cards() -> None:
    columns = [Column("a"), Column("b", "number"), Column("c", "number")]
    for depth in (0, 1):
        page = html(Document("t", [Table(columns, [Row(["x", 1, 2]), Row(["y", 1, 2], depth=depth)])]))
        assert ('<table class="cards">' in page) == (depth == 0)


@pytest.mark.parametrize("narrow", [False, True])
@given(st.lists(st.tuples(st.sampled_from([*MODULES, "a" * 40, "ab.c.d"]), st.integers(1, 9)), min_size=1, max_size=9))
def test_names_below_the_error_along_the_model_do_not_overlap(narrow: bool, stretches: list[tuple[str, int]]) -> None:
    rows = [
        OpCall("aten.mm.default", module, accumulated_error=1e-3) for module, calls in stretches for _ in range(calls)
    ]
    found = along(*rows, *(OpCall("aten.mm.default", "z", accumulated_error=1e-3) for _ in range(3)), narrow=narrow)
    labels = [one for one in found.iter("text") if one.attrib["y"] == "275"]
    assert labels
    ends = sorted((float(one.attrib["x"]), float(one.attrib["x"]) + 6.6 * len(one.text or "")) for one in labels)
    assert all(right < left for (_, right), (left, _) in pairwise(ends))
    assert ends[-1][1] <= float(found.attrib["viewBox"].split()[2])


@pytest.mark.parametrize("text", ["<b>&\"'", "a" * 500, "\u202e"])
def test_charts_show_foreign_text_as_it_is(text: str) -> None:
    chart = charts.error_along(shared_result(text).runs)
    for narrow in (False, True):
        assert "b" not in {one.tag for one in svg(chart, narrow=narrow).iter()}


# -- in the browser


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_and_begins_with_what_to_do(browser: Any, page_of: Any, scheme: str) -> None:
    with opened(browser, page_of(with_code(budgeted_result())), color_scheme=scheme) as page:
        assert page.locator(".verdict .words").inner_text() == "Use half with 2 of 6 modules in fp32."
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        page.select_option("#theme", "dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(browser: Any, page_of: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, page_of(with_code(budgeted_result())), color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        found = axe.run(page).response["violations"]
        assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 1000, 390])
def test_the_page_never_scrolls_sideways(browser: Any, page_of: Any, width: int) -> None:
    for result in (with_code(budgeted_result()), shared_result("x" * 400)):
        with opened(browser, page_of(result), viewport={"width": width, "height": 800}) as page:
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_module_is_chosen_with_a_click_and_shown_alone(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result())) as page:
        modules = page.locator("table", has=page.locator("caption", has_text=re.compile("^modules$"))).first
        assert modules.locator("tbody tr:visible").count() == len(MODULES) + 1
        modules.locator("a.module", has_text="blocks").first.click()
        page.locator("#filter").wait_for(state="visible")  # the page follows its address a little later
        shown = modules.locator("tbody tr:visible th").all_inner_texts()
        assert [name.strip() for name in shown] == ["the model itself", "encoder", "blocks", "0", "norm", "1"]
        assert page.inner_text("#filter") == "Only rows of encoder.blocks · show all"
        page.locator("#filter a").click()
        page.locator("#filter").wait_for(state="hidden")
        assert modules.locator("tbody tr:visible").count() == len(MODULES) + 1
        assert not page.locator("#filter").is_visible()


@pytest.mark.slow
def test_rows_are_folded_searched_and_sorted_with_the_keyboard(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result())) as page:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        modules = page.locator("table", has=page.locator("caption", has_text=re.compile("^modules$"))).first
        encoder = modules.get_by_role("button", name="Rows below encoder", exact=True)
        encoder.focus()
        page.keyboard.press("Enter")
        assert modules.locator("tbody tr:visible").count() == 4
        page.get_by_role("searchbox", name="Search modules").fill("norm")
        assert modules.locator("tbody tr:visible").count() == 1
        findings = page.locator("table", has=page.locator("caption", has_text=re.compile("^findings$"))).first
        findings.get_by_role("button", name="severity").press("Enter")
        shown = findings.locator("tbody tr:visible .badge").all_inner_texts()
        assert shown == sorted(shown, key=["error", "warning", "note"].index)
        findings.get_by_role("button", name="severity").press("Enter")
        assert findings.locator("tbody tr:visible .badge").all_inner_texts() == shown[::-1]


@pytest.mark.slow
def test_without_scripts_everything_is_there(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result()), java_script_enabled=False) as page:
        assert page.locator("tr[hidden]").count() == 0
        assert page.locator(".below").first.evaluate("row => getComputedStyle(row).display") == "table-row"
        assert not page.locator("#themes").is_visible()


@pytest.mark.slow
def test_print_is_light_and_hides_nothing(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result()), color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("details:not([open])").count() == 0
        assert page.locator(".facts").last.is_visible()
        assert page.locator(".below").first.is_visible()
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details:not([open])").count() > 0


@pytest.mark.slow
def test_a_large_scan_gives_a_page_that_opens(browser: Any, page_of: Any, tmp_path: Path) -> None:
    text = [f"encoder.layers.{i}.attention" for i in range(2000)]
    runs = [run("fp32", tolerance=None)]
    for name in ("half", "bfloat16", "autocast-fp16", "autocast-bf16"):
        calls = op_calls(20_000)
        runs.append(
            budgeted(
                run(name, "inaccurate", 0.5, op_calls=msgspec.structs.replace(calls, module=text * 10), gaps=[gap()])
            )
        )
    path = page_of(msgspec.structs.replace(RESULT, runs=runs))
    assert path.stat().st_size < LARGEST
    with opened(browser, path) as page:
        assert page.locator("tbody tr").count() > MOST_ROWS
