"""``lowprec-check plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from lowprec_check.cli.app import (
    FOUND,
    Device,
    Inputs,
    Quiet,
    Seed,
    Target,
    Tolerance,
    WithoutKernel,
    app,
    check_writable,
    progress,
    screen_size,
)


@app.command()
def plan(
    target: Target,
    inputs: Inputs = None,
    dtype: Annotated[
        Literal["bf16", "fp16"] | None, typer.Option(help="The low dtype; by default the better of both.")
    ] = None,
    base: Annotated[
        Literal["autocast", "cast"] | None, typer.Option(help="What the rest runs in; by default the better of both.")
    ] = None,
    device: Device = None,
    tolerance: Tolerance = None,
    metric: Annotated[
        bool,
        typer.Option("--metric", help="Judge by the file's metric(model), higher is better, not by the tolerance."),
    ] = False,
    max_drop: Annotated[
        float | None, typer.Option(min=0.0, help="By how much the metric may fall; by default a hundredth of fp32's.")
    ] = None,
    inputs_from: Annotated[
        int, typer.Option("--inputs-from", metavar="N", min=1, help="Batches that must pass: inputs(0), inputs(1), …")
    ] = 1,
    max_trials: Annotated[int, typer.Option(min=1, help="Runs of the model for each base.")] = 200,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole search.")] = 600.0,
    seed: Seed = 0,
    without_kernel: WithoutKernel = None,
    save: Annotated[Path | None, typer.Option("--save", help="Save the plan, for lowprec_check.apply.")] = None,
    json: Annotated[bool, typer.Option("--json", help="All that was tried, as JSON on stdout.")] = False,
    quiet: Quiet = False,
) -> None:
    """Find the fewest modules that must stay in fp32 for the rest to run in 16 bits, and prove it."""
    check_writable(save, "--save")
    with progress(target, quiet) as on_progress:
        from lowprec_check.engine.load import load_and_plan

        found = load_and_plan(
            target,
            tuple(inputs or ()),
            dtype=dtype,
            base=base,
            device=device,
            tolerance=tolerance,
            use_metric=metric,
            max_drop=max_drop,
            batches=inputs_from,
            max_trials=max_trials,
            seconds=budget,
            seed=seed,
            without_kernel=tuple(without_kernel or ()),
            on_progress=on_progress,
        )
    if save is not None:
        if found.plan is not None:
            found.plan.save(save)
        print(f"saved to {save}" if found.plan is not None else "no plan was found: nothing saved", file=sys.stderr)
    if json:
        sys.stdout.write(found.to_json().decode())
    else:
        from lowprec_check.report.plan import render

        sys.stdout.write(render(found, **screen_size(least=0)))
    raise typer.Exit(0 if found.plan is not None else FOUND)
