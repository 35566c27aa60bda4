"""Which faults of backends a scan finds, and how often it blames a backend that does what the model does.

``python benchmarks/backend_faults.py [--seconds 1500] [--compiled resnet18,mobilenet_v3_small] [--output FILE]`` scans small models with
planted backends, each of which does one thing wrong, and real architectures on the backends of torch. A healthy row is blamed if it
fails although eager mode passes in its precision, or has LP306 or LP308. Architectures that are not reached in time are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check import Backend, Run, ScanResult, scan
from lowprec_check.analysis.run_summary import passes_all
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.run_key import EAGER

ALL = "fp32,bfloat16,half,autocast-bf16,autocast-fp16"


class Planted(Backend):
    """Calls the model and does something wrong."""

    summary = "planted"

    def __init__(self, name: str, make: Callable[[], Callable[[nn.Module, Tensor], Any]]) -> None:
        self.name, self._make = name, make  # type: ignore[misc]

    def prepare(self, model: Any, example: Any) -> Any:
        """The model with its fault."""
        fault = self._make()
        return lambda x: fault(model, x)


def one_row(model: nn.Module, x: Tensor) -> Tensor:
    """The first row is the last one."""
    y = model(x).clone()
    y[0] = y[-1]
    return y


def one_value(model: nn.Module, x: Tensor) -> Tensor:
    """One value is half as large again."""
    y = model(x).clone()
    y.view(-1)[0] *= 1.5
    return y


def mutates(model: nn.Module, x: Tensor) -> Tensor:
    """Buffers and inputs are changed after the call."""
    y = model(x)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(1.0)
    x.zero_()
    return y


def eight_bits(model: nn.Module, x: Tensor) -> Tensor:
    """The output has 8 bits."""
    y = model(x)
    return (y / y.abs().max() * 127).round() / 127 * y.abs().max()


def stale() -> Callable[[nn.Module, Tensor], Tensor]:
    """The output is that of the call before."""
    kept: list[Tensor] = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(model(x).clone())
        return kept[max(0, len(kept) - 2)]

    return call


PLANTS = [
    Planted("one-row", lambda: one_row),
    Planted("one-value", lambda: one_value),
    Planted("shape", lambda: lambda model, x: model(x).reshape(-1)),
    Planted("dtype", lambda: lambda model, x: model(x).double()),
    Planted("stale", stale),
    Planted("scaled", lambda: lambda model, x: model(x) * 1.004),
    Planted("eight-bits", lambda: eight_bits),
    Planted("mutates", lambda: mutates),
    Planted("batch", lambda: lambda model, x: model(x) + (len(x) % 2)),
    Planted("sign", lambda: lambda model, x: model(x if x.sum() * FIRST > 0 else x.abs())),
]
HEALTHY = Planted("healthy", lambda: lambda model, x: model(x).clone())
FIRST = 1.0


class Small(nn.Module):
    """Two layers; ``kind`` is what is between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.norm, self.second = kind, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        """Output of shape (batch, 8)."""
        y = self.norm(self.first(x)).relu()
        if self.kind == "branch" and x.sum() > 0:
            y = y * (int(y.abs().sum().item()) % 5 + 2)
        if self.kind == "numpy":
            y = y / float(y.detach().float().numpy().max())
        if self.kind == "counter":
            out = y - self.mean
            self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
            y = out
        if self.kind == "draws":
            y = nn.functional.dropout(y, 0.2, training=True)
        if self.kind == "ties":
            y = y * (y == y.amax(-1, keepdim=True))
        if self.kind == "chaotic":
            y = y.sigmoid()
            for _ in range(12):
                y = 3.9 * y * (1 - y)
        return self.second(y)


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) + 0.1


def scanned(model: nn.Module, inputs: Any, precisions: str, backends: str) -> ScanResult:
    """A scan without times and analysis."""
    options: dict[str, Any] = {"times": "off", "plan": False, "errors": "none"}
    return scan(model.eval(), inputs, precisions=precisions, backends=f"{EAGER},{backends}", **options)


def blamed(run: Run, result: ScanResult) -> str | None:
    """Why a row does not pass though eager mode does, or what is found of its backend; ``None`` if it is not blamed."""
    codes = {d.code for d in result.diagnostics if (d.precision, d.backend) == (run.precision, run.backend)}
    found = sorted(codes & {"LP306", "LP308"})
    if found:
        return " ".join(found)
    fails = not passes_all(run) and result.run(run.precision).status == "ok" and run.status != "unjudged"
    if not fails or run.status == "skipped" or (run.is_quantized and run.failed_input is None):
        return None
    return f"{run.status}{f' on {run.failed_input} inputs' if run.failed_input else ''}"


def faults() -> Iterator[dict[str, Any]]:
    """A row for each planted fault, on each small model, in fp32; and for traces of code that depends on data."""
    for kind in ("plain", "branch", "counter"):
        result = scanned(Small(kind), X, "fp32", ",".join(plant.name for plant in PLANTS))
        yield from (row(kind, run, result) for run in result.runs if run.backend != EAGER)
    for kind in ("branch", "numpy", "counter"):
        result = scanned(Small(kind), X, ALL, "jit")
        yield from (row(kind, run, result) for run in result.runs if run.backend != EAGER)


def row(model: str, run: Run, result: ScanResult) -> dict[str, Any]:
    """The figures of one row."""
    found = run.backend_check
    return {
        "model": model,
        "run": run.key.label,
        "status": run.status,
        "inputs": len(found.inputs) if found else 0,
        "remarks": len(found.remarks) if found else 0,
        "blamed": blamed(run, result),
    }


def architectures() -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    """Names, functions that make them with random weights, and inputs."""
    for kind in ("plain", "draws", "ties", "chaotic"):
        yield kind, lambda kind=kind: Small(kind), X
    vision = import_torchvision().models
    image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for name in (
        *("resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0"),
        *("regnet_y_400mf", "densenet121", "googlenet", "swin_t"),
    ):
        yield name, lambda name=name: vision.get_model(name, weights=None), image
    import timm

    for name in (
        *("vit_tiny_patch16_224", "convnext_atto", "levit_128s", "ghostnet_100", "mixer_s32_224", "resmlp_12_224"),
        *("mobilevit_xxs", "edgenext_xx_small", "poolformer_s12", "tf_efficientnetv2_b0"),
    ):
        size = 224 if "224" in name or name.startswith(("levit", "mobilevit", "poolformer")) else 64
        pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        yield name, lambda name=name: timm.create_model(name, pretrained=False), pixels
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
    ids = {"input_ids": torch.randint(1, 99, (2, 12), generator=torch.Generator().manual_seed(0))}
    for name in ("bert", "roberta", "electra", "deberta-v2", "gpt_neox", "llama", "qwen2", "distilbert", "albert"):
        config = transformers.AutoConfig.for_model(name, **sizes, intermediate_size=64, use_cache=False)
        yield name, lambda config=config: transformers.AutoModel.from_config(config), ids


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    found = [each for each in data["faults"] if each["blamed"]]
    alarms = [each for each in data["healthy"] if each["blamed"]]
    lines = [
        *head("Faults of backends", data),
        f"{len(found)} of {len(data['faults'])} rows with a planted fault, or with a trace of code that depends on data, are found.",
        f"{len(alarms)} of {len(data['healthy'])} healthy rows, of {len({each['model'] for each in data['healthy']})} models, are blamed.",
        "`inputs` counts the changed inputs that a row was compared with eager mode on, `remarks` warnings and graph breaks.",
    ]
    for title, rows in (("Faults", data["faults"]), ("Healthy rows", data["healthy"])):
        cells = [[value if value is not None else "–" for value in each.values()] for each in rows]
        table = tabulate(cells, list(rows[0]) if rows else [], tablefmt="pipe", disable_numparse=True)
        lines += ["", f"## {title}", "", table]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan, and save after each model."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=1500.0)
    options.add_argument("--compiled", default="plain,ties", help="models that inductor and int8 compile too")
    options.add_argument("--output", type=Path, help="path of the report without its suffix")
    given = options.parse_args()
    end, compiled = time.monotonic() + given.seconds, given.compiled.split(",")
    for plant in (*PLANTS, HEALTHY):
        BACKENDS._items[plant.name] = plant
    data: dict[str, Any] = {"made": made(), "faults": list(faults()), "healthy": []}
    save(given.output, data, render)
    for name, make, inputs in architectures():
        if time.monotonic() > end:
            break
        torch.manual_seed(0)
        backends = "jit" + (",healthy" if isinstance(inputs, Tensor) else "")
        sets = [(ALL, backends), *([("fp32,autocast-bf16", "inductor,int8")] if name in compiled else [])]
        for precisions, chosen in sets:
            try:
                result = scanned(make(), inputs, precisions, chosen)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            healthy = [run for run in result.runs if run.backend != EAGER and run.status != "skipped"]
            data["healthy"] += [row(name, run, result) for run in healthy]
        save(given.output, data, render)


if __name__ == "__main__":
    main()
