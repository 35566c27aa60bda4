"""Saves the state of a model and the global state that a run may change, and restores both in place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.seed import generator_restorers
from lowprec_check.engine.model.object_state import ObjectState, restore_tensor, saved_tensor

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The saved state; :meth:`restore` may be called repeatedly.

    Parameters keep their storage; their values are saved only if ``parameters`` is true, because few models write to
    them. Buffers and everything else that modules, their hooks and methods, and the objects in ``inputs`` refer to are
    restored by value, in place. Gradients are removed until :meth:`restore`, because a cast would cast them too.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any] = (), *, parameters: bool = False) -> None:
        self._modules = [(module, type(module), dict(module.__dict__)) for module in model.modules()]
        self._registries = [
            {key: dict(state[key]) for key in _REGISTRIES if isinstance(state.get(key), dict)}
            for _, _, state in self._modules
        ]
        self._scripted = list(_scripted_buffers(model))
        self._parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
        saved = [*model.buffers(), *(model.parameters() if parameters else ())]
        self._values = [(tensor, *saved_tensor(tensor)) for tensor in saved]
        self._objects = self._save_objects(model, inputs)
        self._globals = list(_global_state())
        self._remove_gradients()

    def _save_objects(self, model: nn.Module, inputs: Iterable[Any]) -> ObjectState:
        """The state of all other objects that the modules and inputs refer to."""
        roots: list[Any] = list(inputs)
        known: list[Any] = [*model.parameters(), *model.buffers()]
        for module, kind, state in self._modules:
            known += [module, *(state[key] for key in _REGISTRIES if key in state)]
            roots += [kind, *(value for key, value in state.items() if key not in _REGISTRIES)]
        roots += [value for parameter in model.parameters() for value in vars(parameter).values()]
        return ObjectState(roots, known)

    def restore(self) -> None:
        """Restore the saved state."""
        for (module, kind, state), registries in zip(self._modules, self._registries, strict=True):
            if type(module) is not kind:  # by a parametrization
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)
            for key, content in registries.items():
                state[key].clear()
                state[key].update(content)
        for module, name, buffer in self._scripted:
            setattr(module, name, buffer)
        self._objects.restore()
        with torch.no_grad():
            for parameter, data, grad, requires_grad in self._parameters:
                parameter.data = data
                parameter.grad = grad
                if parameter.requires_grad != requires_grad:  # not allowed for one made in inference mode
                    parameter.requires_grad_(requires_grad)
        for saved in self._values:
            restore_tensor(*saved)
        for restore in self._globals:
            restore()

    def rewind(self) -> None:
        """:meth:`restore`, and ready for another run."""
        self.restore()
        self._remove_gradients()

    def _remove_gradients(self) -> None:
        for parameter, *_ in self._parameters:
            parameter.grad = None


def _scripted_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The buffers of scripted modules, which keep them outside Python; a cast replaces them."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            for name, buffer in module.named_buffers(recurse=False):
                yield module, name, buffer


def _global_state() -> Iterator[Callable[[], Any]]:
    """What restores the random number generators and the settings of torch that a model may change."""
    yield from generator_restorers()
    yield functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())
    yield functools.partial(torch.set_default_dtype, torch.get_default_dtype())
    for read, write in (
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ):
        yield functools.partial(_reset, read, write, read())


def _reset(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
    """Write a setting only if it has changed: some writes have effects of their own."""
    if read() != value:
        with contextlib.suppress(RuntimeError):
            write(value)
