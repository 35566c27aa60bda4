"""What a run leaves behind in its process: settings, patches, threads, hooks. A worker with leftovers is not used for another run.

What the snapshot of a model restores is not a leftover. Not seen: kernels that are registered with torch, and what native libraries keep.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lowprec_check.engine.core.devices import release_memory
from lowprec_check.engine.core.source_location import is_installed, is_user_code
from lowprec_check.process.interpreter import current_folder
from lowprec_check.schema.axes import DEVICES

MOST_HELD = 256 << 20
"""Bytes that may remain on an accelerator after a run: libraries keep work space there."""

_BACKENDS = (
    "cudnn",
    "cuda",
    "cuda.matmul",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
    "opt_einsum",
    "quantized",
    "mps",
)
_SWITCHES = ("enabled", "benchmark", "deterministic", "allow_tf32", "fp32_precision", "engine", "strategy")
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_PATCHED = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "math",
    "random",
    "builtins",
    "numpy",
    "os",
)
"""Modules whose functions a model may replace."""
_CONTAINERS = (dict, list, set, collections.deque)


class Leftovers:
    """The state of this process when it is made; :meth:`found` names what has changed since.

    Objects are compared by identity; they are kept alive, so that a new object cannot have the identity of an old one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        gc.freeze()  # what is loaded stays: a collection after each run need not visit it
        self._held = release_memory()
        self._known: list[Any] = []
        self._before = self._state()

    def found(self, *, parameters: bool = True) -> list[str]:
        """What the run left behind; ``parameters``: whether a write to a parameter counts."""
        held = release_memory() - self._held
        known, self._known = self._known, []
        after, left = self._state(), []
        self._known = known
        for name, value in self._before.items():
            if after.get(name) != value and (parameters or not name.startswith("values of")):
                left.append(name)
        added = [name for name in after if name not in self._before and name.startswith("parameter")]
        memory = [f"{held / 2**20:.0f} MiB on the accelerator"] if held > MOST_HELD else []
        return [*left, *added, *memory]

    def _state(self) -> dict[str, Any]:
        with warnings.catch_warnings():  # reading some settings warns
            warnings.simplefilter("ignore")
            return dict(self._read())

    def _read(self) -> Iterator[tuple[str, Any]]:
        for name, read in _SETTINGS.items():
            yield name, _value(read)
        yield from _backend_settings()
        for name, content in _namespaces():
            for key, value in content.items():
                if callable(value):
                    self._known.append(value)
                    yield f"{name}.{key}", id(value)
        for name, content in _user_modules():
            yield f"module {name}", self._identities(content)
        yield from self._of_model()

    def _identities(self, content: dict[str, Any]) -> list[tuple[str, int, Any]]:
        """Which objects a user's module holds, and what is in its containers."""
        found = []
        for key, value in content.items():
            if key.startswith("__"):
                continue
            self._known.append(value)
            found.append((key, id(value), self._inside(value)))
        return found

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return None if value.is_inference() else value._version
        if isinstance(value, type):
            return self._methods(value)
        if type(value) not in _CONTAINERS:
            return None
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        self._known += items
        return [id(item) for item in items]

    def _methods(self, kind: type) -> list[tuple[str, int]]:
        """The functions of a class; its other attributes are restored by the snapshot."""
        methods = {name: value for name, value in vars(kind).items() if callable(value)}
        self._known += methods.values()
        return [(name, id(value)) for name, value in methods.items()]

    def _of_model(self) -> Iterator[tuple[str, Any]]:
        for kind in {kind for module in self._model.modules() for kind in type(module).__mro__}:
            yield f"class {kind.__module__}.{kind.__qualname__}", self._methods(kind)
        for name, module in self._model.named_modules():
            counts = [
                len(value) for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)
            ]
            yield f"module of the model {name or '(root)'}", (id(module), type(module), module.training, counts)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            yield (
                f"parameter {name}",
                (id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad is None, _place(tensor)),
            )
        for name, parameter in self._model.named_parameters():
            yield f"values of {name}", None if parameter.is_inference() else parameter._version


def _place(tensor: Tensor) -> Any:
    with contextlib.suppress(Exception):  # a sparse or lazy tensor has no storage
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    return None


def _value(read: Callable[[], Any]) -> Any:
    """What ``read`` returns; the type of its exception, if this torch or this state has no answer."""
    try:
        return read()
    except Exception as error:
        return type(error).__name__


def _flushes_denormals() -> bool:
    return not bool((torch.full((1,), 1e-40) * 1.0).any())


def _threads() -> set[int | None]:
    """The threads that Python knows, without those that have ended."""
    return {thread.ident for thread in threading.enumerate() if thread.is_alive()}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _autocast() -> list[Any]:
    return [
        (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
        for name in DEVICES.names()
        if torch.amp.is_autocast_available(name)
    ]


def _hooks() -> list[int]:
    return [
        len(value)
        for key, value in vars(module_hooks).items()
        if key.startswith("_global_") and isinstance(value, dict)
    ]


_SETTINGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the grad mode": torch.is_grad_enabled,
    "the inference mode": torch.is_inference_mode_enabled,
    "the anomaly mode": torch.is_anomaly_enabled,
    "the number of threads": torch.get_num_threads,
    "the precision of fp32 products": torch.get_float32_matmul_precision,
    "deterministic algorithms": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    ),
    "autocast": _autocast,
    "the cache of autocast": torch.is_autocast_cache_enabled,
    "the fast path of attention": torch.backends.mha.get_fastpath_enabled,
    "flushing of denormals": _flushes_denormals,
    "modes of torch": lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    "global hooks": _hooks,
    "the current folder": current_folder,
    "environment variables": lambda: dict(os.environ),
    "the module path": lambda: list(sys.path),
    "signal handlers": _handlers,
    "the recursion limit": sys.getrecursionlimit,
    "tracing": lambda: (sys.gettrace(), sys.getprofile(), sys.excepthook),
    "garbage collection": gc.isenabled,
    "standard streams": lambda: (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
    "processor cores": lambda: os.sched_getaffinity(0),
    "priority": lambda: os.nice(0),
    "threads": _threads,
    "processes": _children,
}
"""Settings of the whole process that a model may change, and how they are read."""


def _backend_settings() -> Iterator[tuple[str, Any]]:
    for path in _BACKENDS:
        backend: Any = torch.backends
        for part in path.split("."):
            backend = getattr(backend, part, None)
        for switch in (*_SWITCHES, *_REDUCED):
            yield f"torch.backends.{path}.{switch}", _value(functools.partial(getattr, backend, switch, None))
    for name in _ATTENTION:
        yield f"torch.backends.cuda.{name}", _value(getattr(torch.backends.cuda, name, lambda: None))


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """The modules and classes that a model may patch."""
    for name in _PATCHED:
        if name in sys.modules:
            yield name, dict(vars(sys.modules[name]))
    yield "torch.Tensor", dict(vars(torch.Tensor))
    for name, kind in list(vars(nn).items()):
        if isinstance(kind, type):
            yield f"torch.nn.{name}", dict(vars(kind))


def _user_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """The modules that the user wrote, which hold what their functions remember."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(module, types.ModuleType)
            and not type(module).__module__.startswith(
                "torch."
            )  # torch.ops, whose namespaces are made when they are used
            and isinstance(file, str)
            and is_user_code(file)
            and not is_installed(file)
        ):
            yield name, dict(vars(module))
