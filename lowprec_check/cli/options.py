"""Options that several commands share; their help lists all registered names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from lowprec_check import process
from lowprec_check.schema.axes import BACKENDS, DEVICES, MEMORY_FORMATS, RUN_MATRICES, catalogued
from lowprec_check.schema.options import FORMS
from lowprec_check.schema.precisions import formats, low_precisions
from lowprec_check.schema.registry import Registry, choices
from lowprec_check.schema.what_if import WHAT_IF_FORMATS


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell completes: the names that start with what was typed, behind the last comma."""

    def complete(incomplete: str) -> list[str]:
        before, comma, typed = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(typed)]

    return complete


_PRECISIONS = ", ".join(precision.name for precision in low_precisions())
_BACKENDS = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
_DEVICES = choices(DEVICES.names())
_TOLERANCES = ", ".join(f"{f.tolerance:g} for {f.short}" for f in formats() if f.name != "float32")

Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help=f"Model: {FORMS}."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs", help="Shape of an input, if the file defines no inputs: 1x3x224x224 or ids=1x128:int64; repeatable."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="State dict to load into the model: a file of torch.save or .safetensors; weights only."
    ),
]
ScaleWeights = Annotated[
    bool,
    typer.Option(
        "--scale-weights",
        help="Scale random weights of layers whose output vanishes or explodes: with the initial weights of many models the "
        "output is 1e-12 or zero, and cannot be judged.",
    ),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME",
        autocompletion=completing(lambda: [precision.name for precision in low_precisions()]),
        help=f"{_PRECISIONS}, or an alias such as fp16 (half); repeatable or comma-separated. Default: all.",
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        autocompletion=completing(BACKENDS.names),
        help=f"How to execute the model: {_BACKENDS}; repeatable or comma-separated. Default: eager.",
    ),
]
MemoryFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--memory-format",
        metavar="NAME",
        autocompletion=completing(MEMORY_FORMATS.names),
        help=f"{choices(MEMORY_FORMATS.names())}; repeatable or comma-separated. Default: contiguous.",
    ),
]
Matrix = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completing(RUN_MATRICES.names),
        help=f"Set of runs: {'; '.join(f'{matrix.name} ({matrix.summary})' for matrix in RUN_MATRICES)}. "
        "-p, --backend and --memory-format replace its parts.",
    ),
]
WhatIfFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="NAME",
        autocompletion=completing(WHAT_IF_FORMATS.names),
        help="Predict the output error of a format without running it: "
        f"{', '.join(f'{chosen.name} ({chosen.summary})' for chosen in WHAT_IF_FORMATS)}; repeatable or comma-separated.",
    ),
]
Backend = Annotated[str, typer.Option("--backend", metavar="NAME", help=f"How to execute the model: {_BACKENDS}.")]
_PREDICTED = f"{choices([name for name in catalogued() if name != 'cpu'])} that is not here is predicted"
Device = Annotated[
    str | None,
    typer.Option(
        autocompletion=completing(DEVICES.names),
        help=f"Device: {_DEVICES}. Default: an accelerator if there is one, else cpu.",
    ),
]
ScannedDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        autocompletion=completing(DEVICES.names),
        help=f"Device: {_DEVICES}; {_PREDICTED}. Default: an accelerator if there is one, else cpu.",
    ),
]
PredictedTorch = Annotated[
    str | None,
    typer.Option(
        "--torch",
        metavar="X.Y",
        help="Release of torch to predict for, with --device. Default: the installed one.",
    ),
]
Predict = Annotated[
    bool,
    typer.Option("--predict", help="Predict, although the device named by --device is here and could be measured."),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=completing(DEVICES.names),
        help=f"Device: {_DEVICES}; {_PREDICTED}; repeatable, one row per device.",
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0.0, help=f"Largest relative L2 error of the output that passes. Default: {_TOLERANCES}."),
]
Seed = Annotated[int, typer.Option(help="Random seed of every run.")]
WithoutKernel = Annotated[
    list[str] | None,
    typer.Option("--without-kernel", help="Simulate a missing kernel, e.g. aten.dot:half; repeatable."),
]
Isolation = Annotated[
    process.Isolation | None,
    typer.Option(
        help="Where the runs happen: in copies of this process (fork), in fresh interpreters that load the file again "
        "(spawn, slower), one after another in one worker (shared), or in this process (none: no time limits, no protection "
        "from crashes). Default: fork if possible; on an accelerator shared."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def names_of(registry: Registry[Any], values: Iterable[str] | None) -> list[str] | None:
    """The registered names that a repeatable option names, each once; a value may be a comma-separated list.

    ``None`` if the option is absent; raises :class:`UsageError` for an unknown name.
    """
    return None if values is None else registry.names_in(values)
