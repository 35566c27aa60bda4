"""What a run leaves behind in its process (settings, patches, hooks): no other may use it then.

What the snapshot of a model restores is not a leftover. Not seen: kernels that are registered with
torch, and what native libraries keep.
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

from lowprec_check.process.interpreter import current_folder
from lowprec_check.schema.axes import DEVICES
from lowprec_check.torchkit.devices import release_memory
from lowprec_check.torchkit.source_location import is_installed, is_user_code

MOST_HELD = 256 << 20
"""Bytes that may remain on an accelerator after a run: libraries keep work space there."""
_BACKENDS = (
    *("cudnn", "cuda", "cuda.matmul", "opt_einsum", "quantized", "mps"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)
_SWITCHES = (
    *("enabled", "benchmark", "deterministic", "allow_tf32", "fp32_precision", "engine", "strategy"),
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"),
)
_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_PATCHED = (
    *("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special"),
    *("math", "random", "builtins", "numpy", "os"),
)
"""Modules whose functions a model may replace."""
_OF_DYNAMO = ("torch.manual_seed", "torch.nn.Module.__init__", "torch.nn.Module.__setstate__")
"""What Dynamo replaces for good, when it is imported or compiles first: it computes the same."""
_CONTAINERS = (dict, list, set, collections.deque)


class Leftovers:
    """The state of this process when it is made; :meth:`found` names what has changed since."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # What is loaded stays: a collection after each run need not visit it.
        gc.freeze()
        self._held = release_memory()
        # Objects are compared by identity: while they are alive, no new one has the same.
        self._alive: list[Any] = []
        self._before = self._state()

    def found(self, *, parameters: bool = True) -> list[str]:
        """What the run left behind; ``parameters``: whether a write to a parameter counts."""
        held = release_memory() - self._held
        # The objects of the first state stay alive, those of this one need not.
        alive, self._alive = self._alive, []
        after = self._state()
        self._alive = alive
        changed = [
            name
            for name, value in self._before.items()
            if after.get(name) != value and (parameters or not name.startswith("values of"))
        ]
        added = [name for name in after if name not in self._before and name.startswith("parameter")]
        memory = []
        if held > MOST_HELD:
            memory = [f"{held / 2**20:.0f} MiB on the accelerator"]
        return [*changed, *added, *memory]

    def _state(self) -> dict[str, Any]:
        # Reading some settings warns.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict((*self._of_process(), *self._of_model()))

    def _of_process(self) -> Iterator[tuple[str, Any]]:
        for name, read in _SETTINGS.items():
            yield name, _value(read)
        for path in _BACKENDS:
            backend: Any = torch.backends
            for part in path.split("."):
                backend = getattr(backend, part, None)
            for switch in _SWITCHES:
                yield f"torch.backends.{path}.{switch}", _value(functools.partial(getattr, backend, switch, None))
        for name in _ATTENTION:
            yield f"torch.backends.cuda.{name}", _value(getattr(torch.backends.cuda, name, lambda: None))
        patched = {name: sys.modules[name] for name in _PATCHED if name in sys.modules}
        kinds = {f"torch.nn.{name}": kind for name, kind in vars(nn).items() if isinstance(kind, type)}
        for name, namespace in {**patched, "torch.Tensor": Tensor, **kinds}.items():
            for key, value in dict(vars(namespace)).items():
                if callable(value) and f"{name}.{key}" not in _OF_DYNAMO:
                    self._alive.append(value)
                    yield f"{name}.{key}", id(value)
        # Modules that the user wrote, which hold what their functions remember; not those that are
        # made when they are used, as the namespaces of torch.ops.
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_made = not isinstance(module, types.ModuleType) or type(module).__module__.startswith("torch.")
            if not is_made and isinstance(file, str) and is_user_code(file) and not is_installed(file):
                yield f"module {name}", self._identities(module)

    def _of_model(self) -> Iterator[tuple[str, Any]]:
        for kind in {kind for module in self._model.modules() for kind in type(module).__mro__}:
            yield f"class {kind.__module__}.{kind.__qualname__}", self._methods(kind)
        for name, module in self._model.named_modules():
            hooks = [
                len(value) for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)
            ]
            yield f"module of the model {name or '(root)'}", (id(module), type(module), module.training, hooks)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            place = None
            with contextlib.suppress(Exception):  # a sparse or lazy tensor has no storage
                place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
            about = (id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad is None, place)
            yield f"parameter {name}", about
        for name, parameter in self._model.named_parameters():
            yield f"values of {name}", None if parameter.is_inference() else parameter._version

    def _identities(self, module: types.ModuleType) -> list[tuple[str, int, Any]]:
        """Which objects a user's module holds, and what is in its containers."""
        held: list[tuple[str, int, Any]] = []
        for key, value in dict(vars(module)).items():
            if key.startswith("__"):
                continue
            self._alive.append(value)
            inside: Any = None
            if isinstance(value, Tensor):
                inside = None if value.is_inference() else value._version
            elif isinstance(value, type):
                inside = self._methods(value)
            elif type(value) in _CONTAINERS:
                items = list(value)
                if isinstance(value, dict):
                    items += value.values()
                self._alive += items
                inside = [id(item) for item in items]
            held.append((key, id(value), inside))
        return held

    def _methods(self, kind: type) -> list[tuple[str, int]]:
        """The functions of a class; its other attributes are restored by the snapshot."""
        methods = {name: value for name, value in vars(kind).items() if callable(value)}
        if kind is nn.Module:
            methods = {name: value for name, value in methods.items() if f"torch.nn.Module.{name}" not in _OF_DYNAMO}
        self._alive += methods.values()
        return [(name, id(value)) for name, value in methods.items()]


def _value(read: Callable[[], Any]) -> Any:
    """What ``read`` returns; the type of its exception, if this torch or state has no answer."""
    try:
        return read()
    except Exception as error:
        return type(error).__name__


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
    "autocast": lambda: [
        (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
        for name in DEVICES.names()
        if torch.amp.is_autocast_available(name)
    ],
    "the cache of autocast": torch.is_autocast_cache_enabled,
    "the fast path of attention": torch.backends.mha.get_fastpath_enabled,
    "flushing of denormals": lambda: bool((torch.full((1,), 1e-40) * 1.0).any()),
    "modes of torch": lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    "global hooks": lambda: [
        len(value)
        for key, value in vars(module_hooks).items()
        if key.startswith("_global_") and isinstance(value, dict)
    ],
    "the current folder": current_folder,
    "environment variables": lambda: dict(os.environ),
    "the module path": lambda: list(sys.path),
    "signal handlers": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "the recursion limit": sys.getrecursionlimit,
    "tracing": lambda: (sys.gettrace(), sys.getprofile(), sys.excepthook),
    "garbage collection": gc.isenabled,
    "standard streams": lambda: (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
    "processor cores": lambda: os.sched_getaffinity(0),
    "priority": lambda: os.nice(0),
    "threads": lambda: {thread.ident for thread in threading.enumerate() if thread.is_alive()},
    "processes": lambda: {child.pid for child in psutil.Process().children(recursive=True)},
}
"""Settings of the whole process that a model may change, and how they are read."""
