"""``lowprec-check plan``: the search for a plan alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from lowprec_check.cli.app import (
    FINDINGS,
    app,
    check_writable,
    interrupts_ignored_after,
    last_before_end,
    print_document,
    print_status,
    print_text,
    stdout_kept,
)
from lowprec_check.cli.options import (
    Inputs,
    Stream,
    TargetRequest,
    Weights,
    WithScriptArguments,
    grouped,
    takes_options,
)
from lowprec_check.cli.progress import progress
from lowprec_check.process import Isolation
from lowprec_check.schema.options import OUTPUT, PlanOptions

if TYPE_CHECKING:
    from lowprec_check.engine.model.target_source import TargetSource
    from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
    from lowprec_check.schema.plan import Planning


@app.command(cls=WithScriptArguments)
@takes_options
def plan(
    *,
    inputs: Inputs = None,
    weights: Weights = None,
    stream: Stream = False,
    options: PlanOptions,
    save_plan: Annotated[
        Path | None, grouped(OUTPUT, "--save-plan", metavar="FILE", help="Save the plan, for lowprec_check.apply.")
    ] = None,
    json: Annotated[bool, grouped(OUTPUT, "--json", help="Print the plan and all attempts as JSON.")] = False,
    request: TargetRequest,
) -> None:
    """Find the modules that must stay in fp32. Verifies that the model passes with all others in 16
    bits.
    """
    check_writable(save_plan, "--save-plan")
    with stdout_kept(), progress(request.quiet) as display:
        from lowprec_check.engine.model.target_spec import TargetSpec

        spec = TargetSpec(request.target, tuple(inputs or ()), weights, stream, arguments=request.arguments)
        planning, ended_by = last_before_end(plan_file(spec, options, request.isolation, display.step))
    try:
        if json:
            print_document(planning.to_json())
        else:
            from lowprec_check.features.plan.report import plan_document

            print_text(plan_document(planning))
        sys.stdout.flush()
    finally:  # standard output may be full or closed, or Ctrl+C be pressed in a pager
        if save_plan is not None:
            with interrupts_ignored_after(ended_by):
                if planning.plan is None:
                    print_status("no plan was found; nothing saved")
                else:
                    planning.plan.save(save_plan)
                    print_status(f"plan saved to {save_plan}")
    if ended_by is not None:
        raise ended_by
    raise click.exceptions.Exit(FINDINGS if planning.plan is None else 0)


def plan_file(
    spec: TargetSpec, options: PlanOptions, isolation: Isolation | None = None, on_progress: OnProgress | None = None
) -> Iterator[Planning]:
    """Load ``spec`` and search for its plan in a process of its own; yield the result after each
    base.
    """
    from lowprec_check.core.session import Session
    from lowprec_check.schema.plan import Planning

    yield from Session(spec, options, isolation, options.seconds, on_progress).grow(_growing_planning, Planning)


def _growing_planning(source: TargetSource, isolation: Isolation | None, options: PlanOptions) -> Iterator[Planning]:
    from lowprec_check.features.plan.planner import growing_planning

    yield from growing_planning(source, isolation, options)
