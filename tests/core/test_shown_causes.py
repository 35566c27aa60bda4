"""Why a row fails is shown when an experiment has told it, before what follows in the scan, and is true at its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from shared_result import gap, run

from lowprec_check.analysis.conclusion import causes_so_far, conclude
from lowprec_check.analysis.findings import Headline, groups, headlines
from lowprec_check.cli.progress import progress
from lowprec_check.core.session import scan_file
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.schema.findings import GapKind
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.verdict import ExceptionInfo

MODELS = {
    "an overflow": """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, x):
        mask = torch.full((8,), -1e5, dtype=torch.float32).to(x.dtype)
        x = self.first(x) + torch.softmax(torch.where(torch.arange(8) > 3, mask, 0.0), 0).to(x.dtype)
        return self.last(self.wide(x))
torch.manual_seed(0)
model = Net().eval()
with torch.no_grad():
    model.wide.weight.mul_(1e6)
inputs = torch.randn(4, 8)
""",
    "a missing kernel": """
import torch
from torch import nn
class Inverse(nn.Module):
    def forward(self, x):
        try:
            torch.linalg.qr(x)
        except RuntimeError:
            pass
        return torch.linalg.inv(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Inverse(), Inverse()
    def forward(self, x):
        return self.second(self.first(x) + 1)
model = Net().eval()
inputs = torch.eye(4) * 2 + torch.ones(4, 4)
""",
}


TWO_OVERFLOWS = """
import torch
from torch import nn
class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Scaled(70000.0), Scaled(80000.0)
    def forward(self, x):
        return torch.minimum(self.a(x), self.b(x)) * 1e-5
model = Net().eval()
inputs = torch.linspace(1, 2, 32).reshape(4, 8)
"""


def shown_for(result: ScanResult) -> list[Headline]:
    """The lines that a terminal shows."""
    return headlines(groups(causes_so_far(result)), None)


def first_place_of_failure(path: Path) -> str:
    """The module in which the model in half raises, or first gives Inf where fp32 does not, by hooks alone."""
    defined: dict[str, Any] = {}
    exec(path.read_text(), defined)
    model, inputs = defined["model"], defined["inputs"]
    entered: list[str] = []
    finite: dict[str, list[bool]] = {}
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        module.register_forward_hook(
            lambda *given, name=name: finite.setdefault(name, []).append(bool(given[-1].isfinite().all()))
        )
    for dtype in (torch.float32, torch.half):
        try:
            with torch.no_grad():
                model.to(dtype)(inputs.to(dtype))
        except RuntimeError:
            return entered[-1]
    return next(name for name, (fp32, half) in finite.items() if fp32 and not half)


@pytest.mark.parametrize("name", MODELS)
def test_the_cause_is_shown_before_the_row_has_all_else(name: str, tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(MODELS[name])
    module = first_place_of_failure(path)
    shown: list[ScanResult] = []
    before_the_row, last = 0, None
    options = ScanOptions(precisions=["half"], times="off", further_inputs=0)
    for result in scan_file(TargetSpec(str(path)), options, show=shown.append):
        if before_the_row == 0 and len(result.runs) > 1:
            before_the_row = len(shown)
        last = result
    assert last is not None
    causes = [shown_for(result) for result in shown[:before_the_row]]
    [first, *_] = filter(None, causes)
    assert causes[0] == [], "the verdict alone shows no op"
    assert f" of {module} (" in first[0].text
    assert "fails.py:" in first[0].text
    # What was shown is a finding of the whole scan, too.
    findings = conclude(last).diagnostics
    found = [d for d in findings if d.code == first[0].code and d.module == module and d.severity == "error"]
    assert found, findings
    assert all(d.message.rstrip(".") in first[0].text for d in found if d.code == "LP101")


def test_the_first_gap_that_raises_what_the_run_raised_is_shown_before_the_others(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(MODELS["a missing kernel"])
    shown: list[ScanResult] = []
    options = ScanOptions(precisions=["half"], times="off", further_inputs=0)
    *_, last = scan_file(TargetSpec(str(path)), options, show=shown.append)
    places = [[(gap.op, gap.module) for gap in result.runs[1].gaps] for result in shown if result.runs[1].gaps]
    qr, inv = "aten.linalg_qr.default", "aten.linalg_inv_ex.default"
    assert places[0] == [(qr, "first"), (inv, "first")], "the model catches the first, and the second raises"
    assert not shown[1].runs[1].op_calls
    assert [(gap.op, gap.module) for gap in last.runs[1].gaps] == [
        (o, m) for m in ("first", "second") for o in (qr, inv)
    ]
    [cause] = shown_for(shown[1])
    assert (cause.text.partition(" (")[0], "linalg_qr" in cause.text) == ("linalg_inv_ex of first", False)


RAISED = ExceptionInfo(type="NotImplementedError", message='"dot" not implemented', module="layer", source="net.py:3")


def result_of(*runs: Run) -> ScanResult:
    """A scan of fp32 and ``runs`` so far."""
    model = ModelInfo(name="Net", parameters=1, inputs=[], modules=1, training=False)
    fp32 = Run(precision="fp32", device="cpu", status="ok")
    return ScanResult(tool="t", target="t", model=model, environment={}, options={}, runs=[fp32, *runs])


def test_what_no_experiment_has_shown_is_no_cause() -> None:
    overflows = msgspec.structs.replace(run("half", "inaccurate", 0.5), budget=None)
    assert causes_so_far(result_of(overflows)) == []
    assert causes_so_far(result_of(run("half", "error", exception=RAISED, complete=False))) == []
    caught = run("half", "inaccurate", 0.5, gaps=[gap()])
    assert causes_so_far(result_of(caught)) == []


@pytest.mark.parametrize(("kind", "code"), [("scalar-overflow", "LP204"), ("numeric-failure", "LP305")])
def test_what_a_run_raised_is_its_cause_whatever_raised_it(kind: GapKind, code: str) -> None:
    raised = msgspec.structs.replace(gap(), kind=kind)
    [cause] = shown_for(result_of(run("half", "error", exception=RAISED, gaps=[raised])))
    assert cause.code == code
    assert shown_for(result_of(run("half", "inaccurate", 0.5, gaps=[raised]))) == []


def test_a_place_is_no_cause_before_it_was_tried_unless_it_is_the_first(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(TWO_OVERFLOWS)
    shown: list[ScanResult] = []
    options = ScanOptions(precisions=["half"], times="off", further_inputs=0)
    *_, last = scan_file(TargetSpec(str(path)), options, show=shown.append)
    found = {(d.code, d.module): d.severity for d in conclude(last).diagnostics if d.code == "LP201"}
    assert found == {("LP201", "a"): "error", ("LP201", "b"): "note"}, "Inf in b alone passes"
    causes = {(cause.code, cause.module) for result in shown for cause in causes_so_far(result)}
    assert causes == {("LP201", "a")}


def test_without_a_terminal_each_cause_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    missing = [gap(op="aten.dot.default", module="layer", source="net.py:3", message='"dot" not implemented')]
    fails = run("half", "error", exception=RAISED, gaps=missing)
    result, both = result_of(fails), result_of(fails, run("bfloat16", "error", exception=RAISED, gaps=missing))
    with progress(quiet=False) as shown:
        shown.judged(result_of(run("half", "error", exception=RAISED, complete=False)))
        assert not capsys.readouterr().err
        shown.judged(result)
        shown.done(result, 3)
        shown.done(both, 3)
    with progress(quiet=True) as shown:
        shown.judged(result)
    assert capsys.readouterr().err.splitlines() == [
        'LP101 missing-kernel (half): dot of layer (net.py:3): "dot" not implemented',
        'LP101 missing-kernel (bfloat16): dot of layer (net.py:3): "dot" not implemented',
    ]
    with progress(quiet=False) as shown:
        predicted = PredictedDevice(name="xpu", torch="2.13", kernels="declared", autocast="2.13")
        unmeasured = {"latency_ms": None, "peak_memory_bytes": None, "evidence": "predicted"}
        runs = [msgspec.structs.replace(run, **unmeasured) for run in result.runs]
        shown.done(msgspec.structs.replace(result, runs=runs, prediction=predicted), 3)
    assert capsys.readouterr().err.startswith("predicted: LP101 missing-kernel (half): dot of layer")
