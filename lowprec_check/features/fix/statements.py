"""What a patch of the user's source may do."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, per_scan
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import say
from lowprec_check.schema.ways_to_train import way_named


@per_scan("patch-of-script", "advice", after="verdict", place=1, evidence="derived")
def patch_of_script(result: ScanResult) -> Iterator[Made]:
    """What is recommended in the loop of a script; the code to paste has a loop of its own."""
    setup, best = result.training, result.recommendation
    if result.fixing or setup is None or not setup.script or setup.framework or setup.amp or setup.cast:
        return
    if best is None or best.stay_in_fp32 or best.keep_fp32 or best.way is None or not best.code:
        return
    # Only what changes no weights is written into a loop
    if PRECISIONS.get(best.precision).kind != "autocast" or not way_named(best.way).leaves_weights:
        return
    search = f"lowprec-check fix {result.target} --train -p {best.precision}"
    yield say("a patch of the script's own loop was not tried: {search:text} searches for one", search=search)
