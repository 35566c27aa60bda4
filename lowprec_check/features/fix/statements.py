"""What a patch of the user's source may do."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.run_summary import searched_plan
from lowprec_check.analysis.statements.kinds import Made, per_scan
from lowprec_check.features.fix.fix_sites import culprits, fails
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Figure, say
from lowprec_check.schema.ways_to_train import way_named


@per_scan("patch", "advice", after="verdict", place=1, evidence="derived")
def patch(result: ScanResult) -> Iterator[Made]:
    """Lines of the user's code to patch, which may be less than a plan; none was tried."""
    if result.fixing or not result.is_forward or result.evidence == "predicted":
        return
    if ".py" not in result.target or not searched_plan(result) or (result.plan and result.plan.keep_fp32_inputs):
        return
    # Lines of installed packages are not the user's to patch.
    rows = [culprit.row for run in result.runs if fails(run) for culprit in culprits(run)]
    lines = list(dict.fromkeys(row.source for row in rows if row.source and row.caller is None))
    if not lines:
        return
    figures: dict[str, Figure] = {"line": lines[0]}
    where, outcome, more, shows = "{line:text}", "no plan was found", "", ""
    if len(lines) > 1:
        where, figures["lines"] = "{lines:count place}, first {line:text},", len(lines)
    if result.plan is not None:
        outcome, figures["kept"] = "the plan keeps {kept:count module} in fp32", len(result.plan.keep_fp32)
        more, shows = " --plan", ", and shows the size of both"
    figures["command"] = command(result, f"fix{more}")
    search = f"{{command:text}} searches for one{shows}"
    yield say(f"{outcome}; a patch of your code at {where} was not tried: {search}", **figures)


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
