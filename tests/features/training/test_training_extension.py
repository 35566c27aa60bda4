"""The job that trains with Intel's extension, without it: what happens if it fails. ``tests/ipex`` runs it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import sgd, trained, training

from lowprec_check.features.training import run as training_run
from lowprec_check.features.training.ways import extension_optimizers
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import TrainingRun

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
USUAL = ["plain", "one-autocast"]


def scanned(precision: str = "autocast-bf16", **options: Any) -> tuple[Run, TrainingRun]:
    torch.manual_seed(0)
    options = {"isolation": "fork", "optimizer": sgd(0.1), "steps": 2} | options
    return trained(training(nn.Linear(4, 3), X, precision, **options), precision)


def names(found: TrainingRun) -> list[str]:
    return [way.name for way in found.ways]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replace what calls the extension, as if the extension fitted this torch; a fork has it too."""

    def replace(updates: Callable[..., Any]) -> None:
        monkeypatch.setattr(training_run, "extension_problem", lambda: None)
        monkeypatch.setattr(extension_optimizers.ExtensionWay, "updates", lambda way, *given: updates(way.name, *given))

    return replace


def test_without_the_extension_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "extension_problem", lambda: "it is not installed")
    imported = "intel_extension_for_pytorch" in sys.modules  # by other tests, where it is installed
    assert names(scanned(isolation="none")[1]) == names(scanned()[1]) == USUAL
    assert ("intel_extension_for_pytorch" in sys.modules) == imported


def test_what_ipex_optimize_raises_is_the_status_of_its_way(extension: Callable[..., None]) -> None:
    class Fails:
        def __new__(cls, name: str, *_: Any) -> Any:
            raise AssertionError(f"{name} needs another processor")

    extension(Fails)
    run, found = scanned()
    assert names(found) == [*USUAL, "ipex-split", "ipex-master", "ipex-fused"]
    assert (run.status, run.notes) == ("ok", [])
    for way in found.ways[2:]:
        assert (way.status, way.failed_step) == ("error", 1)
        assert way.exception is not None
        assert way.exception.message == f"{way.name} needs another processor"


def test_a_crash_in_the_extension_costs_its_ways_only(extension: Callable[..., None]) -> None:
    class Crashes:
        def __new__(cls, name: str, *_: Any) -> Any:
            if name == "ipex-master":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise RuntimeError("unsupported")

    extension(Crashes)
    run, found = scanned()
    assert (run.status, names(found)) == ("ok", [*USUAL, "ipex-split"])
    (note,) = run.notes
    assert note.startswith("not all ways of Intel's extension were tried: ")
    assert "SIGSEGV" in note


@pytest.mark.parametrize(
    ("precision", "options"),
    [("bfloat16", {}), ("autocast-fp16", {}), ("autocast-bf16", {"isolation": "none"})],
    ids=["cast", "fp16", "no worker"],
)
def test_where_the_extension_is_not_tried(extension: Callable[..., None], precision: str, options: Any) -> None:
    class Unexpected:
        def __new__(cls, *_: Any) -> Any:
            raise RuntimeError("unexpected")

    extension(Unexpected)
    assert not [name for name in names(scanned(precision, **options)[1]) if name.startswith("ipex")]


def test_a_worker_that_used_the_extension_does_no_other_job(extension: Callable[..., None]) -> None:
    """Its process keeps what the extension changed; here a mark on torch, which a later run would see."""

    class Marks:
        def __new__(cls, *_: Any) -> Any:
            sys.modules["marked_by_the_extension"] = sys
            raise RuntimeError("unsupported")

    extension(Marks)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert "marked_by_the_extension" not in sys.modules
            return self.linear(x)

    result = training(
        Model(), X, "autocast-bf16,autocast-fp16,bfloat16", isolation="shared", optimizer=sgd(0.1), steps=2
    )
    assert "ipex-split" in names(trained(result, "autocast-bf16")[1])
    assert [run.status for run in result.runs if run.exception is not None] == []
    assert "marked_by_the_extension" not in sys.modules
