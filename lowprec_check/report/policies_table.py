"""The gradients of policies of distributed training as rows of text."""

from __future__ import annotations

from typing import NamedTuple

from lowprec_check.analysis.error_shares import share_text
from lowprec_check.analysis.run_summary import shorten
from lowprec_check.report.escape import visible
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.training_policies import PolicyGradient

HEADS = ("policy", "computes in", "reduced", "gradient error", "why")
HINT = (
    "Relative L2 error (rel_l2) of the gradient of all parameters against plain fp32, measured on one CPU rank; the sum over more "
    "ranks adds to it. Reduced: the micro-batches after which ranks would sum their gradients."
)
_WHEN = {"once": "after the last", "each time": "after each"}


class PolicyRow(NamedTuple):
    """One policy, as strings."""

    policy: str
    computes_in: str
    reduced: str
    """After which micro-batches."""
    error: str
    why: str
    """The worst parameter, and what was lost in fp16; or why there is no figure."""


class PolicySection(NamedTuple):
    """The table and what is above it."""

    title: str
    hint: str
    heads: tuple[str, ...]
    rows: list[PolicyRow]
    """In the order of the result."""


def policy_section(result: ScanResult) -> PolicySection | None:
    """The section of a report; ``None`` if no policy was measured."""
    if not result.policies:
        return None
    count = result.policies[0].micro_batches
    title = f"Distributed policies: gradients accumulated over {count} micro-batch{'es' * (count != 1)}"
    made = next((found.batches for found in result.policies if found.batches), "")
    hint = f"{HINT} Micro-batches: {visible(made, 300)}." if made else HINT
    return PolicySection(title, hint, HEADS, [_row(found) for found in result.policies])


def _row(found: PolicyGradient) -> PolicyRow:
    return PolicyRow(
        visible(found.policy),
        visible(found.computes_in),
        _WHEN.get(found.reduced, visible(found.reduced)),
        _error(found),
        visible(_why(found), 600),
    )


def _error(found: PolicyGradient) -> str:
    if found.gradient_error is not None:
        return f"{found.gradient_error:.1e}"
    return "NaN or Inf" if found.status == "nonfinite" else "–"


def _why(found: PolicyGradient) -> str:
    parts: list[str] = [] if found.status in ("ok", "nonfinite", "error") else [found.status]
    if found.exception is not None:
        place = " ".join(filter(None, (found.exception.module, found.exception.source)))
        text = shorten(found.exception.text, 200)
        parts.append(f"{text} ({place})" if place else text)
    if found.reason:
        parts.append(found.reason)
    if found.worst_parameter is not None and found.worst_error is not None:
        parts.append(f"most in {found.worst_parameter}: {found.worst_error:.1e}")
    for share, what in ((found.underflow, "underflow"), (found.overflow, "overflow")):
        if share:
            parts.append(f"{share_text(share)} of the elements {what}")
    return "; ".join(parts)
