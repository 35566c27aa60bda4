"""Compare what outputs mean by the product and by hand: figures, verdicts, and the levels at which verdicts flip.

    python benchmarks/meaning.py --jobs 2                      # here, on the CPU
    python benchmarks/meaning.py --device cuda --jobs 8 --large --output build/meaning

Models are tiny ones of transformers, torchvision, diffusers and own ones, with random weights (seed 0), each with the
head as it is and, if it chooses, with one that is scaled until fp32 is sure. By hand means: casts of a deepcopy, and
the plain loops of tests/features/meaning/by_hand.py. Of each model: (i) every figure, (ii) the verdict of a scan in
fp16 and bf16, (iii) the level of a planted fault from which it fails. Then detectors under autocast, a mask of which
half flips (as in pytorch#128306), and with ``--large`` a Llama of 1.1 B parameters in bf16, fp16 and int8.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared import in_processes, made, parser_of, save
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowprec_check import scan
from lowprec_check.engine.model.output_tensors import OutputTensors
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from tests.features.meaning.by_hand import Judged, choices, verdict

TOLERANCES = {"half": (torch.half, 1e-2), "bfloat16": (torch.bfloat16, 5e-2)}
SURE = 5.0
"""Nats between fp32's first two choices, which the median of a scaled head is set to."""

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT, VISION = SMALL | {"vocab_size": 256, "num_key_value_heads": 4}, SMALL | {"image_size": 64, "patch_size": 16}
BACKBONE = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1] * 4, "layer_type": "basic"}
MODELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def model_of(model: str, inputs: str = "ids", **config: Any) -> tuple[nn.Module, Any]:
    """A model of the table, and its inputs."""
    library, _, name = model.rpartition(":")
    channels = config.pop("channels", 0)
    if library == "own":
        if name == "linear":
            return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, channels)), torch.randn(8, 32)
        kind, shape = (nn.Conv1d, (1, 3, 4000)) if name == "1d" else (nn.Conv2d, (2, 3, 32, 32))
        return nn.Sequential(kind(3, 16, 3), nn.SiLU(), kind(16, channels, 3)), torch.randn(*shape)
    if library == "torchvision":
        from torchvision import models

        folder = next(each for each in (models, models.segmentation, models.detection) if hasattr(each, name))
        weights = {} if folder is models else {"weights_backbone": None}
        made_model = getattr(folder, name)(weights=None, **weights, **config)
        return made_model, [torch.rand(3, 160, 160)] if folder is models.detection else torch.rand(2, 3, 64, 64)
    if library == "diffusers":
        return getattr(import_module(library), name)(**config), torch.rand(2, 3, 32, 32)
    import transformers

    if "backbone" in config:
        backbone = transformers.ResNetConfig(**BACKBONE, out_features=["stage4"])
        config |= {"backbone": None, "backbone_config": backbone, "use_timm_backbone": False}
        config["use_pretrained_backbone"] = False
    else:
        usual: dict[str, Any] = {
            "ids": TEXT,
            "labels": TEXT,
            "pair": {"vocab_size": 256},
            "pixels": VISION,
            "sound": {},
        }[inputs]
        if "depths" not in config:  # one with sizes of its own
            config = usual | config
    ids = {"input_ids": torch.randint(3, 250, (2, 24))}
    given = {
        "ids": ids,
        "labels": ids | {"labels": ids["input_ids"]},
        "pair": ids | {"decoder_input_ids": ids["input_ids"]},
        "pixels": {"pixel_values": torch.rand(2, 3, 64, 64)},
        "sound": {"input_values": torch.rand(1, 1, 4800) - 0.5},
    }
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**config)), given[inputs]


def judged_as(measure: str, path: str = "logits", inputs: str = "", **_: Any) -> Judged:
    """The measure of a model of the table, and the paths of its tensors."""
    roles = {"value": path}
    if measure in ("tokens", "classes", "pixels"):
        roles = {"logits": path}
    if measure == "boxes":
        roles = {"logits": "logits", "pred_boxes": "pred_boxes"}
    if inputs == "labels":
        roles["loss"] = "loss"
    return Judged(measure, roles)


CHOOSE = ("tokens", "classes", "pixels", "masks", "boxes")
DETECTORS = ("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large")
DETECTORS += ("fcos_resnet50_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn")
_CLASSES = r"cls_score|cls_logits|classification_head.*\d\.1\.(weight|bias)$"
QUICK: dict[str, Any] = {"times": "off", "isolation": "none", "further_inputs": 0, "plan": False, "explain": "failing"}


class Sharp(nn.Module):
    """A model whose logits are multiplied, as those of a trained head are large."""

    def __init__(self, model: nn.Module, path: str, *, detects: bool) -> None:
        super().__init__()
        self.model, self.path, self.detects, self.factor = model, path, detects, 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output, with larger logits; of a detector, less often of no object."""
        output = self.model(*args, **kwargs)
        logits = (output[self.path] if self.path else output) * self.factor
        if self.detects:
            logits[..., -1] -= 2 * SURE
        if not self.path:
            return logits
        output[self.path] = logits
        return output

    def sharpen(self, fp32: OutputTensors, dimension: int) -> None:
        """Set the factor so that fp32 is sure."""
        logits = fp32[fp32.form.paths.index(self.path)].float()
        gaps = logits.abs()
        if logits.shape[dimension] > 1:
            first = logits.topk(2, dimension).values
            gaps = first.select(dimension, 0) - first.select(dimension, 1)
        self.factor = SURE / max(1e-6, float(gaps.median()))


def called(model: nn.Module, inputs: Any, dtype: torch.dtype | None = None) -> OutputTensors:
    """The output; of a copy that is cast, if a dtype is given."""
    if dtype is not None:
        model = copy.deepcopy(model).to(dtype)
        inputs = tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return output_tensors(output).copied()


def compared(case: Judged, low: OutputTensors, fp32: OutputTensors, tolerance: float) -> dict[str, Any]:
    """The verdict and the figures of one output, by hand and by the product."""
    is_right, figures = verdict(case, low, fp32, tolerance)
    status, outcome = judge(low, fp32, tolerance)
    meanings = {each.measure: each for each in (outcome.error.meaning, *outcome.error.beside) if each is not None}
    told = meanings[case.measure].figures if case.measure in meanings else {}
    unlike = {
        name: (value, told.get(name))
        for name, value in figures.items()
        if not math.isclose(value, told.get(name, math.nan), rel_tol=1e-6, abs_tol=1e-9)
    }
    decides = outcome.error.shown or "rel_l2"
    return {"hand": is_right, "product": status == "ok", "decides": decides, "figures": len(figures), "unlike": unlike}


def planted(case: Judged, fp32: OutputTensors, level: float) -> OutputTensors:
    """The output with a fault: noise, boxes that move, a picture that is darker."""
    generator = torch.Generator().manual_seed(1)
    values = list(fp32)
    for role, path in case.roles.items():
        number = fp32.form.paths.index(path)
        tensor = values[number]
        if role == "pred_boxes":
            values[number] = tensor + level * 0.1
        elif case.measure == "picture":
            values[number] = tensor * (1 - level)
        elif case.measure != "boxes" and role != "loss":
            noise = torch.randn(tensor.shape, generator=generator)
            size = SURE if case.measure in CHOOSE else tensor.square().mean().sqrt()
            values[number] = tensor + level * size * noise
    return OutputTensors(values, fp32.form)


def level_of(fails: Callable[[float], bool]) -> float:
    """The level from which it fails, within 1 %; 0 if it never does."""
    low, high = 1e-5, 10.0
    if fails(low) or not fails(high):
        return 0.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high


def of_model(name: str, device: str) -> dict[str, Any]:
    """What a model shows: its runs, and the levels of a planted fault by hand and by the product."""
    entry = dict(MODELS[name.removesuffix("+sure")])
    case, is_sure = judged_as(**entry), name.endswith("+sure")
    model, inputs = model_of(**{key: value for key, value in entry.items() if key not in ("measure", "path")})
    model = model.eval().to(device)
    inputs = tree_map_only(Tensor, lambda each: each.to(device), inputs)
    if is_sure:
        model = Sharp(model, next(iter(case.roles.values())), detects=case.measure == "boxes")
        model.sharpen(called(model, inputs), 1 if case.measure in ("pixels", "masks") else -1)
    fp32 = called(model, inputs)
    asked = case.measure if judge(fp32, fp32, 1e-2)[1].error.meaning is None else None
    fp32 = OutputTensors(fp32, fp32.form._replace(judge=asked))

    result = scan(model, inputs, precisions="half,bfloat16", device=device, judge=asked, **QUICK)
    rows = []
    for run in result.runs[1:]:
        dtype, tolerance = TOLERANCES[run.precision]
        try:
            row = compared(case, called(model, inputs, dtype), fp32, tolerance)
        except Exception as error:
            row = {"hand": False, "problem": repr(error)[:120]}
        rows.append({**row, "run": f"{name} {run.precision}", "product": run.status == "ok", "status": run.status})
    levels = []
    if is_sure or case.measure not in CHOOSE:

        def fails(level: float, by_hand: bool) -> bool:
            low = planted(case, fp32, level)
            return not verdict(case, low, fp32, 1e3)[0] if by_hand else judge(low, fp32, 1e3)[0] != "ok"

        levels = [level_of(lambda level, hand=hand: fails(level, hand)) for hand in (True, False)]
    return {"rows": rows, "levels": levels}


def of_detector(name: str, device: str) -> dict[str, Any]:
    """A detector of torchvision, whose classes are sure, under autocast."""
    dtype = torch.half if device == "cuda" else torch.bfloat16
    model, inputs = model_of(f"torchvision:{name}")
    model = model.eval().to(device)
    inputs = [each.to(device) for each in inputs]
    heads = [path for path, _ in model.named_parameters() if re.search(_CLASSES, path)]
    fp32 = called(model, inputs)
    for _ in range(6):
        if int((fp32[fp32.form.paths.index("0.scores")] > 0.5).sum()) >= 5:
            break
        for path in heads:
            model.get_parameter(path).data.mul_(8 if path.endswith("weight") else 0)
        fp32 = called(model, inputs)
    with torch.autocast(device, dtype):
        low = called(model, inputs)
    roles = ("boxes", "labels", "scores", "masks", "keypoints")
    case = Judged("boxes", {role: f"0.{role}" for role in roles if f"0.{role}" in fp32.form.paths})
    row = compared(case, low, fp32, 1e-2 if device == "cuda" else 5e-2)
    return {"rows": [{**row, "run": name, "found": judge(low, fp32, 1e-2)[1].error.meaning.figures.get("found")}]}


class Keep(nn.Module):
    """Scores, and which are kept, by digits that 16 bits do not have."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """About half of the mask flips."""
        return scores * 1.001, (scores * 65536).float().floor() % 2 == 0


def of_mask(_: str, device: str) -> dict[str, Any]:
    """A mask that flips: no run may be right."""
    result = scan(Keep(), torch.rand(64, 64).to(device), precisions="half,bfloat16", device=device, **QUICK)
    flipped = [run.output_error.mismatched for run in result.runs[1:] if run.output_error is not None]
    return {"flipped": flipped, "green": sum(run.status == "ok" for run in result.runs[1:])}


def of_large(_: str, device: str) -> dict[str, Any]:
    """A Llama of 1.1 B parameters with a sure head."""
    import transformers

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32000, use_cache=False)
    with torch.device(device):
        model = Sharp(transformers.LlamaForCausalLM(config).eval(), "logits", detects=False)
        ids = {"input_ids": torch.randint(3, 32000, (1, 256))}
    model.sharpen(called(model, ids), -1)
    fp32 = called(model, ids)
    rows = []
    for precision in ("bfloat16", "half", "int8")[: 3 if find_spec("torchao") else 2]:
        dtype, tolerance = TOLERANCES.get(precision, (None, 1e-2))
        if dtype is None:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        low = called(model, ids, dtype)
        row = compared(Judged("tokens", {"logits": "logits"}), low, fp32, tolerance)
        rows.append({**row, "run": precision, "by hand": choices(low[0], fp32[0], -1)[0]})
    return {"rows": rows}


def part(item: tuple[Callable[[str, str], Any], str, str]) -> Any:
    """One part of the benchmark, in a process of its own."""
    work, name, device = item
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    with torchvision_works():
        return work(name, device)


def rendered(data: Mapping[str, Any]) -> str:
    """Counts, and what differs."""
    parts = data["parts"]
    models = {name: each for name, each in parts.items() if "levels" in each}
    rows = [row for each in models.values() for row in each["rows"]]
    differ = [row for row in rows if row["hand"] != row["product"] or row.get("unlike")]
    unlike = {row["run"].split()[0] for row in rows if row["hand"] != row["product"]}
    levels = {name: each["levels"] for name, each in models.items() if each["levels"]}
    flips = {name: (hand, own) for name, (hand, own) in levels.items() if not hand or abs(own - hand) > 0.05 * hand}
    figures = sum(row.get("figures", 0) for row in rows)
    by_measure = sum(row.get("decides", "rel_l2") != "rel_l2" for row in rows)
    lines = [
        f"(i) figures equal: {figures - sum(len(row.get('unlike', ())) for row in rows)} of {figures}",
        f"(ii) verdict as by hand: {len(models) - len(unlike)} of {len(models)} models, {len(rows)} runs, {by_measure} "
        "by a measure",
        f"(iii) planted fault fails from the same level (5 %): {len(levels) - len(flips)} of {len(levels)} models",
        *(f"  differs: {row}" for row in differ),
        *(f"  levels: {name}: {pair}" for name, pair in flips.items()),
    ]
    others = {name: each.get("rows", [each]) for name, each in parts.items() if name not in models}
    lines.append(f"{sum('problem' in each for each in parts.values())} of {len(parts)} parts have a problem")
    lines += [f"{name}: {row}" for name, rows in others.items() for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all parts, and print what they show as counts."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each model")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all; what is not done then is left out")
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--large", action="store_true", help="also a Llama of 1.1 B parameters")
    options = parser.parse_args()
    work: dict[str, Callable[[str, str], Any]] = {"large": of_large} if options.large else {}
    work |= dict.fromkeys(DETECTORS, of_detector) | {"keep-mask": of_mask}
    work |= {f"{name}+sure": of_model for name, entry in MODELS.items() if entry["measure"] in CHOOSE}
    work |= dict.fromkeys(MODELS, of_model)
    items = [(do, name, options.device) for name, do in work.items() if re.search(options.only, name)]
    with torchvision_works(), suppress(ImportError):  # once, for all processes
        import_module("torchvision")
        import_module("transformers")
    parts = {}
    for (_, name, _), result, problem in in_processes(part, items, options.jobs, options.seconds, options.limit):
        parts[name] = result or {"problem": problem}
        print(f"{name}: {problem or 'done'}", file=sys.stderr, flush=True)
    save(options.output, {"made": made(options.device), "parts": parts}, rendered)
    print(rendered({"parts": parts}) if options.output else "")


if __name__ == "__main__":
    main()
