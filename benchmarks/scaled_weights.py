"""Compare the errors of models with their own initial weights, at unit variance, and as a scan scales them.

    python benchmarks/scaled_weights.py --largest 3e7 --output reports/scaled-weights     # about an hour on a busy core
    python benchmarks/scaled_weights.py --only timm --limit 3

The models are those of ``benchmarks/zoo/*.txt``. Errors are those of plain calls of the model cast to bfloat16 and half, in fp32's
relative L2 norm, the largest over the floating tensors of the output: no scan is involved. At unit variance, each layer is scaled so
that its output has a root mean square of 1, as in layer-sequential unit-variance initialization (arXiv:1511.06422).

Where a model's own weights give an output that can be judged, the error with scaled weights should be about the same: a scale that
makes the model amplify rounding measures itself. Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report_files import head, made, save
from torch import Tensor

from lowprec_check import UsageError
from lowprec_check.compat.scan_process import read_list
from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model import weights
from lowprec_check.engine.model.plain_run import output_tensors
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.target_source import load_spec
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.schema.precisions import FP16

LISTS = Path(__file__).parent / "zoo"
LIBRARIES = ("torchvision", "timm", "transformers")
BOUNDS = {"unit variance": (1.0, 1.0, 1.0), "scaled": (1 / 64, 1 / 8, 4.0)}
"""The smallest, the wanted and the largest size of the output of a layer."""
WAYS = ("own weights", *BOUNDS)
_APART = re.compile(r"rcnn|retinanet|fcos|:ssd|:(s3d|mc3|r3d|r2plus1d|mvit|swin3d)")


class Found(NamedTuple):
    """One model in one way."""

    rms: float | None
    """Of the largest floating tensor of the fp32 output; ``None`` if there is none."""
    errors: dict[str, float | None]
    """By dtype; ``None`` if it fails, or is not finite."""


def called(target: Target, dtype: torch.dtype) -> list[Tensor]:
    """The floating tensors of the output of a copy of the model, cast to ``dtype``."""
    cast = lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()  # noqa: E731
    with torch.no_grad():
        output = copy.deepcopy(target.model).to(dtype)(
            *map_tensors(target.args, cast), **map_tensors(target.kwargs, cast)
        )
    return [tensor.double() for tensor in output_tensors(output) if tensor.is_floating_point() and tensor.numel()]


def error_of(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> float | None:
    """The largest relative L2 error; ``None`` if shapes differ, or a value is not finite."""
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in references]:
        return None
    errors = [
        float((y - r).norm() / r.norm()) if bool(r.any()) else math.nan
        for y, r in zip(outputs, references, strict=True)
    ]
    return max(errors) if errors and all(map(math.isfinite, errors)) else None


def measured(name: str, shapes: tuple[str, ...], way: str) -> Found:
    """The errors of a model in one of :data:`WAYS`."""
    target = load_spec(TargetSpec(name, shapes), 0)
    if way in BOUNDS:
        weights.SMALLEST, weights.TARGET, weights.LARGEST = BOUNDS[way]
        target = weights.scale_weights(target, 0, 0.0)
    references = called(target, torch.float32)
    sizes = [float(tensor.norm()) / math.sqrt(tensor.numel()) for tensor in references]
    errors: dict[str, float | None] = {}
    for dtype in (torch.bfloat16, torch.half):
        try:
            errors[str(dtype).removeprefix("torch.")] = error_of(called(target, dtype), references)
        except (RuntimeError, NotImplementedError):
            errors[str(dtype).removeprefix("torch.")] = None
    return Found(max(sizes, default=None), errors)


def models(only: Sequence[str], limit: int | None) -> list[tuple[str, tuple[str, ...]]]:
    """Names and input shapes, without detectors, which choose other boxes, and models of clips, which take minutes."""
    listed = [request for library in only or LIBRARIES for request in read_list(LISTS / f"{library}.txt")[:limit]]
    images = (each for each in listed if not _APART.search(each.target))
    return [(each.target, tuple(each.options[1::2])) for each in images]


def judged(found: Found, dtype: str) -> float | None:
    """The error, if the output is neither zero nor too small for fp16."""
    return found.errors[dtype] if found.rms is not None and found.rms >= FP16.smallest_normal else None


def quartiles(values: list[float]) -> str:
    """``median (quartiles; largest)``."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1e} ({low:.1e} to {high:.1e}; largest {max(values):.1e})"


def shown(name: str, found: dict[str, Found]) -> str:
    """The row of a model."""
    cells = []
    for way in WAYS:
        each = found[way]
        errors = [f"{error:.1e}" if error is not None else "–" for error in each.errors.values()]
        cells += [f"{each.rms:.1e}" if each.rms is not None else "–", *errors]
    return f"| {name.partition(',')[0]} | {' | '.join(cells)} |"


def render(data: dict[str, Any]) -> str:
    """The report: what the figures say, then all of them."""
    rows = {name: {way: Found(**one) for way, one in found.items()} for name, found in data["models"].items()}
    lines = [*head("Initial weights and their errors", data), f"{len(rows)} models.", ""]
    for dtype in ("bfloat16", "float16"):
        for way in WAYS:
            errors = [error for found in rows.values() if (error := judged(found[way], dtype)) is not None]
            lines.append(f"- {dtype}, {way}: {len(errors)} models can be judged; error {quartiles(errors)}")
        for way in BOUNDS:
            pairs = [(judged(found[way], dtype), judged(found["own weights"], dtype)) for found in rows.values()]
            ratios = [mine / own for mine, own in pairs if mine is not None and own]
            far = sum(not 0.25 <= ratio <= 4 for ratio in ratios)
            lines.append(
                f"- {dtype}, of the {len(ratios)} models that can be judged with their own weights: error with {way} over that with "
                f"own weights {quartiles(ratios)}; {far} differ by a factor of more than 4"
            )
    heads = [f"{way}: {what}" for way in WAYS for what in ("rms", "bfloat16", "half")]
    lines += ["", f"| model | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(shown(name, found) for name, found in rows.items())]) + "\n"


def main() -> None:
    """Measure all models, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=LIBRARIES, help="a library; repeatable")
    parser.add_argument("--limit", type=int, help="only the first N models of each library")
    parser.add_argument("--largest", type=float, default=math.inf, help="the largest number of parameters")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Found]] = {}
    for name, shapes in models(options.only, options.limit):
        try:
            model: Any = load_spec(TargetSpec(name, shapes), 0).model
            if sum(parameter.numel() for parameter in model.parameters()) > options.largest:
                continue
            del model
            rows[name] = {way: measured(name, shapes, way) for way in WAYS}
        except (UsageError, RuntimeError, AssertionError) as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
            continue
        print(shown(name, rows[name]), flush=True)
    plain = {name: {way: each._asdict() for way, each in found.items()} for name, found in rows.items()}
    save(options.output, {"made": made(), "models": plain}, render)


if __name__ == "__main__":
    main()
