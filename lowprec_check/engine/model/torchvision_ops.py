"""Python replacements for torchvision's compiled ops, if those do not load with this torch.

They define the schemas that ``import torchvision`` expects, and kernels for its detectors. The
kernels support the same dtypes as torchvision's CPU kernels and raise the same errors
(``csrc/ops/cpu/nms_kernel.cpp``: fp32, fp64; ``roi_align_kernel.cpp``: fp16 too), and run in fp32
under autocast (``csrc/ops/autocast``). Statuses and gaps are therefore those of the compiled ops,
but times are not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from lowprec_check.errors import message_of

NOTE = (
    "torchvision's compiled ops do not load with this torch: nms and roi_align are Python replacements that support "
    "the same dtypes, so the measured times do not apply to the compiled ops"
)

_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_ROWS, _REGIONS = 256, 64
"""Boxes and regions that are computed at a time, to save memory."""
_libraries: list[Any] = []


@contextlib.contextmanager
def torchvision_works() -> Iterator[None]:
    """In this context, torchvision can be imported even if its compiled ops do not load."""
    finder = _TorchvisionFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Finds torchvision where it is, and makes it load."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The usual spec of torchvision, with a loader that repeats a failed import."""
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_import_torchvision, loader.exec_module)
        return spec


def _import_torchvision(execute: Callable[[Any], None], module: Any) -> None:
    """Import torchvision; if its compiled ops do not load, again with the replacements."""
    try:
        execute(module)
    except RuntimeError as error:
        if "nms does not exist" not in message_of(error):
            raise
        # The ops that it expects, once
        if not _libraries:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define(
                "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
                "int sampling_ratio, bool aligned) -> Tensor"
            )
            kernels = (("nms", nms, _nms_in_fp32), ("roi_align", roi_align, _roi_align_in_fp32))
            for op, kernel, under_autocast in kernels:
                library.impl(op, kernel, "CPU")
                library.impl(op, under_autocast, "AutocastCPU")
            _libraries.append(library)
        execute(module)
        # Its functions check that compiled ops are loaded
        for name in ("torchvision.ops.boxes", "torchvision.ops.roi_align"):
            content = importlib.import_module(name).__dict__
            content["_assert_has_ops"] = lambda: None
            if "_has_ops" in content:
                content["_has_ops"] = lambda: True


def declared() -> bool:
    """Whether the replacements are in use."""
    return bool(_libraries)


def replaced_in(model: torch.nn.Module) -> bool:
    """Whether the replacements are in use, and a module of ``model`` may call them."""
    users = ("torchvision.models.detection", "torchvision.ops")
    return declared() and any(type(module).__module__.startswith(users) for module in model.modules())


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices (int64) of the boxes kept, by descending score: they remove those that they overlap.

    Args:
        dets: boxes (N, 4) as x1, y1, x2, y2; fp32 or fp64.
        scores: (N), of the same dtype.
        iou_threshold: on intersection over union.
    """
    if dets.dtype != scores.dtype:
        raise RuntimeError("dets should have the same type as scores")
    _raise_if_unsupported(dets, "nms_kernel", torch.float16, torch.bfloat16)
    order = scores.sort(descending=True).indices
    boxes = dets[order]
    kept = torch.ones(len(order), dtype=torch.bool)
    for start in range(0, len(order), _ROWS):
        # Intersection over union of some boxes with all
        some = boxes[start : start + _ROWS]
        sides = torch.minimum(some[:, None, 2:], boxes[:, 2:]) - torch.maximum(some[:, None, :2], boxes[:, :2])
        common = sides.clamp(min=0).prod(2)
        areas = [(rows[:, 2:] - rows[:, :2]).prod(1) for rows in (some, boxes)]
        union = areas[0][:, None] + areas[1] - common
        overlaps = (common / union).nan_to_num(0.0)  # of an empty union: 0
        for row, overlapping in enumerate(overlaps > iou_threshold, start):
            if kept[row]:
                kept[row + 1 :].logical_and_(overlapping[row + 1 :].logical_not())
    return order[kept]


def roi_align(input: Tensor, rois: Tensor, *options: Any) -> Tensor:
    """Features (K, C, height, width) of ``rois`` (K, 5) in ``input`` (N, C, H, W), not in bf16."""
    if input.dtype != rois.dtype:
        raise RuntimeError("input should have the same type as rois")
    _raise_if_unsupported(input, "roi_align_forward_kernel", torch.bfloat16)
    plain = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__
    parts = [plain(input, some, *options) for some in rois.split(_REGIONS)]
    return torch.cat(parts).to(input.dtype)


def _raise_if_unsupported(tensor: Tensor, kernel: str, *dtypes: torch.dtype) -> None:
    if tensor.dtype in dtypes:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{_NAMES[tensor.dtype]}'")


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _nms_in_fp32(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        kept: Tensor = torch.ops.torchvision.nms(dets.float(), scores.float(), iou_threshold)
    return kept


def _roi_align_in_fp32(input: Tensor, rois: Tensor, *options: Any) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        aligned: Tensor = torch.ops.torchvision.roi_align(input.float(), rois.float(), *options)
    return aligned.to(input.dtype)
