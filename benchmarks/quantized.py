"""Rows in eight and four bits against plain torchao: bits, weights, speed, printed code, emulation and plans.

    python benchmarks/quantized.py --only opt --formats int8-dynamic,mxfp8 --planted 3
    python benchmarks/quantized.py --device cuda --width 1024 --layers 4 --jobs 2 --output reports/quantized

Each model in a format is a process of its own, and each planted outlier: a channel that one layer cannot take, so that
the plan must keep this layer alone. What a row must equal is written here once more, as torchao's documentation has it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from unittest import mock

from shared import head, in_processes, made, parser_of, save

NEAR, NEAR_LAYER = 0.05, 0.10  # the largest relative differences of bytes and times, and of errors of layers
PLANTED = ("int8-weight-only", "int8-dynamic", "int4-weight-only")
CHECKS = ("bits", "code", "error", "weights", "speed")
FP8, MX = "Float8DynamicActivationFloat8WeightConfig", "MXDynamicActivationMXWeightConfig"
FP4 = "activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2"
FORMATS = {
    "int8-weight-only": ("torchao.quantization.Int8WeightOnlyConfig()", 1, 1),
    "int8-dynamic": ("torchao.quantization.Int8DynamicActivationInt8WeightConfig()", 1, 1),
    "fp8-weight-only": ("torchao.quantization.Float8WeightOnlyConfig()", 1, 1),
    "fp8-dynamic": (f"torchao.quantization.{FP8}(granularity=torchao.quantization.PerRow())", 16, 16),
    "fp8-dynamic-tensor": (f"torchao.quantization.{FP8}(granularity=torchao.quantization.PerTensor())", 16, 16),
    "int4-weight-only": ('torchao.quantization.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")', 128, 16),
    "mxfp8": (f"torchao.prototype.mx_formats.{MX}(kernel_preference=preference)", 32, 32),
    "mxfp4": (f"torchao.prototype.mx_formats.{MX}({FP4}, kernel_preference=preference)", 32, 32),
    "nvfp4": ("", 16, 16),
}
"""The configuration, and what ``in_features`` and ``out_features`` are multiples of; without one, only its code."""

DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "opt", "gpt_neox")
ENCODERS, IMAGES = ("bert", "roberta", "electra", "distilbert", "deberta-v2"), ("vit", "deit", "dinov2")
MODELS = (*DECODERS, *ENCODERS, *IMAGES, "whisper", "resnet50", "swin_t", "unet")


def model_and_inputs(name: str, width: int, layers: int) -> Any:
    """A model with random weights, and its inputs on the CPU, a tensor or keyword arguments."""
    import torch

    torch.manual_seed(0)
    images = torch.randn(2, 3, 224, 224)
    if name == "unet":
        from diffusers import UNet2DConditionModel

        down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
        kinds = {"down_block_types": down, "up_block_types": up, "block_out_channels": (width // 2, width)}
        model = UNet2DConditionModel(**kinds, sample_size=32, cross_attention_dim=width, layers_per_block=1)
        text = torch.randn(2, 16, width)
        return model.eval(), {"sample": torch.randn(2, 4, 32, 32), "timestep": 10, "encoder_hidden_states": text}
    if name in ("resnet50", "swin_t"):
        import torchvision

        return getattr(torchvision.models, name)(weights=None).eval(), images
    import transformers

    sizes = dict.fromkeys(("hidden_size", "d_model", "dim", "word_embed_proj_dim"), width)
    hidden = ("intermediate_size", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")
    heads = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads")
    sizes |= dict.fromkeys(hidden, 2 * width) | dict.fromkeys(heads, 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layers"), layers)
    sizes |= {"vocab_size": 512, "num_key_value_heads": 4, "use_cache": False, "decoder_start_token_id": 1}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mlp_ratio": 2, "max_source_positions": 200}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **sizes)).eval()
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 512, (2, 64))}
    if name == "whisper":
        inputs = {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": torch.randint(3, 512, (1, 16))}
    return model, {"pixel_values": images} if name in IMAGES else inputs


def quantize_plainly(model: Any, form: str) -> None:
    """As torchao's documentation has it; layers of shapes that its kernels do not take are left out."""
    import torch
    import torchao.prototype.mx_formats
    import torchao.quantization
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quant_api import _is_linear
    from torchao.quantization.quantize_.common import KernelPreference

    code, of_inputs, of_outputs = FORMATS[form]
    on_gpu = next(model.parameters()).is_cuda
    has_mx = on_gpu and torch.cuda.get_device_capability() >= (10, 0)
    preference = KernelPreference.AUTO if has_mx else KernelPreference.EMULATED
    config = eval(code, {"torch": torch, "torchao": torchao, "preference": preference})
    if form == "int4-weight-only" and not on_gpu:
        config = PrototypeInt4WeightOnlyConfig()

    def is_taken(module: Any, _: str) -> bool:
        return _is_linear(module) and module.in_features % of_inputs == 0 and module.out_features % of_outputs == 0

    torchao.quantization.quantize_(model, config, is_taken)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code rounds elsewhere: only times are compared of it."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # in workers that import torch anew
    with mock.patch("torch.compile", lambda model, *_, **__: model):
        yield
    del os.environ["TORCHDYNAMO_DISABLE"]


def tensors(output: Any) -> list[Any]:
    """The tensors of an output."""
    import torch
    from torch.utils._pytree import tree_leaves

    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [value.float().cpu() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def output_of(model: Any, inputs: Any) -> list[Any]:
    """The tensors of the output, with the seed of a scan."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def median_ms(model: Any, inputs: Any, device: str) -> float:
    """Of a plain loop, after calls that compile."""
    import torch

    wait, times = torch.cuda.synchronize if device == "cuda" else time.perf_counter, []
    for _ in range(25):
        wait()
        started = time.perf_counter()
        with torch.no_grad():
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
        wait()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[5:])


def emulated_layers(backend: Any, prepared: Any, low: Any, example: Any) -> tuple[int, int]:
    """How many layers have an error by kernels that is near the emulated one, of how many."""
    from lowprec_check.features.quantize import quantized_linear

    with mock.patch.object(quantized_linear, "why_emulated", return_value="asked for"):
        emulated = backend.layer_errors(backend.prepare(low, example), low, example)
    pairs = zip(emulated, backend.layer_errors(prepared, low, example), strict=True)
    near = [abs(a.local / b.local - 1) <= NEAR_LAYER for a, b in pairs if a.local and b.local]
    return sum(near), len(near)


def compare(item: tuple[str, str, Any]) -> dict[str, Any]:
    """What differs between a row, its code, and plain torchao."""
    name, form, given = item
    device, timed = given.device, not given.no_times
    import torch._dynamo  # reads the environment
    from torch.utils._pytree import tree_map_only

    from lowprec_check import scan
    from lowprec_check.analysis.snippet import snippet
    from lowprec_check.schema.axes import BACKENDS, Example
    from lowprec_check.schema.precisions import PRECISIONS
    from lowprec_check.schema.run_key import RunKey

    model, inputs = model_and_inputs(name, given.width, given.layers)
    options = {"device": device, "further_inputs": 0, "plan": False, "times": "on" if timed else "off"}
    options |= {"isolation": "spawn" if device == "cuda" else None, "backends": ["eager", form]}
    with contextlib.nullcontext() if timed else uncompiled():
        result = scan(copy.deepcopy(model), inputs, precisions="bf16", **options)
    if (row := result.runs[-1]).rel_l2 is None:
        return {"reason": f"{row.status}: {(row.exception and row.exception.text) or row.reason}"[:200]}
    seen: dict[str, Any] = {"emulated": row.without_kernels is not None}
    low, backend = copy.deepcopy(model).to(device).bfloat16(), BACKENDS.get(form)
    plain = copy.deepcopy(low)
    on_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    ready = tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, on_device)
    call: Any = ((), ready) if isinstance(ready, dict) else ((ready,), {})
    named: dict[str, Any] = {"precision": PRECISIONS.get("bf16"), "device": device, "calibration": lambda: [call]}
    example = Example(args=call[0], kwargs=call[1], **named)
    with uncompiled(), torch.no_grad():
        prepared = backend.prepare(low, example)
        values: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": inputs}
        torch.manual_seed(0)
        exec(snippet(RunKey("bfloat16", form, device), result.model), values)
        found, expected = output_of(prepared, ready), output_of(model.to(device), on_device)
        seen["code"] = all(map(torch.equal, tensors(values["output"]), found))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        seen["error"] = timed or abs(max(errors) - row.rel_l2) <= 0.02 * row.rel_l2
        has_plain = not (seen["emulated"] and form in ("fp8-dynamic", "fp8-dynamic-tensor")) and form != "nvfp4"
        if has_plain:
            quantize_plainly(plain, form)
            seen["bits"] = all(map(torch.equal, found, output_of(plain, ready)))
        if has_plain and row.weight_bytes is not None:
            torch.save(plain.state_dict(), file := io.BytesIO())
            seen["weights"] = abs(row.weight_bytes / file.tell() - 1) <= NEAR
        if form.startswith("fp8-dynamic") and not seen["emulated"]:
            seen["layers"] = emulated_layers(backend, prepared, low, example)
    if timed and has_plain and row.latency_ms is not None:
        torch._dynamo.reset()
        seen |= {"ms": row.latency_ms, "loop_ms": median_ms(torch.compile(plain), ready, device)}
        seen["speed"] = abs(seen["ms"] / seen["loop_ms"] - 1) <= NEAR
    return seen


def plan(item: tuple[int, str, Any]) -> dict[str, Any]:
    """Whether the plan keeps the layer with the planted channel, alone, and its code gives the row."""
    seed, form, given = item
    import torch
    from torch import nn

    from lowprec_check import scan

    torch.manual_seed(seed)
    size, blocks, times = 128, 2 + seed % 4, 300.0

    def block() -> nn.Module:
        up, down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(size), up=up, act=nn.GELU(), down=down))

    model, x = nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(size, 64)).eval(), torch.randn(32, size)
    quantize_plainly(clean := copy.deepcopy(model).to(given.device).bfloat16(), form)
    with torch.no_grad():
        expected, [found] = model(x), output_of(clean, x.to(given.device).bfloat16())
        error = float((found - expected).norm() / expected.norm())
        model[seed % blocks].norm.weight[seed % size] /= times
        model[seed % blocks].up.weight[:, seed % size] *= times
    options: dict[str, Any] = {"times": "off", "further_inputs": 0, "device": given.device, "plan": True}
    options |= {"isolation": "spawn" if given.device == "cuda" else None}
    with uncompiled():
        result = scan(model, x, precisions="bf16", backends=["eager", form], tolerance=1.3 * error, **options)
        row, values = result.runs[-1], {"model": copy.deepcopy(model), "inputs": x}
        if row.base is None or result.plan is None:
            return {"reason": "; ".join(attempt.outcome for attempt in result.attempts) or f"it is {row.status}"}
        exec(result.plan.code, values)
    again = float((tensors(values["output"])[0] - expected).norm() / expected.norm())
    is_near = abs(again - (row.rel_l2 or 0.0)) <= NEAR_LAYER * again
    return {"plan": row.keep_fp32 == [f"{seed % blocks}.up"], "plan code": is_near, "kept": row.keep_fp32}


def rendered(data: dict[str, Any]) -> str:
    """Counts by format, then what differs."""
    lines = head("Eight and four bits against plain torchao", data)
    lines += [f"| format | models | emulated | {' | '.join(CHECKS)} | layers |", f"|{'---|' * (len(CHECKS) + 4)}"]
    for form in dict.fromkeys(row["format"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["format"] == form]
        cells = [
            f"{sum(row[check] for row in rows if check in row)} of {sum(check in row for row in rows)}"
            for check in CHECKS
        ]
        layers = [sum(pair) for pair in zip(*(row["layers"] for row in rows if "layers" in row), strict=True)] or [0, 0]
        shown = [form, len(rows), sum(row.get("emulated", False) for row in rows), *cells, "{} of {}".format(*layers)]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    kept, again = (sum(row.get(check, False) for row in data["plans"]) for check in ("plan", "plan code"))
    lines += [
        "",
        f"Planted: {kept} of {len(data['plans'])} plans keep this layer alone; {again} codes give the row.",
        "",
    ]
    for row in (*data["rows"], *data["plans"]):
        wrong = [check for check in (*CHECKS, "plan", "plan code") if row.get(check) is False]
        if wrong or "reason" in row:
            about = {key: row[key] for key in ("ms", "loop_ms", "kept", "reason") if key in row}
            lines.append(f"- {row['name']}: {', '.join(wrong) or 'not run'} {about}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare, and save the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name, number in (("--width", 256), ("--layers", 2), ("--planted", 30), ("--jobs", 1)):
        parser.add_argument(name, type=int, default=number)
    for name, names in (("--only", MODELS), ("--formats", FORMATS)):
        parser.add_argument(name, default=",".join(names))
    parser.add_argument("--no-times", action="store_true", help="compile nothing, and compare no speed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each model in a format")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds for all")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    pairs = [(name, form, given) for name in given.only.split(",") if name for form in given.formats.split(",")]
    planted = [(seed, PLANTED[seed % len(PLANTED)], given) for seed in range(given.planted)]
    found: dict[str, list[dict[str, Any]]] = {"plans": [], "rows": []}
    for key, work, items in (("plans", plan, planted), ("rows", compare, pairs)):
        for (name, form, _), seen, problem in in_processes(
            work, items, given.jobs, end - time.monotonic(), given.limit
        ):
            found[key].append({"name": f"{name} {form}", "format": form, **(seen or {"reason": problem})})
            print(found[key][-1], flush=True)
        print(f"{len(found[key])} of {len(items)} {key}", flush=True)
    save(given.output, {"made": made(given.device), **found}, rendered)


if __name__ == "__main__":
    main()
