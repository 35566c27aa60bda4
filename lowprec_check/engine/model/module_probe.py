"""Captures the output of one module, for a model whose own output holds nothing to compare (all zeros, ``None``, a text)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.output_comparison import is_zero
from lowprec_check.engine.core.source_location import module_names
from lowprec_check.engine.model.plain_run import OutputPart, output_parts, output_tensors, run_once
from lowprec_check.engine.model.prepared import Prepared


class ModuleOutput(NamedTuple):
    """The floating output of one call of a module."""

    module: str
    number: int
    """Which call of that module, counted from 1."""
    tensors: list[Tensor]


def last_informative_module(ready: Prepared, args: Any, kwargs: Any, seed: int) -> ModuleOutput | None:
    """The last module call of the model whose output is floating, finite and not all zeros; ``None`` if there is none."""
    found: list[ModuleOutput] = []

    def keep_last(name: str, number: int, output: Any) -> None:
        tensors = _floating(output)
        if tensors and all(bool(t.isfinite().all()) for t in tensors) and not all(map(is_zero, tensors)):
            found[:] = [ModuleOutput(name, number, tensors)]

    with _on_every_call(ready.model, keep_last):
        run_once(ready, args, kwargs, seed)
    return found[0] if found else None


def module_output(ready: Prepared, args: Any, kwargs: Any, seed: int, wanted: ModuleOutput) -> list[Tensor] | None:
    """The output of the same call of the same module as ``wanted``; ``None`` if it does not happen."""
    found: list[list[Tensor]] = []

    def keep_wanted(name: str, number: int, output: Any) -> None:
        if (name, number) == (wanted.module, wanted.number):
            found.append(_floating(output))

    with _on_every_call(ready.model, keep_wanted):
        run_once(ready, args, kwargs, seed)
    return found[0] if found else None


@contextlib.contextmanager
def kept_output(model: nn.Module, wanted: ModuleOutput | None) -> Iterator[list[OutputPart]]:
    """Yield a list that is given the tensors of the same call of the same module as ``wanted``, not copies of them."""
    found: list[OutputPart] = []

    def keep_wanted(name: str, number: int, output: Any) -> None:
        if wanted is not None and (name, number) == (wanted.module, wanted.number):
            found.extend(part for part in output_parts(output) if is_float(part.tensor) and part.tensor.numel())

    if wanted is None:
        yield found
        return
    with _on_every_call(model, keep_wanted):
        yield found


@contextlib.contextmanager
def _on_every_call(model: nn.Module, report: Any) -> Iterator[None]:
    """Call ``report(name, number, output)`` after every call of a submodule. A global hook keeps modules on their fast paths."""
    names, calls = module_names(model), Counter[str]()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(module)
        if name:
            calls[name] += 1
            report(name, calls[name], output)

    handle = register_module_forward_hook(hook)
    try:
        with compiled_code_in_eager():
            yield
    finally:
        handle.remove()


def _floating(output: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in output_tensors(output) if is_float(tensor) and tensor.numel()]
