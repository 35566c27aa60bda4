"""Memory of a model: the peak of a call, and freeing weights that only workers use."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.torchkit import devices
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.pytree import leaves, stored
from lowprec_check.torchkit.source_location import call_model

# -- The peak of a call: reported by the allocator of an accelerator, or counted from live storages


class MeasuredCall(NamedTuple):
    """The memory of a call of a model."""

    peak: int
    """Peak bytes of weights, buffers, inputs, what is kept beside them, and other live tensors; on
    a CPU without copies of weights that a backend made before.
    """
    output: Any
    """Its output, if the call was one as its user makes it; else ``None``."""


def measure_memory(
    ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int, kept: Iterable[Tensor] = ()
) -> MeasuredCall:
    """Call the model once; measure the memory that it takes with the tensors ``kept`` beside it."""
    inputs, named = ready.inputs(args, kwargs)
    counter, output, peak = _StorageCounter(ready, inputs, named, kept), None, None

    def work() -> None:
        nonlocal output
        with ready.context():
            output = call_model(ready.call, inputs, named)

    seed_everything(seed)
    if ready.device.type == "cpu":
        # fails if the user profiles this process, or torch has another profiler
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            peak = devices.peak_allocated(work)
    else:
        peak = devices.peak_memory(ready.device, work)
    if peak is not None:
        return MeasuredCall(counter.resident + peak, output)
    # Counted by a mode, under which the call is not as its user makes it
    output = None
    with compiled_code_in_eager(), counter:
        work()
    return MeasuredCall(counter.peak, None)


class _StorageCounter(DispatchMode):
    """Counts bytes of live storages: of model, inputs, tensors ``kept``, and what ops return."""

    def __init__(self, ready: Prepared, inputs: Any, named: Any, kept: Iterable[Tensor]) -> None:
        super().__init__()
        inside = [tensor for _, tensor in (*leaves(inputs), *leaves(named))]
        tensors = [*ready.model.parameters(), *ready.model.buffers(), *inside, *kept]
        storages = [tensor.untyped_storage() for tensor in _dense(tensors)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._resident_storages = set(sizes)
        self._live: dict[int, weakref.ref[Any]] = {}
        self._now = self.resident = self.peak = sum(sizes.values())

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Return the result of the op, whose storages are counted until they are freed."""
        out = run_op(func, args, kwargs, keys)
        for tensor in _dense(tensor for _, tensor in leaves(out)):
            self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.data_ptr() in self._resident_storages:
            return
        size = storage.nbytes()

        def drop(_: Any) -> None:
            del self._live[key]
            self._now -= size

        self._live[key] = weakref.ref(storage, drop)
        self._now += size
        self.peak = max(self.peak, self._now)


def _dense(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those with a storage of their own, or the ones inside them."""
    return stored(tensor for tensor in tensors if tensor.layout == torch.strided)


# -- A model that is only described here, and runs in processes that load it again


def on_accelerator(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is that of an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def free_weights(model: nn.Module, wanted: Callable[[Tensor], bool] = on_accelerator, but: Container[int] = ()) -> None:
    """Replace ``wanted`` tensors, but in modules with ids in ``but``, with ones without memory."""
    empty: dict[int, Tensor] = {}  # by id, so that what was shared stays shared
    old: list[Tensor] = []  # keeps ids unique
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or id(module) in but:
            continue
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is None or not wanted(tensor) or type(tensor) not in (Tensor, nn.Parameter):
                    continue
                old.append(tensor)
                meta = torch.empty_like(tensor, device="meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
                registry[name] = empty.setdefault(id(tensor), meta)
    if old:
        old.clear()
        devices.release_memory()
