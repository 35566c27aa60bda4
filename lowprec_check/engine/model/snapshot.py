"""Saves the state of a model and the global state that a run may change, and restores both in place."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.core.accelerators import initialized
from lowprec_check.engine.model.object_state import ObjectState, class_state, restore_tensor, saved_tensor

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The saved state; :meth:`restore` may be called repeatedly.

    Parameters keep their storage; their values are saved only if ``parameters`` is true, because few models write to
    them. Buffers and everything else that modules, their hooks and methods refer to are restored by value, in place.
    Gradients are removed until :meth:`restore`, because a cast would cast them too.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        self._modules = [(module, dict(module.__dict__)) for module in model.modules()]
        self._registries = [
            {key: dict(state[key]) for key in _REGISTRIES if isinstance(state.get(key), dict)}
            for _, state in self._modules
        ]
        self._parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
        saved = [*model.buffers(), *(model.parameters() if parameters else ())]
        self._values = [(tensor, *saved_tensor(tensor)) for tensor in saved]
        self._objects = self._save_objects(model)
        self._rng = torch.get_rng_state()
        self._device_rng = [(module, module.get_rng_state_all()) for module in initialized()]
        self._python_rng = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy_rng = numpy.random.get_state() if numpy is not None else None
        self._grad = torch.is_grad_enabled()
        self._default_dtype = torch.get_default_dtype()
        self._remove_gradients()

    def _save_objects(self, model: nn.Module) -> ObjectState:
        """The state of all other objects that the modules refer to."""
        roots: list[Any] = []
        known: list[Any] = [*model.parameters(), *model.buffers()]
        for module, state in self._modules:
            known += [module, *(state[key] for key in _REGISTRIES if key in state)]
            roots += [value for key, value in state.items() if key not in _REGISTRIES]
            roots += class_state(module)
        return ObjectState(roots, known)

    def restore(self) -> None:
        """Restore the saved state."""
        for (module, state), registries in zip(self._modules, self._registries, strict=True):
            module.__dict__.clear()
            module.__dict__.update(state)
            for key, content in registries.items():
                state[key].clear()
                state[key].update(content)
        self._objects.restore()
        with torch.no_grad():
            for parameter, data, grad, requires_grad in self._parameters:
                parameter.data = data
                parameter.grad = grad
                parameter.requires_grad_(requires_grad)
        for tensor, data, values in self._values:
            restore_tensor(tensor, data, values)
        torch.set_rng_state(self._rng)
        for device, states in self._device_rng:
            device.set_rng_state_all(states)
        random.setstate(self._python_rng)
        if self._numpy_rng is not None:
            sys.modules["numpy"].random.set_state(self._numpy_rng)
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._default_dtype)

    def rewind(self) -> None:
        """:meth:`restore`, and ready for another run."""
        self.restore()
        self._remove_gradients()

    def _remove_gradients(self) -> None:
        for parameter, *_ in self._parameters:
            parameter.grad = None
