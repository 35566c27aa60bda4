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
    from lowprec_check.analysis.diff import ScanDiff, diff_scans
    from lowprec_check.engine.model.prepared import Application
    from lowprec_check.engine.model.quantized_model import QuantizedModel, load_quantized, quantize
    from lowprec_check.engine.plan.apply import apply
    from lowprec_check.engine.plan.planner import find_plan
    from lowprec_check.engine.scan import scan
    from lowprec_check.errors import UsageError
    from lowprec_check.report.registry import ReportFormat, render
    from lowprec_check.schema.axes import Backend, Code, Device, Example
    from lowprec_check.schema.findings import Recommendation
    from lowprec_check.schema.measures import ErrorBudget, LayerError, Share
    from lowprec_check.schema.op_calls import OpCall, OpCalls
    from lowprec_check.schema.plan import Plan, Planning
    from lowprec_check.schema.precisions import FloatFormat, Precision
    from lowprec_check.schema.run_key import RunKey
    from lowprec_check.schema.scan_result import Diagnostic, Gap, ModelInfo, ResultError, Run, ScanResult
    from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo
    from lowprec_check.schema.ways_to_train import WayToTrain
    from lowprec_check.schema.what_if import OperandFormat, WhatIf, WhatIfFormat

_MODULES = {
    "Application": "engine.model.prepared",
    "Backend": "schema.axes",
    "Code": "schema.axes",
    "Device": "schema.axes",
    "Diagnostic": "schema.findings",
    "ErrorBudget": "schema.measures",
    "ErrorStats": "schema.verdict",
    "Example": "schema.axes",
    "ExceptionInfo": "schema.verdict",
    "FloatFormat": "schema.precisions",
    "Gap": "schema.findings",
    "LayerError": "schema.measures",
    "ModelInfo": "schema.scan_result",
    "OpCall": "schema.op_calls",
    "OpCalls": "schema.op_calls",
    "OperandFormat": "schema.what_if",
    "Plan": "schema.plan",
    "Planning": "schema.plan",
    "Precision": "schema.precisions",
    "Recommendation": "schema.findings",
    "QuantizedModel": "engine.model.quantized_model",
    "ReportFormat": "report.registry",
    "ResultError": "schema.scan_result",
    "Run": "schema.scan_result",
    "RunKey": "schema.run_key",
    "ScanDiff": "analysis.diff",
    "ScanResult": "schema.scan_result",
    "Share": "schema.measures",
    "UsageError": "errors",
    "WayToTrain": "schema.ways_to_train",
    "WhatIf": "schema.what_if",
    "WhatIfFormat": "schema.what_if",
    "apply": "engine.plan.apply",
    "diff_scans": "analysis.diff",
    "find_plan": "engine.plan.planner",
    "load_quantized": "engine.model.quantized_model",
    "quantize": "engine.model.quantized_model",
    "render": "report.registry",
    "scan": "engine.scan",
}
"""The module of every public name. Each is imported on first use: ``import lowprec_check`` imports nothing else."""

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
    "OperandFormat",
    "Plan",
    "Planning",
    "Precision",
    "QuantizedModel",
    "Recommendation",
    "ReportFormat",
    "ResultError",
    "Run",
    "RunKey",
    "ScanDiff",
    "ScanResult",
    "Share",
    "UsageError",
    "WayToTrain",
    "WhatIf",
    "WhatIfFormat",
    "apply",
    "catalog",
    "diff_scans",
    "find_plan",
    "load_quantized",
    "quantize",
    "render",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name == "catalog":
        return importlib.import_module("lowprec_check.catalog")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowprec_check.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
