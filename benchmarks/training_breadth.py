"""Compare scans of training with plain loops on real architectures: ``python benchmarks/training_breadth.py [--device cuda]
[--only NAME ...] [--json FILE] [--markdown FILE]``.

Each model of torchvision, timm and transformers (random weights, small inputs) is scanned for three steps in every precision. A loop
without the tool then trains it in the same way: its losses must be those of the scan, bit for bit, and it must fail where the scan
says so. A ``perturbed`` run is one whose instrumented step differs from the plain one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowprec_check import scan
from lowprec_check.engine.core.devices import seed_everything
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import LossInputs, loss_of
from lowprec_check.engine.train.steps import step_seed
from lowprec_check.schema.precisions import PRECISIONS

STEPS = 3
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "resnet18": ("torchvision:resnet18", ("4x3x64x64",)),
    "mobilenet_v3_small": ("torchvision:mobilenet_v3_small", ("4x3x64x64",)),
    "shufflenet": ("torchvision:shufflenet_v2_x0_5", ("4x3x64x64",)),
    "regnet": ("torchvision:regnet_y_400mf", ("4x3x64x64",)),
    "squeezenet": ("torchvision:squeezenet1_1", ("4x3x64x64",)),
    "convnext_atto": ("timm:convnext_atto", ("4x3x64x64",)),
    "vit_tiny": ("timm:vit_tiny_patch16_224", ("2x3x224x224",)),
    "mixer": ("timm:mixer_s32_224", ("2x3x224x224",)),
    "ghostnet": ("timm:ghostnet_050", ("4x3x64x64",)),
    "bert": ("transformers:bert,num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128", ()),
    "gpt2": ("transformers:gpt2,n_layer=2,n_embd=64,n_head=4", ()),
    "llama": (
        "transformers:llama,num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4,vocab_size=1000",
        (),
    ),
    "t5": ("transformers:t5,num_layers=2,d_model=64,d_ff=128,num_heads=4,d_kv=16", ()),
    "distilbert": ("transformers:distilbert,n_layers=2,dim=64,hidden_dim=128,n_heads=4", ()),
}
WAYS = {
    "fp32": "plain",
    "bfloat16": "plain",
    "half": "plain",
    "autocast-bf16": "plain",
    "autocast-fp16": "plain",
}
"""The way whose losses are compared: without loss scaling, which repeats the steps that it skips."""


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains each model."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def loop(target: Target, precision: str, device: torch.device) -> list[float] | str:
    """The losses of a plain loop, the last value included that is not finite; or the type of the exception that it raises."""
    model = copy.deepcopy(target.model).to(device).train()
    known = PRECISIONS.get(precision)
    dtype = getattr(torch, known.format.name)
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), (target.args, target.kwargs))
    if known.kind == "cast":
        model.to(dtype)
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    made = optimizer(model.parameters())
    losses = []
    try:
        for number in range(STEPS):
            seed_everything(step_seed(0, number))
            made.zero_grad()
            under = torch.autocast(device.type, dtype=dtype) if known.kind == "autocast" else contextlib.nullcontext()
            with under:
                loss = loss_of(None, model(*args, **kwargs), LossInputs(args, kwargs))
            loss.backward()
            made.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
    except Exception as error:
        return type(error).__name__
    return losses


def compare(name: str, device: torch.device) -> dict[str, Any]:
    """One model: for each precision, whether the loop agrees with the scan."""
    spec, inputs = MODELS[name]
    target = load_target(spec, inputs)
    started = time.perf_counter()
    args: Any = target.kwargs or target.args
    result = scan(
        target.model, args, train=True, steps=STEPS, device=str(device), times="off", plan=False, optimizer=optimizer
    )
    seconds = time.perf_counter() - started
    rows = {}
    for precision, way_name in WAYS.items():
        run = result.run(precision)
        expected = loop(target, precision, device)
        way = run.training.way(way_name) if run.training is not None else None
        found: Any = None
        if way is not None:
            found = way.exception.type if way.exception is not None else list(way.losses[:STEPS])
        wanted = expected if isinstance(expected, str) else [x if math.isfinite(x) else None for x in expected]
        rows[precision] = {
            "status": run.status,
            "agrees": found == wanted,
            "scan": found,
            "loop": wanted,
            "perturbed": run.perturbed,
            "complete": run.complete,
            "gaps": [f"{gap.op} {gap.phase}" for gap in run.gaps],
            "notes": [note for note in run.notes if "failed" in note],
        }
    return {"model": name, "seconds": seconds, "precisions": rows}


def main() -> None:
    """Compare all models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", choices=list(MODELS))
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)  # forks
    rows: list[dict[str, Any]] = []
    for name in options.only or MODELS:
        try:
            rows.append(compare(name, torch.device(options.device)))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        for precision, row in rows[-1]["precisions"].items():
            print(name, precision, row, flush=True)
    save(options.output, {"made": made(options.device), "models": rows}, render)


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = data["models"]
    table = [
        [row["model"], *(_cell(row["precisions"][precision]) for precision in WAYS), f"{row['seconds']:.0f} s"]
        for row in rows
    ]
    cells = [cell for row in rows for cell in row["precisions"].values()]
    agree, changed = sum(cell["agrees"] for cell in cells), sum(cell["perturbed"] is True for cell in cells)
    totals = f"{agree} of {len(cells)} runs agree with a plain loop, bit for bit; {changed} instrumented steps differ from plain ones."
    about = "Three steps of SGD with momentum; `≠`: the losses differ from those of a plain loop."
    lines = [*head("Scans of training and plain loops", data), about, ""]
    return "\n".join([*lines, tabulate(table, ["model", *WAYS, "scan"], tablefmt="github"), "", totals, ""])


def _cell(row: dict[str, Any]) -> str:
    agrees = "" if row["agrees"] else " ≠"
    return f"{row['status']}{agrees}{' perturbed' if row['perturbed'] else ''}"


if __name__ == "__main__":
    main()
