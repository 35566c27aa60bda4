"""Compare the predictions of ``scan --what-if`` with models that really compute in the format.

    python benchmarks/what_if.py --output reports/what-if                          # emulated layers, on the CPU
    python benchmarks/what_if.py --device cuda --full --output reports/what-if-cuda # TF32 and fp8 of an H100 or H200
    python benchmarks/what_if.py --only llama --formats tf32,fp8-e4m3

The models are ResNet-50, ViT, GPT-2 and a Llama, from configs, with random weights (seed 0); nothing is downloaded. ``--full``
takes the published sizes of the first three, and images of 224 pixels.

* **Predicted**: the entry of ``--what-if``, computed on the CPU, as a user without the hardware would.
* **Emulated**: the error of a copy of the model whose layers are replaced by modules that compute in the format, end to end
  (``tests/emulated_layers.py``, which shares no code with the package).
* **Hardware** (``--device cuda``): the error of the model on the GPU, against fp32 on the same GPU without TF32. ``tf32``: the
  model with ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``. ``fp8-*``: linear layers and
  convolutions, as products of patches, by ``torch._scaled_mm``, whose sizes are padded to multiples of 16 by zeros.

Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from report_files import head, made, save
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from emulated_layers import emulated_model, rel_l2, replaced

from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.engine.trace.what_if import predict
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.what_if import WHAT_IF_FORMATS, WhatIf

FP8 = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
"""The dtype of activations; weights are in e4m3."""


# -- models


class Case(NamedTuple):
    """A model and its input; both new with each call."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]


class OneTensor(nn.Module):
    """A model of transformers that takes one tensor and returns its logits."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self._key = model, key

    def forward(self, x: Tensor) -> Tensor:
        options = {"use_cache": False} if self._key == "input_ids" else {}
        logits: Tensor = self.model(**{self._key: x}, **options).logits
        return logits


def cases(*, full: bool) -> Iterator[Case]:
    """The models, smaller unless ``full``."""
    side, length = (224, 128) if full else (64, 32)

    def image(count: int) -> Tensor:
        return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))

    def tokens() -> Tensor:
        return torch.randint(0, 500, (2, length), generator=torch.Generator().manual_seed(1))

    yield Case("resnet50", lambda: (import_torchvision().models.resnet50(weights=None), image(2)))
    with contextlib.suppress(ImportError):
        library = importlib.import_module("transformers")
        small = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 768}
        vit = {"image_size": side, "patch_size": 16, **({} if full else small)}
        gpt2 = {} if full else {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512}
        llama = {
            **({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12} if full else small),
            "intermediate_size": 2048 if full else 512,
            "num_key_value_heads": 4,
            "vocab_size": 8192,
        }
        for name, family, key, options, x in (
            ("vit", "ViTForImageClassification", "pixel_values", {**vit, "num_labels": 1000}, lambda: image(2)),
            ("gpt2", "GPT2LMHeadModel", "input_ids", gpt2, tokens),
            ("llama", "LlamaForCausalLM", "input_ids", llama, tokens),
        ):
            yield Case(name, lambda f=family, k=key, o=options, x=x: (of_library(library, f, k, o), x()))  # type: ignore[misc]


def of_library(library: Any, family: str, key: str, options: dict[str, Any]) -> nn.Module:
    """A new model of transformers."""
    kind = getattr(library, family)
    return OneTensor(kind(kind.config_class(**options)), key)


def built(case: Case) -> tuple[nn.Module, Tensor]:
    """The model in eval mode, with the weights of seed 0, and its input."""
    torch.manual_seed(0)
    model, x = case.build()
    return model.eval().requires_grad_(False), x


# -- on the GPU


class Fp8Layer(nn.Module):
    """A linear layer or convolution in fp8 by ``torch._scaled_mm``; ``weight`` has a row for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias, self._dtype, self.outputs = bias, dtype, weight.shape[0]
        self.weight = weight  # models read its dtype
        self._rounded, self.scale = in_fp8(padded(weight.detach(), 16), torch.float8_e4m3fn)

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T`` with the bias, rounded to bf16."""
        rows, scale = in_fp8(padded(x.reshape(-1, x.shape[-1]), 16), self._dtype)
        out = torch._scaled_mm(rows, self._rounded.t(), scale, self.scale, out_dtype=torch.float32)
        out = out[: x[..., 0].numel(), : self.outputs]
        out = out if self.bias is None else out + self.bias
        return out.bfloat16().float().reshape(*x.shape[:-1], self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class Fp8Conv2d(Fp8Layer):
    """A convolution without groups."""

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__(conv.weight.flatten(1), conv.bias, dtype)
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        # One scale for the input, as in the prediction: patches hold all its values, or zeros.
        patches = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
        height = x.shape[2] + 2 * int(conv.padding[0]) - conv.dilation[0] * (conv.kernel_size[0] - 1) - 1
        out = self.product(patches.transpose(1, 2)).transpose(1, 2)
        return out.unflatten(-1, (height // conv.stride[0] + 1, -1))


def padded(rows: Tensor, multiple: int) -> Tensor:
    """With zeros up to multiples in both dimensions, which ``torch._scaled_mm`` needs."""
    more = [-size % multiple for size in rows.shape]
    return F.pad(rows, (0, more[1], 0, more[0]))


def in_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values divided by one scale, and the scale."""
    largest = torch.finfo(dtype).max
    scale = (values.abs().max() / largest).clamp(min=1e-30).float()
    return (values / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def fp8_layer(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """The module on fp8 hardware; ``None`` if it stays as it is."""
    if isinstance(module, nn.Linear):
        return Fp8Layer(module.weight, module.bias, dtype)
    if type(module).__name__ == "Conv1D":
        return Fp8Layer(module.weight.T, module.bias, dtype)  # type: ignore[arg-type,union-attr]
    return Fp8Conv2d(module, dtype) if isinstance(module, nn.Conv2d) and module.groups == 1 else None


@contextlib.contextmanager
def tf32_is(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products and convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_hardware(model: nn.Module, x: Tensor, format: str) -> float | None:
    """The error on the GPU; ``None`` for a format that it does not have. ``model`` and ``x`` are there."""
    with tf32_is(False):
        reference = model(x)
    if format == "tf32":
        with tf32_is(True):
            return rel_l2(model(x), reference)
    if format not in FP8 or torch.cuda.get_device_capability() < (8, 9):
        return None
    with tf32_is(False):
        return rel_l2(replaced(model, lambda module: fp8_layer(module, FP8[format]))(x), reference)


# -- one model


def predicted(model: nn.Module, x: Tensor, formats: Sequence[str]) -> tuple[list[WhatIf], float, float]:
    """The predictions, the seconds that they took, and those of a forward."""
    with prepared(model, PRECISIONS.get("fp32"), torch.device("cpu")) as ready:
        ready.call(x)
        started = time.perf_counter()
        ready.call(x)
        forward = time.perf_counter() - started
        entries = predict(ready, (x,), {}, formats)
    return entries, time.perf_counter() - started - forward, forward


@torch.no_grad()
def examine(case: Case, formats: Sequence[str], device: str) -> list[dict[str, Any]]:
    """A row for each format."""
    model, x = built(case)
    entries, seconds, forward = predicted(model, x, formats)
    model, x = model.to(device), x.to(device)
    rows = []
    with tf32_is(False):
        reference = model(x)
        emulated = {name: rel_l2(emulated_model(model, name)(x), reference) for name in formats}
    for entry in entries:
        rows.append(
            {
                "model": case.name,
                "format": entry.format,
                "predicted": entry.predicted,
                "emulated": emulated[entry.format],
                "hardware": on_hardware(model, x, entry.format) if device == "cuda" else None,
                "note": entry.note,
                "top": [[share.module, round(share.share, 3)] for share in entry.shares[:3]],
                "seconds": seconds,
                "forward_s": forward,
            }
        )
        print(" ".join(f"{value:.2e}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    return rows


# -- the report


def ratios(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Predicted over ``key``, where both are known."""
    return [row["predicted"] / row[key] for row in rows if row["predicted"] and row[key]]


def render(data: dict[str, Any]) -> str:
    """The report: totals first."""
    rows, lines = data["rows"], head("Predicted errors of other formats", data)
    for key in ("emulated", "hardware"):
        found = ratios(rows, key)
        if found:
            inside = sum(1 / 1.5 <= ratio <= 1.5 for ratio in found)
            lines.append(
                f"- predicted / {key}: within [0.67, 1.5] **{inside} of {len(found)}**, "
                f"median {statistics.median(found):.2f}, from {min(found):.2f} to {max(found):.2f}"
            )
    cost = {
        row["model"]: f"{row['model']} {row['seconds']:.1f} s, {row['seconds'] / row['forward_s']:.0f} forwards"
        for row in rows
    }
    lines += [f"- cost of all predictions of a model: {'; '.join(cost.values())}", ""]
    body = [
        [
            row["model"],
            row["format"],
            *(cell(row, key) for key in ("predicted", "emulated", "hardware")),
            row["note"] or "",
        ]
        for row in rows
    ]
    heads = ["model", "format", "predicted", "emulated (ratio)", "hardware (ratio)", "note"]
    return "\n".join([*lines, tabulate(body, heads, tablefmt="github")]) + "\n"


def cell(row: dict[str, Any], key: str) -> str:
    """``1.2e-02 (0.97)``: an error, and the predicted one over it."""
    value = row[key]
    if value is None:
        return "–"
    return (
        f"{value:.2e}"
        if key == "predicted" or not row["predicted"]
        else f"{value:.2e} ({row['predicted'] / value:.2f})"
    )


def main() -> None:
    """Examine the models, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--full", action="store_true", help="models in their published sizes")
    parser.add_argument("--only", action="append", default=[], help="names of models")
    parser.add_argument("--formats", default=",".join(WHAT_IF_FORMATS.names()), help="separated by commas")
    parser.add_argument("--output", type=Path, help="where to write the report, without suffix")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    formats = WHAT_IF_FORMATS.names_in(options.formats)
    rows: list[dict[str, Any]] = []
    for case in cases(full=options.full):
        if not options.only or case.name in options.only:
            rows += examine(case, formats, options.device)
            save(options.output, {"made": made(options.device, "Random weights."), "rows": rows}, render)


if __name__ == "__main__":
    main()
