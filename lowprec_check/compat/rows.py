"""Makes the rows of the matrix from scans, successful or failed."""

from __future__ import annotations

import re
from typing import Any

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.run_summary import label, memory_ratio, missing_kernels
from lowprec_check.analysis.speed import speed
from lowprec_check.compat.target_list import Request
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.matrix import MatrixCell, MatrixRow
from lowprec_check.schema.scan_result import Run, ScanResult

_ENVIRONMENT = ("torch", "python", "device_name", "cpu_capability", "threads", "torchvision", "timm", "transformers")


def request_of(row: MatrixRow) -> Request:
    """Return the request that a row was made for, also after the row was saved and read again."""
    return Request(_as_given(row.target), tuple(map(_as_given, row.options)), row.device, row.slug)


def _as_given(saved: str) -> str:
    r"""Undo :func:`~lowprec_check.errors.encodable` for bytes of a file name that are not UTF-8: ``\udcff``."""
    return re.sub(r"\\u(dc[89a-f][0-9a-f])", lambda match: chr(int(match[1], 16)), saved)


def row_of(result: ScanResult, request: Request, seconds: float, made_with: dict[str, str]) -> MatrixRow:
    """Return the row of a scanned model."""
    advice, about = result.recommendation, {**result.environment, "torch": result.torch or None}
    return _row(
        request,
        seconds,
        made_with,
        state="scanned",
        model=result.model.name,
        parameters=result.model.parameters,
        weights=result.model.weights,
        codes=_codes(result, None),
        inputs=result.model.inputs,
        environment={key: str(about[key]) for key in _ENVIRONMENT if about.get(key) is not None},
        cells=[_cell(run, result) for run in result.runs if not run.is_reference],
        recommended=_advice(advice) if advice else None,
    )


def _advice(advice: Recommendation) -> str:
    """``half``; ``fp32 (half saves 50 % of the memory)`` where fp32 is better in what is preferred."""
    name = advice.label + (f" + {len(advice.keep_fp32)} in fp32" if advice.keep_fp32 else "")
    if not advice.stay_in_fp32:
        return name if advice.evidence == "measured" else f"{name} ({advice.evidence})"
    return f"fp32 ({name}: {advice.gain})" if advice.gain else "fp32"


def failed_row(request: Request, reason: str, seconds: float, made_with: dict[str, str]) -> MatrixRow:
    """Return the row of a model that could not be scanned."""
    return _row(request, seconds, made_with, state="failed", reason=reason)


def _row(request: Request, seconds: float, made_with: dict[str, str], **found: Any) -> MatrixRow:
    return MatrixRow(
        target=request.target,
        options=list(request.options),
        device=request.device,
        slug=request.slug,
        seconds=round(seconds, 1),
        made_with=made_with,
        **found,
    )


def _cell(run: Run, result: ScanResult) -> MatrixCell:
    time, memory = speed(run, result.runs).time, memory_ratio(run, result.runs)
    first = run.gaps[0] if run.gaps else None
    return MatrixCell(
        precision=label(run),
        column=run.key.label,
        device=run.device,
        status=run.status,
        degenerate=degenerate_output(run, result),
        evidence=run.evidence,
        rel_l2=_digits(run.output_error.distance if run.output_error else None),
        time=_digits(time),
        memory=_digits(memory),
        gaps=missing_kernels(run),
        first_gap=first.op if first else None,
        first_gap_kind=first.kind if first else None,
        first_gap_source=first.source if first else None,
        codes=_codes(result, run),
    )


def _codes(result: ScanResult, run: Run | None) -> list[str]:
    """The codes of the findings about ``run``, or about none: each once."""
    found = [
        diagnostic.code
        for diagnostic in result.diagnostics
        if (diagnostic.precision is None if run is None else diagnostic.is_about(run))
    ]
    return sorted(set(found))


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
