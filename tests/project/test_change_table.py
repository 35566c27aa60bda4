"""The table "where to add what" of docs/architecture.md: each is added to a copy, in as many files as it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

TOY_BACKEND = '''"""Eager mode under another name."""

from lowprec_check.schema.axes import Backend, Code


class Toy(Backend):
    name = "toy"
    summary = "the model itself"

    def prepare(self, model, example):
        return model

    def code(self, key, model):
        return Code()


TOY = Toy()
'''

TOY_FORMAT = '''"""The status of each run, a word each."""

from lowprec_check.report.registry import ReportFormat


class ToyFormat(ReportFormat):
    name = "toy"
    suffixes = (".toy",)

    def render(self, result):
        return " ".join(run.status for run in result.runs)


FORMAT = ToyFormat()
'''

TOY_WAY = '''"""The optimizer, under another name."""

from lowprec_check.features.training.ways.usual import OptimizerWay

WAYS = (OptimizerWay(name="toy-way", words="toy", summary="the optimizer, again.", order=90, kinds=("cast",)),)
'''

TOY_RULE = '''"""A rule about nothing."""

from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.schema.statements import plain


@rule("LP998", "toy-rule", "note")
def toy_rule(result):
    """Every scan has one."""
    yield Finding(plain("the toy rule is a toy"))
'''

NEW_FILES = {
    "backend": ("engine/backends/toy.py", TOY_BACKEND),
    "report format": ("report/formats/toy.py", TOY_FORMAT),
    "way to train": ("features/training/ways/toy.py", TOY_WAY),
    "diagnostic": ("analysis/rules/toy.py", TOY_RULE),
}
"""What takes a file, its path, and its content."""

NEW_ENTRIES = {
    "precision": (
        "schema/precisions.py",
        '        Precision(name="half", kind="cast"',
        '        Precision(name="toy-cast", kind="cast", format=BF16, method="bfloat16"),\n',
    ),
    "format of eight or four bits": (
        "features/quantize/formats.py",
        '    Format(\n        name="nvfp4"',
        '    Format(name="toy-bits", weights="toy", config="None", imports=()),\n',
    ),
    "device": ("schema/axes.py", '        Device(name="mps"', '        Device(name="toydevice"),\n'),
}
"""What takes an entry in a list, the file, the entry that it comes before, and the entry."""

USES = """
import torch
import lowprec_check
from lowprec_check.report.registry import FORMATS
from lowprec_check.schema.axes import BACKENDS, DEVICES

model, x = torch.nn.Linear(8, 8).eval(), torch.ones(2, 8)
options = dict(isolation="none", times="off", plan=False, further_inputs=0)
result = lowprec_check.scan(model, x, precisions="toy-cast", backends="eager,toy", **options)
for run in result.runs:
    print("run", run.precision, run.backend, run.status)
print("bits", BACKENDS.get("toy-bits").summary)
print("diagnostic", *(diagnostic.code for diagnostic in result.diagnostics))
print("format", FORMATS.get("toy").render(result))
print("device", DEVICES.get("toydevice").name)
trained = lowprec_check.scan(model, x, precisions="toy-cast", train=True, **options)
print("ways", *(way.name for way in trained.runs[1].training.ways))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a copy of the package with one more of each prints of them."""
    folder = tmp_path_factory.mktemp("changed")
    package = folder / "lowprec_check"
    shutil.copytree(ROOT / "lowprec_check", package, ignore=shutil.ignore_patterns("*-pytest-*.pyc"))
    shutil.copytree(ROOT / "catalog", folder / "catalog")
    for path, content in NEW_FILES.values():
        (package / path).write_text(content, encoding="utf-8")
    for path, before, entry in NEW_ENTRIES.values():
        text = (package / path).read_text(encoding="utf-8")
        assert text.count(before) == 1, path
        (package / path).write_text(text.replace(before, entry + before), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ("precision", "run toy-cast eager ok"),
        ("backend", "run toy-cast toy ok"),
        ("format of eight or four bits", "bits torchao: linear layers with weights in toy"),
        ("diagnostic", "LP998"),
        ("report format", "format ok ok ok"),
        ("device", "device toydevice"),
        ("way to train", "toy-way"),
    ],
)
def test_one_file_is_changed_or_added(added: str, shown: str, printed: str) -> None:
    """The feature and the quantity of op calls, which take a folder, are in ``test_features.py``."""
    assert (added in NEW_FILES) != (added in NEW_ENTRIES)
    assert shown in printed
