"""The catalog's reports, in Markdown and as reports/op-support.html: history of each operator, counts, gains."""

from __future__ import annotations

import re

import pytest

from lowprec_check.catalog import declared
from lowprec_check.catalog.answers import difference, gaps
from lowprec_check.catalog.measured import history, sweep_of, sweeps
from lowprec_check.catalog.records import LOW, MODES, Mode, TorchRelease
from lowprec_check.report.blocks import Document, Table
from lowprec_check.report.layout.markdown import markdown
from tools.catalog_report import catalog_document, label, releases, word

FORWARD = 3
"""The column of the forward pass."""


@pytest.fixture(scope="module")
def document() -> Document:
    return catalog_document()


@pytest.fixture(scope="module")
def rows(document: Document) -> dict[tuple[str, str, str], list[str]]:
    """Cells by operator, dtype and device."""
    [table] = [block for block in document.blocks if isinstance(block, Table) and block.name == "operators"]
    return {(row.cells[0], row.cells[1], row.cells[2]): list(row.cells) for row in table.rows}


@pytest.fixture(scope="module")
def shown(document: Document) -> str:
    return markdown(document, 10**9)


def of(device: str, name: str) -> TorchRelease:
    [found] = [release for release in releases() if (release.device, label(release)) == (device, name)]
    return found


# -- the history of an operator


def test_no_means_that_fp32_runs() -> None:
    fp32: dict[Mode, Mode] = {"forward": "forward", "autocast": "forward", "backward": "backward"}
    for sweep in sweeps():
        for op in sweep.records:
            for mode, plain in fp32.items():
                shown = word(sweep, op, "float16", mode)
                if shown in ("no", "not even in fp32"):
                    runs = sweep.state(op, "float32", plain) in ("all", "some")
                    assert runs == (shown == "no"), (op, mode, label(sweep))


def test_a_row_is_what_every_build_says(rows: dict[tuple[str, str, str], list[str]]) -> None:
    on_cpu = [release for release in releases() if release.device == "cpu" and not release.extension]
    for op in ("cdist", "special.i1", "_upsample_bilinear2d_aa"):
        for mode, cell in zip(MODES, rows[op, "half", "cpu"][FORWARD:], strict=False):
            said = [
                part.removeprefix("from ").split(" ", 1) if part.startswith("from ") else ["", part]
                for part in cell.split(", ")
            ]
            changes = dict(said)
            shown = changes.pop("", "–")
            for release in on_cpu:
                shown = changes.pop(label(release), shown)
                assert word(release, op, "float16", mode) in (shown, "–")
            assert not changes


def test_operators_that_always_run_have_no_row(rows: dict[tuple[str, str, str], list[str]]) -> None:
    always = {
        op
        for op in history("cpu")[-1].records
        if all((op, "half", device) not in rows for device in ("cpu", "cuda", "xpu"))
    }
    assert {"mul", "jiterator_unary"} & always == {"mul", "jiterator_unary"}
    for release in releases():
        words = {word(release, "mul", dtype, mode) for dtype in LOW for mode in MODES}
        assert words <= {"yes", "–"}


def test_partly_and_wholly_on_the_cpu_differ(rows: dict[tuple[str, str, str], list[str]]) -> None:
    assert rows["dot", "half", "xpu"][FORWARD] == "on the CPU, from 2.11 yes"
    assert rows["matmul", "half", "xpu"][FORWARD] == "partly on the CPU, from 2.11 yes"


def test_an_operator_without_gradient_has_none_on_xpu() -> None:
    assert not sweep_of("cpu").records["argmax"].samples[1]
    assert word(of("xpu", "2.15"), "argmax", "float16", "backward") == "–"
    assert word(of("xpu", "2.15"), "argmax", "float16", "forward") == "yes"


def test_reasons_are_for_the_dtype_and_the_device(rows: dict[tuple[str, str, str], list[str]]) -> None:
    for device in ("cpu", "cuda", "xpu"):
        assert rows["cdist", "bfloat16", device][-1]
        assert "Half" not in rows["cdist", "bfloat16", device][-1]
    assert "'BFloat16'" in rows["cdist", "bfloat16", "cpu"][-1]
    assert "in the measured samples it runs only where" in rows["cdist", "bfloat16", "cpu"][-1]
    assert rows["angle", "half", "cuda"][-1] == "2.11: \"angle_cuda\" not implemented for 'Half'"


# -- counts, gains


def test_the_document_counts_what_is_declared_for_xpu(shown: str) -> None:
    found = re.findall(r"^\| xpu +\| ([\d.]+) +\| declared +\| (\d+) ", shown, re.M)
    assert found == [(release, str(gaps("xpu", "float16", release).runnable)) for release in declared.releases("xpu")]


def test_the_document_lists_what_xpu_gained(shown: str) -> None:
    found = shown.partition("#### Gained and lost by version on xpu (declared)")[2].partition("\n###")[0]
    lists = dict(re.findall(r"^- \*\*([\d.]+)\*\*: (.*)$", found.replace("\\", ""), re.M))
    assert list(lists) == list(declared.releases("xpu"))[1:]
    gained = difference("2.11", "2.12", "xpu").gained
    assert gained
    assert all(change.op in lists["2.12"] for change in gained)
    assert re.search(r"less on the CPU in half: [^;]*\bdot\b", lists["2.11"])
