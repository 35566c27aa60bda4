"""Compare scans whose weights stay in their files with scans that hold them in memory.

    python benchmarks/streamed.py [--only Llama GPT2]

Small models of 9 architectures of transformers, with random weights saved in fp32 or bf16: statuses, gaps and the
errors of all ops of the two scans are compared.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from shared import head, made, parser_of, save
from tabulate import tabulate

from lowprec_check.core.scan import scan_target
from lowprec_check.engine.model.target_source import load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult

_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL |= {"num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 64}
_SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "BertForMaskedLM": {},
    "T5ForConditionalGeneration": _T5,
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
        sizes = {key: value for key, value in (_SMALL | ARCHITECTURES[name]).items() if hasattr(known, key)}
        config = model_class.config_class(**sizes)
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


# -- The report


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = head("Weights that stay in their files", data)
    rows = data.get("architectures", [])
    if rows:
        good = [row for row in rows if not row.get("problem") and not row["differ"] and row["largest"] <= 1e-6]
        heads = ["model", "saved in", "errors compared", "largest relative difference", "differs"]
        cells = []
        for row in rows:
            largest = f"{row['largest']:.1e}" if "largest" in row else "–"
            differs = "; ".join(row.get("differ", [])) or row.get("problem", "")[:200] or "nothing"
            cells.append([row["name"], row["saved"], row.get("errors", "–"), largest, differs])
        lines += [
            f"- equal statuses, gaps and ops, and errors to 1e-6: {len(good)} of {len(rows)} checkpoints "
            f"of {len({row['name'] for row in rows})} architectures",
            "",
            tabulate(cells, heads, tablefmt="github"),
            "",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Compare, or scan the large ones; save."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data: dict[str, Any] = {"made": made(options.device)}
    names = [name for name in ARCHITECTURES if not options.only or any(part in name for part in options.only)]
    dtypes = ["bfloat16" if number % 2 else "float32" for number, _ in enumerate(names)]
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=1) as pool:
        data["architectures"] = list(pool.map(compared, names, dtypes, [options.device] * len(names)))
    save(options.output, data, render)


if __name__ == "__main__":
    main()
