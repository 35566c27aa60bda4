"""lowprec-check: what happens to a PyTorch model in fp16 and bf16, all at once, with proof.

>>> from lowprec_check import scan
>>> result = scan(model, inputs)  # doctest: +SKIP
>>> print(result.recommendation.code)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowprec_check import catalog
    from lowprec_check.analysis.diff import diff_scans
    from lowprec_check.core.scan import scan
    from lowprec_check.engine.model.prepared import Application
    from lowprec_check.errors import UsageError
    from lowprec_check.features.plan.apply import apply
    from lowprec_check.features.plan.planner import find_plan
    from lowprec_check.features.programs.models_of_program import WatchedProgram, watch
    from lowprec_check.features.programs.program_scan import ProgramScan
    from lowprec_check.features.quantize.quantized_model import QuantizedModel, load_quantized, quantize
    from lowprec_check.report.registry import ReportFormat, render
    from lowprec_check.schema.axes import Backend, Code, Device, Example, UnsupportedOpsError
    from lowprec_check.schema.findings import Recommendation
    from lowprec_check.schema.measures import ErrorBudget, LayerError, Share
    from lowprec_check.schema.op_calls import OpCall, OpCalls
    from lowprec_check.schema.plan import Plan, Planning
    from lowprec_check.schema.precisions import FloatFormat, Precision
    from lowprec_check.schema.run_key import RunKey
    from lowprec_check.schema.scan_diff import ScanDiff
    from lowprec_check.schema.scan_result import Diagnostic, Gap, ModelInfo, ResultError, Run, ScanResult
    from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo
    from lowprec_check.schema.ways_to_train import WayToTrain

_MODULES = {
    name: module
    for module, names in {
        "analysis.diff": ("diff_scans",),
        "engine.model.prepared": ("Application",),
        "features.quantize.quantized_model": ("QuantizedModel", "load_quantized", "quantize"),
        "features.plan.apply": ("apply",),
        "features.plan.planner": ("find_plan",),
        "features.programs.models_of_program": ("WatchedProgram", "watch"),
        "features.programs.program_scan": ("ProgramScan",),
        "core.scan": ("scan",),
        "errors": ("UsageError",),
        "report.registry": ("ReportFormat", "render"),
        "schema.axes": ("Backend", "Code", "Device", "Example", "UnsupportedOpsError"),
        "schema.findings": ("Diagnostic", "Gap", "Recommendation"),
        "schema.measures": ("ErrorBudget", "LayerError", "Share"),
        "schema.op_calls": ("OpCall", "OpCalls"),
        "schema.plan": ("Plan", "Planning"),
        "schema.precisions": ("FloatFormat", "Precision"),
        "schema.run_key": ("RunKey",),
        "schema.scan_diff": ("ScanDiff",),
        "schema.scan_result": ("ModelInfo", "ResultError", "Run", "ScanResult"),
        "schema.verdict": ("ErrorStats", "ExceptionInfo"),
        "schema.ways_to_train": ("WayToTrain",),
    }.items()
    for name in names
}
"""The module of every public name, imported on first use: the package itself imports nothing."""

__all__ = [
    "Application",
    "Backend",
    "Code",
    "Device",
    "Diagnostic",
    "ErrorBudget",
    "ErrorStats",
    "Example",
    "ExceptionInfo",
    "FloatFormat",
    "Gap",
    "LayerError",
    "ModelInfo",
    "OpCall",
    "OpCalls",
    "Plan",
    "Planning",
    "Precision",
    "ProgramScan",
    "QuantizedModel",
    "Recommendation",
    "ReportFormat",
    "ResultError",
    "Run",
    "RunKey",
    "ScanDiff",
    "ScanResult",
    "Share",
    "UnsupportedOpsError",
    "UsageError",
    "WatchedProgram",
    "WayToTrain",
    "apply",
    "catalog",
    "diff_scans",
    "find_plan",
    "load_quantized",
    "quantize",
    "render",
    "scan",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "catalog":
        return importlib.import_module("lowprec_check.catalog")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowprec_check.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
