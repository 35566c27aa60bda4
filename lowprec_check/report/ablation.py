"""What an ablation showed, in words."""

from __future__ import annotations

from lowprec_check.analysis.run_summary import some
from lowprec_check.schema.scan_result import Run


def ablation_text(run: Run) -> str:
    """``with norm in fp32 the error is 7.7e-03 instead of 1.1e+02 (measured)``; empty without an ablation."""
    found = run.ablation
    if found is None:
        return ""
    kept = f"with {some(found.keep_fp32)} in fp32"
    if found.status in ("ok", "inaccurate") and found.rel_l2 is not None:
        before = run.output_error.rel_l2 if run.output_error else None
        after = f"{found.rel_l2:.1e}"
        if before is None:
            return f"{kept} the output is finite, error {after} ({run.evidence})"
        changed = f"is still {after}" if f"{before:.1e}" == after else f"is {after} instead of {before:.1e}"
        return f"{kept} the error {changed} ({run.evidence})"
    if found.status == "nonfinite":
        return f"{kept} the output {'still ' if run.status == 'nonfinite' else ''}has NaN or Inf ({run.evidence})"
    return f"{kept} the run ends as {found.status}"
