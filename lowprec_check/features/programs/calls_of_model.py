"""The calls of a model that a program makes: a few are kept with copies of their inputs.

Kept are the first, the last, the one with the largest input, and those of other shapes or dtypes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.torchkit.output_comparison import same_values
from lowprec_check.torchkit.pytree import leaves, map_tensors

MOST = 6
"""Calls of a model that are kept."""
_LARGER = 1.25
"""So many times the largest input up to now an input is that counts as another largest one."""


class CallCopy(NamedTuple):
    """A call with copies of its inputs."""

    number: int
    """1 for the first call of the model."""
    line: str | None  # `infer.py:12`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    magnitude: float
    """The largest of the floating-point inputs; NaN and infinities do not count."""
    form: str
    """Shapes, up to a factor of 2, and dtypes of the inputs."""


class CallsOfModel:
    """The calls of a module, or of one of its methods."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.module, self.method = module, method
        self.count = 0
        self._kept: list[CallCopy] = []
        self._last: tuple[int, str | None, Any, list[tuple[Tensor, int]]] | None = None
        """The last call by reference, with the versions of its tensors: most are not kept."""

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: str | None) -> None:
        """Count a call that is about to be made, and keep it if it differs from those before."""
        self.count += 1
        tensors = [tensor for _, tensor in leaves((args, kwargs))]
        form, magnitude = _form(tensors), _magnitude(tensors)
        largest = max((call.magnitude for call in self._kept), default=-1.0)
        is_new = all(call.form != form for call in self._kept)
        if is_new or magnitude > _LARGER * largest:
            self._keep(CallCopy(self.count, line, *copied((args, kwargs)), magnitude, form))
            self._last = None
        else:
            given = map_tensors((args, kwargs), lambda tensor: tensor)
            self._last = self.count, line, given, [(tensor, _version(tensor)) for tensor in tensors]

    def _keep(self, call: CallCopy) -> None:
        self._kept.append(call)
        if len(self._kept) < MOST:
            return
        # One of a form that several have, else of those in the middle: the last needs a place
        largest = max(kept.magnitude for kept in self._kept)
        forms = [kept.form for kept in self._kept]
        spare = [kept for kept in self._kept[1:] if kept.magnitude < largest]
        repeated = [kept for kept in spare if forms.count(kept.form) > 1]
        self._kept.remove((repeated or spare or self._kept[1:])[0])

    def kept(self) -> list[CallCopy]:
        """The calls that are kept, with the last if its inputs are as they were."""
        calls = list(self._kept)
        if self._last is not None:
            number, line, (args, kwargs), versions = self._last
            if all(_version(tensor) == version for tensor, version in versions):
                tensors = [tensor for tensor, _ in versions]
                calls.append(CallCopy(number, line, *copied((args, kwargs)), _magnitude(tensors), _form(tensors)))
        different: list[CallCopy] = []
        for call in calls:
            if not any(same_values((call.args, call.kwargs), (other.args, other.kwargs)) for other in different):
                different.append(call)
        return different


def copied(given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of their tensors, without gradients."""
    copies: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(given, lambda tensor: tensor.detach().clone())
    return copies


def _form(tensors: list[Tensor]) -> str:
    return " ".join(f"{tensor.dtype}{[size.bit_length() for size in tensor.shape]}" for tensor in tensors)


def _magnitude(tensors: list[Tensor]) -> float:
    largest = 0.0
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and tensor.layout == torch.strided:
            value = float(torch.linalg.vector_norm(tensor.detach().float(), math.inf))
            if math.isfinite(value):
                largest = max(largest, value)
    return largest


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
