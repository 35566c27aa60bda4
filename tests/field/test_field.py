"""What public reports say of a model is what a scan of it says: the cause, its place and the repair.

Each file of this folder is a small form of one report. Its text has the maintainers' answer; `# cause` is the line that
they changed, `# effect` the line where the fault shows, whose inputs they changed.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from helpers import scan_here, screen_of
from torch.utils._pytree import tree_flatten, tree_map

from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import short_op

FOLDER = Path(__file__).parent

FP32 = r"fp32"
DTYPE = r"use one dtype: create the tensor with dtype=x\.dtype, or cast it here|\.to\("
NUMBER = r"torch\.finfo\(x\.dtype\)"
EPSILON = r"constant of at least|clamp its input with a number that the dtype holds|clamp_min|finfo"


class Report(NamedTuple):
    """What the maintainers answered, in the words of a scan."""

    name: str
    """The file."""
    precision: str
    """The precision that was reported."""
    code: str
    """The rule; ``share`` if the sentence about shares of the error has to name the op."""
    op: str
    repair: str
    """What the advice has to match."""
    place: str = "cause"
    """The comment of the line that is named."""


NOT_NAMED = {"forced_token": "the assigned number is Inf before an op sees it, as a mask of -inf is"}
"""Reports whose cause is not named yet, and why."""

KNOWN_BEFORE = {"masked_scores": "https://github.com/huggingface/transformers/issues/35332"}
"""Reports of what an older one had reported, which a scan shows."""

REPORTS = [
    Report("affine_grid", "autocast-fp16", "share", "affine_grid_generator", r"build the grid in fp32"),
    Report("affine_svd", "half", "LP101", "linalg_svd", r"compute it in fp32 and cast back"),
    Report("box_areas", "half", "LP201", "prod", FP32),
    Report("box_coder", "half", "LP207", "log", EPSILON, "effect"),
    Report("class_offsets", "half", "LP303", "sub", r"inputs of this op in fp32", "effect"),
    Report("codebook_lookup", "half", "LP101", "cdist_forward", r"compute it in fp32"),
    Report("convit_positions", "half", "LP103", "addmm", DTYPE),
    Report("cosine_product", "half", "LP201", "mul", FP32),
    Report("degree_epsilon", "half", "LP206", "add", EPSILON),
    Report("demucs_input", "half", "LP103", "torch.nn.functional.conv1d", DTYPE),
    Report("dice_sum", "half", "LP201", "sum", FP32),
    Report("entmax_bisection", "bfloat16", "LP203", "div", r"ops in fp32", "effect"),
    Report("expanded_distance", "autocast-fp16", "LP203", "sqrt", r"ops in fp32", "effect"),
    Report("expert_choice", "bfloat16", "LP304", "topk", r"compute its inputs in fp32"),
    Report("favor_features", "half", "LP201", "exp", FP32),
    Report("flow_coordinates", "half", "share", "add", r"lowprec-check fix"),
    Report("forced_token", "half", "LP204", "fill", NUMBER),
    Report("gptneox_rope_tables", "half", "share", "mul", r"lowprec-check fix"),
    Report("harmonic_phase", "half", "share", "cumsum", r"lowprec-check fix"),
    Report("learned_inverse", "half", "LP101", "linalg_inv_ex", r"compute it in fp32 and cast back"),
    Report("linear_attention_sum", "half", "LP201", "sum", FP32),
    Report("local_attention_positions", "half", "LP304", "ge", r"compute its inputs in fp32", "effect"),
    Report("local_variance", "half", "LP203", "sqrt", r"ops in fp32", "effect"),
    Report("longt5_residual", "half", "LP201", "add", FP32),
    Report("masked_row", "half", "LP201", "mul", FP32),
    Report("masked_scores", "half", "LP204", "masked_fill", NUMBER),
    Report("mistral_inv_freq", "bfloat16", "share", "mul", r"with rope in fp32 the error is"),
    Report("nearest_start", "half", "LP204", "fill_", NUMBER),
    Report("norm_of_shards", "half", "LP201", "pow", FP32),
    Report("normalize_epsilon", "half", "LP206", "clamp_min", EPSILON),
    Report("nucleus_sampling", "bfloat16", "LP304", "gt", r"compute its inputs in fp32", "effect"),
    Report("point_prompts", "bfloat16", "LP103", "mm", DTYPE),
    Report("pooler_scale", "half", "LP201", "mul", FP32),
    Report("post_norm_weight", "half", "LP201", "to_copy", r"scale the values|bf16"),
    Report("quaternion_log", "half", "LP206", "clamp", EPSILON),
    Report("relu_linear_attention", "half", "LP201", "bmm", FP32),
    Report("rms_norm_square", "half", "LP201", "pow", r"keep norm in fp32"),
    Report("rope_positions", "bfloat16", "LP303", "cos", r"inputs of this op in fp32", "effect"),
    Report("saturated_endpoints", "bfloat16", "LP207", "log", EPSILON, "effect"),
    Report("scaled_timestep", "bfloat16", "share", "to_copy", r"lowprec-check fix"),
    Report("spectrum_encoding", "bfloat16", "LP303", "sin", r"inputs of this op in fp32", "effect"),
    Report("spline_flow", "autocast-fp16", "LP103", "index_put_", DTYPE),
    Report("t5_feed_forward", "autocast-fp16", "LP201", "mm", r"keep wo in fp32"),
    Report("unscaled_scores", "half", "LP201", "bmm", FP32),
    Report("vae_decoder", "autocast-fp16", "LP201", "convolution", r"keep up in fp32"),
    Report("valid_ratios", "half", "LP103", "addmm", DTYPE),
    Report("weight_demodulation", "half", "LP201", "sum", FP32),
]


def load(name: str) -> ModuleType:
    """The small form of a report."""
    spec = importlib.util.spec_from_file_location(f"field_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def scanned(name: str) -> ScanResult:
    """Its scan."""
    form = load(name)
    return scan_here(form.model(), form.inputs(), further_inputs=0)


def called(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output, called as a scan calls it."""
    with torch.no_grad():
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def plain(name: str, precision: str) -> Any:
    """The output of the model in ``precision``, made as users make it."""
    form = load(name)
    model, inputs = form.model(), form.inputs()
    dtype = torch.float16 if precision in ("half", "autocast-fp16") else torch.bfloat16
    if precision.startswith("autocast"):
        with torch.autocast("cpu", dtype=dtype):
            return called(model, inputs)
    cast = tree_map(lambda value: value.to(dtype) if value.is_floating_point() else value, inputs)
    return called(model.to(dtype), cast)


def error_of(output: Any, expected: Any) -> float:
    """The relative L2 error; Inf if anything is not finite."""
    difference, size = 0.0, 0.0
    for low, wide in zip(tree_flatten(output)[0], tree_flatten(expected)[0], strict=True):
        if not low.isfinite().all():
            return float("inf")
        difference += float((low.double() - wide.double()).square().sum())
        size += float(wide.double().square().sum())
    return (difference / size) ** 0.5


def line_of(report: Report) -> str:
    """``t5_feed_forward.py:19``, by its comment."""
    lines = (FOLDER / f"{report.name}.py").read_text(encoding="utf-8").splitlines()
    number = next(index for index, line in enumerate(lines, 1) if line.endswith(f"# {report.place}"))
    return f"{report.name}.py:{number}"


def said(report: Report) -> tuple[bool, str]:
    """Whether cause and place are named, and all advice about the run."""
    result, line = scanned(report.name), line_of(report)
    about = [each for each in result.diagnostics if each.precision == report.precision and each.severity != "note"]
    advice = [each.help or "" for each in about]
    advice += [each.known.repair for each in about if each.known is not None]
    advice += [each.text for each in result.statements if report.precision in each.runs]
    if report.code == "share":
        named = any(re.search(rf"\({report.op}, \S*{re.escape(line)}\)", text) for text in advice)
    else:
        places = {(each.code, short_op(each.op or ""), (each.source or "").rpartition("/")[2]) for each in about}
        named = (report.code, report.op, line) in places
    return named, "\n".join(advice)


def test_each_form_is_of_one_report() -> None:
    files = sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__))
    assert files == [each.name for each in REPORTS]
    links = [re.search(r"https://\S+", load(each.name).__doc__ or "") for each in REPORTS]
    assert len({link.group() for link in links if link}) == len(REPORTS) >= 40


def with_reason(report: Report) -> Any:
    """The report as a parameter of a test, marked if it is one of :data:`NOT_NAMED`."""
    reason = NOT_NAMED.get(report.name)
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(report, id=report.name, marks=marks)


@pytest.mark.parametrize("report", [with_reason(report) for report in REPORTS])
def test_a_report_is_answered_as_its_maintainers_did(report: Report) -> None:
    expected = called(load(report.name).model(), load(report.name).inputs())
    try:
        error = error_of(plain(report.name, report.precision), expected)
    except RuntimeError:
        error = float("inf")
    tolerance = PRECISIONS.get(report.precision).tolerance
    assert error > 2 * tolerance  # whatever the kernels of this machine

    named, advice = said(report)
    assert named
    assert re.search(report.repair, advice)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_what_is_recommended_for_a_report_passes(report: Report) -> None:
    result, form = scanned(report.name), load(report.name)
    advice = result.recommendation
    if advice is None:
        assert all(run.status != "ok" for run in result.runs if not run.is_reference and run.precision != "plan")
        return
    given = {"model": form.model(), "inputs": form.inputs()}
    exec(advice.code, given)
    error = error_of(given["output"], called(form.model(), form.inputs()))
    assert error <= PRECISIONS.get(advice.precision).tolerance


@pytest.mark.parametrize("report", [with_reason(report) for report in REPORTS])
def test_a_scan_shows_the_report_that_a_finding_is_like(report: Report) -> None:
    link = re.search(r"https://\S+", load(report.name).__doc__ or "")
    assert link is not None
    found = [each.known for each in scanned(report.name).diagnostics if each.precision == report.precision]
    links = {case.link for case in found if case is not None}
    assert links == {KNOWN_BEFORE.get(report.name, link.group())}


def test_a_screen_has_the_known_report_in_a_line() -> None:
    result = scanned("rms_norm_square")
    case = next(each.known for each in result.diagnostics if each.known is not None)
    assert case.evidence == "reported"
    lines = [line.strip() for line in screen_of(result, width=240).splitlines()]
    assert [line for line in lines if line.startswith("similar report: ")] == [case.text]
