"""Every cell of the table of combinations: a scan that runs, or is refused with the sentence of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from lowprec_check.core.scan import scan_target
from lowprec_check.engine.model.target_source import load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.errors import UsageError
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from tools.combinations import ADDED, IGNORED, MODES, RUNS, answer, pairs

MODEL = """
import torch
from torch import nn


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 1), nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.conv(x).mean((2, 3)))


model = Convolutions().eval()


def inputs(batch=0):
    return torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(batch))
"""


def scanned(mode: str, added: str, folder: Path) -> ScanResult:
    """A scan of a tiny model with both."""
    asked = MODES[mode] | ADDED[added]
    path, weights = folder / "model.py", folder / "weights.safetensors"
    path.write_text(MODEL, encoding="utf-8")
    stream = "stream" in asked
    source = load_here(TargetSpec(str(path)), 0)
    if stream:
        save_file(source.target.model.state_dict(), weights)
        source = load_here(TargetSpec(str(path), weights=weights, stream=True), 0)
    given: dict[str, object] = {"precisions": "autocast-bf16", "times": "off", "plan": False, "budget_error": "off"}
    given |= {name: value for name, value in asked.items() if name != "stream"}
    # A stand-in and some backends change their process for good.
    isolation = "fork" if "predict" in asked or "backends" in asked else "none"
    return scan_target(source, isolation, ScanOptions(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "added"), [pair for pair in pairs() if answer(*pair).startswith(IGNORED)])
def test_what_has_no_effect_has_none(mode: str, added: str, tmp_path: Path) -> None:
    run = scanned(mode, added, tmp_path).runs[1]
    assert (run.status, ADDED[added], run.further_inputs) == ("ok", {"further_inputs": 2}, None)


@pytest.mark.parametrize(("mode", "added"), [pair for pair in pairs() if not answer(*pair).startswith((RUNS, IGNORED))])
def test_what_is_refused_is_refused_with_its_sentence(mode: str, added: str, tmp_path: Path) -> None:
    try:
        said = [run.reason for run in scanned(mode, added, tmp_path).runs[1:]]
    except UsageError as refused:
        said = [refused.message]
    assert said == [answer(mode, added)]


@pytest.mark.parametrize(("mode", "added"), [pair for pair in pairs() if answer(*pair) == RUNS])
def test_what_goes_together_runs(mode: str, added: str, tmp_path: Path) -> None:
    result = scanned(mode, added, tmp_path)
    run = next(run for run in result.runs if run.is_low)
    assert_shows(run, result, ADDED[added], MODES[mode])
    if run.backend == EAGER:
        assert run.status == "ok", run.reason
    elif run.status == "skipped":  # it is not installed, or not for this processor
        assert not str(run.reason).startswith("only eager runs")


def assert_shows(run: Run, result: ScanResult, added: dict[str, Any], mode: dict[str, Any]) -> None:
    """That each of the parts left its mark on the result."""
    asked = mode | added
    marks = {
        "train": run.training is not None,
        "predict": run.evidence == "predicted",
        "batches": run.batch_count == 2,
        "further_inputs": run.further_inputs is not None and run.further_inputs.tried == 2,
        "memory_formats": run.memory_format == "channels_last",
        "scenario": run.timing is not None,
        "stream": result.digest is not None,
    }
    assert {name: marks[name] for name in asked if name in marks} == {name: True for name in asked if name in marks}
