"""What a compiler said while it compiled the model."""

from __future__ import annotations

from lowprec_check.analysis.run_summary import remarks_of
from lowprec_check.analysis.speed import is_faster, speed
from lowprec_check.analysis.statements.kinds import Made, per_run
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say, say_if


@per_run("compiler-remarks", "runs", after="margin")
def compiler_remarks(run: Run, result: ScanResult) -> Made:
    """How often a compiler warned, how many graph breaks it made, and the speed with them."""
    remarks = remarks_of(run)
    warned = sum(remark.count for remark in remarks if remark.kind == "warning")
    breaks = sum(remark.count for remark in remarks if remark.kind == "graph-break")
    if not warned and not breaks:
        return None
    warnings = say_if(warned, "{count:count warning} of the compiler (LP309)", count=warned)
    graph_breaks, than = say_if(breaks, "{count:count graph break} (LP310)", count=breaks), None
    eager = next((other for other in result.runs if other.key == run.key._replace(backend=EAGER)), None)
    if breaks and eager is not None:
        here, in_eager = speed(run, result.runs), speed(eager, result.runs)
        has_figures = here.has_figure and in_eager.has_figure
        differ = is_faster(here, in_eager) or is_faster(in_eager, here)
        if has_figures and differ and here.ratio and in_eager.ratio:
            than = say("with them {ratio:times} as fast as in eager mode", ratio=here.ratio / in_eager.ratio)
    return chained(warnings, graph_breaks, than, between=", ")
