"""The data of the range ribbon: histograms of magnitudes by module, which the page adds up for the module chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.report.escape import visible
from lowprec_check.schema.magnitudes import SAMPLE, ModuleMagnitudes
from lowprec_check.schema.scan_result import Run

MOST_MODULES = 1200
"""Per run; the values of modules further from the root count for those around them."""


def pack_magnitudes(run: Run, number: Callable[[str], int]) -> dict[str, Any]:
    """Columns of the histograms of ``run``; ``number`` gives the number of a module's name."""
    found = _fewer(run.magnitudes)
    return {
        "sample": SAMPLE,
        "module": [number(visible(its.module)) for its in found],
        "lowest": [its.lowest for its in found],
        "counts": [its.counts for its in found],
        "zeros": [its.zeros for its in found],
        "nonfinite": [its.nonfinite for its in found],
        "ops": [its.ops for its in found],
    }


def _fewer(known: list[ModuleMagnitudes]) -> list[ModuleMagnitudes]:
    parts = max((its.module.count(".") for its in known), default=0)
    while len(known) > MOST_MODULES and parts >= 0:
        merged: dict[str, ModuleMagnitudes] = {}
        for its in known:
            module = ".".join(its.module.split(".")[:parts])
            merged[module] = sum_of(module, merged[module], its) if module in merged else sum_of(module, its)
        known, parts = list(merged.values()), parts - 1
    return known


def sum_of(module: str, *histograms: ModuleMagnitudes) -> ModuleMagnitudes:
    """One histogram with all values of ``histograms``, of ``module``."""
    filled = [its for its in histograms if its.counts]
    lowest = min((its.lowest for its in filled), default=0)
    counts = [0] * (max((its.lowest + len(its.counts) for its in filled), default=0) - lowest)
    for its in filled:
        for index, count in enumerate(its.counts, its.lowest - lowest):
            counts[index] += count
    return ModuleMagnitudes(
        module=module,
        lowest=lowest,
        counts=counts,
        zeros=sum(its.zeros for its in histograms),
        nonfinite=sum(its.nonfinite for its in histograms),
        ops=sum(its.ops for its in histograms),
    )
