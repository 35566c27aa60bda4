"""Saves the state of a model, of objects that it refers to and of torch, to restore it in place."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import os
import random
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.errors import message_of, type_name
from lowprec_check.torchkit.devices import generator_restorers
from lowprec_check.torchkit.pytree import attributes_of, slots_of, wrapped_in
from lowprec_check.torchkit.tensor_comparison import is_dense

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The state of a model, and the global state that a run may change, to restore repeatedly.

    Parameters keep their storage; their values are saved only if ``parameters`` is true, because
    few models write to them. All else that modules, their hooks and methods, and ``inputs`` refer
    to is restored by value, in place. Gradients are removed until then: a cast would cast them.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any] = (), *, parameters: bool = False) -> None:
        self._modules = [(module, type(module), dict(module.__dict__)) for module in model.modules()]
        self._registries = [
            {key: dict(state[key]) for key in _REGISTRIES if isinstance(state.get(key), dict)}
            for _, _, state in self._modules
        ]
        self._scripted = [
            (module, name, buffer)
            for module in model.modules()
            if isinstance(module, torch.jit.ScriptModule)  # keeps them outside Python; a cast replaces them
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
        saved = [*model.buffers(), *(model.parameters() if parameters else ())]
        self._values = [(tensor, *saved_tensor(tensor)) for tensor in saved]
        # All other state is found from attributes of modules and parameters, and the inputs
        roots: list[Any] = list(inputs)
        already_saved: list[Any] = [*model.parameters(), *model.buffers()]
        for module, kind, state in self._modules:
            already_saved += [module, *(state[key] for key in _REGISTRIES if key in state)]
            roots += [kind, *(value for key, value in state.items() if key not in _REGISTRIES)]
        roots += [value for parameter in model.parameters() for value in vars(parameter).values()]
        self._objects = ObjectState(roots, already_saved)
        settings = [functools.partial(_reset, read, write, read()) for read, write in _SETTINGS]
        self._globals: list[Callable[[], Any]] = [*generator_restorers(), *settings]
        self._remove_gradients()

    @property
    def notes(self) -> list[str]:
        """What cannot be saved, and so is not restored if the model changes it."""
        visible = "what one run changes in it is visible to later runs"
        return [
            f"the state of an object of type {kind} could not be saved ({why}): {visible}"
            for kind, why in self._objects.unsaved.items()
        ]

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
        # On an accelerator, all values are copied at once: comparing those of one would wait for
        # all that the device computes
        copies: dict[torch.device, list[tuple[Tensor, Tensor]]] = collections.defaultdict(list)
        for tensor, data, values, attributes in self._values:
            is_odd = data.is_conj() or data.is_neg() or tensor.is_inference()
            if data.device.type != "cpu" and not is_odd and _is_at(tensor, data) and is_dense(data):
                _refill(vars(tensor), attributes)
                copies[data.device].append((data, values))
            else:
                restore_tensor(tensor, data, values, attributes)
        with torch.no_grad():
            for pairs in copies.values():
                torch._foreach_copy_([data for data, _ in pairs], [values for _, values in pairs])
        for restore in self._globals:
            restore()

    def rewind(self) -> None:
        """:meth:`restore`, and ready for another run."""
        self.restore()
        self._remove_gradients()

    def _remove_gradients(self) -> None:
        for parameter, *_ in self._parameters:
            parameter.grad = None


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
"""Settings of torch that a model may change: what reads, and what writes them."""


def _reset(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
    if read() != value:  # some writes have effects of their own
        with contextlib.suppress(RuntimeError):
            write(value)


# -- The content of mutable Python objects, restored in place for all who refer to them
#
# Models keep state in many places: attributes, dictionaries that a hook fills, variables that a
# hook or a patched ``forward`` encloses, globals and class attributes that methods use. Copies
# would miss the references that hooks and closures hold.

_ATOMIC = (
    *(int, float, bool, str, bytes, complex, type(None), range, slice, torch.dtype, torch.device, torch.Size),
    *(types.ModuleType, types.BuiltinFunctionType, torch.layout, torch.memory_format),
)
_INTERNALS = (
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch._C", "torch.fx", "torch.jit", "torch.distributed"),
    "lowprec_check",
)
_CLOSED = ("numpy", "huggingface_hub", "filelock", "yaml")
"""Other packages that hold no state of models, such as those that transformers loads files with."""
_OPEN_STDLIB = ("types", "argparse", "builtins", "collections")
"""Packages of the standard library whose instances hold the user's data."""
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque, bytearray)


class ObjectState:
    """The content of all mutable objects that can be reached from ``roots``, to restore repeatedly.

    Not followed: the modules and tensors in ``already_saved``; modules of Python; the inside of
    torch and of the standard library. What cannot be restored stays as it is: iterators,
    thread-local and context variables. Objects are read past their own methods, which may fail;
    those that can be read by no other means are :attr:`unsaved`.
    """

    def __init__(self, roots: Iterable[Any], already_saved: Iterable[Any]) -> None:
        self.unsaved: dict[str, str] = {}
        """Why objects could not be saved, by class name."""
        self._restorers: list[Callable[[], Any]] = []
        self._empty: list[Any] = []
        self._seen = {id(item) for item in already_saved}
        self._alive: list[Any] = []  # keeps visited objects alive, so that their ids stay theirs
        pending = list(roots)
        while pending:
            value = pending.pop()
            kind = type(value)  # not `isinstance`, which asks an object for its class
            if issubclass(kind, _ATOMIC) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if kind in _CONTAINERS and not value:  # most attributes of a module: no hooks
                self._empty.append(value)
                continue
            self._alive.append(value)
            try:
                pending += self._save(value)
            except Exception as error:
                self.unsaved.setdefault(kind.__qualname__, f"{type_name(error)}: {message_of(error)}")

    def restore(self) -> None:
        """Restore the content of every object; one that cannot be restored is left as it is."""
        for container in self._empty:
            if container:
                container.clear()
        # One `suppress` for as many restorers as succeed, since entering it for each takes longer
        remaining, is_done = iter(self._restorers), False
        while not is_done:
            with contextlib.suppress(Exception):  # the next one goes on
                for restore in remaining:
                    restore()
                is_done = True

    def _save(self, value: Any) -> list[Any]:
        """Save the content of ``value`` and return the objects in it."""
        kind = type(value)
        if issubclass(kind, (tuple, frozenset)):
            items = tuple.__iter__(value) if issubclass(kind, tuple) else frozenset.__iter__(value)
            return [*items] if kind in (tuple, frozenset) else [*items, *self._save_attributes(value)]
        if issubclass(kind, (types.FunctionType, types.MethodType, functools.partial)):
            return self._save_function(value)
        if issubclass(kind, type):
            return self._save_class(value)
        if issubclass(kind, _CONTAINERS):
            content = _content_of(value)
            self._restorers.append(functools.partial(_refill, value, content))
            inside = [*content[0], *content[1]] if issubclass(kind, dict) else content
            return inside if kind in _CONTAINERS else [*inside, *self._save_attributes(value)]
        # Objects whose state is not in attributes
        if issubclass(kind, Tensor):
            self._restorers.append(functools.partial(restore_tensor, value, *saved_tensor(value)))
            return list(vars(value).values())
        restore: Callable[[], Any]
        if issubclass(kind, torch.Generator):
            restore = functools.partial(value.set_state, value.get_state())
        elif issubclass(kind, random.Random):
            restore = functools.partial(value.setstate, value.getstate())
        elif not kind.__module__.startswith("numpy"):
            return self._save_attributes(value)
        elif hasattr(value, "bit_generator"):
            restore = functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif hasattr(value, "flags") and hasattr(value, "copy") and value.flags.writeable:  # an array
            restore = functools.partial(value.__setitem__, ..., value.copy())
        else:
            return self._save_attributes(value)
        self._restorers.append(restore)
        return []

    def _save_function(self, value: Any) -> list[Any]:
        """Save what a function encloses, and the globals that it names."""
        if issubclass(type(value), types.MethodType):
            return [value.__self__, value.__func__]
        if issubclass(type(value), functools.partial):
            return [value.func, value.args, value.keywords]
        inside = [value.__defaults__, value.__kwdefaults__, vars(value)]
        # Of torch, globals of torch.nn only, where hooks for all modules are
        module, named = value.__module__ or "", value.__globals__
        if _is_open_package(module) and (not _is_of_torch(module) or module.startswith("torch.nn.")):
            for name in value.__code__.co_names:
                if name in named and not issubclass(type(named[name]), types.ModuleType):
                    self._restorers.append(functools.partial(named.__setitem__, name, named[name]))
                    inside.append(named[name])
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                self._restorers.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
                inside.append(cell.cell_contents)
        return inside

    def _save_class(self, value: type) -> list[Any]:
        """Save the attributes of a user's class, and return its methods and mutable attributes."""
        if not _is_open_package(value.__module__):
            return []
        own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
        # Without methods that an installed package has added to a class of torch: from
        # `nn.Module.smart_apply`, every model would reach all that `transformers` defines
        if _is_of_torch(value.__module__):
            functions = {name: item for name, item in own.items() if issubclass(type(item), types.FunctionType)}
            for name in functions.keys() - {"forward"}:
                is_installed = "-packages" + os.sep in functions[name].__code__.co_filename
                if is_installed and not _is_of_torch(functions[name].__module__ or ""):
                    del own[name]
        data = {name: item for name, item in own.items() if not issubclass(type(item), _METHODS)}
        self._restorers.append(functools.partial(_reset_attributes, value, data))
        return [*own.values(), *value.__bases__]

    def _save_attributes(self, value: Any) -> list[Any]:
        wrapped = wrapped_in(value)
        inside: list[Any] = [] if wrapped is None else [wrapped]
        if not _is_open_package(type(value).__module__):
            return inside
        inside.append(type(value))
        state = attributes_of(value)
        if state is not None:
            self._restorers.append(functools.partial(_refill, state, _content_of(state)))
            inside += state.values()
        for slot, content in slots_of(value):
            self._restorers.append(functools.partial(slot.__set__, value, content))
            inside.append(content)
        return inside


@functools.cache
def _is_open_package(module: str) -> bool:
    """Whether objects of a module are a user's, not inside Python, torch or this package."""
    root = module.partition(".")[0]
    return not module.startswith(_INTERNALS) and (
        root not in (*sys.stdlib_module_names, *_CLOSED) or root in _OPEN_STDLIB
    )


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def saved_tensor(tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The memory, a copy of the values and the attributes, for :func:`restore_tensor`."""
    return tensor.data, tensor.detach().clone(), _content_of(vars(tensor))


def _is_at(tensor: Tensor, data: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.data_ptr() == data.data_ptr() and tensor.shape == data.shape


def restore_tensor(tensor: Tensor, data: Tensor, values: Tensor, attributes: Any) -> None:
    """Give ``tensor`` its memory, values and attributes back."""
    _refill(vars(tensor), attributes)
    is_there = _is_at(tensor, data)
    if data.layout == torch.strided:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # dtypes that torch cannot compare
            if torch.equal(data, values) and is_there:
                return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if not is_there:
            tensor.data = data
        data.copy_(values)


_METHODS = (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)


def _reset_attributes(owner: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if vars(owner).get(name) is not value:
            with contextlib.suppress(Exception):
                setattr(owner, name, value)


def _content_of(container: Any) -> Any:
    """A copy of what a container holds, read past the methods of a subclass."""
    # Also past those of the elements: keys are not hashed
    kind = _base_of(container)
    if issubclass(kind, dict):
        return list(kind.keys(container)), list(kind.values(container))
    return list(kind.__iter__(container))


def _refill(container: Any, content: Any) -> None:
    """Make ``container`` hold ``content`` again; nothing is written if it still does."""
    kind = _base_of(container)
    if issubclass(kind, dict):
        keys, values = content
        same = kind.__len__(container) == len(keys) and all(map(operator.is_, kind.keys(container), keys))
        if same and all(map(operator.is_, kind.values(container), values)):
            return
        kind.clear(container)
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(container, key, value)
        return
    if kind.__len__(container) == len(content) and all(map(operator.is_, kind.__iter__(container), content)):
        return
    kind.clear(container)
    (kind.update if kind is set else kind.extend)(container, content)


def _base_of(container: Any) -> Any:
    """The built-in type of a container, whose methods a subclass may have replaced."""
    kind = type(container)
    if kind in _CONTAINERS:
        return kind
    return next(base for base in _CONTAINERS if issubclass(kind, base))
