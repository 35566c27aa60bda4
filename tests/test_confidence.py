"""What a page says its conclusions rest on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from shared_result import run, shared_result

from lowprec_check.report.confidence import confidence
from lowprec_check.schema.measures import TimingConditions
from lowprec_check.schema.scan_result import ScanResult

RESULT = shared_result()


def told(result: ScanResult) -> dict[str, str]:
    return dict(confidence(result))


@pytest.mark.parametrize(
    ("origin", "start"), [("random", "Random:"), ("scaled", "Random, scaled"), ("loaded", "Loaded"), ("unknown", None)]
)
def test_random_weights_are_named(origin: Any, start: str | None) -> None:
    model = msgspec.structs.replace(RESULT.model, weights=origin)
    found = told(msgspec.structs.replace(RESULT, model=model)).get("Weights")
    assert (found is None) if start is None else str(found).startswith(start)


def test_what_disturbed_the_times_is_told() -> None:
    busy = TimingConditions(waited=0.4, speed_change=1.0)
    assert "40 % of the time" in told(msgspec.structs.replace(RESULT, timing_conditions=busy))["Times"]


def test_what_was_not_run_is_told() -> None:
    left = run("half", "skipped")
    found = told(msgspec.structs.replace(RESULT, runs=[run("fp32"), left]))
    assert "Skipped: half." in found["Not run"]


def test_one_batch_is_said_to_be_one() -> None:
    assert told(RESULT)["Inputs"].startswith("One batch")
    several = msgspec.structs.replace(RESULT, options={**RESULT.options, "batches": 3})
    assert told(several)["Inputs"].startswith("3 batches.")


def test_an_analysis_that_ended_early_is_told() -> None:
    part = msgspec.structs.replace(run("half", "ok"), complete=False, incomplete_because="the budget of 4 s ended")
    found = told(msgspec.structs.replace(RESULT, runs=[run("fp32"), part]))
    assert "half was analyzed in part: the budget of 4 s ended." in found["Op by op"]
