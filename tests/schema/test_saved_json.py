"""The saved JSON for other programs: every key is described, and columns load into pandas."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import ROOT
from shared_result import shared_result
from training_result import training_result

from lowprec_check.core.machine import environment
from lowprec_check.report.registry import render
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Columns, Part, ScanResult

sys.path.insert(0, str(ROOT / "tools"))
from saved_fields import KEYS

RESULT = shared_result()
SCHEMA = json.loads((ROOT / "docs" / "schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["schema.json", "coverage-schema.json"])
def test_every_key_has_a_description(name: str) -> None:
    schema = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))
    found = {
        f"{kind}.{key}": value for kind, one in schema["$defs"].items() for key, value in one["properties"].items()
    }
    assert len(found) > 10
    assert [key for key, value in found.items() if not value.get("description", "").strip()] == []
    assert not [
        key for key, value in found.items() if ":class:" in value["description"] or "``" in value["description"]
    ]


def keys_in(value: Any, kind: str) -> Iterator[tuple[str, str]]:
    """The keys that a saved value has, each with the class in the schema that describes it."""
    described = SCHEMA["$defs"][kind]["properties"]
    for key, inner in value.items():
        yield kind, key
        for name in re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(described.get(key, {}))):
            for one in inner if isinstance(inner, list) else [inner]:
                if isinstance(one, dict):
                    yield from keys_in(one, name)


@pytest.mark.parametrize("result", [RESULT, training_result()])
def test_the_schema_lists_what_is_saved(result: Any) -> None:
    found = set(keys_in(json.loads(result.to_json()), "ScanResult"))
    assert {"OpCalls", "Run", "Diagnostic", "Gap"} <= {kind for kind, _ in found}
    for kind, key in found:
        assert key in SCHEMA["$defs"][kind]["properties"], (kind, key)


def test_the_keys_of_environment_and_options_are_described() -> None:
    assert set(environment("cpu")) == set(KEYS["environment"])
    assert set(ScanOptions().saved("fork")) | {"fail_on", "baseline"} == set(KEYS["options"])


# -- columns


@pytest.mark.parametrize("part", Part.__args__)  # type: ignore[attr-defined]
def test_columns_have_one_length(part: Part) -> None:
    columns = RESULT.columns(part)
    assert len({len(column) for column in columns.values()}) == 1
    rows = {
        "runs": len(RESULT.runs),
        "op_calls": sum(len(run.op_calls) for run in RESULT.runs),
        "gaps": sum(len(run.gaps) for run in RESULT.runs),
        "diagnostics": len(RESULT.diagnostics),
    }
    assert len(columns["precision"]) == rows[part]


def test_columns_are_those_of_the_runs() -> None:
    calls = RESULT.columns("op_calls")
    assert [*calls] == ["precision", "backend", "memory_format", *OpCall.__struct_fields__]
    half = [op for op, precision, backend in zip(calls["op"], calls["precision"], calls["backend"], strict=True)
            if (precision, backend) == ("half", "eager")]  # fmt: skip
    assert half == RESULT.run("half").op_calls.op
    runs = RESULT.columns("runs")
    errors = [run.output_error and run.output_error.rel_l2 for run in RESULT.runs]
    assert runs["output_error.rel_l2"] == errors
    assert runs["latency.speedup.median"][2] == 1.38
    assert not any(isinstance(value, (list, dict, msgspec.Struct)) for column in runs.values() for value in column)


@pytest.mark.parametrize("name", ["text", "markdown", "html"])
def test_a_file_with_the_policies_of_an_older_version_is_read_and_rendered(name: str) -> None:
    result = training_result()
    saved = json.loads(result.to_json())
    row = {"policy": "DDP bf16_compress_hook", "computes_in": "fp32", "reduced": "once", "micro_batches": 4}
    saved["options"]["policies"], saved["policies"] = 4, [row | {"status": "ok", "gradient_error": 1.7e-3}]
    for run in saved["runs"]:
        run["policies"] = []
    read = ScanResult.from_json(json.dumps(saved))
    expected = msgspec.structs.replace(result, options=result.options | {"policies": 4})
    assert read == expected
    assert render(read, name) == render(expected, name)


def test_an_unknown_part_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="known are runs, op_calls, gaps, diagnostics"):
        RESULT.columns("calls")  # type: ignore[arg-type]


def test_a_result_without_runs_has_no_rows() -> None:
    empty: Columns = msgspec.structs.replace(RESULT, runs=[], diagnostics=[]).columns("op_calls")
    assert {len(column) for column in empty.values()} == {0}


def test_the_lines_in_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pandas = pytest.importorskip("pandas")
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    [code] = re.findall(r"(?s)```python\n(import pandas\n.*?)```", text)
    RESULT.save(tmp_path / "scan.json")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    shown = capsys.readouterr().out
    assert "aten.convolution.default" in shown
    assert "autocast-bf16" in shown
    run = json.loads((tmp_path / "scan.json").read_text())["runs"][3]
    assert len(pandas.DataFrame(run["op_calls"])) == len(RESULT.run("half").op_calls)


def test_columns_do_not_depend_on_what_was_measured() -> None:
    bare = [msgspec.structs.replace(run, latency=None, output_error=None, gaps=[]) for run in RESULT.runs]
    result = msgspec.structs.replace(RESULT, runs=bare, diagnostics=[])
    for part in ("runs", "gaps", "diagnostics"):
        assert {*RESULT.columns(part)} == {*result.columns(part)}, part
    assert result.columns("runs")["latency.median_ms"] == [None] * len(bare)
    assert result.columns("diagnostics")["code"] == []
