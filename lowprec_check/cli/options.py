"""Options that several commands share; their help lists what is registered. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.devices import DEVICES, choices
from lowprec_check.schema.precisions import formats, low_precisions

_PRECISIONS = ", ".join(precision.name for precision in low_precisions())
_BACKENDS = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
_DEVICES = choices(DEVICES.names())
_TOLERANCES = ", ".join(f"{f.tolerance:g} for {f.short}" for f in formats() if f.name != "float32")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="mymodel.py, mymodel.py:make_model, package.module:attr or torchvision:resnet50."
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--inputs", help="Shape of an input if the file defines none: 1x3x224x224, ids=1x128:int64."),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision", "-p", metavar="NAME", help=f"{_PRECISIONS}; repeatable or comma-separated. Default: all."
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"How the model is executed: {_BACKENDS}; repeatable or comma-separated. Default: eager.",
    ),
]
Backend = Annotated[str, typer.Option("--backend", metavar="NAME", help=f"How the model is executed: {_BACKENDS}.")]
Device = Annotated[str | None, typer.Option(help=f"{_DEVICES}. Default: an accelerator if there is one, else cpu.")]
Devices = Annotated[list[str] | None, typer.Option(help=f"{_DEVICES}; repeatable: each is a row.")]
Tolerance = Annotated[
    float | None, typer.Option(min=0.0, help=f"Largest rel_l2 of the output that passes. Default: {_TOLERANCES}.")
]
Seed = Annotated[int, typer.Option(help="Seed of every run.")]
WithoutKernel = Annotated[
    list[str] | None,
    typer.Option("--without-kernel", help="Run as if torch lacked a kernel: aten.dot:half; repeatable."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def split(values: Iterable[str] | None) -> list[str] | None:
    """The values of a repeatable option, each of which may be a comma-separated list; ``None`` if it is absent."""
    if values is None:
        return None
    return [name.strip() for value in values for name in value.split(",") if name.strip()]
