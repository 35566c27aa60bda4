"""The column "memory" against fresh processes: each row is served alone by plain torch in a process of its own, and psutil reads what it holds.

    python benchmarks/process_memory.py --output reports/process-memory

Counted there: anonymous pages, and pages of files but those libraries that were loaded before the model was made; at the peak of five calls, less
what the process held then. None of the tool's measuring code is used: the fresh process only loads models of its zoo.
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

LEAST = 4 << 20
WITHIN = 0.1
QUICK = (
    "fp32 eager",
    "half eager",
    "bfloat16 eager",
    "autocast-bf16 eager",
    "fp32 jit",
    "bfloat16 jit",
    "fp32 p-healthy",
)
COMPILED = (*QUICK, "fp32 inductor", "fp32 int8")
MODELS = {
    "mlp:512:4:256": COMPILED,
    "mlp:2048:4:64": COMPILED,
    "torchvision:squeezenet1_1": QUICK,
    "torchvision:resnet18": QUICK,
    "timm:mobilevit_s": QUICK,
    "torchvision:resnet50": COMPILED,
    "transformers:distilbert": QUICK,
    "torchvision:vgg11": QUICK,
}
"""Models, and the rows of each: a precision and a backend."""


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


def scanned(name: str, rows: tuple[str, ...]) -> dict[str, int | None]:
    """The bytes that a scan reports, by row."""
    import torch

    import lowprec_check
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
    found: dict[str, int | None] = {}
    for backend in dict.fromkeys(row.split()[1] for row in rows):
        precisions = [row.split()[0] for row in rows if row.split()[1] == backend]
        inputs = kwargs or args
        if backend == "eager":
            precisions = [each for each in precisions if each != "fp32"]
        result = lowprec_check.scan(model, inputs, precisions=precisions, backends=[backend], **options)
        for run in result.runs:
            found[f"{run.precision} {run.backend}"] = run.process_memory_bytes
        torch.manual_seed(0)
    return found


def in_fresh_process(*arguments: str) -> str:
    """What this script prints with ``arguments``; compilers start with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    return done.stdout.strip().rpartition("\n")[2]


def ratio(mine: int | None, fp32: int | None) -> float | None:
    """As the column has it."""
    return max(mine, LEAST) / max(fp32, LEAST) if mine and fp32 else None


def main() -> None:
    """Measure all rows, or as many as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--models", help="those with this in their name")
    parser.add_argument("--quick", action="store_true", help="without compilers")
    parser.add_argument("--serve", nargs=2)
    parser.add_argument("--scan")
    options = parser.parse_args()
    if options.serve:
        print(serve(*options.serve))
        return
    if options.scan:
        print(json.dumps(scanned(options.scan, QUICK if options.quick else MODELS[options.scan])))
        return
    end, found = time.monotonic() + options.seconds, []
    for name, all_rows in MODELS.items():
        rows = QUICK if options.quick else all_rows
        if time.monotonic() > end:
            break
        if options.models and options.models not in name:
            continue
        column = json.loads(in_fresh_process("--scan", name, *(["--quick"] if options.quick else [])) or "{}")
        fresh = {}
        for row in rows:
            said = in_fresh_process("--serve", name, row)
            fresh[row] = int(said) if said.isdigit() else None
            mine = ratio(column.get(row), column.get("fp32 eager"))
            real = ratio(fresh[row], fresh["fp32 eager"])
            found.append(
                {"model": name, "row": row, "scan": column.get(row), "fresh": fresh[row], "column": mine, "real": real}
            )
            print(found[-1], flush=True)
            if options.output:
                options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                options.output.with_suffix(".md").write_text(page(found), encoding="utf-8")


def page(found: list[dict[str, Any]]) -> str:
    """The report."""
    compared = [each for each in found if each["column"] and each["real"]]
    near = [each for each in compared if abs(each["column"] / each["real"] - 1) <= WITHIN]
    bytes_near = [each for each in compared if abs(each["scan"] / each["fresh"] - 1) <= WITHIN]
    lines = [
        "# Memory of rows against fresh processes",
        "",
        "`python benchmarks/process_memory.py --output reports/process-memory`, with torch 2.13.0+cpu on two cores that other programs used too.",
        "A fresh process serves each row alone, by plain torch; MiB are those at the peak of a call beyond what the process held without the model.",
        "",
        f"**The column is within 10 % for {len(near)} of {len(compared)} rows**, its bytes for {len(bytes_near)}. "
        f"{len(found) - len(compared)} rows could not be compared.",
        "",
        "| model | row | scan, MiB | fresh, MiB | column | fresh | |",
        "|:--|:--|--:|--:|--:|--:|:--|",
    ]
    for each in found:
        mine, real = (f"{each[key] / 2**20:.1f}" if each[key] else "–" for key in ("scan", "fresh"))
        column, truth = (f"{each[key]:.2f}" if each[key] else "–" for key in ("column", "real"))
        mark = "" if each in near else "off" if each in compared else "–"
        lines.append(f"| {each['model']} | {each['row']} | {mine} | {real} | {column} | {truth} | {mark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
