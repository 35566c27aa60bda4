"""The column "memory" against fresh processes: each row is served alone by plain torch in a process of its own, and psutil reads what it holds.

    python benchmarks/process_memory.py [--only resnet] [--output reports/process-memory]

Counted there: anonymous pages, and pages of files but those libraries that were loaded before the model was made; at the peak of five calls, less
what the process held then. None of the tool's measuring code is used: the fresh process only loads models of its zoo. Models that are in the output
already are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report_files import head, made, save
from tabulate import tabulate

WITHIN = 0.1
TORCH = ("fp32,bfloat16,autocast-bf16", "eager,jit,p-healthy")
INDUCTOR = ("fp32,autocast-bf16", "eager,inductor")
OTHERS = ("fp32", "eager,inductor,int8,openvino,onnxruntime")
MODELS = {
    "mlp:2048:4:64": (TORCH, OTHERS),
    "torchvision:resnet18": (TORCH, OTHERS),
    "torchvision:resnet50": (TORCH, OTHERS),
    "mlp:1024:16:256": (TORCH, INDUCTOR),
    "transformers:distilbert": (TORCH, OTHERS),
    "torchvision:convnext_tiny": (TORCH,),
    "torchvision:vgg11": (TORCH,),
}
"""Models with tens of megabytes of weights, and the scans of each: precisions and backends."""


def loaded(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model and the arguments of a call."""
    import torch

    if name.startswith("mlp"):
        width, depth, batch = map(int, name.split(":")[1:])
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers).eval(), (torch.randn(batch, width),), {}
    from lowprec_check.engine.model.load_target import load_target

    target = load_target(name)
    return target.model, target.args, target.kwargs


# -- a fresh process


def held(libraries: set[str]) -> int:
    """Bytes of this process."""
    import psutil

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    maps = psutil.Process().memory_maps()
    return sum(each.anonymous + (0 if each.path in libraries else each.rss - each.anonymous) for each in maps)


def libraries() -> set[str]:
    """Files of the libraries that are loaded."""
    import psutil

    return {each.path for each in psutil.Process().memory_maps() if ".so" in os.path.basename(each.path)}


def prepared(model: Any, args: Any, kwargs: Any, backend: str) -> Any:
    """What replaces the model on a backend, by the code of its documentation."""
    import torch

    if backend == "jit":
        example = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
        return torch.jit.freeze(torch.jit.trace(model, **example, check_trace=False, strict=False))
    if backend == "inductor":
        return torch.compile(model)
    if backend in ("openvino", "onnxruntime"):
        return in_library(torch.export.export(model, args, kwargs, strict=False).run_decompositions({}), backend)
    if backend == "int8":
        import torch._inductor.config
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        torch._inductor.config.freezing = True
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        observed = prepare_pt2e(torch.export.export(model, args, kwargs, strict=True).module(), quantizer)
        observed(*args, **kwargs)
        return torch.compile(convert_pt2e(observed))
    return model


def in_library(program: Any, backend: str) -> Any:
    """What runs a graph of one output on the inputs of its example."""
    import torch

    if backend == "openvino":
        import openvino

        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        graph = openvino.convert_model(program)
        graph.reshape({place: tuple(given.shape) for place, given in enumerate(program.example_inputs[0])})
        compiled = openvino.compile_model(graph, "CPU", options)
        return lambda *args, **kwargs: compiled([each.numpy() for each in (*args, *kwargs.values())]).to_tuple()
    import onnxruntime

    data = torch.onnx.export(program, dynamo=True, verbose=False).model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *args, **kwargs: session.run(
        None, dict(zip(names, (each.numpy() for each in (*args, *kwargs.values())), strict=True))
    )


def serve(name: str, row: str) -> int:
    """Bytes at the peak of a call, beyond those before the model was made."""
    import torch
    from torch.utils._pytree import tree_map_only

    loaded(name)  # what it imports
    known = libraries()
    before = held(known)
    precision, backend = row.split()
    model, args, kwargs = loaded(name)
    context: Any = contextlib.nullcontext
    if precision in ("half", "bfloat16"):
        dtype = getattr(torch, precision)
        model = model.to(dtype)
        args, kwargs = tree_map_only(
            torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs)
        )
    elif precision == "autocast-bf16":
        context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    with torch.no_grad():
        with context():
            if precision == "autocast-bf16":
                torch.set_autocast_cache_enabled(backend == "eager")
            served = prepared(model, args, kwargs, backend)
        del model
        for _ in range(3):
            with context():
                served(*args, **kwargs)
        ready = held(known)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        resident = status("VmRSS")
        for _ in range(5):
            with context():
                served(*args, **kwargs)
        return ready + status("VmHWM") - resident - before


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


# -- the scan


def scanned(name: str) -> dict[str, list[float | None]]:
    """By row, the bytes and the ratio to fp32 that scans report."""
    import lowprec_check
    from lowprec_check.analysis.run_summary import memory_ratio
    from lowprec_check.schema.axes import BACKENDS

    class Healthy(lowprec_check.Backend):
        """Calls the model."""

        name = "p-healthy"
        summary = "planted"

        def prepare(self, model: Any, example: Any) -> Any:
            """The model, called through an object that holds it."""
            return functools.partial(model)

    BACKENDS._items["p-healthy"] = Healthy()
    model, args, kwargs = loaded(name)
    options: dict[str, Any] = {"plan": False, "times": "off", "errors": "none", "further_inputs": 0, "tolerance": 10.0}
    found: dict[str, list[float | None]] = {}
    for precisions, backends in MODELS[name]:
        result = lowprec_check.scan(model, kwargs or args, precisions=precisions, backends=backends, **options)
        for run in result.runs:
            if run.status == "ok":
                held = [run.process_memory_bytes, memory_ratio(run, result.runs)]
                found.setdefault(f"{run.precision} {run.backend}", held)
    return found


def in_fresh_process(*arguments: str) -> str:
    """What this script prints with ``arguments``; compilers start with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    return done.stdout.strip().rpartition("\n")[2]


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a model; without a ratio where one of both sides has no figure."""
    column = json.loads(in_fresh_process("--scan", name) or "{}")
    fresh: dict[str, int] = {}
    for row in column:
        said = in_fresh_process("--serve", name, row)
        fresh[row] = int(said) if said.isdigit() else 0
        print(name, row, *column[row], fresh[row], flush=True)
    fp32 = fresh.get("fp32 eager", 0)
    return [
        {"model": name, "row": row, "scan": held, "fresh": fresh[row], "column": ratio, "real": fresh[row] / fp32}
        for row, (held, ratio) in column.items()
        if fp32
    ]


def main() -> None:
    """Measure all models, or as many as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no model is started later")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--serve", nargs=2)
    parser.add_argument("--scan")
    options = parser.parse_args()
    if options.serve:
        print(serve(*options.serve))
        return
    if options.scan:
        print(json.dumps(scanned(options.scan)))
        return
    end = time.monotonic() + options.seconds
    saved = options.output.with_suffix(".json") if options.output else None
    rows = json.loads(saved.read_text(encoding="utf-8"))["rows"] if saved and saved.exists() else []
    for name in MODELS:
        if time.monotonic() < end and options.only in name and not any(each["model"] == name for each in rows):
            rows += measured(name)
            save(options.output, {"made": made(), "rows": rows}, render)


def render(data: dict[str, Any]) -> str:
    """The report."""
    rows = data["rows"]
    compared = [each for each in rows if each["column"] and each["real"]]
    near = [each for each in compared if abs(each["column"] / each["real"] - 1) <= WITHIN]
    bytes_near = [each for each in compared if abs(each["scan"] / each["fresh"] - 1) <= WITHIN]
    most = max((abs(each["scan"] - each["fresh"]) for each in compared), default=0) / 2**20
    lines = [
        *head("Memory of rows against fresh processes", data),
        "A fresh process serves each row alone, by plain torch; MiB are those at the peak of a call beyond what the process held without the model.",
        "",
        f"**The column is within 10 % for {len(near)} of {len(compared)} rows**, its bytes for {len(bytes_near)}; the largest difference is "
        f"{most:.1f} MiB. {len(rows) - len(compared)} rows could not be compared.",
        "",
    ]
    cells = []
    for each in rows:
        held = [f"{each[key] / 2**20:.1f}" if each[key] else "–" for key in ("scan", "fresh")]
        ratios = [f"{each[key]:.2f}" if each[key] else "–" for key in ("column", "real")]
        cells.append(
            [each["model"], each["row"], *held, *ratios, "" if each in near else "off" if each in compared else "–"]
        )
    heads = ["model", "row", "scan, MiB", "fresh, MiB", "column", "fresh", ""]
    return "\n".join([*lines, tabulate(cells, heads, tablefmt="pipe", disable_numparse=True)]) + "\n"


if __name__ == "__main__":
    main()
