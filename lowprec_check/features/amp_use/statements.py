"""What a training script does wrong with autocast and ``GradScaler``, after the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, Said, per_scan
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import say


@per_scan("amp-use", "advice", after="verdict", place=-1)
def amp_uses(result: ScanResult) -> Iterator[Made]:
    """What to repair first: the script does not train as its own scaler and autocast should."""
    uses = result.training.amp if result.training is not None else []
    for use in uses:
        if not use.is_harmless:
            words = "first repair {line:text}: {what:text}; {repair:text}"
            yield Said(say(words, line=use.line, what=use.words, repair=use.repair), "bad")
