"""Random numbers that a program draws in 16 bits: those that it draws in fp32, rounded.

From one seed torch draws other numbers in another dtype. Two runs of a program that draws in the
dtype of a model, as diffusers draws latents, would differ by these.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.torchkit.devices import default_generator
from lowprec_check.torchkit.dispatch_mode import is_without_values
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.source_location import own_line

_NEW = ("rand", "randn", "rand_like", "randn_like")
_IN_PLACE = ("normal_", "uniform_", "exponential_")
_ROUNDING = 2**-5
"""Relative difference of two draws that is no rounding, of any dtype with 16 bits."""


class Draws:
    """Where a program draws numbers in 16 bits that are not those of fp32, rounded."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """``infer.py:21``, each once."""

    @contextlib.contextmanager
    def as_in_fp32(self) -> Iterator[None]:
        """Inside, what is drawn in 16 bits are the numbers of fp32, rounded."""
        with contextlib.ExitStack() as stack:
            for name in _NEW:
                stack.enter_context(replaced(torch, name, self._new(getattr(torch, name))))
            for name in _IN_PLACE:
                stack.enter_context(replaced(Tensor, name, self._in_place(getattr(Tensor, name))))
            yield

    def _new(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def draw(*args: Any, **options: Any) -> Tensor:
            if is_compiling() or is_without_values():
                return function(*args, **options)
            like = args[0] if args and isinstance(args[0], Tensor) else None
            dtype, device = options.get("dtype"), options.get("device")
            if dtype is None:
                dtype = like.dtype if like is not None else torch.get_default_dtype()
            if device is None:
                device = like.device if like is not None else torch.get_default_device()
            is_meta = torch.device(device).type == "meta"  # it has no numbers
            if dtype not in NARROW or is_meta or options.get("out") is not None:
                return function(*args, **options)
            requires_grad = options.pop("requires_grad", False)
            with _same_state(options.get("generator") or default_generator(device)):
                by_itself = function(*args, **{**options, "dtype": dtype})
            numbers = function(*args, **{**options, "dtype": torch.float32})
            self._note(by_itself, numbers)
            return numbers.to(dtype).requires_grad_(requires_grad)

        return draw

    def _in_place(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def draw(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if is_compiling() or is_without_values() or tensor.dtype not in NARROW or tensor.is_meta:
                return function(tensor, *args, **options)
            with _same_state(options.get("generator") or default_generator(tensor.device)):
                by_itself = function(tensor.detach().clone(), *args, **options)
            numbers = function(torch.empty_like(tensor, dtype=torch.float32), *args, **options)
            self._note(by_itself, numbers)
            return tensor.copy_(numbers)

        return draw

    def _note(self, by_itself: Tensor, numbers: Tensor) -> None:
        """Keep where numbers were drawn that are not those of fp32."""
        difference = (by_itself.float() - numbers).abs() > _ROUNDING * numbers.abs().clamp(min=_ROUNDING)
        line = own_line(sys._getframe(2))
        if line is not None and line not in self.lines and bool(difference.any()):
            self.lines.append(line)


@contextlib.contextmanager
def _same_state(generator: torch.Generator) -> Iterator[None]:
    """Inside, numbers may be drawn that do not count."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
