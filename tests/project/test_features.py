"""The core does not need any feature: without its folder, a scan prints the same table of runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lowprec_check"
FEATURES = sorted(path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").exists())


def table_of(folder: Path) -> str:
    """The table of runs that the package in ``folder`` prints."""
    scan = [sys.executable, "-m", "lowprec_check", "scan", str(ROOT / "examples" / "whitening.py")]
    # As many further inputs are tried as there is time for.
    scan += ["--times", "off", "--further-inputs", "0"]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "100"}
    done = subprocess.run(scan, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed:" not in done.stdout
    found = re.search(r"^Runs\n(.+?)\n\n", done.stdout, re.MULTILINE | re.DOTALL)
    assert found is not None, done.stdout
    return found[1]


@pytest.fixture(scope="module")
def whole_table() -> str:
    """That of the whole package."""
    return table_of(ROOT)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_is_the_same_without_a_feature(feature: str, tmp_path: Path, whole_table: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "lowprec_check", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "lowprec_check" / "features" / feature)
    shutil.copytree(ROOT / "catalog", tmp_path / "catalog", dirs_exist_ok=True)
    assert table_of(tmp_path) == whole_table


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_says_what_it_adds_and_by_which_hooks(feature: str) -> None:
    text = (PACKAGE / "features" / feature / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 12
    code = (PACKAGE / "features" / feature / "run.py").read_text(encoding="utf-8")
    hooks = set(re.findall(r"\n    def (\w+)\(self, (?:source|runs|batches|options)", code)) | (
        {"measurements"} if "measurements = (" in code else set()
    )
    assert set(re.findall(r"^- `(\w+)`", text, re.MULTILINE)) == hooks & set(HOOKS)


HOOKS = ("mode", "measurements", "after_reference", "beside", "after_run", "timed", "after_runs")
"""The hooks of a feature, in the order of a scan."""
