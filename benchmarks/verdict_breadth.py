"""Compare the status of each scan with three plain calls of the cast model, on models of two libraries.

    pip install -e '.[zoo]'
    python benchmarks/verdict_breadth.py      # 4 precisions of each model
    python benchmarks/verdict_breadth.py --limit 5
    python benchmarks/verdict_breadth.py --only transformers:gpt2

The models are torchvision's and transformers', with random weights (seed 0), tiny where the library
permits it; nothing is downloaded. A library that is not installed is skipped, which the report states. The plain calls
use none of this package's code: a deepcopy of the model, cast or under autocast, called three times in a row, each call
after ``torch.manual_seed(0)`` and compared with the same call of the fp32 model. The status is the worst of the three:

- ``error``: a call raises;
- ``nonfinite``: NaN or Inf where fp32 is finite, NaN where fp32 is not NaN, or another infinity;
- ``inaccurate``: rel_l2 of a floating leaf of the output over 1e-2 (fp16) or 5e-2 (bf16). If the output has no floating
  leaf, the share of elements that differ counts;
- ``ok``: anything else.

Runs without one right status are listed apart, with both: the fp32 output is all zeros, or the model draws random
numbers. Writes OUTPUT.md and OUTPUT.json; exits with 1 if a status differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import math
import random
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from quantized import MODELS, model_and_inputs
from shared import described, head, in_processes, made, parser_of, save
from torch import Tensor, nn

from lowprec_check import UsageError, scan
from lowprec_check.engine.model.zoo import import_torchvision

LIBRARIES = ("torchvision", "transformers")
PRECISIONS = ("half", "bfloat16", "autocast-fp16", "autocast-bf16")
SEVERITY = ("ok", "inaccurate", "nonfinite", "error")
TOLERANCE = {torch.half: 1e-2, torch.bfloat16: 5e-2}
CALLS = 3

Inputs = tuple[Any, ...] | dict[str, Any]
Make = Callable[[], tuple[nn.Module, Inputs]]


# -- the plain calls


class Judgement(NamedTuple):
    """The status of plain calls in one precision."""

    status: str
    calls: list[str]
    rel_l2: float
    detail: str = ""


class Reference(NamedTuple):
    """The fp32 outputs of each call, and why they are no reference, if so."""

    outputs: list[list[Tensor]]
    apart: str = ""


def tensors_in(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Every tensor in mappings, sequences and the attributes of objects such as dataclasses and caches."""
    if isinstance(value, Tensor):
        yield value.detach()
        return
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, (list, tuple)):
        children = value
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, types.ModuleType):
        children = vars(value).values()
    if id(value) not in above:
        for child in children:
            yield from tensors_in(child, above | {id(value)})


def copied(value: Any, dtype: torch.dtype | None, device: str = "cpu") -> Any:
    """Copies of all tensors on ``device``; floating ones cast to ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, dtype, device) for key, item in value.items()}
    return type(value)(copied(item, dtype, device) for item in value) if isinstance(value, (list, tuple)) else value


def dtype_of(precision: str) -> torch.dtype:
    """The 16-bit dtype of a precision."""
    return torch.half if precision in ("half", "autocast-fp16") else torch.bfloat16


def plain_calls(model: nn.Module, inputs: Inputs, precision: str, device: str = "cpu") -> Iterator[list[Tensor]]:
    """Yield the output's tensors of each of three calls of a copy of ``model`` in ``precision`` or ``fp32``."""
    model = copy.deepcopy(model).to(device)
    cast_to = {"half": torch.half, "bfloat16": torch.bfloat16}.get(precision)
    if cast_to is not None:
        model = model.to(cast_to)
    for _ in range(CALLS):
        given = copied(inputs, cast_to, device)
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        seed_all()
        context: Any = contextlib.nullcontext()
        if precision.startswith("autocast"):
            context = torch.autocast(device, dtype=dtype_of(precision))
        with torch.no_grad(), context:
            output = model(*args, **kwargs)
        yield [tensor.to("cpu", copy=True) for tensor in tensors_in(output)]


def seed_all() -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def drew() -> bool:
    """Whether random numbers were drawn since :func:`seed_all`."""
    before = generator_states()
    seed_all()
    return before != generator_states()


def generator_states() -> list[Any]:
    """The states of all generators, of a GPU in use as well."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    numpy_state: Any = numpy.random.get_state()[1]  # type: ignore[index]
    return [*(state.tolist() for state in states), random.getstate(), numpy_state.tolist()]


def fp32_calls(model: nn.Module, inputs: Inputs, device: str = "cpu") -> Reference:
    """The reference of the plain calls."""
    outputs, random_calls = [], False
    try:
        for output in plain_calls(model, inputs, "fp32", device):
            random_calls |= drew()
            outputs.append(output)
    except Exception as error:
        return Reference([], f"fp32 raises {described(error)}")
    if random_calls:
        mode = " in training mode" if model.training else ""
        return Reference(outputs, f"the model draws random numbers{mode}, which may differ between fp32 and 16 bits")
    judged = [leaf for output in outputs for leaf in judged_leaves(output)]
    if not any(leaf.numel() for leaf in judged):
        return Reference(outputs, "the fp32 output is empty")
    if all(is_floating(leaf) and not bool(leaf.any()) for leaf in judged):
        return Reference(outputs, "the fp32 output is all zeros, so that no relative error exists")
    return Reference(outputs)


def is_floating(tensor: Tensor) -> bool:
    """Whether its elements are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def judged_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The floating leaves, or all if there are none."""
    return [leaf for leaf in leaves if is_floating(leaf)] or list(leaves)


def judge_plain(
    model: nn.Module, inputs: Inputs, precision: str, reference: Reference, device: str = "cpu"
) -> Judgement:
    """The status of three calls in ``precision``."""
    tolerance, calls, worst, detail = TOLERANCE[dtype_of(precision)], [], 0.0, ""
    outputs = plain_calls(model, inputs, precision, device)
    for expected in reference.outputs:
        try:
            output = next(outputs)
        except Exception as error:
            calls.append("error")
            detail = described(error)
            break
        status, rel_l2 = judge_call(output, expected, tolerance)
        calls.append(status)
        worst = max(worst, rel_l2)
    return Judgement(max(calls, key=SEVERITY.index, default="ok"), calls, worst, detail)


def judge_call(output: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> tuple[str, float]:
    """Status and error of one call, from the leaves of its output."""
    if len(output) != len(expected):
        return "inaccurate", math.inf
    floating = any(is_floating(reference) for reference in expected)
    pairs = [(y, r) for y, r in zip(output, expected, strict=True) if is_floating(r) or not floating]
    error = max((leaf_error(y, r) for y, r in pairs), default=0.0)
    if any(has_new_nonfinite(y, r) for y, r in pairs):
        return "nonfinite", error
    return ("ok" if error <= tolerance else "inaccurate"), error


def as_double(tensor: Tensor) -> Tensor:
    """In fp64, complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def has_new_nonfinite(y: Tensor, r: Tensor) -> bool:
    """Whether ``y`` has a NaN where ``r`` has none, or an infinity that ``r`` does not have."""
    y, r = as_double(y), as_double(r)
    if y.shape != r.shape:
        return not bool(y.isfinite().all()) and bool(r.isfinite().all())
    return bool(((y.isnan() | (y.isinf() & (y != r))) & ~r.isnan()).any())


def leaf_error(y: Tensor, r: Tensor) -> float:
    """rel_l2 over the elements that are finite in both; for integers, the share that differs."""
    if y.shape != r.shape:
        return math.inf
    if not is_floating(r):
        return float((y != r).double().mean()) if r.numel() else 0.0
    y, r = as_double(y), as_double(r)
    finite = y.isfinite() & r.isfinite()
    difference, size = float((y - r)[finite].norm()), float(r[finite].norm())
    return 0.0 if difference == 0 else difference / size if size else math.inf


# -- the models


class Case(NamedTuple):
    """A model with inputs."""

    name: str
    make: Make
    training: bool = False

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model with weights from seed 0, and its inputs."""
        torch.manual_seed(0)
        model, inputs = self.make()
        return model.train(self.training), inputs


class Labels(nn.Module):
    """A model whose output is the indices of the ``count`` largest logits: integers only."""

    def __init__(self, model: nn.Module, dim: int = -1, count: int = 1) -> None:
        super().__init__()
        self.model, self.dim, self.count = model, dim, count

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return next(tensors_in(self.model(*args, **kwargs))).topk(self.count, self.dim).indices


class Streaming(nn.Module):
    """A language model that keeps its cache of keys and values: each call continues the last, up to 96 tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.past: Any = None

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.past is not None and self.past.get_seq_length() + input_ids.shape[1] > 96:
            self.past = None
        output = self.model(input_ids, past_key_values=self.past, use_cache=True)
        self.past = output.past_key_values
        logits: Tensor = output.logits
        return logits


def noise(*shape: int) -> Tensor:
    """Normal numbers from seed 1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def torchvision_cases() -> Iterator[Case]:
    """Classification, segmentation, detection, video, optical flow."""
    tv = import_torchvision()
    models = tv.models

    def made(name: str, inputs: Inputs, **options: Any) -> tuple[nn.Module, Inputs]:
        return models.get_model(name, weights=None, **options), inputs

    def make(name: str, *shape: int, **options: Any) -> Make:
        return functools.partial(made, name, (noise(*shape),), **options)

    image, clip = (1, 3, 64, 64), (1, 3, 4, 32, 32)
    for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0"):
        yield Case(f"torchvision:{name}", make(name, *image))
    for name in ("densenet121", "regnet_y_400mf", "swin_t"):
        yield Case(f"torchvision:{name}", make(name, *image))
    for name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"):
        yield Case(f"torchvision:{name}", make(name, *image, weights_backbone=None))
    sizes = {"min_size": 96, "max_size": 96, "weights_backbone": None}
    boxes = {"box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 50, "box_detections_per_img": 20}
    detectors: dict[str, dict[str, Any]] = {
        "fasterrcnn_mobilenet_v3_large_320_fpn": sizes | boxes,
        "retinanet_resnet50_fpn": sizes | {"score_thresh": 0.0, "detections_per_img": 20},
        "ssdlite320_mobilenet_v3_large": {"weights_backbone": None, "score_thresh": 0.0, "detections_per_img": 20},
    }
    for name, options in detectors.items():
        inputs = ([noise(3, 96, 96).sigmoid()],)
        yield Case(f"torchvision:{name}", functools.partial(made, name, inputs, **options))
    for name in ("r3d_18", "swin3d_t"):
        yield Case(f"torchvision:{name}", make(name, *clip))
    yield Case("torchvision:resnet18 (training)", make("resnet18", 4, 3, 64, 64), training=True)
    yield Case("torchvision:mobilenet_v3_small (training)", make("mobilenet_v3_small", 4, 3, 64, 64), training=True)


def transformers_cases() -> Iterator[Case]:
    """Tiny models from configurations."""
    importlib.import_module("transformers").logging.set_verbosity_error()

    def wrapped(name: str, wrapper: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Inputs]:
        model, inputs = model_and_inputs(name, 64, 2)
        return wrapper(model), inputs

    for name in MODELS[:-1]:  # the last one is of another library
        yield Case(f"transformers:{name}", functools.partial(model_and_inputs, name, 64, 2))
    top = functools.partial(Labels, count=5)
    of_gpt2: dict[str, Any] = {"next tokens": Labels, "top 5 tokens": top, "keeps its cache": Streaming}
    for what, wrapper in of_gpt2.items():
        yield Case(f"transformers:gpt2 ({what})", functools.partial(wrapped, "gpt2", wrapper))
    yield Case("transformers:resnet (labels)", functools.partial(wrapped, "resnet", functools.partial(Labels, dim=1)))
    yield Case("transformers:bert (training)", functools.partial(model_and_inputs, "bert", 64, 2), training=True)


def cases(only: Sequence[str] = ()) -> tuple[list[Case], list[str]]:
    """The models whose names start with a prefix in ``only`` (all without one), and the libraries that are missing."""
    made = {"torchvision": torchvision_cases, "transformers": transformers_cases}
    found: list[Case] = []
    missing = []
    for library in LIBRARIES:
        if only and not any(prefix.startswith(library) or library.startswith(prefix) for prefix in only):
            continue
        try:
            import_torchvision()  # its compiled ops may need replacements before the other libraries import it
            found += made[library]()
        except (ModuleNotFoundError, UsageError) as error:
            missing.append(library)
            print(f"skipped: {library} is not installed ({error}); pip install {library}", file=sys.stderr)
    return [case for case in found if not only or case.name.startswith(tuple(only))], missing


# -- both, for one model


def scanned(model: nn.Module, inputs: Inputs, device: str) -> dict[str, tuple[str, float | None, str]]:
    """Status, rel_l2 and exception of each precision, from a scan."""
    try:
        result = scan(model, inputs, precisions=list(PRECISIONS), errors="none", plan=False, budget=120, device=device)
    except UsageError as error:
        return dict.fromkeys(PRECISIONS, ("refused", None, described(error)))
    found: dict[str, tuple[str, float | None, str]] = {}
    for precision in PRECISIONS:
        run = result.run(precision)
        detail = run.reason or (f"{run.exception.type}: {run.exception.message}"[:160] if run.exception else "")
        found[precision] = (run.status, run.output_error.rel_l2 if run.output_error else None, detail)
    return found


def both(case: Case, device: str = "cpu") -> list[dict[str, Any]]:
    """One row per precision: the status of the scan and that of the plain calls."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = case.build()
    reference = fp32_calls(model, inputs, device)
    plain = {precision: judge_plain(model, inputs, precision, reference, device) for precision in PRECISIONS}
    scans = scanned(model, inputs, device)
    return [
        {
            "model": case.name,
            "precision": precision,
            "scan": scans[precision][0],
            "plain": plain[precision].status,
            "calls": plain[precision].calls,
            "apart": reference.apart,
            "scan_rel_l2": scans[precision][1],
            "plain_rel_l2": plain[precision].rel_l2 if math.isfinite(plain[precision].rel_l2) else None,
            "scan_detail": scans[precision][2],
            "plain_detail": plain[precision].detail,
        }
        for precision in PRECISIONS
    ]


def described_row(row: Mapping[str, Any]) -> str:
    """One run with both statuses, as a list entry."""
    errors = [f"{row[key]:.1e}" if row[key] is not None else "–" for key in ("scan_rel_l2", "plain_rel_l2")]
    details = " / ".join(dict.fromkeys(row[key] for key in ("scan_detail", "plain_detail") if row[key]))
    return (
        f"- {row['model']}, {row['precision']}: scan **{row['scan']}** ({errors[0]}), plain **{row['plain']}** "
        f"({errors[1]}; calls: {', '.join(row['calls'])}){f': {details}' if details else ''}"
    )


def render(data: Mapping[str, Any]) -> str:
    """The report: totals first."""
    rows, problems, missing = data["rows"], data["problems"], data["missing"]
    counted = [row for row in rows if not row["apart"]]
    different = [row for row in counted if row["scan"] != row["plain"]]
    apart = [row for row in rows if row["apart"]]
    statuses = Counter(row["plain"] for row in counted)
    lines = [
        *head("Statuses of scans and of three plain calls", data),
        f"- models: {len({row['model'] for row in rows})}, runs: {len(rows)}",
        f"- compared: {len(counted)}; equal: {len(counted) - len(different)}; **different: {len(different)}**",
        f"- plain statuses of the compared runs: {', '.join(f'{name} {statuses[name]}' for name in SEVERITY)}",
        f"- apart, with no single right status: {len(apart)} "
        f"({sum(row['scan'] == row['plain'] for row in apart)} of them equal)",
        f"- libraries skipped: {', '.join(missing) or 'none'}",
        f"- models that could not be run: {len(problems)}",
        *(f"  - {problem}" for problem in problems),
        "",
        "## Different",
        "",
        *([described_row(row) for row in different] or ["None."]),
        "",
        "## Apart",
        "",
    ]
    for reason in dict.fromkeys(row["apart"] for row in apart):
        lines += [f"Because {reason}:", "", *(described_row(row) for row in apart if row["apart"] == reason), ""]
    return "\n".join(lines) + "\n"


def arguments(description: str) -> argparse.ArgumentParser:
    """Options that the benchmarks on these models share."""
    parser = parser_of(description)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models with this prefix")
    parser.add_argument("--limit", type=int, help="only the first N models")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, each with one thread")
    return parser


def main() -> None:
    """Run all models, print the report, and write it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; a GPU is used in one process")
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes that are forked cannot use a pool of threads
    chosen, missing = cases(options.only)
    chosen = chosen[: options.limit]
    started = time.monotonic()
    work = functools.partial(both, device=options.device)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    if options.device == "cpu":
        results = in_processes(work, chosen, options.jobs)
    else:  # a forked process cannot use a GPU
        results = ((case, work(case), "") for case in chosen)
    for index, (case, found, problem) in enumerate(results, 1):
        rows += found or []
        problems += [f"{case.name}: {problem}"] if problem else []
        statuses = problem or " ".join(f"{row['precision']}={row['scan']}/{row['plain']}" for row in found)
        print(f"[{index}/{len(chosen)}] {time.monotonic() - started:.0f} s {case.name} {statuses}", file=sys.stderr)
    order = {case.name: index for index, case in enumerate(chosen)}
    rows.sort(key=lambda row: (order[row["model"]], PRECISIONS.index(row["precision"])))
    save(options.output, {"made": made(options.device), "missing": missing, "problems": problems, "rows": rows}, render)
    failed = problems or not rows or any(row["scan"] != row["plain"] for row in rows if not row["apart"])
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
