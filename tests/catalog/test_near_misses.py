"""A report is named for its cause only, not for a model that looks like it."""

from __future__ import annotations

import pytest
import torch
from helpers import scan_here
from near_misses import NEAR_MISSES, Layers, NearMiss

from lowprec_check.catalog.known_issues import known_patterns
from lowprec_check.catalog.names import function_name

LINKS = {pattern.id: pattern for pattern in known_patterns()}


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda miss: f"{miss.pattern}-{miss.forward.__name__}")
def test_another_cause_is_not_taken_for_a_report(miss: NearMiss) -> None:
    pattern = LINKS[miss.pattern]
    x = miss.scale * torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    result = scan_here(Layers(miss.forward).eval(), x, precisions=[miss.precision], further_inputs=0, plan=False)
    about = [each for each in result.diagnostics if each.code in pattern.codes]
    # It fails with a finding that the pattern is about.
    assert [each for each in about if each.op is None or function_name(each.op) in pattern.ops]
    assert not [each.message for each in about if each.known is not None and each.known.link == pattern.link]
