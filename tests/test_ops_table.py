"""The operator table: every figure is that of the saved JSON, computed again here with plain Python."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import opened
from conftest import ROOT
from shared_result import budgeted_result, gap, op_calls, run, shared_result

from lowprec_check.report.html import charts, operator_table
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import ScanResult

SAVED = {
    name: ROOT / "reports" / name
    for name in ("scans/t5_feed_forward.json", "scans/whitening.json", "training/train_language_model.json")
}


# -- what the table must show, from the JSON alone


Row = dict[str, Any]
NAMES = ("local_error", "accumulated_error", "time_ms", "reference_ms", "share")


def is_inside(module: str, wanted: str | None) -> bool:
    return wanted is None or module == wanted or module.startswith(wanted + ".")


def rows_of_json(saved: Mapping[str, Any], module: str | None, wanted: str = "") -> dict[tuple[str, str], Row]:
    """The figures of each op and phase of a run of the saved JSON, by plain sums."""
    columns = saved["op_calls"]
    calls = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    by_op: dict[tuple[str, str], list[Row]] = {}
    for call in calls:
        texts = (call["op"], call["module"], call["source"] or "", call["dtypes"])
        if is_inside(call["module"], module) and any(wanted in text.lower() for text in texts):
            by_op.setdefault((call["op"], call.get("phase") or ""), []).append(call)
    return {key: figures(found) for key, found in by_op.items()}


def figures(calls: list[Row]) -> Row:
    known = {name: [call[name] for call in calls if call.get(name) is not None] for name in NAMES}
    pairs = [(call["time_ms"], call["reference_ms"]) for call in calls if call["time_ms"] is not None]
    pairs = [(time, reference) for time, reference in pairs if reference]
    ratios = [time / reference for time, reference in pairs]
    spread = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else None
    changes = 0
    for call in calls:
        before, after = call["dtypes"].split("→") if "→" in call["dtypes"] else ("", "")
        changes += bool(before) and bool(after) and sorted(set(before.split("+"))) != sorted(set(after.split("+")))
    lost = [call["introduced_inf"] + call["introduced_nan"] for call in calls]
    return {
        "calls": len(calls),
        "ms": sum(known["time_ms"]) if known["time_ms"] else None,
        "ratio": sum(time for time, _ in pairs) / sum(reference for _, reference in pairs) if pairs else None,
        "spread": (spread[0], spread[2]) if spread else None,
        "local": max(known["local_error"], default=None),
        "accumulated": "Inf/NaN" if any(lost) else max(known["accumulated_error"], default=None),
        "share": sum(known["share"]) if known["share"] else None,
        "changes": changes,
        "recast": sum(call.get("recast", 0) for call in calls),
        "dtypes": Counter(call["dtypes"] for call in calls),
        "nonfinite": sum(lost),
    }


# -- what it shows


READ = """() => [...document.querySelectorAll("#ops tbody tr.op")].map((row) => ({
    op: row.querySelector("th bdi").textContent,
    phase: (row.querySelector("th > .spread") || {textContent: ""}).textContent,
    cells: Object.fromEntries([...row.cells].slice(1).map((cell) => [cell.dataset.head, cell.textContent.trim()])),
}))"""


def rows_of_page(page: Any) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["op"], row["phase"]): row["cells"] for row in page.evaluate(READ)}


def is_shown(text: str, value: float | None) -> bool:
    """Whether ``text`` is ``value`` rounded to the digits that it has."""
    if value is None:
        return text == "–"
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return bool(abs(float(text) - value) <= 0.501 * unit)


def is_share(text: str, share: float | None) -> bool:
    if share is None:
        return text == "–"
    return text == ("< 1 %" if abs(share) < 0.005 else f"{math.floor(share * 100 + 0.5)} %")


def compare(shown: Mapping[str, str], row: Row, total: float) -> None:
    """Each cell of a row of the page with the figures of the JSON."""
    assert shown["calls"] == f"{row['calls']:,}"
    if "ms" in shown:
        assert is_shown(shown["ms"], row["ms"])
        share = None if row["ms"] is None else 100 * row["ms"] / total
        assert is_shown(shown["time share"].removesuffix(" %"), share)
    if "× fp32" in shown:
        ratio, _, spread = shown["× fp32"].partition(" × ")
        assert is_shown(ratio, row["ratio"])
        if row["spread"]:
            assert all(map(is_shown, spread.split(" – "), row["spread"]))
        elif row["ratio"] is not None:
            assert spread == ("no spread" if row["calls"] == 1 else "1 call timed")
    assert is_shown(shown["local"], row["local"])
    if row["accumulated"] == "Inf/NaN":
        assert shown["accumulated"] == "Inf/NaN"
    else:
        assert is_shown(shown["accumulated"], row["accumulated"])
    casts = f"{row['changes']:,}" if row["changes"] or row["recast"] else "–"
    assert shown.get("dtype changes", "–") == casts + (f" {row['recast']:,} repeated" if row["recast"] else "")
    dtypes = shown.get("dtypes", shown.get("autocast's choice", ""))
    (frequent, count), others = row["dtypes"].most_common(1)[0], len(row["dtypes"]) - 1
    assert count >= row["dtypes"][dtypes.partition(" ")[0]]
    more = f" +{others} other{'s' if others > 1 else ''}" if others else ""
    assert dtypes == (frequent.replace("→", "–") if frequent in ("→", "") else frequent) + more
    nonfinite = shown.get("Inf/NaN", "").partition(" ")[0]
    assert nonfinite == (f"{row['nonfinite']:,}" if row["nonfinite"] else "")


def compare_run(page: Any, saved: Mapping[str, Any], module: str | None, wanted: str = "") -> int:
    """All rows of a run in a module; how many figures were compared."""
    shown, expected = rows_of_page(page), rows_of_json(saved, module, wanted)
    total = sum(time for time in saved["op_calls"]["time_ms"] if time is not None)
    without_calls = {key for key, cells in shown.items() if cells["calls"] == "–"}
    assert shown.keys() - without_calls == expected.keys()
    for key, row in expected.items():
        compare(shown[key], row, total)
    gaps = Counter[tuple[str, str]]()
    for found in saved["gaps"]:
        if is_inside(found["module"], module) and not wanted:
            phase = found.get("phase", "forward") if any(saved["op_calls"].get("phase") or []) else ""
            gaps[found["op"], phase] += found["calls"]
    if not wanted:
        assert {key: cells["no kernel"] for key, cells in shown.items() if cells.get("no kernel")} == {
            key: f"✕ {count}" for key, count in gaps.items()
        }
    return sum(map(len, shown.values()))


def choose(page: Any, index: int, module: str | None) -> None:
    page.evaluate("([run, module]) => choose({ run, module })", [index, module])


def drawn(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs that the page draws."""
    return [found for found in saved["runs"] if found["precision"] != "fp32" and found["op_calls"]["op"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_every_figure_is_that_of_the_saved_scan(browser: Any, page_of: Any, name: str) -> None:
    saved, compared = json.loads(SAVED[name].read_text(encoding="utf-8")), 0
    with opened(browser, page_of(ScanResult.load(SAVED[name]))) as page:
        for index, found in enumerate(drawn(saved)):
            modules = sorted({module.split(".")[0] for module in found["op_calls"]["module"] if module})
            for module in (None, *modules[:3], max(found["op_calls"]["module"], key=len)):
                if module == "":
                    continue
                choose(page, index, module)
                compared += compare_run(page, found, module)
    assert compared > 300


def busy_calls(count: int, seed: int = 0) -> OpCalls:
    """Calls of which every column holds something, drawn at random."""
    draw = random.Random(seed)
    ops = ["aten.mm.default", "aten._to_copy.default", "aten.add.Tensor", "aten.index.Tensor"]
    dtypes = ["bf16→bf16", "f32→bf16", "bf16→f32", "bf16+f32→bf16+f32", "bf16+f32→f32", "→", "→f32"]
    maybe = lambda value: None if draw.random() < 0.1 else value  # noqa: E731
    rows = [
        {
            "op": draw.choice(ops),
            "module": f"net.{draw.randrange(12)}.{draw.choice(['a', 'b'])}",
            "source": f"net.py:{draw.randrange(40)}",
            "dtypes": draw.choice(dtypes),
            "local_error": maybe(draw.choice([0.0, 10 ** draw.uniform(-7, 1)])),
            "accumulated_error": maybe(draw.choice([0.0, 10 ** draw.uniform(-7, 1)])),
            "introduced_inf": draw.choice([0] * 50 + [7]),
            "introduced_nan": draw.choice([0] * 50 + [3]),
            "recast": draw.choice([0, 0, 1]),
            "time_ms": maybe(round(10 ** draw.uniform(-3, 2), 4)),
            "reference_ms": maybe(round(10 ** draw.uniform(-3, 2), 4)),
        }
        for _ in range(count)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return OpCalls(**columns)


def busy_result(count: int) -> ScanResult:
    runs = [
        run("fp32", tolerance=None),
        run("autocast-bf16", "ok", 1e-3, op_calls=busy_calls(count)),
        run("half", "error", gaps=[gap(module="net.3.a")], op_calls=busy_calls(count, 1)),
    ]
    return msgspec.structs.replace(shared_result(), runs=runs)


def as_json(result: ScanResult, tmp_path: Path) -> Any:
    result.save(tmp_path / "scan.json")
    return json.loads((tmp_path / "scan.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [400, 30_000])
def test_figures_are_of_all_calls_of_a_run_also_if_not_all_are_drawn(
    browser: Any, page_of: Any, tmp_path: Path, count: int
) -> None:
    result = busy_result(count)
    saved = as_json(result, tmp_path)
    with opened(browser, page_of(result)) as page:
        for index, found in enumerate(drawn(saved)):
            for module in (None, "net", "net.3", "net.11.b"):
                choose(page, index, module)
                assert compare_run(page, found, module) >= 30
                remark = page.inner_text("#ops-remark")
                assert ("of 30,000 that are drawn, the worst of each segment" in remark) == (count > charts.MOST_CALLS)
                assert "not all" not in remark


@pytest.mark.slow
def test_figures_that_are_not_of_all_calls_say_so(browser: Any, page_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_table, "MOST_SUMS", 4)
    with opened(browser, page_of(busy_result(30_000))) as page:
        choose(page, 0, "net.3")
        assert "These are not all: of the 30,000 calls of this run, 15,000" in page.inner_text("#ops-remark")
        choose(page, 0, None)
        assert "not all" not in page.inner_text("#ops-remark")
        page.fill("#ops-filter", "net.py:7")
        assert "These are not all" in page.inner_text("#ops-remark")


@pytest.mark.slow
def test_the_shares_of_the_error_are_those_of_the_calls_and_of_the_inputs(browser: Any, page_of: Any) -> None:
    result = budgeted_result()
    found = result.run("bfloat16")
    by_op = Counter[str]()
    for op, share in zip(found.op_calls.op, found.op_calls.share, strict=True):
        by_op[op] += share
    with opened(browser, page_of(result)) as page:
        choose(page, 0, None)
        shown = {op: cells["error share"] for (op, _), cells in rows_of_page(page).items()}
    assert shown.pop("cast input") == "5 %"
    assert shown.keys() == by_op.keys()
    assert all(is_share(shown[op], share) for op, share in by_op.items())


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["_to_copy", "net.7", "net.py:3", "bf16+f32→f32"])
def test_the_search_finds_ops_modules_lines_and_dtypes(browser: Any, page_of: Any, tmp_path: Path, wanted: str) -> None:
    result = busy_result(400)
    with opened(browser, page_of(result)) as page:
        page.fill("#ops-filter", wanted.upper())
        choose(page, 0, "net")
        compare_run(page, drawn(as_json(result, tmp_path))[0], "net", wanted)
        page.fill("#ops-filter", "nothing of this name")
        assert rows_of_page(page) == {}
        assert page.inner_text("#ops-remark").startswith("0 ops, 0 calls found")


@pytest.mark.slow
def test_each_column_sorts_both_ways_and_unknown_figures_come_last(browser: Any, page_of: Any) -> None:
    calls = busy_calls(300)
    never_timed = [None if op == "aten.mm.default" else time for op, time in zip(calls.op, calls.time_ms, strict=True)]
    calls = msgspec.structs.replace(calls, time_ms=never_timed)
    result = msgspec.structs.replace(shared_result(), runs=[run("fp32", tolerance=None), run("half", op_calls=calls)])
    with opened(browser, page_of(result)) as page:
        buttons = page.locator("#ops thead button")
        assert page.locator("#ops th[aria-sort]").all_inner_texts() == ["ms"]
        orders = []
        for index in range(buttons.count()):
            for _ in range(2):
                buttons.nth(index).focus()
                page.keyboard.press("Enter")
                orders.append([op for op, _ in rows_of_page(page)])
                assert page.locator("#ops th[aria-sort]").count() == 1
            name, forward, backward = buttons.nth(index).inner_text(), orders[-2], orders[-1]
            assert page.locator("#ops thead th").nth(index).get_attribute("aria-sort") == (
                "descending" if name in ("op", "dtypes") else "ascending"
            )
            if name in ("ms", "time share", "× fp32"):
                assert forward[-1] == backward[-1] == "aten.mm.default"
                assert forward[:-1] == backward[-2::-1]
        assert orders[0] == sorted(set(calls.op))
        milliseconds = [cells["ms"] for cells in rows_of_page(page).values()]
        assert len(milliseconds) == 4


@pytest.mark.slow
def test_an_op_unfolds_to_some_of_its_calls_and_to_more(browser: Any, page_of: Any) -> None:
    calls = busy_calls(4000)
    result = msgspec.structs.replace(shared_result(), runs=[run("fp32", tolerance=None), run("half", op_calls=calls)])
    rows = "#ops tbody tr"
    with opened(browser, page_of(result)) as page:
        button = page.get_by_role("button", name="aten.mm.default")
        assert button.get_attribute("aria-expanded") == "false"
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-expanded") == "true"
        assert page.locator(f"{rows}.call").count() == 25 + 1
        slowest = max(
            (time, index)
            for index, (op, time) in enumerate(zip(calls.op, calls.time_ms, strict=True))
            if op == "aten.mm.default" and time is not None
        )[1]
        first = page.locator(f"{rows}.call").first.inner_text()
        assert all(text in first for text in (f"call {slowest + 1}", calls.module[slowest], calls.source[slowest]))
        for _ in range(20):
            if not (more := page.locator(".more button")).count():
                break
            more.click()
        assert 500 <= page.locator(f"{rows}.call").count() <= 600
        assert "more calls: search by module or line" in page.locator(".more").inner_text()
        button.click()
        assert page.locator(f"{rows}.call").count() == 0
        assert page.locator(rows).count() == 4


@pytest.mark.slow
def test_columns_of_which_nothing_is_known_are_left_out(browser: Any, page_of: Any) -> None:
    calls = op_calls(30)
    bare = msgspec.structs.replace(calls, time_ms=[None] * 30, reference_ms=[None] * 30, outcome=["ok"] * 30)
    runs = [run("fp32", tolerance=None), run("half", op_calls=bare), run("autocast-bf16", op_calls=calls)]
    with opened(browser, page_of(msgspec.structs.replace(shared_result(), runs=runs))) as page:
        heads = page.locator("#ops thead th")
        choose(page, 0, None)
        assert heads.all_inner_texts() == ["op", "calls", "local", "accumulated", "dtypes"]
        assert "ms" not in page.inner_text("#ops-remark")
        choose(page, 1, None)
        assert heads.all_inner_texts() == [
            *("op", "calls", "ms", "time share", "× fp32", "local", "accumulated", "autocast's choice", "no kernel")
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_an_unfolded_table_is_accessible_and_fits(browser: Any, page_of: Any, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page_ = page_of(busy_result(400))
    with opened(browser, page_, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        page.locator("#ops .unfold").first.click()
        assert [rule["id"] for rule in axe.run(page, context="#ops").response["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            page.evaluate(
                "(() => { const t = document.querySelector('#ops'); return t.scrollWidth - t.parentElement.clientWidth })()"
            )
            <= 0
        )


# -- without a browser


def test_a_mix_of_dtypes_that_stays_the_same_is_no_change() -> None:
    changed = ["f32→bf16", "bf16+f32→f32", "f32→complex64"]
    same = ["bf16→bf16", "bf16+f32→f32+bf16", "→", "→f32", "f32→", ""]
    assert all(map(operator_table.changes_dtype, changed))
    assert not any(map(operator_table.changes_dtype, same))


def test_quartiles_of_one_value_are_not_known() -> None:
    assert operator_table.quartiles([2.0]) == (None, None)
    assert operator_table.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
