"""Scan checkpoints whose weights stay in their files, and compare with scans that hold them; and large ones, within a limit of memory.

    python benchmarks/streamed.py --output reports/streamed
    python benchmarks/streamed.py --large 7 13 --folder /path/on/a/disk --output reports/streamed-large

The first makes small models of 20 architectures of transformers with random weights, saves them in fp32 or bf16, and compares statuses,
gaps and errors of all ops of the two scans. The second writes the checkpoint of a Llama of so many billions of parameters, scans it in bf16, and
measures the largest memory of all its processes together that is not a cache of files (``RssAnon``), and of all that they have mapped (``Rss``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from report_files import head, made, save
from safetensors.torch import load_file, save_file
from tabulate import tabulate
from whole_scans import ROOT, scanned

from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.run.target_source import load_here
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.engine.scan import scan_target
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16},
    "PhiForCausalLM": {"num_key_value_heads": 4},
    "Phi3ForCausalLM": {},
    "StableLmForCausalLM": {"num_key_value_heads": 4},
    "OlmoForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "FalconForCausalLM": {},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {"pad_token_id": 1},
    "ElectraForMaskedLM": {"embedding_size": 32},
    "AlbertForMaskedLM": {"embedding_size": 32},
    "T5ForConditionalGeneration": {
        "d_model": 64,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 16,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "ViTForImageClassification": {"image_size": 32, "patch_size": 8},
}


def result_of(folder: str, device: str, *, stream: bool) -> ScanResult:
    """The result of a scan without what a streamed one leaves out."""
    options = ScanOptions(device=device, times="off", further_inputs=0, budget_error="on", plan=False, thorough=True)
    return scan_target(load_here(TargetSpec(f"hf:{folder}", stream=stream), 0), None, options)


def compared(name: str, dtype: str, device: str) -> dict[str, Any]:
    """One architecture: what differs between the two scans, and the largest relative difference of their errors."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torchvision_works(), tempfile.TemporaryDirectory() as folder:
        transformers = importlib.import_module("transformers")
        model_class = getattr(transformers, name)
        known = model_class.config_class()
        config = model_class.config_class(
            **{key: value for key, value in (_SMALL | ARCHITECTURES[name]).items() if hasattr(known, key)}
        )
        torch.manual_seed(0)
        model_class(config).to(getattr(torch, dtype)).save_pretrained(folder)
        try:
            held, streamed = (result_of(folder, device, stream=stream) for stream in (False, True))
        except Exception as error:
            return {"name": name, "saved": dtype, "problem": f"{type(error).__name__}: {error}"}
    differ, largest, count = list[str](), 0.0, 0
    for one, other in zip(held.runs, streamed.runs, strict=True):
        if (one.status, one.gaps) != (other.status, other.gaps):
            differ.append(
                f"{one.precision}: {one.status} and {other.status}, {len(one.gaps)} and {len(other.gaps)} gaps"
            )
        if one.key.is_reference:
            continue
        pairs = [(one.output_error and one.output_error.rel_l2, other.output_error and other.output_error.rel_l2)]
        if one.budget is not None and other.budget is not None:
            pairs += [(one.budget.predicted, other.budget.predicted)]
            pairs += [(a.share, b.share) for a, b in zip(one.budget.modules, other.budget.modules, strict=True)]
        elif one.budget is not other.budget:
            differ.append(f"{one.precision}: one has no shares of the output error")
        if one.op_calls.op != other.op_calls.op:
            differ.append(f"{one.precision}: {len(one.op_calls.op)} and {len(other.op_calls.op)} rows of ops")
        else:
            for field in ("local_error", "accumulated_error"):
                pairs += zip(getattr(one.op_calls, field), getattr(other.op_calls, field), strict=True)
        for a, b in pairs:
            if (a is None) != (b is None):
                differ.append(f"{one.precision}: an error of {a} and {b}")
            elif a is not None and b is not None:
                largest, count = max(largest, abs(a - b) / max(a, b, 1e-12)), count + 1
    return {"name": name, "saved": dtype, "differ": differ[:3], "largest": largest, "errors": count}


# -- Large checkpoints


LLAMAS = {6.74: (4096, 11008, 32, 32), 13.0: (5120, 13824, 40, 40), 69.0: (8192, 28672, 80, 8)}
"""Billions of parameters, and the width, that of the middle, the layers and the heads of keys."""


FREE_BYTES = 4 << 30
"""What stays free in each folder."""


def write_llama(folders: list[Path], billions: float) -> dict[str, Any]:
    """Write the checkpoint of a Llama in bf16 to the first of ``folders``, one file per layer; the others hold those that do not fit there."""
    size, (hidden, inner, layers, key_heads) = next(
        (size, shape) for size, shape in LLAMAS.items() if billions < 1.5 * size
    )
    layers, vocabulary = max(1, round(layers * billions / size)), 32000
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folders[0] / "config.json").write_text(json.dumps(content))
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).bfloat16()

    def weight(*shape: int) -> torch.Tensor:  # the same numbers again and again: drawing billions takes minutes
        count = shape[0] * shape[1]
        return (block * shape[-1] ** -0.5).repeat(-(-count // len(block)))[:count].view(shape)

    norm, keys = torch.ones(hidden, dtype=torch.bfloat16), 128 * key_heads
    ends = {
        "embed_tokens.weight": weight(vocabulary, hidden),
        "lm_head.weight": weight(vocabulary, hidden),
        "norm.weight": norm,
    }
    layer = {f"self_attn.{key}_proj.weight": weight(keys if key in "kv" else hidden, hidden) for key in "qkvo"}
    layer |= {f"mlp.{key}_proj.weight": weight(inner, hidden) for key in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": weight(hidden, inner)}
    layer |= {f"{key}_layernorm.weight": norm.clone() for key in ("input", "post_attention")}
    total = 0
    for number in range(-1, layers):
        prefix = "model." if number < 0 else f"model.layers.{number}."
        named = {
            name if name.startswith("lm_head") else prefix + name: values
            for name, values in (ends if number < 0 else layer).items()
        }
        file = f"model-{number + 2:05d}.safetensors"
        size = sum(tensor.nbytes for tensor in named.values())
        folder = next(each for each in folders if shutil.disk_usage(each).free > size + FREE_BYTES)
        save_file(named, folder / file, {"format": "pt"})
        if folder != folders[0]:
            (folders[0] / file).symlink_to(folder / file)
        total += sum(tensor.numel() for tensor in named.values())
    return {"parameters": total, "layers": layers}


def uncached(folder: Path) -> list[Path]:
    """The files of the checkpoint, in the order of its layers, after the system's cache has dropped them."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def computed_by_layers(folder: Path, device: str) -> float:
    """Seconds in which plain torch reads each layer once, and computes it in fp32 and in bf16."""
    with torchvision_works():
        modeling = importlib.import_module("transformers.models.llama.modeling_llama")
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = modeling.LlamaDecoderLayer(config, 0).eval()
    rotary, tokens = modeling.LlamaRotaryEmbedding(config).to(device), torch.arange(32, device=device)[None]
    head, *files = uncached(folder)
    start = time.monotonic()
    ends, hidden = load_file(head, device=device), dict[torch.dtype, torch.Tensor]()
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            hidden[dtype] = ends["model.embed_tokens.weight"].to(dtype)[tokens]
        for path in files:
            state = {name.split(".", 3)[3]: values for name, values in load_file(path, device=device).items()}
            for dtype, values in hidden.items():
                layer.load_state_dict({name: weight.to(dtype) for name, weight in state.items()}, assign=True)
                hidden[dtype] = layer(values, position_embeddings=rotary(values, tokens))
        for dtype, values in hidden.items():
            (values @ ends["lm_head.weight"].to(dtype).T).sum().item()
    return time.monotonic() - start


class Watched:
    """The most memory that the processes which this one starts take together, and that of ``device``, until it is closed."""

    def __init__(self, device: str) -> None:
        self.anonymous = self.mapped = self.on_device = 0
        self._device, self._ended = device, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            found = list(self._memory())
            self.anonymous = max(self.anonymous, sum(each for each, _ in found))
            self.mapped = max(self.mapped, sum(each for _, each in found))
            if self._device != "cpu":
                free, total = torch.get_device_module(self._device).mem_get_info()
                self.on_device = max(self.on_device, total - free)

    @staticmethod
    def _memory() -> Iterator[tuple[int, int]]:
        """Bytes that each process allocates, and that it has mapped of files too."""
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                lines = Path(f"/proc/{one.pid}/status").read_text(encoding="ascii").splitlines()
                values = {
                    key: int(rest.split()[0]) << 10
                    for key, _, rest in (line.partition(":") for line in lines)
                    if key in ("RssAnon", "VmRSS")
                }
                if values:  # a process that has ended has none
                    yield values["RssAnon"], values["VmRSS"]


def large(billions: float, folders: list[Path], options: list[str], device: str) -> dict[str, Any]:
    """Scan a checkpoint of so many billions of parameters."""
    with contextlib.ExitStack() as kept, tempfile.TemporaryDirectory() as results:
        places = [Path(kept.enter_context(tempfile.TemporaryDirectory(dir=folder))) for folder in folders]
        written = write_llama(places, billions)
        size = sum(path.stat().st_size for path in places[0].glob("*.safetensors"))
        layers_seconds = computed_by_layers(places[0], device)
        uncached(places[0])
        command = ["scan", f"hf:{places[0]}", "--stream", *options, "--device", device, "--no-plan"]
        watched = Watched(device)
        try:
            found = scanned(ROOT, command, Path(results), limit=3600.0)
        finally:
            watched.close()
        runs = json.loads((Path(results) / "scan.json").read_bytes())["runs"]
    return written | {
        "billions": billions,
        "bytes": size,
        "layers_seconds": layers_seconds,
        "seconds": found["end"],
        "rows": found["first row"],
        "steps": found["steps"],
        "anonymous": watched.anonymous,
        "mapped": watched.mapped,
        "on_device": watched.on_device,
        "runs": [{key: run.get(key) for key in ("precision", "status", "output_error", "incomplete")} for run in runs],
    }


# -- The report


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = head("Weights that stay in their files", data)
    rows = data.get("architectures", [])
    if rows:
        good = [row for row in rows if not row.get("problem") and not row["differ"] and row["largest"] <= 1e-6]
        lines += [
            f"- equal statuses, gaps and ops, and errors to 1e-6: {len(good)} of {len(rows)} checkpoints of {len({row['name'] for row in rows})} architectures",
            "",
            tabulate(
                [
                    [
                        row["name"],
                        row["saved"],
                        row.get("errors", "–"),
                        f"{row['largest']:.1e}" if "largest" in row else "–",
                        "; ".join(row.get("differ", [])) or row.get("problem", "")[:200] or "nothing",
                    ]
                    for row in rows
                ],
                ["model", "saved in", "errors compared", "largest relative difference", "differs"],
                tablefmt="github",
            ),
            "",
        ]
    for row in data.get("large", []):
        runs = ", ".join(
            f"{run['precision']} {run['status']}"
            + (f" ({run['output_error']['rel_l2']:.1e})" if run["output_error"] else "")
            for run in row["runs"]
        )
        lines += [
            f"- {row['parameters'] / 1e9:.1f} billion parameters, {row['bytes'] / 2**30:.1f} GiB in bf16: {row['seconds']:.0f} s "
            f"(plain torch takes {row['layers_seconds']:.0f} s to read each layer once and compute it in fp32 and bf16); at most {row['anonymous'] / 2**30:.1f} GiB allocated, "
            f"{row['mapped'] / 2**30:.1f} GiB with the mapped pages of files"
            + (
                f", {row['on_device'] / 2**30:.1f} GiB on the device with what it holds for torch itself"
                if row.get("on_device")
                else ""
            )
            + f"; {runs}"
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Compare, or scan the large ones; save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--large", nargs="*", type=float, help="billions of parameters")
    parser.add_argument("--options", default="-p bfloat16", help="of the scans of the large ones, separated by spaces")
    parser.add_argument(
        "--folder",
        type=Path,
        nargs="+",
        help="where large checkpoints are written, and removed; further ones if it is full",
    )
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data: dict[str, Any] = {"made": made(options.device)}
    if options.large:
        data["large"] = [
            large(each, options.folder or [Path.cwd()], options.options.split(), options.device)
            for each in options.large
        ]
    else:
        names = [name for name in ARCHITECTURES if not options.only or any(part in name for part in options.only)]
        dtypes = ["bfloat16" if number % 2 else "float32" for number, _ in enumerate(names)]
        with ProcessPoolExecutor(options.jobs, max_tasks_per_child=1) as pool:
            data["architectures"] = list(pool.map(compared, names, dtypes, [options.device] * len(names)))
    if options.output is not None:
        save(options.output, data, render)
    print(render(data))


if __name__ == "__main__":
    main()
