"""Whatever a file holds, reading it ends in a result or in a sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import ROOT, Call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import MANIFEST, SETTINGS, mutated

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin import manifest
from lowprec_check.report.registry import render
from lowprec_check.schema.base import decode
from lowprec_check.schema.matrix import Matrix
from lowprec_check.schema.scan_result import ResultError, ScanResult

SAVED = (ROOT / "reports" / "scans" / "masked_attention.json").read_bytes()
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(st.integers(0, 2**32), st.sampled_from(["text", "md", "html", "sarif", "junit", "github"]))
def test_a_saved_scan_is_shown_or_refused(seed: int, shape: str) -> None:
    try:
        result = ScanResult.from_json(mutated("saved.json", SAVED, random.Random(seed)))
    except ResultError:
        return
    assert render(result, shape)


@FEW
@given(st.integers(0, 2**32))
def test_settings_are_used_or_refused(call: Call, tmp_path: Path, seed: int) -> None:
    (tmp_path / "pyproject.toml").write_bytes(mutated("pyproject.toml", SETTINGS.encode(), random.Random(seed)))
    assert call("explain", "LP101", folder=tmp_path).returncode in (0, 2)


@FEW
@given(st.integers(0, 2**32))
def test_a_manifest_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "known.toml"
    path.write_bytes(mutated("known.toml", MANIFEST.encode(), random.Random(seed)))
    try:
        entries = manifest.read(path)
    except UsageError:
        return
    for entry in entries:
        entry.names("test_model.py::test_fails")


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_an_integer_of_more_than_64_bits_is_refused(number: int) -> None:
    text = SAVED.replace(b'"parameters":', b'"parameters":%d,"x":' % number, 1)
    with pytest.raises(ResultError, match="more than 64 bits"):
        ScanResult.from_json(text)
    assert ScanResult.from_json(SAVED.replace(b'"parameters":', b'"parameters":%d,"x":' % (2**63 - 1), 1))


def test_digits_in_a_text_are_no_integer() -> None:
    assert decode(b'{"schema": 1, "rows": [], "x": "9999999999999999999999"}', Matrix, 1) == Matrix(rows=[])
