"""``lowprec-check plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowprec_check.cli.app import (
    FINDINGS,
    app,
    check_writable,
    interrupts_ignored_after,
    last_before_end,
    print_document,
    print_status,
    screen_size,
    stdout_kept,
)
from lowprec_check.cli.options import (
    Backend,
    Device,
    Inputs,
    Isolation,
    Quiet,
    Seed,
    Target,
    Tolerance,
    Weights,
    WithoutKernel,
)
from lowprec_check.cli.progress import progress
from lowprec_check.schema.precisions import plan_bases
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import EAGER

if TYPE_CHECKING:
    from lowprec_check.schema.plan import Planning

_FORMATS = list(dict.fromkeys(base.format.short for base in plan_bases()))
_KINDS = list(dict.fromkeys(base.kind for base in plan_bases()))


@app.command()
def plan(
    target: Target,
    inputs: Inputs = None,
    weights: Weights = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            "--precision",
            "-p",
            metavar="NAME",
            help=f"{choices(_FORMATS)}, or a precision such as autocast-fp16; repeatable or comma-separated. "
            "Default: try all, keep the best.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help=f"How the other modules run: {choices(_KINDS)}. Default: try all, keep the best.")
    ] = None,
    backend: Backend = EAGER,
    device: Device = None,
    tolerance: Tolerance = None,
    metric: Annotated[
        bool,
        typer.Option(
            "--metric", help="Judge by metric(model) from the file (higher is better) instead of the tolerance."
        ),
    ] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest drop of the metric that passes. Default: 1% of the metric in fp32."),
    ] = None,
    inputs_from: Annotated[
        int,
        typer.Option(
            "--inputs-from", metavar="N", min=1, help="Number of batches that must pass: inputs(0), inputs(1), …"
        ),
    ] = 1,
    max_trials: Annotated[int, typer.Option(min=1, help="Maximum number of trial runs per base.")] = 200,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole search.")] = 600.0,
    seed: Seed = 0,
    without_kernel: WithoutKernel = None,
    save: Annotated[Path | None, typer.Option("--save", help="Save the plan, for lowprec_check.apply.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan and all attempts as JSON.")] = False,
    isolation: Isolation = None,
    quiet: Quiet = False,
) -> None:
    """Find the modules that must stay in fp32. Verifies that the model passes with all others in 16 bits."""
    check_writable(save, "--save")
    with stdout_kept(), progress(quiet) as shown:
        from lowprec_check.engine.load import TargetSpec
        from lowprec_check.engine.plan.planner import PlanOptions
        from lowprec_check.engine.session import plan_file

        options = PlanOptions(
            dtype=dtype,
            base=base,
            backend=backend,
            device=device,
            tolerance=tolerance,
            use_metric=metric,
            max_drop=max_drop,
            batches=inputs_from,
            max_trials=max_trials,
            seconds=budget,
            seed=seed,
            without_kernel=tuple(without_kernel or ()),
        )
        spec = TargetSpec(target, tuple(inputs or ()), weights)
        found, ended_by = last_before_end(plan_file(spec, options, isolation, shown.step))
    if found is None:
        assert ended_by is not None
        raise ended_by
    try:
        _show(found, json=json)
    finally:  # standard output may be full or closed, or Ctrl+C be pressed in a pager
        if save is not None:
            with interrupts_ignored_after(ended_by):
                _save(found, save)
    if ended_by is not None:
        raise ended_by
    raise typer.Exit(0 if found.plan is not None else FINDINGS)


def _save(found: Planning, path: Path) -> None:
    if found.plan is not None:
        found.plan.save(path)
    print_status(f"plan saved to {path}" if found.plan is not None else "no plan was found; nothing saved")


def _show(found: Planning, *, json: bool) -> None:
    if json:
        print_document(found.to_json())
    else:
        from lowprec_check.report.layout.text import text
        from lowprec_check.report.plan import plan_document

        sys.stdout.write(text(plan_document(found), **screen_size()))
    sys.stdout.flush()
