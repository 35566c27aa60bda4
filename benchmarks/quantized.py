"""Rows in eight and four bits against plain torchao: bits, weights, speed, printed code, emulation and plans.

    python benchmarks/quantized.py --no-times --only opt,resnet --formats int8-dynamic,mxfp8 --planted 3
    python benchmarks/quantized.py --device cuda --no-times --jobs 12 --output reports/quantized

Each model is a fork of a process that has imported all, with one scan of all formats; each planted outlier is another:
a channel that one layer cannot take, so that the plan must keep this layer alone. What a row must equal is written here
once more, as torchao's documentation has it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import os
import statistics
import time
import zipfile
from collections import OrderedDict
from typing import Any
from unittest import mock

import torch._inductor.config
from shared import described, head, in_processes, made, parser_of, save
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowprec_check import scan
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.features.quantize import quantized_linear
from lowprec_check.schema.axes import BACKENDS, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey

NEAR, NEAR_LAYER = 0.05, 0.10  # the largest relative differences of bytes and times, and of errors of layers
PLANTED = ("int8-weight-only", "int8-dynamic", "int4-weight-only")
UNCOMPILED = functools.partial(mock.patch, "torch.compile", lambda model, *_, **__: model)
"""Compiled code rounds elsewhere: only times are compared of it."""
CHECKS = ("bits", "code", "error", "weights", "speed")
LIBRARIES = ("torchao.prototype.mx_formats", "torchvision", "transformers.modeling_utils", "diffusers.models")
"""Imported once, before all forks."""

FP8, MX = "Float8DynamicActivationFloat8WeightConfig", "MXDynamicActivationMXWeightConfig"
FP4 = "activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2"
INT8 = "torchao.quantization.Int8DynamicActivationInt8WeightConfig()"
FORMATS = {
    "int8-weight-only": ("torchao.quantization.Int8WeightOnlyConfig()", 1, 1),
    "int8-dynamic": (INT8, 1, 1),
    "int8-smoothquant": (INT8, 1, 1),
    "fp8-weight-only": ("torchao.quantization.Float8WeightOnlyConfig()", 1, 1),
    "fp8-dynamic": (f"torchao.quantization.{FP8}(granularity=torchao.quantization.PerRow())", 16, 16),
    "fp8-dynamic-tensor": (f"torchao.quantization.{FP8}(granularity=torchao.quantization.PerTensor())", 16, 16),
    "int4-weight-only": ('torchao.quantization.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")', 128, 16),
    "mxfp8": (f"torchao.prototype.mx_formats.{MX}(kernel_preference=preference)", 32, 32),
    "mxfp4": (f"torchao.prototype.mx_formats.{MX}({FP4}, kernel_preference=preference)", 32, 32),
    "nvfp4": ("", 16, 16),
}
"""The configuration, and what ``in_features`` and ``out_features`` are multiples of; without one, only its code."""

TEXTS = ("opt", "llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "gpt_neox", "gpt2", "bert", "roberta", "electra")
STAGED = ("convnext", "swin", "resnet")
IMAGES = ("vit", "dinov2", *STAGED)
MODELS = (*TEXTS, "distilbert", "deberta-v2", *IMAGES, "t5", "whisper", "clip", "unet")


def model_and_inputs(name: str, width: int, layers: int) -> Any:
    """A model with random weights, and its inputs on the CPU, as keyword arguments."""
    import transformers

    torch.manual_seed(0)
    tokens, images = torch.randint(3, 512, (2, 64)), torch.randn(2, 3, 64, 64)
    if name == "unet":
        unet: Any = importlib.import_module("diffusers").UNet2DConditionModel
        down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
        kinds = {"down_block_types": down, "up_block_types": up, "block_out_channels": (width // 2, width)}
        model = unet(**kinds, sample_size=16, cross_attention_dim=width, layers_per_block=1)
        text = torch.randn(1, 16, width)
        return model.eval(), {"sample": torch.randn(1, 4, 16, 16), "timestep": 10, "encoder_hidden_states": text}
    sizes: dict[str, Any] = {}
    for names, value in (
        ("hidden_size d_model dim word_embed_proj_dim n_embd", width),
        ("intermediate_size ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim d_ff", 2 * width),
        ("num_attention_heads encoder_attention_heads decoder_attention_heads n_heads n_head", 4),
        ("num_hidden_layers encoder_layers decoder_layers n_layers n_layer num_layers", layers),
        ("num_key_value_heads mlp_ratio bos_token_id eos_token_id decoder_start_token_id", 2),
    ):
        sizes |= dict.fromkeys(names.split(), value)
    sizes |= {"vocab_size": 512, "use_cache": False, "pad_token_id": 0, "max_source_positions": 200}
    of_images = {"image_size": 64, "patch_size": 16, "num_labels": 64}
    kind: Any = transformers.AutoModel
    inputs = {"input_ids": tokens}
    if name == "gpt2":  # its linear layer is the head, tied to the embedding
        kind = transformers.AutoModelForCausalLM
    elif name == "whisper":
        inputs = {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": tokens[:, :16]}
    elif name == "t5":
        inputs["decoder_input_ids"] = tokens[:, :16]
    elif name == "clip":
        sizes = {"text_config": sizes, "vision_config": sizes | of_images, "projection_dim": width}
        inputs["pixel_values"] = images
    elif name in IMAGES:
        kind, inputs = transformers.AutoModelForImageClassification, {"pixel_values": images}
        sizes |= of_images
    if name in STAGED:
        sizes = {"image_size": 64, "num_labels": 64, "num_stages": 3, "depths": [1, 1, layers], "embed_dim": width // 4}
        sizes |= {"hidden_sizes": [width // 4, width // 2, width], "num_heads": [2, 2, 4], "window_size": 4}
    return kind.from_config(transformers.AutoConfig.for_model(name, **sizes)).eval(), inputs


def quantize_plainly(model: Any, form: str, call: Any = None) -> None:
    """As torchao's documentation has it; layers of shapes that its kernels do not take are left out."""
    import torchao.prototype.mx_formats
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.prototype.smoothquant import SmoothQuantConfig, SmoothQuantObservedLinear
    from torchao.quantization import quantize_
    from torchao.quantization.quant_api import _is_linear
    from torchao.quantization.quantize_.common import KernelPreference

    code, of_inputs, of_outputs = FORMATS[form]
    on_gpu = next(model.parameters()).is_cuda
    has_mx = on_gpu and torch.cuda.get_device_capability() >= (10, 0)
    preference = KernelPreference.AUTO if has_mx else KernelPreference.EMULATED
    config = eval(code, {"torch": torch, "torchao": torchao, "preference": preference})
    if form == "int4-weight-only" and not on_gpu:
        config = PrototypeInt4WeightOnlyConfig()

    def is_taken(module: Any, _: str) -> Any:
        if form == "fp8-dynamic-tensor" and isinstance(module, nn.Linear) and module.weight.shape == (128, 128):
            return False  # torchao takes its scale for that of a block
        return _is_linear(module) and module.in_features % of_inputs == 0 and module.out_features % of_outputs == 0

    def was_called(module: Any, _: str) -> bool:
        return isinstance(module, SmoothQuantObservedLinear) and bool(module.obs.inputs)

    if form != "int8-smoothquant":
        quantize_(model, config, is_taken)
        for module in model.modules():
            if form.startswith("mx") and isinstance(module, torch.nn.Linear):  # torchao refuses other inputs
                module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))
        return
    quantize_(model, SmoothQuantConfig(config, "prepare"), is_taken)
    output_of(model, call)
    quantize_(model, SmoothQuantConfig(config, "convert"), was_called)


def tensors(output: Any) -> list[Any]:
    """The tensors of an output."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [value.float().cpu() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def output_of(model: Any, inputs: Any) -> list[Any]:
    """The tensors of the output, with the seed of a scan."""
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model(**inputs))


def median_ms(model: Any, inputs: Any, device: str) -> float:
    """Of a plain loop of two seconds, whose first half raises the clocks, waiting after each ten calls as scans do."""
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    times: list[float] = []
    output_of(model, inputs)
    end = time.perf_counter() + 2.0
    while (started := time.perf_counter()) < end or len(times) < 4:
        with torch.no_grad():
            for _ in range(10):
                model(**inputs)
        wait()
        times.append((time.perf_counter() - started) * 1e2)
    return statistics.median(times[len(times) // 2 :])


def emulated_layers(backend: Any, prepared: Any, low: Any, example: Any) -> dict[str, Any]:
    """How many layers have an error by kernels that is near the emulated one, of how many, and the furthest."""
    with mock.patch.object(quantized_linear, "why_emulated", return_value="asked for"):
        emulated = backend.layer_errors(backend.prepare(low, example), low, example)
    pairs = zip(emulated, backend.layer_errors(prepared, low, example), strict=True)
    ratios = [a.local / b.local for a, b in pairs if a.local and b.local]
    near = sum(abs(ratio - 1) <= NEAR_LAYER for ratio in ratios)
    return {"layers": (near, len(ratios)), "worst": max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)}


def compare(item: tuple[str, Any]) -> list[dict[str, Any]]:
    """What differs between the rows of a model, their code, and plain torchao, by format."""
    name, given = item

    model, inputs = model_and_inputs(name, given.width, given.layers)
    forms, timed = given.formats.split(","), not given.no_times
    options: dict[str, Any] = {"device": given.device, "backends": ["eager", *forms], "times": "on" if timed else "off"}
    options |= {"further_inputs": 0, "plan": False, "errors": "none", "judge": "rel_l2", "tolerance": 10.0}
    with contextlib.nullcontext() if timed else UNCOMPILED():
        result = scan(copy.deepcopy(model), inputs, precisions="bf16", **options)
    on_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(given.device), inputs)
    low = copy.deepcopy(model).to(given.device).bfloat16()
    compared = []
    for form, row in zip(forms, result.runs[-len(forms) :], strict=True):
        seen: dict[str, Any] = {"format": form}
        try:
            seen |= differences(row, result.model, low, on_device, (model, inputs), given)
        except Exception as error:
            seen |= {"reason": described(error)}
        compared.append(seen)
    return compared


def differences(row: Any, info: Any, low: Any, on_device: Any, given_model: Any, given: Any) -> dict[str, Any]:
    """What differs between a row, its code, and plain torchao."""
    if row.rel_l2 is None:
        return {"reason": f"{row.status}: {(row.exception and row.exception.text) or row.reason}"[:200]}
    form, device, timed = row.backend, given.device, not given.no_times
    seen: dict[str, Any] = {"emulated": row.without_kernels is not None}
    backend, plain, (model, inputs) = BACKENDS.get(form), copy.deepcopy(low), given_model
    ready = tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, on_device)
    call: dict[str, Any] = {"args": (), "kwargs": ready, "calibration": lambda: [((), ready)]}
    example = Example(precision=PRECISIONS.get("bf16"), device=device, **call)
    with UNCOMPILED(), torch.no_grad():
        prepared = backend.prepare(low, example)
        values: dict[str, Any] = {"model": copy.deepcopy(model), "inputs": inputs}
        torch.manual_seed(0)
        exec(snippet(RunKey("bfloat16", form, device), info), values)
        found, expected = output_of(prepared, ready), output_of(copy.deepcopy(model).to(device), on_device)
        seen["code"] = all(map(torch.equal, tensors(values["output"]), found))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        seen["error"] = timed or abs(max(errors) - row.rel_l2) <= 0.02 * row.rel_l2
        has_plain = not (seen["emulated"] and form in ("fp8-dynamic", "fp8-dynamic-tensor")) and form != "nvfp4"
        if has_plain:
            quantize_plainly(plain, form, ready)
            seen["bits"] = all(map(torch.equal, found, output_of(plain, ready)))
        if has_plain and row.weight_bytes is not None:
            torch.save([plain.state_dict(), list(plain.buffers())], file := io.BytesIO())
            saved = sum(part.file_size for part in zipfile.ZipFile(file).infolist() if "/data/" in part.filename)
            seen["weights"] = abs(row.weight_bytes / saved - 1) <= NEAR
        if form.startswith("fp8-dynamic") and not seen["emulated"]:
            seen |= emulated_layers(backend, prepared, low, example)
    if timed and has_plain and row.latency_ms is not None:
        torch._dynamo.reset()
        with torch._inductor.config.patch(freezing=device == "cpu" and form in ("int8-dynamic", "int8-smoothquant")):
            seen |= {"ms": row.latency_ms, "loop_ms": median_ms(torch.compile(plain), ready, device)}
        seen["speed"] = abs(seen["ms"] / seen["loop_ms"] - 1) <= NEAR
    return seen


def plan(item: tuple[int, str, Any]) -> list[dict[str, Any]]:
    """Whether the plan keeps the layer with the planted channel, alone, and its code gives the row."""
    seed, form, given = item
    torch.manual_seed(seed)
    size, blocks = 128, 2 + seed % 4

    def block() -> nn.Module:
        up, down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(size), up=up, act=nn.GELU(), down=down))

    model: Any = nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(size, 64)).eval()
    x = torch.randn(32, size)
    options: dict[str, Any] = {"times": "off", "further_inputs": 0, "device": given.device, "precisions": "bf16"}
    with UNCOMPILED(), torch.no_grad():
        clean = scan(model, x, backends=["eager", form], tolerance=1.0, plan=False, **options).runs[-1]
        model[seed % blocks].norm.weight[seed % size] /= 300.0
        model[seed % blocks].up.weight[:, seed % size] *= 300.0
        result = scan(model, x, backends=["eager", form], tolerance=1.3 * (clean.rel_l2 or 0.0), plan=True, **options)
        row, values = result.runs[-1], {"model": copy.deepcopy(model), "inputs": x}
        if row.base is None or result.plan is None:
            why = "; ".join(attempt.outcome for attempt in result.attempts) or f"it is {row.status}"
            return [{"format": form, "reason": why}]
        exec(result.plan.code, values)
    [expected], [found] = output_of(model, {"input": x}), tensors(values["output"])
    again = float((found - expected).norm() / expected.norm())
    is_near = abs(again - (row.rel_l2 or 0.0)) <= NEAR_LAYER * again
    kept = row.keep_fp32
    return [{"format": form, "plan": kept == [f"{seed % blocks}.up"], "plan code": is_near, "kept": kept}]


def about(row: dict[str, Any]) -> str:
    """What differs; empty if nothing does."""
    wrong = [check for check in (*CHECKS, "plan", "plan code") if row.get(check) is False]
    if len(set(row.get("layers", ()))) > 1:
        wrong.append("layers")
    if not wrong and "reason" not in row:
        return ""
    known = {key: row[key] for key in ("layers", "worst", "ms", "loop_ms", "kept", "reason") if key in row}
    return f"{row['name']}: {', '.join(wrong) or 'not run'} {known}"


def rendered(data: dict[str, Any]) -> str:
    """Counts by format, then what differs."""
    lines = head("Eight and four bits against plain torchao", data)
    lines += [f"| format | models | emulated | {' | '.join(CHECKS)} | layers |", f"|{'---|' * (len(CHECKS) + 4)}"]
    for form in dict.fromkeys(row["format"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["format"] == form]
        judged = [[row[check] for row in rows if check in row] for check in CHECKS]
        cells = [f"{sum(values)} of {len(values)}" for values in judged]
        layers = [sum(pair) for pair in zip(*(row["layers"] for row in rows if "layers" in row), strict=True)] or [0, 0]
        shown = [form, len(rows), sum(row.get("emulated", False) for row in rows), *cells, "{} of {}".format(*layers)]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    kept, again = (sum(row.get(check, False) for row in data["plans"]) for check in ("plan", "plan code"))
    lines += [
        "",
        f"Planted: of {len(data['plans'])} plans, {kept} keep this layer alone; {again} codes give the row.",
        "",
    ]
    lines += [f"- {text}" for text in map(about, (*data["rows"], *data["plans"])) if text]
    return "\n".join(lines) + "\n"


def import_all(given: Any) -> None:
    """Import what all forks need, without initializing CUDA: a fork could not use it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.set_num_threads(1)  # jobs share the cores
    with contextlib.ExitStack() as stack:
        stack.enter_context(torchvision_works())
        if given.device == "cuda":
            # torchao, which transformers imports, asks for these
            ((_, found, _),) = in_processes(lambda _: torch.cuda.get_device_capability(), [None], 1)
            stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
            stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=found))
            stack.enter_context(mock.patch("torch.utils._triton.has_triton", functools.partial(bool, 1)))
        for library in LIBRARIES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(library)


def main() -> None:
    """Compare, and save the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name, number in (("--width", 256), ("--layers", 2), ("--planted", 30), ("--jobs", 1)):
        parser.add_argument(name, type=int, default=number)
    for name, names in (("--only", MODELS), ("--formats", FORMATS)):
        parser.add_argument(name, default=",".join(names))
    parser.add_argument("--no-times", action="store_true", help="compile nothing, and compare no speed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds for all")
    given = parser.parse_args()
    started = time.monotonic()
    import_all(given)
    ((_, how, _),) = in_processes(made, [given.device], 1)
    items: list[Any] = [(compare, name, given) for name in given.only.split(",") if name]
    items += [(plan, seed, PLANTED[seed % len(PLANTED)], given) for seed in range(given.planted)]
    left = given.seconds + started - time.monotonic()
    data: dict[str, Any] = {"made": how, "rows": [], "plans": []}
    for item, found, problem in in_processes(lambda item: item[0](item[1:]), items, given.jobs, left, given.limit):
        for row in found or [{"format": item[2] if item[0] is plan else "all", "reason": problem}]:
            row |= {"name": f"{item[1]} {row['format']}"}
            data["plans" if item[0] is plan else "rows"].append(row)
            print(f"{time.monotonic() - started:.0f} s {about(row) or row['name']}", flush=True)
        if given.output:
            save(given.output, data, rendered)
    print(rendered(data), len(data["rows"]), "rows and", len(data["plans"]), "plans of", len(items), "processes")


if __name__ == "__main__":
    main()
