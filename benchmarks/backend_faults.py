"""Which faults of backends a scan finds, and how often it blames a backend that does what the model does.

``python benchmarks/backend_faults.py [--only plants,resnet18] [--jobs 2] [--seconds 1500] [--output FILE]`` scans small models, a CNN and a
transformer with planted backends, each of which does one thing wrong, and real architectures on the backends of this package. A healthy row is
blamed if it fails although eager mode passes in its precision, or has LP306 or LP308. Scans that are in the output already are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from in_processes import in_processes
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn

from lowprec_check import Backend, Run, ScanResult, scan
from lowprec_check.analysis.run_summary import passes_all
from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.run_key import EAGER

ALL = "fp32,bfloat16,half,autocast-bf16,autocast-fp16"
COMPILERS = "inductor,inductor-freeze"
INT8 = "int8,int8-weight-only,int8-dynamic,int8-smoothquant"
GRAPHS = "openvino,onnxruntime"


# -- Backends with a fault


class Planted(Backend):
    """Calls the model and does something wrong."""

    summary = "planted"

    def __init__(self, name: str, make: Callable[[], Callable[..., Any]]) -> None:
        self.name, self._make = name, make  # type: ignore[misc]

    def prepare(self, model: Any, example: Any) -> Any:
        """The model with its fault."""
        return functools.partial(self._make(), model)


def on_output(change: Callable[[Tensor], Tensor]) -> Callable[[], Callable[..., Any]]:
    """Makes a fault that changes each floating tensor of the output."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return map_tensors(model(*args, **kwargs), lambda y: change(y.clone()) if y.is_floating_point() else y)

    return lambda: call


def one_row(y: Tensor) -> Tensor:
    """The first row is the last one."""
    if y.ndim:
        y[0] = y[-1].clone()
    return y


def one_value(y: Tensor) -> Tensor:
    """One value is half as large again."""
    y.view(-1)[0] *= 1.5
    return y


def eight_bits(y: Tensor) -> Tensor:
    """The output has 8 bits."""
    return (y / y.abs().max() * 127).round() / 127 * y.abs().max()


def mutates(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Buffers and inputs are changed after the call."""
    y = model(*args, **kwargs)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(1.0)
    for x in (*args, *kwargs.values()):
        x.zero_()
    return y


def stale() -> Callable[..., Any]:
    """The output is that of the call before."""
    kept: list[Any] = []

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept.append(map_tensors(model(*args, **kwargs), torch.clone))
        return kept[max(0, len(kept) - 2)]

    return call


PLANTS = [
    Planted("p-onerow", on_output(one_row)),
    Planted("p-onevalue", on_output(one_value)),
    Planted("p-shape", on_output(lambda y: y.reshape(-1))),
    Planted("p-dtype", on_output(torch.Tensor.double)),
    Planted("p-stale", stale),
    Planted("p-scaled", on_output(lambda y: y * 1.004)),
    Planted("p-int8out", on_output(eight_bits)),
    Planted("p-mutates", lambda: mutates),
]
ON_TENSOR = [
    Planted("p-batch", lambda: lambda model, x: model(x) + (len(x) % 2)),
    Planted("p-sign", lambda: lambda model, x: model(x if x.sum() > 0 else x.abs())),
]
"""For models of one tensor."""
NAN_GONE = Planted("p-nangone", on_output(lambda y: torch.nan_to_num(y, nan=0.0, posinf=1.0, neginf=-1.0)))
"""For models whose output has NaN or Inf."""
HEALTHY = Planted("p-healthy", on_output(lambda y: y))


# -- Models


class Small(nn.Module):
    """Two layers; ``kind`` is what is between them, or after."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.norm, self.second = kind, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Any:
        """Output of shape (batch, 8)."""
        y = self.norm(self.first(x)).relu()
        if self.kind == "branch" and x.sum() > 0:
            y = y * (int(x[0].abs().sum().item() / 10) % 5 + 2)
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
        y = self.second(y)
        if self.kind == "infinite":
            y = y.masked_fill(torch.eye(8, dtype=torch.bool).repeat(len(y) // 8 + 1, 1)[: len(y)], float("-inf"))
        if self.kind == "overflow":
            y[3] *= 1e6
            y = y * 1.0
        if self.kind == "chance":
            p = y.softmax(-1)
            return {"loss": -p.log().mean(), "ids": y.argmax(-1), "p": p, "var": y.var(-1).mean()}
        return y


SMALL = ("plain", "branch", "counter", "draws", "ties", "chaotic", "chance", "numpy", "infinite", "overflow")
VISION = (
    *("resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0"),
    *("regnet_y_400mf", "densenet121", "googlenet", "swin_t"),
)
TIMM = (
    *("vit_tiny_patch16_224", "convnext_atto", "levit_128s", "ghostnet_100", "mixer_s32_224", "resmlp_12_224"),
    *("mobilevit_xxs", "edgenext_xx_small", "poolformer_s12", "tf_efficientnetv2_b0"),
)
TEXT = ("bert", "roberta", "electra", "deberta-v2", "gpt_neox", "llama", "qwen2", "distilbert", "albert")


def loaded(name: str) -> tuple[nn.Module, Any]:
    """A model with random weights, and its inputs."""
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name in SMALL:
        return Small(name).eval(), torch.randn(16, 64, generator=draw) + 0.1
    if name in VISION:
        return import_torchvision().models.get_model(name, weights=None).eval(), torch.randn(
            2, 3, 64, 64, generator=draw
        )
    if name in TIMM:
        import timm

        size = 224 if "224" in name or name.startswith(("levit", "mobilevit", "poolformer")) else 64
        return timm.create_model(name, pretrained=False).eval(), torch.randn(1, 3, size, size, generator=draw)
    import_torchvision()  # which transformers imports
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
    sizes["num_key_value_heads"] = 2  # else more than there are heads
    config = transformers.AutoConfig.for_model(name, **sizes, intermediate_size=64, use_cache=False)
    ids = {"input_ids": torch.randint(1, 99, (2, 12), generator=draw)}
    return transformers.AutoModel.from_config(config).eval(), ids


TRUE = {
    ("ties", "half · onnxruntime"): "its error is 0.79, that of eager mode 3e-4",
    ("chance", "autocast-bf16 · jit"): "its loss is float32, that of eager mode bfloat16",
    ("chance", "autocast-fp16 · jit"): "its loss is float32, that of eager mode float16",
    ("tf_efficientnetv2_b0", "half · onnxruntime"): "its error is 1.1e-2, that of eager mode 5.0e-3",
    ("levit_128s", "autocast-bf16 · jit"): "on CUDA, its output is float32, that of eager mode bfloat16",
    ("levit_128s", "autocast-fp16 · jit"): "on CUDA, its output is float32, that of eager mode float16",
}
"""Rows of healthy backends that differ from eager mode in plain torch too, and how."""


# -- Scans


class Part(NamedTuple):
    """One scan."""

    is_fault: bool
    model: str
    precisions: str
    backends: str

    @property
    def name(self) -> str:
        """For ``--only``."""
        return f"{'faults' if self.is_fault else 'healthy'} {self.model} {self.precisions} {self.backends}"


def parts(compiled: list[str]) -> Iterator[Part]:
    """All scans; ``compiled`` names the models that are compiled and quantized too."""
    plants, on_tensor = (",".join(plant.name for plant in some) for some in (PLANTS, [*PLANTS, *ON_TENSOR]))
    for name in ("plain", "branch", "counter", "ties", "resnet18"):
        yield Part(True, name, "fp32", on_tensor)
    for name in ("chance", "bert"):
        yield Part(True, name, "fp32", plants.replace(",p-mutates", ""))  # no buffers, and inputs that are integers
    yield Part(True, "plain", "half", on_tensor)
    yield Part(True, "infinite", "fp32,bfloat16", NAN_GONE.name)
    yield Part(True, "overflow", "half", NAN_GONE.name)
    for name in ("branch", "numpy", "counter"):
        yield Part(True, name, ALL, "jit")
    for name in ("plain", "draws", "ties", "chaotic", "chance", *VISION, *TIMM, *TEXT):
        yield Part(False, name, ALL, f"jit,{HEALTHY.name}")
        yield Part(False, name, "fp32,half,autocast-bf16,autocast-fp16", GRAPHS)
        if name in compiled:
            yield Part(False, name, "fp32,autocast-bf16", COMPILERS)
            yield Part(False, name, "fp32,bfloat16,autocast-bf16", INT8)


def scanned(part: Part) -> list[dict[str, Any]]:
    """The figures of the rows of a scan without times and analysis."""
    for plant in (*PLANTS, *ON_TENSOR, NAN_GONE, HEALTHY):
        BACKENDS._items[plant.name] = plant
    model, inputs = loaded(part.model)
    options: dict[str, Any] = {"times": "off", "plan": False, "errors": "none"}
    result = scan(model, inputs, precisions=part.precisions, backends=f"{EAGER},{part.backends}", **options)
    return [row(part.model, run, result) for run in result.runs if run.backend != EAGER and run.status != "skipped"]


def blamed(run: Run, result: ScanResult) -> str | None:
    """Why a row does not pass though eager mode does, or what is found of its backend; ``None`` if it is not blamed.

    A backend that raises an exception cannot run the model, and int8 over the tolerance loses what it is known to lose.
    """
    codes = {d.code for d in result.diagnostics if (d.precision, d.backend) == (run.precision, run.backend)}
    found = sorted(codes & {"LP306", "LP308"})
    if found:
        return " ".join(found)
    fails = not passes_all(run) and passes_all(result.run(run.precision)) and run.status != "unjudged"
    if not fails or run.status == "error" or (run.is_quantized and run.failed_input is None):
        return None
    return f"{run.status}{f' on {run.failed_input} inputs' if run.failed_input else ''}"


def row(model: str, run: Run, result: ScanResult) -> dict[str, Any]:
    """The figures of one row."""
    found = run.backend_check
    return {
        "model": model,
        "run": run.key.label,
        "status": run.status,
        "inputs": len(found.inputs) if found else 0,
        "remarks": len(found.remarks) if found else 0,
        "passes": passes_all(run),
        "blamed": blamed(run, result),
        "raised": f"{run.exception.type}: {run.exception.message}" if run.exception else run.reason,
    }


# -- The report


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    faults, healthy = (
        [each for name, rows in data["scans"].items() if name.startswith(kind) for each in rows]
        for kind in ("faults", "healthy")
    )
    ran = [each for each in healthy if each["raised"] is None]
    found = [each for each in faults if each["raised"] is None and (each["blamed"] or not each["passes"])]
    told = [each for each in ran if each["blamed"]]
    faulty = [each for each in told if (each["model"], each["run"]) in TRUE]
    alarms = len(told) - len(faulty)
    known = "; ".join(f"{each['model']} · {each['run']}: {TRUE[each['model'], each['run']]}" for each in faulty)
    cannot = len(healthy) - len(ran)
    by_backend = Counter(each["run"].rpartition(" · ")[2] for each in ran)
    lines = [
        *head("Faults of backends", data),
        *(
            [
                f"**{len(found)} of {len(faults)} rows with a planted fault, or with a trace of code that depends on data, are found**: they do not pass, or have a finding."
            ]
            if faults
            else []
        ),
        f"**{alarms} of {len(ran) - len(faulty)} healthy rows, of {len({each['model'] for each in ran})} models, are blamed.** By backend: "
        f"{', '.join(f'{name} {count}' for name, count in sorted(by_backend.items()))}.",
        f"{cannot} further rows ended with an exception: the backend cannot run the model. Rows that are skipped are left out.",
        f"{len(faulty)} rows differ from eager mode in plain torch too, and are rightly blamed ({known}).",
        "`inputs` counts the changed inputs that a row was compared with eager mode on, `remarks` warnings and graph breaks.",
    ]
    for title, rows in (("Faults", faults), ("Healthy rows", healthy)):
        if not rows:
            continue
        cells = [
            ["–" if value is None else str(value)[:80].replace("|", "/") for value in each.values()] for each in rows
        ]
        lines += [
            "",
            f"## {title}",
            "",
            tabulate(cells, list(rows[0]), tablefmt="pipe", disable_numparse=True),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan what is not in the output yet, and save after each scan."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=1500.0, help="no scan starts later")
    options.add_argument("--compiled", default="plain,ties", help="models that are compiled and quantized too")
    options.add_argument("--only", default="", help="scans with one of these in their name: faults,healthy bert")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--output", type=Path, help="path of the report without its suffix")
    given = options.parse_args()
    saved = given.output.with_suffix(".json") if given.output else None
    done: dict[str, Any] = json.loads(saved.read_text(encoding="utf-8"))["scans"] if saved and saved.exists() else {}
    chosen = [
        part for part in parts(given.compiled.split(",")) if any(word in part.name for word in given.only.split(","))
    ]
    waiting = [part for part in chosen if part.name not in done]
    order = [part.name for part in parts(given.compiled.split(","))]
    for part, rows in in_processes(scanned, waiting, given.jobs, given.seconds):
        if isinstance(rows, Exception):
            print(f"{part.name}: {type(rows).__name__}: {rows}", flush=True)
            continue
        done[part.name] = rows
        for each in rows:
            print(*each.values(), flush=True)
        names = sorted(done, key=lambda name: order.index(name) if name in order else len(order))
        save(given.output, {"made": made(), "scans": {name: done[name] for name in names}}, render)


if __name__ == "__main__":
    from backend_faults import main as main_of_module  # workers in fresh interpreters import the models from there

    main_of_module()
