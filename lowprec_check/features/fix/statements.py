"""What a patch of the user's source may do."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.run_summary import searched_plan
from lowprec_check.analysis.statements.kinds import Made, per_scan
from lowprec_check.features.fix.fix_sites import culprits, fails
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Figure, say


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
