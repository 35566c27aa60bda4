"""That a script was left at its first call of a model, which says nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, per_scan
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import say

FIRST_CALL = "the first call of a model in the script"
"""How the target of a script says what was taken."""


@per_scan("first-call", "advice", after="verdict")
def _first_call(result: ScanResult) -> Iterator[Made]:
    """What the scan of a script leaves out, and the option that has it."""
    if FIRST_CALL in result.model.taken and result.is_forward:
        yield say(
            "the script was stopped at its first call of a model ({model:text}); "
            "--program scans every model that it calls",
            model=result.model.name,
        )
