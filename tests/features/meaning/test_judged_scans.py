"""A scan judges by the measure that fits, and says so; what it prints and saves follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lowprec_check import render, scan
from lowprec_check.analysis.diff import diff_scans
from lowprec_check.errors import UsageError
from lowprec_check.features.meaning.statements import by_meaning
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.verdict import Meaning
from lowprec_check.torchkit.output_comparison import NOTHING


class CausalLMOutput(dict[str, Tensor]):
    """An output like that of a language model."""


class Language(nn.Module):
    """Predicts a token from the one before; sure of each, or of none."""

    def __init__(self, scale: float, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.scale, self.noise = scale, noise

    def forward(self, tokens: Tensor) -> CausalLMOutput:
        logits = self.head(self.embedding(tokens)) * self.scale
        if logits.dtype != torch.float32:  # a fault of low precision alone
            logits = logits + self.noise * torch.arange(50.0, dtype=logits.dtype).sin()
        return CausalLMOutput(logits=logits)


def scanned(model: nn.Module, **options: object) -> ScanResult:
    tokens = torch.arange(40).reshape(2, 20)
    quick = {"precisions": "bfloat16", "device": "cpu", "times": "off", "isolation": "none", "further_inputs": 2}
    return scan(model.eval(), tokens, **{**quick, **options})


def test_tokens_decide_where_fp32_is_sure() -> None:
    result = scanned(Language(scale=8.0))
    run = result.runs[1]
    assert run.status == "ok"
    assert run.by_meaning is not None
    assert run.by_meaning.measure == "tokens"
    assert run.tolerance == pytest.approx(run.by_meaning.limit)
    assert "limit of tokens" in " ".join(statement.text for statement in result.statements)
    screen = render(result, "text")
    assert "judged by tokens (CausalLMOutput)" in " ".join(screen.split())
    assert run.by_meaning.shown in screen  # beside the part of its limit, not the relative error


def test_a_fault_is_told_in_tokens() -> None:
    result = scanned(Language(scale=8.0, noise=40.0))
    run = result.runs[1]
    assert run.status == "inaccurate"
    assert run.by_meaning is not None
    messages = [finding.message for finding in result.diagnostics if finding.code == "LP301"]
    assert "of the tokens agree" in messages[0] or "KL divergence" in messages[0]
    before = scanned(Language(scale=8.0))
    changes = [change.what for change in diff_scans(before, result).changes if change.kind == "error"]
    assert changes
    assert changes[0].startswith("the part of the limit of tokens is")
    assert not [change for change in diff_scans(before, before).changes if change.kind == "error"]


class Detector(nn.Module):
    """Keeps the best 4 of 8 boxes, of which the fourth and the fifth change places by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.011, 0.993, 1.0, 1.0, 1.0]))

    def forward(self, inputs: Tensor) -> list[dict[str, Tensor]]:
        scores = inputs * self.weight
        corners = torch.arange(8, dtype=scores.dtype)[:, None].expand(8, 2) * 8
        kept = scores.topk(4).indices
        boxes = torch.cat([corners, corners + 8], 1)[kept]
        return [{"boxes": boxes, "labels": torch.ones(4), "scores": scores[kept]}]


def test_a_finding_says_which_box_is_lost() -> None:
    scores = torch.tensor([0.99, 0.97, 0.95, 0.904, 0.92, 0.2, 0.1, 0.1])
    quick = {"precisions": "bfloat16", "device": "cpu", "times": "off", "isolation": "none", "further_inputs": 0}
    result = scan(Detector().eval(), scores, **quick)
    run = result.runs[1]
    assert run.by_meaning is not None
    assert (run.status, run.by_meaning.measure) == ("inaccurate", "boxes")
    assert run.by_meaning.examples[0] == "box 3 (score 0.91) is lost"
    found = [finding for finding in result.diagnostics if finding.code == "LP304"]
    assert "topk" in found[0].message
    assert "box 3 (score 0.91) is lost" in found[0].message
    assert "box 3 (score 0.91) is lost" in " ".join(render(result, "text").split())


def test_the_error_decides_where_fp32_is_not_sure_or_if_it_is_asked_for() -> None:
    run = scanned(Language(scale=0.1)).runs[1]
    assert run.by_meaning is None
    assert run.output_error is not None
    assert run.output_error.meaning is not None
    assert run.tolerance == 0.05
    reason = "judged by the relative error, not by tokens: fp32 itself is not sure"
    assert reason in " ".join(render(scanned(Language(scale=0.1)), "text").split())
    run = scanned(Language(scale=8.0), judge="rel_l2").runs[1]
    assert run.output_error is not None
    assert run.output_error.meaning is None


def test_a_measure_that_cannot_tell_is_named_only_where_the_error_decides() -> None:
    told = Meaning(measure="tokens", figures={}, decides=True)
    unsure = Meaning(measure="audio", figures={}, cannot_tell="fp32 is silent")
    scan_of_tokens = scanned(Language(scale=8.0))
    run, warning = Run(precision="half", device="cpu", status="ok"), "judged by the relative error, not by audio: "
    for decides, beside, expected in ((told, [unsure], []), (unsure, [], [f"{warning}fp32 is silent"])):
        error = replace(NOTHING, meaning=decides, beside=beside)
        result = replace(scan_of_tokens, runs=[replace(run, output_error=error)])
        assert [said.sentence.text for said in by_meaning(result)] == expected


def test_a_result_is_saved_with_its_measure(tmp_path: Path) -> None:
    result = scanned(Language(scale=8.0))
    path = tmp_path / "scan.json"
    result.save(path)
    assert ScanResult.load(path).runs[1].output_error == result.runs[1].output_error


def test_an_unknown_measure_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="There is no measure 'tokns'"):
        scanned(Language(scale=1.0), judge="tokns")
