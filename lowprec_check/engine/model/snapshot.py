"""Saves the state of a model and the global state that a run may change, and restores both in place."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The saved state; :meth:`restore` may be called repeatedly.

    Parameters keep their storage, buffers are restored by value. All other attributes of modules (caches, counters,
    lists) are replaced with deep copies for the run, so that the user's own objects are never changed. Gradients are
    removed until :meth:`restore`, because a cast would cast them too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(module.__dict__)) for module in model.modules()]
        self._registries = [
            {key: dict(state[key]) for key in _REGISTRIES if isinstance(state.get(key), dict)}
            for _, state in self._modules
        ]
        self._parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
        self._buffers = [(b, b.detach().clone()) for b in model.buffers()]
        self._rng = torch.get_rng_state()
        self._python_rng = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy_rng = numpy.random.get_state() if numpy is not None else None
        self._grad = torch.is_grad_enabled()
        self._default_dtype = torch.get_default_dtype()
        for parameter, *_ in self._parameters:
            parameter.grad = None
        self._replace_with_copies()

    def restore(self) -> None:
        """Restore the saved state; the copies made for the run are dropped."""
        self._restore_modules()
        with torch.no_grad():
            for parameter, data, grad, requires_grad in self._parameters:
                parameter.data = data
                parameter.grad = grad
                parameter.requires_grad_(requires_grad)
            for buffer, values in self._buffers:
                if not _is_strided(buffer) or not torch.equal(buffer, values):
                    buffer.copy_(values)
        torch.set_rng_state(self._rng)
        random.setstate(self._python_rng)
        if self._numpy_rng is not None:
            sys.modules["numpy"].random.set_state(self._numpy_rng)
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._default_dtype)

    def rewind(self) -> None:
        """:meth:`restore`, and ready for another run."""
        self.restore()
        for parameter, *_ in self._parameters:
            parameter.grad = None
        self._replace_with_copies()

    def _restore_modules(self) -> None:
        for (module, state), registries in zip(self._modules, self._registries, strict=True):
            module.__dict__.clear()
            module.__dict__.update(state)
            for key, content in registries.items():
                state[key].clear()
                state[key].update(content)

    def _replace_with_copies(self) -> None:
        """Replace attributes other than parameters, buffers and modules with copies; objects shared by modules stay shared."""
        memo: dict[int, Any] = {}
        for module, _ in self._modules:
            memo[id(module)] = module
        for tensor in (*(p for p, *_ in self._parameters), *(b for b, _ in self._buffers)):
            memo[id(tensor)] = tensor
        for module, state in self._modules:
            for key, value in state.items():
                if key not in _REGISTRIES:
                    module.__dict__[key] = _copy(value, memo, shallow=key.startswith("_") and "hook" in key)


_CONTAINERS = (dict, OrderedDict, set, list)
_PLAIN = (int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device)


def _copy(value: Any, memo: dict[int, Any], *, shallow: bool) -> Any:
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)):
        return value
    if shallow or (isinstance(value, (dict, set, list)) and not value):
        return value.copy() if type(value) in _CONTAINERS else copy.copy(value)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # non-leaf tensors and generators are copied below; locks and files stay the user's own
        return _copy_tensor_or_generator(value)


def _copy_tensor_or_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
