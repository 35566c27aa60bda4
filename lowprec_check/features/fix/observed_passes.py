"""Which calls of models each backward pass of a script follows from, and in which function."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.features.fix.seen_values import ForwardPass, ScriptPlace
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import is_own_file, source_lines

_LAST = 8
"""Calls at one place that are kept for a later backward pass: each keeps what it has saved."""


class _Frame(NamedTuple):
    """A function of the user's own that runs, and what it calls."""

    number: int  # the id, which another function may have later
    code: CodeType
    place: ScriptPlace


class _Forward(NamedTuple):
    stack: list[_Frame]
    nodes: list[Any]  # of autograd, of its results


def place_of(frame: FrameType) -> ScriptPlace:
    """The call that runs in the innermost function of the user's own."""
    own = (at.f_code.co_filename for at, _ in traceback.walk_stack(frame) if is_own_file(at.f_code.co_filename))
    return ScriptPlace(*source_lines(frame), next(own, ""))


def own_frames(frame: FrameType) -> list[_Frame]:
    """The functions of the user's own files on the stack, the outermost first."""
    own = [at for at, _ in traceback.walk_stack(frame) if is_own_file(at.f_code.co_filename)]
    return [_Frame(id(at), at.f_code, place_of(at)) for at in reversed(own)]


class ObservedPasses:
    """The passes of a script, forward and backward."""

    def __init__(self) -> None:
        self._is_inside = False  # a call of a model
        self._forwards: dict[tuple[ScriptPlace, ...], list[_Forward]] = {}
        self._earlier: list[_Forward] = []  # before the last step
        self._passes: dict[ScriptPlace, dict[ScriptPlace, None]] = {}

    @property
    def passes(self) -> tuple[ForwardPass, ...]:
        """By the calls that lead to a backward pass."""
        return tuple(ForwardPass(backward, tuple(forward)) for backward, forward in self._passes.items())

    @contextlib.contextmanager
    def calling(self, frame: FrameType, output: list[Any]) -> Iterator[None]:
        """Around a call of a model in ``frame``, which appends its result to ``output``."""
        if self._is_inside:
            yield
            return
        stack = own_frames(frame)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        tensors = [tensor for _, tensor in leaves(output)]
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if nodes:
            here = self._forwards.setdefault(tuple(frame.place for frame in stack), [])
            here.append(_Forward(stack, nodes))
            del here[:-_LAST]

    def backward(self, losses: Sequence[Tensor], frame: FrameType) -> None:
        """A backward pass of ``losses`` begins in ``frame``."""
        stack, reached = own_frames(frame), _reached(losses)
        kept = [*self._earlier, *itertools.chain(*self._forwards.values())]
        for forward in [forward for forward in kept if not reached.isdisjoint(forward.nodes)]:
            # The innermost function that runs in both
            same = 0
            for ours, theirs in zip(stack, forward.stack, strict=False):
                if ours[:2] != theirs[:2]:
                    break
                same += 1
                if ours.place != theirs.place:
                    break
            if same:
                places = self._passes.setdefault(stack[same - 1].place, {})
                places[forward.stack[same - 1].place] = None

    def step(self) -> None:
        """An optimizer made its step: free what is not needed later; a generator's pass may be."""
        self._earlier = list(itertools.chain(*self._forwards.values()))
        self._forwards = {}


def _reached(losses: Sequence[Tensor]) -> set[Any]:
    """The nodes of autograd that a backward pass of ``losses`` reaches."""
    waiting, reached = [loss.grad_fn for loss in losses], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions]
    return reached


def add_noise(module: nn.Module, seen: set[int], generator: Any, size: float) -> None:
    """Change the weights of a module by noise, relative to each; once for each weight."""
    for parameter in module.parameters():
        if parameter.is_leaf and parameter.is_floating_point() and id(parameter) not in seen:
            seen.add(id(parameter))
            with torch.no_grad():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(size * noise * parameter)
